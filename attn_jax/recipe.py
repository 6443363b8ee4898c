"""The named recipes: published attention algorithms and kernels, each as data.

What a recipe means is defined in `recipe_schema.Recipe`. Kernels declare theirs, and
tests hold kernel and emulator together.
"""

import dataclasses
from typing import Literal, get_args

from attn_jax.formats import BF16, E4M3FN, FP16, FP32, FP64, Rounding
from attn_jax.recipe_schema import Recipe, Step

_BF16 = Step(BF16)
_FP32 = Step(FP32)

FLASH2 = Recipe(
    name="flash2",
    source="FlashAttention-2, arXiv 2307.08691, Algorithms 1 and 2; also the dataflow "
    "of FlashAttention-3 (arXiv 2407.08608) and cuDNN for 16-bit inputs",
    scale_at="exponent",
    exponential="exp2",
    block_q=128,
    block_kv=128,
    loop_order="q_outer",
    backward_block_q=64,
    backward_block_kv=128,
)

# The 2024 study kept every tensor of its PyTorch emulation in the format under test, so
# each step is rounded; products accumulate in FP32 inside one matrix product.
FLASH1_PAPER = Recipe(
    name="flash1_paper",
    source="FlashAttention, arXiv 2205.14135, Algorithms 1 and 4, as emulated step by "
    "step in one format by 'Is Flash Attention Stable?', arXiv 2405.02803",
    loop_order="kv_outer",
    normalise="each_step",
    row_sum_of="rounded",
    logits=_BF16,
    shifted=_BF16,
    row_max=_BF16,
    row_sum=_BF16,
    correction=_BF16,
    product=_BF16,
    accumulator=_BF16,
    lse=_BF16,
    softmax_probability=_BF16,
    delta=_BF16,
    dprobability=_BF16,
    dq_accumulator=_BF16,
    dk_accumulator=_BF16,
    dv_accumulator=_BF16,
)

FLASH2_OP_BY_OP = dataclasses.replace(
    FLASH1_PAPER,
    name="flash2_op_by_op",
    source="FlashAttention-2, arXiv 2307.08691, Algorithms 1 and 2, with every tensor "
    "of a step-by-step program in BF16, as flash1_paper has FlashAttention",
    loop_order="q_outer",
    normalise="once",
)

# The kernels walk the keys from the last block to the first. Tiles: head dim 128,
# causal (without a mask FlashAttention-3 takes 128 x 176).
FLASH3 = dataclasses.replace(
    FLASH2,
    name="flash3",
    source="FlashAttention-3, arXiv 2407.08608, Algorithm 1; tiles and order of keys "
    "from its Hopper kernels",
    kv_order="reverse",
)

# FP8 values of Q, K and V are BF16 numbers: the caller quantises them.
FLASH3_FP8 = dataclasses.replace(
    FLASH3,
    name="flash3_fp8",
    source="FlashAttention-3 in FP8, arXiv 2407.08608, section 3.3: P times 2^8 in "
    "E4M3, 128 x 224 tiles. It has no backward pass: that of flash3 stands in",
    block_kv=224,
    probability=Step(E4M3FN.saturating()),
    probability_scale=2.0**8,
)

FLASH4 = dataclasses.replace(
    FLASH3,
    name="flash4",
    source="FlashAttention-4, arXiv 2603.05451: m is renewed only where it grows by "
    "more than 8 (log2); exp2 by a cubic. Its kernels mix cubic and hardware exp2 in "
    "a row and use the hardware's alone in the backward pass; here all of P is made by "
    "the cubic in both passes, the largest effect that it can have",
    exponential="exp2_polynomial",
    exp2_degree=3,
    rescale_threshold=8.0,
    backward_block_q=128,
)

