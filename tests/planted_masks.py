"""Masks that are not what was asked for: hooks for `knobs.Knobs.seen`."""

import dataclasses

import jax.numpy as jnp

from attn_jax.mask import Mask


def without(**rules):
    """The mask with other rules."""
    return lambda seen, given: broadcast(dataclasses.replace(given, **rules), seen)


def broadcast(rules: Mask, seen):
    """What rules show, for all heads."""
    mask = rules.materialise(*seen.shape[2:])
    return jnp.broadcast_to(True if mask is None else mask, seen.shape)


def band(left: int | None, right: int | None):
    """Keys i - left ... i + right, whatever the rules say; None leaves a side open."""

    def of(seen, _):
        i, j = (jnp.arange(n) for n in seen.shape[2:])
        distance = j - i[:, None]
        low = -seen.shape[2] if left is None else -left
        high = seen.shape[3] if right is None else right
        return jnp.broadcast_to((low <= distance) & (distance <= high), seen.shape)

    return of


def without_keys(start: int, stop: int | None):
    keys = slice(start, stop)
    return lambda seen, _: seen.at[..., keys].set(False)


def longer(field: str, by: int):
    """The mask with a length more, or less, than the rules say."""

    def of(seen, given):
        changed = {field: getattr(given, field) + by}
        return broadcast(dataclasses.replace(given, **changed), seen)

    return of
