"""`audit_attention`: a callable in, a report out."""

import concurrent.futures
import contextlib
import dataclasses
import datetime
import functools
import importlib
import math
import pickle
import platform
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import index
from pathlib import Path
from typing import Any, SupportsIndex

import jax
import numpy as np
import numpy.typing as npt

from attn_jax import machine
from attn_jax.audit import attribution, verdict
from attn_jax.audit.algorithms import ordinary
from attn_jax.audit.alone import ALONE
from attn_jax.audit.audit import Audit
from attn_jax.audit.bar import say
from attn_jax.audit.course import Result, carry_out
from attn_jax.audit.fingerprint import fingerprint
from attn_jax.audit.inputs import Shape
from attn_jax.audit.measure import Measured
from attn_jax.audit.parts import Parts, Progress, cores
from attn_jax.audit.plan import Group, plan
from attn_jax.audit.problem import FORMATS, GRADIENTS
from attn_jax.audit.raised import callbacks_unlogged, contained, in_one_line
from attn_jax.audit.report import (
    Attribution,
    Cell,
    Invariance,
    Merge,
    Probe,
    Report,
    TensorErrors,
)
from attn_jax.audit.target import (
    Adapter,
    Target,
    TargetError,
    resolve,
)
from attn_jax.audit.workers import Workers, worthwhile
from attn_jax.recipe import Recipe
from attn_jax.recipe_checks import check_is_recipe
from attn_jax.store import Row, Store

# Of a problem, B, T, S, N, K and H.
type Sizes = Shape | Sequence[SupportsIndex]

_PACKAGES = ("jax", "jaxlib", "numpy", "tokamax")


