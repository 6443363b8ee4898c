"""Hopper's forward kernel under a window: the blocks that it counts, its results.

In the interpreter, in another process since a wrong barrier hangs."""

import dataclasses
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_jax.audit.error import unit_error
from attn_jax.audit.inputs import Shape, make_inputs
from attn_jax.formats import BF16
from attn_jax.kernels import hopper_links
from attn_jax.kernels.architecture import made_for
from attn_jax.kernels.attention import attention
from attn_jax.kernels.interpreter import interpreted
from attn_jax.kernels.visibility import Band, Counted, window_of
from attn_jax.mask import Mask
from attn_jax.reference import golden
from tests.altered_kernels import fresh_programs
from tests.child_process import in_child_process

TIME_LIMIT = 120  # seconds
IN_CI, THOROUGH = pytest.mark.ci, pytest.mark.thorough
WINDOWS = [(0, 0), (63, 0), (64, 0), (150, 0), (0, 5), (100, 37), (500, 500), (7, 300)]


@pytest.mark.parametrize("columns", [64, 128, 192])
@pytest.mark.parametrize("band", WINDOWS, ids=str)
def test_counted_blocks_are_those_that_rows_see(band, columns):
    """Of the blocks of a warpgroup, and of a tile of several, none is missing; a block
    that is not cut is seen whole; and if rows are never blind each sees a key of the
    first block that its warpgroup meets, its last one."""
    length, rows, (left, right) = 448, 64, band
    counted = Counted(Band(left, right), length, rows, columns)
    i, j = np.ogrid[:length, :length]
    seen = (j >= i - left) & (j <= i + right)
    blocks = -(-length // columns)
    for start in range(0, length, rows):
        for strips in (1, 3):
            end = min(start + rows * strips, length)
            first, after = counted.seen(start, end, blocks)
            visible = seen[start:end].any(0).nonzero()[0] // columns
            assert (first, after) == (visible.min(), visible.max() + 1)
        own = seen[start : start + rows]
        first, after = counted.seen(start, start + rows, blocks)
        last_first = own[:, (after - 1) * columns : after * columns]
        assert counted.blind or last_first.any(1).all()
        for block in range(first, after - 1):
            whole = own[:, block * columns : (block + 1) * columns].all()
            assert bool(counted.is_cut(start, block)) != whole


@pytest.mark.parametrize("length", [448, 330])
@pytest.mark.parametrize("columns", [64, 128])
def test_left_ends_in_the_first_block_are_announced(columns, length):
    """They are hidden there only then. At the end of the sequence that may be where the
    window's right end is far."""
    announced = 0
    windows = [*WINDOWS, (1, 130), (127, 130), (128, 130)]
    for left, right in windows:
        counted = Counted(Band(left, right), length, 64, columns)
        i, j = np.ogrid[:length, :length]
        before = j < i - left
        for row in range(0, length, 64):
            _, after = counted.seen(row, row + 64, -(-length // columns))
            first = before[row : row + 64, (after - 1) * columns : after * columns]
            assert counted.cut_twice or not first.any()
        announced += counted.cut_twice
    assert 0 < announced < len(windows)


@pytest.mark.parametrize("huge", [2**31 - 1, 2**31 - 200])
def test_a_window_beyond_the_sequence_is_one_of_its_length(huge):
    """Sums with it would be no numbers of 32 bits, in a kernel."""
    window = window_of(Mask(window=(huge, huge)), 300, 300)
    assert window == Band(300, 300)
    assert window is not None and type(window.left) is int


def test_what_kernels_do_not_count_by_themselves():
    assert window_of(Mask(window=(4, 0)), 300, 301) is None
    assert window_of(Mask(window=(4, None)), 300, 300) is None
    lengths = Mask(window=(4, 0), key_value_lengths=np.array([9]))
    assert window_of(lengths, 300, 300) is None
    assert window_of(Mask(True), 300, 300) is None


@dataclasses.dataclass(frozen=True)
class Case:
    """One batch entry of two query heads. `link`: keys in a link of the sum."""

    length: int
    head_dim: int
    window: tuple[int, int]
    family: str = "normal"
    soft_cap: float | None = None
    sinks: tuple[float, float] | None = None
    link: int = hopper_links.KEYS

    def inputs(self):
        shape = Shape(1, self.length, self.length, 2, 1, self.head_dim)
        return make_inputs(self.family, 0, shape)


def _forward(case: Case, detect_races: bool):
    query, key, value, _ = case.inputs()
    sinks = None if case.sinks is None else jnp.asarray(case.sinks, jnp.float32)
    run = jax.jit(
        lambda *qkv: attention(
            *qkv,
            scale=case.head_dim**-0.5,
            mask=Mask(window=case.window),
            soft_cap=case.soft_cap,
            sinks=sinks,
        )
    )
    with (
        patch.object(hopper_links, "KEYS", case.link),
        fresh_programs(),
        made_for("hopper"),
        interpreted(detect_races=detect_races),
    ):
        return [np.asarray(x) for x in run(query, key, value)]


@pytest.mark.parametrize(
    ("case", "detect_races"),
    [
        # A tile of four warpgroups, and one of which two have no rows.
        (Case(330, 64, (150, 0)), True),
        # Both ends in one block; rows that do not see the block their warpgroup meets
        # first, with a sink and without.
        (Case(300, 64, (20, 75), "offset", sinks=(0.5, -20.0)), False),
        pytest.param(Case(330, 128, (9, 40), "lse-130"), False, marks=IN_CI),
        pytest.param(Case(330, 64, (1, 130)), False, marks=IN_CI),
        (Case(330, 128, (200, 0), soft_cap=3.0), False),
        # Links whose first block is one of the left end.
        pytest.param(Case(400, 128, (300, 0), link=128), False, marks=IN_CI),
        pytest.param(Case(400, 64, (390, 390), link=128), False, marks=THOROUGH),
        pytest.param(Case(200, 64, (1, 0)), False, marks=THOROUGH),
    ],
    ids=str,
)
def test_interpreted_results_are_as_exact_as_declared(case, detect_races):
    out, lse = in_child_process(_forward, case, detect_races, seconds=TIME_LIMIT)
    query, key, value, dout = case.inputs()
    exact = golden(
        *(query, key, value, dout),
        mask=Mask(window=case.window),
        soft_cap=case.soft_cap,
        sinks=None if case.sinks is None else np.float64(case.sinks),
    )
    assert unit_error(out, exact.out, BF16) <= 1.7
    # As in tests/test_kernels_interpret.py: of terms of no more than `size` altogether.
    size = np.abs(
        np.einsum("btnh,bskh->bnts", *(np.abs(query * 1.0), np.abs(key * 1.0)))
    )
    size = size.max() * case.head_dim**-0.5
    bound = 2.0**-24 * ((case.head_dim + 5) * size + case.length + 8)
    assert np.abs(lse - exact.lse).max() <= bound
