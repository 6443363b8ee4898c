"""Rendered shapes: reproducible, splits that do not leak, captions that are true."""

import subprocess
import sys

import numpy as np
import pytest

from train.data import shapes
from train.data.shapes import COLOURS, SHAPES, Shapes, pair_is_novel, render
from train.data.source import BatchSource


def scene_captions(family, split, count=1500, seed=0):
    return shapes.captions(Shapes(32, family, split, seed).scenes(list(range(count))))


def pairs_in(captions):
    singular = {shapes.plural(name): name for name in SHAPES} | {s: s for s in SHAPES}
    found = set()
    for caption in captions:
        words = caption.split()
        found |= {
            (word, singular[after])
            for word, after in zip(words, words[1:], strict=False)
            if word in COLOURS and after in singular
        }
    return found


@pytest.mark.parametrize("resolution", [16, 32, 64, 256])
def test_an_example_is_the_same_alone_and_in_a_batch(resolution):
    source = Shapes(resolution, "all", "train", 3)
    assert isinstance(source, BatchSource)
    indices = [5, 0, 2**31 - 2, 17, 5]
    together = source.__getitems__(indices)
    for index, example in zip(indices, together, strict=True):
        alone = source[index]
        assert alone["caption"] == example["caption"]
        assert alone["image"].dtype == np.uint8
        assert alone["image"].shape == (resolution, resolution, 3)
        np.testing.assert_array_equal(alone["image"], example["image"])


def test_pixels_are_pinned():
    # A change here changes every training run. Coverage 1/2 lies on the outline.
    scene = shapes.Scenes(
        family=np.array([0]),
        detail=np.array([4]),
        count=np.array([1]),
        colour=np.array([[3, 0, 0, 0]]),
        shape=np.array([[1, 0, 0, 0]]),
        x=np.full((1, 4), 0.5),
        y=np.full((1, 4), 0.5),
        radius=np.full((1, 4), 4 / (0.86 * 32)),
    )
    image = render(scene, 32)[0]
    expected = np.zeros((32, 32, 3), np.uint8)
    expected[12:20, 12:20] = (255, 255, 0)  # a yellow square of half side 4 pixels
    np.testing.assert_array_equal(image, expected)


def test_areas_are_alike():
    # Otherwise a shape could be told by its size: within 30 % of a circle's pi r^2,
    # but for the cross, which is thin by nature.
    grid = (np.arange(400, dtype=np.float32) - 199.5) / 100
    x, y = grid[None, :], grid[:, None]
    radius = np.ones((1, 1), np.float32)
    for name in ("square", "diamond", "triangle"):
        area = (shapes.signed_distance(name, x, y, radius) < 0).sum() / 100**2
        assert 0.6 < area / np.pi < 1.0, name


@pytest.mark.parametrize("name", SHAPES)
def test_outline_fills_its_stated_box(name):
    half_width, half_height = SHAPES[name]
    grid = (np.arange(600, dtype=np.float32) - 299.5) / 200
    radius = np.ones((1, 1), np.float32)
    inside = shapes.signed_distance(name, grid[None, :], grid[:, None], radius) < 0
    rows, columns = np.flatnonzero(inside.any(1)), np.flatnonzero(inside.any(0))
    # Centres of pixels inside fall short of the box by at most two pixels of 1/200.
    assert half_width - 0.01 <= grid[columns[-1]] <= half_width
    assert half_height - 0.01 <= grid[rows[-1]] <= half_height
    assert -half_height <= grid[rows[0]] <= -half_height + 0.01


@pytest.mark.parametrize("family", ["pos", "rel", "cnt", "all"])
def test_novel_pairs_occur_in_novel_only(family):
    train = pairs_in(scene_captions(family, "train"))
    val = pairs_in(scene_captions(family, "val"))
    novel = pairs_in(scene_captions(family, "novel"))
    assert len(train) == len(val) == 25 and len(novel) == 5
    assert train == val
    assert not train & novel
    assert all(pair_is_novel(*pair) for pair in novel)


def test_families_are_equal_parts_of_all():
    captions = scene_captions("all", "train", 3000)
    relations = sum(any(r in c for r in shapes.RELATIONS) for c in captions)
    counts = sum(c.split()[0] in shapes.NUMBERS.values() for c in captions)
    # Binomial(3000, 1/3): standard deviation 25.8, so five of them.
    assert abs(relations - 1000) < 130 and abs(counts - 1000) < 130


def test_relations_name_two_colours():
    for caption in scene_captions("rel", "train"):
        colours = [word for word in caption.split() if word in COLOURS]
        assert len(set(colours)) == 2


def test_examples_share_no_random_numbers():
    # Were the index in the Philox counter's first word, example i + 1 would repeat
    # four of every five draws of example i.
    draws = [
        Shapes(32, "all", split, seed)._uniform(list(range(200)))
        for split in ("train", "val", "novel")
        for seed in (0, 1)
    ]
    flat = np.concatenate(draws).ravel()
    assert len(np.unique(flat)) == len(flat)
    # Mean of 24000 uniform numbers: standard deviation 0.0019, so five of them.
    assert abs(flat.mean() - 0.5) < 0.0095


def test_longest_caption_fits_the_small_presets():
    captions = scene_captions("all", "train", 3000) + scene_captions("all", "novel")
    assert max(len(caption.encode()) for caption in captions) <= 64
    assert max(len(caption.split()) for caption in captions) <= 12


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((8, "pos", "train", 0), "resolution of 16"),
        ((32, "position", "train", 0), "pos, rel, cnt or all"),
        ((32, "pos", "test", 0), "train, val or novel"),
        ((32, "pos", "train", -1), "negative"),
    ],
)
def test_bad_settings_raise_one_line(arguments, message):
    # Beartype would object first where a literal is wrong.
    code = f"from train.data.shapes import Shapes; Shapes{arguments!r}"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True
    )
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("train.data.source.DataError: ") and message in last


def test_sources_need_no_jax():
    code = (
        "import sys, train.data, train.data.score\n"
        "assert not {'jax', 'flax', 'sklearn', 'polars'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
