"""How the outputs of a query over parts of the keys become its output over all.

With O and L so far and O_h, L_h of the next part (recipe_schema, A RING):

    'lse'       L' = log(e^L + e^L_h)      O' = e^(L - L') O + e^(L_h - L') O_h
    'sigmoid'   O' = O - s(L_h - L) (O - O_h)        L' = L - log s(L - L_h)
    'two_pass'  L over all parts first; then O' = O + e^(L_h - L) O_h
    'carry'     no merge: the running maximum and sum, and A, go on from part to part
    'carry_whole'  the same by powers of two: the maximum goes on as a whole number

No exponent of these is above 0, or 1/2 where a maximum becomes a whole number: an LSE
may exceed another by any number. A part that a
query sees nothing of (L_h = -inf) changes nothing, whatever came before, and the first
that it sees something of is taken as it is.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from attn_jax.context_parallel.blocks import Block, carrier, rows_from, with_rows
from attn_jax.formats import round_to
from attn_jax.mask import Mask
from attn_jax.recipe_schema import Recipe, Step
from attn_jax.span import Ended
from attn_jax.varying import varying_alike

Rows = tuple[Float[Array, "B T N D"], Float[Array, "B N T"]]
# Arrays of rows, [B, T, N, D] or [B, N, T], with one part after the other added.
RowArrays = tuple[Any, ...]


class Keys(NamedTuple):
    """Some queries and some keys, and who sees whom. Keys that a block has `prepared`
    for all devices are those from `first_key` on."""

    query: Float[Array, "B T N H"]
    key: Float[Array, "B S K H"]
    value: Float[Array, "B S K D"]
    mask: Mask
    bias: Float[Array, "#B #N #T #S"] | None = None
    first_key: int = 0
    prepared: Any = None

    @property
    def plain(self) -> tuple[Array, Array, Array, Mask, Array | None]:
        """What `Block.forward` takes."""
        return self.query, self.key, self.value, self.mask, self.bias


# (what all rows have so far, some keys, whether that is nothing yet, the first of the
# rows that meet them) -> with the keys.
Add = Callable[[RowArrays, Keys, bool, int], RowArrays]
# The last keys may end all rows.
Visit = Callable[[Add, RowArrays], Any]


def over_parts(
    visit: Visit,
    block: Block,
    query: Float[Array, "B T N H"],
    value: Float[Array, "B S K D"],
    like: Any,
) -> Ended:
    """O and LSE of `query` over all parts, which `visit(add, so_far)` brings one by
    one; O is not yet rounded unless the last part ended the rows. `like` varies over
    the mesh axes that the parts vary over."""
    recipe = block.recipe
    nothing = nothing_yet(query, value.shape[-1], carrier(block))
    (out, lse), _ = varying_alike(nothing, like)
    if recipe.ring_merge in ("carry", "carry_whole"):
        # m = -inf, l = 0, A = 0.
        start = lse, jnp.zeros_like(lse), out
        start, _ = varying_alike(start, like)
        found = visit(Carrying(block), start)
        if isinstance(found, Ended):
            return found
        return Ended(None, *block.finished(found, query))
    if recipe.ring_merge != "two_pass":

        def add(rows, keys):
            return merged((rows[0], rows[1]), block.forward(*keys.plain), recipe)

        return Ended(None, *visit(_to_rows(add), (out, lse)))

    def add_lse(rows, keys):
        return (merged_lse(rows[0], block.forward(*keys.plain)[1], recipe),)

    def add_weighted(rows, keys):
        return weighted(rows[0], rows[1], block.forward(*keys.plain), recipe), rows[1]

    (lse,) = visit(_to_rows(add_lse), (lse,))
    out, lse = visit(_to_rows(add_weighted), (out, lse))
    return Ended(None, out, lse)


class Carrying(NamedTuple):
    """Adds keys to (m, l, A), without a merge."""

    block: Block

    def __call__(self, so_far: RowArrays, keys: Keys, nothing: bool, first: int):
        return self.block.carry_on(
            *(so_far, *keys.plain),
            nothing=nothing,
            first=first,
            first_key=keys.first_key,
            prepared=keys.prepared,
        )


def _to_rows(add: Callable[[RowArrays, Keys], RowArrays]) -> Add:
    """Keys are added to the rows that meet them."""

    def to_rows(so_far, keys, nothing, first):
        del nothing
        rows = add(rows_from(so_far, first, keys.query.shape[1]), keys)
        return with_rows(so_far, rows, first)

    return to_rows


def nothing_yet(query: Float[Array, "B T N H"], columns: int, dtype) -> Rows:
    """O and LSE of queries that have seen no key."""
    B, T, N, _ = query.shape
    return jnp.zeros((B, T, N, columns), dtype), jnp.full((B, N, T), -jnp.inf, dtype)


def merged(so_far: Rows, part: Rows, recipe: Recipe) -> Rows:
    """O' and L' of 'lse' and 'sigmoid'.

    Rounds O_h to `ring_partial`, O' to `ring_accumulator` and L' to `lse`.
    """
    (out, lse), (part_out, part_lse) = so_far, part
    part_out = kept(part_out, recipe.ring_partial)
    first, nothing = jnp.isneginf(lse), jnp.isneginf(part_lse)
    # What stands for the infinite in branches that are not taken.
    a, b = jnp.where(first, part_lse, lse), jnp.where(nothing, lse, part_lse)
    a, b = (jnp.where(jnp.isneginf(x), 0.0, x) for x in (a, b))
    if recipe.ring_merge == "sigmoid":
        new_lse = a - jax.nn.log_sigmoid(a - b)
        new = out - over_head_dim(jax.nn.sigmoid(b - a)) * (out - part_out)
    else:
        new_lse = _log_sum(a, b)
        weights = (over_head_dim(jnp.exp(x - new_lse)) for x in (a, b))
        new = next(weights) * out + next(weights) * part_out
    new = jnp.where(over_head_dim(nothing), out, new)
    new = jnp.where(over_head_dim(first), part_out, new)
    return kept(new, recipe.ring_accumulator), _merged_lse(
        lse, part_lse, new_lse, recipe
    )


def merged_lse(
    lse: Float[Array, "B N T"], part_lse: Float[Array, "B N T"], recipe: Recipe
) -> Float[Array, "B N T"]:
    """L' of 'two_pass', whose first pass makes nothing else."""
    a = jnp.where(jnp.isneginf(lse), 0.0, lse)
    b = jnp.where(jnp.isneginf(part_lse), 0.0, part_lse)
    return _merged_lse(lse, part_lse, _log_sum(a, b), recipe)


