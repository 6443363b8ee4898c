"""Wraps the audited function so that it is called with one signature.

A function has, unless an `Adapter` says otherwise, the signature of
`jax.nn.dot_product_attention`. Arguments that it does not have are not passed; where a
mask can be said in several ways, by its own argument or as a boolean array, the first
that the function has is taken.
"""

import contextlib
import dataclasses
import functools
import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args, get_origin

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from attn_jax.audit.inputs import Shape
from attn_jax.audit.interrupt import is_ours
from attn_jax.audit.problem import MASKS, Problem
from attn_jax.audit.raised import NotTakenError, WrongResultError, in_one_line
from attn_jax.audit.returned import checked, checked_lse, described
from attn_jax.mask import Mask
from attn_jax.recipe import RECIPES, Recipe

# What a function may be given by name: arguments of jax.nn's, and our segment ids.
RENAMEABLE = (
    *("bias", "mask", "scale", "is_causal", "local_window_size"),
    *("query_seq_lengths", "key_value_seq_lengths"),
    *("query_segment_ids", "key_value_segment_ids"),
)
# (query, key, value), and a bias if there is one -> out [B, T, N, D] and LSE [B, N, T],
# None where there is none.
Attend = Callable[..., tuple[Array, Array | None]]


class TargetError(ValueError):
    """The target cannot be audited at all, in one line that says what would work."""


@dataclasses.dataclass(frozen=True)
class Adapter:
    """How a function is called that differs from `jax.nn.dot_product_attention`.

    Attributes:
      layout: of query, key, value and out: "BTNH", or "BNTH", heads before positions.
      packed: the function takes one array [B, T, 3, N, H] ([B, 3, N, T, H] for "BNTH")
        for query, key and value.
      scale: "keyword" argument; "positional", the first after value; "none", it scales
        by 1 / sqrt(H) by itself; "outside", it does not scale, the query is scaled.
      lse: the name of the argument that is True to have LSE returned beside out;
        "always" if it always is; None if it never is.
      lse_layout: "BTN" or "BNT".
      lse_base: "e" or "2".
      renamed: the function's names of some of `RENAMEABLE`, such as
        {"is_causal": "causal"}.
      more: arguments by name that every call is given.
      shards: parts that the function cuts the keys into, one for a device. A ValueError
        for lengths that twice as many do not divide is then a refusal, not a fault, and
        rings of so many are among the recipes it is compared with.

    Raises:
      TargetError: another value than these.
    """

    layout: Literal["BTNH", "BNTH"] = "BTNH"
    packed: bool = False
    scale: Literal["keyword", "positional", "none", "outside"] = "keyword"
    lse: str | None = "return_residual"
    lse_layout: Literal["BTN", "BNT"] = "BTN"
    lse_base: Literal["e", "2"] = "e"
    renamed: Mapping[str, str] = dataclasses.field(default_factory=dict)
    more: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    shards: int = 1

    def __post_init__(self):
        for field in dataclasses.fields(self):
            known, given = get_args(field.type), getattr(self, field.name)
            if get_origin(field.type) is Literal and given not in known:
                raise TargetError(
                    f"no {field.name} {given!r}; there are {', '.join(known)}"
                )
        if not isinstance(self.lse, str | None):
            raise TargetError(
                f"lse is the name of an argument, 'always' or None, not {self.lse!r}"
            )
        for name in ("renamed", "more"):
            if not isinstance(given := getattr(self, name), Mapping):
                raise TargetError(f"{name} is a dictionary by name, not {given!r}")
        if not isinstance(self.shards, int) or self.shards < 1:
            raise TargetError(f"shards is a whole number from 1, not {self.shards!r}")


