"""The specification of an audit: target, problems, recipes, options."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

from attn_jax.audit.looks import LOOKS
from attn_jax.audit.plan import Group, ragged
from attn_jax.audit.target import Target
from attn_jax.recipe import Recipe


@dataclasses.dataclass(frozen=True)
class Audit:
    """What is to be done: `target` on the `groups` of problems, in the mode that the
    process is in; the first group is compared with all `recipes`, those of
    `algorithms.ordinary` among them. `looks` names some of `LOOKS`; `code` is the
    target's `fingerprint`."""

    target: Target
    groups: tuple[Group, ...]
    dtype: str
    recipes: Mapping[str, Recipe]
    gradients: bool
    looks: tuple[str, ...] = LOOKS
    code: str = ""

    @property
    def beside(self) -> tuple[Group, ...]:
        """What is looked at, and no cell of a report."""
        if "ragged" not in self.looks:
            return ()
        try:
            takes = self.target.takes_scale
        except Exception:  # An object may raise anything, and does so on its problems.
            takes = False
        shards = self.target.adapter.shards
        return tuple(ragged(self.groups, shards, takes_scale=takes))

    @property
    def measured(self) -> tuple[Group, ...]:
        return (*self.groups, *self.beside)

    def settings(self) -> dict[str, Any]:
        return {
            "target": self.target.name,
            "code": self.code,
            "adapter": _adapter(self.target),
            "dtype": self.dtype,
            "groups": [
                [list(dataclasses.astuple(g.shape)), g.mask, list(g.families)]
                for g in self.groups
            ],
            "recipes": list(self.recipes),
            "gradients": self.gradients,
            "looks": list(self.looks),
            "x64": bool(jax.config.read("jax_enable_x64")),
        }


def _adapter(target: Target) -> dict[str, Any]:
    fields = _plain(vars(target.adapter))
    if fields["shards"] == 1:
        # As before there were several: folders of that time are taken up.
        del fields["shards"]
    return fields


def _plain(x: Any) -> Any:
    """As JSON holds it; what has no form there as Python writes it."""
    if isinstance(x, Mapping):
        return {name: _plain(value) for name, value in x.items()}
    return x if x is None or isinstance(x, str | bool | int | float) else repr(x)
