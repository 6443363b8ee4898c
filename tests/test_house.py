"""The rules of the repository that a program can check."""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("attn_jax", "train", "analysis")
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
# Directories that programs write, besides those whose name starts with a dot.
WRITTEN = {"__pycache__", "build", "dist", "runs", "site"}


def repository_files() -> list[Path]:
    files = []
    for directory, directories, names in ROOT.walk():
        directories[:] = [
            name
            for name in directories
            if name == ".ci" or not (name.startswith(".") or name in WRITTEN)
        ]
        files += [directory / name for name in names]
    return files


def readable(process: subprocess.CompletedProcess[str]) -> str:
    return process.stdout + process.stderr


def test_ruff_finds_nothing(run_module):
    process = run_module("ruff", "check", "--no-cache", ".")
    assert process.returncode == 0, readable(process)


def test_everything_is_formatted(run_module):
    process = run_module("ruff", "format", "--no-cache", "--check", ".")
    assert process.returncode == 0, readable(process)


@pytest.mark.ci
@pytest.mark.slow
def test_types(run_module):
    process = run_module("pyright", "--pythonpath", sys.executable)
    assert process.returncode == 0, readable(process)


def test_import_rules():
    program = Path(sys.executable).with_name("lint-imports")
    process = subprocess.run(
        [program, "--no-cache"], cwd=ROOT, capture_output=True, text=True
    )
    assert process.returncode == 0, readable(process)


def test_no_module_is_longer_than_500_lines():
    lengths = {
        path.relative_to(ROOT): len(path.read_text().splitlines())
        for path in repository_files()
        if path.suffix == ".py"
    }
    assert len(lengths) > 20
    assert {path: n for path, n in lengths.items() if n > 500} == {}


def test_no_machine_path_or_registry_host():
    forbidden = re.compile(
        r"(?<![\w.~*])/(?:work|root|home|Users)/\w"
        r"|/tmp/[a-z]"
        r"|https?://[a-z.]*/simple"
        r"|\bpypi\.[a-z]+\b|pythonhosted"
    )
    found = []
    for path in repository_files():
        if path == Path(__file__) or path.name == "LICENSE":
            continue
        try:
            lines = path.read_text().splitlines()
        except UnicodeDecodeError:
            continue  # pictures
        found += [
            f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}"
            for number, line in enumerate(lines, 1)
            if forbidden.search(line)
        ]
    assert found == []


def test_jax_internals_are_used_in_two_modules():
    users = [
        str(path.relative_to(ROOT))
        for path in repository_files()
        if path.suffix == ".py"
        and path.relative_to(ROOT).parts[0] in PACKAGES
        and re.search(r"\bjax\._src\b", path.read_text())
    ]
    of_kernels = (f"attn_jax/kernels/{x}.py" for x in ("internals", "interpreter"))
    assert set(users) <= set(of_kernels)


def test_documented_commands_exist():
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([\w-]+):", makefile, re.MULTILINE))
    for name in ("README.md", "CONTRIBUTING.md"):
        text = (ROOT / name).read_text()
        used = set(re.findall(r"(?:^|`)make ([\w-]+)", text, re.MULTILINE))
        assert used, f"{name} names no make command"
        assert used <= targets, f"{name}: {used - targets} is no target"
        for module in re.findall(r"python -m (\w+(?:\.\w+)*)", text):
            folder = ROOT.joinpath(*module.split("."))
            assert module in ("pytest", "build") or (folder / "__main__.py").exists()
    (named,) = re.findall(r"^NEXT_TESTS := (.*)$", makefile, re.MULTILINE)
    missing = [
        name
        for name in named.split()
        if not (ROOT / f"tests/test_kernels_{name}.py").exists()
    ]
    assert not missing
    # A target whose name is a file would never run.
    phony = re.search(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)
    assert phony and targets == set(phony[1].split())


def test_versions_agree():
    import attn_jax

    version = PYPROJECT["project"]["version"]
    assert attn_jax.__version__ == version
    changelog = (ROOT / "CHANGELOG.md").read_text()
    released = re.findall(r"^## \[(\d[^\]]*)\]", changelog, re.MULTILINE)
    assert not released or released[0] == version
    python = (ROOT / ".python-version").read_text().strip()
    assert PYPROJECT["project"]["requires-python"] == f">={python}"
    assert PYPROJECT["tool"]["pyright"]["pythonVersion"] == python
    assert PYPROJECT["tool"]["ruff"]["target-version"] == f"py{python.replace('.', '')}"


def test_constraints_pin_every_dependency():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    project = PYPROJECT["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    for requirement in (Requirement(text) for group in groups for text in group):
        pin = pins.get(requirement.name)
        assert pin, f"{requirement.name} is not pinned in constraints.txt"
        assert requirement.specifier.contains(pin), f"{requirement} against {pin}"
    assert pins["jax"] == pins["jaxlib"] == pins["jax-cuda13-plugin"] == "0.11.2"


@pytest.mark.parametrize(
    ("driver", "extra"),
    [("580.159.04", "cuda13"), ("570.86", "cuda12"), ("470.1", ""), ("", "")],
)
def test_cuda_extra_follows_the_driver(tmp_path, driver, extra):
    fake = tmp_path / "nvidia-smi"
    fake.write_text(f"#!/bin/sh\necho {driver}\n")
    fake.chmod(0o755)
    process = subprocess.run(
        [ROOT / "tools" / "accelerator.sh"],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
    )
    assert (process.returncode, process.stdout.strip()) == (0, extra)
    # A driver that is too old is not passed over in silence.
    assert bool(process.stderr) == (driver == "470.1")


@pytest.fixture
def checkout(tmp_path) -> Path:
    for name in ("tools", "pyproject.toml", "constraints.txt"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tmp_path / name)
    return tmp_path


def environment(checkout: Path, python: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [checkout / "tools" / "environment.sh", "train"],
        env={"PATH": "/usr/bin:/bin", "PYTHON": python},
        capture_output=True,
        text=True,
    )


def test_environment_without_a_python_says_so_in_one_line(checkout):
    process = environment(checkout, "no-such-python")
    assert process.returncode == 1
    assert len(process.stderr.splitlines()) == 1
    assert "no-such-python" in process.stderr and "PYTHON=" in process.stderr


def test_environment_left_half_made_is_replaced(checkout):
    (checkout / ".venv").mkdir()
    (checkout / ".venv" / "unfinished").touch()
    process = environment(checkout, "no-such-python")
    assert "Replacing .venv" in process.stderr
    assert not (checkout / ".venv").exists()


def test_ci_runs_what_is_marked_for_it():
    """Or nobody would: without the option they are skipped, which is no failure."""
    assert "make test ARGS=--ci" in (ROOT / ".ci" / "run").read_text()