@dataclasses.dataclass(frozen=True)
class Target:
    """A function to audit, its name in reports, and how it is called.

    `resolved`: the function is what `resolve` finds by the name, in any process.
    """

    name: str
    function: Callable[..., Any]
    adapter: Adapter = Adapter()
    resolved: bool = False

    def __reduce__(self):
        # A function under a decorator is not found by its own name.
        if self.resolved:
            return resolve, (self.name, self.adapter)
        return Target, (self.name, self.function, self.adapter)

    def attend(self, mask: Mask, *, scale: float) -> Attend:
        """The function under a mask, in the canonical layout, to be traced. A bias
        [1, N, T, S] may be given as a fourth array.

        Called, it raises what the function raises, and

        Raises:
          NotTakenError: the function has no argument for the mask, or the bias.
          WrongResultError: it returns other shapes or types than attention does.
        """
        attend = functools.partial(_attend, self, mask, scale)
        if jax.tree_util.tree_leaves(mask):
            return attend
        # Always the same, so that its programs are.
        return self._attends.setdefault((mask, scale), attend)

    def on(self, problem: Problem) -> Attend:
        """`attend` for a problem, always the same."""
        key = problem.mask, problem.shape, problem.scale_factor
        if key not in self._attends:
            self._attends[key] = self.attend(problem.rules, scale=problem.scale)
        return self._attends[key]

    @functools.cached_property
    def _attends(self) -> dict[Any, Attend]:
        return {}

    @functools.cached_property
    def arguments(self) -> dict[str, bool] | None:
        """Names that arguments may be passed by, and which have to be; None: any."""
        try:
            parameters = inspect.signature(self.function).parameters.values()
        except (TypeError, ValueError):  # Some builtins have none.
            return None
        if any(p.kind is p.VAR_KEYWORD for p in parameters):
            return None
        by_name = (
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
            inspect.Parameter.KEYWORD_ONLY,
        )
        return {p.name: p.default is p.empty for p in parameters if p.kind in by_name}

    def takes(self, name: str) -> bool:
        """Whether the function has an argument of a name."""
        return self.arguments is None or name in self.arguments

    def check_renamed(self) -> None:
        """Raises TargetError if the adapter renames what is never passed, to what the
        function does not have, or to what another argument is passed by: one of the two
        would be lost."""
        for name, theirs in self.adapter.renamed.items():
            if name not in RENAMEABLE:
                raise TargetError(
                    f"{name!r} is no argument to rename; there are "
                    f"{', '.join(RENAMEABLE)}"
                )
            if not self.takes(theirs):
                raise TargetError(
                    f"{self.name} has no argument {theirs!r} for {name}; there are "
                    f"{', '.join(self.arguments or ()) or 'none'}"
                )
        passed: dict[str, str] = {}
        for name in RENAMEABLE:
            theirs = self.adapter.renamed.get(name, name)
            if theirs in passed:
                raise TargetError(
                    f"{theirs!r} would be given both {passed[theirs]} and {name}: "
                    "rename them to different arguments, or audit a function that has "
                    "them"
                )
            passed[theirs] = name

    def check_given(self) -> None:
        """Raises TargetError if arguments for every call are some that the audit gives
        itself, or that the function does not have, or if LSE is to be had by one that
        it does not have."""
        adapter = self.adapter
        theirs = {adapter.renamed.get(name, name): name for name in RENAMEABLE}
        for name in adapter.more:
            if name in theirs:
                raise TargetError(
                    f"{name!r} is given by the audit itself, with each mask or call: "
                    "leave it out, or audit a function that has it fixed and not among "
                    "its arguments"
                )
            if not self.takes(name):
                raise TargetError(
                    f"{self.name} has no argument {name!r} to be given to every call; "
                    f"there are {', '.join(self.arguments or ()) or 'none'}"
                )
        usual = Adapter().lse
        if adapter.lse not in (None, "always", usual) and not self.takes(adapter.lse):
            raise TargetError(
                f"{self.name} has no argument {adapter.lse!r} to have LSE by; there "
                f"are {', '.join(self.arguments or ()) or 'none'}, and never and always"
            )

    def said_by(self, mask: str) -> str:
        """Which arguments a mask of `problem.MASKS` is passed by; "" if by none."""
        shape = Shape(1, 8, 8, 1, 1, 8)
        query = np.zeros(shape.query)
        names = ["bias"] if mask == "bias" else []
        with contextlib.suppress(NotTakenError):
            names += _of_mask(self, MASKS[mask](shape), query, query)
        theirs = {name: self.adapter.renamed.get(name, name) for name in names}
        return " and ".join(
            f"an array ({x})" if name == "mask" else x
            for name, x in theirs.items()
            if self.takes(x)
        )

    @property
    def takes_scale(self) -> bool:
        """Whether it is told the scale, and not only its query scaled."""
        name = self.adapter.renamed.get("scale", "scale")
        by_name = self.adapter.scale == "keyword" and self.takes(name)
        return by_name or self.adapter.scale == "positional"

    @property
    def has_lse(self) -> bool:
        lse = self.adapter.lse
        return lse == "always" or lse is not None and self.takes(lse)


