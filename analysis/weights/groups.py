"""Which group and layer a parameter belongs to, by its name."""

import re
from collections.abc import Callable

from train.config import UsageError

# Ours (train/model.py). What makes the modulation from the time is of `mod`.
_OURS = {
    "query": "q",
    "query_scale": "q",
    "key": "k",
    "key_scale": "k",
    "value": "v",
    "out": "o",
    "up": "up",
    "down": "down",
    "modulation": "mod",
    "final_modulation": "mod",
    "time_in": "mod",
    "time_out": "mod",
    "embedding": "embed",
    "patch_in": "in",
    "patch_out": "out",
}
_OUR_NAME = re.compile(r"(?:blocks\.(\d+)\.)?(\w+)(?:\.(?:kernel|bias))?")

# A parameter's group, and its layer if it has one.
Grouping = Callable[[str], tuple[str, int | None]]


def built_in(name: str) -> tuple[str, int | None]:
    """Group and layer of a parameter.

    Of our model: q, k, v, o, up, down, mod, embed, in or out. Of others the layer is
    the first number among the parts of the name, and the group all parts after it but
    the last (before the last, where there is no number): `layers.3.attn.wq.weight` is
    of group attn.wq in layer 3.
    """
    ours = _OUR_NAME.fullmatch(name)
    if ours and ours[2] in _OURS:
        return _OURS[ours[2]], None if ours[1] is None else int(ours[1])
    parts = re.split(r"[./]", name)
    place = next((i for i, part in enumerate(parts) if part.isdecimal()), None)
    after = parts if place is None else parts[place + 1 :]
    group = ".".join(part for part in after[:-1] if not part.isdecimal())
    layer = None if place is None else int(parts[place])
    return group or (after[-1] if after else name), layer


def by_expression(text: str) -> Grouping:
    """Groups by a regular expression that is searched for in a name.

    The group is what its first group matched, or all that it did; `other` where it is
    not found. A group named `layer` gives the layer, else it is as in `built_in`.

    Raises:
      UsageError: it is no regular expression, or its `layer` matched no number.
    """
    try:
        expression = re.compile(text)
    except re.error as error:
        raise UsageError(
            f"--groups {text!r} is no regular expression ({error}): give one such as "
            "'(attn|mlp)'"
        ) from error
    layered = expression.groupindex.get("layer")
    first = next((i for i in range(1, expression.groups + 1) if i != layered), 0)

    def group(name: str) -> tuple[str, int | None]:
        found = expression.search(name)
        layer = built_in(name)[1]
        if found is None:
            return "other", layer
        if layered is not None and found["layer"] is not None:
            if not found["layer"].isdecimal():
                raise UsageError(
                    f"--groups {text!r}: its layer matched {found['layer']!r} of "
                    f"{name}: have it match a number, (?P<layer>\\d+)"
                )
            layer = int(found["layer"])
        return found[first] or "other", layer

    return group