def audit_attention(
    fn: str | Callable[..., Any] | Target,
    *,
    shapes: Sizes | Sequence[Sizes] | None = None,
    dtype: npt.DTypeLike = "bfloat16",
    families: str | Sequence[str] | None = None,
    masks: str | Sequence[str] | None = None,
    gradients: bool = True,
    against: Recipe | Sequence[Recipe] | None = None,
    adapter: Adapter = Adapter(),
    folder: Path | str | None = None,
    fresh: bool = False,
    processes: int | None = 0,
    tell: Callable[[Progress], None] = lambda progress: None,
) -> Report:
    """How far an attention callable is from exact, why, and whether that is a fault.

    It runs `fn` on `shapes` under `masks`, on inputs of `families`, in the mode that
    the process is in (x64 or not), and compares out, LSE, dQ, dK, dV and, of a bias,
    dbias with FP64, in units of the unavoidable rounding (`error.unit`); it looks for
    mistakes of wiring, probes what needs no exact result, and finds the recipe whose
    predicted errors are nearest. `verdict` has the rules. Nothing that `fn` raises
    ends it.

    Args:
      fn: a function with the signature of `jax.nn.dot_product_attention`, or one that
        `adapter` describes; or the name of one, as `target.resolve` takes.
      shapes: (B, T, S, N, K, H) each; the first is the one that is compared with
        recipes, all masks are tried on and all families, and which masks are tried on a
        little less of (`plan.ragged`); None: by the device (`plan.plan`), with equal
        heads of Q and K where `fn` raises for others.
      dtype: of the inputs, a name of `problem.DTYPES`, or the type itself, such as
        `jnp.bfloat16`.
      families, masks: names of `inputs.FAMILIES` and `problem.MASKS`; None: chosen.
        Of these, of `shapes` and of `against` one may stand by itself.
      gradients: whether dQ, dK, dV and dbias are wanted.
      against: recipes to look among; None: those of the library that are for such
        inputs (`attribution.candidates`).
      folder: where what is measured is kept as it comes, and the report is written in
        the end; a second call with the same arguments goes on where the first ended,
        unless the code of `fn` is another by then (`fingerprint`), and says so on
        standard error. None: nothing is written.
      fresh: begin anew in the folder.
      processes: how many the target runs in (`workers`), which takes a function that
        can be pickled and a main module that can be imported; 0: in this one; None:
        0 without a GPU, else as memory and cores allow.
      tell: called before a part is measured, one thread at a time.

    Raises:
      TypeError: what is no function, no adapter, or no shape; a class; an adapter
        beside a Target that has another.
      TargetError: there is no such target, or no such argument to rename, or to, or to
        have LSE by, or for every call, or one for these that the audit gives itself; a
        recipe of `against` is a ring that the first shape cannot be cut for.
      ValueError: a name of a family, mask or dtype that does not exist; no shape,
        family or mask at all; a size below 1, or heads that those of keys do not
        divide; what is no recipe; a function that cannot be pickled, for `processes`.
      attn_jax.audit.workers.NotStartedError: the main module, or the function's, cannot
        be imported, for `processes`.
      attn_jax.canaries.CanaryError: this backend's arithmetic cannot be trusted to
        measure anything.
      attn_jax.store.StoreError: the folder is of another audit, or cannot be written.
    """
    target = _target(fn, adapter)
    target.check_renamed()
    target.check_given()
    dtype = _dtype(dtype)
    recipes = dict(attribution.candidates(FORMATS[dtype], target.adapter.shards))
    if isinstance(against, Recipe | str):
        against = [against]  # A name is refused as one, not by its letters.
    if against is not None:
        plain = {name: recipes[name] for name in ordinary(FORMATS[dtype])}
        for recipe in against:
            check_is_recipe(recipe)
        wanted = [attribution.for_inputs(x, FORMATS[dtype]) for x in against]
        recipes = plain | {recipe.name: recipe for recipe in wanted}
    several = _several("shapes", shapes, Shape)
    if several and all(isinstance(x, int) for x in several):
        several = [several]  # One, as its numbers.
    given = None if several is None else [_shape(x) for x in several]
    families = _several("families", families, str)
    masks = _several("masks", masks, str)
    groups = plan(given, families, masks, packed=target.adapter.packed)
    if given is None and _wants_equal_heads(target, groups[0], dtype):
        groups = plan(None, families, masks, equal_heads=True)
    recipes = _on_first(recipes, groups[0].shape, against or ())
    for group in groups:
        group.problems(dtype)  # Names that do not exist are refused before anything.
    code = fingerprint(target)
    # Before the target can change the working directory.
    written = None if folder is None else Path(folder).absolute()
    audit = Audit(target, tuple(groups), dtype, recipes, gradients, code=code)
    began = datetime.datetime.now(datetime.UTC)
    if processes is None:
        processes = _processes(audit)
    if processes:
        _check_pickles(target)
    apart = Workers(processes) if processes else contextlib.nullcontext()
    with (
        _store(audit, written, fresh) as store,
        apart as workers,
        Parts(store, tell, workers) as parts,
        concurrent.futures.ThreadPoolExecutor(1, "canaries") as beside,
        callbacks_unlogged(),
    ):
        tell(Progress("canaries", 0, 1))
        x64 = bool(jax.config.read("jax_enable_x64"))
        passed = beside.submit(_passed, x64)
        result = carry_out(audit, parts, passed.result)
        if parts.taken:
            say(
                f"{parts.taken} of {parts.done} parts taken from {folder}, measured "
                "earlier; fresh=True (--fresh) measures anew"
            )
    report = _report(audit, result, passed.result(), began)
    if written is not None:
        report.write(written)
    return report


def _wants_equal_heads(target: Target, group: Group, dtype: str) -> bool:
    """Whether it raises, while it is traced, for fewer heads of keys than of queries,
    and not for as many. What nobody can trace is not asked."""
    shape = group.shape
    equal = dataclasses.replace(shape, key_heads=shape.heads)

    def is_traced(shape: Shape) -> bool:
        with contextlib.suppress(Exception), contained():
            (problem, *_) = group._replace(shape=shape).problems(dtype)
            query, key, value, _, *bias = problem.arrays
            jax.eval_shape(target.on(problem), query, key, value, *bias)
            return True
        return False

    return shape != equal and not is_traced(shape) and is_traced(equal)


def _on_first(
    recipes: dict[str, Recipe], shape: Shape, wanted: Sequence[Recipe]
) -> dict[str, Recipe]:
    """Those that can be compared on the first shape, the wanted among them."""
    for recipe in wanted:
        if not attribution.runs_on(recipe, shape):
            raise TargetError(
                f"recipe {recipe.name!r} is a ring of {recipe.ring_size}, which does "
                f"not divide the first shape's {shape.query_length} x "
                f"{shape.key_length}: give another shape first"
            )
    return {
        name: recipe
        for name, recipe in recipes.items()
        if attribution.runs_on(recipe, shape)
    }


