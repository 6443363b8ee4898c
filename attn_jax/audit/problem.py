"""One problem of an audit: inputs of a family, a mask or bias, exact results."""

import dataclasses
import functools
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import ml_dtypes
import numpy as np

from attn_jax.audit.alone import ALONE
from attn_jax.audit.error import Yardstick, yardstick
from attn_jax.audit.inputs import (
    FAMILIES,
    Inputs,
    Shape,
    documents,
    make_bias,
    make_inputs,
)
from attn_jax.formats import BF16, FP16, FP32, NumberFormat
from attn_jax.mask import Mask
from attn_jax.reference import Golden, golden, lower_golden

DTYPES = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
    "float32": np.dtype(np.float32),
}
FORMATS: dict[str, NumberFormat] = {
    "bfloat16": BF16,
    "float16": FP16,
    "float32": FP32,
}
# Results by name: out, dQ and so on [B, T or S, heads, H], LSE [B, N, T], dbias
# [1, N, T, S].
Results = Mapping[str, np.ndarray]
# Of query, key and value, which every problem has. Some have a bias, too.
GRADIENTS = "dquery", "dkey", "dvalue"
TENSORS = ("out", "lse", *GRADIENTS, "dbias")
SYMBOLS: Mapping[str, str] = dict(
    zip(TENSORS, ("out", "LSE", "dQ", "dK", "dV", "dbias"), strict=True)
)


def _lengths(shape: Shape) -> Mask:
    """Each batch entry keeps less than the one before, of keys less than of queries."""
    share = 1 / (1.5 + np.arange(shape.batch))
    return Mask(
        query_lengths=np.ceil(shape.query_length * np.sqrt(share)).astype(np.int32),
        key_value_lengths=np.ceil(shape.key_length * share).astype(np.int32),
    )


# BF16 has every sixteenth number there, FP16 every second.
_FIRST_DOCUMENT = np.int32(3001)


def _packed(shape: Shape) -> Mask:
    """Every second batch entry has the documents of the others in reverse. Their
    numbers are of a long run: next to one another, and more than 16 bits hold."""

    def ids(length: int) -> np.ndarray:
        of = documents(length)
        both = np.stack([of, of.max() - of[::-1]])
        return _FIRST_DOCUMENT + both[np.arange(shape.batch) % 2]

    return Mask(
        query_segment_ids=ids(shape.query_length),
        key_value_segment_ids=ids(shape.key_length),
    )