def _attend(target: Target, mask: Mask, scale: float, query, key, value, bias=None):
    adapter = target.adapter
    shape = *query.shape[:3], value.shape[3]
    keywords = dict(adapter.more)
    keywords |= {
        adapter.renamed.get(name, name): x
        for name, x in _of_mask(target, mask, query, key).items()
    }
    causal = adapter.renamed.get("is_causal", "is_causal")
    if causal in (target.arguments or {}):  # Whatever its default.
        keywords.setdefault(causal, False)
    if bias is not None:
        name = adapter.renamed.get("bias", "bias")
        if not target.takes(name):
            raise NotTakenError(f"no argument {name!r}")
        keywords[name] = bias
    positional = []
    if adapter.scale == "keyword":
        name = adapter.renamed.get("scale", "scale")
        if target.takes(name):
            keywords[name] = scale
        elif not np.isclose(scale, query.shape[-1] ** -0.5):
            raise NotTakenError(f"no argument {name!r}")
    elif adapter.scale == "positional":
        positional.append(scale)
    elif adapter.scale == "outside":
        query = (query.astype(jnp.float32) * scale).astype(query.dtype)
    if adapter.lse not in (None, "always") and target.has_lse:
        keywords[adapter.lse] = True
    arrays = [query, key, value]
    if adapter.layout == "BNTH":
        arrays = [x.swapaxes(1, 2) for x in arrays]
    if adapter.packed:
        if query.shape != key.shape:
            raise NotTakenError(
                "one packed array holds as many keys as queries, and as many heads of "
                "each"
            )
        arrays = [jnp.stack(arrays, axis=2 if adapter.layout == "BTNH" else 1)]
    results = target.function(*arrays, *positional, **keywords)
    if inspect.iscoroutine(results):
        results.close()
        raise WrongResultError("it is asynchronous: audit a function that waits for it")
    lse = None
    if target.has_lse:
        if not (isinstance(results, tuple | list) and len(results) == 2):
            raise WrongResultError(
                f"it returns {described(results)} where (out, LSE) was asked for "
                "(--lse never, if it gives none)"
            )
        results, lse = results
    out = checked(results, query.dtype, shape, adapter.layout)
    if lse is not None:
        rows = shape[0], shape[2], shape[1]
        lse = checked_lse(lse, rows, adapter.lse_layout, adapter.lse_base)
    return out, lse


def _of_mask(target: Target, mask: Mask, query, key) -> dict[str, Any]:
    """Arguments of jax.nn's (and of ours, for segment ids) that say the mask."""

    def takes(*names: str) -> bool:
        return all(target.takes(target.adapter.renamed.get(x, x)) for x in names)

    if mask.is_empty:
        return {}
    given: dict[str, Any] = {}
    rest = mask
    if mask.query_offset is None:
        if mask.is_causal and takes("is_causal"):
            given["is_causal"] = True
            rest = dataclasses.replace(rest, is_causal=False)
        if mask.window is not None and takes("local_window_size"):
            longest = max(query.shape[1], key.shape[1])
            given["local_window_size"] = tuple(
                longest if side is None else side for side in mask.window
            )
            rest = dataclasses.replace(rest, window=None)
    for fields, names in (
        (("query_lengths",), ("query_seq_lengths",)),
        (("key_value_lengths",), ("key_value_seq_lengths",)),
        (("query_segment_ids", "key_value_segment_ids"),) * 2,
    ):
        arrays = [getattr(mask, field) for field in fields]
        if arrays[0] is not None and takes(*names):
            given |= {name: jnp.asarray(x) for name, x in zip(names, arrays)}
            rest = dataclasses.replace(rest, **dict.fromkeys(fields))
    if rest.is_empty:
        return given
    if not takes("mask"):
        wanted = [
            name for name, x in vars(rest).items() if x is not None and x is not False
        ]
        raise NotTakenError(
            f"no argument for {' and '.join(wanted)}, and none for a mask (--rename, "
            "if it has one of another name)"
        )
    dense = rest.materialise(query.shape[1], key.shape[1])
    assert dense is not None  # The mask is not empty.
    return given | {"mask": dense}


# Where named targets live: module, function, arguments. Found by name, since the audit
# imports no kernel, and others' packages may not be there.
_OURS = "attn_jax", "dot_product_attention"
_CUT = "attn_jax.context_parallel"
_JAX = "jax.nn", "dot_product_attention"
NAMED: dict[str, tuple[str, str, dict[str, Any]]] = {
    **{
        name: (*_OURS, {"implementation": name})
        for name in ("pallas", "emulated", "reference")
    },
    **{name: (*_JAX, {"implementation": name}) for name in ("xla", "cudnn")},
    "attention_mgpu": ("attn_jax.audit.others", "attention_mgpu", {}),
}
# Before a colon; what follows is one of its implementations.
PREFIXES: dict[str, tuple[str, str]] = {
    "tokamax": ("tokamax", "dot_product_attention"),
    "emulated": _OURS,
    "context_parallel": (_CUT, "dot_product_attention"),
}


