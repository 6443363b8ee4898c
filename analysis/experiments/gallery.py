"""Images of training runs side by side: the same captions and noise, another attention.

Each run of `python -m train`, once it has finished, draws the first captions of a split
with its averaged weights, as it did at its own end; none is chosen. The runs differ in
attention alone, so that image i starts from the same noise in all of them. What of a
caption an image shows says the scorer of the training: count, colour, shape and place,
the relation of two objects included; `all` is their conjunction. Intervals are for
other captions: another training, with another bit somewhere, may well lie outside.

OUT holds, named after preset and split,

    PRESET.csv    a row for each run and caption that was scored; `rms_difference` is
                  the image's root mean square difference from the first run's, in
                  levels of 0 to 255
    PRESET.json   command, versions, device, date, the configuration, and of each run
                  the share of captions met with its 95 % interval
    PRESET.png    the first captions with the images of all runs
"""

import argparse
import dataclasses
import json
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt8

from analysis.record import Row, check_writable, environment, show, write, written
from train.assemble import open_split
from train.checkpoint import load_state, saved_steps
from train.config import Config, UsageError, difference, flatten, load
from train.data.score import Rate, Score, score_all
from train.evaluate import captions_of
from train.figures import draw_mark
from train.gpu import set_profile
from train.record import RunFolder
from train.sample import draw, on_one_device
from train.validate import check_number

SUMMARY = "images of training runs side by side, same captions and noise, with scores"
PARTS = ("count", "colour", "shape", "place")
# What may differ: the attention, and what decides neither weights nor images.
_FREE = {
    *("attn", "recipe", "eval.captions", "eval.novel", "eval.examples"),
    *("eval.grid", "eval.batch_size"),
}
_TILE, _GAP, _MARGIN = 128, 10, 14
_LINE, _CHARACTER = 17, 6.6  # Height of a line of text, width of a letter at most.
_MARKS = 42  # Height of the two lines of marks and what is below them.


@dataclasses.dataclass(frozen=True)
class Run:
    """A finished run.

    Attributes:
      root: its folder.
      config: its configuration.
      steps: those it was trained for.
      implementation: what its attention came to in training.
      trained: commit, device, versions and attention of the training.
    """

    root: Path
    config: Config
    steps: int
    implementation: str
    trained: dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The experiment's options."""
    add = parser.add_argument
    add(
        "--runs",
        nargs="+",
        type=Path,
        required=True,
        metavar="RUN",
        help="finished run folders of python -m train, a column each, which differ in "
        "--attn and --recipe alone; the first is what images are held against",
    )
    add("--captions", type=int, default=16, help="drawn in the figure (default 16)")
    add("--score", type=int, default=256, help="captions scored (default 256)")
    add(
        "--split",
        choices=["val", "novel"],
        default="val",
        help="of captions (default val); novel: pairs of colour and shape that "
        "training has not seen",
    )
    add(
        "--seed",
        type=int,
        default=0,
        help="of the noise; 0 (default) is the training's own",
    )
    out = Path("results", "gallery")
    add("--out", type=Path, default=out, help=f"folder (default {out})")


