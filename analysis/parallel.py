"""Inputs, devices and error measures for experiments on context parallelism."""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from analysis.record import Row
from attn_jax import context_parallel
from attn_jax.audit.error import correctly_rounded
from attn_jax.audit.inputs import FAMILIES, Inputs, Shape, make_inputs
from attn_jax.formats import BF16
from attn_jax.mask import Mask
from attn_jax.reference import Golden, golden

ULYSSES = 2  # devices to which ring+ulysses deals heads
# Beside those of `audit.inputs`.
CANCELLING = "cancelling"
ALTERNATING = "alternating"
_OWN = (ALTERNATING, CANCELLING)
CHOICES = (*FAMILIES, *_OWN)
_DOCUMENTS = 16
_KEY_MEANS = (8.0, -8.0, 6.0, 10.0)


def draw(family: str, seed: int, length: int, head_dim: int, heads: int = 2) -> Inputs:
    """One draw, [1, length, heads, head_dim] each, BF16 numbers.

    Beside the families of `audit.inputs` (whose dO is N(0, 1)):
      alternating  V has a mean of 10 and -10 in turns, sixteen in all: the outputs of
                   parts cancel in that of the whole
      cancelling   the same; four columns of K have means, and dO has one, too: sums of
                   dS over parts do not vanish, those over all keys do

    Raises ValueError for a family that does not exist.
    """
    shape = Shape(1, length, length, heads, heads, head_dim)
    if family not in _OWN:
        return make_inputs(family, seed, shape)
    plain = make_inputs("normal", seed, shape)
    q, k, v, dout = (x.astype(np.float32) for x in plain)
    document = np.arange(length) // max(length // _DOCUMENTS, 1)
    v += 10.0 * (1 - 2 * (document % 2))[:, None, None]
    if family == CANCELLING:
        k[..., : len(_KEY_MEANS)] += np.asarray(_KEY_MEANS, np.float32)
        dout += 0.3
    dtype = plain.query.dtype
    return Inputs(*(correctly_rounded(x, BF16).astype(dtype) for x in (q, k, v, dout)))


def over_devices(
    devices: Sequence[Any],
    strategy: context_parallel.Strategy,
    layout: context_parallel.Layout,
    implementation: Literal["pallas", "emulated"] | None = None,
) -> tuple[Mesh, Callable]:
    """A mesh of all of the devices, and (out, LSE) of causal attention of whole arrays
    (q, k, v), which lie on them, along the sequence, in the layout's order."""
    names: tuple[str, ...] = ("seq",)
    sizes: tuple[int, ...] = (len(devices),)
    if strategy == "ring+ulysses":
        names, sizes = ("seq", "heads"), (len(devices) // ULYSSES, ULYSSES)
    mesh = Mesh(np.asarray(devices).reshape(sizes), names)
    attend = functools.partial(
        context_parallel.attention,
        axis_name=names if len(names) > 1 else names[0],
        strategy=strategy,
        layout=layout,
        is_causal=True,
        implementation=implementation,
    )
    rows, lse = P(None, names), P(None, None, names)
    return mesh, jax.shard_map(
        attend, mesh=mesh, in_specs=(rows,) * 3, out_specs=(rows, lse)
    )


def stacked(
    draws: Sequence[Inputs], key_heads: int | None = None
) -> tuple[Inputs, Golden]:
    """All draws along the batch axis, with so many of their key heads (None: all), and
    their exact results under a causal mask."""
    inputs = Inputs(*(np.concatenate(x) for x in zip(*draws, strict=True)))
    key, value = (x[:, :, :key_heads] for x in (inputs.key, inputs.value))
    inputs = inputs._replace(key=key, value=value)
    return inputs, golden(*inputs, mask=Mask(is_causal=True))


def errors_by_seed(results: Sequence, exact: Golden) -> Iterator[Row]:
    """Columns `seed`, `tensor` and `rms` of each draw of `stacked` ones."""
    for seed in range(len(exact.out)):
        of = exact._replace(
            **{
                name: x[seed : seed + 1]
                for name, x in exact._asdict().items()
                if x is not None
            }
        )
        one = [x[seed : seed + 1] for x in results]
        for tensor, size in rms_errors(one, of).items():
            yield {"seed": seed, "tensor": tensor, "rms": size}


def rms_errors(results: Sequence, exact: Golden) -> dict[str, float]:
    """RMS of the differences of (out, LSE, dQ, dK, dV) from the exact results."""
    fields = {"out": "out", "lse": "lse", "dq": "dquery", "dk": "dkey", "dv": "dvalue"}
    return {
        name: _rms(np.asarray(x).astype(np.float64) - getattr(exact, field))
        for x, (name, field) in zip(results, fields.items(), strict=True)
    }


def _rms(x: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(x))))
