"""One part of a ring's work as a recipe has it: some queries, some keys.

`ring` emulates all devices of a ring, one after the other. Here is what one device does
at one hop, for those who deal out the work themselves: a forward pass whose results can
be merged, and a backward pass that is told LSE and delta of the whole row.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from attn_jax.emulator import backward as tiles
from attn_jax.emulator import forward as blocks
from attn_jax.emulator.centre import seen_keys, with_centred_keys
from attn_jax.emulator.checks import check_recipe
from attn_jax.emulator.head_scale import head_scale_of_rows
from attn_jax.emulator.tiles import Operands, Static, divide_or_zero
from attn_jax.formats import carrier_dtype, round_to, with_low_byte
from attn_jax.mask import Mask
from attn_jax.pairwise import pairwise_sum
from attn_jax.recipe_schema import Recipe, Step


class Partial(NamedTuple):
    """What some keys bring to the gradients; all in the carrier, unrounded.

    Parts of the same queries add up in all but `dkey`, `dvalue` and `dbias`, those of
    the same keys in the first two of these. `row_sum` is that of dS as operand of dQ,
    `key_sum` and `key_count` are of the keys whose mean is dQ's centre; all three are
    None of an implementation that has its own way. `dbias` is None without a bias.
    """

    dquery: Float[Array, "B T N H"]
    dkey: Float[Array, "B S K H"]
    dvalue: Float[Array, "B S K D"]
    row_sum: Float[Array, "B N T"] | None
    key_sum: Float[Array, "B T K H"] | None
    key_count: Float[Array, "B T"] | None
    dbias: Float[Array, "#B #N #T #S"] | None = None


def forward(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K D"],
    *,
    recipe: Recipe,
    scale: float,
    bias: Float[Array, "#B #N #T #S"] | None = None,
    mask: Mask = Mask(),
) -> tuple[Float[Array, "B T N D"], Float[Array, "B N T"]]:
    """O before `ring_partial` rounds it, and LSE, both in the carrier.

    A query that sees none of the keys has O = 0 and LSE = -inf.
    """
    x = Operands(Static(recipe, scale, None, None), query, key, value, bias, None, mask)
    state = blocks.start(x, value.shape[-1])
    out, lse = blocks.finish(x, blocks.add_keys(x, state))
    B, K, G, T, _ = x.shape
    return x.ungroup(out), lse.reshape(B, K * G, T)


Carried = tuple[Float[Array, "B N T"], Float[Array, "B N T"], Float[Array, "B T N D"]]


def carry_on(
    state: Carried | None,
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K D"],
    *,
    recipe: Recipe,
    scale: float,
    bias: Float[Array, "#B #N #T #S"] | None = None,
    mask: Mask = Mask(),
) -> Carried:
    """(m, l, A) after these keys too, for ring_merge 'carry' and 'carry_whole'; A is
    rounded to `ring_accumulator`. None stands for no key so far."""
    x = Operands(Static(recipe, scale, None, None), query, key, value, bias, None, mask)
    B, K, G, T, _ = x.shape
    nothing = before = blocks.start(x, value.shape[-1])
    if state is not None:
        m, l, total = state  # noqa: E741
        m, l = (y.reshape(B, K, G, T, 1) for y in (m, l))  # noqa: E741
        before = blocks.State(m, l, x.group(total))
    after = blocks.carried_on(x, before, nothing)
    total = rounded(after.total, recipe.ring_accumulator)
    m, l = (y.reshape(B, K * G, T) for y in after[:2])  # noqa: E741
    return m, l, x.ungroup(total)


def finished(
    state: Carried, query: Float[Array, "B T N H"], *, recipe: Recipe, scale: float
) -> tuple[Float[Array, "B T N D"], Float[Array, "B N T"]]:
    """O and LSE of what was carried over all keys, as of `forward`."""
    m, l, total = state  # noqa: E741
    B, T, N, D = total.shape
    none = jnp.zeros((B, 1, N, query.shape[-1]), query.dtype)
    x = Operands(
        Static(recipe, scale, None, None),
        *(query, none, jnp.zeros((B, 1, N, D), query.dtype)),
        *(None, None, Mask()),
    )
    m, l = (y.reshape(B, N, 1, T, 1) for y in (m, l))  # noqa: E741
    out, lse = blocks.finish(x, blocks.State(m, l, x.group(total)))
    return x.ungroup(out), lse.reshape(B, N, T)


def backward(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K D"],
    dout: Float[Array, "B T N D"],
    lse: Float[Array, "B N T"],
    excess: Float[Array, "B N T"],
    *,
    recipe: Recipe,
    scale: float,
    bias: Float[Array, "#B #N #T #S"] | None = None,
    mask: Mask = Mask(),
    centre: Float[Array, "B K H"] | None = None,
    key_largest: Float[Array, "B K H"] | None = None,
    head_scale: Float[Array, "B K 1 1 1"] | None = None,
) -> Partial:
    """The sums of the recipe's tiles over these queries and keys.

    `lse` and `excess` (delta - dLSE) are those of whole rows, `centre` is c of all keys
    for dq_centre 'keys'. dQ and dK have their scale; a group_gradient has been applied.
    dbias is summed over its broadcast axes. The powers of two that bring K' and dS into
    the range of `dq_dlogits` follow from `key_largest`, columns' largest |K| of all
    keys, and `head_scale`.
    """
    x = Operands(Static(recipe, scale, None, None), query, key, value, bias, None, mask)
    B, K, G, T, _ = x.shape
    rows = tiles.Rows(
        x.group(x.take_in(dout)),
        lse.reshape(B, K, G, T, 1),
        excess.reshape(B, K, G, T, 1),
    )
    rows = rows._replace(scale=head_scale)
    if recipe.dq_centre == "keys":
        x, _ = with_centred_keys(x, centre, key_largest)
    sums = tiles.sum_tiles(x, rows, tiles.no_sums(x))
    at_end = _at_end(recipe, scale)
    key_sum = jnp.zeros((B, T, K, x.shape[-1]), x.static.carrier)
    key_count = jnp.zeros((B, T), x.static.carrier)
    if recipe.dq_centre == "mean":
        total, count = seen_keys(x)
        key_sum += total[:, :, 0].swapaxes(1, 2)
        # One mask for all heads.
        key_count += count[:, 0, 0, :, 0]
    return Partial(
        x.ungroup(sums.dquery * at_end),
        tiles.over_group(x, sums.dkey * at_end, "dkey").swapaxes(1, 2),
        tiles.over_group(x, sums.dvalue, "dvalue").swapaxes(1, 2),
        sums.row_sum.reshape(B, K * G, T),
        key_sum,
        key_count,
        sums.dbias,
    )


def head_scale(
    dout: Float[Array, "B T N D"],
    excess: Float[Array, "B N T"],
    value_largest: Float[Array, "B K D"] | None,
    *,
    recipe: Recipe,
    scale: float,
) -> Float[Array, "B K 1 1 1"] | None:
    """r of the recipe's definition, of these whole rows and, by the largest |V| of each
    column, of all keys; None where it is 1."""
    if value_largest is None:
        return None
    B, T, N, D = dout.shape
    K = value_largest.shape[1]
    dout = round_to(dout.astype(carrier_dtype(recipe.carrier)), recipe.inputs)
    grouped = dout.reshape(B, T, K, N // K, D).transpose(0, 2, 3, 1, 4)
    of_rows = excess.reshape(B, K, N // K, T, 1)
    return head_scale_of_rows(
        recipe, grouped, of_rows, value_largest, _on_dlogits(recipe, scale)
    )


def corrected_dquery(
    total: Partial,
    dlse: Float[Array, "B N T"],
    *,
    recipe: Recipe,
    scale: float,
    centre: Float[Array, "B K H"] | None = None,
) -> Float[Array, "B T N H"]:
    """dQ of the whole rows, less what the rounding of dS leaves of K's mean.

    `total` is the sum of a row's parts, `dlse` is 0 where LSE is -inf, `centre` is what
    `backward` took.
    """
    if recipe.dq_centre == "none":
        return total.dquery
    N = total.dquery.shape[2]
    expected = (dlse * _on_dlogits(recipe, scale)).swapaxes(1, 2)[..., None]
    if recipe.dq_centre == "keys":
        assert centre is not None
        own = jnp.repeat(centre.astype(expected.dtype), N // centre.shape[1], axis=1)
        return total.dquery + expected * own[:, None] * _at_end(recipe, scale)
    sums = total.row_sum, total.key_sum, total.key_count
    row_sum, key_sum, key_count = (x for x in sums if x is not None)
    left = row_sum.swapaxes(1, 2)[..., None] - expected
    of_rows = divide_or_zero(key_sum, key_count[..., None, None])
    of_rows = jnp.repeat(of_rows, N // of_rows.shape[2], axis=2)
    return total.dquery - left * of_rows * _at_end(recipe, scale)


def kept_for_delta(
    out: Float[Array, "B T N D"], recipe: Recipe
) -> Float[Array, "B T N D"]:
    """The O of `delta_source`, from the merged one."""
    if recipe.delta_source == "o_f32":
        return out
    high = rounded(out, recipe.output)
    if recipe.delta_source == "o":
        return high
    if recipe.delta_source == "o_hi_lo8":
        return with_low_byte(out, high, recipe.output.format)
    return high + rounded(out - high, recipe.output)


def delta(
    dout: Float[Array, "B T N D"], out: Float[Array, "B T N D"], recipe: Recipe
) -> Float[Array, "B N T"]:
    """rowsum(dO O), dO rounded like an input; `out` is that of `kept_for_delta`."""
    dout = round_to(dout.astype(carrier_dtype(recipe.carrier)), recipe.inputs)
    return rounded(pairwise_sum(dout * out, -1), recipe.delta).swapaxes(1, 2)


def rounded(x: Array, step: Step) -> Array:
    """`x` as a step that does not round stochastically keeps it."""
    return round_to(x, step.format, step.rounding)


def check(recipe: Recipe, query, key, value, scale: float) -> None:
    """Raises NotImplementedError or ValueError, one line, for what no part here has."""
    check_recipe(recipe, query, key, value, scale)
    for name, there in (
        ("dq_centre", recipe.dq_centre != "row"),
        ("delta_source", recipe.delta_source != "p_dp"),
        ("scaled_query", recipe.scaled_query is None),
        ("normalise", recipe.normalise != "before_product" or recipe.block_kv is None),
        ("probability_from", recipe.probability_from == "lse"),
        ("rowsum_accumulator", recipe.rowsum_accumulator.format == recipe.carrier),
    ):
        if not there:
            raise NotImplementedError(
                f"recipe {recipe.name!r}: parts of a sequence cannot have its {name}; "
                "use 'attn_jax', 'flash2' or 'ring_flash_attn'"
            )


def _on_dlogits(recipe: Recipe, scale: float) -> float:
    """f of the recipe's definition."""
    on_logits = recipe.gradient_scale_at == "logits"
    return recipe.dlogits_scale * (scale if on_logits else 1.0)


def _at_end(recipe: Recipe, scale: float) -> float:
    at_end = 1.0 if recipe.gradient_scale_at == "logits" else scale
    return at_end / recipe.dlogits_scale
