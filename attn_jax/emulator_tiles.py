"""What the emulator's forward and backward passes share: operands, tiles and loops."""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from attn_jax.formats import BF16, FP16, FP32, FP64, Rounding, carrier_dtype, round_to
from attn_jax.mask import Mask, slice_tile
from attn_jax.recipe import Recipe, Step

_NARROW_INPUTS = {np.dtype(jnp.bfloat16): BF16, np.dtype(np.float16): FP16}


class Static(NamedTuple):
    """The hashable part of a call; `out_dtype` is None if the caller gave none."""

    recipe: Recipe
    scale: float
    soft_cap: float | None
    out_dtype: np.dtype | None

    @property
    def carrier(self):
        return carrier_dtype(self.recipe.carrier)

    @property
    def log_unit(self) -> float:
        """Factor from natural logarithms to those of the recipe's exponential."""
        return 1.0 if self.recipe.exponential == "exp" else 1 / math.log(2)

    @property
    def wants_centre(self) -> bool:
        """A soft cap breaks the identity that a dQ centre rests on."""
        return self.recipe.dq_centre != "none" and self.soft_cap is None


def check_recipe(recipe: Recipe, *inputs) -> None:
    """Raises NotImplementedError or ValueError for what the emulator does not run."""
    steps = {
        field.name: value
        for field in dataclasses.fields(recipe)
        if isinstance(value := getattr(recipe, field.name), Step)
    }
    for name, step in steps.items():
        if step.rounding is Rounding.STOCHASTIC:
            raise NotImplementedError(
                f"recipe {recipe.name!r}: the emulator runs no stochastic rounding "
                f"({name}); use NEAREST_EVEN or TOWARD_ZERO"
            )
        if (
            step.format.mantissa_bits > recipe.carrier.mantissa_bits
            or step.format.exponent_bits > recipe.carrier.exponent_bits
        ):
            raise ValueError(
                f"recipe {recipe.name!r}: a {recipe.carrier.name} carrier cannot hold "
                f"{name} in {step.format.name}; set carrier=FP64"
            )
    for name, found, runs in (
        ("exponential", recipe.exponential, ("exp", "exp2")),
        ("repeated_max_factor", recipe.repeated_max_factor, (None,)),
        ("ring_size", recipe.ring_size, (1,)),
        ("dot_chunk", recipe.dot_chunk, (None,)),
        ("exponentiated", recipe.exponentiated, (Step(recipe.carrier),)),
        ("dot_accumulator", recipe.dot_accumulator, (Step(recipe.carrier),)),
        ("carrier", recipe.carrier, (FP32, FP64)),
    ):
        if found not in runs:
            raise NotImplementedError(
                f"recipe {recipe.name!r}: the emulator does not run {name}={found!r}; "
                f"it runs {' and '.join(map(repr, runs))}"
            )
    if recipe.carrier == FP64 and not jax.config.jax_enable_x64:
        raise ValueError(
            f"recipe {recipe.name!r} carries FP64: turn jax_enable_x64 on, or use "
            "'exact_fp32'"
        )
    for x in inputs:
        given = _NARROW_INPUTS.get(np.dtype(x.dtype))
        if given is not None and not (
            given.mantissa_bits <= recipe.inputs.mantissa_bits
            and given.exponent_bits <= recipe.inputs.exponent_bits
        ):
            raise ValueError(
                f"recipe {recipe.name!r} takes {recipe.inputs.name} inputs, got "
                f"{given.name}; use recipe.with_inputs({given.name.upper()})"
            )


def rounded(x, step: Step):
    return round_to(x, step.format, step.rounding)


