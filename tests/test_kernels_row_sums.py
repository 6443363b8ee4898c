"""The kernels that sum over rows for the backward pass: results, machine code."""

import dataclasses
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest

from attn_jax.kernels import ampere_row_sums
from attn_jax.kernels.architecture import made_for
from attn_jax.kernels.hopper_row_sums import Plan, RowSums, RowTiles, row_sums
from attn_jax.kernels.interpreter import interpreted
from attn_jax.kernels.lanes import Lanes
from tests.child_process import in_child_process
from tests.gpu_compiler import Program, compiled
from tests.low_part_oracle import whole

TIME_LIMIT = 120  # seconds
U = 2.0**-24
# Of an H200's multiprocessor; each CTA takes 1024 bytes more than it asks for.
SHARED_MEMORY = 233472
DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}


@dataclasses.dataclass(frozen=True)
class Case:
    """`out` is "low" (16 bits and a byte), "alone" (16 bits) or "wide" (FP32)."""

    batch: int
    count: int
    heads: int
    head_dim: int
    out: str = "low"
    dtype: str = "bfloat16"

    def tiles(self, plan: Plan) -> RowTiles:
        low, wide = self.out == "low", self.out == "wide"
        shape = self.batch, self.count, self.heads, self.head_dim
        return RowTiles(*shape, 1 if wide else 2, wide, low, plan)

    def inputs(self) -> tuple[Any, ...]:
        """out, low, dout"""
        rng = np.random.default_rng(0)
        dtype = DTYPES[self.dtype]
        shape = self.batch, self.count, self.heads, self.head_dim
        out, dout = rng.standard_normal((2, *shape), np.float32)
        high, low = out.astype(dtype), None
        if self.out == "low":
            low = rng.integers(-128, 128, shape, np.int8)
        if self.out == "wide":
            high = out
        return high, low, dout.astype(dtype)


@pytest.mark.parametrize("out", ["low", "alone", "wide"])
@pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 192, 256])
@pytest.mark.parametrize("heads", [1, 3, 8, 32])
def test_tiles_are_what_tma_takes(heads, head_dim, out):
    case = Case(2, 72, heads, head_dim, out)
    for plan in (Plan(), Plan(elements=2048, columns=128), Plan(elements=8192)):
        tiles = case.tiles(plan)
        assert tiles.width <= 256 and tiles.rows <= 256
        assert tiles.rows % tiles.lanes.strip == 0
        assert tiles.group * tiles.rows * 4 % 128 == 0
        assert tiles.stages >= 2 or plan.elements > 4096


def _interpreted(case: Case, plan: Plan) -> RowSums:
    program = jax.jit(lambda *arrays: row_sums(*arrays, plan=plan))
    with interpreted(detect_races=True):
        return jax.tree.map(np.asarray, program(*case.inputs()))


def _check(results: RowSums, case: Case) -> None:
    out, dout = _rows(case)
    _check_sums(results.excess, dout, out)
    _check_norms(results.dout_norm, dout)