def run(options: argparse.Namespace, command: str) -> dict[str, Any]:
    """Draws, scores and writes.

    Raises:
      UsageError: a run is not there, has not finished or differs from the first in
        more than attention, a number makes no sense, or OUT cannot be written; raised
        before anything is drawn.
    """
    set_profile("exact")
    seed, shown, scored = options.seed, options.captions, options.score
    check_number("seed", seed, 0 <= seed < 2**32, "lie in [0, 2**32)")
    check_number("captions", shown, shown >= 1, "be at least 1")
    check_number("score", scored, scored >= shown, f"be at least --captions, {shown}")
    runs = [find(path) for path in options.runs]
    check_alike(runs)
    config = runs[0].config
    if config.data.name != "shapes":
        raise UsageError(
            f"{runs[0].root} was trained on --data.name={config.data.name}; only the "
            "captions of shapes are scored by colour, shape and place"
        )
    name = config.preset + ("" if options.split == "val" else f"-{options.split}")
    stem = options.out / name
    check_writable(stem)
    captions = captions_of(open_split(config, options.split), scored)
    titles, drawn = [], []
    for one, label in zip(runs, labels(runs), strict=True):
        images, here = _draw(one, captions, seed)
        titles.append(label + _instead(one, here))
        drawn.append(images)
    scores = [score_all(images, captions) for images in drawn]
    rows, shares = [], []
    for one, title, images, held in zip(runs, titles, drawn, scores, strict=True):
        differences = rms(images, drawn[0])
        rows += _rows(one, title, seed, captions, held, differences)
        shares.append(_share(one, title, held, differences))
    told = [{key: share[key] for key in share if key != "trained"} for share in shares]
    show(told, f"Captions of {options.split} met, of {len(captions)}")
    beside = {"split": options.split, "noise_seed": seed, "runs": shares}
    beside |= {"configuration": _shared(config)}
    files = write(rows, environment(command) | beside, stem)
    picture = stem.with_suffix(".png")
    heads = [_said(title, share) for title, share in zip(titles, shares, strict=True)]
    told = f"{config.preset}, {runs[0].steps} steps, seed {config.seed}; "
    heads.insert(0, f"{told}captions of {options.split}, noise of seed {seed}")
    with written(picture):
        write_picture(
            *(captions[:shown], titles, [images[:shown] for images in drawn]),
            *([held[:shown] for held in scores], heads, picture),
        )
    return {"rows": len(rows), "files": [str(path) for path in [*files, picture]]}


def find(root: Path) -> Run:
    """A run folder with the state of its last step.

    Raises:
      UsageError: it is none, has not finished, or one of its files is gone.
    """
    config = load(root / "config.json")
    done = RunFolder(dataclasses.replace(config, run_dir=str(root))).done()
    if done is None:
        raise UsageError(
            f"{root} has not finished: its own python -m train command goes on with it"
        )
    if done["steps"] not in saved_steps(root / "checkpoints"):
        raise UsageError(f"{root} has no checkpoint of its last step, {done['steps']}")
    trained = _trained(root / "environment.json")
    return Run(root, config, done["steps"], done["attention"], trained)


def _trained(path: Path) -> dict[str, Any]:
    try:
        there = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read {path}: {error}") from error
    names = ("git_commit", "git_dirty", "device", "versions", "profile", "attention")
    return {name: there.get(name) for name in names}


def check_alike(runs: Sequence[Run]) -> None:
    """Refuses runs that differ from the first in more than attention.

    Raises:
      UsageError: naming what differs.
    """
    first = runs[0]
    for other in runs[1:]:
        changes = difference(first.config, other.config)
        changes = [line for line in changes if line.partition(":")[0] not in _FREE]
        if first.steps != other.steps:
            changes.append(f"steps: {first.steps} -> {other.steps}")
        if changes:
            raise UsageError(
                f"{other.root} differs from {first.root} in more than --attn and "
                f"--recipe: {'; '.join(changes)}"
            )


def labels(runs: Sequence[Run]) -> list[str]:
    """Attention of each run, with its folder where others have the same."""
    names = [one.config.attn for one in runs]
    names = [
        f"{name}:{one.config.recipe}" if one.config.recipe else str(name)
        for name, one in zip(names, runs, strict=True)
    ]
    return [
        name if names.count(name) == 1 else f"{name} ({one.root.name})"
        for name, one in zip(names, runs, strict=True)
    ]


def rms(
    images: UInt8[np.ndarray, "n R R 3"], others: UInt8[np.ndarray, "n R R 3"]
) -> list[float]:
    """Root mean square difference of each pair of images, in levels of 0 to 255."""
    apart = images.astype(np.float64) - others
    return [float(x) for x in np.sqrt(np.mean(apart**2, axis=(1, 2, 3)))]


def _draw(
    one: Run, captions: Sequence[str], seed: int
) -> tuple[UInt8[np.ndarray, "n R R 3"], str]:
    """The images, and what the attention comes to on this machine."""
    size = min(one.config.eval.batch_size, len(captions))
    evaluation = dataclasses.replace(one.config.eval, batch_size=size)
    assembly = on_one_device(dataclasses.replace(one.config, eval=evaluation))
    path = saved_steps(one.root / "checkpoints")[one.steps]
    state = load_state(path, assembly.abstract_state())
    return draw(assembly, state, captions, seed), assembly.attention.implementation


