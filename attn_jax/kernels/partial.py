"""Attention over some of the keys, for those who put the parts together themselves.

The kernels of `attention`, but that O and gradients are FP32, and that LSE and delta,
of whole rows, are given. For Hopper, for now. Where it rounds is said in
`hopper_forward` and `hopper_backward_dq`, `_dkv` and `_dbias`: O has P in FP16, as
where attention is differentiated, and dQ has dS and K in FP16, each scaled into its
range by a power of two for the part. From part to part go the running maximum m, sum l
and weighted sum A of whole rows, in FP32: no LSE is rounded but that of a part.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from attn_jax.kernels import (
    architecture,
    hopper_backward_dbias,
    hopper_backward_dkv,
    hopper_backward_dq,
    local,
    tuning,
    visibility,
)
from attn_jax.kernels.attention import unsupported as unsupported_whole
from attn_jax.kernels.hopper_key_numbers import key_numbers
from attn_jax.kernels.hopper_range import Range, range_of
from attn_jax.kernels.options import Options
from attn_jax.kernels.visibility import Band, Rules
from attn_jax.mask import Mask
from attn_jax.varying import varying_alike

_OPTIONS = Options("mean", delta_source="o", half_weights=True)
State = tuple[
    Float32[Array, "B N T"], Float32[Array, "B N T"], Float32[Array, "B T N D"]
]


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
    given = {} if rules is None else rules._asdict()
    given |= {"bias": _as_read(bias)}
    given = {name: x for name, x in given.items() if x is not None}
    out, lse = local.forward(
        *(query, key, value, *given.values()),
        static=static,
        more=tuple((name, "") for name in given),
        residual=False,
    )
    out, lse, _ = varying_alike(out, lse, query)
    return out, lse


def carry_on(
    state: State,
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K D"],
    *,
    scale: float,
    bias: Float[Array, "#B #N #T #S"] | None = None,
    mask: Mask = Mask(),
) -> State:
    """(m, l, A) after these keys, too: with O and L of them alone,

        m' = max(m, L)    l' = e^(m - m') l + e^(L - m')
                          A' = e^(m - m') A + e^(L - m') O

    Before any keys m is -inf, l and A are 0.
    """
    out, lse = forward(query, key, value, scale=scale, bias=bias, mask=mask)
    m, l, total = state  # noqa: E741
    larger = jnp.maximum(m, lse)
    # Where nothing is seen yet any maximum will do: its factors are e^(-inf).
    finite = jnp.where(jnp.isneginf(larger), 0.0, larger)
    before, now = jnp.exp(m - finite), jnp.exp(lse - finite)
    l = before * l + now  # noqa: E741
    before, now = (x.swapaxes(1, 2)[..., None] for x in (before, now))
    return larger, l, before * total + now * out


def finished(
    state: State,
) -> tuple[Float32[Array, "B T N D"], Float32[Array, "B N T"]]:
    """O = A / l and LSE = m + log l of whole rows; 0 and -inf where none is seen."""
    m, l, total = state  # noqa: E741
    seen = l > 0
    l = jnp.where(seen, l, 1.0)  # noqa: E741
    lse = jnp.where(seen, m + jnp.log(l), -jnp.inf)
    return total / l.swapaxes(1, 2)[..., None], lse


def backward(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K D"],
    dout: Float[Array, "B T N D"],
    lse: Float32[Array, "B N T"],
    excess: Float32[Array, "B N T"],
    centre: Float32[Array, "B K H"],
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

    `lse` and `excess` (delta - dLSE) are those of whole rows. Each part of dQ is less
    rowsum(rounded dS) * centre, which over all keys comes to dLSE * centre in exact
    arithmetic: whoever adds them up adds scale * dLSE * centre.
    """
    static, rules = _static(query, key, value, scale, mask, bias)
    bias = _as_read(bias)
    query_count, key_count = query.shape[1], key.shape[1]
    options: dict = {} if rules is None else {"mask": rules, "band": static.band}
    if bias is not None:
        # One entry for each pair, but that batch and heads stay.
        shape = *bias.shape[:2], query_count, key_count
        options["bias"] = jnp.broadcast_to(bias, shape)
    lengths = {"query_count": query_count, "key_count": key_count}
    options |= {"scale": scale, "is_causal": static.is_causal} | lengths
    # P = exp(S - LSE) of rows that see nothing is to be 0.
    lse = jnp.where(jnp.isneginf(lse), jnp.inf, lse)
    dout = dout.astype(query.dtype)
    query, key, value, dout = map(local.pad_sequence, (query, key, value, dout))
    operands = query, key, value, dout, lse, excess
    dquery = hopper_backward_dq.backward_dq(
        *(*operands, jnp.zeros_like(excess), centre[:, :, None]),
        tiling=static.tilings.backward_dq,
        numbers=_range(key, value, dout, excess, key_count),
        wide=True,
        **options,
    )
    dkey, dvalue = hopper_backward_dkv.backward_dkv(
        *operands, tiling=static.tilings.backward_dkv, wide=True, **options
    )
    dbias = None
    if bias is not None:
        assert rules is not None
        dbias = hopper_backward_dbias.backward_dbias(
            *(*operands, bias), scale=scale, mask=rules, band=static.band, **lengths
        )
    found = varying_alike(dquery, dkey, dvalue, dbias, query)
    return found[0], found[1], found[2], found[3]


def _as_read(bias: Array | None) -> Array | None:
    return None if bias is None else bias.astype(local.bias_dtype(bias.dtype))


def _range(key, value, dout, excess, key_count: int) -> Range | None:
    """The powers of two of the part: |dS| <= |dO| |V| + |excess|, by norms."""
    inputs = local.INPUTS[jnp.dtype(key.dtype)]
    if not _OPTIONS.halves_dq(inputs, "hopper"):
        return None
    numbers, _ = key_numbers(key, value, key_count, inputs, half=False)
    squares = jnp.square(dout.astype(jnp.float32)).sum(-1).swapaxes(1, 2)
    return range_of(numbers, squares, excess, key, centred=False)


def _static(query, key, value, scale, mask, bias) -> tuple[local.Static, Rules | None]:
    by_itself = visibility.is_static(mask) and bias is None
    rules = None
    if not by_itself:
        rules = visibility.rules(mask, query.shape[0], query.shape[1], key.shape[1])
    tilings = tuning.configuration(
        *("hopper", query.shape[-1], value.shape[-1], key.shape[1]),
        is_causal=mask.is_causal,
        listed=not by_itself,
    )
    static = local.Static(
        target="hopper",
        dtype=jnp.dtype(query.dtype),
        scale=scale,
        is_causal=mask.is_causal and by_itself,
        band=Band(None, None) if by_itself else Band(*mask.band),
        soft_cap=None,
        out_dtype=jnp.dtype(jnp.float32),
        backward="two_kernels",
        tilings=tilings,
        options=_OPTIONS,
    )
    return static, rules
