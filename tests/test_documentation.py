"""README and docs/: examples run, commands are understood, links lead somewhere."""

import contextlib
import csv
import dataclasses
import io
import json
import math
import posixpath
import re
import shlex
import unicodedata
from collections import defaultdict
from pathlib import Path

import jax
import numpy as np
import pytest

from analysis.__main__ import main as analysis_main
from attn_jax import RECIPES, dot_product_attention
from attn_jax.audit.inputs import FAMILIES, Shape, make_inputs
from attn_jax.reference import golden
from tools import recipe_table

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
RESULTS = sorted((ROOT / "results").rglob("*.md"))
TEXTS = [ROOT / name for name in ("CHANGELOG.md", "CONTRIBUTING.md")]
WITH_LINKS = [*PAGES, *TEXTS, *RESULTS]
EXAMPLES = re.compile(r"^```python\n(.*?)^```$", re.M | re.S)


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


def with_examples() -> list[Path]:
    return [page for page in PAGES if EXAMPLES.search(page.read_text())]


@pytest.mark.ci
@pytest.mark.parametrize("page", with_examples(), ids=named)
def test_examples_run(page, monkeypatch):
    monkeypatch.chdir(ROOT)
    # Those of a page are one program, from top to bottom.
    names: dict = {}
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        for number, example in enumerate(EXAMPLES.findall(page.read_text()), 1):
            code = compile(example, f"{page.name}, example {number}", "exec")
            exec(code, names)
    if page.name == "README.md":
        assert names["dq"].shape == names["q"].shape and names["dk"].any()
    if page.name == "tutorial.md":
        assert len(names["report"].cells) == 10
        assert "LSE rounded to BF16" in said.getvalue()


def anchors(page: Path) -> set[str]:
    """What GitHub and MkDocs both call the headings of a page."""
    found = set()
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)
    for heading in re.findall(r"^#+ (.*)$", text, re.M):
        plain = unicodedata.normalize("NFKD", heading.lower())
        plain = re.sub(r"[^\w\s-]", "", plain.encode("ascii", "ignore").decode())
        found.add(re.sub(r"\s+", "-", plain.strip()))
    return found


@pytest.mark.parametrize("page", WITH_LINKS, ids=named)
def test_links_lead_somewhere(page):
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = page if not path else page.parent / path
        assert target.exists(), link
        # MkDocs copies files only.
        assert target.is_file() or page.parent == ROOT, f"{link} is a folder"
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("page", WITH_LINKS, ids=named)
def test_pictures_are_pictures(page):
    # A bracket in the words of a picture makes a link of what follows it.
    text = page.read_text()
    assert text.count("![") == len(re.findall(r"!\[[^][]+\]\([^)\s]+\)", text))


def test_every_page_is_in_the_navigation():
    navigation = (ROOT / "mkdocs.yml").read_text().split("\nnav:\n")[1]
    listed = set(re.findall(r"(\S+\.md)$", navigation, re.M))
    pages = {page.name for page in PAGES[1:]}
    assert pages == {page for page in listed if "/" not in page}
    inside = "repository/"
    others = {page.removeprefix(inside) for page in listed if "/" in page}
    text = "".join(page.read_text() for page in PAGES)
    # What no page links to does not come into the site.
    assert all(f"](../{page}" in text for page in others)


def commands(module: str) -> list[list[str]]:
    """Arguments of every command `python -m module` that stands in a block."""
    found = []
    for page in PAGES:
        for block in re.findall(r"^```\w*\n(.*?)^```$", page.read_text(), re.M | re.S):
            block = block.replace("\\\n", " ")
            for line in re.findall(rf"python -m {module}\b(?!\.)([^;\n]*)", block):
                found.append(shlex.split(line, comments=True))
    assert found
    return found


def test_training_commands_are_understood():
    from train.__main__ import parse_config
    from train.validate import validate

    parsed = []
    for command in commands("train"):
        if "--help" in command or command[:1] == ["sample"]:
            continue
        # What a job script takes from its scheduler.
        command = [re.sub(r"^\$\w*(ID|RANK)\w*$", "0", word) for word in command]
        command = [re.sub(r"^\$\w+$", "2", word) for word in command]
        parsed.append(parse_config(command))
        validate(parsed[-1])
    assert {config.attn for config in parsed} >= {"pallas", "baseline"}


def test_commands_of_experiments_and_audits_are_understood():
    import argparse

    from analysis.experiments import EXPERIMENTS
    from attn_jax.audit.command import parser

    for name, *options in commands("analysis"):
        if name in ("list", "NAME"):
            continue
        made = argparse.ArgumentParser(exit_on_error=False)
        EXPERIMENTS[name].add_arguments(made)
        made.parse_args(options)
    for command in commands("attn_jax.audit"):
        if "--help" not in command:
            parser().parse_args(command)


def test_options_of_experiments_are_theirs():
    import argparse

    from analysis.experiments import EXPERIMENTS

    text = (ROOT / "docs" / "experiments.md").read_text()
    table = text.split("\nWhat the others are for:\n")[1].split("\n\n")[1]
    for line in table.splitlines()[2:]:
        _, names, options, _ = line.split("|")
        known = set()
        for name in re.findall(r"`([\w-]+)`", names):
            parser = argparse.ArgumentParser()
            EXPERIMENTS[name].add_arguments(parser)
            known |= {word for a in parser._actions for word in a.option_strings}
        # `--checkpoint.keep` is the training's.
        told = set(re.findall(r"`(--[\w-]+)(?![\w.-])", options))
        assert told and told <= known, f"{names}: {told - known}"


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


