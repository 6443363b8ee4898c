"""When the code of a target counts as changed."""

import functools
import importlib
import importlib.metadata
import sys

import jax
import pytest

from attn_jax.audit.fingerprint import fingerprint
from attn_jax.audit.target import Target, resolve


@pytest.fixture(autouse=True)
def nothing_is_installed_meanwhile(monkeypatch):
    """Which packages there are takes most of the time, once for every fingerprint."""
    monkeypatch.setattr(importlib.metadata, "packages_distributions", DISTRIBUTIONS)


DISTRIBUTIONS = functools.cache(importlib.metadata.packages_distributions)


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package that wraps a function of a module elsewhere."""
    for name, lines in {
        "one/marked/__init__.py": "",
        "one/marked/kernels.py": "from elsewhere import f\n\ndef g(): return f()\n",
        "one/marked/deep/late.py": "",
        "two/elsewhere.py": "def f(): pass\n",
        "two/other.py": "",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(lines)
    for folder in ("one", "two"):
        monkeypatch.syspath_prepend(tmp_path / folder)
    importlib.invalidate_caches()
    yield tmp_path
    for name in ("marked.kernels", "marked", "elsewhere"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("edited", "counts"),
    [
        ("one/marked/kernels.py", True),
        ("one/marked/deep/late.py", True),  # Imported where it is called, perhaps.
        ("two/elsewhere.py", True),
        ("two/other.py", False),
    ],
)
def test_edits_of_what_a_function_is_made_of_count(package, edited, counts):
    target = resolve("marked.kernels:g")
    wrapped = Target("wrapped", functools.partial(jax.jit(target.function)))
    before = fingerprint(target)
    assert fingerprint(target) == before == fingerprint(wrapped)
    (package / edited).write_text("# Edited.\n")
    assert (fingerprint(target) != before) == counts
    assert (fingerprint(wrapped) != before) == counts


def test_of_what_is_installed_the_version_counts(monkeypatch):
    target = resolve("xla")
    before = fingerprint(target)
    assert fingerprint(target) == before != fingerprint(resolve("reference"))
    monkeypatch.setattr("importlib.metadata.version", lambda package: "99")
    assert fingerprint(target) != before


def test_a_function_without_a_file_is_never_the_same():
    names: dict = {"__name__": "__nowhere__"}
    exec("def f(): pass", names)
    target = Target("f", names["f"])
    assert fingerprint(target) != fingerprint(target)
