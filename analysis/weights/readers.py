"""Checkpoints on disk as trees of tensors that are read slice by slice.

    run folder       what `python -m train` writes: checkpoints/STEP/state
    Orbax            any checkpoint of arrays, read through TensorStore
    safetensors      a file, or a folder of shards with or without an index
    npz              NumPy's archive of arrays, compressed or not
    a folder of any of these whose names end in a step

A step is a name that is a number (`100`, `100.npz`), or a number that ends a name after
`step`, `checkpoint` or `ckpt` (`global_step100`, `checkpoint-100`). No other number is
one: `zarr3`, `lr0p001` and `model-00001-of-00002` have none.

Memory is a slice's, of Orbax that of the stored chunks which a slice touches: they are
decoded once and kept until the slices have passed them. By default Orbax stores what a
device held of a tensor as one chunk, and TensorStore reads no part of a chunk without
decoding all of it: a row of one of 512 MiB takes 984 MiB, the chunk as it is stored
and as it is decoded.
"""

import dataclasses
import json
import math
import re
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import ml_dtypes
import numpy as np

from analysis.weights.leaves import SLICE, Box, Leaf
from train.config import UsageError

_KINDS = (
    "a run folder of python -m train, an Orbax checkpoint, a .safetensors file or a "
    "folder of its shards, an .npz file, or a folder of such named by steps (100, "
    "step_100, checkpoint-100)"
)
_STEP = re.compile(r"(?:.*(?:step|checkpoint|ckpt)[-_.=]?)?(\d+)", re.IGNORECASE)
_SUFFIXES = (".safetensors", ".npz")
_SAFETENSORS = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E4M3FNUZ": ml_dtypes.float8_e4m3fnuz,
    "F8_E5M2FNUZ": ml_dtypes.float8_e5m2fnuz,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U64": np.uint64,
    "U32": np.uint32,
    "U16": np.uint16,
    "U8": np.uint8,
    "BOOL": np.bool_,
    "C64": np.complex64,
}

# What zipfile and zlib raise of archives that are not as they were written.
_DAMAGED = (
    *(zipfile.BadZipFile, zlib.error, EOFError, OSError),
    *(NotImplementedError, RuntimeError),
)

Tree = dict[str, Leaf]


@dataclasses.dataclass(frozen=True)
class Weights:
    """One model's checkpoints.

    Attributes:
      path: where they lie.
      steps: opens each, by step; None is that of a checkpoint which tells none.
    """

    path: Path
    steps: dict[int | None, Callable[[], Tree]]


def find(path: Path, tree: str | None = None) -> Weights:
    """The checkpoints at a path; none is opened.

    Args:
      path: one of the kinds that the module's docstring lists.
      tree: dotted prefix of the names to read, which they lose; by default `params` of
        our states, everything of others.

    Raises:
      UsageError: there is nothing, or nothing that can be read.
    """
    try:
        there = path.exists()
    except OSError:  # A name that is too long, say.
        there = False
    if not there:
        raise UsageError(f"{path} is not there: name {_KINDS}")
    folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    opener = _opener(folder, tree)
    if opener is not None:
        return Weights(path, {_step(path): opener})
    steps: dict[int | None, Callable[[], Tree]] = {}
    children = sorted(folder.iterdir()) if folder.is_dir() else []
    # Orbax writes under such a name until a checkpoint is whole.
    children = [one for one in children if "orbax-checkpoint-tmp" not in one.name]
    for child in children:
        step = _step(child)
        opener = _opener(child, tree) if step is not None else None
        if opener is None:
            continue
        if step in steps:
            raise UsageError(f"{path} has two checkpoints of step {step}: name one")
        steps[step] = opener
    if not steps:
        readable = [one.name for one in children if _opener(one, tree)]
        if readable:
            raise UsageError(
                f"the names in {path} tell no step ({', '.join(readable[:4])}): name "
                "one of them, or call them by their steps (100, step_100)"
            )
        raise UsageError(f"{path} holds no checkpoint that can be read: name {_KINDS}")
    return Weights(path, dict(sorted(steps.items(), key=lambda item: item[0] or 0)))


