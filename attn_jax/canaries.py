"""Canaries: checks that this machine, backend and mode do the arithmetic we claim.

Compilers drop casts, fuse roundings away, contract products and sums, run FP32 products
in TF32; text of a compiled program is no proof of what it computes. So before a number
is reported, `certify` runs the emulator's own arithmetic on inputs whose result is
known, in closed form or from NumPy, on the current backend. Each canary guards against
one thing that went wrong somewhere.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from attn_jax import emulator, formats
from attn_jax.audit.error import correctly_rounded
from attn_jax.emulator import exponential, sums
from attn_jax.formats import BF16, E4M3FN, E5M2, FP16, FP32, FP64, TF32, NumberFormat
from attn_jax.recipe import EAGER_BF16, FLASH2, Step

# Largest error of exp, log and 2^x in units in the last place. CUDA's and XLA's are
# documented or measured at 1 to 2; XLA's own exp2 on a CPU, which nothing here uses,
# is off by 32 in float32 and 46 in float64.
FUNCTION_ULPS = 4.0


class CanaryError(RuntimeError):
    """Arithmetic on this backend is not what the emulator needs; no number holds."""


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Where every canary passed.

    `contracts_products` says whether the compiler turns a * b - c into one fused
    operation. It may: no rounding of a recipe is lost by it.
    """

    backend: str
    device: str
    jit: bool
    x64: bool
    jax_version: str
    passed: tuple[str, ...]
    contracts_products: bool


# Calls a function on arrays, under jit or not, and fetches the results.
Run = Callable[..., Any]
Faults = Iterator[str | None]


def certify(*, jit: bool = True) -> Verdict:
    """Runs all canaries on the default backend, compiled (`jit`) or op by op.

    Takes a few seconds, once in a process for each backend, jit and x64 mode.

    Raises:
      CanaryError: in one line, which canary failed, what it got and wanted, and what
        that means.
    """
    x64 = bool(jax.config.read("jax_enable_x64"))
    return _certify(jax.default_backend(), jit, x64)


@functools.cache
def _certify(backend: str, jit: bool, x64: bool) -> Verdict:
    def run(function, *arrays):
        function = jax.jit(function) if jit else function
        return jax.device_get(function(*map(jnp.asarray, arrays)))

    device = jax.devices(backend)[0].device_kind
    for name, canary in CANARIES.items():
        for fault in canary(run):
            if fault is not None:
                mode = "under jit" if jit else "op by op"
                raise CanaryError(f"{name} ({backend}, {device}, {mode}): {fault}")
    contracts = _contracts_products(run)
    return Verdict(
        backend, device, jit, x64, jax.__version__, tuple(CANARIES), contracts
    )


def _float32(x) -> np.ndarray:
    return np.asarray(x, np.float32)