def _dtype(dtype: npt.DTypeLike) -> str:
    """Its name in `FORMATS`. Raises ValueError if it has none there."""
    try:
        name = str(np.dtype(dtype))
    except TypeError:
        name = ""
    if name not in FORMATS:
        raise ValueError(f"no dtype {dtype!r}; there are {', '.join(FORMATS)}")
    return name


def _several(name: str, given: Any, one: type) -> list[Any] | None:
    """What is given, of which one may stand by itself. Raises TypeError for what is
    neither, ValueError if there is none: it would be taken for None."""
    if given is None:
        return None
    try:
        found = [given] if isinstance(given, one) else list(given)
    except TypeError:
        raise TypeError(
            f"{name} is a sequence, or None for those of the audit, not {given!r}"
        ) from None
    if not found:
        raise ValueError(
            f"{name} is empty: give one at least, or None for those of the audit"
        )
    return found


def _shape(numbers: Sizes) -> Shape:
    """Raises TypeError for what is no shape, ValueError for sizes of none."""
    try:
        if isinstance(numbers, Shape):
            numbers = dataclasses.astuple(numbers)
        return Shape(*map(index, numbers))
    except TypeError:
        raise TypeError(
            "a shape is six integers (B, T, S, N, K, H) such as "
            f"(2, 256, 256, 4, 2, 64), not {numbers!r}"
        ) from None


def _processes(audit: Audit) -> int:
    first = audit.groups[0]
    parts = (*audit.groups, *[first] * len(audit.looks))
    number = worthwhile(cores(), [part.logits_bytes for part in parts])
    # Several would each hold all devices, and wait for one another there.
    return min(number, 1) if audit.target.adapter.shards > 1 else number


def _check_pickles(target: Target) -> None:
    try:
        pickle.dumps(target)
    except Exception as error:  # There is no end to what they raise.
        raise ValueError(
            f"{target.name} cannot be sent to other processes ({in_one_line(error)}): "
            "give its name, or processes=0"
        ) from error


def _passed(x64: bool) -> tuple[str, ...]:
    """The canaries, all passed, in a thread of their own: they take as long to compile
    as the target."""
    # Imported on use: it takes its units of error from this package.
    from attn_jax import canaries

    with jax.enable_x64(x64), ALONE:
        return canaries.certify().passed


def _target(fn: str | Callable[..., Any] | Target, adapter: Adapter) -> Target:
    """Raises TypeError for what is none, or for another adapter than such."""
    if not isinstance(adapter, Adapter):
        raise TypeError(
            f"adapter is an Adapter, such as Adapter(layout='BNTH'), not {adapter!r}"
        )
    if isinstance(fn, str):
        return resolve(fn, adapter)
    function = fn.function if isinstance(fn, Target) else fn
    if isinstance(function, type):
        raise TypeError(
            f"{function.__qualname__} is a class: give a function, or an instance of it"
        )
    if not callable(function):
        raise TypeError(
            "fn is a function, the name of one or a Target, not "
            f"{type(function).__name__!r}"
        )
    if isinstance(fn, Target):
        if adapter not in (Adapter(), fn.adapter):
            raise TypeError("fn is a Target, whose adapter counts: give it there")
        return fn
    name = getattr(fn, "__qualname__", None) or repr(fn)
    return Target(name, fn, adapter)


class _Store(Store):
    """Of a function's argument `folder`, or of a command."""

    elsewhere = "another folder (--out)"
    afresh = "fresh=True (--fresh)"


@contextlib.contextmanager
def _store(audit: Audit, folder: Path | None, fresh: bool) -> Iterator[Store | None]:
    if folder is None:
        yield None
        return
    path = folder / "parts.jsonl"
    with contextlib.closing(
        _Store(path, audit.settings(), fresh=fresh, anew=["code"])
    ) as store:
        if store.dropped:
            say(f"the code changed since {path} was written: all is measured anew")
        store.describe(_environment())
        yield store


@functools.cache
def _environment() -> dict[str, Any]:
    device = jax.devices()[0]
    return {
        "device": device.device_kind,
        "platform": device.platform,
        "driver": machine.driver() if device.platform == "gpu" else None,
        "python": platform.python_version(),
        "versions": {
            # By name: it imports kernels, and this package does not.
            "attn_jax": importlib.import_module("attn_jax").__version__,
            **machine.versions(_PACKAGES),
        },
    }


