"""The fused backward kernel: its results in the interpreter, its machine code.

The order of its additions is in `test_ring_order`. The interpreter runs CTAs one after
the other, so where they would wait for each other a ring has one CTA, or the order is
that in which they run.
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
from attn_jax.formats import BF16, FP16, NumberFormat
from attn_jax.kernels import architecture, internals, interpreter, ring_order
from attn_jax.kernels import hopper_backward_fused as fused
from attn_jax.kernels.hopper_key_numbers import KeyNumbers
from attn_jax.kernels.hopper_range import Range, range_of
from attn_jax.kernels.interpreter import interpreted
from attn_jax.kernels.tilings import Plan
from attn_jax.kernels.visibility import Band
from attn_jax.mask import Mask
from attn_jax.recipe_schema import MOST_HEAD_EXPONENT
from attn_jax.reference import golden
from tests.altered_kernels import fresh_programs
from tests.child_process import in_child_process
from tests.gpu_compiler import Program, compiled
from tests.test_residuals import equations

TIME_LIMIT = 120  # seconds


@dataclasses.dataclass(frozen=True)
class Case:
    """`multiprocessors`: with more than one additions are made as CTAs run. `races`:
    unordered accesses are an error. `power`: of two, that dO and dLSE are multiplied
    by; K is divided by its root and Q multiplied."""

    shape: tuple[int, int, int, int, int, int]  # B, T, S, N, K, H
    is_causal: bool
    plan: Plan
    dtype: str = "bfloat16"
    family: str = "normal"
    multiprocessors: int = 1
    races: bool = False
    power: int = 0
    window: Band | None = None

    def __str__(self) -> str:
        mask = "causal" if self.is_causal else "full"
        mask = mask if self.window is None else str(tuple(self.window))
        changed = {
            name: value
            for name, value in dataclasses.asdict(self.plan).items()
            if value != getattr(PLAN, name)
        }
        return f"{self.shape}-{mask}-{self.dtype}-{self.family}-{self.power}-{changed}"


def _padded(x: np.ndarray) -> np.ndarray:
    return np.pad(x, ((0, 0), (0, -x.shape[1] % 8), (0, 0), (0, 0)))


def _rank_as_they_run(ring: ring_order.Ring, pair, tile, head, block):
    """`Ring.rank` if CTAs run one after the other, and each goes through its tiles."""
    del head
    orders = [
        [
            int(ring.item(member, i)[0])
            for member in range(ring.size)
            for i in range(int(ring.passes(member)))
        ]
    ]
    kind = 0
    if ring.double_rings:  # Two pairs of the first one.
        double = dataclasses.replace(ring, pairs=2, single_pairs=0, double_rings=1)
        dealt = [double.dealt(cta) for cta in range(ring.tiles + 1)]
        found = [x.item(n)[:2] for x in dealt for n in range(int(x.items))]
        orders += [[int(t) for of, t in found if of == which] for which in range(2)]
        number = pair - ring.single_pairs
        kind = jnp.where(number < 0, 0, 1 + number % 2)
    last = ring.tiles - 1 if ring.ratio is None else jax.lax.div(block, ring.ratio)

    def adds(t: int):
        return (t <= last) & (ring.part(t) == ring.part(tile))

    before = 0
    for i, order in enumerate(orders):
        place = sum(jnp.where(tile == t, n, 0) for n, t in enumerate(order))
        some = [jnp.where(adds(t) & (n < place), 1, 0) for n, t in enumerate(order)]
        before += jnp.where(kind == i, sum(some), 0)
    return before, sum(jnp.where(adds(t), 1, 0) for t in range(ring.tiles)) - 1


def _units(case: Case) -> list[float]:
    """Errors of dQ, dK, dV in units."""
    one = case.multiprocessors == 1
    rank = ring_order.Ring.rank if one else _rank_as_they_run
    shape = Shape(*case.shape)
    dtype, fmt = {
        "bfloat16": (ml_dtypes.bfloat16, BF16),
        "float16": (np.float16, FP16),
    }[case.dtype]
    inputs = make_inputs(case.family, 0, shape, dtype)
    one_way, half = dtype(2.0**case.power), dtype(2.0 ** (case.power // 2))
    inputs = inputs._replace(
        query=inputs.query * half, key=inputs.key / half, dout=inputs.dout * one_way
    )
    rows = (shape.batch, shape.heads, shape.query_length)
    dlse = 0.1 * np.random.default_rng(1).standard_normal(rows).astype(np.float32)
    dlse *= 2.0**case.power
    mask = Mask(case.is_causal, case.window and tuple(case.window))
    exact = golden(*inputs, dlse, mask=mask)
    size = golden(*inputs, dlse, mask=mask, absolute=True)
    delta = (inputs.dout.astype(np.float64) * exact.out).sum(-1).swapaxes(1, 2) - dlse
    program = jax.jit(
        lambda *x: fused.backward_fused(
            *x,
            query_count=shape.query_length,
            key_count=shape.key_length,
            scale=shape.head_dim**-0.5,
            is_causal=case.is_causal,
            window=case.window,
            plan=case.plan,
        )
    )
    operands = (inputs.query, inputs.key, inputs.value, inputs.dout)
    with (
        fresh_programs(),
        interpreted(detect_races=case.races),
        patch.object(architecture, "H100_MULTIPROCESSORS", case.multiprocessors),
        patch.object(ring_order.Ring, "rank", rank),
    ):
        results = program(
            *map(_padded, operands),
            exact.lse.astype(np.float32),
            delta.astype(np.float32),
            dlse,
            _range(inputs, dlse, fmt),
        )
        results = [np.asarray(x).astype(np.float64) for x in results]
    pairs = zip(("dquery", "dkey", "dvalue"), results, strict=True)
    return [unit_error(x, getattr(exact, n), fmt, getattr(size, n)) for n, x in pairs]


def _range(inputs: Inputs, dlse: np.ndarray, fmt: NumberFormat) -> Range:
    """What the kernel is given."""
    key, value = (np.abs(x.astype(np.float64)) for x in (inputs.key, inputs.value))
    shape = *key.shape[::2], key.shape[3]

    def in_each(x):
        return jnp.broadcast_to(jnp.asarray(x, jnp.float32)[..., None], shape)

    numbers = KeyNumbers(
        centre=centre_of(jnp.asarray(inputs.key), fmt),
        key_factor=in_each(2.0 ** (14 - np.frexp(key.max(axis=(1, 3)))[1])),
        value_norm=in_each(np.linalg.norm(value.max(axis=1), axis=2)),
        unscale=jnp.ones(0),  # of the forward pass
    )
    norm = np.linalg.norm(inputs.dout.astype(np.float32), axis=-1).swapaxes(1, 2)
    return range_of(
        *(numbers, jnp.asarray(norm), jnp.asarray(dlse), inputs.key),
        scaled=fmt == BF16,
    )


def test_what_exceeds_fp32_is_scaled_down_as_far_as_goes():
    """Infinity has no exponent: taken for 0 it would make dS 2^15 times as large."""
    numbers = KeyNumbers(*(jnp.full((1, 1, 64), 2.0**120) for _ in KeyNumbers._fields))
    norm, dlse = jnp.full((1, 1, 8), 2.0**15), jnp.full((1, 1, 8), 2.0**127)
    key = jnp.ones((1, 8, 1, 64), jnp.bfloat16)
    for given in (None, dlse):
        found = range_of(numbers, norm, given, key)
        np.testing.assert_array_equal(found.row_exponent, -MOST_HEAD_EXPONENT)


PLAN = Plan(storing_warps=0)
TWO = Plan(storing_warps=2)
APART = dataclasses.replace(PLAN, apart=True)
TWO_APART = dataclasses.replace(TWO, apart=True)
ONE_COPIER = dataclasses.replace(TWO, copiers=1)
ONE_COPIER_APART = dataclasses.replace(ONE_COPIER, apart=True)
IN_PARTS = dataclasses.replace(TWO_APART, parts=2)

CASES = [
    # Lengths that fill no block, LSE so low that hidden keys overflow.
    Case((1, 130, 67, 1, 1, 64), False, TWO, "float16", "lse-130"),
    # Gradients and keys far outside FP16's range.
    Case((1, 130, 130, 2, 1, 128), True, PLAN, power=60),
    # A ring of several CTAs.
    Case((1, 100, 330, 1, 1, 128), False, TWO, multiprocessors=2, races=True),
    # A key head's query heads in two parts.
    Case((1, 136, 136, 4, 1, 128), True, IN_PARTS, family="uniform"),
    # A window on both sides past the end, of fewer keys than a tile has.
    Case((2, 205, 205, 1, 1, 128), False, TWO, "float16", window=Band(9, 70)),
]
IN_CI = [
    # A warpgroup without keys in the last tile, and work for it after that.
    Case((1, 264, 192, 2, 2, 64), False, PLAN, races=True),
    Case((1, 330, 330, 1, 1, 64), True, APART, family="wide", multiprocessors=2),
    # A warpgroup that loads and adds, CTAs of a double ring, one of them without work,
    # and blocks that see keys of one warpgroup alone.
    Case((1, 200, 200, 1, 1, 128), True, ONE_COPIER, multiprocessors=132),
    # A window to the left.
    Case((1, 330, 330, 2, 1, 64), False, PLAN, window=Band(150, 0), races=True),
]
# What these have is in others, too.
FURTHER = [
    Case((1, 128, 192, 1, 1, 128), False, PLAN, family="offset", races=True),
    Case((1, 136, 136, 1, 1, 128), True, TWO_APART, "float16", "uniform"),
    Case((1, 70, 205, 1, 1, 64), False, PLAN, family="lse-130", races=True),
    # One head in each part.
    Case((2, 205, 205, 4, 2, 64), False, dataclasses.replace(PLAN, parts=2), "float16"),
    Case((1, 136, 136, 2, 1, 64), True, PLAN),
    Case((1, 70, 205, 1, 1, 64), False, PLAN, power=-60),
    Case(
        (1, 256, 256, 6, 3, 128),
        True,
        ONE_COPIER_APART,
        races=True,
        multiprocessors=132,
    ),
    Case((1, 384, 384, 2, 1, 128), True, ONE_COPIER, multiprocessors=132),
    Case((1, 300, 300, 1, 1, 128), False, ONE_COPIER, window=Band(70, 10), races=True),
    # Three pairs by rings, then two by a double ring.
    Case((1, 230, 230, 5, 5, 64), True, APART, multiprocessors=3),
    Case((1, 400, 400, 1, 1, 128), False, TWO, family="lse-130", window=Band(200, 0)),
]


@pytest.mark.parametrize(
    "case",
    CASES
    + [pytest.param(case, marks=pytest.mark.ci) for case in IN_CI]
    + [pytest.param(case, marks=pytest.mark.thorough) for case in FURTHER],
    ids=str,
)
def test_interpreted_gradients_are_as_exact_as_declared(case):
    """dS adds 1 to the square of 1 unit, at most, where it has the inputs' format, a
    64th where it has three bits more; the rest, and K', is FP32 or as good as exact."""
    dq, dk, dv = in_child_process(_units, case, seconds=TIME_LIMIT)
    assert dq < (1.03 if case.dtype == "bfloat16" else 1.8)
    assert max(dk, dv) < 1.7


