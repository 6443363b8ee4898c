"""Differentiable attention on the kernels: which kernels, and sharding.

`architecture` says whose kernels run. They run on one device's arrays or on sharded
ones (`partition`): batch and heads may be sharded, sequences may not.
"""

import dataclasses
import functools
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Float, Float32

from attn_jax.formats import BF16, NumberFormat
from attn_jax.kernels import (
    ampere_backward_fused,
    architecture,
    design,
    hopper_backward_fused,
    hopper_fused_work,
    local,
    options,
    tuning,
    visibility,
)
from attn_jax.kernels.hopper_key_numbers import KeyNumbers
from attn_jax.kernels.partition import Layout, partitioned, varying_alike
from attn_jax.kernels.tilings import AmperePlan
from attn_jax.kernels.tuning import Backward, Configuration
from attn_jax.kernels.visibility import Band, Rules
from attn_jax.mask import Mask
from attn_jax.pairwise import pairwise_sum
from attn_jax.recipe import ATTN_JAX, Architecture, Recipe
from attn_jax.reference import check_arguments, default_scale, python_float
from attn_jax.residuals import named_lse, named_out

# Axes of `KeyNumbers`.
_NUMBERS = dict(zip(KeyNumbers._fields, ("BKH", "BKH", "BKD", "BKD"), strict=True))
# Keys that the one-pass kernels add to dQ at once.
_KEY_TILES: dict[Architecture, int] = {
    "ampere": ampere_backward_fused.KEY_TILE,
    "hopper": hopper_backward_fused.KEY_TILE,
}
# In which the forward kernels visit blocks of keys.
_KV_ORDER: dict[Architecture, Literal["forward", "reverse"]] = {
    "ampere": "forward",
    "hopper": "reverse",
}


def attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K D"],
    *,
    scale: float,
    bias: Float[Array, "#B #N #T #S"] | None = None,
    mask: Mask = Mask(),
    sinks: Float[Array, " N"] | None = None,
    soft_cap: float | None = None,
    out_dtype: jnp.dtype | None = None,
    backward: Backward | None = None,
    tilings: Configuration | None = None,
    recipe: Recipe | None = None,
) -> tuple[Float[Array, "B T N D"], Float32[Array, "B N T"]]:
    """out = softmax(x) V and LSE = logsumexp(x), natural log; x = scale * Q K^T + bias.

    Query head n reads key/value head n // (N / K). H and D are any two of 32, 64, 96,
    128, 192 and 256 (`tuning.HEAD_DIMS`). A query that sees no key gives out 0, LSE
    -inf (or the sink's logit) and no gradient. Both results are differentiable, and
    named for `jax.checkpoint` (`residuals`) with what the backward pass has of them.
    Where it rounds is said in `<architecture>_forward`, and in
    `<architecture>_backward_fused`, `_backward_dq`, `_backward_dkv` and
    `_backward_dbias`.
    Where it is differentiated P of the forward product is an FP16 number on Hopper,
    whatever the inputs, and V with it (`hopper_key_numbers`), unless `recipe` says
    otherwise; so out may differ in the last place from that of a call that is not.
    Otherwise dQ's largest error would be P's rounding. A
    cotangent wider than the inputs is rounded to their format, and gradients come in
    that format. From |LSE| of 2^21 on, where rounding it changes weights markedly,
    those of the backward pass are too small rather than too large
    (`local.raised_lse`).

    Args:
      scale: a Python number; it is compiled into the kernel.
      bias: added to the scaled logits, before a soft cap. -inf hides a key (under a
        soft cap it is a logit of -soft_cap). An axis of size one is one entry for all:
        of batch and heads no copies are made, of T and S they are, and under `jax.vmap`
        for each mapped entry. Kernels read BF16, FP16 and FP32 as they are,
        other types as FP32. Its gradient is summed in FP32 in a fixed order, rounded
        once to its type, and made where it is differentiated alone.
      soft_cap: logits become soft_cap * tanh(logits / soft_cap).
      sinks: one more logit for each head, which takes weight and carries no value.
      out_dtype: the inputs' dtype (default) or float32, the accumulator unrounded.
      backward: "two_kernels", or "fused", one kernel where it takes the problem; None:
        by the shapes on a device (`design.backward_of`).
      tilings: block sizes and the fused kernel's plan; None:
        `design.configuration_of`.
        What it is goes to the logger `attn_jax.kernels` at level INFO, once for a
        shape on a device.
      recipe: which of the algorithm's options are wanted, None: the kernels' own. Its
        `dq_centre`, `dq_dlogits`, `dq_sum`, `delta_source`, `rescale_threshold`,
        `repeated_max_factor` and, as a pair, `probability` and `probability_scale`
        (FP16, `hopper_softmax.P_SCALE`) are taken. Name, source, blocks and order
        of keys are the kernels' own, whatever it says; all else is to be as in
        `declared_recipe`.
        What the options say of the backward pass is done there: with dq_centre "row"
        the forward kernel runs once more, with K for V, and with delta_source "p_dp" a
        pass over the keys comes before the others.

    Raises:
      NotImplementedError: `unsupported` names a reason.
      ValueError: shapes or a scale that do not fit.
    """
    check_arguments(
        query, key, value, bias=bias, mask=mask, soft_cap=soft_cap, sinks=sinks
    )
    reason = unsupported(
        query,
        key,
        value,
        bias=bias,
        mask=mask,
        soft_cap=soft_cap,
        out_dtype=out_dtype,
        backward=backward,
        recipe=recipe,
    )
    if reason is not None:
        raise NotImplementedError(reason)
    scale = default_scale(scale, query.shape[-1])
    if scale < 0:
        # The kernels take the row maximum before they scale. The sign is exact in Q.
        query, scale = -query, -scale
    if scale == 0:
        # Masked logits are -inf, and 0 * -inf would be NaN.
        query, scale = jnp.zeros_like(query), 1.0
    by_itself = visibility.is_static(mask) and bias is None
    target = architecture.chosen()
    chosen = options.of_recipe(recipe)
    if tilings is None:
        tilings = design.configuration_of(
            *(target, *_head_dims(query, value), key.shape[1], mask),
            query_count=query.shape[1],
            has_bias=bias is not None,
            short_blocks=chosen.rescale_threshold > 0,
        )
    static = local.Static(
        target=target,
        dtype=jnp.dtype(query.dtype),
        scale=scale,
        is_causal=mask.is_causal and by_itself,
        band=Band(None, None) if by_itself else Band(*mask.band),
        window=design.counted_window(
            *(mask, query.shape[1], key.shape[1]), has_bias=bias is not None
        ),
        soft_cap=python_float(soft_cap),
        out_dtype=jnp.dtype(query.dtype if out_dtype is None else out_dtype),
        backward=chosen.design(backward, target),
        tilings=tilings,
        bias_dtype=None if bias is None else local.bias_dtype(bias.dtype),
        options=chosen,
    )
    rules = sink_row = None
    if not by_itself:
        batch, query_count = query.shape[:2]
        rules = visibility.rules(mask, batch, query_count, key.shape[1])
    # In FP32, so that whatever adds up their gradients does so before it is rounded.
    if sinks is not None:
        sink_row = sinks.astype(jnp.float32)[None]
    if bias is not None:
        bias = bias.astype(jnp.float32)
    arrays = varying_alike(query, key, value, bias, rules, sink_row)
    return _attention(static, *arrays)


def unsupported(
    query: Array,
    key: Array,
    value: Array,
    *,
    bias: Array | None = None,
    mask: Mask = Mask(),
    soft_cap: float | None = None,
    out_dtype=None,
    backward: Backward | None = None,
    recipe: Recipe | None = None,
) -> str | None:
    """Why the kernels cannot take these arguments, in one line, or None if they can."""
    dtypes = {jnp.dtype(x.dtype) for x in (query, key, value)}
    head_dim, value_dim = query.shape[-1], value.shape[-1]
    if len(dtypes) > 1 or dtypes.pop() not in (jnp.bfloat16, jnp.float16):
        return (
            "the kernels take query, key and value all bfloat16 or all float16, not "
            f"{query.dtype}, {key.dtype}, {value.dtype}; cast them, or use "
            "implementation='emulated' or 'xla'"
        )
    target = architecture.chosen()
    known = tuning.HEAD_DIMS[target]
    if not {head_dim, value_dim} <= set(known):
        small = max(head_dim, value_dim) <= max(known)
        pad = "pad with zeros up to one of them (and give scale), or " if small else ""
        return (
            f"the kernels for {target.capitalize()} take head dims {known}, not "
            f"{head_dim} for query and key and {value_dim} for value; {pad}use "
            "implementation='emulated' or 'xla', which take any"
        )
    if query.shape[0] == 0:
        return "the kernels take no empty batch"
    out_dtype = jnp.dtype(query.dtype if out_dtype is None else out_dtype)
    if out_dtype not in (query.dtype, jnp.float32):
        return (
            f"the kernels return {query.dtype} or float32, not {out_dtype}; "
            "cast the result"
        )
    if recipe is None:
        return None
    inputs = local.INPUTS[jnp.dtype(query.dtype)]
    kind = {"soft_cap": soft_cap, "has_bias": bias is not None, "inputs": inputs}
    shapes = query.shape, value.shape
    return options.reason_against(
        recipe,
        declared_recipe(
            *(query.dtype, head_dim, key.shape[1], mask, target, value_dim),
            differentiated=False,
        ),
        target,
        fused_taken=backward_of(*shapes, target, mask, wanted="fused", **kind)
        == "fused",
        wanted=backward,
    )


