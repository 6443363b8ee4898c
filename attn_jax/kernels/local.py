"""Forward and backward pass of one device's arrays: padding, delta, centre, kernels.

`attention` makes them differentiable and says what they take; `partition` deals sharded
arrays to them.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from attn_jax.formats import BF16, FP16
from attn_jax.kernels import (
    ampere_backward_dbias,
    ampere_backward_dkv,
    ampere_backward_dq,
    ampere_backward_fused,
    ampere_forward,
    ampere_key_numbers,
    ampere_row_sums,
    design,
    hopper_backward_dbias,
    hopper_backward_dkv,
    hopper_backward_dq,
    hopper_backward_fused,
    hopper_forward,
    hopper_row_sums,
    key_means,
    tuning,
)
from attn_jax.kernels.hopper_key_numbers import KeyNumbers, key_numbers
from attn_jax.kernels.hopper_range import Range, range_of
from attn_jax.kernels.options import DEFAULT, Options
from attn_jax.kernels.tiles import SEQUENCE_MULTIPLE
from attn_jax.kernels.tilings import AmperePlan, Plan
from attn_jax.kernels.tuning import Backward, Configuration
from attn_jax.kernels.visibility import Band, Rules
from attn_jax.pairwise import pairwise_sum
from attn_jax.recipe import Architecture

INPUTS = {jnp.dtype(jnp.bfloat16): BF16, jnp.dtype(jnp.float16): FP16}
_FORWARD = {"ampere": ampere_forward, "hopper": hopper_forward}
_ROW_SUMS = {"ampere": ampere_row_sums, "hopper": hopper_row_sums}
_BACKWARD_DQ = {"ampere": ampere_backward_dq, "hopper": hopper_backward_dq}
_BACKWARD_DKV = {"ampere": ampere_backward_dkv, "hopper": hopper_backward_dkv}
_BACKWARD_DBIAS = {"ampere": ampere_backward_dbias, "hopper": hopper_backward_dbias}


class Static(NamedTuple):
    """What is compiled in: `is_causal` for a mask that a kernel can count by itself,
    `band` for the others, `window` if that band is all (`visibility.window_of`);
    `backward` if a design is asked for. `dtype` is that of the inputs, `bias_dtype` the
    one that kernels read a bias in."""

    target: Architecture
    dtype: jnp.dtype
    scale: float
    is_causal: bool
    band: Band
    soft_cap: float | None
    out_dtype: jnp.dtype
    backward: Backward | None
    tilings: Configuration
    window: Band | None = None
    bias_dtype: jnp.dtype | None = None
    options: Options = DEFAULT

    @property
    def keeps_low(self) -> bool:
        """Whether what rounding drops from out goes to the backward pass."""
        narrow = self.out_dtype != jnp.float32
        return narrow and self.options.delta_source == "o_hi_lo8"

    @property
    def keeps_numbers(self) -> bool:
        """Whether the forward pass finds `KeyNumbers` for the backward pass."""
        chosen = self.options
        if self.target != "hopper":
            return False
        # What it takes by shape; whether it is chosen is known on a device.
        one_pass = self.tilings.backward_fused is not None and self.soft_cap is None
        wanted = chosen.design(self.backward, self.target)
        one_pass = one_pass and wanted != "two_kernels"
        centred = one_pass and chosen.dq_centre in (None, "keys")
        if INPUTS[self.dtype] == FP16:
            return centred
        of_row = chosen.dq_centre == "row" and chosen.half_weights is not False
        return centred or chosen.half_dq or of_row

    def half_weights(self, *, differentiated: bool) -> bool:
        """Whether P and V of P V are FP16 numbers though the inputs are not."""
        narrow = self.target == "hopper" and self.dtype == jnp.bfloat16
        wanted = self.options.half_weights
        return narrow and (differentiated if wanted is None else wanted)


def raised_lse(lse: Float32[Array, "B N T"]) -> Float32[Array, "B N T"]:
    """LSE for the backward pass: itself below 2^21, and beyond so much above what it is
    that P = exp(x - LSE) is below 2, whatever is rounded on the way.

    LSE, its product with log2 e and its difference to x are rounded, by five halves of
    a place altogether, 0.9 |LSE| / 2^21 in units of log2. In trainings that lost their
    hold LSE was 5e7, where P may so be 2^20, and infinite as an operand. Rows of which
    FP32 cannot tell the weights get a gradient that is too small, and none that is NaN.
    """
    more = (jnp.abs(lse) - 2.0**21) * 2.0**-21
    return jnp.where(jnp.isfinite(lse), lse + jnp.maximum(more, 0.0), lse)


def bias_dtype(dtype) -> jnp.dtype:
    """The type that kernels read a bias in which is given in `dtype`."""
    dtype = jnp.dtype(dtype)
    return dtype if dtype in INPUTS else jnp.dtype(jnp.float32)


def forward(
    query,
    key,
    value,
    *arrays,
    static: Static,
    more,
    residual,
    unscale=None,
    **carrying,
):
    """(out, out_low if kept, LSE, `KeyNumbers` if kept) of one device's arrays.

    `residual`: for a backward pass. `unscale`: V is FP16 numbers already
    (`hopper_key_numbers.Prepared`), to be multiplied by these. `carrying`: arguments of
    `hopper_forward`, and what it returns then."""
    rules, sinks, bias = _unpacked(more, arrays)
    target = static.target
    query_count, key_count = query.shape[1], carrying.pop("key_count", key.shape[1])
    of_keys = ((len(query), key_count, *x.shape[-2:]) for x in (key, value))
    shapes = query.shape, *of_keys
    _log(shapes, static, listed=rules is not None, biased=bias is not None)
    options: dict[str, Any] = {}
    if static.window is not None and target == "hopper":
        options["window"] = static.window
    elif rules is not None:
        options |= {"mask": rules, "band": static.band}
    if bias is not None:
        options["bias"] = _for_all_pairs(bias, query_count, key_count)
    if static.soft_cap is not None:
        options["soft_cap"] = static.soft_cap
    query, key, value = map(pad_sequence, (query, key, value))
    keeps_numbers = residual and static.keeps_numbers
    half = static.half_weights(differentiated=residual) and unscale is None
    numbers = None
    if keeps_numbers or half:
        inputs = INPUTS[jnp.dtype(key.dtype)]
        numbers, half_value = key_numbers(key, value, key_count, inputs, half=half)
        if half_value is not None:
            value, options["unscale"] = half_value, numbers.unscale
    if unscale is not None:
        options["unscale"] = unscale
    found = _FORWARD[target].forward(
        *(query, key, value),
        query_count=query_count,
        key_count=key_count,
        scale=static.scale,
        is_causal=static.is_causal,
        tiling=static.tilings.forward,
        out_dtype=static.out_dtype,
        residual=residual and static.keeps_low,
        **options,
        **_of_softmax(static),
        **({} if sinks is None else {"sinks": sinks}),
        **carrying,
    )
    if carrying:
        return found
    out, low, lse = found
    kept = () if numbers is None or not keeps_numbers else numbers
    return (out, *(() if low is None else (low,)), lse, *kept)


def backward(
    query,
    key,
    value,
    dout,
    lse,
    out,
    *arrays,
    static: Static,
    more,
    rest,
    wants_dbias,
):
    """(dQ, dK, dV, dsinks, dbias if wanted) of one device's arrays; dsinks is zero
    without sinks. `arrays`: those that `rest` names, "dlse", "out_low" and the fields
    of `KeyNumbers`, then those of `more`."""
    given = dict(zip(rest, arrays[: len(rest)], strict=True))
    dlse, low = given.pop("dlse", None), given.pop("out_low", None)
    numbers = KeyNumbers(**given) if given else None
    rules, sinks, bias = _unpacked(more, arrays[len(rest) :])
    target, is_causal = static.target, static.is_causal
    dtype = query.dtype
    query_count, key_count = query.shape[1], key.shape[1]
    made = _design(query.shape, value.shape, static, listed=rules is not None)
    chosen = static.options
    centre_kind = chosen.dq_centre or ("keys" if made == "fused" else "mean")
    scaled = chosen.halves_dq(INPUTS[jnp.dtype(dtype)], target, made)
    # Delta sees the rounded one, as the products do: rows of dS are to sum to zero.
    dout = dout.astype(dtype)
    excess = dout_norm = None
    if scaled or chosen.delta_source != "p_dp":
        norms = {"norms": scaled} if target == "ampere" else {}
        excess, dout_norm = _ROW_SUMS[target].row_sums(out, low, dout, **norms)
    if made == "fused" and target == "ampere":
        numbers = ampere_key_numbers.key_numbers(key, value)
    unpadded_key = key
    query, key, value, dout = map(pad_sequence, (query, key, value, dout))
    if rules is not None or chosen.repeated_max_factor is not None:
        # Rows that see nothing, or have no weight: their P = exp(S - LSE) is to be 0.
        empty = jnp.isneginf(lse)
        lse = jnp.where(empty, jnp.inf, lse)
        dlse = None if dlse is None else jnp.where(empty, 0.0, dlse)
    for_kernels = raised_lse(lse)
    lengths = {"query_count": query_count, "key_count": key_count}
    options = {"scale": static.scale, "is_causal": is_causal} | lengths
    of_pairs = {}
    if rules is not None:
        of_pairs |= {"mask": rules, "band": static.band}
    if static.soft_cap is not None:
        of_pairs |= {"soft_cap": static.soft_cap}
    if bias is not None:
        of_pairs |= {"bias": _for_all_pairs(bias, query_count, key_count)}
    dq_tiling = static.tilings.backward_dq
    if chosen.delta_source == "p_dp":
        excess = hopper_backward_dq.backward_delta(
            *(query, key, value, dout, for_kernels),
            tiling=dq_tiling,
            **options,
            **of_pairs,
        )
    assert excess is not None
    delta = excess if dlse is None else excess - dlse
    dsinks = jnp.zeros((query.shape[0], query.shape[2]), jnp.float32)
    row_sum = dlse  # of dS over the keys
    if sinks is not None:
        # The sink is a key whose dP is zero: dS = P (0 - delta).
        of_sink = jnp.exp(sinks[..., None] - lse) * -delta
        dsinks = pairwise_sum(of_sink, -1)
        row_sum = -of_sink if dlse is None else dlse - of_sink
    operands = _Operands(query, key, value, dout, for_kernels, delta)
    found = range_of(
        *(numbers, dout_norm, dlse, key),
        centred=centre_kind == "keys",
        scaled=scaled,
    )
    if made == "fused":
        in_one_pass = _IN_ONE_PASS[target]
        gradients = in_one_pass(operands, row_sum, found, static, options)
        return *gradients, dsinks
    options |= of_pairs
    own: dict[str, Any] = {"numbers": found} if scaled else {}
    centre = None
    if centre_kind == "row":
        own["row_centre"] = _row_centre(
            query, key, value, sinks, numbers, static, options
        )
    elif centre_kind == "mean":
        centre = _mean_key(unpadded_key, rules, static, query_count)
    elif target == "ampere":  # Its kernel takes one, be it 0.
        centre = jnp.zeros((*key.shape[::2], 1, key.shape[3]), jnp.float32)
    if row_sum is None:
        row_sum = jnp.zeros_like(delta)
    dq = _BACKWARD_DQ[target].backward_dq(
        *(*operands, row_sum, centre), tiling=dq_tiling, **options, **own
    )
    dk, dv = _BACKWARD_DKV[target].backward_dkv(
        *operands, tiling=static.tilings.backward_dkv, **options
    )
    if not wants_dbias:
        return dq, dk, dv, dsinks
    assert bias is not None and rules is not None
    dbias = _BACKWARD_DBIAS[target].backward_dbias(
        *operands,
        bias,
        scale=static.scale,
        mask=rules,
        band=static.band,
        soft_cap=static.soft_cap,
        **lengths,
    )
    return dq, dk, dv, dsinks, dbias


class _Operands(NamedTuple):
    """Of all backward kernels; sequences are padded, those of `lse` and `delta` not."""

    query: Float[Array, "B Tpad N H"]
    key: Float[Array, "B Spad K H"]
    value: Float[Array, "B Spad K D"]
    dout: Float[Array, "B Tpad N D"]
    lse: Float32[Array, "B N T"]
    delta: Float32[Array, "B N T"]


def _ampere_in_one_pass(
    operands: _Operands, row_sum, found: Range, static: Static, options: dict
):
    """(dQ, dK, dV)"""
    plan = static.tilings.backward_fused
    assert isinstance(plan, AmperePlan)
    return ampere_backward_fused.backward_fused(
        *operands, row_sum, found, plan=plan, **options
    )


def _hopper_in_one_pass(
    operands: _Operands, row_sum, found: Range, static: Static, options: dict
):
    """(dQ, dK, dV)"""
    plan = static.tilings.backward_fused
    assert isinstance(plan, Plan)
    scaled = static.options.halves_dq(INPUTS[static.dtype], static.target, "fused")
    return hopper_backward_fused.backward_fused(
        *operands,
        row_sum,
        found,
        window=static.window,
        plan=plan,
        dq_dtype=jnp.dtype(jnp.float16) if scaled else static.dtype,
        **options,
    )


_IN_ONE_PASS = {"ampere": _ampere_in_one_pass, "hopper": _hopper_in_one_pass}


def _mean_key(
    key: Float[Array, "B S K H"], rules: Rules | None, static: Static, query_count: int
) -> Float32[Array, "B K C H"]:
    """Of the keys that rows see."""
    tiling = static.tilings.backward_dq
    if rules is not None:
        return key_means.mean_under(key, rules, static.band, query_count, tiling.rows)
    # On Ampere not those that no query sees. Hopper's last tile counts the keys of rows
    # past the last query, too; any centre is right, and that one keeps its bits.
    if static.is_causal and static.target != "hopper":
        key = key[:, :query_count]
    return key_means.mean(key, static.is_causal, tiling, query_count)


def _row_centre(
    query: Float[Array, "B Tpad N H"],
    key: Float[Array, "B Spad K H"],
    value: Float[Array, "B Spad K D"],
    sinks: Float32[Array, "1 N"] | None,
    numbers: KeyNumbers | None,
    static: Static,
    options: dict,
) -> Float32[Array, "B T N H"]:
    """sum_j P_ij K_j in FP32: the forward kernel, with K for V. `options`: those of the
    backward kernels."""
    tilings, head_dim = static.tilings, key.shape[3]
    if value.shape[3] != head_dim:
        tilings = tuning.configuration(
            *(static.target, head_dim, head_dim, options["key_count"]),
            is_causal=static.is_causal,
            listed="mask" in options,
        )
    values = key
    if static.half_weights(differentiated=True):
        assert numbers is not None
        factor = numbers.key_factor[:, None]
        values = (key.astype(jnp.float32) * factor).astype(jnp.float16)
        options = options | {"unscale": 1 / numbers.key_factor}
    centre, _, _ = _FORWARD[static.target].forward(
        *(query, key, values),
        tiling=tilings.forward,
        out_dtype=jnp.dtype(jnp.float32),
        residual=False,
        sinks=sinks,
        **options,
        **_of_softmax(static),
    )
    return centre


def _of_softmax(static: Static) -> dict:
    """Options of the forward kernel; Ampere's has none."""
    chosen = static.options
    if chosen.rescale_threshold == 0 and chosen.repeated_max_factor is None:
        return {}
    return {
        "rescale_threshold": chosen.rescale_threshold,
        "repeated_max_factor": chosen.repeated_max_factor,
    }


