"""How gradients are made: all in one pass, or dQ by a kernel of its own."""

import math

from attn_jax.formats import BF16, NumberFormat
from attn_jax.kernels import (
    ampere_backward_fused,
    architecture,
    hopper_backward_fused,
    tuning,
    visibility,
)
from attn_jax.kernels.hopper_fused_work import Shapes
from attn_jax.kernels.tuning import Backward, Configuration
from attn_jax.kernels.visibility import Band
from attn_jax.mask import Mask
from attn_jax.recipe import Architecture

# Of the card's time, what the fused kernel must have tiles for (`Ring.share`). Below
# that two kernels, which make seven products instead of five, are faster: they deal
# out tiles of each query head, and the fused kernel of each key head, or of each part
# of one (`Shapes.in_parts`). On an H200, where each was in one CTA, two kernels were
# 1.07 to 1.5 times as fast at shares to 0.485, one pass 1.06 to 1.12 times at 0.71 to
# 0.81 (`prototypes/measure_designs.py`); between them nothing was measured. As causal
# tiles are dealt now, what had 0.485 then has 0.545, and is not measured.
LEAST_SHARE = 0.5

# On Ampere, by head dim, how many keys a query is to see in the mean, for what comes
# before and after the fused kernel to be worth it: few of those timed on an H200 where
# one pass won (`results/prototypes/designs_ampere.csv`; 128: `ampere_lots.csv` beside
# two kernels, whose table is not kept). At 128 to 256 keys and 32 heads of 64 two
# kernels were faster before numbers of K and V had a kernel of their own.
LEAST_KEYS = {64: 320, 128: 512}

# And how busy it must be, of `busy_beside_two_kernels`. Where that is 0.25 to 0.52 two
# kernels were 1.2 to 1.6 times as fast, at 1.0 one pass was faster
# (`prototypes/measure_designs.py`); between them nothing was measured.
LEAST_BUSY = 0.7


def configuration_of(
    target: Architecture,
    head_dim: int,
    value_dim: int,
    key_count: int,
    mask: Mask,
    *,
    query_count: int | None = None,
    has_bias: bool = False,
    short_blocks: bool = False,
) -> Configuration:
    """The table's tilings under a mask (`tuning.configuration`). `query_count`: None,
    for as many as keys."""
    queries = key_count if query_count is None else query_count
    window = counted_window(mask, queries, key_count, has_bias=has_bias)
    return tuning.configuration(
        *(target, head_dim, value_dim, key_count),
        query_count=queries,
        is_causal=mask.is_causal,
        listed=has_bias or not visibility.is_static(mask),
        window=None if window is None else window.width,
        short_blocks=short_blocks,
    )


def counted_window(
    mask: Mask, query_count: int, key_count: int, *, has_bias: bool = False
) -> Band | None:
    """A window whose blocks kernels count by themselves, without lists of them."""
    return None if has_bias else visibility.window_of(mask, query_count, key_count)


def backward_of(
    query_shape: tuple[int, ...],
    value_shape: tuple[int, ...],
    target: Architecture,
    *,
    is_causal: bool,
    window: Band | None = None,
    listed: bool = False,
    soft_cap: float | None = None,
    inputs: NumberFormat = BF16,
    wanted: Backward | None = None,
) -> Backward:
    """The design for one device's arrays, [B, T, N, H] and [B, S, K, D].

    "fused" only where that kernel takes the problem: no mask but the causal one or, on
    Hopper, a `window` (`visibility.window_of`) and no bias (`listed`: anything else
    that takes lists of blocks), no soft cap, and `reason_against` of the target's
    kernel has nothing against the shapes. On Hopper on a card with as many
    multiprocessors as its rings are made for: on a smaller one (the PCIe H100) a ring's
    CTAs would wait for some that cannot start. On Ampere for BF16 inputs, whose dS is
    scaled. And, unless it is `wanted`, where it fills the card (`LEAST_SHARE`; on
    Ampere `LEAST_BUSY`, and a query sees many keys).
    """
    if wanted == "two_kernels" or listed or soft_cap is not None:
        return "two_kernels"
    if target == "ampere":
        if window is not None:
            return "two_kernels"
        return _ampere(query_shape, value_shape, is_causal, inputs, wanted)
    there = architecture.multiprocessors()
    if there is not None and there < architecture.H100_MULTIPROCESSORS:
        return "two_kernels"
    against = hopper_backward_fused.reason_against(
        query_shape, value_shape, is_causal=is_causal, window=window
    )
    if against is not None:
        return "two_kernels"
    if wanted == "fused":
        return "fused"
    shapes = Shapes.of(query_shape, value_shape)
    masked = is_causal or window is not None
    plan = tuning.fused(shapes.head_dim, shapes.key_count, is_causal=masked)
    shapes = shapes.in_parts(plan, is_causal=is_causal, window=window)
    ring = shapes.ring(plan, is_causal=is_causal, window=window)
    return "fused" if ring.share() >= LEAST_SHARE else "two_kernels"


def _ampere(
    query_shape: tuple[int, ...],
    value_shape: tuple[int, ...],
    is_causal: bool,
    inputs: NumberFormat,
    wanted: Backward | None,
) -> Backward:
    against = ampere_backward_fused.reason_against(
        query_shape, value_shape, is_causal=is_causal
    )
    if against is not None or inputs != BF16:
        return "two_kernels"
    if wanted == "fused":
        return "fused"
    seen = tuning.keys_seen(value_shape[1], is_causal=is_causal)
    if seen < LEAST_KEYS[query_shape[3]]:
        return "two_kernels"
    busy = busy_beside_two_kernels(query_shape, value_shape, is_causal=is_causal)
    return "fused" if busy >= LEAST_BUSY else "two_kernels"


def busy_beside_two_kernels(
    query_shape: tuple[int, ...], value_shape: tuple[int, ...], *, is_causal: bool
) -> float:
    """How busy Ampere's one-pass kernel keeps the card, over how busy two kernels do,
    which deal out tiles of each query head: 1 but for groups of heads."""
    batch, _, query_heads, _ = query_shape
    _, key_count, key_heads, _ = value_shape
    tiles = -(-key_count // ampere_backward_fused.KEY_TILE)
    multiprocessors = architecture.multiprocessors_or_a100s()
    one, two = (
        _busy(batch * heads, tiles, multiprocessors, is_causal)
        for heads in (key_heads, query_heads)
    )
    return one / two


def _busy(pairs: int, tiles: int, multiprocessors: int, is_causal: bool) -> float:
    """The share of the time in which multiprocessors have a tile. Each pair has tiles
    of equal work or, under a causal mask, of 1, 2, ..., `tiles`, the most first."""
    if not is_causal:
        evenly = pairs * tiles / multiprocessors
        return evenly / math.ceil(evenly)
    evenly = pairs * tiles * (tiles + 1) / 2 / multiprocessors
    return evenly / max(evenly, tiles)
