"""The problems that `analysis accuracy` measures, by preset."""

from collections.abc import Sequence

from analysis.agreement import Problem


def _problems(
    shapes: Sequence[tuple[int, int, int, int]],
    head_dims: Sequence[int],
    dtype: str = "bfloat16",
) -> tuple[Problem, ...]:
    """Without a mask and causal."""
    return tuple(
        Problem(*shape, head_dim, is_causal, dtype)
        for shape in shapes
        for head_dim in head_dims
        for is_causal in (False, True)
    )


def _masked(
    shapes: Sequence[tuple[int, int, int, int]], head_dims: Sequence[int]
) -> tuple[Problem, ...]:
    """Causal with a window of an eighth of the keys, and in packed documents."""
    return tuple(
        Problem(*shape, head_dim, is_causal=True, window=window, packed=window is None)
        for shape in shapes
        for head_dim in head_dims
        for window in (shape[1] // 8, None)
    )


# (T, S, N, K): square, long, ragged (no multiple of any block), unequal lengths with
# grouped heads, one key/value head for all.
_SQUARE = (2048, 2048, 16, 16)
_LONG = (4096, 4096, 16, 16)
_RAGGED = (1000, 1337, 16, 16)
_GROUPED = (512, 1024, 16, 4)
_SHARED = (777, 777, 16, 1)
_SHORT = (512, 512, 16, 16)
# As many entries as _LONG; XLA, which keeps T x S arrays, still runs.
_LONGEST = (16_384, 16_384, 4, 4)
_TOY = (48, 40, 4, 2)
PRESETS = {
    "toy": _problems((_TOY,), (64,))
    + _problems((_TOY,), (64,), "float16")
    + _masked((_TOY,), (64,)),
    "quick": _problems((_SQUARE, _RAGGED), (128,)),
    "full": _problems((_SQUARE, _LONG, _RAGGED, _GROUPED), (64, 128))
    + _problems((_SHARED,), (128,))
    + _problems((_SQUARE,), (64, 128), "float16")
    + _problems((_RAGGED,), (64,), "float16"),
    "lengths": _problems((_SHORT, _LONGEST), (64, 128)),
    "masks": _masked((_SHORT, _SQUARE, _LONG, _LONGEST), (64, 128)),
}
