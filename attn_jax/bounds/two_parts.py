"""Bounds of O in two parts, from which delta is taken.

The first part is O rounded; only what the second one lacks is an error.
"""

import numpy as np

from attn_jax.bounds.arithmetic import Arithmetic, Ball, underflow
from attn_jax.formats import Rounding

# Parts of a spacing that the last place of a byte is worth, and its largest number.
_PLACES, _MOST = 256, 127


def high_and_low(arithmetic: Arithmetic, name: str, x: Ball) -> Ball:
    """round(x) + round(x - round(x)), by the step `name`."""
    kept = getattr(arithmetic.recipe, name)
    fmt, carrier = kept.format, arithmetic.recipe.carrier
    if fmt.mantissa_bits >= carrier.mantissa_bits:
        return arithmetic.step(name, x)
    nearest = kept.rounding is Rounding.NEAREST_EVEN
    u = fmt.unit_roundoff * (1 if nearest else 2)
    tiny = underflow(fmt, carrier, nearest)
    size = None
    if kept.rounding is not Rounding.TOWARD_ZERO:
        size = fmt.unit_roundoff * u * np.abs(x.value)
    # The two roundings of the low part: of |x - round(x)| <= u |x| + tiny.
    low = arithmetic.perturb(x, u * u, (1 + u) * tiny, 0.0, size, 0.0)
    return arithmetic.clipped(name, low)


def with_low_byte(arithmetic: Arithmetic, name: str, x: Ball) -> Ball:
    """round(x) by the step `name`, and eight bits of what it lacks.

    With s the spacing at x, |x - round(x)| is at most s / 2, or s where it is not
    rounded to nearest. The byte is in units of s / 256 from -128 to 127: of what is in
    that range it leaves half a unit, and of what is beyond all that is beyond 127.
    Hence s / 256 at most, or 129 s / 256; and s is at most 2^-m |x|, m the mantissa's
    bits. Of what is subnormal no more is left than round(x) leaves.
    """
    kept = getattr(arithmetic.recipe, name)
    fmt, carrier = kept.format, arithmetic.recipe.carrier
    if fmt.mantissa_bits >= carrier.mantissa_bits:
        return arithmetic.step(name, x)
    nearest = kept.rounding is Rounding.NEAREST_EVEN
    units = (_PLACES // 2 if nearest else _PLACES) - _MOST
    u = units / _PLACES * 2.0**-fmt.mantissa_bits
    tiny = underflow(fmt, carrier, nearest)
    if not nearest:
        # What is beyond lies to one side.
        return arithmetic.clipped(name, arithmetic.perturb(x, u, tiny, 0.0, None, 0.0))
    x = arithmetic.perturb(x, u, tiny, 0.0, u * np.abs(x.value), 0.0)
    # One in 512 is cut off, from 127.5 .. 128 to 127: the errors' mean is not 0, but
    # 0.75 / 512 of a unit.
    if arithmetic.kind != "order":
        x = x._replace(fixed=x.fixed + 0.75 / 512 * u * np.abs(x.value))
    return arithmetic.clipped(name, x)