FLASH4_FP8 = dataclasses.replace(
    FLASH4,
    name="flash4_fp8",
    source="FlashAttention-4 in FP8 as mended in 2026 (flash-attention pull requests "
    "2694 and 2717): P times 2^4 in E4M3, rescaling threshold 4, the hardware's exp2. "
    "It has no backward pass: that of flash4, without the cubic, stands in",
    exponential="exp2",
    exp2_degree=None,
    rescale_threshold=4.0,
    probability=Step(E4M3FN.saturating()),
    probability_scale=2.0**4,
)

FLASH4_FP8_OFFSET8 = dataclasses.replace(
    FLASH4_FP8,
    name="flash4_fp8_offset8",
    source="FlashAttention-4 in FP8 before that: P times 2^8 under a threshold of 4 "
    "reaches 2^12, saturates at 448 in the product and counts in full in the row sum",
    probability_scale=2.0**8,
)

QIU_YAO = Recipe(
    name="qiu_yao",
    source="Qiu & Yao, arXiv 2510.04212, section 2 and their published emulation of "
    "FlashAttention-2: state in BF16, O rounded before it is divided by l. One block: "
    "they show that tiling plays no part. repeated_max_factor=2 is their cure",
    block_q=None,
    block_kv=None,
    logits=_BF16,
    row_max=_BF16,
    row_sum=_BF16,
    product=_BF16,
    accumulator=_BF16,
    backward_block_q=None,
    backward_block_kv=None,
)

EAGER_BF16 = Recipe(
    name="eager_bf16",
    source="softmax(Q K^T) V written out in PyTorch on BF16 tensors: each tensor in "
    "BF16, FP32 inside the softmax and its backward",
    block_q=None,
    block_kv=None,
    normalise="before_product",
    logits=_BF16,
    backward_block_q=None,
    backward_block_kv=None,
    probability_from="softmax",
    softmax_probability=_BF16,
    delta_source="p_dp",
    dprobability=_BF16,
    gradient_scale_at="logits",
)

EAGER_OP_BY_OP = dataclasses.replace(
    EAGER_BF16,
    name="eager_op_by_op",
    source="softmax(Q K^T) V with the softmax, too, written out operation by operation "
    "on BF16 tensors; FP32 only inside matrix products and sums",
    shifted=_BF16,
    row_max=_BF16,
    row_sum=_BF16,
    correction=_BF16,
    exponentiated=_BF16,
    product=_BF16,
    lse=_BF16,
    delta=_BF16,
)

JAX_NN = Recipe(
    name="jax_nn",
    source="jax.nn.dot_product_attention(implementation='xla') of JAX 0.11: logits and "
    "softmax in FP32, P in the input format; its transpose rounds dP and dS",
    block_q=None,
    block_kv=None,
    normalise="before_product",
    backward_block_q=None,
    backward_block_kv=None,
    probability_from="softmax",
    delta_source="p_dp",
    dprobability=_BF16,
    gradient_scale_at="logits",
)

ATTN_JAX = dataclasses.replace(
    FLASH2,
    name="attn_jax",
    source="the Pallas kernels of this package, backward pass in two kernels",
    block_q=64,
    backward_block_kv=64,
    delta_source="o_hi_lo8",
    dq_centre="mean",
    ring_own_keys="last",
)

# P of the forward product, and dS and K' of dQ, have more bits than the inputs.
ATTN_JAX_HOPPER = dataclasses.replace(
    ATTN_JAX,
    name="attn_jax_hopper",
    source="the Pallas kernels of this package for Hopper where they are "
    "differentiated, backward pass in one kernel",
    kv_order="reverse",
    probability=Step(FP16),
    probability_scale=2.0**15,
    dq_centre="keys",
    dq_dlogits=Step(FP16),
)

# P of the forward product stays in the inputs' format there.
ATTN_JAX_AMPERE = dataclasses.replace(
    ATTN_JAX,
    name="attn_jax_ampere",
    source="the Pallas kernels of this package for Ampere where they are "
    "differentiated, backward pass in one kernel",
    backward_block_kv=128,
    dq_centre="keys",
    dq_dlogits=Step(FP16),
    dq_sum="integers",
)