def _failure(name: str) -> str:
    """What the interpreter says where a count, or a wait for one, is left out."""

    def nothing(token, *_):
        return token

    case = Case((1, 64, 200, 1, 1, 64), False, TWO, multiprocessors=2, races=True)
    with (
        patch.object(interpreter, name, nothing),
        patch.object(interpreter, "PATIENCE", 1.0),
        pytest.raises(RuntimeError) as error,
    ):
        _units(case)
    return str(error.value)


@pytest.mark.ci
@pytest.mark.parametrize(
    ("name", "said"), [("_count", "waits for 1 and for ever"), ("_await", "race")]
)
def test_the_interpreter_knows_the_order_of_additions(name, said):
    # JAX 0.12 says RACE DETECTED, and that itself.
    assert said in in_child_process(_failure, name, seconds=TIME_LIMIT).lower()


@pytest.mark.parametrize(
    ("query", "key", "mask", "why"),
    [
        ((1, 320, 4, 64), (1, 333, 2, 64), Band(8, 8), "a window with 320 queries"),
        ((1, 320, 4, 64), (1, 320, 2, 64), Band(8, 8), None),
        ((1, 320, 4, 64), (1, 333, 2, 64), False, None),
        ((1, 320, 4, 128), (1, 320, 2, 128), True, None),
        ((1, 264 * 128, 4, 64), (1, 264 * 128, 4, 64), True, None),
        ((1, 265 * 128, 4, 64), (1, 265 * 128, 4, 64), True, "too many"),
        ((1, 320, 4, 64), (1, 333, 2, 64), True, "320 queries and 333 keys"),
        ((1, 320, 4, 96), (1, 320, 4, 96), False, "head dim"),
        ((1, 0, 4, 64), (1, 320, 4, 64), False, "no query"),
    ],
)
def test_what_it_does_not_take_it_says(query, key, mask, why):
    window = mask if isinstance(mask, Band) else None
    reason = fused.reason_against(query, key, is_causal=mask is True, window=window)
    assert reason is None if why is None else why in str(reason)