def _differs(what: str, got, want, meaning: str) -> str | None:
    """A line if the values of two arrays are not the same, NaN counting as equal."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    wrong = ~((got == want) | (np.isnan(got) & np.isnan(want)))
    if not wrong.any():
        return None
    first = np.unravel_index(wrong.argmax(), wrong.shape)
    return (
        f"{what}: got {got[first]:.9g} where {want[first]:.9g} is right, in "
        f"{wrong.sum()} of {wrong.size} values; {meaning}"
    )


def _rounding_survives(run: Run) -> Faults:
    """A rounding between two operations or two casts is carried out, and once."""
    # Times 3: exact, twelve bits in [1, 4), a sixteenth of them ties of BF16.
    x = (1 + np.arange(4096) / 4096).astype(np.float32)
    sign = np.where(np.arange(x.size) % 2, -1, 1).astype(np.float32)
    meaning = "a rounding was dropped or done twice: the emulator measures nothing"
    for fmt in (BF16, TF32, FP16, E4M3FN, E5M2):

        def between_operations(x, fmt=fmt):
            return formats.round_to(x * 3, fmt) * 2

        got = run(between_operations, sign * x)
        want = 2 * correctly_rounded(3.0 * sign * x, fmt)
        yield _differs(f"rounding to {fmt.name}", got, want, meaning)

    def between_casts(x):
        wide = x.astype(jnp.float32) * 3
        return formats.round_to(wide, BF16).astype(jnp.bfloat16).astype(jnp.float32)

    x = correctly_rounded(x, BF16).astype(jnp.bfloat16)
    want = correctly_rounded(3 * x.astype(np.float64), BF16)
    yield _differs("BF16 cast", run(between_casts, x), want, meaning)
    if jax.config.read("jax_enable_x64"):
        # Through float32 these would become ties, and round down.
        x = (1 + np.arange(1, 128, 2) * 2.0**-8 + 2.0**-30).astype(np.float64)
        got = run(lambda x: formats.round_to(x * 2, BF16), x)
        yield _differs("float64 to BF16", got, correctly_rounded(2 * x, BF16), meaning)


def _rounded_product(run: Run) -> Faults:
    """A product of BF16 matrices is exact in FP32, and its rounding is carried out."""
    rng = np.random.Generator(np.random.Philox(2))
    q, k = (rng.integers(-15, 16, (128, 64)).astype(jnp.bfloat16) for _ in range(2))
    exact = q.astype(np.float64) @ k.astype(np.float64).T

    def product(subscripts):
        def multiply(x, y):
            x, y = x.astype(jnp.float32), y.astype(jnp.float32)
            wide = sums.dot(subscripts, x, y)
            return wide, formats.round_to(wide, BF16)

        return multiply

    def narrow(subscripts):
        multiply = product(subscripts)
        return lambda x, y: multiply(x, y)[1].astype(jnp.bfloat16)

    for name, subscripts, right in (
        ("Q K^T", "th,sh->ts", k),
        ("Q times K transposed before", "th,hs->ts", np.ascontiguousarray(k.T)),
    ):
        wide, rounded = run(product(subscripts), q, right)
        alone = run(narrow(subscripts), q, right)
        want = correctly_rounded(exact, BF16)
        lost = "logits kept in BF16 are not: every eager baseline is wrong"
        yield _differs(f"{name} rounded to BF16", rounded, want, lost)
        yield _differs(f"{name} rounded and cast to BF16", alone, want, lost)
        meaning = "a product rounds what the recipe keeps in FP32"
        yield _differs(f"{name} in FP32", wide, exact, meaning)


# Four kinds of rows each of Q and K make few distinct logits and weights in a problem
# of full size, where compilers fuse as they do in use. With this seed whatever is
# rounded lies at a tie of BF16 exactly, as some logits do, or at least 2^-15 of its
# size from one: no FP32 error, 2^-19 at most, turns a rounding round.
_FUSED_SEED, _FUSED_SCALE, _FUSED_BLOCK = 216, 2.0**-8, 128


def _fused_inputs() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Q, K, V [256, 64] of small integers, V positive; logits need eleven bits."""
    rng = np.random.Generator(np.random.Philox(_FUSED_SEED))
    q, k = (rng.integers(-15, 16, (4, 64)).astype(np.float64) for _ in range(2))
    v = rng.integers(1, 16, (16, 64)).astype(np.float64)
    i = np.arange(256)
    return q[i % 4], k[i * 7 // 4 % 4], v[i * 5 % 16]


def _eager(q, k, v) -> tuple[np.ndarray, np.ndarray]:
    """(out, logits) of `EAGER_BF16` in NumPy: S, P and out rounded, FP64 between."""
    logits = correctly_rounded(correctly_rounded(q @ k.T, BF16) * _FUSED_SCALE, BF16)
    p = np.exp(logits - logits.max(-1, keepdims=True))
    p = correctly_rounded(p / p.sum(-1, keepdims=True), BF16)
    return correctly_rounded(p @ v, BF16), logits


def _flash(q, k, v) -> np.ndarray:
    """out of `FLASH2` in NumPy: P rounded at its running maximum, and out."""
    x = q @ k.T * _FUSED_SCALE
    m = np.full((len(q), 1), -np.inf)
    l, out = np.zeros_like(m), np.zeros((len(q), v.shape[1]))  # noqa: E741
    for start in range(0, len(k), _FUSED_BLOCK):
        block = slice(start, start + _FUSED_BLOCK)
        new_m = np.maximum(m, x[:, block].max(-1, keepdims=True))
        p, c = np.exp(x[:, block] - new_m), np.exp(m - new_m)
        l = c * l + p.sum(-1, keepdims=True)  # noqa: E741
        out = c * out + correctly_rounded(p, BF16) @ v[block]
        m = new_m
    return correctly_rounded(out / l, BF16)


def _fused_attention(run: Run) -> Faults:
    """All roundings of an attention hold inside one program, observed or not."""
    exact = _fused_inputs()
    q, k, v = (x[None, :, None].astype(jnp.bfloat16) for x in exact)

    def attend(recipe):
        def forward(q, k, v):
            return emulator.attention(q, k, v, recipe=recipe, scale=_FUSED_SCALE)

        return forward

    def observed(q, k, v):
        logits = sums.dot(
            "btnh,bsnh->bnts", q.astype(jnp.float32), k.astype(jnp.float32)
        )
        logits = formats.round_to(logits, BF16) * _FUSED_SCALE
        logits = formats.round_to(logits, BF16)
        return *attend(EAGER_BF16)(q, k, v), logits

    out, logits = _eager(*exact)
    meaning = "a rounding inside attention was fused away: no recipe is what it says"
    got, lse = run(attend(EAGER_BF16), q, k, v)
    yield _differs("out of eager_bf16", got[0, :, 0], out, meaning)
    got, again, seen = run(observed, q, k, v)
    meaning = "returning the logits changes the result"
    yield _differs("out beside logits", got[0, :, 0], out, meaning)
    yield _differs("LSE beside logits", again, lse, meaning)
    yield _differs("logits", seen[0, 0], logits, meaning)
    flash = dataclasses.replace(FLASH2, block_kv=_FUSED_BLOCK)
    got, _ = run(attend(flash), q, k, v)
    meaning = "a rounding inside the loop over keys was fused away"
    yield _differs("out of flash2", got[0, :, 0], _flash(*exact), meaning)


def _subnormals(run: Run) -> Faults:
    """FP16, E4M3 and E5M2 keep their subnormals, inside and at the ends."""
    for fmt in (FP16, E4M3FN, E5M2):
        x = fmt.min_positive * np.arange(1, 1024, dtype=np.float32) / 16
        x = np.concatenate([x, -x])
        got = run(lambda x, fmt=fmt: formats.round_to(x * 0.5, fmt) * 2, x)
        want = 2 * correctly_rounded(0.5 * x.astype(np.float64), fmt)
        meaning = f"small {fmt.name} values are flushed or rounded wrongly"
        yield _differs(f"{fmt.name} subnormals", got, want, meaning)


def _fp8_overflow(run: Run) -> Faults:
    """E4M3 beyond 448 is NaN, or 448 where a recipe saturates; so in attention."""
    x = _float32([448, 463, 464, 464.125, 479, 480, 500, 1e4, np.inf])
    x = np.concatenate([x, -x])
    meaning = "FP8 overflow follows other rules than the recipe's"
    saturating = E4M3FN.saturating()
    for fmt in (E4M3FN, saturating):
        got = run(lambda x, fmt=fmt: formats.round_to(x * 0.5 * 2, fmt), x)
        wide = np.where(np.isinf(x), np.copysign(1e30, x), x)
        yield _differs(fmt.name, got, correctly_rounded(wide, fmt), meaning)
    zeros, ones = np.zeros((1, 8, 1, 4), np.float32), np.ones((1, 8, 1, 4), np.float32)
    # P = 512 is clamped to 448 as an operand; the row sum counts it in full.
    for fmt, want in ((E4M3FN, np.nan), (saturating, 448 / 512)):
        recipe = dataclasses.replace(
            FLASH2, probability=Step(fmt), probability_scale=512.0
        )
        got = run(
            lambda v, q, recipe=recipe: emulator.attention(q, q, v, recipe=recipe)[0],
            ones,
            zeros,
        )
        want = np.full_like(ones, want)
        yield _differs(f"attention with P in {fmt.name}", got, want, meaning)


def _narrow_sum(run: Run) -> Faults:
    """A BF16 sum of ones stops at 256: each addition of a chain is rounded."""

    def chain(one):
        def add(total, _):
            return formats.round_to(total + one, BF16), None

        looped = lax.scan(add, jnp.zeros_like(one), None, length=512)[0]
        unrolled = one * 250
        for _ in range(12):
            unrolled, _ = add(unrolled, None)
        return looped, unrolled

    meaning = "narrow accumulators are wider than the recipe says"
    looped, unrolled = run(chain, np.float32(1))
    yield _differs("512 ones added in a loop", looped, 256.0, meaning)
    yield _differs("250 and 12 ones", unrolled, 256.0, meaning)
    # Of 512 values the first 384 are 1, all of equal weight. Each of the two sums stops
    # at 256: LSE is its logarithm, and out is 256 / 256 instead of 384 / 512.
    zeros = np.zeros((1, 512, 1, 4), np.float32)
    ones = zeros + (np.arange(512) < 384).astype(np.float32)[:, None, None]
    kept = {"row_sum": Step(BF16), "accumulator": Step(BF16)}
    for name, recipe in (
        ("blocks of one key", dataclasses.replace(FLASH2, block_kv=1, **kept)),
        (
            "chained products",
            dataclasses.replace(
                FLASH2,
                block_kv=None,
                dot_accumulator=Step(BF16),
                dot_chunk=1,
                rowsum_accumulator=Step(BF16),
            ),
        ),
    ):
        out, lse = run(
            lambda q, k, v, recipe=recipe: emulator.attention(q, k, v, recipe=recipe),
            zeros[:, :1],
            zeros,
            ones,
        )
        # To a 64th, since log and exp are not exact.
        total = np.rint(np.exp(lse.astype(np.float64)) * 64) / 64
        yield _differs(f"{name}: row sum", total, np.full_like(lse, 256), meaning)
        yield _differs(f"{name}: out", out, np.ones_like(out), meaning)


def _near_ties() -> tuple[np.ndarray, np.ndarray]:
    """Pairs of FP32 numbers whose rounded product is a tie of BF16, the exact not."""
    i = np.arange(20000)
    a = _float32(1 + (i * 7919 % 8192) / 8192 + 2.0**-20)
    ties = 1 + (2 * (i % 128) + 1) * 2.0**-8
    b = _float32(ties / a)
    exact = a.astype(np.float64) * b
    chosen = (a * b == ties) & (exact != ties)
    # Those that a rounding of the exact product sends the other way.
    chosen &= correctly_rounded(exact, BF16) != correctly_rounded(a * b, BF16)
    return a[chosen], b[chosen]


def _contraction(run: Run) -> Faults:
    """round(fl(a b)) - c rounds the product twice, FP32 and BF16, fused or not."""
    a, b = _near_ties()
    got = run(lambda a, b: formats.round_to(a * b, BF16) - 1, a, b)
    want = correctly_rounded(a * b, BF16) - 1
    meaning = "a contracted product skips the FP32 rounding before a narrow one"
    yield _differs("BF16 of an FP32 product", got, want, meaning)


def _contracts_products(run: Run) -> bool:
    """Whether a * b - fl(a b), the first half of a two-product, leaves its error."""
    a, b = _near_ties()
    return bool(np.any(run(lambda a, b, c: a * b - c, a, b, a * b)))


def _accurate_functions(run: Run) -> Faults:
    """exp and log as attention calls them, and the emulator's 2^x, within ulps."""
    carriers: list[tuple[NumberFormat, Any]] = [(FP32, np.float32)]
    if jax.config.read("jax_enable_x64"):
        carriers.append((FP64, np.float64))
    for fmt, dtype in carriers:
        # Down to the smallest normal result; row sums from 1 to a million keys.
        down = np.linspace(fmt.min_exponent, 0, 4001)
        up = np.geomspace(1, 2**20, 4001)
        for name, function, exact, x in (
            ("exp", jnp.exp, np.exp, 0.69 * down),
            ("exp2", exponential.exp2, np.exp2, down),
            ("log", jnp.log, np.log, up),
        ):
            x = x.astype(dtype)
            want = exact(x.astype(np.longdouble))
            got = run(function, x).astype(np.longdouble)
            ulps = np.abs(got - want) / np.spacing(np.abs(want).astype(dtype))
            worst = ulps.argmax()
            if not ulps.max() <= FUNCTION_ULPS:
                yield (
                    f"{name}({x[worst]:.9g}) in {fmt.name}: got {got[worst]:.9g} where "
                    f"{want[worst]:.9g} is right, {ulps[worst]:.3g} ulp; figures of "
                    f"wide recipes would be those of {name}"
                )


def _backward_rounding(run: Run) -> Faults:
    """Cotangents are rounded where the recipe says, and no rounding has a derivative.

    All logits are equal, P = 1/4. dP = 1024 + a e and delta = 1024, so dS = a e / 4
    is exact, and lost if dP were rounded to BF16 as autodiff through a rounding does.
    dO holds 257, which as a BF16 input is 256.
    """
    a, e = _float32([1, 2, -1, 1]), _float32([3, 1, -1, -3])
    zero, one = np.zeros(4, np.float32), np.ones(4, np.float32)
    q = np.stack([_float32([1, 2, 3, 4]), zero, zero, zero], -1)
    k = np.stack([zero, one, _float32([1, 2, 0, 5]), e], -1)
    v = np.stack([1024 * one, e, zero, zero], -1)
    dout = np.stack([one, a, _float32([257, -256, 0, 0]), zero], -1)

    def gradients(q, k, v, dout):
        def forward(q, k, v):
            return emulator.attention(q, k, v, recipe=FLASH2, out_dtype=jnp.float32)[0]

        return jax.vjp(forward, q, k, v)[1](dout)

    found = run(gradients, *(x[None, :, None] for x in (q, k, v, dout)))
    ds, scale = np.outer(a, e) / 4, 4**-0.5
    rounded = np.where(dout == 257, 256, dout)
    wanted = scale * ds @ k, scale * ds.T @ q, np.full((4, 4), 0.25) @ rounded
    meaning = "a cotangent is rounded where the recipe does not, or not where it does"
    for name, got, want in zip(("dQ", "dK", "dV"), found, wanted, strict=True):
        yield _differs(name, got[0, :, 0], want, meaning)
    try:
        run(jax.grad(lambda x: formats.round_to(x, BF16)), np.float32(1.00123))
    except TypeError:
        return
    yield (
        "round_to was differentiated: got a gradient where TypeError is right; "
        "autodiff through a rounding gives gradients of no recipe"
    )


def _low_part(run: Run) -> Faults:
    """x - round(x) is no zero, so a sum of two narrow numbers holds more than one."""
    x = _float32(1 + np.arange(4096) / 4096 + 2.0**-14)

    def split(x):
        high = formats.round_to(x, BF16)
        low = formats.round_to(x - high, BF16)
        return high, low, high + low

    high = correctly_rounded(x, BF16)
    low = correctly_rounded(x - high, BF16)
    meaning = "the low half is simplified away: delta_source='o_hi_lo' is 'o'"
    for name, got, want in zip(
        ("high", "low", "high + low"), run(split, x), (high, low, high + low)
    ):
        yield _differs(f"{name} of a split", got, want, meaning)

    # O = 1 + 2^-9 needs its low half; with it the rows of dS sum to zero.
    k = np.zeros((1, 4, 1, 4), np.float32)
    k[..., 1], k[:, 3, :, 2] = 1, 1
    v = np.ones_like(k)
    v[:, 3, :, 0] += 2.0**-7
    dout = np.zeros_like(k)
    dout[..., 0] = 1
    want = np.zeros_like(k)
    want[..., 2] = 0.5 * 3 * 2.0**-11
    for source in ("o_hi_lo", "o_hi_lo8"):
        recipe = dataclasses.replace(FLASH2, delta_source=source)

        def dquery(q, k, v, dout, recipe=recipe):
            def forward(q):
                return emulator.attention(q, k, v, recipe=recipe)[0]

            return jax.vjp(forward, q)[1](dout)[0]

        got = run(dquery, np.zeros_like(k), k, v, dout)
        yield _differs(f"dQ with {source}", got, want, meaning)

    def two_sum(a, b):
        total = a + b
        part = total - a
        return total, (a - (total - part)) + (b - part)

    b = _float32(3.0**-7) * x[::-1]
    total = x + b
    error = (x.astype(np.float64) + b) - total
    meaning = "the compiler reassociates FP32 additions"
    for name, got, want in zip(("sum", "error"), run(two_sum, x, b), (total, error)):
        yield _differs(f"{name} of TwoSum", got, want, meaning)


def _full_precision_dot(run: Run) -> Faults:
    """FP32 products keep 24 bits; a GPU's default, TF32, keeps eleven."""
    i = np.arange(64 * 64)
    x = _float32(1 + (i * 7919 % 2**23) * 2.0**-23).reshape(64, 64)
    place = np.eye(64, dtype=np.float32)[::-1].copy()
    meaning = "FP32 matrix products run in TF32 or BF16"
    for name, left, right, want in (
        ("left", x, place, x[:, ::-1]),
        ("right", place, x, x.T[::-1]),
    ):
        got = run(lambda x, y: sums.dot("th,sh->ts", x, y), left, right)
        yield _differs(f"{name} operand of an FP32 product", got, want, meaning)


CANARIES: dict[str, Callable[[Run], Faults]] = {
    "rounding_survives": _rounding_survives,
    "rounded_product": _rounded_product,
    "fused_attention": _fused_attention,
    "subnormals": _subnormals,
    "fp8_overflow": _fp8_overflow,
    "narrow_sum": _narrow_sum,
    "contraction": _contraction,
    "accurate_functions": _accurate_functions,
    "backward_rounding": _backward_rounding,
    "low_part": _low_part,
    "full_precision_dot": _full_precision_dot,
}