def _step(path: Path) -> int | None:
    """The step that a name tells."""
    found = _STEP.fullmatch(path.stem if path.suffix in _SUFFIXES else path.name)
    return int(found[1]) if found else None


def _opener(path: Path, tree: str | None) -> Callable[[], Tree] | None:
    """Opens one checkpoint, None if the path is none."""
    if path.is_file():
        if path.suffix == ".safetensors":
            return lambda: subtree(path, _safetensors([path]), tree)
        if path.suffix == ".npz":
            return lambda: subtree(path, _npz(path), tree)
        return None
    state = _orbax_folder(path)
    if state is not None:
        return lambda: subtree(path, _orbax(state), tree)
    shards = sorted(path.glob("*.safetensors"))
    index = sorted(path.glob("*.safetensors.index.json"))
    if index:
        return lambda: subtree(path, _indexed(path, index), tree)
    # Else its files are the steps of one model.
    if any(_step(shard) is None for shard in shards):
        return lambda: subtree(path, _safetensors(shards), tree)
    return None


def subtree(path: Path, found: Tree, tree: str | None) -> Tree:
    """The part of a tree whose names begin with a prefix, without it.

    Raises:
      UsageError: there is none.
    """
    tops = list(dict.fromkeys(name.split(".")[0] for name in found))
    if tree is None:
        # Ours: the state of a run.
        if not {"params", "average", "step"} <= set(tops):
            return found
        tree = "params"
    part = {
        name.removeprefix(f"{tree}."): leaf
        for name, leaf in found.items()
        if name.startswith(f"{tree}.")
    }
    if not part:
        raise UsageError(
            f"--tree {tree}: {path} has nothing below that name; it has "
            f"{', '.join(tops[:8])}"
        )
    return part


def _orbax_folder(path: Path) -> Path | None:
    """The folder that holds the arrays of a checkpoint of Orbax.

    Raises:
      UsageError: there are several, and none has a usual name.
    """
    if (path / "_METADATA").is_file():
        return path
    if not path.is_dir():
        return None
    items = sorted(one.parent for one in path.glob("*/_METADATA"))
    if all(_step(one) is not None for one in items):
        return None
    for usual in ("state", "params", "default", "pytree", "model"):
        for one in items:
            if one.name == usual:
                return one
    if len(items) > 1:
        names = ", ".join(one.name for one in items)
        raise UsageError(f"{path} has several items: name one of its folders {names}")
    return items[0] if items else None