def backward_of(
    query_shape: tuple[int, ...],
    value_shape: tuple[int, ...],
    target: Architecture,
    mask: Mask = Mask(),
    *,
    soft_cap: float | None = None,
    has_bias: bool = False,
    inputs: NumberFormat = BF16,
    wanted: Backward | None = None,
) -> Backward:
    """How the gradients of one device's arrays are made, [B, T, N, H] and [B, S, K, D]
    (`design.backward_of`)."""
    counts = query_shape[1], value_shape[1]
    window = design.counted_window(mask, *counts, has_bias=has_bias)
    return design.backward_of(
        *(query_shape, value_shape, target),
        is_causal=mask.is_causal and window is None,
        window=window,
        listed=has_bias or window is None and not visibility.is_static(mask),
        soft_cap=soft_cap,
        inputs=inputs,
        wanted=wanted,
    )


def declared_recipe(
    dtype,
    head_dim: int,
    key_length: int,
    mask: Mask = Mask(),
    target: Architecture | None = None,
    value_dim: int | None = None,
    *,
    query_length: int | None = None,
    soft_cap: float | None = None,
    has_bias: bool = False,
    backward: Backward | None = None,
    pairs: int | None = None,
    group: int = 1,
    recipe: Recipe | None = None,
    differentiated: bool = True,
) -> Recipe:
    """The kernels' recipe for 16-bit inputs of `dtype`, their block sizes included.

    `target` is whose kernels are meant; None: those that would run here. `value_dim` is
    V's head dim; None: that of Q and K. With `query_length` (None: `key_length`),
    `soft_cap`, `has_bias`, `pairs`, a device's batch times its key heads (None: enough
    of them to fill a card), and `group`, the query heads of a key head, it is that of
    the kernels that `backward_of` names for `backward`, with the options of `recipe`
    (as of `attention`; None: the kernels' own, which are "keys" in one pass, "mean" in
    two kernels). `differentiated`: of a call that is, whose P on Hopper has FP16 in the
    forward pass, too. Running `emulator.attention` under it predicts their results up
    to the order of additions inside a product; a test holds the two together.
    """
    inputs = local.INPUTS[jnp.dtype(dtype)]
    target = architecture.chosen() if target is None else target
    dims = head_dim, head_dim if value_dim is None else value_dim
    chosen = options.of_recipe(recipe)
    forward, dq_tiling, _, plan = design.configuration_of(
        *(target, *dims, key_length, mask),
        query_count=query_length,
        has_bias=has_bias,
        short_blocks=chosen.rescale_threshold > 0,
    )
    declared = dataclasses.replace(
        ATTN_JAX.with_inputs(inputs),
        block_q=forward.rows,
        block_kv=forward.columns,
        kv_order=_KV_ORDER[target],
        # Queries that share a centre. The dK, dV kernel may take them in other blocks,
        # which is but another order of additions.
        backward_block_q=dq_tiling.rows,
        backward_block_kv=dq_tiling.columns,
    )
    if pairs is None:
        pairs = architecture.H100_MULTIPROCESSORS
    made = backward_of(
        (pairs, key_length if query_length is None else query_length, group, head_dim),
        (pairs, key_length, 1, dims[1]),
        target,
        mask,
        soft_cap=soft_cap,
        has_bias=has_bias,
        inputs=inputs,
        wanted=chosen.design(backward, target),
    )
    if made == "fused":
        queries = hopper_fused_work.QUERIES[head_dim]
        if isinstance(plan, AmperePlan):
            queries = plan.queries
        declared = dataclasses.replace(
            declared,
            source="the Pallas kernels of this package, backward pass in one kernel",
            backward_block_q=queries,
            backward_block_kv=_KEY_TILES[target],
        )
    return chosen.on(declared, made, target, differentiated=differentiated)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(static: local.Static, query, key, value, bias, rules, sinks):
    more = _Extra.of(rules, sinks, _as_read(static, bias))
    run = _forward_program(static, more.layout, residual=False)
    return run(query, key, value, *more.arrays)