def weighted(
    out: Float[Array, "B T N D"], lse: Float[Array, "B N T"], part: Rows, recipe: Recipe
) -> Float[Array, "B T N D"]:
    """O' of 'two_pass', rounded as in `merged`; `lse` is that over all parts."""
    part_out, part_lse = part
    part_out = kept(part_out, recipe.ring_partial)
    nothing = jnp.isneginf(part_lse)
    difference = jnp.where(nothing, 0.0, part_lse) - jnp.where(nothing, 0.0, lse)
    weight = jnp.where(nothing, 0.0, jnp.exp(difference))
    return kept(out + over_head_dim(weight) * part_out, recipe.ring_accumulator)


def kept(x: Array, step: Step) -> Array:
    """`x` in the format of a step of the ring."""
    return round_to(x, step.format, step.rounding)


def over_head_dim(x: Shaped[Array, "B N T"]) -> Shaped[Array, "B T N 1"]:
    """Numbers of rows as factors of what the rows hold."""
    return x.swapaxes(1, 2)[..., None]


def _merged_lse(lse, part_lse, both, recipe: Recipe):
    both = jnp.where(jnp.isneginf(part_lse), lse, kept(both, recipe.lse))
    return jnp.where(jnp.isneginf(lse), part_lse, both)


def _log_sum(a, b):
    largest = jnp.maximum(a, b)
    return largest + jnp.log1p(jnp.exp(jnp.minimum(a, b) - largest))
