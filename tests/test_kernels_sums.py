"""The kernels that sum over rows and over keys: results, machine code."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from attn_jax.kernels.hopper_column_sums import ColumnSums, column_sums
from attn_jax.kernels.hopper_row_sums import RowSums, row_sums
from attn_jax.kernels.hopper_sums_plan import ColumnTiles, Plan, RowTiles
from attn_jax.kernels.internals import interpreted
from tests.child_process import in_child_process
from tests.gpu_compiler import Program, compiled

TIME_LIMIT = 120  # seconds
U = 2.0**-24
# Of an H200's multiprocessor; each CTA takes 1024 bytes more than it asks for.
SHARED_MEMORY = 233472
DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}


@dataclasses.dataclass(frozen=True)
class Case:
    """`out` is "low" (two 16-bit parts), "alone" (one) or "wide" (FP32)."""

    batch: int
    query_count: int
    key_count: int
    heads: int
    key_heads: int
    head_dim: int
    out: str = "low"
    dtype: str = "bfloat16"

    def row_tiles(self, plan: Plan) -> RowTiles:
        of_rows = self.batch, self.query_count, self.heads, self.head_dim
        arrays = {"low": 3, "alone": 2, "wide": 1}[self.out]
        return RowTiles(*of_rows, arrays, self.out == "wide", plan)

    def column_tiles(self, plan: Plan) -> ColumnTiles:
        of_keys = self.batch, self.key_count, self.key_heads, self.head_dim
        return ColumnTiles(*of_keys, plan)

    def inputs(self) -> tuple[Any, ...]:
        """out, low, dout, key, value; columns of K and V have means of either sign."""
        rng = np.random.default_rng(0)
        dtype = DTYPES[self.dtype]
        of_queries = (self.batch, self.query_count, self.heads, self.head_dim)
        of_keys = (self.batch, self.key_count, self.key_heads, self.head_dim)
        out, dout = rng.standard_normal((2, *of_queries), np.float32)
        high, low = out.astype(dtype), None
        if self.out == "low":
            low = (out - high.astype(np.float32)).astype(dtype)
        if self.out == "wide":
            high = out
        means = 3 * rng.choice((-1, 1), self.head_dim)
        key, value = means + rng.standard_normal((2, *of_keys), np.float32)
        return high, low, *(x.astype(dtype) for x in (dout, key, value))


@pytest.mark.parametrize("out", ["low", "alone", "wide"])
@pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 192, 256])
@pytest.mark.parametrize("heads", [(1, 1), (3, 3), (8, 2), (32, 32)])
def test_tiles_are_what_tma_takes(heads, head_dim, out):
    case = Case(2, 72, 1000, *heads, head_dim, out)
    for plan in (Plan(), Plan(elements=2048, columns=128), Plan(elements=8192)):
        of_rows, of_keys = case.row_tiles(plan), case.column_tiles(plan)
        for tiles in (of_rows, of_keys):
            assert tiles.width <= 256 and tiles.rows <= 256
            assert tiles.rows % tiles.lanes.strip == 0
        assert of_keys.lanes.strip % 8 == 0
        assert of_rows.group * of_rows.rows * 4 % 128 == 0
        keys = of_keys.chunks * of_keys.fills * of_keys.fill_keys
        assert keys >= case.key_count > keys - of_keys.chunks * of_keys.fill_keys


type _Found = tuple[RowSums, tuple[ColumnSums, ...]]


def _program(case: Case, plan: Plan):
    def program(out, low, dout, key, value):
        rows = row_sums(out, low, dout, plan=plan)
        return rows, column_sums(key, value, plan=plan)

    return jax.jit(program)


def _interpreted(case: Case, plan: Plan) -> _Found:
    with interpreted(detect_races=True):
        return jax.tree.map(np.asarray, _program(case, plan)(*case.inputs()))


def _check(results: _Found, case: Case, plan: Plan) -> None:
    """Against float64.

    n FP32 additions in any order err by up to n u times the sum of what is added, in
    absolute value; out + low and its product with dO each round once before. 1.01 is
    for terms in u^2. Maxima are exact.
    """
    rows, columns = jax.tree.map(lambda x: x.astype(np.float64), results)
    out, low, dout, key, value = (
        None if x is None else x.astype(np.float64) for x in case.inputs()
    )
    out = out if low is None else out + low
    for sums, other in ((rows.excess, out), (rows.dout_squares, dout)):
        exact = np.einsum("btnh,btnh->bnt", dout, other)
        size = np.einsum("btnh,btnh->bnt", abs(dout), abs(other))
        assert (abs(sums - exact) <= 1.01 * U * (case.head_dim + 1) * size).all()

    tiles = case.column_tiles(plan)
    length = tiles.fills * tiles.fill_keys
    for found, array in zip(columns, (key, value), strict=True):
        assert {x.shape[1] for x in found} == {tiles.chunks}
        for chunk in range(tiles.chunks):
            part = array[:, chunk * length :][:, :length]
            for sums, terms in ((found.sums, part), (found.squares, part * part)):
                bound = 1.01 * U * length * abs(terms).sum(axis=1)
                assert (abs(sums[:, chunk] - terms.sum(axis=1)) <= bound).all()
            assert (found.largest[:, chunk] == abs(part).max(axis=1)).all()


# Between them: several CTAs with more and less chunks, lengths that fill no tile,
# grouped heads, one CTA with everything.
CASES = [
    (Case(1, 40, 200, 4, 2, 64), Plan(elements=2048, ctas=4, fills=2, stages=2)),
    (Case(2, 72, 104, 2, 1, 128, "alone", "float16"), Plan(ctas=1, stages=3)),
    (Case(1, 56, 88, 2, 2, 64, "wide"), Plan(ctas=3, fills=1)),
]
OTHER_HEAD_DIMS = [
    (Case(1, 40, 104, 2, 1, head_dim, out), Plan(ctas=2, fills=2))
    for head_dim in (32, 96, 192, 256)
    for out in ("low", "wide")
]


@pytest.mark.parametrize(
    ("case", "plan"),
    [
        *CASES,
        *(pytest.param(*x, marks=pytest.mark.thorough) for x in OTHER_HEAD_DIMS),
    ],
    ids=str,
)
def test_results_against_float64(case, plan):
    """The interpreter's order of additions is not the GPU's."""
    results = in_child_process(_interpreted, case, plan, seconds=TIME_LIMIT)
    _check(results, case, plan)


def test_who_does_what_changes_no_bits():
    """Which CTA takes a chunk or a tile, and which slot it lies in, is no part of the
    order of additions."""
    case, plan = CASES[0]
    other = dataclasses.replace(plan, ctas=3, stages=3)
    results = (
        in_child_process(_interpreted, case, x, seconds=TIME_LIMIT)
        for x in (plan, other)
    )
    _assert_same_bits(*results)


def _assert_same_bits(one: _Found, other: _Found) -> None:
    for x, same in zip(*map(jax.tree.leaves, (one, other)), strict=True):
        np.testing.assert_array_equal(x.view(np.uint32), same.view(np.uint32))


def _largest_of_unbounded() -> np.ndarray:
    key = np.ones((1, 16, 1, 64), ml_dtypes.bfloat16)
    key[0, 3, 0, :3] = np.nan, np.inf, -np.inf
    key[0, 5, 0, :3] = -3
    with interpreted():
        (found,) = jax.jit(column_sums)(key)
        return np.asarray(found.largest)[0, 0, 0]


def test_what_is_not_finite_is_no_largest():
    """Rows that nobody sees may hold it."""
    largest = in_child_process(_largest_of_unbounded, seconds=TIME_LIMIT)
    assert largest.tolist() == [3] * 3 + [1] * 61


@pytest.mark.gpu(capability="9.0")
@pytest.mark.parametrize(
    ("case", "plan"),
    [
        *CASES,
        *OTHER_HEAD_DIMS,
        (Case(3, 1000, 2056, 16, 8, 64), Plan()),
        (Case(2, 2056, 1000, 8, 8, 128, dtype="float16"), Plan()),
        (Case(2, 520, 1000, 8, 4, 128, "wide"), Plan()),
    ],
    ids=str,
)
def test_results_on_a_gpu(case, plan):
    program = _program(case, plan)
    results, again = (jax.tree.map(np.asarray, program(*case.inputs())) for _ in "12")
    _check(results, case, plan)
    _assert_same_bits(results, again)


def test_other_lengths_are_refused():
    out, low, dout, key, value = map(jnp.asarray, Case(1, 12, 12, 1, 1, 64).inputs())
    with pytest.raises(NotImplementedError, match="T must be a multiple of 8"):
        row_sums(out, low, dout)
    with pytest.raises(NotImplementedError, match="S must be a multiple of 8"):
        column_sums(key, value)


def _compiled(case: Case, x64: bool) -> list[Program]:
    out, low, *rest = case.inputs()
    some = [x for x in (out, *rest, low) if x is not None]
    out, dout, key, value, *low = (jax.ShapeDtypeStruct(x.shape, x.dtype) for x in some)

    def rows(out, dout, *low):
        return row_sums(out, low[0] if low else None, dout)

    with jax.enable_x64(x64):
        return [compiled(rows, out, dout, *low), compiled(column_sums, key, value)]


@pytest.mark.parametrize(
    ("case", "x64"),
    [
        (Case(2, 512, 512, 8, 8, 64), False),
        (Case(2, 504, 512, 4, 2, 128, dtype="float16"), True),
        pytest.param(
            *(Case(2, 520, 1000, 4, 4, 128, "wide"), False),
            marks=pytest.mark.thorough,
        ),
    ],
    ids=str,
)
def test_compiles_for_two_ctas_a_multiprocessor(case, x64):
    pytest.importorskip("jax_cuda13_plugin", reason="needs the extra `compile`")
    for program in in_child_process(_compiled, case, x64, seconds=TIME_LIMIT):
        (kernel,) = program.kernels
        assert kernel.spilled_bytes == 0
        assert 2 * (kernel.shared_memory + 1024) <= SHARED_MEMORY
        assert {"UTMALDG", "LDS"} <= kernel.opcodes
        # No array comes by way of a thread, nothing is added by atomics.
        forbidden = {"LDG", "LDL", "STL", "RED", "ATOM", "ATOMG", "ATOMS"}
        assert not forbidden & kernel.opcodes