def resolve(name: str, adapter: Adapter = Adapter()) -> Target:
    """The target of a name: one of `NAMED`, "tokamax:IMPLEMENTATION",
    "emulated:RECIPE", "context_parallel:STRATEGY", or "package.module:function".

    Raises:
      TargetError: there is none such, or it cannot be imported.
    """
    more: dict[str, Any] = {}
    if name in NAMED:
        module, function, more = NAMED[name]
    else:
        module, _, function = name.partition(":")
        if not module or not function:
            raise TargetError(
                f"no target {name!r}; there are {', '.join(NAMED)}, "
                "tokamax:IMPLEMENTATION, emulated:RECIPE, context_parallel:STRATEGY "
                "and package.module:function"
            )
        if module in PREFIXES:
            more = {"implementation": function}
            if module == "emulated":
                more = {"implementation": module, "recipe": _recipe(function)}
            elif module == "context_parallel":
                more, adapter = _cut(name, function, adapter)
            module, function = PREFIXES[module]
    if module.endswith(".py") or "/" in module:
        dotted = module.removesuffix(".py").strip("./").replace("/", ".")
        raise TargetError(
            f"{module} is the name of a file: name its module, such as "
            f"{dotted}:{function}, where Python can import it"
        )
    try:
        found = importlib.import_module(module)
    # A module of somebody's may raise anything, and a script may end itself.
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) and is_ours():
            raise
        said = f"cannot import {module}: {in_one_line(error)}"
        missing = isinstance(error, ModuleNotFoundError) and error.name
        if missing and f"{module}.".startswith(f"{missing}."):
            said += "; install it, or run where it can be imported"
        raise TargetError(said) from error
    for part in function.split("."):
        try:
            found = getattr(found, part)
        except Exception as error:  # A module may have its own way to find names.
            raise TargetError(
                f"{module} has no function {function!r}: {in_one_line(error)}"
            ) from error
    if not callable(found):
        raise TargetError(f"{module} has {function!r}, but it cannot be called")
    if isinstance(found, type):
        raise TargetError(f"{name} is a class: name a function, or an instance of it")
    _check_modes(module)
    if more:
        adapter = dataclasses.replace(adapter, more={**more, **adapter.more})
    return Target(name, found, adapter, resolved=True)


# Under these nothing can be measured: they stop or slow what is compared with, too.
_MODES = "jax_debug_nans", "jax_debug_infs", "jax_disable_jit"
_GUARDS = (
    "jax_transfer_guard",
    "jax_transfer_guard_host_to_device",
    "jax_transfer_guard_device_to_host",
    "jax_transfer_guard_device_to_device",
)
_SETTINGS = {
    "jax_numpy_rank_promotion": ("raise",),
    **dict.fromkeys(_GUARDS, ("disallow", "disallow_explicit")),
}


def _check_modes(module: str) -> None:
    where = f"in the environment or by importing {module}"
    for mode in _MODES:
        if getattr(jax.config, mode):
            raise TargetError(f"{mode} is on, {where}: turn it off for an audit")
    for name, refused in _SETTINGS.items():
        if (value := getattr(jax.config, name, None)) in refused:
            raise TargetError(
                f"{name} is {value!r}, {where}: leave it as it is in JAX for an audit"
            )


def _cut(name: str, strategy: str, adapter: Adapter) -> tuple[dict[str, Any], Adapter]:
    """Arguments of context parallelism on so many devices as `adapter` says, on all if
    it says none; a recipe may be given by its name."""
    known = importlib.import_module(_CUT).STRATEGIES
    if strategy not in known:
        raise TargetError(f"no strategy {strategy!r}; there are {', '.join(known)}")
    given = dict(adapter.more)
    present = jax.local_device_count()
    # Resolved once, it says so itself.
    devices = given.get("shards", adapter.shards if adapter.shards > 1 else present)
    if devices == 1 or devices > present and not given.get("simulated"):
        wanted = "several" if devices == 1 else str(devices)
        number = 8 if devices == 1 else devices
        raise TargetError(
            f"{name} needs {wanted} devices, and this process has {present}: split a "
            f"CPU by XLA_FLAGS=--xla_force_host_platform_device_count={number}, or "
            f"take them in turn on one by --shards {number} --argument simulated=true"
        )
    if isinstance(given.get("recipe"), str):
        given["recipe"] = _recipe(given["recipe"])
    ring = devices
    if strategy == "ring+ulysses":
        given = {"ulysses": 2} | given
        ring = max(1, devices // given["ulysses"])
    more = {"strategy": strategy, "shards": devices}
    return more, dataclasses.replace(adapter, more=given, shards=ring)


def _recipe(name: str) -> Recipe:
    if name not in RECIPES:
        raise TargetError(f"no recipe {name!r}; there are {', '.join(RECIPES)}")
    return RECIPES[name]
