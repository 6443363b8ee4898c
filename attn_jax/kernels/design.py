"""How gradients are made: all in one pass, or dQ by a kernel of its own."""

from attn_jax.kernels import (
    architecture,
    hopper_backward_fused,
    ring_order,
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
# of one (`Shapes.in_parts`). On an H200, where each was in one CTA, two
# kernels were 1.07 to 1.5 times as fast at shares to 0.485, one pass 1.06 to 1.12 times
# at 0.71 to 0.81 (`prototypes/measure_designs.py`); between them nothing was measured.
LEAST_SHARE = 0.5


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
    wanted: Backward | None = None,
) -> Backward:
    """The design for one device's arrays, [B, T, N, H] and [B, S, K, D].

    "fused" only where that kernel takes the problem: on Hopper, no mask but the causal
    one or a `window` (`visibility.window_of`) and no bias (`listed`: anything else that
    takes lists of blocks), no soft cap, and `hopper_backward_fused.reason_against` has
    nothing against the shapes; on a card with as many multiprocessors as its rings are
    made for. On a smaller one (the PCIe H100) a ring's CTAs would wait for some that
    cannot start. And, unless it is `wanted`, where it fills the card (`LEAST_SHARE`).
    """
    if target != "hopper" or wanted == "two_kernels" or listed or soft_cap is not None:
        return "two_kernels"
    there = architecture.multiprocessors()
    if there is not None and there < ring_order.MULTIPROCESSORS:
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
    return "fused" if ring.share(shapes.pairs) >= LEAST_SHARE else "two_kernels"
