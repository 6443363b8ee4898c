"""Numbers of a key head, V as FP16 numbers, and what P and V of FP16 give."""

import dataclasses
import functools
import itertools
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from attn_jax import reference
from attn_jax.audit.error import unit_error
from attn_jax.audit.inputs import Shape, make_inputs
from attn_jax.centre import centre_of
from attn_jax.formats import BF16, FP16
from attn_jax.kernels.architecture import made_for
from attn_jax.kernels.attention import attention
from attn_jax.kernels.hopper_key_numbers import (
    MANY,
    SHORT,
    KeyNumbers,
    Plan,
    key_numbers,
    plan_for,
)
from attn_jax.kernels.hopper_softmax import P_SCALE
from attn_jax.kernels.interpreter import interpreted
from attn_jax.recipe import ATTN_JAX, Step
from tests.child_process import in_child_process
from tests.gpu_compiler import Kernel, Program, compiled

pytestmark = pytest.mark.ci

RECIPE = dataclasses.replace(
    ATTN_JAX, probability=Step(FP16), probability_scale=P_SCALE
)
TIME_LIMIT = 120  # seconds
# Of an H200's multiprocessor; each CTA takes 1024 bytes more than it asks for.
SHARED_MEMORY = 233472
LONG = Shape(1, 70, 330, 2, 1, 64)
ALONE, SHARED = Plan(most_parts=1), Plan()
# V does not stay in shared memory: of nine tiles a CTA has five.
STREAMED = Plan(value_stages=2, most_parts=2)
# A cluster has head after head: of two CTAs, and V stays there; or does not; or of one.
IN_TURN = Plan(value_stages=4, most_parts=2, ctas=2, stay=True)
STREAMED_IN_TURN = dataclasses.replace(STREAMED, ctas=2, stay=True)
ALONE_IN_TURN = dataclasses.replace(ALONE, ctas=2, stay=True)


@dataclasses.dataclass(frozen=True)
class Case:
    """`power`: of two, that K and V are multiplied by. `means`: whether columns have
    one."""

    batch: int
    keys: int
    heads: int
    head_dim: int
    value_dim: int
    plan: Plan = ALONE
    dtype: str = "bfloat16"
    half: bool = True
    power: int = 0
    means: bool = True

    def inputs(self) -> tuple[np.ndarray, np.ndarray]:
        """K and V, V from 2^-29 of its largest on, some of it not finite."""
        rng = np.random.default_rng(0)
        dtype = np.float16 if self.dtype == "float16" else ml_dtypes.bfloat16
        shape = self.batch, self.keys, self.heads, self.head_dim
        means = 3 * self.means * rng.choice((-1, 1), self.head_dim)
        key = np.ldexp(means + rng.standard_normal(shape), self.power)
        shape = *shape[:3], self.value_dim
        exponents = rng.integers(max(-29, -125 - self.power), 2, shape)
        value = 1 + rng.integers(0, 128, shape) / 128
        value = np.ldexp(value * rng.choice((-1, 1), shape), exponents - 1 + self.power)
        with np.errstate(over="ignore", under="ignore"):
            value = value.astype(dtype)
        value[0, 3, 0, :3] = np.nan, np.inf, -np.inf  # of a row that nobody sees
        return key.astype(dtype), value

    @property
    def padded(self) -> tuple[np.ndarray, np.ndarray]:
        rows = (0, 0), (0, -self.keys % 8), (0, 0), (0, 0)
        key, value = (np.pad(x, rows) for x in self.inputs())
        return key, value


def _found(case: Case) -> tuple[KeyNumbers, np.ndarray | None]:
    fmt = FP16 if case.dtype == "float16" else BF16
    program = functools.partial(
        key_numbers, key_count=case.keys, inputs=fmt, half=case.half, plan=case.plan
    )
    return jax.tree.map(np.asarray, jax.jit(program)(*case.padded))


def _interpreted(case: Case):
    with interpreted(detect_races=True):
        return _found(case)


