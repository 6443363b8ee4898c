"""The error of timed results, on some heads of the very problem that was timed.

Exact results come from `attn_jax.reference.golden`, head by head and a few thousand
queries at a time: those of a query need no other query, and the gradients of keys and
values are sums over queries.
"""

import functools

import numpy as np

from analysis.agreement import FORMATS
from analysis.record import Row
from analysis.speed.cases import Case
from attn_jax.audit import error
from attn_jax.audit.inputs import Inputs, Shape, make_inputs
from attn_jax.mask import Mask
from attn_jax.reference import golden

# The draw that every row is of.
SEED = 0
# The results of a pass, and the columns of their errors.
TENSORS = {
    "forward": ("out",),
    "backward": ("dq", "dk", "dv"),
    "both": ("out", "dq", "dk", "dv"),
}
# Family of inputs -> stacked `pieces` by tensor.
Results = dict[str, dict[str, np.ndarray]]
_FIELDS = {"out": "out", "dq": "dquery", "dk": "dkey", "dv": "dvalue"}
# Results of every head are looked at up to so many logits, else of two key/value heads.
_ALL_UP_TO = 2**20
# Logits of one head that are held at once in FP64: 1 GiB for each array of them.
_HELD = 2**27


def inputs_of(case: Case, family: str) -> Inputs:
    """The inputs of a case; the last ones are kept for the next case of its shape."""
    return _drawn(family, case.shape, case.dtype)


@functools.lru_cache(maxsize=2)
def _drawn(family: str, shape: Shape, dtype: str) -> Inputs:
    return make_inputs(family, SEED, shape, np.dtype(dtype).type)


def heads_of(case: Case) -> list[tuple[int, int]]:
    """The (batch entry, key/value head) whose results are looked at.

    All of a small problem, else the first and the last: an index that is off by one
    shows at either end.
    """
    every = [(b, k) for b in range(case.B) for k in range(case.K)]
    if case.B * case.N * case.T * case.S <= _ALL_UP_TO or len(every) <= 2:
        return every
    return [every[0], every[-1]]


def pieces(case: Case, tensor: str, array) -> list:
    """The parts [length, heads, H] of a result [B, length, heads, H] of those heads.

    For arrays of any library, so that no more than these leave the device.
    """
    group = 1 if tensor in ("dk", "dv", "key", "value") else case.N // case.K
    return [array[b, :, k * group : (k + 1) * group] for b, k in heads_of(case)]


def columns(case: Case, results: Results) -> Row:
    """Errors of results in units of the final rounding, the columns FAMILY_TENSOR.

    `error` is the largest of them and `error_in` its column; `error_of` says how many
    heads were looked at.
    """
    tensors = [f"{family}_{t}" for family in case.families for t in _FIELDS]
    found: Row = dict.fromkeys(("error", "error_in", "error_of", *tensors))
    units: dict[str, float] = {}
    for family, arrays in results.items():
        exact = _exact(case, family)
        for tensor, x in arrays.items():
            size = error.unit_error(x, exact[tensor], FORMATS[case.dtype])
            units[f"{family}_{tensor}"] = size
    if units:
        # A NaN is the largest: argmax takes it, max would not.
        where = list(units)[int(np.argmax(list(units.values())))]
        heads, every = len(heads_of(case)) * (case.N // case.K), case.B * case.N
        of = "all" if heads == every else f"{heads} of {every} heads"
        found |= units | {"error": units[where], "error_in": where, "error_of": of}
    return found


@functools.lru_cache(maxsize=2)
def _exact(case: Case, family: str) -> dict[str, np.ndarray]:
    """Exact results of the heads that are looked at, stacked like theirs."""
    parts: dict[str, list[np.ndarray]] = {tensor: [] for tensor in _FIELDS}
    query, key, value, dout = inputs_of(case, family)
    chosen = (
        pieces(case, name, x)
        for name, x in (("query", query), ("key", key), ("value", value), ("do", dout))
    )
    for arrays in zip(*chosen, strict=True):
        for tensor, x in _exact_group(case, *(x[None] for x in arrays)).items():
            parts[tensor].append(x[0])
    return {tensor: np.stack(arrays) for tensor, arrays in parts.items()}


def _exact_group(case: Case, query, key, value, dout) -> dict[str, np.ndarray]:
    """Exact results [1, length, heads, H] of one key/value head and its query heads."""
    # A divisor of T, so that all blocks are one program.
    count = -(-case.T * case.S // _HELD)
    while case.T % count:
        count += 1
    size = case.T // count
    found: dict[str, list[np.ndarray]] = {tensor: [] for tensor in _FIELDS}
    for start in range(0, case.T, size):
        rows = slice(start, start + size)
        mask = case.rules
        if count > 1:
            dense = mask.block(start, 0, size, case.S)
            mask = Mask(dense=None if dense is None else np.asarray(dense))
        block = golden(query[:, rows], key, value, dout[:, rows], mask=mask)
        for tensor, field in _FIELDS.items():
            x = getattr(block, field)
            if tensor in ("dk", "dv") and found[tensor]:
                found[tensor][0] += x
            else:
                found[tensor].append(x)
    return {tensor: np.concatenate(parts, 1) for tensor, parts in found.items()}
