"""What an audit found, as plain data; this docstring is the schema of `report.json`.

The file is one object. "unit" is that of `error.unit`: the RMS error of the exact
result rounded once, so 1 is the best a result in its format can do. Names of results
("tensor") are those of `problem.TENSORS`; dbias is measured where the mask is "bias".

    schema_version  int, `SCHEMA_VERSION`
    verdict         str, a kind of `finding.KINDS`; for readers, follows from the rest
    target          str, the callable under test
    environment     object: device, jax, jaxlib, numpy, python, attn_jax (versions),
                    date, x64, command
    settings        object of what a second audit has to have alike to go on with this
                    one: target, code (`fingerprint`), adapter, dtype, groups (of
                    problems: shape, mask, families), recipes, gradients, looks, x64;
                    and mask_arguments, object of str: what each mask that was
                    taken was passed by
    canaries        [str], the canaries that passed before anything was measured
    cells           [object], the problems in the order they were tried:
      family, mask, dtype           str, names of `inputs.FAMILIES`, `problem.MASKS`
                                    and `problem.DTYPES`
      batch, query_length, key_length, heads, key_heads, head_dim
                                    int: B, T, S, N, K, H
      status                        "measured", "not taken" (the target does not have
                                    the arguments, or refuses them), "failed" or "out of
                                    memory"
      reason                        str, why it was not measured, or ""
      x64                           bool, whether jax_enable_x64 was on
      errors                        object of objects by tensor, empty if not measured:
        units                       float, RMS error in units
        degenerate                  bool, the unit is that of the sums of absolute
                                    values, as the exact result vanishes
        relative                    float, RMS error over RMS of the exact result
        maximum, p999               float, largest and 99.9th percentile of the absolute
                                    error over the RMS of the exact result
        signed_mean, signed_mean_ci float, mean error over the same and half the width
                                    of its 95 % interval
        directionality              float, |sum e| / sqrt(sum e^2)
        two_times_rule              float or null, largest error over twice that of a
                                    plain implementation in the same dtype: the usual
                                    test of a kernel asks for at most 1
      seconds                       float, wall time of the cell
    findings        [object], most serious first; see `finding.Finding`:
      kind, cause, says             str
      tensors, where                [str]
      evidence                      object of floats and strings
    attribution     [object], one for each tensor and step of the nearest recipe:
      tensor, recipe                str
      residual                      float, how far the target is from the recipe over
                                    the problems that recipes are compared on, in
                                    octaves: `attribution.distance`
      measured, predicted           float, RMS error in units of the target and of the
                                    emulated recipe, on the problem where it is largest
      step                          str, a step of the recipe, or "" if none is known
      share                         float, the share of the squared error that is gone
                                    when this step alone keeps its carrier's precision
    fits            bool, the recipe explains what was measured
    probes          [object], one for each check of a single operation:
      name, unit                    str
      measured                      float, in `unit`
      bound                         float or null, the most it may be, in `unit`
      passed                        bool
    invariances     [object], one for each change of the call that should change
                    nothing, and tensor:
      name, tensor                  str
      bit_equal                     bool
      largest_difference            float, units of the last place of the larger of two
      measured                      float, RMS difference in units of what rounding
                                    allows two runs (of LSE the largest)
      bound                         float, the most that noise may be, in the same
    merges          [object], one for each number of parts and tensor; keys split into
                    parts, results put together by their LSE:
      parts                         int
      tensor                        str
      units                         float, RMS error in units
      predicted                     float or null, the same of the emulated merge
    growth          object of floats by tensor: g of units ~ parts^g, fitted to merges
    merging         str, what merging shows of the formats of out and LSE, in words

JSON has no number that is not finite: in any place "nan", "inf" and "-inf" stand for
these floats. A string that reads so itself has an apostrophe put in front ("'nan"), and
so has one of these after any number of apostrophes, so that nothing is lost.
"""

import collections.abc
import contextlib
import dataclasses
import functools
import json
import math
import os
import re
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypedDict

import numpy as np

from attn_jax.audit.finding import Finding, Kind, in_order, is_trustworthy

# Raise it whenever a field is added, renamed, dropped or changes its meaning.
SCHEMA_VERSION = 1
Status = Literal["measured", "not taken", "failed", "out of memory"]
_NOT_FINITE = re.compile("'*(nan|inf|-inf)")


