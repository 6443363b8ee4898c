"""`dot_product_attention`: one signature, five implementations, no silent fallback."""

import functools
import numbers
import re
import typing
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from attn_jax import emulator, external, reference
from attn_jax.formats import FP16
from attn_jax.mask import Mask
from attn_jax.on_device import lacks_kernels
from attn_jax.recipe import ATTN_JAX, Recipe
from attn_jax.recipe_checks import check_is_recipe
from attn_jax.residuals import named_lse, named_out

Implementation = Literal["pallas", "emulated", "reference", "xla", "cudnn"]
IMPLEMENTATIONS: tuple[Implementation, ...] = typing.get_args(Implementation)
# What `Mask` calls some of the arguments.
_FIELDS = {
    "mask.dense": "mask",
    "mask.query_lengths": "query_seq_lengths",
    "mask.key_value_lengths": "key_value_seq_lengths",
    "mask.query_segment_ids": "query_segment_ids",
    "mask.key_value_segment_ids": "key_value_segment_ids",
    "mask.query_offset": "query_offset",
    "window": "local_window_size",
}


def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: int | tuple[int | None, int | None] | None = None,
    implementation: Implementation | None = None,
    return_residual: bool = False,
    query_segment_ids: ArrayLike | None = None,
    key_value_segment_ids: ArrayLike | None = None,
    query_offset: ArrayLike | None = None,
    soft_cap: float | None = None,
    sinks: ArrayLike | None = None,
    deterministic: bool | None = None,
    out_dtype=None,
    recipe: Recipe | None = None,
    rounding_key: Array | None = None,
) -> Float[Array, "*B T N D"] | tuple[Float[Array, "*B T N D"], Float[Array, "*B T N"]]:
    """Scaled dot-product attention: out = softmax(scale * Q K^T + bias) V.

    The arguments up to `return_residual` are those of `jax.nn.dot_product_attention`,
    in its order, with its broadcasting and its shapes: B batch (may be left out),
    T queries, S keys, N query heads, K key/value heads, H head dim of query and key,
    D that of value (jax.nn wants D = H). Differentiable; works under jit, vmap, grad,
    remat and shard_map, with `jax_enable_x64` on or off.

    Args:
      query, key, value: [B] T N H, [B] S K H, [B] S K D; N is a multiple of K.
      bias, mask: added to the logits / bool, True takes part; 4D, broadcast to B N T S.
        A bias comes before the soft cap; without one -inf in it hides a key. What it is
        one entry for all of stays one, and its gradient is summed over it.
      scale: of the logits; 1 / sqrt(H) if None.
      is_causal: query i sees the keys j <= i, both counted from the first.
      query_seq_lengths, key_value_seq_lengths: [B] int; what lies beyond is masked.
      local_window_size: (left, right) or one number for both: query i sees the keys
        i - left <= j <= i + right; None leaves a side open.
      implementation: `pallas` (our kernels: A100 and Hopper GPUs, BF16 and FP16, H and
        D of 32, 64, 96, 128, 192 and 256), `emulated` (a recipe's roundings in plain
        JAX, any device), `reference` (exact: float64 under x64, else float32), `xla`
        and `cudnn` (jax.nn's). A named one runs or raises. None picks `pallas` where it
        can run, else `xla`, else `reference`.
      return_residual: also return LSE = log(sum(exp(logits))), [B] T N, natural log,
        float32 (float64 if computed so), differentiable.
      query_segment_ids, key_value_segment_ids: [B] T and [B] S int; a pair takes part
        if its ids are equal.
      query_offset: [B] int, or one for all: `is_causal` and `local_window_size` take
        query i for number i + query_offset. S - T puts the last query at the last key.
      soft_cap: logits become soft_cap * tanh(logits / soft_cap).
      sinks: [N], one more logit a head that takes weight and carries no value.
      deterministic: True raises unless two runs give the same bits; all but `cudnn` do.
      out_dtype: of the output; the query's if None. `pallas` and `emulated` give the
        unrounded accumulator as float32.
      recipe: which roundings `emulated` follows; None: those of `pallas` for the same
        arguments, on the GPU at hand or else on Hopper
        (`kernels.attention.declared_recipe`), and `recipe.ATTN_JAX` where `pallas` has
        no kernels for them. Of `pallas`, which of its options are wanted (None: its
        own): `dq_centre`, `dq_dlogits`, `dq_sum`, `delta_source`, `rescale_threshold`,
        `repeated_max_factor` and `probability` with `probability_scale`;
        `rescale_threshold` takes P in the inputs' format. Blocks, order of keys, name
        and source are ignored there, and any other difference from `declared_recipe` is
        refused.
        A recipe is taken at its word: those of `pallas` itself, but for one thing, are
        `dataclasses.replace(declared_recipe(...), dq_centre="row")`, with all that it
        asks for of the call.
      rounding_key: a key of `jax.random` for a recipe that rounds stochastically, and
        only then.

    Where each implementation rounds is said in its module: `kernels/hopper_forward.py`
    and `kernels/hopper_backward_fused.py`, `_dq` and `_dkv`, for Ampere alike,
    `recipe_schema.py`, `reference.py`, `external.py`.

    Under `jax.checkpoint` the output has the name "attn_jax_out" and LSE the name
    "attn_jax_lse", with what the backward pass reads of them. A policy that saves both,
    `jax.checkpoint(f, policy=jax.checkpoint_policies.save_only_these_names(
    "attn_jax_out", "attn_jax_lse"))`, keeps `pallas`, `emulated` and `reference` from
    running their forward pass again; of `xla` and `cudnn` it saves the output.

    A query that sees no key gives out 0, LSE -inf and no gradient (`cudnn`: whatever
    cuDNN gives).

    Raises:
      ValueError: shapes, types or names that do not fit.
      NotImplementedError: the named implementation cannot do this here.
    """
    query, key, value = (jnp.asarray(x) for x in (query, key, value))
    unbatched = query.ndim == 3
    if query.ndim not in (3, 4):
        raise ValueError(f"query must be [B] T N H, got shape {query.shape}")
    if unbatched:
        query, key, value = (x[None] for x in (query, key, value))

    def batched(x, ndim):
        x = None if x is None else jnp.asarray(x)
        return x if x is None or x.ndim == ndim else x[None]

    if isinstance(is_causal, jax.Array):
        raise ValueError("is_causal must be a Python bool; it is compiled in")
    rules = _in_own_words(
        Mask,
        is_causal=bool(is_causal),
        window=_window(local_window_size),
        dense=batched(mask, 4),
        query_lengths=batched(query_seq_lengths, 1),
        key_value_lengths=batched(key_value_seq_lengths, 1),
        query_segment_ids=batched(query_segment_ids, 2),
        key_value_segment_ids=batched(key_value_segment_ids, 2),
        query_offset=_per_entry(query_offset, query.shape[0]),
    )
    bias = batched(bias, 4)
    sinks = None if sinks is None else jnp.asarray(sinks)
    arrays = query, key, value
    _in_own_words(
        reference.check_arguments, *arrays, bias=bias, mask=rules, sinks=sinks
    )
    if implementation not in (None, *IMPLEMENTATIONS):
        raise ValueError(
            f"implementation must be one of {', '.join(IMPLEMENTATIONS)} or None, "
            f"got {implementation!r}"
        )
    if recipe is not None:
        if implementation not in ("emulated", "pallas"):
            raise ValueError(
                "recipe= is for implementation='emulated' or 'pallas', not "
                f"{implementation!r}"
            )
        check_is_recipe(recipe)
    if rounding_key is not None and implementation != "emulated":
        raise ValueError(
            f"rounding_key= is for implementation='emulated', not {implementation!r}"
        )
    scale = reference.default_scale(scale, query.shape[-1])
    out_dtype = reference.output_dtype(query.dtype if out_dtype is None else out_dtype)

    def refusal(name: Implementation) -> str | None:
        if name == "pallas":
            return _pallas_refusal(
                query, key, value, bias, rules, soft_cap, out_dtype, recipe
            )
        if name in ("xla", "cudnn"):
            return external.unsupported(
                name,
                dtype=query.dtype,
                out_dtype=out_dtype,
                soft_cap=soft_cap,
                sinks=sinks,
                return_residual=return_residual,
                deterministic=deterministic,
            )
        return None

    if implementation is None:
        choices: tuple[Implementation, ...] = ("pallas", "xla", "reference")
        implementation = next(name for name in choices if refusal(name) is None)
    elif (reason := refusal(implementation)) is not None:
        raise NotImplementedError(reason)

    lse = None
    if implementation == "pallas":
        from attn_jax.kernels import attention as kernels

        out, lse = kernels.attention(
            query,
            key,
            value,
            scale=scale,
            bias=bias,
            mask=rules,
            sinks=sinks,
            soft_cap=soft_cap,
            out_dtype=out_dtype,
            recipe=recipe,
        )
    elif implementation in ("xla", "cudnn"):
        out = external.attention(
            query,
            key,
            value,
            bias=bias,
            mask=rules,
            scale=scale,
            backend=implementation,
        )
    else:
        if implementation == "reference":
            run = reference.attention
        else:
            plain = recipe
            if recipe is None:
                plain, recipe = _kernels_recipes(
                    query, key, value, bias, rules, soft_cap
                )
            run = functools.partial(
                emulator.attention,
                recipe=recipe,
                undifferentiated=plain,
                rounding_key=rounding_key,
            )
        out, lse = run(
            query,
            key,
            value,
            bias=bias,
            mask=rules,
            scale=scale,
            soft_cap=soft_cap,
            sinks=sinks,
            out_dtype=out_dtype,
        )
    if implementation not in ("pallas", "emulated"):  # These name them themselves.
        out = named_out(out)
        lse = None if lse is None else named_lse(lse)
    out = out[0] if unbatched else out
    if not return_residual:
        return out
    assert lse is not None  # Implementations without an LSE have refused above.
    lse = lse.swapaxes(1, 2)
    return out, lse[0] if unbatched else lse


