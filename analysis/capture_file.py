"""The file of `python -m analysis capture`, and captures as a sweep draws from them."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np

from attn_jax.audit.inputs import Inputs
from train.config import Config, UsageError, to_json

# NumPy stores no bfloat16: its bits are kept as integers of the same width.
_STORED_AS = {"bfloat16": "uint16", "float16": "float16", "float32": "float32"}
_TYPES = {
    "bfloat16": ml_dtypes.bfloat16,
    "float16": np.float16,
    "float32": np.float32,
}
# What `python -m analysis capture` writes into a run folder.
CAPTURE = "capture.npz"


class Capture(NamedTuple):
    """The arrays of one layer at one step, [examples, tokens, heads, head dim].

    `loss` is the mean loss of the captured examples.
    """

    step: int
    layer: int
    loss: float
    inputs: Inputs

    @property
    def label(self) -> str:
        """Such as 'step 5000, layer 4'; layers count from 0."""
        return label(self.step, self.layer)


class Captured(NamedTuple):
    """Captures by label: their sizes at once, their arrays when they are asked for.

    `draws` are heads of examples, `keys` the fewest keys that any of them has.
    """

    labels: tuple[str, ...]
    draws: int
    keys: int
    head_dim: int
    arrays: Callable[[], Mapping[str, Inputs]]


def label(step: int, layer: int) -> str:
    """Such as 'step 5000, layer 4'; layers count from 0."""
    return f"step {step}, layer {layer}"


def captured(arrays: Mapping[str, Inputs]) -> Captured:
    """Captures that are there already, one at least."""
    queries, keys = ([x[i].shape for x in arrays.values()] for i in range(2))
    return Captured(
        tuple(arrays),
        min(examples * heads for examples, _, heads, _ in queries),
        min(length for _, length, _, _ in keys),
        queries[0][-1],
        lambda: arrays,
    )


def save(captures: Sequence[Capture], config: Config, path: Path) -> None:
    """Writes captures as one .npz: bits of each array, and a description as JSON."""
    kind = np.dtype(captures[0].inputs.query.dtype).name
    described = {
        "config": json.loads(to_json(config)),
        "dtype": kind,
        "captures": [
            {"step": one.step, "layer": one.layer, "loss": one.loss} for one in captures
        ],
    }
    arrays = {
        f"{number}_{name}": np.asarray(array).view(_STORED_AS[kind])
        for number, one in enumerate(captures)
        for name, array in one.inputs._asdict().items()
    }
    with path.open("wb") as file:
        description = np.array(json.dumps(described))
        np.savez_compressed(file, allow_pickle=False, description=description, **arrays)


def read(path: Path) -> list[Capture]:
    """The captures that `save` wrote, one at least.

    Raises:
      UsageError: it did not.
    """
    try:
        return _read(path)
    # What a foreign or damaged file leads NumPy and its readers of zip files, Python
    # literals and JSON to raise is written down nowhere.
    except Exception as error:
        raise UsageError(
            f"{path} is neither a run folder of python -m train nor a file of python "
            f"-m analysis capture: {' '.join(str(error).split())}"
        ) from error


def _read(path: Path) -> list[Capture]:
    # NumPy leaves a file open that turns out to be damaged.
    with path.open("rb") as file:
        stored = np.load(file)
        if isinstance(stored, np.ndarray):
            raise ValueError("it holds a single array")
        described = json.loads(str(stored["description"]))
        kind = _TYPES[described["dtype"]]
        captures = [
            Capture(
                one["step"],
                one["layer"],
                one["loss"],
                Inputs(*(stored[f"{number}_{x}"].view(kind) for x in Inputs._fields)),
            )
            for number, one in enumerate(described["captures"])
        ]
    if not captures:
        raise ValueError("it holds no capture")
    for one in captures:
        if not _has_shapes_of_attention(one.inputs):
            raise ValueError(f"the arrays of {one.label} have other shapes")
    return captures


def _has_shapes_of_attention(inputs: Inputs) -> bool:
    query, key, value, dout = (x.shape for x in inputs)
    if (query, key) != (dout, value) or not len(query) == len(key) == 4:
        return False
    (examples, _, heads, head_dim), (*_, key_heads, _) = query, key
    return (
        0 not in (*query, *key)
        and (examples, head_dim) == (key[0], key[3])
        and heads % key_heads == 0
    )