class ReportError(ValueError):
    """What no report can hold, or a file that is none, in one line."""


class TensorErrors(TypedDict):
    """The fields of `error.Errors`, and the usual test of a kernel."""

    units: float
    degenerate: bool
    relative: float
    maximum: float
    p999: float
    signed_mean: float
    signed_mean_ci: float
    directionality: float
    two_times_rule: float | None


class Attribution(TypedDict):
    tensor: str
    recipe: str
    residual: float
    measured: float
    predicted: float
    step: str
    share: float


class Probe(TypedDict):
    name: str
    measured: float
    bound: float | None
    unit: str
    passed: bool


class Invariance(TypedDict):
    name: str
    tensor: str
    bit_equal: bool
    largest_difference: float
    measured: float
    bound: float


class Merge(TypedDict):
    parts: int
    tensor: str
    units: float
    predicted: float | None


@dataclasses.dataclass(frozen=True)
class Cell:
    """One problem and what came of it; fields as in the module's schema.

    Raises ReportError for a value of another type.
    """

    family: str
    mask: str
    dtype: str
    batch: int
    query_length: int
    key_length: int
    heads: int
    key_heads: int
    head_dim: int
    status: Status
    reason: str = ""
    x64: bool = False
    errors: dict[str, TensorErrors] = dataclasses.field(default_factory=dict)
    seconds: float = 0.0

    def __post_init__(self):
        _make_plain(self)

    @property
    def sizes(self) -> tuple[int, ...]:
        """(B, T, S, N, K, H)"""
        lengths = self.batch, self.query_length, self.key_length
        return *lengths, self.heads, self.key_heads, self.head_dim