def test_figure_of_the_readme_is_that_of_its_tables(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    stem = tmp_path / "figure"
    assert analysis_main(["speed-and-error", "--out", str(stem)]) == 0
    files = json.loads(capsys.readouterr().out.splitlines()[-1])["files"]
    assert [Path(path).suffix for path in files] == [".csv", ".json", ".png"]
    committed = ROOT / "results" / "speed" / "nvidia-h200-backward.csv"
    assert stem.with_suffix(".csv").read_text() == committed.read_text()


@pytest.mark.parametrize("page", ["docs/accuracy.md", "results/accuracy/README.md"])
def test_tables_of_accuracy_are_those_of_the_rows(page):
    """They were written by hand, and stayed what they were when rows were renewed."""
    largest = defaultdict(float)
    for preset in ("full", "masks", "lengths"):
        path = ROOT / "results" / "accuracy" / f"nvidia-h200-{preset}.csv"
        with path.open() as file:
            rows = [r for r in csv.DictReader(file) if r["dtype"] == "bfloat16"]
        for row in rows:
            name = row["implementation"]
            of = f"{name}, {preset}" if name == "pallas" else name
            for tensor in ("out", "dq", "dk", "dv"):
                key = of, row["family"], tensor
                largest[key] = max(largest[key], float(row[tensor] or 0))

    def cell(x: float) -> str:
        if x == 0:
            return "0"
        return f"{x:.2f}" if x < 9.995 else f"{x:.1f}" if x < 99.95 else f"{x:.0f}"

    columns = "pallas, full", "pallas, masks", "cudnn", "xla"
    text = (ROOT / page).read_text()
    for family in FAMILIES:
        cells = [
            cell(largest[of, family, tensor])
            for of in columns
            for tensor in ("out", "dq", "dk", "dv")
        ]
        assert f"| {family} | {' | '.join(cells)} |\n" in text


def _cut(x: float, digits: int) -> str:
    """Not rounded up: what speaks for the kernels."""
    return f"{math.floor(x * 10**digits) / 10**digits:.{digits}f}"


def test_table_of_steps_is_that_of_the_rows():
    text, cases = (ROOT / "docs" / "training.md").read_text(), 0
    for path in sorted((ROOT / "results" / "step-speed").glob("*-h200-[0-9]*.csv")):
        with path.open() as file:
            rows = list(csv.DictReader(file))
        for part in ("forward", "both", "step"):
            own = {r["implementation"]: r for r in rows if r["part"] == part}
            ours, three = (
                own["pallas"],
                [own[k] for k in ("baseline", "pallas", "cudnn")],
            )
            base, ms, cudnn = (float(row["ms"]) for row in three)
            cells = [
                *(ours[k] for k in ("case", "N", "batch", "part")),
                *(f"{float(row['ms']):.4g}" for row in three),
                *(_cut(base / ms, 2), _cut(cudnn / ms, 3)),
                _cut(100 * float(ours["mfu"]), 1),
                *(f"{float(row['gigabytes']):.3g}" for row in three),
            ]
            assert f"| {' | '.join(cells)} |\n" in text
        cases += 1
    assert cases == 5


def test_tables_of_recipes_have_all_of_them():
    lines = [x for x in recipe_table.table().splitlines() if x.startswith("|")]
    assert len(lines) == 2 * (2 + len(RECIPES))
    for head, _, *rows in (lines[: len(lines) // 2], lines[len(lines) // 2 :]):
        assert [row.split("`")[1] for row in rows] == list(RECIPES)
        assert {row.count("|") for row in rows} == {head.count("|")}


@pytest.mark.parametrize(
    "name", ["flash2", "eager_bf16", "flash2_op_by_op", "attn_jax_hopper", "te_ring"]
)
def test_law_of_the_table_predicts_the_emulator(name):
    # The law has no sums of products, and takes 1 / keys for small: the bound is what
    # is said of `two_term_law`.
    recipe = RECIPES[name]
    once, per_tile = recipe_table.squares(recipe) or (0.0, 0.0)
    keys = 512
    tiles = 0 if recipe.block_kv is None else keys / recipe.block_kv
    inputs = make_inputs("normal", 0, Shape(1, 64, keys, 4, 4, 64))
    query, key, value = map(jax.numpy.asarray, inputs[:3])
    if recipe.ring_size > 1:  # Which queries are cut into, too.
        assert 64 % recipe.ring_size == 0
    out = dot_product_attention(
        query, key, value, implementation="emulated", recipe=recipe
    )
    exact = golden(*inputs).out
    error = np.asarray(out).astype(np.float64) - exact
    measured = np.sqrt(np.mean(error**2) / np.mean(exact**2))
    predicted = np.sqrt(once + per_tile * tiles)
    assert 0.8 < measured / predicted < 1.2


def test_law_is_given_where_it_holds_only():
    recipe = dataclasses.replace(RECIPES["flash2_op_by_op"], normalise="each_step")
    assert recipe_table.squares(recipe) is None
    assert recipe_table.law(RECIPES["exact_fp64"])[1] is None


def test_pages_link_to_what_the_site_copies():
    # The hook rewrites links by this rule; a page moved out of docs/ would break it.
    for page in PAGES[1:]:
        for link in re.findall(r"\]\((\.\./[^)\s#]+)", page.read_text()):
            path = posixpath.normpath(posixpath.join("docs", link))
            assert (ROOT / path).is_file(), f"{page.name}: {link}"
