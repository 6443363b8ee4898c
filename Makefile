# make train   sets up .venv and trains the default text-to-image model
# make test    sets up .venv and runs the tests (CPU); all that CI runs: ARGS=--ci
# make lint    sets up .venv and runs ruff, pyright and import-linter
# make docs    sets up .venv and writes the documentation to site/
# make test-next   compiles the kernels with the next JAX, in an environment of its own
#
# ARGS='...' is passed on to `python -m train` or pytest; PYTHON=... names the Python
# that makes .venv (found by itself otherwise).

.DEFAULT_GOAL := help
.PHONY: help train test lint docs test-next
export PYTHON

ARGS ?=
ACCELERATOR := $(shell tools/accelerator.sh)
comma := ,
ifeq ($(ACCELERATOR),)
# The CUDA plug-in that `make test` installs would complain about missing libraries.
export JAX_PLATFORMS ?= cpu
endif

TRAIN_EXTRAS := train$(addprefix $(comma),$(ACCELERATOR))
TEST_EXTRAS := train,analysis,test,dev
ifneq ($(ACCELERATOR),cuda12)
# The wheels that compile GPU code without a GPU are CUDA 13's.
TEST_EXTRAS := $(TEST_EXTRAS),compile
endif

help:
	@sed -n '/^# /s/^# //p;/^$$/q' Makefile

train:
	@tools/environment.sh $(TRAIN_EXTRAS)
	@.venv/bin/python -m train --attn=pallas $(ARGS)

test:
	@tools/environment.sh $(TEST_EXTRAS)
	@.venv/bin/python -m pytest -n auto --maxprocesses=8 --dist=worksteal $(ARGS)

lint:
	@tools/environment.sh $(TEST_EXTRAS)
	@.venv/bin/python -m pytest -q --ci tests/test_house.py $(ARGS)

docs:
	@tools/environment.sh docs
	@NO_MKDOCS_2_WARNING=1 .venv/bin/python -m mkdocs build --strict $(ARGS)
	@echo 'site/index.html; with search at http://localhost:8000: python -m http.server -d site'

# The newest JAX that the kernels compile with; constraints.txt has the usual one.
NEXT_JAX := 0.12.0.1
NEXT_TESTS := compile lowering dispatch fused head_dims in_place
# Without the tests of what parts spill: there a kernel is compiled once a process, and the
# report of a second program lacks it.
test-next:
	@tools/environment.sh test,compile $(NEXT_JAX)
	@.venv-jax-$(NEXT_JAX)/bin/python -m pytest -n auto --maxprocesses=8 \
		--dist=worksteal $(NEXT_TESTS:%=tests/test_kernels_%.py) \
		tests/test_context_parallel_kernels.py tests/test_ampere_fused.py \
		tests/test_ampere_key_numbers.py tests/test_ampere_query_gradient.py \
		tests/test_low_part.py \
		--ci -k "not spill_nothing" $(ARGS)