def _orbax(folder: Path) -> Tree:
    """Opens every array's description; numbers are read when asked for.

    Raises:
      UsageError: the checkpoint is damaged, or of a kind that TensorStore cannot read.
    """
    import tensorstore

    def damaged(why: object) -> UsageError:
        text = " ".join(str(why).split())[:200]
        return UsageError(
            f"the checkpoint {folder} cannot be read ({text}): it is damaged or no "
            "checkpoint of arrays; name another"
        )

    try:
        described = json.loads((folder / "_METADATA").read_text())
        entries = described["tree_metadata"].values()
        wanted = {
            ".".join(str(key["key"]) for key in entry["key_metadata"]): entry[
                "value_metadata"
            ]["value_type"]
            for entry in entries
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise damaged(error) from error
    # Empty nodes and text have no numbers.
    wanted = [
        name
        for name, kind in wanted.items()
        if kind in ("jax.Array", "np.ndarray", "scalar", "int", "float")
    ]
    base = f"file://{folder.absolute()}/"
    whole = (folder / "manifest.ocdbt").is_file()

    def spec(name: str) -> dict[str, Any]:
        store: Any = f"{base}{name}/"
        if whole:
            store = {"driver": "ocdbt", "base": base, "path": f"{name}/"}
        driver = "zarr3" if described.get("use_zarr3") else "zarr"
        return {"driver": driver, "kvstore": store}

    futures = {
        name: tensorstore.open(spec(name), open=True, read=True) for name in wanted
    }
    tree: Tree = {}
    for name, future in futures.items():
        try:
            store = future.result()
        except (ValueError, OSError, RuntimeError) as error:
            raise damaged(error) from error

        chunks = _Chunks(store)

        def read(box: Box, chunks: _Chunks = chunks) -> np.ndarray:
            try:
                return chunks.read(box)
            except (ValueError, OSError, RuntimeError) as error:
                raise damaged(error) from error

        tree[name] = Leaf(tuple(store.shape), store.dtype.numpy_dtype, read)
    return tree


class _Chunks:
    """An array of TensorStore, of which the chunks last touched are kept."""

    def __init__(self, store: Any):
        self._store = store
        self._chunk = store.chunk_layout.read_chunk.shape or store.shape
        self._kept: np.ndarray | None = None
        self._low: tuple[int, ...] = ()
        self._high: tuple[int, ...] = ()

    def read(self, box: Box) -> np.ndarray:
        """The numbers of a box."""
        shape = self._store.shape
        ends = [part.indices(n)[:2] for part, n in zip(box.index, shape, strict=True)]
        within = all(
            low <= start and stop <= high
            for (start, stop), low, high in zip(ends, self._low, self._high)
        )
        if self._kept is None or not within:
            self._kept = None  # Before others come.
            sizes = [min(c, n) or n for c, n in zip(self._chunk, shape, strict=True)]
            self._low = tuple(e[0] // c * c for e, c in zip(ends, sizes))
            self._high = tuple(
                min(-(-e[1] // c) * c, n) for e, c, n in zip(ends, sizes, shape)
            )
            region = tuple(map(slice, self._low, self._high))
            self._kept = np.asarray(self._store[region].read().result())
        index = tuple(
            slice(start - low, stop - low)
            for (start, stop), low in zip(ends, self._low, strict=True)
        )
        values = np.asarray(self._kept[index])
        if box.stop == math.prod(shape):
            self._kept = None
        return values


def _indexed(folder: Path, index: list[Path]) -> Tree:
    """The shards that an index names.

    Raises:
      UsageError: the index cannot be read, or there is another, or a shard is missing.
    """
    if len(index) > 1:
        raise UsageError(f"{folder} has {len(index)} indices: name one folder a model")
    try:
        places = json.loads(index[0].read_text())["weight_map"]
        shards = {name: folder / name for name in sorted(set(places.values()))}
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise UsageError(
            f"{index[0]} is no index of safetensors: delete it, and all .safetensors "
            "files of its folder are read"
        ) from error
    for name, shard in shards.items():
        if not shard.is_file():
            raise UsageError(f"{folder} lacks {name}, which {index[0].name} names")
    tree = _safetensors(list(shards.values()))
    lacking = sorted(places.keys() - tree.keys())
    if lacking:
        raise UsageError(
            f"{folder}: no shard has {lacking[0]}, which {index[0].name} names: fetch "
            "them again"
        )
    return tree


def _safetensors(files: list[Path]) -> Tree:
    """Raises UsageError: a file is damaged, or two hold a tensor of one name."""
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise UsageError(
            "reading .safetensors needs the package safetensors: pip install -c "
            "constraints.txt safetensors"
        ) from error
    tree: Tree = {}
    for path in files:
        try:
            # Checks the header against the file's length; nothing else is read.
            with safe_open(path, "numpy"):
                pass
        except (SafetensorError, OSError) as error:
            raise UsageError(
                f"{path} is no whole safetensors file ({error}): fetch it again"
            ) from error
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        for name, about in header.items():
            if name in tree:
                raise UsageError(f"{path.parent}: two files hold the tensor {name}")
            dtype = _SAFETENSORS.get(about["dtype"])
            if dtype is None:
                raise UsageError(
                    f"{path}: {name} is of type {about['dtype']}, not one of "
                    f"{', '.join(_SAFETENSORS)}"
                )
            start = 8 + length + about["data_offsets"][0]
            tree[name] = _flat(path, np.dtype(dtype), tuple(about["shape"]), start)
    return tree


def _flat(path: Path, dtype: np.dtype, shape: tuple[int, ...], start: int) -> Leaf:
    """A tensor that lies in a file number by number.

    The package's own slices know no 8-bit types, and its map of the file would count
    as memory of this process.
    """

    def read(box: Box) -> np.ndarray:
        with path.open("rb") as file:
            file.seek(start + box.start * dtype.itemsize)
            return np.frombuffer(
                file.read((box.stop - box.start) * dtype.itemsize), dtype
            )

    return Leaf(shape, dtype, read)


def _npz(path: Path) -> Tree:
    """Raises UsageError: it is no archive of arrays, or of a type it does not tell."""
    tree: Tree = {}
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
            for name in names:
                with archive.open(name) as file:
                    shape, fortran, dtype = _header(file)
                member = _Member(path, name, math.prod(shape))
                if dtype.hasobject:
                    raise ValueError(f"{name} holds objects of Python")
                if dtype.fields is not None or dtype.char in "gG":
                    # FP64 has not the range of the second.
                    raise ValueError(f"{name} has the type {dtype}")
                if dtype.kind == "V" and dtype.itemsize == 2:
                    # What NumPy writes for it: no other 16-bit type is not its own.
                    dtype = np.dtype(ml_dtypes.bfloat16)
                elif dtype.kind == "V":
                    raise ValueError(
                        f"{name} has the type {dtype}, which says no format"
                    )
                key = name.removesuffix(".npy")
                if fortran and len(shape) > 1:
                    tree[key] = Leaf(shape, dtype, member.transposed(shape, dtype))
                else:
                    tree[key] = Leaf(shape, dtype, member.reader(dtype))
    except (*_DAMAGED, ValueError) as error:
        raise UsageError(
            f"{path} is no .npz file of arrays ({error}): write it with numpy.savez, "
            "or weights of 8 bits as safetensors"
        ) from error
    return tree


def _header(file: Any) -> tuple[tuple[int, ...], bool, np.dtype]:
    version = np.lib.format.read_magic(file)
    if version == (1, 0):
        return np.lib.format.read_array_header_1_0(file)
    return np.lib.format.read_array_header_2_0(file)


class _Member:
    """An array in an archive, read in order: a compressed one knows no other way."""

    def __init__(self, path: Path, name: str, size: int):
        self._path, self._name, self._size = path, name, size
        self._file: IO[bytes] | None = None
        self._place = 0

    def reader(self, dtype: np.dtype) -> Callable[[Box], np.ndarray]:
        """Reads boxes of numbers of this type."""

        def read(box: Box) -> np.ndarray:
            try:
                return self._read(box, dtype)
            except _DAMAGED as error:
                raise UsageError(
                    f"{self._path} is damaged: {self._name} cannot be read ({error}); "
                    "write it anew"
                ) from error

        return read

    def transposed(
        self, shape: tuple[int, ...], dtype: np.dtype
    ) -> Callable[[Box], np.ndarray]:
        """The same of an array in Fortran's order, of which all is kept from the first
        box to the last: each is spread over the file."""
        read_all, kept = self.reader(dtype), []

        def read(box: Box) -> np.ndarray:
            if not kept:
                whole = read_all(Box(0, self._size, ()))
                kept.append(whole.reshape(shape, order="F"))
            values = np.ascontiguousarray(kept[0][box.index])
            if box.stop == self._size:
                kept.clear()
            return values

        return read

    def _read(self, box: Box, dtype: np.dtype) -> np.ndarray:
        if self._file is None or box.start < self._place:
            self._close()
            self._file = zipfile.ZipFile(self._path).open(self._name)
            _header(self._file)
            self._place = 0
        while self._place < box.start:
            step = min(box.start - self._place, SLICE)
            self._file.read(step * dtype.itemsize)
            self._place += step
        count = box.stop - box.start
        content = self._file.read(count * dtype.itemsize)
        if len(content) < count * dtype.itemsize:
            raise EOFError("cut short")
        self._place = box.stop
        if box.stop == self._size:
            self._close()
        return np.frombuffer(content, dtype)

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