def test_registers_that_are_asked_for_are_there():
    """Who asks for more than others give up waits for ever."""
    for copiers, consumer in fused.CONSUMER_REGISTERS.items():
        warpgroups = fused.WARPGROUPS + copiers
        # Of a thread: its share of 65 536, a multiple of 8.
        at_launch = 65_536 // (128 * warpgroups) // 8 * 8
        asked = fused.WARPGROUPS * consumer + copiers * fused.OTHER_REGISTERS
        assert asked <= warpgroups * at_launch


def _program(head_dim: int, mask: bool | Band, plan: Plan, length: int):
    """(what calls the kernel, its arrays)"""
    query = jax.ShapeDtypeStruct((2, length, 4, head_dim), "bfloat16")
    key = jax.ShapeDtypeStruct((2, length, 2, head_dim), "bfloat16")
    rows = jax.ShapeDtypeStruct((2, 4, length), "float32")

    numbers = Range(
        *[jax.ShapeDtypeStruct((2, 2, head_dim), "float32")] * 2,
        jax.ShapeDtypeStruct((2, 2), "int32"),
    )

    def program(query, key, value, dout, lse, delta, dlse, *numbers):
        return fused.backward_fused(
            *(query, key, value, dout, lse, delta, dlse, Range(*numbers)),
            query_count=length,
            key_count=length,
            scale=0.1,
            is_causal=mask is True,
            window=mask if isinstance(mask, Band) else None,
            plan=plan,
        )

    return program, (query, key, key, query, rows, rows, rows, *numbers)