@dataclasses.dataclass(frozen=True)
class Report:
    """All that an audit found; fields as in the module's schema.

    Values are made plain when it is built: NumPy scalars become Python's, sequences
    lists, and findings are put in order, so that equal reports have equal files.

    Raises ReportError for a value of another type, or a row with other fields.
    """

    target: str
    environment: dict[str, Any]
    settings: dict[str, Any]
    canaries: list[str] = dataclasses.field(default_factory=list)
    cells: list[Cell] = dataclasses.field(default_factory=list)
    findings: list[Finding] = dataclasses.field(default_factory=list)
    attribution: list[Attribution] = dataclasses.field(default_factory=list)
    fits: bool = False
    probes: list[Probe] = dataclasses.field(default_factory=list)
    invariances: list[Invariance] = dataclasses.field(default_factory=list)
    merges: list[Merge] = dataclasses.field(default_factory=list)
    growth: dict[str, float] = dataclasses.field(default_factory=dict)
    merging: str = ""

    def __post_init__(self):
        _make_plain(self)
        object.__setattr__(self, "findings", in_order(self.findings))

    @property
    def verdict(self) -> Kind:
        """The most serious finding's kind; "trustworthy" if none asks for anything.

        A report without a measurement of the first shape, which all but a few are of,
        is "not taken", never "trustworthy".
        """
        if not is_trustworthy(self.findings):
            return self.findings[0].kind
        cells = any(
            cell.status == "measured" and cell.sizes == self.cells[0].sizes
            for cell in self.cells
        )
        measured = cells or self.probes or self.invariances or self.merges
        return "trustworthy" if measured else "not taken"

    @property
    def exit_code(self) -> int:
        """0 if trustworthy, else 4."""
        return 0 if self.verdict == "trustworthy" else 4

    def to_json(self) -> str:
        """The report as `report.json` holds it; `from_json` gives an equal one."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        head = {"schema_version": SCHEMA_VERSION, "verdict": self.verdict}
        return json.dumps(_encode(head | fields), indent=1, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "Report":
        """Raises ReportError for another schema, and for what is no report."""
        try:
            document = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ReportError(f"no report: {error}") from error
        if not isinstance(document, dict) or "schema_version" not in document:
            raise ReportError("no report: it has no schema_version")
        version = document.pop("schema_version")
        if version != SCHEMA_VERSION:
            raise ReportError(
                f"a report of schema {version!r}; this attn_jax reads {SCHEMA_VERSION}"
            )
        document.pop("verdict", None)
        return _fit(_decode(document), cls, "report")

    def write(self, folder: Path | str) -> None:
        """Writes `report.json` and `report.html`, making the folder.

        Both are complete, or as they were before. Raises OSError if that fails.
        """
        # Importing it takes the rest of the package, which readers of JSON do not need.
        from attn_jax.audit.html import page

        # UTF-8 whatever the locale; text that it cannot hold was made printable.
        texts = {"report.json": self.to_json(), "report.html": page(self)}
        contents = {name: text.encode() for name, text in texts.items()}
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as stack:
            unfinished = {
                name: folder / f".{name}.{os.getpid()}.unfinished" for name in contents
            }
            for name, content in contents.items():
                stack.callback(unfinished[name].unlink, missing_ok=True)
                unfinished[name].write_bytes(content)
            for name, path in unfinished.items():
                path.replace(folder / name)


def _make_plain(instance: Any) -> None:
    for name, hint in _hints(type(instance)).items():
        value = _fit(getattr(instance, name), hint, name)
        object.__setattr__(instance, name, value)


@functools.cache
def _hints(of: Any) -> dict[str, Any]:
    return typing.get_type_hints(of)


def _fit(value: Any, hint: Any, where: str) -> Any:
    """`value` as plain data of type `hint`.

    Raises:
      ReportError: it is of another type, named by `where`.
    """
    if isinstance(value, np.generic):
        value = value.item()
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return _fit_any(value, where)
    if origin in (types.UnionType, typing.Union):
        for one in arguments:
            with contextlib.suppress(ReportError):
                return _fit(value, one, where)
    elif origin is Literal:
        if value in arguments:
            return value
    elif origin in (list, tuple):
        if isinstance(value, list | tuple):
            return origin(
                _fit(x, arguments[0], f"{where}[{i}]") for i, x in enumerate(value)
            )
    elif origin in (dict, collections.abc.Mapping):
        if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
            return {k: _fit(x, arguments[1], f"{where}.{k}") for k, x in value.items()}
    elif dataclasses.is_dataclass(hint) or typing.is_typeddict(hint):
        return _fit_fields(value, hint, where)
    elif hint is float:
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
    elif hint is types.NoneType:
        if value is None:
            return None
    elif isinstance(value, hint) and isinstance(value, bool) == (hint is bool):
        return value
    name = hint.__name__ if isinstance(hint, type) else hint
    raise ReportError(f"{where} is {type(value).__name__}, not {name}")


def _fit_any(value: Any, where: str) -> Any:
    if isinstance(value, Mapping):
        return _fit(value, dict[str, Any], where)
    if isinstance(value, list | tuple):
        return _fit(value, list[Any], where)
    if value is None or isinstance(value, str | bool | int | float):
        return value
    raise ReportError(f"{where} is {type(value).__name__}, which is not plain data")


def _fit_fields(value: Any, hint: Any, where: str) -> Any:
    hints = _hints(hint)
    if type(value) is hint:
        value = {name: getattr(value, name) for name in hints}
    if not isinstance(value, Mapping):
        raise ReportError(f"{where} is {type(value).__name__}, not {hint.__name__}")
    if differing := sorted(map(str, value.keys() ^ hints.keys())):
        which = ", ".join(
            f"{'has' if name in value else 'lacks'} {name}" for name in differing
        )
        raise ReportError(f"{where} is no {hint.__name__}: it {which}")
    return hint(**{k: _fit(value[k], hints[k], f"{where}.{k}") for k in hints})


def _encode(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    if isinstance(value, str):
        return f"'{value}" if _NOT_FINITE.fullmatch(value) else value
    if isinstance(value, Mapping):
        return {name: _encode(x) for name, x in value.items()}
    if isinstance(value, list | tuple):
        return [_encode(x) for x in value]
    if dataclasses.is_dataclass(value):
        return {
            field.name: _encode(getattr(value, field.name))
            for field in dataclasses.fields(value)
        }
    return value


def _decode(value: Any) -> Any:
    if isinstance(value, str) and _NOT_FINITE.fullmatch(value):
        return value[1:] if value.startswith("'") else float(value)
    if isinstance(value, dict):
        return {name: _decode(x) for name, x in value.items()}
    if isinstance(value, list):
        return [_decode(x) for x in value]
    return value
