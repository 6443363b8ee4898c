"""The notebooks run from top to bottom, and show what their text says."""

import ast
import base64
import json
import os
import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

pytestmark = pytest.mark.ci

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
# What a cell holds besides imports: a measurement, a table, a picture. All else belongs
# into the packages.
MOST_STATEMENTS = 12
MOST_BYTES = 2**20


def read(name: str):
    return nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4)


def text_of(notebook, kind: str) -> str:
    return "\n".join(c.source for c in notebook.cells if c.cell_type == kind)


def outputs_of(notebook):
    return [o for cell in notebook.cells for o in cell.get("outputs", [])]


def pictures_of(notebook) -> list[bytes]:
    data = [output.get("data", {}) for output in outputs_of(notebook)]
    return [base64.b64decode(d["image/png"]) for d in data if "image/png" in d]


every_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


@every_notebook
def test_notebooks_are_thin_and_small(path):
    assert path.stat().st_size < MOST_BYTES
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            nodes = ast.walk(ast.parse(cell.source))
            kinds = [type(node) for node in nodes if isinstance(node, ast.stmt)]
            kinds = [k for k in kinds if k not in (ast.Import, ast.ImportFrom)]
            assert len(kinds) <= MOST_STATEMENTS, cell.source
    assert "At the end you will know" in notebook.cells[0].source


@every_notebook
def test_notebooks_hold_the_outputs_of_one_run(path):
    notebook = nbformat.read(path, as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == [*range(1, len(cells) + 1)]
    assert len(pictures_of(notebook)) >= 3
    for output in outputs_of(notebook):
        assert output.output_type != "error" and output.get("name") != "stderr"


@every_notebook
def test_numbers_of_the_text_stand_in_the_outputs(path):
    notebook = nbformat.read(path, as_version=4)
    printed = "\n".join(output.get("text", "") for output in outputs_of(notebook))
    text = re.sub(r"\(http\S+\)|arXiv \S+", "", text_of(notebook, "markdown"))
    numbers = re.findall(r"(?<![\w.])\d+\.\d+(?:e-\d+)?(?![\w.]*\w)", text)
    assert numbers
    missing = [
        number
        for number in numbers
        if not re.search(rf"(?<![\d.]){re.escape(number)}(?!\d)", printed)
    ]
    assert missing == []


def test_notebooks_that_are_named_exist():
    for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "results/README.md"):
        text = (ROOT / name).read_text()
        for notebook in re.findall(r"notebooks/[\w.]*\.ipynb", text):
            assert (ROOT / notebook).exists(), f"{name}: {notebook}"


@pytest.fixture
def run(monkeypatch):
    """Runs a notebook at its toy size, and then one more cell, whose last line is an
    expression; returns what it gives, by way of JSON."""
    monkeypatch.setenv("NOTEBOOK_SIZE", "toy")
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{os.environ.get('PYTHONPATH', '')}")

    def run(name: str, expression: str):
        notebook = read(name)
        wanted = len(pictures_of(notebook))
        # The canaries have tests of their own.
        first = "from attn_jax import canaries; canaries.CANARIES.clear()"
        notebook.cells.insert(0, nbformat.v4.new_code_cell(first))
        then = f"import json; print(json.dumps({expression}))"
        notebook.cells.append(nbformat.v4.new_code_cell(then))
        root = {"metadata": {"path": str(ROOT)}}
        NotebookClient(notebook, timeout=300, resources=root).execute()
        assert len(pictures_of(notebook)) == wanted
        return json.loads(notebook.cells[-1].outputs[0].text)

    return run


@pytest.mark.slow
def test_deviation_sweeps(run):
    rows = run("01_deviation_sweeps", "where(formats, format='bf16', family='uniform')")
    largest = {row["recipe"]: row["max_over_baseline"] for row in rows}
    assert largest["flash1_paper"] > 1.5 > largest["flash2"]


@pytest.mark.slow
def test_backward(run):
    checks, errors = run("02_backward", "[checks, errors]")
    assert all(line["explained"] > 0.99 for line in checks)
    for row in errors:
        if row["tensor"] == "dq" and row["recipe"] == "flash2":
            assert row["units"] > 3
        if row["recipe"].startswith("attn_jax"):
            assert row["units"] < 1.7


@pytest.mark.slow
def test_weight_deviation(run):
    rows = run("03_weight_deviation", "few")
    assert {(row["arm"], row["step"]) for row in rows} == {
        (arm, step) for arm in ("ulp", "pallas") for step in (1, 2)
    }
    assert all(row["max_abs"] > 0 for row in rows if row["arm"] == "ulp")


@pytest.mark.slow
def test_ring(run):
    rows = run("04_ring", "where(live, shards=8)")
    found = {(row["variant"], row["tensor"]): row["rms_ratio"] for row in rows}
    for tensor in ("out", "dq", "dk", "dv"):
        assert found["attn_jax", tensor] < 1.2 < found["te_ring", tensor]
    # The way out mends the forward pass alone.
    assert found["issue_42", "out"] == pytest.approx(1) and found["issue_42", "dv"] > 1


@pytest.mark.slow
def test_audit_your_kernel(run):
    verdicts = run(
        "05_audit_your_kernel",
        "[report.verdict for report in reports.values()]",
    )
    assert verdicts == [
        "not finite",
        "worse than its algorithm allows",
        "trustworthy",
    ]
