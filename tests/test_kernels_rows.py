"""The kernel for the backward pass's sums: who does what, results, machine code."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from attn_jax.kernels.hopper_backward_rows import Sums, backward_rows
from attn_jax.kernels.hopper_backward_rows_plan import Deal, Plan, Tiles
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

    def tiles(self, plan: Plan) -> Tiles:
        return Tiles(
            self.batch,
            self.query_count,
            self.key_count,
            self.heads,
            self.key_heads,
            self.head_dim,
            arrays={"low": 3, "alone": 2, "wide": 1}[self.out],
            wide=self.out == "wide",
            plan=plan,
        )

    def inputs(self):
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


@pytest.mark.parametrize(
    ("chunk_items", "row_items", "ctas", "worth"),
    [*itertools.product((3, 17), (4, 300), (1, 7), (4, 1.3))],
)
def test_every_item_is_dealt_once(chunk_items, row_items, ctas, worth):
    deal = Deal(chunk_items, row_items, min(ctas, chunk_items + row_items), worth)
    cta, i = (jnp.arange(n, dtype=jnp.int32) for n in (deal.ctas, 400))
    chunks, rows = deal.counts(cta)
    for items, counts, count in (
        (deal.chunk_item(cta[:, None], i), chunks, chunk_items),
        (deal.row_item(cta[:, None], i), rows, row_items),
    ):
        dealt = np.asarray(items)[np.asarray(i < counts[:, None])]
        assert sorted(dealt.tolist()) == list(range(count))
    work = np.asarray(chunks * worth + rows)
    if row_items >= ctas * worth:
        # A chunk is taken for a whole number of items.
        assert np.ptp(work) <= 1 + abs(worth - round(worth)) + 1e-4


@pytest.mark.parametrize("out", ["low", "alone", "wide"])
@pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 192, 256])
@pytest.mark.parametrize("heads", [(1, 1), (3, 3), (8, 2), (32, 32)])
def test_tiles_are_what_tma_takes(heads, head_dim, out):
    case = Case(2, 72, 1000, *heads, head_dim, out)
    for plan in (Plan(), Plan(elements=2048, columns=128), Plan(elements=8192)):
        tiles = case.tiles(plan)
        assert tiles.width <= 256 and tiles.rows <= 256
        assert tiles.rows % tiles.row_lanes.strip == 0
        assert tiles.rows % tiles.key_lanes.strip == 0
        assert tiles.key_lanes.strip % 8 == 0
        assert tiles.group * tiles.rows * 4 % 128 == 0
        keys = tiles.chunks * tiles.fills * tiles.fill_keys
        assert keys >= case.key_count > keys - tiles.chunks * tiles.fill_keys


def _interpreted(case: Case, plan: Plan) -> list[np.ndarray]:
    program = jax.jit(lambda *arrays: backward_rows(*arrays, plan=plan))
    with interpreted(detect_races=True):
        return [np.asarray(x) for x in program(*case.inputs())]


def _check(results: list[np.ndarray], case: Case, plan: Plan) -> None:
    """Against float64.

    n FP32 additions in any order err by up to n u times the sum of what is added, in
    absolute value; out + low and its product with dO each round once before. 1.01 is
    for terms in u^2. Maxima are exact.
    """
    found = Sums(*(x.astype(np.float64) for x in results))
    out, low, dout, key, value = (
        None if x is None else x.astype(np.float64) for x in case.inputs()
    )
    out = out if low is None else out + low
    for sums, other in ((found.excess, out), (found.dout_squares, dout)):
        exact = np.einsum("btnh,btnh->bnt", dout, other)
        size = np.einsum("btnh,btnh->bnt", abs(dout), abs(other))
        assert (abs(sums - exact) <= 1.01 * U * (case.head_dim + 1) * size).all()

    tiles = case.tiles(plan)
    length = tiles.fills * tiles.fill_keys
    assert {x.shape[1] for x in found[2:]} == {tiles.chunks}
    for chunk in range(tiles.chunks):
        keys, values = (x[:, chunk * length :][:, :length] for x in (key, value))
        for sums, terms in ((found.key_sums, keys), (found.key_squares, keys * keys)):
            bound = 1.01 * U * length * abs(terms).sum(axis=1)
            assert (abs(sums[:, chunk] - terms.sum(axis=1)) <= bound).all()
        for largest, of in ((found.key_largest, keys), (found.value_largest, values)):
            assert (largest[:, chunk] == abs(of).max(axis=1)).all()


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
    for one, same in zip(*results, strict=True):
        np.testing.assert_array_equal(one.view(np.uint32), same.view(np.uint32))


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
    program = jax.jit(lambda *arrays: backward_rows(*arrays, plan=plan))
    results, again = ([np.asarray(x) for x in program(*case.inputs())] for _ in "12")
    _check(results, case, plan)
    for one, same in zip(results, again, strict=True):
        np.testing.assert_array_equal(one.view(np.uint32), same.view(np.uint32))


@pytest.mark.parametrize("lengths", [(12, 16), (16, 12)])
def test_other_lengths_are_refused(lengths):
    case = Case(1, *lengths, 1, 1, 64)
    arrays = [jnp.asarray(x) for x in case.inputs()]
    with pytest.raises(NotImplementedError, match="multiples of 8"):
        backward_rows(*arrays)


def _compiled(case: Case, x64: bool) -> Program:
    arrays = [
        None if x is None else jax.ShapeDtypeStruct(x.shape, x.dtype)
        for x in case.inputs()
    ]
    given = [x for x in arrays if x is not None]

    def program(*given):
        left = iter(given)
        return backward_rows(*(None if x is None else next(left) for x in arrays))

    with jax.enable_x64(x64):
        return compiled(program, *given)


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
    program = in_child_process(_compiled, case, x64, seconds=TIME_LIMIT)
    (kernel,) = program.kernels
    assert kernel.spilled_bytes == 0
    assert 2 * (kernel.shared_memory + 1024) <= SHARED_MEMORY
    assert {"UTMALDG", "UTMASTG", "LDS"} <= kernel.opcodes
    # No array comes by way of a thread, nothing is added by atomics.
    assert not {"LDG", "LDL", "STL", "RED", "ATOM", "ATOMG", "ATOMS"} & kernel.opcodes