def _compiled(*arguments) -> Program:
    program, arrays = _program(*arguments)
    return compiled(program, *arrays)


def _sharded(function):
    """Over one device, with JAX's check of what varies."""
    spec = jax.sharding.PartitionSpec("data")
    mesh = jax.make_mesh((1,), ("data",), (jax.sharding.AxisType.Auto,))
    return jax.shard_map(
        function, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=True
    )


@pytest.mark.parametrize("plan", [TWO, ONE_COPIER], ids=str)
def test_operands_may_vary_over_devices(plan):
    """JAX refuses references that do to a warp by itself, as one that loads is."""
    program, arrays = _program(128, True, plan, 256)
    found = equations(jax.jit(_sharded(program)).trace(*arrays).jaxpr.jaxpr)
    assert "attention_backward_fused" in [eqn.params.get("name") for eqn in found]


@pytest.mark.parametrize("shape", [(), (4,), (1,), (4, 3)], ids=str)
def test_what_a_kernel_is_given_varies_over_no_axis(shape):
    """Of any rank: which span a kernel is told to take is a list, or one number."""
    seen = []

    def look(x):
        x = x if shape else x[0]
        found = (x, internals._unvarying(x))
        seen.extend(jax.typeof(y).manual_axis_type.varying for y in found)
        return x.reshape(-1)

    jax.eval_shape(_sharded(look), jax.ShapeDtypeStruct(shape or (1,), "float32"))
    assert seen == [{"data"}, frozenset()]


@pytest.mark.ci
@pytest.mark.parametrize(
    ("head_dim", "mask", "plan"),
    [
        # Both head dims, masks, and values of either field of a plan are in the others.
        pytest.param(64, False, TWO, marks=pytest.mark.thorough),
        pytest.param(64, True, APART, marks=pytest.mark.thorough),
        (128, False, TWO),
        (128, True, IN_PARTS),
        (128, True, ONE_COPIER_APART),
        pytest.param(64, Band(500, 0), PLAN, marks=pytest.mark.thorough),
        (128, Band(500, 70), PLAN),
    ],
    ids=str,
)
def test_compiles_and_overlaps(head_dim, mask, plan):
    pytest.importorskip("jax_cuda13_plugin", reason="needs the extra `compile`")
    arguments = (head_dim, mask, plan, 1088)
    program = in_child_process(_compiled, *arguments, seconds=TIME_LIMIT)
    (kernel,) = program.kernels
    assert not kernel.serialised
    # Some integers of the loop over blocks and, with two storing warps, of theirs.
    assert kernel.spilled_bytes <= 128
    # S is waited for with dQ's products in flight, and dP with dV's; under a mask
    # behind a loop over blocks that see none of a warpgroup's keys, for dQ alone.
    of_dq = "M0" if mask else ""
    assert kernel.order.startswith(of_dq + "Me0M1M0"), kernel.order