def _instead(one: Run, here: str) -> str:
    """Says where --attn stood for something else, in training or in drawing."""
    usual = "xla" if one.config.attn == "baseline" else one.config.attn
    others = {"trained": one.implementation, "drawn": here}
    others = {how: what for how, what in others.items() if what != usual}
    if len(others) == 2 and one.implementation == here:
        return f", {here}"
    return "".join(f", {how} {what}" for how, what in others.items())


def _rows(
    one: Run,
    title: str,
    seed: int,
    captions: Sequence[str],
    held: Sequence[Score],
    differences: Sequence[float],
) -> list[Row]:
    return [
        {
            **{"number": number, "caption": caption, "run": one.root.name},
            **{"attention": title, "seed": one.config.seed, "noise_seed": seed},
            "steps": one.steps,
            **{part: int(getattr(score, part)) for part in (*PARTS, "all")},
            "rms_difference": apart,
        }
        for number, (caption, score, apart) in enumerate(
            zip(captions, held, differences, strict=True)
        )
    ]


def _share(
    one: Run, title: str, held: Sequence[Score], differences: Sequence[float]
) -> Row:
    """Shares of captions met, whole with its interval and by part."""
    rate = Rate(sum(score.all for score in held), len(held))
    low, high = rate.interval
    parts = {p: sum(getattr(score, p) for score in held) / len(held) for p in PARTS}
    return {
        **{"run": one.root.name, "attention": title, "captions": rate.total},
        **{"met": rate.successes, "share": rate.rate, "low": low, "high": high},
        **parts,
        "rms_difference": float(np.sqrt(np.mean(np.square(differences)))),
        "trained": one.trained,
    }


def _shared(config: Config) -> dict[str, Any]:
    kept = flatten(config)
    return {n: x for n, x in kept.items() if n not in {*_FREE, "run_dir", "steps"}}


def _said(title: str, share: Row) -> str:
    low, high = share["low"], share["high"]
    return (
        f"{title}: {share['met']} of {share['captions']} captions met "
        f"({100 * low:.1f} to {100 * high:.1f} %)"
    )


def write_picture(
    captions: Sequence[str],
    titles: Sequence[str],
    images: Sequence[UInt8[np.ndarray, "n R R 3"]],
    scores: Sequence[Sequence[Score]],
    heads: Sequence[str],
    path: Path,
) -> None:
    """Each caption above one image a run, with a tick or a cross for each part."""
    from PIL import Image, ImageDraw, ImageFont

    columns = min(max(1, 4 // len(images)), len(captions))
    width = len(images) * (_TILE + _GAP) - _GAP
    texts = [textwrap.wrap(text, int(width / _CHARACTER)) for text in captions]
    names = [textwrap.wrap(text, int(_TILE / _CHARACTER)) for text in titles]
    above = _LINE * max(map(len, texts)) + 2
    top = 2 * _MARGIN + _LINE * len(heads)
    start = top + _LINE * max(map(len, names))
    height = above + _TILE + _MARKS
    lines = -(-len(captions) // columns)
    across = columns * (width + 2 * _MARGIN)
    font, large = ImageFont.load_default(size=12), ImageFont.load_default(size=13)
    across = max(across, 2 * _MARGIN + int(max(map(font.getlength, heads))))
    page = Image.new("RGB", (across, start + lines * height), "white")
    pen = ImageDraw.Draw(page)
    pen.text((_MARGIN, _MARGIN), "\n".join(heads), fill="black", font=font, spacing=4)
    for number, text in enumerate(texts):
        left = _MARGIN + number % columns * (width + 2 * _MARGIN)
        upper = start + number // columns * height
        pen.text((left, upper), "\n".join(text), fill="black", font=large)
        for place, name in enumerate(names):
            x, y = left + place * (_TILE + _GAP), upper + above
            if number < columns:
                pen.text((x, top), "\n".join(name), fill="#555555", font=font)
            tile = Image.fromarray(images[place][number])
            page.paste(tile.resize((_TILE, _TILE), Image.Resampling.NEAREST), (x, y))
            for part, word in enumerate(PARTS):
                at = x + part % 2 * (_TILE // 2), y + _TILE + 4 + part // 2 * _LINE
                draw_mark(pen, at[0], at[1] + 2, getattr(scores[place][number], word))
                pen.text((at[0] + 15, at[1]), word, fill="black", font=font)
    page.save(path)