RING_FLASH_ATTN = dataclasses.replace(
    FLASH2,
    name="ring_flash_attn",
    source="zhuzilin/ring-flash-attention, ring_flash_attn_func: 16-bit partial "
    "results of FlashAttention-2, merged by a sigmoid of the LSEs, summed in FP32. A "
    "ring of 4: set ring_size",
    ring_size=4,
    ring_merge="sigmoid",
    ring_partial=_BF16,
    ring_gradient_partial=_BF16,
)

TE_RING = dataclasses.replace(
    FLASH3,
    name="te_ring",
    source="NVIDIA/TransformerEngine (PyTorch), point-to-point context parallelism "
    "in 16 bits: weights exp(LSE_h - LSE) once LSE is known; output, gradients summed "
    "in the input format. It deals two shares to a device, for balance; here one. A "
    "ring of 4: set ring_size",
    ring_size=4,
    ring_merge="two_pass",
    ring_partial=_BF16,
    ring_accumulator=_BF16,
    ring_gradient_partial=_BF16,
    ring_gradient_accumulator=_BF16,
)

EXACT_FP32 = Recipe(
    name="exact_fp32",
    source="FlashAttention-2 with every value in FP32",
    inputs=FP32,
    block_q=128,
    block_kv=128,
    probability=_FP32,
    output=_FP32,
    backward_probability=_FP32,
    dlogits=_FP32,
    gradient=_FP32,
)

EXACT_FP64 = dataclasses.replace(
    EXACT_FP32.replace_format(FP32, FP64),
    name="exact_fp64",
    source="FlashAttention-2 with every value in FP64",
    carrier=FP64,
)

RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        FLASH2,
        FLASH1_PAPER,
        EAGER_BF16,
        JAX_NN,
        ATTN_JAX,
        ATTN_JAX_HOPPER,
        ATTN_JAX_AMPERE,
        EXACT_FP32,
        EXACT_FP64,
        EAGER_OP_BY_OP,
        FLASH2_OP_BY_OP,
        FLASH3,
        FLASH3_FP8,
        FLASH4,
        FLASH4_FP8,
        FLASH4_FP8_OFFSET8,
        QIU_YAO,
        RING_FLASH_ATTN,
        TE_RING,
    )
}

Architecture = Literal["ampere", "hopper"]
# Products that one addition takes at once, and the bits it keeps below the largest.
_TENSOR_CORES: dict[Architecture, tuple[int, int]] = {
    "ampere": (8, 24),
    "hopper": (16, 25),
}


def on_tensor_cores(recipe: Recipe, architecture: Architecture) -> Recipe:
    """The recipe with the sums of its products as NVIDIA's tensor cores make them.

    dot(a, b) of 16-bit a and b takes 8 products at a time on Ampere and 16 on Hopper.
    They and the running sum are shifted to one exponent, the largest (of a product: the
    sum of its operands', not normalised), and what lies more than 24 (25) bits below it
    is cut off; the exact sum of the rest is cut off to FP32, toward zero. In a recipe:
    `dot_chunk` 8 (16), `dot_alignment` 24 (25), `dot_accumulator` FP32 toward zero, and
    `carrier` FP64, in which this is exact; so the emulator needs x64. Row sums are made
    by ordinary additions and stay as they are. Other operands (TF32, FP8) are summed
    with other numbers, which are not in here.

    Found by measurement, not documented by NVIDIA: Xie et al., MMA-Sim, arXiv
    2511.10909; Khattak & Mikaitis, arXiv 2512.07004.

    Raises ValueError for another architecture.
    """
    if architecture not in _TENSOR_CORES:
        raise ValueError(
            f"architecture must be one of {', '.join(get_args(Architecture))}, got "
            f"{architecture!r}"
        )
    chunk, alignment = _TENSOR_CORES[architecture]
    return dataclasses.replace(
        recipe,
        carrier=FP64,
        dot_accumulator=Step(FP32, Rounding.TOWARD_ZERO),
        dot_chunk=chunk,
        dot_alignment=alignment,
    )
