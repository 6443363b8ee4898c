"""The recipes of the forward sweeps, from one narrow step to all of them.

B: the whole row of logits at once. F: blocks of keys. Each keeps the logits S, the
probabilities P, the running maximum m, sum l and output O, and the factor c that
rescales the two, in FP32 or in the format under test (here BF16):

    eager_bf16          B1  S and P narrow, FP32 inside the softmax: PyTorch's eager
    jax_nn              B2  P narrow: jax.nn.dot_product_attention
    eager_op_by_op      B3  every tensor narrow, sums inside an operation FP32
    eager_chained       B4  as B3, and sums rounded after every term
    flash2              F1  P narrow: FlashAttention-2 and 3, cuDNN
    narrow_output       F2  P and O
    narrow_sum          F3  P, l and m
    flash2_op_by_op     F4  S, P, l, m, c and O
    flash1_paper        F5  as F4, O normalised at each step (FlashAttention-1)
    flash1_stored       F6  O normalised at each step; O, l and m narrow between blocks
    flash2_chained      F7  as F4, and sums rounded after every term
"""

import dataclasses

from attn_jax.formats import BF16, FP32, FP64, NumberFormat
from attn_jax.recipe import RECIPES, Recipe, Step

BASELINE = "eager_bf16"
_BF16, _FP32 = Step(BF16), Step(FP32)
_CHAIN = {
    "dot_accumulator": _BF16,
    "dot_chunk": 1,
    "rowsum_accumulator": _BF16,
}
# Loops over single keys, and long ones: each takes seconds where the others take none.
CHAINED = ("eager_chained", "flash2_chained")


def _named(name: str, recipe: str, **steps) -> Recipe:
    return dataclasses.replace(RECIPES[recipe], name=name, **steps)


VARIANTS: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        RECIPES["eager_bf16"],
        RECIPES["jax_nn"],
        RECIPES["eager_op_by_op"],
        _named("eager_chained", "eager_op_by_op", **_CHAIN),
        RECIPES["flash2"],
        _named("narrow_output", "flash2", product=_BF16, accumulator=_BF16),
        _named(
            "narrow_sum", "flash2", row_sum_of="rounded", row_max=_BF16, row_sum=_BF16
        ),
        RECIPES["flash2_op_by_op"],
        RECIPES["flash1_paper"],
        _named(
            "flash1_stored",
            "flash1_paper",
            logits=_FP32,
            shifted=_FP32,
            correction=_FP32,
        ),
        _named("flash2_chained", "flash2_op_by_op", **_CHAIN),
    )
}


def with_block(recipe: Recipe, block_kv: int) -> Recipe:
    """The recipe with another block of keys; one of whole rows stays as it is."""
    if recipe.block_kv is None:
        return recipe
    return dataclasses.replace(recipe, block_kv=block_kv)


def in_format(recipe: Recipe, fmt: NumberFormat) -> Recipe:
    """Every step that is BF16 in the recipe, and its inputs, in another format.

    In FP64 the steps that are FP32 become FP64 too: there is nothing wider.
    """
    changed = recipe.replace_format(BF16, fmt)
    if fmt != FP64:
        return changed
    return dataclasses.replace(changed.replace_format(FP32, FP64), carrier=FP64)