class Operands:
    """Inputs rounded to the recipe's input format, query heads in K groups of G.

    Axes: query [B, K, G, T, H]; key and value [B, K, S, H].
    """

    def __init__(self, static: Static, query, key, value, bias, sinks, mask: Mask):
        B, T, N, H = query.shape
        S, K = key.shape[1:3]
        self.static, self.recipe, self.mask = static, static.recipe, mask
        self.shape = B, K, N // K, T, H
        self.key_length = S
        self.query = self.group(self.take_in(query))
        self.key = self.take_in(key).swapaxes(1, 2)
        self.value = self.take_in(value).swapaxes(1, 2)
        self.bias = None if bias is None else bias.astype(static.carrier)
        self.sinks = None
        if sinks is not None:
            unit_sinks = sinks.astype(static.carrier) * static.log_unit
            self.sinks = unit_sinks.reshape(1, K, N // K, 1, 1)

    def take_in(self, x):
        return round_to(x.astype(self.static.carrier), self.recipe.inputs)

    def group(self, x):
        """[B, T, N, H] to [B, K, G, T, H]."""
        B, K, G, T, H = self.shape
        return x.swapaxes(1, 2).reshape(B, K, G, T, x.shape[-1])

    def ungroup(self, x):
        B, K, G, T, _ = self.shape
        return x.reshape(B, K * G, T, x.shape[-1]).swapaxes(1, 2)

    def group_heads(self, x):
        """[B or 1, N or 1, ...] to [B or 1, K or 1, G or 1, ...]."""
        heads = (1, 1) if x.shape[1] == 1 else self.shape[1:3]
        return x.reshape(x.shape[0], *heads, *x.shape[2:])

    def exp(self, x):
        return jnp.exp(x) if self.recipe.exponential == "exp" else jnp.exp2(x)

    def logits(self, q_start, kv_start, block_q: int, block_kv: int):
        """x [B, K, G, block_q, block_kv], in units of the exponential, and its slope.

        Hidden keys are -inf. The slope is the soft cap's, or None without one.
        """
        static, step = self.static, self.recipe.logits
        q = read(self.query, 3, q_start, block_q)
        k = read(self.key, 2, kv_start, block_kv)
        x = rounded(dot("bkgth,bksh->bkgts", q, k), step)
        slope = None
        plain = self.bias is None and static.soft_cap is None
        if plain and self.recipe.scale_at == "exponent":
            x = x * (static.scale * static.log_unit)
        else:
            x = rounded(x * static.scale, step)
            if self.bias is not None:
                tile = slice_tile(self.bias, q_start, kv_start, block_q, block_kv)
                x = rounded(x + self.group_heads(tile), step)
            if static.soft_cap is not None:
                tanh = jnp.tanh(x / static.soft_cap)
                x, slope = rounded(static.soft_cap * tanh, step), 1 - tanh * tanh
            if static.log_unit != 1.0:
                x = rounded(x * static.log_unit, step)
        visible = self.mask.block(q_start, kv_start, block_q, block_kv)
        if visible is not None:
            x = jnp.where(self.group_heads(visible), x, -jnp.inf)
        return x, slope


def dot(subscripts: str, x, y):
    """A product in the carrier; without HIGHEST a GPU would round FP32 to TF32."""
    return jnp.einsum(subscripts, x, y, precision=lax.Precision.HIGHEST)


def finite_shift(m):
    """The row maximum as a shift: -inf (nothing seen yet) would give -inf - -inf."""
    return jnp.where(jnp.isneginf(m), 0.0, m)


def divide_or_zero(x, total):
    """x / total, and 0 / 0 = 0 for a query that sees no key."""
    return x / jnp.where(total == 0, 1.0, total)


def walk(
    step, carry: Any, length: int, block: int | None, reverse: bool = False
) -> Any:
    """carry = step(carry, start, size) over blocks of `length`, the last one shorter.

    No padding: the short block is its own call, and full blocks share one scan. A
    single full block is called directly, so a short sequence costs one plain tile.
    """
    block = min(block or length, length)
    full, rest = divmod(length, block)
    ends = [(full * block, rest)] if rest else []
    if reverse:
        for start, size in ends:
            carry = step(carry, start, size)
    if full == 1:
        carry = step(carry, 0, block)
    else:
        carry = lax.scan(
            lambda state, start: (step(state, start, block), None),
            carry,
            jnp.arange(full, dtype=jnp.int32) * block,
            reverse=reverse,
        )[0]
    if not reverse:
        for start, size in ends:
            carry = step(carry, start, size)
    return carry


def read(x, axis: int, start, size: int):
    if x.shape[axis] == size:
        return x
    return lax.dynamic_slice_in_dim(x, start, size, axis)


def write(x, part, axis: int, start):
    if x.shape[axis] == part.shape[axis]:
        return part
    return lax.dynamic_update_slice_in_dim(x, part, start, axis)
