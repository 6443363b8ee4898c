"""Times of training steps: what is counted, what is compared, what does not fit."""

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import pytest
from jax.errors import JaxRuntimeError

import analysis.step_case as module
from analysis.__main__ import main
from analysis.experiments.step_speed import CASES, compared
from analysis.model_flops import forward_flops
from analysis.step_case import StepCase, by_kind, kind_of
from attn_jax.timing import kernel_times
from train.assemble import assemble
from train.step import draw_examples, example_losses

pytestmark = pytest.mark.ci


def products(jaxpr) -> int:
    """Operations of all matrix products in a program, those inside others too."""
    total = 0
    for equation in jaxpr.eqns:
        for value in equation.params.values():
            inner = getattr(value, "jaxpr", value)
            total += products(inner) if hasattr(inner, "eqns") else 0
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            (left, _), out = (x.aval for x in equation.invars), equation.outvars[0].aval
            depth = 1
            for axis in contracted:
                depth *= left.shape[axis]
            total += 2 * out.size * depth
    return total


@pytest.mark.parametrize("name", ["tiny", "small", "base-patch-8", "large-no-remat"])
def test_operations_are_those_of_the_traced_model(name):
    config = dataclasses.replace(CASES[name], attn="baseline", batch_size=2)
    # Layers are alike: more than three show nothing else.
    model = dataclasses.replace(config.model, depth=min(3, config.model.depth))
    config = dataclasses.replace(config, model=model)
    assembly = assemble(config, jax.devices()[:1])
    resolution, length = config.data.resolution, config.model.text_length
    batch = {
        "image": jax.ShapeDtypeStruct((2, resolution, resolution, 3), jnp.uint8),
        "tokens": jax.ShapeDtypeStruct((2, length), jnp.int32),
    }

    def losses(params, batch):
        examples = draw_examples(config, batch, 0)
        return example_losses(assembly.parts, assembly.attention_fn, params, examples)

    traced = jax.make_jaxpr(losses)(assembly.abstract_state().params, batch)
    counted = products(traced.jaxpr)
    assert counted == 2 * forward_flops(config, assembly.tokenizer.vocab_size)


def row(**columns):
    return {"case": "a", "batch": 8, "part": "step", "ms": 2.0} | columns


def test_times_are_compared_at_the_same_batch_and_part():
    rows = compared(
        [
            row(implementation="baseline", ms=6.0),
            row(implementation="pallas"),
            row(implementation="cudnn", ms=3.0),
            row(implementation="pallas", batch=16),
            row(implementation="cudnn", part="both", ms=None),
        ]
    )
    assert [r["speedup"] for r in rows] == [1, 3, 2, None, None]
    assert [r["over_cudnn"] for r in rows] == [0.5, 1.5, 1, None, None]


def test_kernels_are_told_apart_by_their_names():
    names = {
        "attention_backward_fused_mosaic_gpu_kernel": "attention",
        "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma": "attention",
        "_ZN5cudnn6fusion28compute_dot_do_o_specializedILb1ELi64EEE": "attention",
        "nvjet_sm90_tst_144x128_64x6_2x1_v_bz_TTN": "products",
        "gemm_fusion_dot_212": "products",
        "input_add_reduce_fusion_8": "other",
        "gated_norm_backward_mosaic_gpu_kernel": "other",
    }
    assert {name: kind_of(name) for name in names} == names
    kernels = [
        row(implementation="pallas", kind=kind, ms=ms)
        for kind, ms in (("attention", 1.0), ("other", 2.0), ("other", 4.0))
    ]
    (line,) = by_kind(kernels)
    assert (line["attention"], line["products"], line["other"]) == (1, 0, 6)


def test_no_weight_is_zero_as_gates_are_before_training():
    state = StepCase(CASES["tiny"], ["baseline"], ["step"], 0.01)._state
    for leaf in jax.tree.leaves(state.params):
        assert jnp.count_nonzero(leaf) == leaf.size
    assert state.loss_scale.scale == 1 and state.step == 0


def test_what_is_held_has_the_state_in_it():
    case = StepCase(CASES["tiny"], ["baseline"], ["step"], 0.0, largest=True)
    assert "_state" not in vars(case)  # Nothing was timed, which would have made it.
    assert case._held >= 0
    assert "_state" in vars(case)


def test_a_trace_has_the_kernels_of_gpus_only():
    program = jax.jit(lambda x: x + 1)
    jax.block_until_ready(program(1.0))
    seen = kernel_times(lambda: jax.block_until_ready(program(1.0)))
    assert bool(seen) == (jax.default_backend() == "gpu")


def test_kernels_are_those_of_one_step(monkeypatch):
    """Of several that were traced, with what is left of the time of a step."""
    steps = []

    class Instant(module.Runner):
        def __init__(self):
            pass

        def milliseconds(self, runs):
            steps.append(runs)
            return 1.0

    def times(run):
        run()
        return [("gemm", 1.0), ("other", 0.25), ("gemm", 0.5)] * steps[-1]

    monkeypatch.setattr(module, "kernel_times", times)
    measured = row(N=20, implementation="pallas")
    rows = list(module._kernels(measured, Instant()))
    found = [(r["kind"], r["kernel"], r["launches"], r["ms"]) for r in rows]
    assert found == [
        ("products", "gemm", 2, 1.5),
        ("other", "other", 1, 0.25),
        ("between kernels", "", 3, 0.25),
    ]
    assert steps[0] >= 10  # The card is warm before.


