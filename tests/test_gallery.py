"""`python -m analysis gallery`: which images, what is said of them, which runs."""

import csv
import dataclasses
import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from analysis.__main__ import main
from analysis.experiments import gallery
from tests.run_folder import write_run
from train.assemble import open_split
from train.config import Config, UsageError, to_json
from train.data.score import Score
from train.evaluate import captions_of, satisfied
from train.figures import write_grid
from train.loop import run
from train.presets import PRESETS

pytestmark = [pytest.mark.ci, pytest.mark.usefixtures("shared_programs")]
TINY = PRESETS["tiny"]
STEPS = 2
CONFIG = dataclasses.replace(
    TINY,
    attn="baseline",
    steps=STEPS,
    batch_size=8,
    model=dataclasses.replace(TINY.model, width=64, heads=1, depth=1),
    optimizer=dataclasses.replace(TINY.optimizer, warmup=0),
    eval=dataclasses.replace(
        TINY.eval,
        **{"every": 0, "examples": 8, "captions": 4, "novel": 0, "batch_size": 4},
        **{"grid": 4, "sampler_steps": 2},
    ),
)


def table(path) -> list[dict[str, str]]:
    with open(path) as file:
        return list(csv.DictReader(file))


def changed(**fields) -> Config:
    return dataclasses.replace(CONFIG, **fields)


def finished(folder: Path, config: Config, attention: str, steps: int = STEPS) -> Path:
    """What the gallery asks of a run folder beside its weights."""
    (folder / "checkpoints" / str(STEPS)).mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(to_json(config))
    (folder / "environment.json").write_text('{"device": "abacus"}')
    done = {"steps": steps, "held_out_loss": 1.0, "attention": attention}
    (folder / "DONE").write_text(json.dumps(done))
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> list[Path]:
    """A training; its weights under another name of its attention; other weights."""
    base = tmp_path_factory.mktemp("gallery")
    trained, same, other = base / "trained", base / "same", base / "other"
    run(changed(run_dir=str(trained)))
    shutil.copytree(trained, same)
    finished(same, changed(attn="xla"), "xla")
    config = changed(attn="emulated", recipe="flash2")
    write_run(other, config, (STEPS,))
    finished(other, config, "emulated")
    return [trained, same, other]


def test_images_are_those_that_the_training_drew_at_its_end(runs, tmp_path):
    captions = captions_of(open_split(CONFIG, "val"), CONFIG.eval.grid)
    images, implementation = gallery._draw(gallery.find(runs[0]), captions, 0)
    verdicts = satisfied(CONFIG, images, captions)
    write_grid(images, captions, verdicts, tmp_path / "grid.png")
    drawn = (tmp_path / "grid.png").read_bytes()
    assert drawn == (runs[0] / "samples.png").read_bytes()
    assert implementation == "xla"


def test_runs_start_from_the_same_noise(runs, tmp_path, capsys):
    options = ["--captions", "2", "--score", "6", "--seed", "5", "--split", "novel"]
    options += ["--out", str(tmp_path), "--runs", *map(str, runs)]
    assert main(["gallery", *options]) == 0
    files = json.loads(capsys.readouterr().out.splitlines()[-1])["files"]
    names = ["tiny-novel.csv", "tiny-novel.json", "tiny-novel.png"]
    assert [Path(path).name for path in files] == names
    rows = table(files[0])
    apart = {
        name: [float(row["rms_difference"]) for row in rows if row["run"] == name]
        for name in ("trained", "same", "other")
    }
    assert apart["trained"] == apart["same"] == [0.0] * 6
    assert min(apart["other"]) > 1
    captions = captions_of(open_split(CONFIG, "novel"), 6)
    assert [row["caption"] for row in rows] == 3 * captions
    assert {row["noise_seed"] for row in rows} == {"5"}
    told = json.loads(Path(files[1]).read_text())
    assert told["command"].startswith("python -m analysis gallery --captions 2")
    attentions = [one["attention"] for one in told["runs"]]
    assert attentions == ["baseline", "xla", "emulated:flash2"]
    assert told["runs"][2]["trained"]["device"] == "abacus"
    assert told["runs"][0]["trained"]["attention"]["implementation"] == "xla"
    assert told["configuration"]["model.width"] == 64


