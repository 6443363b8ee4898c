"""Ampere's backward pass in one kernel: its results, its machine code.

The interpreter runs CTAs one after the other, and adds integers to memory at once.
"""

import dataclasses
from unittest.mock import patch

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from attn_jax.audit.error import unit_error
from attn_jax.audit.inputs import Inputs, Shape, make_inputs
from attn_jax.centre import centre_of
from attn_jax.formats import BF16
from attn_jax.kernels import ampere_backward_fused as fused
from attn_jax.kernels import ampere_fixed_point as fixed_point
from attn_jax.kernels import ampere_fused_work, ampere_tiles, architecture
from attn_jax.kernels.ampere_query_gradient import query_gradient
from attn_jax.kernels.architecture import made_for
from attn_jax.kernels.attention import attention
from attn_jax.kernels.compiler import shared_memory
from attn_jax.kernels.hopper_key_numbers import KeyNumbers
from attn_jax.kernels.hopper_range import Range, range_of
from attn_jax.kernels.interpreter import interpreted
from attn_jax.kernels.tilings import AmperePlan
from attn_jax.mask import Mask
from attn_jax.recipe_schema import MOST_HEAD_EXPONENT
from attn_jax.reference import golden
from tests.child_process import in_child_process
from tests.gpu_compiler import Program, compiled

TIME_LIMIT = 120  # seconds
# The table's, by head dim.
PLANS = {64: AmperePlan(32), 128: AmperePlan(64)}