def _rows(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """out, both parts of it, and dO."""
    out, low, dout = case.inputs()
    exact = out.astype(np.float64)
    return (exact if low is None else whole(out, low)), dout.astype(np.float64)


def _check_sums(sums: np.ndarray, dout: np.ndarray, other: np.ndarray) -> None:
    """Against float64.

    n FP32 additions in any order err by up to n u times the sum of what is added, in
    absolute value, n - 1 here; a product with dO rounds once before. 1.01 is for terms
    in u^2.
    """
    exact = np.einsum("btnh,btnh->bnt", dout, other)
    size = np.einsum("btnh,btnh->bnt", abs(dout), abs(other))
    assert sums.shape == exact.shape
    error = abs(sums.astype(np.float64) - exact)
    assert (error <= _of_sums(dout) * size).all()


def _of_sums(dout: np.ndarray) -> float:
    """What sums are off by, of their size."""
    return 1.01 * U * dout.shape[-1]


def _of_norms(dout: np.ndarray) -> float:
    """Half of what the sum is off by, and an instruction's 2^-23."""
    return _of_sums(dout) / 2 + 2.0**-23


def _check_norms(norms: np.ndarray, dout: np.ndarray) -> None:
    exact = np.linalg.norm(dout, axis=-1).swapaxes(1, 2)
    assert norms.shape == exact.shape
    np.testing.assert_allclose(norms, exact, rtol=_of_norms(dout), atol=0)


# Between them: several CTAs with more and less tiles, lengths that fill no tile, one
# CTA with everything.
CASES = [
    (Case(1, 40, 4, 64), Plan(elements=2048, ctas=4, stages=2)),
    (Case(2, 72, 2, 128, "alone", "float16"), Plan(ctas=1, stages=3)),
    (Case(1, 56, 2, 64, "wide"), Plan(ctas=3)),
    # A length that TMA does not take.
    (Case(2, 13, 1, 64), Plan()),
]
OTHER_HEAD_DIMS = [
    (Case(1, 40, 2, head_dim, out), Plan(ctas=2))
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
    _check(results, case)


AMPERE_CASES = [
    # Tiles that lie in one another, more rows than there are, a single one.
    *(Case(2, 77, 2, 64), Case(1, 8, 3, 32), Case(1, 40, 2, 128, "alone", "float16")),
    Case(1, 56, 2, 64, "wide"),
]
AMPERE_HEAD_DIMS = [
    Case(1, 40, 2, head_dim, out)
    for head_dim in (32, 96, 192, 256)
    for out in ("low", "wide")
]


def _on_ampere(case: Case) -> RowSums:
    program = jax.jit(lambda *x: ampere_row_sums.row_sums(*x, norms=True))
    alone = jax.jit(lambda *x: ampere_row_sums.row_sums(*x))
    with made_for("ampere"):
        results = RowSums(*map(np.asarray, program(*case.inputs())))
        excess, none = alone(*case.inputs())
    assert none is None
    np.testing.assert_array_equal(results.excess, excess)
    return results


def _interpreted_on_ampere(case: Case) -> RowSums:
    with interpreted(detect_races=True):
        return _on_ampere(case)


@pytest.mark.parametrize(
    "case",
    [
        *AMPERE_CASES,
        *(pytest.param(x, marks=pytest.mark.thorough) for x in AMPERE_HEAD_DIMS),
    ],
    ids=str,
)
def test_ampere_against_float64(case):
    results = in_child_process(_interpreted_on_ampere, case, seconds=TIME_LIMIT)
    _check(results, case)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case",
    [*AMPERE_CASES, *AMPERE_HEAD_DIMS, Case(3, 1000, 16, 64), Case(2, 2056, 8, 128)],
    ids=str,
)
def test_ampere_on_a_gpu(case):
    results, again = _on_ampere(case), _on_ampere(case)
    _check(results, case)
    _assert_same_bits(results, again)


# Powers of two that rows of dO are multiplied by.
POWERS = np.arange(-124, 124, 4)


def _of_all_sizes(kernels: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(dO of rows of many sizes and some that are none, norms, excess)"""
    count, width = len(POWERS) + 4, 64
    rng = np.random.default_rng(0)
    dout = rng.uniform(0.5, 1, (1, count, 1, width)) * rng.choice([-1, 1], width)
    dout[0, : len(POWERS), 0] *= 2.0 ** POWERS[:, None]
    dout[0, -4] = 0
    dout[0, -3] = 2.0**127
    dout[0, -2, 0, 5], dout[0, -1, 0, 5] = -np.inf, np.nan
    dout = dout.astype(ml_dtypes.bfloat16)
    out = np.ones_like(dout)

    def program(out, dout):
        if kernels == "hopper":
            return row_sums(out, None, dout)
        return ampere_row_sums.row_sums(out, None, dout, norms=True)

    with made_for(kernels):
        excess, norms = map(np.asarray, jax.jit(program)(out, dout))
    return dout.astype(np.float64)[0, :, 0], norms[0, 0], excess[0, 0]


def _interpreted_of_all_sizes(kernels: str):
    with interpreted(detect_races=True):
        return _of_all_sizes(kernels)


def _check_all_sizes(dout: np.ndarray, norms: np.ndarray, excess: np.ndarray) -> None:
    """Rows know nothing of each other. The bound of a norm is one but for roundings, of
    sqrt(D), of the product."""
    *_, zero, large, infinite, nan = norms
    assert zero == 0 and large == np.finfo(np.float32).max
    # By these a row is known.
    assert not np.isfinite([infinite, nan, *excess[-2:]]).any()
    finite, norms = dout[: len(POWERS)], norms[: len(POWERS)].astype(np.float64)
    exact = np.linalg.norm(finite, axis=-1)
    in_range = (POWERS > -50) & (POWERS < 61)  # What is squared is from 1/2 to 1.
    rtol = _of_norms(dout)
    np.testing.assert_allclose(norms[in_range], exact[in_range], rtol=rtol, atol=0)
    bound = np.sqrt(64) * abs(finite).max(axis=-1)
    np.testing.assert_allclose(norms[~in_range], bound[~in_range], rtol=2 * U, atol=0)


def _of_what_is_not_finite(kernels: str, dtype: str) -> np.ndarray:
    """excess of rows of which only the first is finite, by bytes of either sign."""
    shape = 1, 5, 2, 64
    out = np.ones(shape, DTYPES[dtype])
    out[0, 1:, :, 7] = np.array([[np.inf], [-np.inf], [np.nan], [np.inf]])
    low = np.full(shape, -128, np.int8)
    low[:, :, 1] = 127
    dout = np.ones_like(out)
    dout[0, 4] = 0  # times infinity

    def program(*arrays):
        sums = row_sums if kernels == "hopper" else ampere_row_sums.row_sums
        return sums(*arrays)[0]

    with made_for(kernels), interpreted(detect_races=True):
        return np.asarray(jax.jit(program)(out, low, dout))


@pytest.mark.parametrize("kernels", ["hopper", "ampere"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_in_out_is_not_in_a_sum(kernels, dtype):
    call = _of_what_is_not_finite, kernels, dtype
    excess = in_child_process(*call, seconds=TIME_LIMIT)
    assert np.isfinite(excess[..., 0]).all()
    assert not np.isfinite(excess[..., 1:]).any()


@pytest.mark.parametrize("kernels", ["hopper", "ampere"])
def test_norms_of_whatever_size(kernels):
    found = in_child_process(_interpreted_of_all_sizes, kernels, seconds=TIME_LIMIT)
    _check_all_sizes(*found)


@pytest.mark.gpu
def test_norms_of_whatever_size_for_ampere_on_a_gpu():
    _check_all_sizes(*_of_all_sizes("ampere"))


@pytest.mark.gpu(capability="9.0")
def test_norms_of_whatever_size_on_a_gpu():
    _check_all_sizes(*_of_all_sizes("hopper"))


def test_who_does_what_changes_no_bits():
    """Which CTA takes a tile, and which slot it lies in, is no part of the order of
    additions."""
    case, plan = CASES[0]
    other = dataclasses.replace(plan, ctas=3, stages=3)
    results = (
        in_child_process(_interpreted, case, x, seconds=TIME_LIMIT)
        for x in (plan, other)
    )
    _assert_same_bits(*results)


def _assert_same_bits(one: RowSums, other: RowSums) -> None:
    for x, same in zip(one, other, strict=True):
        np.testing.assert_array_equal(x.view(np.uint32), same.view(np.uint32))


@pytest.mark.gpu(capability="9.0")
@pytest.mark.parametrize(
    ("case", "plan"),
    [
        *CASES,
        *OTHER_HEAD_DIMS,
        (Case(3, 1000, 16, 64), Plan()),
        (Case(2, 2056, 8, 128, dtype="float16"), Plan()),
        (Case(2, 520, 8, 128, "wide"), Plan()),
    ],
    ids=str,
)
def test_results_on_a_gpu(case, plan):
    program = jax.jit(lambda *arrays: row_sums(*arrays, plan=plan))
    results, again = (jax.tree.map(np.asarray, program(*case.inputs())) for _ in "12")
    _check(results, case)
    _assert_same_bits(results, again)


def _compiled(case: Case, x64: bool) -> Program:
    out, low, dout = case.inputs()
    some = [x for x in (out, dout, low) if x is not None]
    out, dout, *low = (jax.ShapeDtypeStruct(x.shape, x.dtype) for x in some)

    def program(out, dout, *low):
        return row_sums(out, low[0] if low else None, dout)

    with jax.enable_x64(x64):
        return compiled(program, out, dout, *low)


@pytest.mark.parametrize(
    ("case", "x64"),
    [
        (Case(2, 512, 8, 64), False),
        (Case(2, 504, 4, 128, dtype="float16"), True),
        pytest.param(Case(1, 520, 1, 256), False, marks=pytest.mark.thorough),
        pytest.param(Case(2, 520, 3, 192, "wide"), False, marks=pytest.mark.thorough),
    ],
    ids=str,
)
def test_compiles_for_two_ctas_a_multiprocessor(case, x64):
    pytest.importorskip("jax_cuda13_plugin", reason="needs the extra `compile`")
    program = in_child_process(_compiled, case, x64, seconds=TIME_LIMIT)
    (kernel,) = program.kernels
    assert kernel.spilled_bytes == 0
    assert 2 * (kernel.shared_memory + 1024) <= SHARED_MEMORY
    assert {"UTMALDG", "LDS"} <= kernel.opcodes
    assert {"UTMASTG", "UBLKCP"} & kernel.opcodes  # of several heads and of one
    # No array comes by way of a thread, nothing is added by atomics.
    assert not {"LDG", "LDL", "STL", "RED", "ATOM", "ATOMG", "ATOMS"} & kernel.opcodes


def _compiled_for_ampere(case: Case, norms: bool) -> Program:
    out, low, dout = (
        None if x is None else jax.ShapeDtypeStruct(x.shape, x.dtype)
        for x in case.inputs()
    )
    some = [x for x in (out, dout, low) if x is not None]

    def program(out, dout, *low):
        low = low[0] if low else None
        return ampere_row_sums.row_sums(out, low, dout, norms=norms)

    with made_for("ampere"):
        return compiled(program, *some, gpu="a100")


@pytest.mark.parametrize(
    ("case", "load", "norms"),
    [
        (Case(2, 1000, 8, 64), "128", False),
        (Case(2, 1000, 8, 128), "128", True),
        pytest.param(Case(2, 1000, 8, 64), "128", True, marks=pytest.mark.thorough),
        pytest.param(Case(2, 504, 4, 96), "64", False, marks=pytest.mark.thorough),
        pytest.param(Case(2, 520, 1, 256), "128", False, marks=pytest.mark.thorough),
    ],
    ids=str,
)
def test_ampere_reads_wide_and_with_many_threads(case, load, norms):
    """All that a thread reads is under way at once, and a multiprocessor has eight CTAs
    at least, or seven."""
    pytest.importorskip("jax_cuda13_plugin", reason="needs the extra `compile`")
    program = in_child_process(
        _compiled_for_ampere, case, norms, seconds=TIME_LIMIT, among="a100"
    )
    (kernel,) = program.kernels
    assert kernel.spilled_bytes == 0 and kernel.registers <= (72 if norms else 64)
    loads = [x for x in kernel.instructions if x.startswith(("LD.", "LDG."))]
    lanes = Lanes.of_rows(case.head_dim, 8)
    tile = ampere_row_sums.ELEMENTS // case.head_dim // lanes.strip * lanes.strip
    of_a_thread = tile * case.head_dim // 128 // lanes.vector
    # Bytes of what is missing from as many numbers.
    ends = 2 * of_a_thread * [load] + of_a_thread * [str(int(load) // 2)]
    found = [x.rpartition(".")[2].replace("E", "32") for x in loads]
    assert sorted(found) == sorted(ends)
    sums = next(i for i, x in enumerate(kernel.instructions) if x.startswith("SHFL"))
    assert not [x for x in kernel.instructions[sums:] if x in loads]
