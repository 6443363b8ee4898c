"""Gathers each device's means and maxima of K and V, for the backward pass.

They go in one small message, and every device makes the same of them.
"""

import itertools
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from attn_jax.centre import centre_from, counts_largest
from attn_jax.context_parallel.messages import moved
from attn_jax.formats import NumberFormat
from attn_jax.pairwise import pairwise_mean

# What each device has [...], of all devices [W, ...], in their order.
Gather = Callable[[Array], Array]


def gather_over(axis: str) -> Gather:
    """Over the devices of a mesh axis, by messages from device to device: twice as many
    are known after each (Bruck et al. 1997). Copy engines send those
    (`compiler_options`), while a kernel that gathers takes a multiprocessor from one of
    attention, which counts on all, and waits there for other devices."""

    def gather(x: Array) -> Array:
        devices = lax.axis_size(axis)
        found = x[None]  # This device's, that of the one before, and so on.
        while (known := len(found)) < devices:
            more = found[: devices - known]
            found = jnp.concatenate([found, moved(more, axis, known)])
        return found[(lax.axis_index(axis) - jnp.arange(devices)) % devices]

    return gather


def gather_here(x: Array) -> Array:
    """One device has it all."""
    return x[None]


class AllKeys(NamedTuple):
    """What the backward pass knows of the keys and values of all devices, be they
    hidden or not.

    Attributes:
      centre: c of dq_centre 'keys', or None.
      key_largest, value_largest: the largest |K| and |V| of each column, for the powers
        of two of K' and dS; or None where these have none.
    """

    centre: Float[Array, "B K H"] | None = None
    key_largest: Float[Array, "B K H"] | None = None
    value_largest: Float[Array, "B K D"] | None = None


def of_all(
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K D"],
    inputs: NumberFormat,
    gather: Gather,
    *,
    centred: bool,
    scaled: bool,
    finite: bool = False,
) -> AllKeys:
    """Of all keys on whatever device, in one message, from those in format `inputs`
    that are here: c if `centred`, largest numbers if `scaled`; `finite`: what is not
    has no say there."""
    widths, columns = [], []

    def add(x: Array) -> None:
        widths.append(x.shape[-1])
        columns.append(x.astype(key.dtype))

    def largest(x: Array) -> Array:
        x = jnp.abs(x)
        return (jnp.where(jnp.isfinite(x), x, 0.0) if finite else x).max(axis=1)

    if centred:
        wide = key.astype(jnp.float32)
        add(pairwise_mean(wide, 1))
        add(pairwise_mean(jnp.square(wide), 1))
        if counts_largest(inputs):  # Which alone might not hold K - c.
            add(jnp.abs(key).max(axis=1))
    if scaled:
        add(largest(key))
        add(largest(value))
    if not columns:
        return AllKeys()
    ends = list(itertools.accumulate(widths))[:-1]
    found = jnp.split(gather(jnp.concatenate(columns, axis=-1)), ends, axis=-1)
    centre, most = None, (None, None)
    if centred:
        mean, square = (pairwise_mean(x.astype(jnp.float32), 0) for x in found[:2])
        most_key = jnp.zeros_like(mean)
        if counts_largest(inputs):
            most_key = found[2].max(axis=0)
        centre = centre_from(mean, square, most_key, inputs)
    if scaled:
        most = tuple(x.max(axis=0) for x in found[-2:])
    return AllKeys(centre, *most)
