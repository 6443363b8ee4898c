"""A known wiring mistake, computed in FP64 to compare a target with.

A target whose results lie at those of a variant has that mistake. A variant that a
problem cannot show (no causal mask, a single head) yields none.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import numpy as np

from attn_jax.audit.exact import Exact, exact
from attn_jax.audit.problem import GRADIENTS, TENSORS, Problem

Thunk = Callable[[], np.ndarray]


class Wrong(NamedTuple):
    """One form of a wrong variant: its results, made when asked for.

    detail: what tells it from other forms, "" if nothing need.
    attention: all of it where the mistake is in what is attended to, so that further
    mistakes can be looked for on top of it.
    twofold: it has another mistake besides.
    """

    detail: str
    results: Mapping[str, Thunk]
    attention: Exact | None = None
    twofold: bool = False


class Setting(NamedTuple):
    """The problem, and the attention that mistakes are added to."""

    problem: Problem
    attention: Exact


@dataclasses.dataclass(frozen=True)
class Variant:
    """A mistake. `does` says what is computed, `do` what to change.

    `on_top`: it can be added to attention that has a mistake of another kind.
    """

    does: str
    do: str
    make: Callable[[Setting], Iterator[Wrong]]
    on_top: bool


def setting(problem: Problem) -> Setting:
    return Setting(problem, exact(problem))


def in_the_backward_pass(right: Exact, wrong: Wrong) -> Iterator[Wrong]:
    """Gradients of a forward pass that is right through a backward pass that is not:
    with LSE and delta kept from the forward pass, and with both computed anew."""
    x = wrong.attention
    if x is None or x.logits.shape != right.logits.shape:
        return
    lse = np.where(right.sees_none, np.inf, right.lse)[..., None]
    with np.errstate(over="ignore"):
        p = np.exp(x.logits - lse)
    if not np.isfinite(p).all():
        p = np.zeros_like(p)
    kept = functools.cache(lambda: p * (x.dprobability - right.delta[..., None]))
    yield Wrong(
        wrong.detail,
        {
            "dvalue": lambda: x.to_value_heads(x.value_gradient(p)),
            "dquery": lambda: x.query_gradient(kept()),
            "dkey": lambda: x.to_key_heads(x.key_gradient(kept())),
            "dbias": lambda: x.bias_gradient(kept()),
        },
    )
    names = [name for name in (*GRADIENTS, "dbias") if name in wrong.results]
    yield Wrong(wrong.detail, {name: wrong.results[name] for name in names})


class Registry(dict[str, Variant]):
    """Variants by name, in the order in which they were added."""

    def add(self, name: str, does: str, do: str, *, on_top: bool = False):
        """Decorates what makes the variant."""

        def register(make):
            self[name] = Variant(does, do, make, on_top)
            return make

        return register


def whole(attention: Exact, detail: str = "") -> Wrong:
    results = {name: functools.partial(getattr, attention, name) for name in TENSORS}
    return Wrong(detail, results, attention)