def _in_own_words(make: Callable, *args, **kwargs):
    """make(...), whose ValueError names `dot_product_attention`'s arguments."""
    try:
        return make(*args, **kwargs)
    except ValueError as error:
        names = "|".join(map(re.escape, sorted(_FIELDS, key=len, reverse=True)))
        text = re.sub(rf"^({names})\b", lambda name: _FIELDS[name[0]], str(error))
        raise ValueError(text) from None


def _per_entry(x: ArrayLike | None, batch: int) -> Array | None:
    """One number for each batch entry, from those or from one for all."""
    if x is None:
        return None
    x = jnp.asarray(x)
    return jnp.broadcast_to(x, (batch,)) if x.ndim == 0 else x


def _window(size) -> tuple[int | None, int | None] | None:
    if isinstance(size, numbers.Integral):
        return int(size), int(size)
    return tuple(size) if isinstance(size, list) else size


def _kernels_recipes(
    query, key, value, bias, mask: Mask, soft_cap
) -> tuple[Recipe, Recipe]:
    """Those of `pallas`, as far as it has kernels for the arguments, for a call that is
    not differentiated and one that is."""
    try:  # Imported on use, as in `lacks_kernels`.
        from attn_jax.kernels import attention as kernels
    except ImportError:
        reason = "kernels do not know this JAX"
    else:
        reason = kernels.unsupported(
            query, key, value, bias=bias, mask=mask, soft_cap=soft_cap
        )
    if reason is not None:
        half = query.dtype == jnp.float16
        recipe = ATTN_JAX.with_inputs(FP16) if half else ATTN_JAX
        return recipe, recipe
    plain, differentiated = (
        kernels.declared_recipe(
            *(query.dtype, query.shape[-1], key.shape[1], mask),
            value_dim=value.shape[-1],
            query_length=query.shape[1],
            soft_cap=soft_cap,
            has_bias=bias is not None,
            pairs=key.shape[0] * key.shape[2],
            group=max(1, query.shape[2] // max(1, key.shape[2])),
            differentiated=x,
        )
        for x in (False, True)
    )
    return plain, differentiated


def _pallas_refusal(
    query, key, value, bias, mask: Mask, soft_cap, out_dtype, recipe
) -> str | None:
    reason = lacks_kernels(
        "an A100 or a Hopper GPU (compute capability 8.0 or 9.0)",
        "implementation='emulated' for its algorithm, or 'xla'",
    )
    if reason is not None:
        return reason
    from attn_jax.kernels import attention as kernels  # Imported on use: it takes long.

    return kernels.unsupported(
        query,
        key,
        value,
        bias=bias,
        mask=mask,
        soft_cap=soft_cap,
        out_dtype=out_dtype,
        recipe=recipe,
    )