def _design(
    query_shape: tuple[int, ...],
    value_shape: tuple[int, ...],
    static: Static,
    *,
    listed: bool,
) -> Backward:
    return design.backward_of(
        *(query_shape, value_shape, static.target),
        is_causal=static.is_causal,
        window=static.window,
        listed=listed and static.window is None,
        soft_cap=static.soft_cap,
        inputs=INPUTS[static.dtype],
        wanted=static.backward or _without_plan(static),
    )


def _without_plan(static: Static) -> Backward | None:
    """With tilings of a caller's that have none for one pass."""
    return None if static.tilings.backward_fused is not None else "two_kernels"


def _log(
    shapes: tuple[tuple[int, ...], ...], static: Static, *, listed: bool, biased: bool
) -> None:
    """`shapes`: of Q, K and V."""
    mask = "lists of blocks" if listed else "causal" if static.is_causal else "full"
    if static.window is not None:
        mask = "window"
    mask += ", bias" if biased else ""
    made = _design(shapes[0], shapes[2], static, listed=listed)
    tuning.log(static.target, shapes, mask, static.tilings, made)


def pad_sequence(x: Float[Array, "*P B L N H"]) -> Float[Array, "*P B M N H"]:
    """Adds zero rows up to what TMA reads; the kernels mask them or cut them off.
    Planes of arrays, which are whole, stay."""
    if x.ndim == 5:
        return x
    return jnp.pad(x, ((0, 0), (0, -x.shape[1] % SEQUENCE_MULTIPLE), (0, 0), (0, 0)))


def _for_all_pairs(
    bias: Float[Array, "#B #N #T #S"], query_count: int, key_count: int
) -> Float[Array, "#B #N T S"]:
    """One entry for each pair, as the kernels read it; batch and heads stay."""
    return jnp.broadcast_to(bias, (*bias.shape[:2], query_count, key_count))


def _unpacked(
    layout: tuple[tuple[str, str], ...], arrays: Sequence[Array]
) -> tuple[Rules | None, Array | None, Array | None]:
    """(rules, sinks, bias) from the arrays of `_Extra`."""
    given = dict(zip((name for name, _ in layout), arrays, strict=True))
    sinks, bias = given.pop("sinks", None), given.pop("bias", None)
    return Rules(**given) if given else None, sinks, bias
