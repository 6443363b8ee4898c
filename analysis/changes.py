"""`--change NAME=VALUE`: fields of `train.config.Config`, read by their own types as
`python -m train` reads them."""

import dataclasses
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from train.config import Config, UsageError

# Beside Python's words, those of JSON, as they stand in configurations on disk.
_TRUTH = {"True": True, "true": True, "False": False, "false": False}
_NOTHING = ("None", "none", "null")
_WORDS = {
    int: "a whole number such as 32",
    float: "a number such as 0.002",
    bool: "True or False",
    str: "text",
    types.NoneType: "None",
}
# Fields that something else decides here, and what.
_ELSEWHERE = {
    "attn": "the reference is the baseline; other attentions are --arms",
    "recipe": "the reference is the baseline; others are --arms emulated:RECIPE",
    "preset": "give --preset",
    "steps": "give --steps",
    "profile": "it is always exact",
    "mesh.data": "the arms mesh-2 and mesh-4 have more devices than one",
    "eval.captions": "give --captions",
}
# What a run folder needs, or one run by itself.
_OF_RUNS = (
    *("shadow", "shadow_every", "init_from", "run_dir", "log_every", "print_config"),
    *("eval.every", "eval.novel", "eval.grid", "checkpoint.every", "checkpoint.keep"),
    *("distributed.enabled", "distributed.coordinator", "distributed.processes"),
    "distributed.process_id",
)


def read(changes: Sequence[str]) -> dict[str, Any]:
    """The values by the dotted names of their fields.

    Raises:
      UsageError: there is no such field, it takes no such value, or paired trainings
        do not take it from here.
    """
    kinds, found = _kinds(Config), {}
    for change in changes:
        name, equals, text = change.partition("=")
        if not equals or name not in kinds:
            raise UsageError(
                f"--change takes NAME=VALUE with a field of python -m train, such as "
                f"lr=0.01, not {change!r}"
            )
        if name in found:
            raise UsageError(f"--change {change}: {name} is given twice, keep one")
        if name in _ELSEWHERE:
            raise UsageError(f"--change {change}: {_ELSEWHERE[name]}")
        if name in _OF_RUNS:
            raise UsageError(f"--change {change}: paired trainings do not read {name}")
        try:
            found[name] = _converted(kinds[name], text)
        except ValueError as error:
            raise UsageError(
                f"--change {change}: {name} takes {_described(kinds[name])}, "
                f"not {text!r}"
            ) from error
    return found


def _kinds(of: type) -> Mapping[str, Any]:
    """Types of all fields by their dotted names."""
    found: dict[str, Any] = {}
    for name, kind in typing.get_type_hints(of).items():
        if dataclasses.is_dataclass(kind):
            inner = _kinds(typing.cast(type, kind))
            found |= {f"{name}.{more}": of for more, of in inner.items()}
        else:
            found[name] = kind
    return found


def _converted(kind: Any, text: str) -> Any:
    """Raises ValueError where the text is no value of the type."""
    if isinstance(kind, types.UnionType):
        (some,) = (one for one in kind.__args__ if one is not types.NoneType)
        return None if text in _NOTHING else _converted(some, text)
    if typing.get_origin(kind) is Literal:
        if text not in typing.get_args(kind):
            raise ValueError(text)
        return text
    if kind is bool:
        if text not in _TRUTH:
            raise ValueError(text)
        return _TRUTH[text]
    return kind(text)


def _described(kind: Any) -> str:
    if isinstance(kind, types.UnionType):
        return " or ".join(map(_described, kind.__args__))
    if typing.get_origin(kind) is Literal:
        return f"one of {', '.join(typing.get_args(kind))}"
    return _WORDS[kind]
