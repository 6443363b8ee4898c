"""What the emulator's passes share: operands, their roundings, and tiles of logits."""

import copy
import math
import zlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attn_jax.emulator import sums
from attn_jax.emulator.exponential import exp2, exp2_polynomial
from attn_jax.emulator.sums import read
from attn_jax.formats import Rounding, carrier_dtype, round_to
from attn_jax.mask import Mask, slice_tile
from attn_jax.recipe_schema import Recipe

# The step that rounds the first operand of a product; all others are inputs, or Q'.
_MADE_BY = {
    "product": "probability",
    "dquery": "dq_dlogits",
    "dkey": "dlogits",
    "dvalue": "backward_probability",
}


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


class Operands:
    """Inputs rounded to the recipe's input format, query heads in K groups of G.

    Axes: query [B, K, G, T, H]; key [B, K, S, H]; value [B, K, S, D]. With a
    scaled_query `query` is Q', `query_scale` what it was scaled by (else None) and the
    scale in `static` the 1 that is left. `dq_key` is the keys as operand of dQ, the
    same ones unless dq_centre is 'keys', and `dq_key_least` their format's least
    exponent, a number or [B, K, 1, 1, 1]; `dq_key_scale` is w of the recipe's
    definition, [B, K, 1, 1, 1], or None where they have none. `origin` is where the
    first query and key stand in the whole, which bias and mask are always given for.
    `noise` is the key that stochastic roundings draw from, or None.
    """

    def __init__(
        self, static: Static, query, key, value, bias, sinks, mask: Mask, noise=None
    ):
        B, T, N, H = query.shape
        S, K = key.shape[1:3]
        self.static, self.recipe, self.mask = static, static.recipe, mask
        self.query_scale: float | None = None
        self.shape = B, K, N // K, T, H
        self.key_length = S
        self.origin, self.hop = (0, 0), 0
        self.noise: Any = noise
        query = self.take_in(query)
        if self.recipe.scaled_query is not None:
            self.query_scale, self.static = static.scale, static._replace(scale=1.0)
            query = self.round(query * self.query_scale, "scaled_query")
        self.query = self.group(query)
        self.key = self.dq_key = self.take_in(key).swapaxes(1, 2)
        self.dq_key_least: int | jax.Array = self.recipe.inputs.min_exponent
        self.dq_key_scale: jax.Array | None = None
        self.value = self.take_in(value).swapaxes(1, 2)
        self.bias = None if bias is None else bias.astype(static.carrier)
        self.sinks = None
        if sinks is not None:
            unit_sinks = sinks.astype(static.carrier) * static.log_unit
            self.sinks = unit_sinks.reshape(1, K, N // K, 1, 1)

    def drawing(self, noise, *numbers):
        """The same operands, whose stochastic roundings draw from another key."""
        new = copy.copy(self)
        new.noise = None if noise is None else _fold(noise, *numbers)
        return new

    def share(self, rank, hop):
        """What device `rank` of the ring has at a hop: its queries, others' keys."""
        B, K, G, T, H = self.shape
        W = self.recipe.ring_size
        T, S = T // W, self.key_length // W
        new = self.drawing(self.noise, rank, hop)
        new.shape, new.key_length = (B, K, G, T, H), S
        new.origin, new.hop = (rank * T, (rank - hop) % W * S), hop
        new.query = read(self.query, 3, new.origin[0], T)
        new.key = new.dq_key = read(self.key, 2, new.origin[1], S)
        if self.dq_key is not self.key:
            new.dq_key = read(self.dq_key, 2, new.origin[1], S)
        new.value = read(self.value, 2, new.origin[1], S)
        return new

    @property
    def integer_scale(self) -> jax.Array | None:
        """w where dQ is a sum of integers; under a soft cap there is none."""
        return self.dq_key_scale if self.recipe.dq_sum == "integers" else None

    def round(self, x, field: str, *at, site: str = ""):
        """`x` rounded as the recipe's `field` says; `at` and `site` tell which tile
        and which of the field's places it is, so that no two share random bits."""
        step = getattr(self.recipe, field)
        if step.rounding is not Rounding.STOCHASTIC:
            return round_to(x, step.format, step.rounding)
        name = zlib.crc32(f"{field} {site}".encode())
        key = _fold(self.noise, name, *at)
        return round_to(x, step.format, step.rounding, key=key)

    def dot(self, subscripts: str, x, y, *at, site: str):
        keep = self._keep("dot_accumulator", site, at)
        return sums.dot(
            subscripts, x, y, self.recipe.dot_chunk, keep, self._alignment(site)
        )

    def row_sum(self, x, *at, site: str):
        keep = self._keep("rowsum_accumulator", site, at)
        return sums.row_sum(x, self.recipe.dot_chunk, keep)

    def _keep(self, field: str, site: str, at) -> sums.RoundSum | None:
        if getattr(self.recipe, field).format == self.recipe.carrier:
            return None

        def keep(total, start):
            return self.round(total, field, *at, start, site=site)

        return keep

    def _alignment(self, site: str) -> sums.Alignment | None:
        recipe = self.recipe
        if recipe.dot_alignment is None:
            return None
        made_by = _MADE_BY.get(site)
        made = recipe.query_format if site == "logits" else recipe.inputs
        if made_by is not None:
            # None is `dq_dlogits` alone.
            made = (getattr(recipe, made_by) or recipe.dlogits).format
        right = recipe.query_format if site == "dkey" else recipe.inputs
        return sums.Alignment(
            recipe.dot_alignment,
            made.min_exponent,
            self.dq_key_least if site == "dquery" else right.min_exponent,
            recipe.dot_accumulator.format.min_exponent,
        )

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
        return jnp.exp(x) if self.recipe.exponential == "exp" else exp2(x)

    def exp_of_logits(self, x):
        """As `exp`, or the recipe's polynomial, which makes P and nothing else."""
        if self.recipe.exp2_degree is None:
            return self.exp(x)
        return exp2_polynomial(x, self.recipe.exp2_degree)

    def logits(self, q_start, kv_start, block_q: int, block_kv: int):
        """x [B, K, G, block_q, block_kv], in units of the exponential, and its slope.

        Hidden keys are -inf. The slope is the soft cap's, or None without one.
        """
        static = self.static
        at = q_start, kv_start
        q = read(self.query, 3, q_start, block_q)
        k = read(self.key, 2, kv_start, block_kv)
        x = self.dot("bkgth,bksh->bkgts", q, k, *at, site="logits")
        x = self.round(x, "logits", *at)
        # Positions in the whole: bias and mask know no shares.
        q_start, kv_start = q_start + self.origin[0], kv_start + self.origin[1]
        slope = None
        plain = self.bias is None and static.soft_cap is None
        if plain and self.recipe.scale_at == "exponent":
            x = x * (static.scale * static.log_unit)
        else:
            x = self.round(x * static.scale, "logits", *at, site="scale")
            if self.bias is not None:
                tile = slice_tile(self.bias, q_start, kv_start, block_q, block_kv)
                x = x + self.group_heads(tile)
                x = self.round(x, "logits", *at, site="bias")
            if static.soft_cap is not None:
                tanh = jnp.tanh(x / static.soft_cap)
                x = self.round(static.soft_cap * tanh, "logits", *at, site="cap")
                slope = 1 - tanh * tanh
            if static.log_unit != 1.0:
                x = self.round(x * static.log_unit, "logits", *at, site="unit")
        visible = self.mask.block(q_start, kv_start, block_q, block_kv)
        if visible is not None:
            x = jnp.where(self.group_heads(visible), x, -jnp.inf)
        return x, slope


def _fold(key, *numbers):
    for number in numbers:
        key = jax.random.fold_in(key, number)
    return key


def finite_shift(m):
    """The row maximum as a shift: -inf (nothing seen yet) would give -inf - -inf."""
    return jnp.where(jnp.isneginf(m), 0.0, m)


def divide_or_zero(x, total):
    """x / total, and 0 / 0 = 0 for a query that sees no key."""
    return x / jnp.where(total == 0, 1.0, total)