@dataclasses.dataclass(frozen=True)
class Case:
    """`power`: of two, that dO and dLSE are multiplied by; K is divided by its root and
    Q multiplied."""

    shape: tuple[int, int, int, int, int, int]  # B, T, S, N, K, H
    is_causal: bool
    family: str = "normal"
    queries: int | None = None
    power: int = 0
    has_row_sum: bool = True

    def __str__(self) -> str:
        mask = "causal" if self.is_causal else "full"
        power = f"{self.power}" if self.has_row_sum else f"{self.power}-none"
        return f"{self.shape}-{mask}-{self.family}-{self.plan.queries}-{power}"

    @property
    def plan(self) -> AmperePlan:
        if self.queries is not None:
            return AmperePlan(self.queries)
        return PLANS[self.shape[-1]]

    def inputs(self) -> tuple[Inputs, np.ndarray]:
        """(inputs, dLSE)"""
        dtype = ml_dtypes.bfloat16
        shape = Shape(*self.shape)
        inputs = make_inputs(self.family, 0, shape, dtype)
        one_way, half = dtype(2.0**self.power), dtype(2.0 ** (self.power // 2))
        inputs = inputs._replace(
            query=inputs.query * half, key=inputs.key / half, dout=inputs.dout * one_way
        )
        rows = (shape.batch, shape.heads, shape.query_length)
        dlse = 0.1 * np.random.default_rng(1).standard_normal(rows).astype(np.float32)
        return inputs, dlse * 2.0**self.power * self.has_row_sum


def _padded(x: np.ndarray) -> np.ndarray:
    return np.pad(x, ((0, 0), (0, -x.shape[1] % 8), (0, 0), (0, 0)))


def _range(inputs: Inputs, dlse: np.ndarray) -> Range:
    """What the kernel is given."""
    key, value = (np.abs(x.astype(np.float64)) for x in (inputs.key, inputs.value))
    shape = *key.shape[::2], key.shape[3]

    def in_each(x):
        return jnp.broadcast_to(jnp.asarray(x, jnp.float32)[..., None], shape)

    numbers = KeyNumbers(
        centre=centre_of(jnp.asarray(inputs.key), BF16),
        key_factor=in_each(2.0 ** (14 - np.frexp(key.max(axis=(1, 3)))[1])),
        value_norm=in_each(np.linalg.norm(value.max(axis=1), axis=2)),
        unscale=jnp.ones(0),  # of the forward pass
    )
    norm = np.linalg.norm(inputs.dout.astype(np.float32), axis=-1).swapaxes(1, 2)
    return range_of(
        numbers, jnp.asarray(norm), jnp.asarray(dlse), jnp.asarray(inputs.key)
    )


def _operands(case: Case):
    """(those of the kernel, exact results, their sizes) but with rows' numbers FP64."""
    inputs, dlse = case.inputs()
    mask = Mask(case.is_causal)
    exact = golden(*inputs, dlse, mask=mask)
    size = golden(*inputs, dlse, mask=mask, absolute=True)
    delta = (inputs.dout.astype(np.float64) * exact.out).sum(-1).swapaxes(1, 2) - dlse
    arrays = inputs.query, inputs.key, inputs.value, inputs.dout
    rows = exact.lse.astype(np.float32), delta.astype(np.float32)
    row_sum = dlse if case.has_row_sum else None
    return (
        (*map(_padded, arrays), *rows, row_sum, _range(inputs, dlse)),
        *(exact, size),
    )


def _options(case: Case) -> dict:
    shape = Shape(*case.shape)
    return {
        "query_count": shape.query_length,
        "key_count": shape.key_length,
        "scale": shape.head_dim**-0.5,
        "is_causal": case.is_causal,
        "plan": case.plan,
    }


def _run(case: Case, operands) -> list[np.ndarray]:
    """Anew: jit knows a program that was traced outside of the interpreter."""
    program = jax.jit(lambda *x: fused.backward_fused(*x, **_options(case)))
    with made_for("ampere"), interpreted(detect_races=True):
        return [np.asarray(x) for x in program(*operands)]


def _units(case: Case) -> list[float]:
    """Errors of dQ, dK, dV in units."""
    operands, exact, size = _operands(case)
    results = [x.astype(np.float64) for x in _run(case, operands)]
    pairs = zip(("dquery", "dkey", "dvalue"), results, strict=True)
    return [unit_error(x, getattr(exact, n), BF16, getattr(size, n)) for n, x in pairs]


CASES = [
    Case((1, 64, 128, 1, 1, 64), False, has_row_sum=False),
    # Lengths that fill no block, a group of heads, two entries of a batch.
    pytest.param(Case((2, 70, 205, 2, 1, 64), False), marks=pytest.mark.ci),
    pytest.param(Case((1, 136, 136, 4, 2, 128), True), marks=pytest.mark.ci),
    pytest.param(Case((1, 200, 200, 2, 2, 64), True, "wide"), marks=pytest.mark.ci),
    # LSE so low that hidden keys overflow.
    Case((1, 40, 67, 1, 1, 128), False, "lse-130"),
    # Gradients and keys far outside FP16's range.
    Case((1, 130, 130, 1, 1, 64), True, power=60),
]
# What these have is in others, too.
FURTHER = [
    Case((1, 70, 205, 1, 1, 64), False, power=-60),
    Case((1, 100, 260, 1, 1, 128), False, "offset"),
    Case((1, 300, 300, 2, 1, 64), True, "uniform"),
    Case((1, 300, 300, 1, 1, 128), True, has_row_sum=False),
    # Not the table's plan.
    Case((1, 130, 130, 1, 1, 64), True, queries=64),
]


@pytest.mark.parametrize(
    "case",
    CASES + [pytest.param(case, marks=pytest.mark.thorough) for case in FURTHER],
    ids=str,
)
def test_interpreted_gradients_are_as_exact_as_declared(case):
    """dS adds 1 to the square of 1 unit, at most, where it is BF16, a 64th where it is
    FP16; the rest, K' and the integers, is FP32 or as good as exact."""
    dq, dk, dv = in_child_process(_units, case, seconds=TIME_LIMIT)
    assert dq < 1.03
    assert max(dk, dv) < 1.7


def _in_lots(case: Case, tiles_together: int) -> list[bytes]:
    with patch.object(ampere_fused_work, "TILES_TOGETHER", tiles_together):
        return [x.tobytes() for x in _run(case, _operands(case)[0])]


@pytest.mark.parametrize(
    "case",
    [
        Case((3, 70, 205, 2, 1, 64), False),
        pytest.param(Case((2, 136, 136, 4, 2, 128), True), marks=pytest.mark.ci),
        # More blocks of queries than tiles of keys.
        pytest.param(Case((1, 700, 130, 3, 3, 64), False), marks=pytest.mark.thorough),
    ],
    ids=str,
)
def test_sums_are_clear_that_others_clear(case):
    """Memory holds something where it was not cleared. Pairs one by one, where each
    clears for the next, give the bits of all at once."""
    at_once, in_lots = (
        in_child_process(_in_lots, case, n, seconds=TIME_LIMIT) for n in (128, 2)
    )
    assert in_lots == at_once


def _by_multiprocessors(case: Case, count: int):
    """(dQ, dK and dV, sizes of what dK and dV are sums of)"""
    operands, _, size = _operands(case)
    with patch.object(architecture, "A100_MULTIPROCESSORS", count):
        return _run(case, operands), (size.dkey, size.dvalue)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case((2, 170, 205, 4, 2, 64), False), marks=pytest.mark.ci),
        pytest.param(Case((1, 600, 130, 1, 1, 128), False), marks=pytest.mark.thorough),
    ],
    ids=str,
)
def test_ctas_that_share_a_tile_make_what_one_does(case):
    """dK and dV but for the order in which FP32 adds; dQ has none."""
    (of_one, sizes), (of_more, _) = (
        in_child_process(_by_multiprocessors, case, n, seconds=TIME_LIMIT)
        for n in (1, 108)
    )
    assert of_one[0].tobytes() == of_more[0].tobytes()
    _, queries, _, heads, key_heads, _ = case.shape
    # A term, a product of operands off by 2^-8 each at most, is in as many additions as
    # there are queries, and in one for each part: off by so many u in either order.
    additions = queries * heads // key_heads + ampere_fused_work.MOST_PARTS
    for one, more, size in zip(of_one[1:], of_more[1:], sizes, strict=True):
        assert (one != more).any()
        one, more = (x.astype(np.float64) for x in (one, more))
        # And both are rounded to BF16, to neighbours at most.
        apart = 2 * additions * 2.0**-24 * 1.02 * size + 2.0**-7 * np.abs(one)
        assert (np.abs(more - one) <= apart).all()


