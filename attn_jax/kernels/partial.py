"""Attention over some of the keys, for those who put the parts together themselves.

The kernels of `attention`, but that O and gradients are FP32, and that LSE and delta,
of whole rows, are given. For Hopper, for now. Where it rounds is said in
`hopper_forward`, `hopper_backward_fused` and `hopper_backward_dq`, `_dkv` and `_dbias`:
O has P in FP16, as where attention is differentiated, and dQ has dS and K in FP16, each
scaled into its range by a power of two, one for all parts. From part to part go the
running maximum m, sum l and weighted sum A of whole rows, in FP32: the forward kernel
takes them and leaves them, and no LSE is rounded before the last; or with the last keys
it ends the rows, and leaves O, rounded or not, and LSE (`end_with`). So do dQ's sums,
where one pass makes the gradients of all parts (`hopper_backward_parts`).
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from attn_jax.formats import FP16
from attn_jax.kernels import (
    architecture,
    design,
    hopper_backward_dbias,
    hopper_backward_dkv,
    hopper_backward_dq,
    hopper_backward_fused,
    hopper_backward_parts,
    hopper_key_numbers,
    hopper_row_sums,
    local,
    tuning,
    visibility,
)
from attn_jax.kernels.attention import unsupported as unsupported_whole
from attn_jax.kernels.hopper_backward_parts import Keys
from attn_jax.kernels.hopper_key_numbers import KeyNumbers, Prepared
from attn_jax.kernels.hopper_outputs import Carried
from attn_jax.kernels.hopper_query_gradient import by_xla
from attn_jax.kernels.hopper_range import Range, range_of
from attn_jax.kernels.options import Options
from attn_jax.kernels.tiles import LN_2, SEQUENCE_MULTIPLE
from attn_jax.kernels.tilings import Plan
from attn_jax.kernels.visibility import Band, Rules
from attn_jax.mask import Mask
from attn_jax.pairwise import pairwise_sum
from attn_jax.recipe_schema import MOST_HEAD_EXPONENT
from attn_jax.span import Chosen, Ended, Ending, Span
from attn_jax.varying import varying_alike

_OPTIONS = Options("mean", delta_source="o", half_weights=True)


class Ranges(NamedTuple):
    """Of the keys as they are, and of what is left when the centre comes off."""

    plain: Range
    centred: Range


def unsupported(query: Array, key: Array, value: Array, scale: float) -> str | None:
    """Why the kernels cannot take parts of these, in one line, or None if they can."""
    if architecture.chosen() != "hopper":
        return (
            "parts of a sequence have kernels for Hopper (H100, H200), not for "
            f"{architecture.chosen().capitalize()}; use implementation='emulated'"
        )
    if scale <= 0:
        return f"kernels for parts take a scale above 0, not {scale}; negate the query"
    return unsupported_whole(query, key, value)


def forward(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K D"],
    *,
    scale: float,
    bias: Float[Array, "#B #N #T #S"] | None = None,
    mask: Mask = Mask(),
) -> tuple[Float32[Array, "B T N D"], Float32[Array, "B N T"]]:
    """O of these keys alone, unrounded, and LSE; 0 and -inf where none is seen."""
    static, rules = _static(query, key, value, scale, mask, bias)
    out, lse = _forward(query, key, value, bias, static, rules)
    out, lse, _ = varying_alike(out, lse, query)
    return out, lse


def carry_on(
    state: tuple[Array, Array, Array] | None,
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K D"],
    *,
    scale: float,
    bias: Float[Array, "#B #N #T #S"] | None = None,
    mask: Mask = Mask(),
    first: int = 0,
    chosen: Chosen | None = None,
    first_key: int = 0,
    prepared: Prepared | None = None,
) -> Carried:
    """The state with these keys, too, of the rows from the `first` on that the query
    is; others stay. With logits S in units of log2, all FP32,

        m' = max(m, max S)      l' = 2^(m - m') l + sum 2^(S - m')
                                A' = 2^(m - m') A + sum 2^(S - m') V

    with maxima rounded to whole numbers, so that the factors are exact. Before any keys
    (None) m is -inf, l and A are 0. The sums over these keys are made as ever, from
    their own maximum, and added to what was there in the end; the kernel does it where
    the state lies, which XLA copies only if somebody else reads it, too. If something
    is `chosen`, which the kernels are to take (`takes`), then only that. `prepared`:
    where these keys and values, of which V is FP16 numbers then, are those from
    `first_key` on.
    """
    static, rules = _static(query, key, value, scale, mask, bias)
    key, value, options = _as_prepared(key, value, first_key, prepared, static)
    count, more = query.shape[1], -query.shape[1] % static.tilings.forward.tile

    def carried(before: Carried | None, first: int) -> Carried:
        found = _forward(
            *(query, key, value, bias, static, rules),
            carries=True,
            before=before,
            first_row=first,
            chosen=chosen,
            **options,
        )
        m, l, total, _ = varying_alike(*found, query)  # noqa: E741
        return Carried(m, l, total)

    if state is None:
        return carried(None, 0).rows(0, count)
    before = Carried(*state)
    if not more:
        return carried(before, first)
    # The kernel's tiles would reach into rows that are not this query's.
    own = before.rows(first, count).padded(more)
    return before.with_rows(carried(own, 0).rows(0, count), first)


def end_with(
    state: tuple[Array, Array, Array],
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K D"],
    chosen: Chosen,
    ending: Ending,
    *,
    scale: float,
    prepared: Prepared | None = None,
) -> Ended:
    """What `finished` makes of `carry_on`, of all rows, by the same kernel: the state
    is read once more, and not left. The O of `ending` is rounded to nearest."""
    static, rules = _static(query, key, value, scale, Mask(), None)
    key, value, options = _as_prepared(key, value, 0, prepared, static)
    found = _forward(
        *(query, key, value, None, static, rules),
        carries=True,
        before=Carried(*state),
        chosen=chosen,
        ending=ending,
        **options,
    )
    return varying_alike(found, query)[0]


def _as_prepared(
    key: Array,
    value: Array,
    first_key: int,
    prepared: Prepared | None,
    static: local.Static,
) -> tuple[Array, Array, dict]:
    """Keys and values as the kernel reads them, and what to tell it."""
    if prepared is None:
        return key, value, {}
    options = {"unscale": prepared.unscale, "key_count": key.shape[1]}
    # Whole blocks alone: behind the last key lies what is no key.
    if first_key == 0 and key.shape[1] % static.tilings.forward.columns == 0:
        key, value = prepared.planes, prepared.value_planes
        options["unscale"] = prepared.count
    return key, value, options


def prepared(
    key: Float[Array, "B S K H"], value: Float[Array, "B S K D"]
) -> Prepared | None:
    """K and V as all devices are to have them for `carry_on`, or None."""
    inputs = local.INPUTS[jnp.dtype(key.dtype)]
    if inputs == FP16 or key.shape[1] % SEQUENCE_MULTIPLE:
        return None
    return hopper_key_numbers.prepared(key, value, inputs)


def takes(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K D"],
    chosen: Chosen,
) -> bool:
    """Whether `carry_on` does."""
    static, _ = _static(query, key, value, 1.0, Mask(), None)
    tiling = static.tilings.forward
    return query.shape[1] % tiling.tile == 0 and chosen.fit(tiling.tile, tiling.columns)


def finished(
    state: tuple[Array, Array, Array],
) -> tuple[Float32[Array, "B T N D"], Float32[Array, "B N T"]]:
    """O = A / l and LSE = log(2) m + log l of whole rows; 0 and -inf where none is
    seen."""
    m, l, total = state  # noqa: E741
    seen = l > 0
    l = jnp.where(seen, l, 1.0)  # noqa: E741
    lse = jnp.where(seen, m * LN_2 + jnp.log(l), -jnp.inf)
    return total / l.swapaxes(1, 2)[..., None], lse


def _forward(
    query, key, value, bias, static: local.Static, rules: Rules | None, **options
):
    given = {} if rules is None else rules._asdict()
    given |= {"bias": _as_read(bias)}
    given = {name: x for name, x in given.items() if x is not None}
    return local.forward(
        *(query, key, value, *given.values()),
        static=static,
        more=tuple((name, "") for name in given),
        residual=False,
        **options,
    )


def row_sums(
    dout: Float[Array, "B T N D"], out: Float32[Array, "B T N D"]
) -> hopper_row_sums.RowSums:
    """rowsum(dO O) and norms of dO of whole rows, for `backward`; O as merged."""
    return hopper_row_sums.row_sums(out, None, dout)


def backward(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K D"],
    dout: Float[Array, "B T N D"],
    lse: Float32[Array, "B N T"],
    excess: Float32[Array, "B N T"],
    ranges: Ranges,
    *,
    scale: float,
    bias: Float[Array, "#B #N #T #S"] | None = None,
    mask: Mask = Mask(),
) -> tuple[
    Float32[Array, "B T N H"],
    Float32[Array, "B S K H"],
    Float32[Array, "B S K D"],
    Float32[Array, "#B #N #T #S"] | None,
]:
    """What these keys bring to dQ, what dK and dV of them are, and dbias if there is a
    bias.

    `lse` and `excess` (delta - dLSE) are those of whole rows, and `ranges` are of all
    keys, and of these rows or more. Each part of dQ is less rowsum(rounded dS) *
    centre, which over all keys comes to dLSE * centre in exact arithmetic: whoever adds
    them up adds scale * dLSE * centre.
    """
    static, rules = _static(query, key, value, scale, mask, bias)
    bias = _as_read(bias)
    query_count, key_count = query.shape[1], key.shape[1]
    made = design.backward_of(
        *(query.shape, value.shape, "hopper"),
        is_causal=static.is_causal,
        listed=rules is not None,
    )
    lengths = {"query_count": query_count, "key_count": key_count}
    options: dict = {"scale": scale, "is_causal": static.is_causal, **lengths}
    lse = _of_seen(lse)
    dout = dout.astype(query.dtype)
    query, key, value, dout = map(local.pad_sequence, (query, key, value, dout))
    operands = query, key, value, dout, lse, excess
    if made == "fused":
        plan = static.tilings.backward_fused
        assert isinstance(plan, Plan)
        gradients = hopper_backward_fused.backward_fused(
            *(*operands, None, ranges.centred),
            plan=plan,
            dq_dtype=_dq_dtype(key),
            wide=True,
            **options,
        )
    else:
        if rules is not None:
            options |= {"mask": rules, "band": static.band}
        if bias is not None:
            # One entry for each pair, but that batch and heads stay.
            shape = *bias.shape[:2], query_count, key_count
            options["bias"] = jnp.broadcast_to(bias, shape)
        dquery = hopper_backward_dq.backward_dq(
            *(*operands, jnp.zeros_like(excess), ranges.centred.centre[:, :, None]),
            tiling=static.tilings.backward_dq,
            numbers=ranges.plain if scaled(key) else None,
            wide=True,
            **options,
        )
        dkey, dvalue = hopper_backward_dkv.backward_dkv(
            *operands, tiling=static.tilings.backward_dkv, wide=True, **options
        )
        gradients = dquery, dkey, dvalue
    dbias = None
    if bias is not None:
        assert rules is not None
        dbias = hopper_backward_dbias.backward_dbias(
            *(*operands, bias), scale=scale, mask=rules, band=static.band, **lengths
        )
    found = varying_alike(*gradients, dbias, query)
    return found[0], found[1], found[2], found[3]


def adds_in_place(
    query_shape: tuple[int, ...],
    value_shape: tuple[int, ...],
    queries: tuple[int, int],
    keys: tuple[int, int],
    *,
    is_causal: bool,
) -> bool:
    """Whether `backward_in_place` takes (first, number of) those of [B, T, N, H] and of
    keys and values like [B, S, K, D]."""
    used = (
        (x[0], count, *x[2:])
        for x, (_, count) in ((query_shape, queries), (value_shape, keys))
    )
    made = design.backward_of(next(used), next(used), "hopper", is_causal=is_causal)
    lengths = query_shape[1], value_shape[1]
    return made == "fused" and hopper_backward_parts.added_in_place(
        query_shape[3], queries, keys, *lengths
    )


def adds_some(
    chosen: Chosen, query: Float[Array, "B T N H"], key: Float[Array, "B S K H"]
) -> bool:
    """Whether `backward_in_place` takes it, if it takes each span by itself."""
    whole = Span(0, query.shape[1], key.shape[1])
    return hopper_backward_parts.fits(
        chosen._replace(spans=(whole, *chosen.spans)), query.shape[-1]
    )


def backward_in_place(
    sums: Float32[Array, "B T N H"] | None,
    query: Float[Array, "B T N H"],
    keys: Keys,
    dout: Float[Array, "B T N D"],
    lse: Float32[Array, "B N T"],
    excess: Float32[Array, "B N T"],
    ranges: Ranges,
    queries: tuple[int, int],
    *,
    scale: float,
    is_causal: bool,
    chosen: Chosen | None = None,
) -> tuple[
    Float32[Array, "B T N H"], Float32[Array, "B s K H"], Float32[Array, "B s K D"]
]:
    """(`sums` with these keys, for the (first, number of) queries, dK, dV), as of
    `backward`; of all keys `dquery` is dQ. None: of no keys so far, for all rows.
    `chosen`: of all rows and all these keys that alone."""
    found = hopper_backward_parts.add_to(
        *(sums, query, keys, dout.astype(query.dtype), _of_seen(lse), excess),
        ranges.centred,
        first_query=queries[0],
        query_count=queries[1],
        scale=scale,
        is_causal=is_causal,
        dq_dtype=_dq_dtype(keys.key),
        chosen=chosen,
    )
    found = varying_alike(*found, query)
    return found[0], found[1], found[2]


def dquery(
    sums: Float32[Array, "B T N H"],
    dlse: Float32[Array, "B N T"],
    ranges: Ranges,
    scale: float,
) -> Float32[Array, "B T N H"]:
    """dQ of the sums that `backward_in_place` leaves when it has seen all keys."""
    return by_xla([sums], ranges.centred, dlse, scale, jnp.float32)


def _of_seen(lse: Float32[Array, "B N T"]) -> Float32[Array, "B N T"]:
    """For P = exp(S - LSE), which of rows that see nothing is to be 0."""
    return local.raised_lse(jnp.where(jnp.isneginf(lse), jnp.inf, lse))


def _dq_dtype(key: Array) -> jnp.dtype:
    return jnp.dtype(jnp.float16) if scaled(key) else key.dtype


def _as_read(bias: Array | None) -> Array | None:
    return None if bias is None else bias.astype(local.bias_dtype(bias.dtype))


def ranges(
    centre: Float32[Array, "B K H"],
    key_largest: Float32[Array, "B K H"] | None,
    value_largest: Float32[Array, "B K D"] | None,
    excess: Float32[Array, "B N T"],
    dout_norm: Float32[Array, "B N T"],
) -> Ranges:
    """Of all keys and these whole rows (`row_sums`), for `backward`: powers of two for
    |dS| <= |dO| |V| + |excess|, by norms, and for |K - c| <= 2 |K|. By columns, c and
    the largest |K| and |V|; None where there are no such powers.

    `range_of` is meant for dLSE, with |delta| <= |dO| |V| besides, and so takes the
    first term twice: at most a bit of FP16's range that is not used."""
    is_scaled = key_largest is not None
    numbers = None
    if key_largest is not None:
        assert value_largest is not None
        largest = key_largest.max(axis=-1, keepdims=True)
        # Of twice the largest, which may overflow.
        exponent = FP16.max_exponent - (jnp.frexp(largest)[1] + 1)
        exponent = jnp.clip(exponent, -MOST_HEAD_EXPONENT, MOST_HEAD_EXPONENT)
        factor = jnp.ldexp(jnp.ones_like(centre), jnp.where(largest > 0, exponent, 0))
        norm = jnp.broadcast_to(_norm(value_largest), value_largest.shape)
        numbers = KeyNumbers(centre, factor, norm, jnp.ones_like(value_largest))
    plain = range_of(
        *(numbers, dout_norm, excess, centre[:, None]),
        centred=False,
        scaled=is_scaled,
    )
    return Ranges(plain, plain._replace(centre=centre))


def _norm(x: Float32[Array, "*rows D"]) -> Float32[Array, "*rows 1"]:
    """Over the last axis; squares stay in FP32's range."""
    _, exponent = jnp.frexp(x.max(-1, keepdims=True))
    squares = pairwise_sum(jnp.square(jnp.ldexp(x, -exponent)), -1)
    return jnp.ldexp(jnp.sqrt(squares)[..., None], exponent)


def scaled(key: Array) -> bool:
    """Whether dQ's product has powers of two."""
    inputs = local.INPUTS[jnp.dtype(key.dtype)]
    return _OPTIONS.halves_dq(inputs, "hopper", "two_kernels")


def _static(query, key, value, scale, mask, bias) -> tuple[local.Static, Rules | None]:
    by_itself = visibility.is_static(mask) and bias is None
    rules = None
    if not by_itself:
        rules = visibility.rules(mask, query.shape[0], query.shape[1], key.shape[1])
    tilings = tuning.configuration(
        *("hopper", query.shape[-1], value.shape[-1], key.shape[1]),
        is_causal=mask.is_causal,
        listed=not by_itself,
        short_blocks=True,
    )
    static = local.Static(
        target="hopper",
        dtype=jnp.dtype(query.dtype),
        scale=scale,
        is_causal=mask.is_causal and by_itself,
        band=Band(None, None) if by_itself else Band(*mask.band),
        soft_cap=None,
        out_dtype=jnp.dtype(jnp.float32),
        backward=None,
        tilings=tilings,
        options=_OPTIONS,
    )
    return static, rules