def _check(case: Case, numbers: KeyNumbers, half: np.ndarray | None) -> None:
    """All but v are exact or, c, of so few digits that the order of additions does not
    show. v: D squares and their sum, then a root."""
    key, value = case.inputs()
    fmt = FP16 if case.dtype == "float16" else BF16
    centre = np.asarray(centre_of(jnp.asarray(key), fmt))
    np.testing.assert_array_equal(numbers.centre, centre)
    assert centre.any() == (case.means and -61 < case.power < 60)
    key, value = (x.astype(np.float64) for x in (key, value))
    size = np.where(np.isfinite(value), abs(value), 0).max(axis=1)
    norm = np.linalg.norm(size, axis=2)
    norm = np.broadcast_to(norm[..., None], size.shape)
    np.testing.assert_allclose(numbers.value_norm, norm, rtol=1e-6 * case.value_dim)
    exponent = 14 - np.frexp(abs(key).max(axis=(1, 3)))[1]
    factor = np.broadcast_to(2.0 ** exponent.clip(-100, 100)[..., None], centre.shape)
    np.testing.assert_array_equal(numbers.key_factor, factor)
    exponent = 15 - np.frexp(size.max(axis=2))[1]
    unscale = np.broadcast_to(2.0 ** -exponent.clip(-120, 120)[..., None], size.shape)
    np.testing.assert_array_equal(numbers.unscale, unscale)
    assert (half is not None) == case.half
    if half is not None:
        assert half.dtype == np.float16 and half.shape == case.padded[1].shape
        again = half.astype(np.float64) * unscale[:, None]
        np.testing.assert_array_equal(again, case.padded[1].astype(np.float64))


CASES = [
    Case(2, 101, 3, 64, 64),
    Case(1, 330, 1, 64, 128, SHARED),
    Case(1, 520, 2, 64, 64, STREAMED, power=100),
    Case(1, 330, 3, 64, 64, IN_TURN),
    Case(1, 520, 3, 64, 64, STREAMED_IN_TURN),
    Case(2, 101, 3, 64, 64, ALONE_IN_TURN),
    Case(1, 40, 1, 64, 64, power=-126),
    Case(1, 72, 1, 128, 128, dtype="float16", half=False),
    Case(1, 330, 1, 64, 64, SHARED, dtype="float16", half=False),
]
FURTHER = [
    Case(1, 600, 2, 64, 64, means=False),
    Case(1, 330, 3, 64, 128, IN_TURN, dtype="float16", half=False),
    Case(1, 520, 3, 64, 64, STREAMED_IN_TURN, half=False),
    Case(1, 520, 2, 64, 64, STREAMED, dtype="float16", half=False),
    Case(1, 72, 1, 64, 64, power=60),
    Case(1, 72, 1, 64, 64, power=-60),
    *(Case(1, 200, 1, dim, 96, SHARED) for dim in (32, 96, 192, 256)),
]


@pytest.mark.parametrize(
    "case",
    CASES + [pytest.param(case, marks=pytest.mark.thorough) for case in FURTHER],
    ids=str,
)
def test_numbers_are_those_of_k_and_v(case):
    _check(case, *in_child_process(_interpreted, case, seconds=TIME_LIMIT))


@pytest.mark.gpu(capability="9.0")
@pytest.mark.parametrize(
    "case",
    [
        *CASES,
        *FURTHER,
        Case(2, 1000, 8, 64, 64),
        # One head, whose tiles may run on into the next batch entry.
        Case(2, 101, 1, 64, 64),
        Case(64, 8, 1, 64, 64),
        Case(1, 5000, 3, 128, 128),
        Case(1, 70000, 1, 64, 64),
        # As many heads as these plans are for.
        Case(64, 320, 6, 64, 64, SHORT),
        Case(10, 1100, 16, 64, 64, MANY),
        Case(10, 1024, 16, 128, 128, MANY),
        Case(5, 2500, 16, 128, 128, MANY),
    ],
    ids=str,
)
def test_numbers_on_a_gpu(case):
    numbers, half = _found(case)
    _check(case, numbers, half)
    again = _found(case)
    for one, same in zip(*map(jax.tree.leaves, ((numbers, half), again)), strict=True):
        np.testing.assert_array_equal(one, same)


def test_parts_fill_a_card_and_have_keys():
    plan = Plan()
    assert plan.parts(1, 1) == 1
    assert plan.parts(1, 3) == 2
    assert plan.parts(1, 10**6) == plan.parts(400, 10**6) == plan.most_parts
    # V of a CTA stays in shared memory if so many can share it.
    assert plan.parts(400, 8) == 1
    assert plan.parts(400, 40) == 8


@pytest.mark.parametrize(
    ("heads", "keys", "value_dim", "plan"),
    [
        (768, 320, 64, SHORT),
        (768, 384, 64, SHORT),
        (768, 385, 64, MANY),
        (264, 192, 128, SHORT),
        (263, 192, 128, MANY),
        (60, 4096, 128, MANY),
        (59, 4096, 128, Plan()),
        (1, 8, 32, Plan()),
    ],
)
def test_plan_of_many_heads(heads, keys, value_dim, plan):
    assert plan_for(heads, keys, value_dim) == plan