def tiles(page: np.ndarray) -> list[np.ndarray]:
    """The images in a page, from left to right and line to line."""
    size, paper = gallery._TILE, (page == 255).all(2)
    found = []
    for y, x in np.argwhere(~paper):
        edge = paper[y - 1, x] and paper[y, x - 1]
        if edge and not paper[y : y + size, x : x + size].any():
            found.append(page[y : y + size, x : x + size])
    return found


def test_what_is_said_of_images(tmp_path, monkeypatch, capsys):
    """Rendered images pass; those of the next caption do not show this one."""
    source = open_split(CONFIG, "val")
    examples = [source[index] for index in range(4)]
    right = np.stack([example["image"] for example in examples])
    wrong = np.stack([right[1], right[0], right[2], right[3]])
    assert examples[0]["caption"] != examples[1]["caption"]
    paths = [
        finished(tmp_path / "one", changed(attn="pallas"), "pallas"),
        finished(tmp_path / "two", changed(attn="cudnn"), "cudnn"),
    ]
    drawn = iter([(right, "pallas"), (wrong, "cudnn")])
    monkeypatch.setattr(gallery, "_draw", lambda *_: next(drawn))
    options = ["--captions", "3", "--score", "4", "--out", str(tmp_path / "out")]
    assert main(["gallery", *options, "--runs", *map(str, paths)]) == 0
    files = json.loads(capsys.readouterr().out.splitlines()[-1])["files"]
    rows = table(files[0])
    assert [row["attention"] for row in rows] == ["pallas"] * 4 + ["cudnn"] * 4
    assert [row["all"] for row in rows] == list("11110011")
    # Its one object is another: what is wrong is what the two captions differ in.
    for row, there in zip(rows[4:6], (1, 0), strict=True):
        assert row["count"] == "1"
        for part, words in (("colour", 1), ("shape", 2)):
            mine, other = row["caption"].split(), examples[there]["caption"].split()
            assert row[part] == str(int(mine[words] == other[words]))
        assert row["place"] == str(int(mine[3:] == other[3:]))
    apart = math.sqrt(np.mean((right[0].astype(float) - right[1]) ** 2))
    assert [float(row["rms_difference"]) for row in rows] == pytest.approx(
        [0, 0, 0, 0, apart, apart, 0, 0], rel=1e-4
    )
    first, second = json.loads(Path(files[1]).read_text())["runs"]
    z2 = 1.959964**2
    assert (first["met"], first["captions"]) == (4, 4)
    assert first["high"] == pytest.approx(1)
    assert first["low"] == pytest.approx(4 / (4 + z2))  # Wilson's, all met
    assert (second["met"], second["share"]) == (2, 0.5)
    half = math.sqrt(z2 / 4 * (4 + z2)) / (4 + z2)  # and half of them
    assert second["low"] == pytest.approx(0.5 - half)
    assert second["high"] == pytest.approx(0.5 + half)
    assert second["rms_difference"] == pytest.approx(apart / math.sqrt(2))
    shown = tiles(np.asarray(Image.open(files[2])))
    scale = gallery._TILE // CONFIG.data.resolution
    wanted = [right[0], wrong[0], right[1], wrong[1], right[2], wrong[2]]
    assert len(shown) == len(wanted)
    for tile, image in zip(shown, wanted, strict=True):
        assert (tile == image.repeat(scale, 0).repeat(scale, 1)).all()


def test_right_and_wrong_differ_without_colours(tmp_path):
    image = np.zeros((1, 32, 32, 3), np.uint8)
    ink = []
    for held in (True, False):
        score = Score(count=True, colour=True, shape=held, place=True)
        path = tmp_path / f"{held}.png"
        texts = ["a red cross in the center"], ["pallas"]
        gallery.write_picture(*texts, [image], [[score]], ["told"], path)
        ink.append(np.asarray(Image.open(path).convert("L")) < 250)
    assert ink[0].shape == ink[1].shape
    assert (ink[0] != ink[1]).sum() > 10