def _attention_fwd(static, *primals):
    # With `symbolic_zeros` each array comes with whether it is differentiated.
    wanted = _Wanted(dbias=primals[3] is not None and primals[3].perturbed)
    *inputs, bias, rules, sinks = jax.tree.map(lambda x: x.value, primals)
    bias = _as_read(static, bias)
    more = _Extra.of(rules, sinks, bias)
    run = _forward_program(static, more.layout, residual=True)
    names = _results(static, residual=True)
    results = dict(zip(names, run(*inputs, *more.arrays), strict=True))
    out = named_out(results.pop("out"))
    lse = named_lse(results.pop("lse"))
    # What else the backward pass has of them is saved where they are.
    rest = {name: named_out(x) for name, x in results.items()}
    return (out, lse), (inputs, bias, rules, sinks, out, lse, rest, wanted)


def _attention_bwd(static, residuals, cotangents):
    inputs, bias, rules, sinks, out, lse, rest, wanted = residuals
    dout, dlse = cotangents
    if isinstance(dout, SymbolicZero):
        dout = jnp.zeros_like(out)
    # Most losses do without LSE.
    if not isinstance(dlse, SymbolicZero):
        rest = rest | {"dlse": dlse}
    more = _Extra.of(rules, sinks, bias)
    run = _backward_program(static, more.layout, tuple(rest), wanted.dbias)
    operands = *inputs, dout, lse, out, *rest.values(), *more.arrays
    dquery, dkey, dvalue, dsinks, *dbias = run(*operands)
    dsinks = None if sinks is None else pairwise_sum(dsinks, 0, keepdims=True)
    return dquery, dkey, dvalue, dbias[0] if dbias else None, None, dsinks


_attention.defvjp(_attention_fwd, _attention_bwd, symbolic_zeros=True)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Wanted:
    """What the backward pass is to make that takes a kernel of its own."""

    dbias: bool


def _as_read(static: local.Static, bias: Array | None) -> Array | None:
    return None if bias is None else bias.astype(static.bias_dtype)


class _Extra(NamedTuple):
    """Operands that not every call has, and their axes by name, for `Layout`."""

    layout: tuple[tuple[str, str], ...]
    arrays: tuple[Array, ...]

    @classmethod
    def of(
        cls, rules: Rules | None, sinks: Array | None, bias: Array | None
    ) -> "_Extra":
        given = {} if rules is None else rules._asdict()
        given |= {"sinks": sinks, "bias": bias}
        given = {n: x for n, x in given.items() if x is not None}
        axes = {"spans": "BX", "query_ids": "BT", "key_ids": "BS", "sinks": "1N"}
        for name in given.keys() & {"dense", "bias"}:
            sizes = zip("BNTS", given[name].shape, strict=True)
            axes[name] = "".join("1" if n == 1 else letter for letter, n in sizes)
        return cls(tuple((name, axes[name]) for name in given), tuple(given.values()))


def _results(static: local.Static, *, residual: bool) -> dict[str, str]:
    """Axes of what `local.forward` returns, by name, for `Layout`."""
    low = residual and static.keeps_low
    return (
        {"out": "BTND"}
        | ({"out_low": "BTND"} if low else {})
        | {"lse": "BNT"}
        | (_NUMBERS if residual and static.keeps_numbers else {})
    )


# Cached, so that calls outside `jax.jit` compile once.
@functools.cache
def _forward_program(static: local.Static, more, residual: bool):
    program = functools.partial(
        local.forward, static=static, more=more, residual=residual
    )
    operands = {"query": "BTNH", "key": "BSKH", "value": "BSKD"} | dict(more)
    results = tuple(_results(static, residual=residual).values())
    return jax.jit(partitioned(program, Layout(operands, results)))


@functools.cache
def _backward_program(
    static: local.Static, more, rest: tuple[str, ...], wants_dbias: bool
):
    """`rest`: which of "dlse" and of the forward pass's results are operands."""
    program = functools.partial(
        local.backward, static=static, more=more, rest=rest, wants_dbias=wants_dbias
    )
    operands = {"query": "BTNH", "key": "BSKH", "value": "BSKD", "dout": "BTND"}
    operands |= {"lse": "BNT", "out": "BTND"}
    axes = _results(static, residual=True) | {"dlse": "BNT"}
    operands |= {name: axes[name] for name in rest}
    results = ("BTNH", "BSKH", "BSKD", "BN")
    results += (dict(more)["bias"],) if wants_dbias else ()
    return jax.jit(partitioned(program, Layout(operands | dict(more), results)))


def _head_dims(query: Array, value: Array) -> tuple[int, int]:
    """H and D, by which tilings are chosen."""
    return query.shape[-1], value.shape[-1]
