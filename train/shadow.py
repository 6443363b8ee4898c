"""The audit inside training: `--shadow` compares the run's attention in every layer.

Of the attention of `--shadow` nothing enters the training; see `attn_jax.audit.shadow`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from attn_jax import dot_product_attention
from attn_jax.audit.shadow import make_probe, read, shadow
from train.assemble import Assembly
from train.attention import make_attention, shard_attention
from train.config import Config, UsageError
from train.model import AttentionFn

# A function of (query, key, value, probe), the first three [B, L, N, H].
ShadowedFn = Callable[[Array, Array, Array, Array], Array]
# A materialised softmax takes a few arrays of this many logits, no more at once.
_LOGITS_AT_ONCE = 2**26


def make_shadowed(assembly: Assembly) -> ShadowedFn | None:
    """The run's attention with the audit of `--shadow`; None without one.

    Raises:
      UsageError: both are the kernels' recipe in the emulator.
    """
    config, policy = assembly.config, assembly.policy
    if config.shadow == "none":
        return None
    if config.shadow == assembly.attention.implementation:
        raise UsageError(
            f"--shadow={config.shadow}: --attn={config.attn} is the same attention on "
            "this machine: use --shadow=reference"
        )
    attention = make_attention(assembly.attention, policy)
    audited = shadow(attention, _against(config, policy.attention))
    # What a device does not share is summed over devices by the transpose of P().
    return shard_attention(audited, assembly.mesh, policy.attention, P())


def _against(config: Config, kind: Any) -> AttentionFn:
    """The attention of `--shadow`, of float32 arrays that hold numbers of `kind`."""
    implementation = None if config.shadow == "none" else config.shadow

    def attention(query: Array, key: Array, value: Array) -> Array:
        if config.shadow == "emulated":
            query, key, value = (x.astype(kind) for x in (query, key, value))
        # Whatever precision the run has: it would be the measure of itself.
        with jax.default_matmul_precision("highest"):
            out = dot_product_attention(
                query, key, value, implementation=implementation
            )
        assert isinstance(out, jax.Array)
        return out

    return lambda *inputs: _in_parts(attention, *inputs)


def _in_parts(attention: AttentionFn, *inputs: Array) -> Array:
    """Some batch entries after others, each computed again in the backward pass."""
    batch, length, heads, _ = inputs[0].shape
    most = max(_LOGITS_AT_ONCE // (length * length * heads), 1)
    if batch <= most:
        return attention(*inputs)
    part = max(size for size in range(1, most + 1) if batch % size == 0)
    parts = tuple(x.reshape(-1, part, *x.shape[1:]) for x in inputs)
    out = jax.lax.map(jax.checkpoint(lambda some: attention(*some)), parts)
    return out.reshape(batch, *out.shape[2:])


def make_probes(config: Config) -> Float[Array, "layers 4 statistics"]:
    """One for each attention layer of the model."""
    return make_probe(config.model.depth)


def layer_by_layer(
    shadowed: ShadowedFn, probes: Float[Array, "layers 4 statistics"]
) -> AttentionFn:
    """For one pass through a model: its first call has the first probe, and so on."""
    layers = iter(range(len(probes)))

    def attention(query: Array, key: Array, value: Array) -> Array:
        return shadowed(query, key, value, probes[next(layers)])

    return attention


def is_due(config: Config, done: int) -> bool:
    """Whether the step that makes them `done` steps is an audited one."""
    return config.shadow != "none" and done % config.shadow_every == 0


def rows_of(
    config: Config, step: int, statistics: Float[np.ndarray, "layers 4 statistics"]
) -> list[dict[str, Any]]:
    """One row for each layer and tensor; see `Deviation` for the columns."""
    return [
        {"step": step, "layer": layer, "tensor": tensor, "against": config.shadow}
        | dataclasses.asdict(deviation)
        for layer, one in enumerate(statistics)
        for tensor, deviation in read(one).items()
    ]


def summary(config: Config, rows: list[dict[str, Any]]) -> str:
    """A line for the log: the worst layer of each tensor."""
    worst = {}
    for row in rows:
        if row["units"] >= worst.get(row["tensor"], row)["units"]:
            worst[row["tensor"]] = row
    parts = [
        f"{name} {row['units']:.2f} units (layer {row['layer']})"
        for name, row in worst.items()
    ]
    bad = sum(row["non_finite"] for row in rows)
    parts += [f"{bad} not finite"] if bad else []
    return f"step {rows[0]['step']}  against {config.shadow}: {', '.join(parts)}"