def _report(audit: Audit, result: Result, canaries: Sequence[str], began) -> Report:
    environment = dict(_environment())
    versions = environment.pop("versions")
    fit = result.fits[0] if result.fits else None
    settings = audit.settings()
    merging = result.looks.get("merging", [])
    return Report(
        target=audit.target.name,
        environment=environment
        | versions
        | {
            "date": began.isoformat(timespec="seconds"),
            "x64": settings["x64"],
            "command": " ".join(sys.orig_argv),
        },
        settings=settings
        | {
            "beside": [str(group) for group in audit.beside],
            "mask_arguments": _mask_arguments(audit, result.cells),
        },
        canaries=list(canaries),
        cells=[_cell(cell, settings["x64"]) for cell in result.cells],
        findings=result.findings,
        attribution=_attribution(result),
        fits=bool(fit and fit.fits),
        probes=_rows(result.looks.get("probes", ()), Probe),
        invariances=_rows(result.looks.get("invariances", ()), Invariance),
        merges=_rows(merging, Merge),
        growth=next((row["growth"] for row in merging if "growth" in row), {}),
        merging=next((row["merging"] for row in merging if "merging" in row), ""),
    )


def _mask_arguments(audit: Audit, cells: Iterable[verdict.Judged]) -> dict[str, str]:
    """But for masks that turned out not to be taken: one that passes on whatever it is
    given seems to have every argument."""
    cells = [cell for cell in cells if cell.outcome.status != "not taken"]
    masks = dict.fromkeys(cell.problem.mask for cell in cells)
    return {mask: by for mask in masks if (by := audit.target.said_by(mask))}


def _rows[T](rows: Iterable[Row], of: type[T]) -> list[T]:
    """Those that hold what a report has of them; others hold findings alone."""
    names = of.__annotations__
    return [
        of(**{n: row[n] for n in names}) for row in rows if names.keys() <= row.keys()
    ]


def _cell(cell: verdict.Judged, x64: bool) -> Cell:
    s, problem = cell.problem.shape, cell.problem
    return Cell(
        family=problem.family,
        mask=problem.mask,
        dtype=problem.dtype,
        batch=s.batch,
        query_length=s.query_length,
        key_length=s.key_length,
        heads=s.heads,
        key_heads=s.key_heads,
        head_dim=s.head_dim,
        status=cell.outcome.status,
        reason=cell.outcome.reason or cell.outcome.no_gradients,
        x64=x64,
        errors={
            tensor: TensorErrors(**_said(m), two_times_rule=cell.twice.get(tensor))
            for tensor, m in cell.found.items()
        },
        seconds=cell.outcome.seconds,
    )


def _said(measured: Measured) -> dict[str, Any]:
    """Its errors; NaN where no value is finite, which leaves none to measure."""
    errors = measured.errors
    fields = dataclasses.asdict(errors)
    if measured.not_finite and not errors.units:
        fields = dict.fromkeys(fields, math.nan) | {"degenerate": errors.degenerate}
    return fields


def _attribution(result: Result) -> list[Attribution]:
    """Rows of the nearest recipe: of each result what its steps cost on the problem,
    among those that are priced, where it is furthest from exact. None of a result that
    is wired wrongly somewhere, nor of any if out is, nor where the recipe is as far off
    as an honest one never is: its steps explain no such error. None of a step that does
    not touch a result."""
    if not result.costs:
        return []
    fit = result.fits[0]
    found = {cell.problem: cell.found for cell in result.cells}
    problems = {str(problem) for problem in found}
    wired = {
        tensor
        for finding in result.findings
        if finding.kind == "wrong wiring" and problems & set(finding.where)
        for tensor in finding.tensors
    }
    if "out" in wired:
        return []
    rows = []
    for tensor in ("out", *GRADIENTS, "dbias"):
        priced = [
            (found[problem][tensor].errors.units, costs, problem.format)
            for problem, costs in result.costs
            if tensor in found.get(problem, ())
        ]
        if tensor in wired or not priced:
            continue
        units, costs, fmt = max(priced, key=lambda x: x[0])
        most = verdict.allowance(fmt)
        rows += [
            Attribution(
                tensor=tensor,
                recipe=fit.candidate,
                residual=fit.distance,
                measured=units,
                predicted=cost.units,
                step=cost.step,
                share=cost.share,
            )
            for cost in costs
            if cost.tensor == tensor and cost.acts
            # What it predicts is neither more nor less than was measured.
            if units <= most * cost.units and cost.units <= most * units
        ]
    return rows