def _exact_integers() -> tuple[np.ndarray, np.ndarray]:
    """Of inputs that leave nothing to round but tiles of dQ: the sums, by the kernel
    and by NumPy.

    Q = 0 and LSE = 0, so P = 1, and with the factor that dS has a power of two; V, dO
    and delta are few integers.
    """
    rng = np.random.default_rng(0)
    shape = B, T, S, N, K, H = 2, 72, 200, 2, 1, 64
    key, value = rng.integers(-3, 4, (2, B, S, K, H))
    dout, delta = rng.integers(-1, 2, (B, T, N, H)), rng.integers(-4, 5, (B, N, T))
    exponent, factor, centre = -3, 0.5, 1.0
    numbers = Range(
        centre=jnp.full((B, K, H), centre),
        key_factor=jnp.full((B, K, H), factor),
        row_exponent=jnp.full((B, K), exponent, jnp.int32),
    )
    dp = np.einsum("btnh,bskh->bnts", dout, value)
    ds = 2.0**exponent * (dp - delta[..., None])
    keys = factor * (key[:, :, 0] - centre)
    expected = np.zeros((B, T, N, H))
    for start in range(0, S, fused.KEY_TILE):
        tile = slice(start, start + fused.KEY_TILE)
        product = np.einsum("bnts,bsh->btnh", ds[..., tile], keys[:, tile])
        assert (np.modf(product)[0] == 0.5).any()
        expected += np.rint(product)
    arrays = (x.astype(ml_dtypes.bfloat16) for x in (0 * dout, key, value, dout))
    rows = np.zeros((B, N, T), np.float32), delta.astype(np.float32)
    found = []

    def keep(sums, *args, **kwargs):
        found.append(sums)
        return query_gradient(sums, *args, **kwargs)

    def program(*operands):
        with patch.object(fused, "query_gradient", keep):
            fused.backward_fused(*operands, **_options(Case(shape, False)))
        return _in_order(found.pop())

    with made_for("ampere"), interpreted(detect_races=True):
        sums = np.asarray(jax.jit(program)(*arrays, *rows, None, numbers))
    return sums[:, :T], expected


def _in_order(sums: jax.Array) -> jax.Array:
    """As [B, T, N, H]."""
    return jax.vmap(jax.vmap(fixed_point.in_order))(sums).swapaxes(1, 2)


def test_the_sum_is_that_of_tiles_rounded_to_integers():
    found, expected = in_child_process(_exact_integers, seconds=TIME_LIMIT)
    np.testing.assert_array_equal(found, expected)


def _not_held(case: Case, which: str) -> list[np.ndarray]:
    """dQ, and that of operands of which an entry is altered."""
    operands = _operands(case)[0]
    *arrays, lse, delta, row_sum, numbers = operands
    lse, delta = lse.copy(), delta.copy()
    if which == "lse":
        lse[:, 1, 9] = np.nan
    if which == "delta":
        delta[:, 1, 9] = np.inf
    if which == "row_exponent":
        least = jnp.int32([[numbers.row_exponent[0, 0], -MOST_HEAD_EXPONENT]])
        numbers = numbers._replace(row_exponent=least)
    if which == "key_factor":
        least = numbers.key_factor.at[:, 1].set(2.0**-MOST_HEAD_EXPONENT)
        numbers = numbers._replace(key_factor=least)
    altered = (*arrays, lse, delta, row_sum, numbers)
    return [_run(case, x)[0].astype(np.float32) for x in (operands, altered)]