def test_what_does_not_fit_is_tried_with_less(monkeypatch):
    """Bytes grow with the batch, the baseline's four times as fast."""
    compiled = []

    def fake(assembly, part, *, tuned=True):
        config = assembly.config
        compiled.append((config.attn, config.batch_size, tuned))
        if config.attn == "reference" and config.batch_size > 8:
            raise JaxRuntimeError("RESOURCE_EXHAUSTED: no room to try out products")
        each = 4 if config.attn == "baseline" else 1
        more = config.attn == "cudnn" and config.batch_size > 16
        return module.Program(
            part, assembly, None, False, each * config.batch_size + more, 1.0
        )

    class Instant(module.Runner):
        def __init__(self, program, state):
            pass

        def milliseconds(self, runs):
            return 1.0

    monkeypatch.setattr(module, "compile_part", fake)
    monkeypatch.setattr(module, "Runner", Instant)
    monkeypatch.setattr(StepCase, "_limit", 20.0)
    monkeypatch.setattr(StepCase, "_state", None)
    config = dataclasses.replace(CASES["tiny"], batch_size=16)
    # Of an assembly nothing is looked at but the configuration and the vocabulary.
    mesh = dataclasses.replace(config.mesh, data=1)
    one = assemble(dataclasses.replace(config, mesh=mesh), jax.devices()[:1])
    monkeypatch.setattr(
        module, "assemble", lambda config, _: dataclasses.replace(one, config=config)
    )
    rows = list(StepCase(config, ["reference", "xla"], ["step"], 0.01).rows())
    assert [(r["implementation"], r["batch"]) for r in rows if r["ms"]] == [
        *(("xla", 16), ("reference", 8), ("xla", 8)),
    ]
    rows = list(StepCase(config, ["baseline", "xla"], ["step"], 0.01).rows())
    assert [(r["implementation"], r["batch"], r["ms"]) for r in rows] == [
        ("baseline", 16, None),
        ("xla", 16, 1.0),
        ("baseline", 4, 1.0),
        ("xla", 4, 1.0),
    ]
    assert "needs" in rows[0]["refused"]
    assert ("baseline", 16, True) not in compiled
    names = ["xla", "cudnn"]
    rows = StepCase(config, names, ["step"], 0.01, largest=True).rows()
    # 0.97 of 20; and where a larger batch needs 1 more than smaller ones let expect.
    assert [row["largest_batch"] for row in rows] == [19, 18]
    # The state that steps are given copies of takes room, too.
    monkeypatch.setattr(StepCase, "_held", 1.5)
    rows = StepCase(config, names, ["step"], 0.01, largest=True).rows()
    assert [row["largest_batch"] for row in rows] == [17, 16]
    # A gap may be lacking though the bytes would do: not one batch is tried after the
    # other, each of which takes the allocator ten seconds to refuse.
    monkeypatch.setattr(StepCase, "_limit", 200.0)
    monkeypatch.setattr(StepCase, "_held", 0.0)
    tried = []

    def without_gaps(program, state):
        tried.append(program.assembly.config.batch_size)
        if tried[-1] > 100:
            raise JaxRuntimeError("RESOURCE_EXHAUSTED: no room for one large array")
        return Instant(program, state)

    with monkeypatch.context() as patched:
        patched.setattr(module, "Runner", without_gaps)
        rows = list(StepCase(config, ["xla"], ["step"], 0.0, largest=True).rows())
    assert rows[0]["largest_batch"] == 100
    assert tried[0] == 194 and len(tried) <= 1 + math.log2(194 - 16) + 1
    monkeypatch.setattr(StepCase, "_limit", 20.0)
    monkeypatch.setattr(StepCase, "_held", 1.5)
    # So, too, where nothing is timed; XLA then tries nothing out.
    compiled.clear()
    rows = list(StepCase(config, names, ["step"], 0.0, largest=True).rows())
    assert [(row["largest_batch"], row["ms"]) for row in rows] == [
        (17, None),
        (16, None),
    ]
    assert not any(tuned for *_, tuned in compiled)


def test_the_command_times_parts(tmp_path, capsys):
    options = ["--parts", "forward", "step", "--implementations", "baseline"]
    options += ["--seconds", "0.01", "--batch-size", "2", "--out", str(tmp_path)]
    assert main(["step-speed", *options]) == 0
    files = json.loads(capsys.readouterr().out.splitlines()[-1])["files"]
    assert any(name.endswith(".png") for name in files)
    lines = (tmp_path / "cpu.jsonl").read_text().splitlines()
    rows = [r for line in lines for r in json.loads(line).get("rows", [])]
    forward, step = rows
    assert forward["part"] == "forward" and 0 < forward["ms"] < step["ms"]
    assert step["gigabytes"] > forward["gigabytes"] > 0
    assert main(["step-speed", *options]) == 0  # Nothing is measured twice.
    assert (tmp_path / "cpu.jsonl").read_text().splitlines() == lines


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--kernels"], "needs an NVIDIA GPU"),
        (["--kernels", "--seconds", "0"], "a step that is timed"),
        (["--seconds", "-1"], "at least 0"),
        (["--batch-size", "0"], "at least 1"),
    ],
)
def test_what_cannot_be_is_said(options, words, tmp_path, capsys):
    assert main(["step-speed", *options, "--out", str(tmp_path)]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("said", ["false", "False", "0"])
def test_the_largest_batch_wants_memory_in_one_piece(
    said, tmp_path, capsys, monkeypatch
):
    """Taken bit by bit, XLA's allocator refused batches that fit, ten seconds each."""
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", said)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert main(["step-speed", "--largest", "--out", str(tmp_path)]) == 2
    assert "unset XLA_PYTHON_CLIENT_PREALLOCATE" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