# By name. The window has two different sides, both of which some queries reach. A bias
# stands among them as what logits meet, though it hides nothing.
MASKS: dict[str, Callable[[Shape], Mask]] = {
    "full": lambda shape: Mask(),
    "causal": lambda shape: Mask(is_causal=True),
    "window": lambda shape: Mask(
        window=(max(shape.key_length // 8, 2), max(shape.key_length // 16, 1))
    ),
    "lengths": _lengths,
    "packed": _packed,
    "bias": lambda shape: Mask(),
}


def _causal(name: str) -> Callable[[Shape], Mask]:
    """A mask of `MASKS`, and causal."""
    return lambda shape: dataclasses.replace(MASKS[name](shape), is_causal=True)


def _no_keys(shape: Shape) -> Mask:
    """The last batch entry has none, and others not all."""
    lengths = np.array(_lengths(shape).key_value_lengths)
    lengths[-1] = 0
    return Mask(key_value_lengths=lengths)


def _key_lengths(shape: Shape) -> Mask:
    """Without any of queries, as kernels that decode have them; of whole tiles, where a
    loop that counts tiles may stop one short."""
    powers = np.floor(np.log2(np.asarray(_lengths(shape).key_value_lengths)))
    return Mask(key_value_lengths=(2**powers).astype(np.int32))


def _query_lengths(shape: Shape) -> Mask:
    """Without any of keys."""
    return dataclasses.replace(_lengths(shape), key_value_lengths=None)


def _packed_apart(shape: Shape) -> Mask:
    """Documents end at other keys than queries, though there be as many."""
    more = shape.key_length // 4
    ids = _FIRST_DOCUMENT + documents(shape.key_length + more)[more:]
    ids = np.broadcast_to(ids, (shape.batch, shape.key_length))
    return dataclasses.replace(_packed(shape), key_value_segment_ids=ids)


def _wide_window(shape: Shape) -> Mask:
    """Wider than a tile on either side, of sequences that have several, and one side
    by more than a tile, so that loops with the sides exchanged miss one."""
    s = shape.key_length
    return Mask(window=(max(2 * s // 3, 2), max(s // 3, 1)))


def _as_array(rules: Mask, shape: Shape) -> Mask:
    """One array for each entry of the batch, whatever the rules: so all have one
    program."""
    _, T, S, *_ = dataclasses.astuple(shape)
    seen = rules.materialise(T, S, np)
    each = np.broadcast_to(True if seen is None else seen, (shape.batch, 1, T, S))
    return Mask(dense=each)


# A bias may say a mask, by -inf or by the least number of its format.
HIDING_BIAS = "bias that hides"
NO_KEYS = "no keys"

# Rules that are right one by one may be wrong together, where a length is 0, of keys
# or queries alone, where queries and keys have not the same, where a window is wider
# than tiles, or where a bias is not small. Beside each are the names of the `MASKS`
# that it is made of. On the first shape only P is read under them.
TOGETHER: dict[str, tuple[Callable[[Shape], Mask], tuple[str, ...]]] = {
    **{
        f"causal+{name}": (_causal(name), ("causal", name))
        for name in ("window", "lengths", "packed")
    },
    NO_KEYS: (_no_keys, ("lengths",)),
    "key lengths": (_key_lengths, ("lengths",)),
    "query lengths": (_query_lengths, ("lengths",)),
    "packed apart": (_packed_apart, ("packed",)),
    "wide window": (_wide_window, ("window",)),
    HIDING_BIAS: (MASKS["bias"], ("bias",)),
}


def made_of(mask: str) -> tuple[str, ...]:
    """The names of `MASKS` that a mask is made of."""
    return TOGETHER[mask][1] if mask in TOGETHER else (mask,)


@dataclasses.dataclass(frozen=True)
class Problem:
    """A cell of an audit. `dtype`: of Q, K, V and dO, a name of `DTYPES`; `mask`: a
    name of `MASKS` or of `TOGETHER`; the scale is `scale_factor` / sqrt(H)."""

    shape: Shape
    dtype: str = "bfloat16"
    family: str = "normal"
    mask: str = "full"
    seed: int = 0
    scale_factor: float = 1.0

    def __post_init__(self):
        for name, known in (
            ("dtype", DTYPES),
            ("family", FAMILIES),
            ("mask", MASKS | TOGETHER),
        ):
            given = getattr(self, name)
            if given not in known:
                raise ValueError(f"no {name} {given!r}; there are {', '.join(known)}")

    def __str__(self) -> str:
        s = self.shape
        lengths = f"{s.query_length}"
        if s.key_length != s.query_length:
            queries = "query" if s.query_length == 1 else "queries"
            lengths += f" {queries}, {s.key_length}"
        heads = f"{s.heads}"
        if s.key_heads != s.heads:
            heads += f" query, {s.key_heads} key"
        scale = f"{self.scale_factor:g} / sqrt({s.head_dim})"
        return (
            f"{self.family}, {self.mask}, {lengths} keys, {heads} heads of "
            f"{s.head_dim}, batch {s.batch}, {self.dtype}"
            + (f", scale {scale}" if self.scale_factor != 1 else "")
        )

    @property
    def format(self) -> NumberFormat:
        return FORMATS[self.dtype]

    @property
    def scale(self) -> float:
        return self.scale_factor * self.shape.head_dim**-0.5

    @property
    def rules(self) -> Mask:
        made = MASKS[self.mask] if self.mask in MASKS else TOGETHER[self.mask][0]
        return made(self.shape)

    def together(self, masks: Iterable[str]) -> list["Problem"]:
        """The same under each of `TOGETHER` that is made of these masks."""
        known = set(masks)
        return [
            dataclasses.replace(self, mask=name)
            for name in TOGETHER
            if known.issuperset(made_of(name))
        ]

    @property
    def unbiased(self) -> "Problem":
        """The same without a bias."""
        plain = "full" if self.has_bias else self.mask
        return dataclasses.replace(self, mask=plain)

    @property
    def has_bias(self) -> bool:
        return "bias" in made_of(self.mask)

    @property
    def bias(self) -> np.ndarray | None:
        """[1, N, T, S] of `dtype`, added to the scaled logits. Read only."""
        if not self.has_bias:
            return None
        hides = self.mask == HIDING_BIAS
        key = self.seed, self.shape, DTYPES[self.dtype]
        make = functools.partial(make_bias, *key, hides=hides)
        return _KEPT(("bias", hides, *key), lambda: _read_only([make()]))[0]

    @property
    def arrays(self) -> list[np.ndarray]:
        """What `measure.program` takes: the inputs, and the bias if there is one."""
        return [*self.inputs, *([] if self.bias is None else [self.bias])]

    @property
    def inputs(self) -> Inputs:
        """Read only."""
        key = self.family, self.seed, self.shape, self.dtype
        return _KEPT(key, lambda: _read_only(make_inputs(*key[:3], DTYPES[key[3]])))

    def exact(self, *, absolute: bool = False) -> Golden:
        """`reference.golden` on the inputs, dLSE = 0: in FP64, whatever the mode."""

        def make() -> Golden:
            with ALONE:
                rules = {"bias": self.bias, "mask": self._drawn(), "scale": self.scale}
                found = golden(*self.inputs, **rules, absolute=absolute)
            return _read_only(found)

        prepare = functools.partial(_compile_exact, self, absolute)
        return _KEPT((self, absolute), make, prepare)

    @property
    def is_drawn(self) -> bool:
        """Whether exact results are made with the mask as an array, which is small
        enough: so those under all masks of a shape have one program."""
        return self.shape.query_length * self.shape.key_length <= _DRAWN

    def _drawn(self) -> Mask:
        return _as_array(self.rules, self.shape) if self.is_drawn else self.rules

    def yardstick(self, tensor: str, fmt: NumberFormat) -> Yardstick:
        """A result of `exact` to measure against in `fmt`, 0 where it is not finite."""

        def make() -> Yardstick:
            of = getattr(self.exact(), tensor)
            # Of LSE the absolute values of its terms say nothing.
            terms = self.exact(absolute=True) if tensor != "lse" else None
            sizes = np.abs(of) if terms is None else getattr(terms, tensor)
            golden, absolute = (np.where(np.isfinite(of), x, 0.0) for x in (of, sizes))
            return _read_only(yardstick(golden, fmt, absolute))

        def prepare() -> None:
            self.exact()
            if tensor != "lse":
                self.exact(absolute=True)

        return _KEPT((self, tensor, fmt), make, prepare)


def at_extremes(problem: Problem) -> tuple[list[Inputs], float]:
    """Inputs whose logits are shifted by -c, 0 and +c, about 1000, and c."""
    base = dataclasses.replace(problem, family="normal").inputs
    query = base.query.copy()
    query[..., 0] = 64
    channel = np.asarray(1000 / (64 * problem.scale)).astype(DTYPES[problem.dtype])
    signed = []
    for amount in (-channel, 0, channel):
        key = base.key.copy()
        key[..., 0] = amount
        signed.append(base._replace(query=query, key=key))
    return signed, problem.scale * 64 * float(channel)


def _read_only[Values: Iterable](values: Values) -> Values:
    for x in _arrays(values):
        x.flags.writeable = False
    return values


def _arrays(values: Iterable) -> list[np.ndarray]:
    return [x for x in values if isinstance(x, np.ndarray)]


class _Kept:
    """The latest inputs and exact results, up to so many bytes: an audit asks for a
    problem again and again, in several threads, and each costs seconds where it is
    large. One is made at a time, since that takes memory, too; what is to be done
    before, and may be beside others, is `prepare`."""

    def __init__(self, most_bytes: int):
        self._most, self._lock = most_bytes, threading.RLock()
        self._kept: dict[Any, tuple[Any, int]] = {}

    def __call__(self, key, make, prepare=lambda: None):
        with self._lock:
            is_kept = key in self._kept
        if not is_kept:
            prepare()
        with self._lock:
            found = self._kept.pop(key, None)
            if found is None:
                made = make()
                found = made, sum(x.nbytes for x in _arrays(made))
            self._kept[key] = found
            while len(self._kept) > 1 and self._bytes() > self._most:
                del self._kept[next(iter(self._kept))]
            return found[0]

    def _bytes(self) -> int:
        return sum(size for _, size in self._kept.values())


_KEPT = _Kept(2**32)
# Pairs of a query and a key, at most.
_DRAWN = 2**24
_COMPILING = threading.Lock()
# By what programs of exact results depend on; held while one is compiled.
_PROGRAMS: dict[Any, threading.Lock] = {}
_COMPILED: set[Any] = set()


def _compile_exact(problem: Problem, absolute: bool) -> None:
    """Once, while other threads compile others, or run what is compiled."""
    s = problem.shape
    mask, name = problem.rules, problem.mask
    if problem.is_drawn:  # Whatever is hidden.
        mask, name = _as_array(Mask(), s), ""
    key = s, name, problem.has_bias, problem.scale_factor, absolute
    with _COMPILING:
        lock = _PROGRAMS.setdefault(key, threading.Lock())
    with lock:
        if key not in _COMPILED:
            lower_golden(
                (s.batch, s.query_length, s.key_length, s.head_dim, s.head_dim),
                mask=mask,
                scale=problem.scale,
                bias=problem.has_bias,
                absolute=absolute,
            ).compile()
            _COMPILED.add(key)