@pytest.mark.parametrize(
    "which",
    [pytest.param(x, marks=pytest.mark.ci) for x in ("lse", "row_exponent")]
    + ["delta", "key_factor"],
)
def test_what_integers_do_not_hold_is_not_hidden(which):
    """Of a row whose LSE or delta is not finite dQ is NaN, as it is of a head beyond
    the range of what it is scaled by; nothing else is."""
    case = Case((1, 40, 67, 2, 2, 64), False, has_row_sum=which != "delta")
    whole, found = in_child_process(_not_held, case, which, seconds=TIME_LIMIT)
    expected = whole.copy()
    expected[:, [9] if which in ("lse", "delta") else slice(None), 1] = np.nan
    assert np.isfinite(whole).all()
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    ("query", "value", "is_causal", "why"),
    [
        ((1, 320, 4, 64), (1, 333, 2, 64), False, None),
        ((1, 320, 4, 128), (1, 320, 2, 128), True, None),
        ((1, 320, 4, 64), (1, 333, 2, 64), True, "320 queries and 333 keys"),
        ((1, 320, 4, 96), (1, 320, 4, 96), False, "head dim 96"),
        ((1, 320, 4, 64), (1, 320, 4, 128), False, "128 for V"),
        ((1, 0, 4, 64), (1, 320, 4, 64), False, "no query"),
    ],
)
def test_what_it_does_not_take_it_says(query, value, is_causal, why):
    reason = fused.reason_against(query, value, is_causal=is_causal)
    assert reason is None if why is None else why in str(reason)


def test_a_plan_for_which_there_is_no_room_is_refused():
    case = Case((1, 64, 128, 1, 1, 128), False, queries=32)
    operands = jax.tree.map(jnp.asarray, _operands(case)[0])
    with pytest.raises(NotImplementedError, match="blocks of 32 queries, not 64"):
        fused.backward_fused(*operands, **_options(case))


def test_other_inputs_than_bfloat16_are_refused():
    case = Case((1, 64, 128, 1, 1, 64), False)
    *arrays, lse, delta, _, numbers = _operands(case)[0]
    half = [jnp.asarray(x, jnp.float16) for x in arrays]
    rows = map(jnp.asarray, (lse, delta))
    with pytest.raises(NotImplementedError, match="inputs of type float16"):
        fused.backward_fused(*half, *rows, None, numbers, **_options(case))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case",
    [
        *CASES,
        *FURTHER,
        # CTAs side by side.
        Case((2, 1000, 1337, 8, 2, 64), False),
        Case((2, 1111, 1111, 8, 8, 64), True),
        Case((1, 1337, 500, 4, 4, 128), False),
        Case((2, 1024, 1024, 8, 2, 128), True),
    ],
    ids=str,
)
def test_gradients_on_a_gpu(case):
    operands, exact, size = _operands(case)
    program = jax.jit(lambda *x: fused.backward_fused(*x, **_options(case)))
    with made_for("ampere"):
        results, again = (jax.device_get(program(*operands)) for _ in "12")
    for name, x, same in zip(("dquery", "dkey", "dvalue"), results, again, strict=True):
        assert x.tobytes() == same.tobytes()
        wide = x.astype(np.float64)
        units = unit_error(wide, getattr(exact, name), BF16, getattr(size, name))
        assert units < (1.1 if name == "dquery" else 1.7), name


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("tiles_together", [4, 128])
def test_several_lots_and_waves_on_a_gpu(head_dim, is_causal, tiles_together):
    """2048 CTAs: more than run at once, who wait for those that clear."""
    shape = 32, 1024, 8, head_dim
    query, key, value, dout = (
        jax.random.normal(jax.random.key(i), shape, "bfloat16") for i in range(4)
    )

    def gradients(*arrays, together):
        def attend(*arrays):
            options = {"mask": Mask(is_causal), "backward": "fused"}
            return attention(*arrays, scale=head_dim**-0.5, **options)[0]

        jax.clear_caches()  # They know nothing of what is patched.

        def backward(*arrays):
            _, pullback = jax.vjp(attend, *arrays[:3])
            return pullback(arrays[3])

        with (
            made_for("ampere"),
            patch.object(ampere_fused_work, "TILES_TOGETHER", together),
        ):
            found = [jax.jit(backward)(*arrays) for _ in "12"]
        return [[x.tobytes() for x in jax.device_get(y)] for y in found]

    expected, _ = gradients(query, key, value, dout, together=10**6)
    for found in gradients(query, key, value, dout, together=tiles_together):
        assert found == expected


