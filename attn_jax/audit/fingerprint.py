"""Whether a target's code is what it was when something was measured."""

import functools
import hashlib
import importlib.machinery
import importlib.metadata
import re
import sys
import sysconfig
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from attn_jax.audit.target import Target

_SUFFIXES = tuple(
    importlib.machinery.SOURCE_SUFFIXES + importlib.machinery.EXTENSION_SUFFIXES
)
_PYTHONS = tuple(Path(sysconfig.get_path(x)) for x in ("stdlib", "platstdlib"))
_IMPORTED = re.compile(rb"^[ \t]*(?:from|import)[ \t]+(\w+)", re.MULTILINE)


def fingerprint(target: Target) -> str:
    """A SHA-256 that another one equals as long as the target's code is the same.

    It is of the files that Python can import in the top-level package of the target's
    module, or beside a module that is in none; and of all other modules that are
    loaded, so that a function may wrap what lies elsewhere. What is installed, in
    Python's own folders or in site-packages, counts by the versions of packages that
    these files import, and so does attn_jax, unless the target is in it. Files are read
    as they are now. Of a function without a file, such as a notebook's, no two are
    equal.
    """
    modules = {sys.modules.get(name) for name in _modules(target)} - {None}
    if not any(_file(module) or hasattr(module, "__path__") for module in modules):
        return uuid.uuid4().hex
    names = {module.__name__.partition(".")[0] for module in modules if module}
    files = {x for module in modules for x in _together(module)}
    if files and names != {"attn_jax"}:
        files |= {x for x in map(_file, _loaded()) if x}
    contents = [
        (path.name, path.read_bytes()) for path in files if not _installed(path)
    ]
    for _, content in contents:
        names |= {x.decode() for x in _IMPORTED.findall(content)}
    whole = sorted((name, hashlib.sha256(x).hexdigest()) for name, x in contents)
    versions = sorted(_versions(names).items())
    return hashlib.sha256(repr((whole, versions)).encode()).hexdigest()


def _modules(target: Target) -> Iterator[str]:
    """Names of those that the function is found in, and that it and what it wraps are
    written in."""
    if target.resolved:
        yield target.name.partition(":")[0]
    function: Callable[..., Any] | None = target.function
    while function is not None:
        yield _named(function, "__module__") or ""
        if isinstance(function, functools.partial):
            function = function.func
        else:
            function = _named(function, "__wrapped__")


def _named(function: Any, name: str) -> Any:
    """The attribute, or None."""
    try:
        return getattr(function, name, None)
    except Exception:  # An object's own `__getattr__` may raise anything.
        return None


def _together(module: Any) -> Iterator[Path]:
    """Files that Python can import in the module's package, or beside it."""
    package = sys.modules.get(module.__name__.partition(".")[0])
    folders = getattr(package, "__path__", None)
    if folders is not None:
        found = (x for folder in folders for x in Path(folder).rglob("*"))
    else:
        file = _file(module)
        found = file.parent.iterdir() if file else ()
    for path in found:
        if path.name.endswith(_SUFFIXES) and path.is_file() and not _installed(path):
            yield path


def _loaded() -> list[Any]:
    """The program that runs is none of the target's, unless the target is in it."""
    return [
        module
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] not in ("attn_jax", "__main__", "__mp_main__")
    ]


def _file(module: Any) -> Path | None:
    # By its entries: a lazy module would be loaded for an attribute.
    file = getattr(module, "__dict__", {}).get("__file__")
    path = Path(file) if isinstance(file, str) else None
    return path if path and path.is_file() else None


def _installed(path: Path) -> bool:
    return bool({"site-packages", "dist-packages"} & set(path.parts)) or any(
        path.is_relative_to(folder) for folder in _PYTHONS
    )


def _versions(names: set[str]) -> dict[str, str]:
    found = {"attn_jax": importlib.import_module("attn_jax").__version__}
    installed = _distributions(tuple((x, _changed(x)) for x in sys.path))
    for name in names:
        for package in installed.get(name, ()):
            found[package] = importlib.metadata.version(package)
    return found


@functools.lru_cache(maxsize=1)
def _distributions(folders: tuple[tuple[str, int], ...]) -> Mapping[str, list[str]]:
    """To look through all that is installed takes longer than many a part of an audit,
    so once until something is installed or removed."""
    del folders
    return importlib.metadata.packages_distributions()


def _changed(folder: str) -> int:
    """When; 0 if there is no such folder, which `sys.path` may name all the same."""
    try:
        return Path(folder).stat().st_mtime_ns
    except OSError:
        return 0