@pytest.mark.parametrize(
    ("second", "line"),
    [
        (changed(seed=1), "seed: 0 -> 1"),
        (changed(lr=1.0), "lr: 0.002 -> 1.0"),
        (
            changed(data=dataclasses.replace(CONFIG.data, family="rel")),
            "data.family: 'pos' -> 'rel'",
        ),
        (
            changed(eval=dataclasses.replace(CONFIG.eval, guidance=1.0)),
            "eval.guidance: 3.0 -> 1.0",
        ),
        (changed(steps=9), "steps: 2 -> 9"),
    ],
)
def test_runs_that_differ_in_more_than_attention_are_refused(second, line, tmp_path):
    one = finished(tmp_path / "one", CONFIG, "xla")
    other = dataclasses.replace(second, attn="pallas")
    two = finished(tmp_path / "two", other, "emulated", second.steps)
    (two / "checkpoints" / str(second.steps)).mkdir(exist_ok=True)
    with pytest.raises(UsageError) as refused:
        gallery.check_alike([gallery.find(path) for path in (one, two)])
    assert str(refused.value) == (
        f"{two} differs from {one} in more than --attn and --recipe: {line}"
    )


def test_attention_and_how_a_run_was_evaluated_may_differ(tmp_path):
    evaluation = dataclasses.replace(CONFIG.eval, grid=2, captions=9, every=1)
    other = changed(attn="emulated", recipe="flash2", eval=evaluation)
    paths = [
        finished(tmp_path / "one", CONFIG, "xla"),
        finished(tmp_path / "two", other, "emulated"),
        finished(tmp_path / "three", CONFIG, "xla"),
    ]
    found = [gallery.find(path) for path in paths]
    gallery.check_alike(found)
    wanted = ["baseline (one)", "emulated:flash2", "baseline (three)"]
    assert gallery.labels(found) == wanted


@pytest.mark.parametrize(
    ("attn", "trained", "drawn", "said"),
    [
        ("baseline", "xla", "xla", ""),
        ("pallas", "pallas", "pallas", ""),
        ("pallas", "emulated", "emulated", ", emulated"),
        ("pallas", "pallas", "emulated", ", drawn emulated"),
        ("pallas", "emulated", "pallas", ", trained emulated"),
    ],
)
def test_a_title_says_what_stood_in_for_the_attention(
    attn, trained, drawn, said, tmp_path
):
    found = gallery.find(finished(tmp_path, changed(attn=attn), trained))
    assert gallery._instead(found, drawn) == said


@pytest.mark.parametrize(
    ("options", "spoiled", "line"),
    [
        ([], "DONE", "has not finished"),
        ([], "checkpoints", "no checkpoint of its last step, 2"),
        ([], "environment.json", "cannot read"),
        ([], "config.json", "there is no"),
        (["--captions", "8", "--score", "4"], "", "--score is 4; it must be at least"),
        (["--captions", "0"], "", "--captions is 0"),
        (["--seed", "-1"], "", "--seed is -1"),
        ([], "shapes", "--data.name=digits"),
    ],
)
def test_what_cannot_be_shown_is_said_in_a_line(
    options, spoiled, line, tmp_path, capsys, monkeypatch
):
    def drawn(*_):
        raise AssertionError("drawn before the command was refused")

    monkeypatch.setattr(gallery, "_draw", drawn)
    data = dataclasses.replace(CONFIG.data, name="digits")
    config = changed(data=data) if spoiled == "shapes" else CONFIG
    folder = finished(tmp_path / "run", config, "xla")
    if spoiled == "checkpoints":
        shutil.rmtree(folder / spoiled)
    elif spoiled != "shapes" and spoiled:
        (folder / spoiled).unlink()
    options = ["--runs", str(folder), "--out", str(tmp_path / "out"), *options]
    assert main(["gallery", *options]) == 2
    error = capsys.readouterr().err
    assert line in error and len(error.splitlines()) == 1
    assert not list(tmp_path.glob("out/*"))
