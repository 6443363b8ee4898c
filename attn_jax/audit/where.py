"""Names what failing problems alone share: a mask, a length, a way to call."""

from collections.abc import Callable, Collection, Sequence

from attn_jax.audit.problem import Problem

# What a function may have other code for.
_CALLS: dict[str, Callable[[Problem], bool]] = {
    "with another scale than 1 / sqrt(H)": lambda x: x.scale_factor != 1,
    "with one query": lambda x: x.shape.query_length == 1,
    "with one key head": lambda x: x.shape.key_heads == 1 < x.shape.heads,
    "with as many key heads as query heads": lambda x: (
        x.shape.key_heads == x.shape.heads
    ),
}


def shared_alone(
    bad: Collection[Problem], here: Sequence[Problem], compared: str
) -> str:
    """What all `bad` ones of those `here` have and no other has; else their masks, if
    `compared`, that under which recipes were compared, is not among them."""
    for what, has in _CALLS.items():
        those = [problem for problem in here if has(problem)]
        if those == [x for x in here if x in bad] and len(those) < len(here):
            return f"{what}{_or_length(those, here)} alone"
    masks = dict.fromkeys(problem.mask for problem in bad)
    if compared not in masks and compared in {x.mask for x in here}:
        return f"under {' and '.join(masks)} alone"
    return ""


def _or_length(those: Sequence[Problem], here: Sequence[Problem]) -> str:
    """It may as well be their number of keys, where no other problem has that."""
    lengths = {x.shape.key_length for x in those}
    others = {x.shape.key_length for x in here if x not in those}
    if len(lengths) > 1 or lengths & others:
        return ""
    return f", or {lengths.pop()} keys,"