def _compiled(shape: tuple[int, ...], x64: bool) -> Program:
    array = jax.ShapeDtypeStruct(shape, "bfloat16")
    with jax.enable_x64(x64):
        return compiled(
            lambda k, v: key_numbers(k, v, shape[1], BF16, half=True), array, array
        )


def _exchange(kernel: Kernel) -> list[str]:
    """How what one CTA of a cluster has written reaches another, up to the first load:
    what was written by other threads is fenced after a barrier, and what is read after
    the wait."""
    meant = {
        r"(ST|LD|BAR)\b.*": r"\1",
        r"MEMBAR.*\.GPU": "fence",
        r"SYNCS\.ARRIVE.*\.RED\b.*": "tell",
        r"SYNCS.*\.TRYWAIT": "wait",
    }
    steps = [
        re.sub(pattern, name, instruction)
        for instruction in kernel.instructions
        for pattern, name in meant.items()
        if re.fullmatch(pattern, instruction)
    ]
    steps = steps[steps.index("ST") : steps.index("LD") + 1]
    return [name for name, _ in itertools.groupby(steps)]


@pytest.mark.parametrize(
    ("shape", "x64", "ctas", "parts"),
    [
        ((1, 16384, 16, 128), False, 2, 8),
        ((128, 320, 6, 64), True, 3, 1),
        ((16, 1024, 16, 128), False, 1, 2),
        pytest.param((16, 1024, 32, 64), True, 1, 1, marks=pytest.mark.thorough),
    ],
)
def test_compiles_for_some_ctas_a_multiprocessor(shape, x64, ctas, parts):
    pytest.importorskip("jax_cuda13_plugin", reason="needs the extra `compile`")
    (kernel,) = in_child_process(_compiled, shape, x64, seconds=TIME_LIMIT).kernels
    assert kernel.spilled_bytes == 0
    assert ctas * (kernel.shared_memory + 1024) <= SHARED_MEMORY
    # 65 536 registers are there for CTAs of 128 threads.
    assert kernel.registers <= 65536 // (ctas * 128)
    if parts > 1:
        exchange = ["ST", "BAR", "fence", "tell", "wait", "fence", "LD"]
        assert _exchange(kernel) == exchange
    assert not {"LDL", "STL", "RED", "ATOM", "ATOMG", "ATOMS"} & kernel.opcodes


# ------------------------------------------------------------------- what they are for


def _outs_of_multiples(factors: list[float]) -> list[np.ndarray]:
    shape = Shape(1, 70, 100, 2, 1, 64)
    query, key, value, _ = make_inputs("normal", 0, shape)

    @jax.jit
    def attend(value):
        return attention(query, key, value, scale=0.125, recipe=RECIPE)[0]

    with made_for("hopper"), interpreted():
        multiples = [value * value.dtype.type(factor) for factor in factors]
        return [np.asarray(attend(x), np.float64) for x in multiples]


def test_a_power_of_two_of_values_is_one_of_out():
    """To the bit, as far as BF16 reaches: P has nothing to do with the size of V."""
    factors = [1.0, 2.0**120, 2.0**-90]
    out, large, small = in_child_process(
        _outs_of_multiples, factors, seconds=TIME_LIMIT
    )
    np.testing.assert_array_equal(out * 2.0**120, large)
    np.testing.assert_array_equal(out * 2.0**-90, small)


def _both_outs() -> tuple[np.ndarray, np.ndarray]:
    *qkv, _ = make_inputs("normal", 0, LONG)

    def attend(*qkv):
        return attention(*qkv, scale=0.125)[0]

    with made_for("hopper"), interpreted():
        plain = jax.jit(attend)(*qkv)
        out, _ = jax.jit(lambda *x: jax.vjp(attend, *x))(*qkv)
    return np.asarray(plain), np.asarray(out)


def test_p_is_fp16_where_it_is_differentiated():
    """Errors of out: P of eight bits shows, P of eleven does not."""
    plain, out = in_child_process(_both_outs, seconds=TIME_LIMIT)
    golden = reference.golden(*make_inputs("normal", 0, LONG)).out
    assert unit_error(out, golden, BF16) < 1.05 < 1.2 < unit_error(plain, golden, BF16)