# Enough for pairs that are dealt out after the first.
BATCH = 8


def _compiled(
    head_dim: int,
    is_causal: bool,
    length: int,
    key_heads: int,
    has_row_sum: bool,
    is_shared: bool,
) -> Program:
    query = jax.ShapeDtypeStruct((BATCH, length, 4, head_dim), "bfloat16")
    key = jax.ShapeDtypeStruct((BATCH, length, key_heads, head_dim), "bfloat16")
    rows = jax.ShapeDtypeStruct((BATCH, 4, length), "float32")
    numbers = Range(
        *[jax.ShapeDtypeStruct((BATCH, key_heads, head_dim), "float32")] * 2,
        jax.ShapeDtypeStruct((BATCH, key_heads), "int32"),
    )

    def program(query, key, value, dout, lse, delta, *rest):
        row_sum = rest[3] if has_row_sum else None
        return fused.backward_fused(
            *(query, key, value, dout, lse, delta, row_sum, Range(*rest[:3])),
            query_count=length,
            key_count=length,
            scale=0.1,
            is_causal=is_causal,
            plan=PLANS[head_dim],
        )

    extra = [rows] if has_row_sum else []
    least = ampere_fused_work.LEAST_SAVED if is_shared else 1.0
    with made_for("ampere"), patch.object(ampere_fused_work, "LEAST_SAVED", least):
        return compiled(
            *(program, query, key, key, query, rows, rows, *numbers, *extra),
            gpu="a100",
        )


@pytest.mark.ci
@pytest.mark.parametrize(
    ("problem", "spilled_bytes", "is_shared"),
    # Integers, beside accumulators as large as registers allow; at 128 V, too, which
    # is worth it: 1.11 to 1.22 times as fast (`results/prototypes/ampere_h128.csv`).
    [
        ((64, True, 1088, 4), 96, False),
        ((128, False, 1100, 2), 148, False),
        # Nearly all that is spilled more lies past the loop, where sums are handed on.
        ((128, False, 1100, 2), 232, True),
        pytest.param((64, True, 1100, 2), 80, False, marks=pytest.mark.thorough),
        pytest.param((64, False, 1088, 4), 12, False, marks=pytest.mark.thorough),
        pytest.param((64, False, 1100, 2), 36, False, marks=pytest.mark.thorough),
        pytest.param((128, True, 1088, 4), 292, False, marks=pytest.mark.thorough),
    ],
)
def test_compiles_and_fits(problem, spilled_bytes, is_shared):
    pytest.importorskip("jax_cuda13_plugin", reason="needs the extra `compile`")
    head_dim, is_causal, length, _ = problem
    arguments = *problem, is_causal, is_shared
    among = f"a100, shared {is_shared}"  # JAX 0.12 reports a kernel once a process.
    program = in_child_process(_compiled, *arguments, seconds=TIME_LIMIT, among=among)
    kernel, begin, end = program.kernels
    assert kernel.name == "attention_backward_fused"
    assert begin.name == "attention_clear" and begin.spilled_bytes == 0
    assert [x for x in begin.instructions if x.startswith("ST") and x.endswith(".128")]
    assert kernel.spilled_bytes <= spilled_bytes and kernel.registers <= 255
    # One warpgroup at head dim 64, of which two fit; two in one CTA at 128.
    limit = ampere_tiles.SMEM_LIMIT_FOR_TWO if head_dim == 64 else shared_memory("a100")
    assert kernel.shared_memory <= limit
    assert {"HMMA", "LDSM", "LDGSTS", "RED"} <= kernel.opcodes
    # Sums that this one has cleared are there for all before it is said.
    assert {"MEMBAR.ALL.GPU", "CCTL.IVALL"} <= set(kernel.instructions)
    assert not {"ATOM", "ATOMG"} & kernel.opcodes
    # A thread reads 16 bytes at a time, with all of it under way at once, and asks no
    # other thread for anything: sums of even and of odd columns, and the centre.
    assert end.name == "attention_query_gradient"
    assert end.spilled_bytes == 0 and end.registers <= 64 and end.shared_memory == 0
    assert not {"SHFL", "LDS", "STS"} & end.opcodes
    moves = [x for x in end.instructions if x.endswith(".128")]
    stores = moves.count("ST.E.128")
    assert stores == 4 or length % 64 != 0
    assert moves == (2 * stores + 2) * ["LD.E.128"] + stores * ["ST.E.128"]
