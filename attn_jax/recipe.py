"""Recipes: an attention algorithm as data, every step with the format it is kept in.

A recipe is to the emulator what a tableau is to a Runge-Kutta solver. Kernels declare
theirs, and tests hold kernel and emulator together.
"""

import dataclasses
import math
from typing import Literal, get_args

from attn_jax.formats import BF16, FP32, FP64, NumberFormat, Rounding


@dataclasses.dataclass(frozen=True)
class Step:
    """The format in which the result of a step is kept, and how it gets there."""

    format: NumberFormat
    rounding: Rounding = Rounding.NEAREST_EVEN

    def __post_init__(self):
        if not (
            isinstance(self.format, NumberFormat)
            and isinstance(self.rounding, Rounding)
        ):
            raise ValueError(
                "Step takes a NumberFormat and a Rounding, such as Step(BF16), got "
                f"{self.format!r} and {self.rounding!r}"
            )


_BF16 = Step(BF16)
_FP32 = Step(FP32)
_FP64 = Step(FP64)


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What an attention kernel computes, step by step, forward and backward.

    Hashable, so it can be a static argument of `jax.jit`. With x = scale * (Q K^T), in
    base e or 2 after `exponential`, one block of keys is taken at a time:

        m' = max(m, rowmax x)   c = exp(m - m')     P = probability_scale * exp(x - m')
        l = c l + rowsum P      A = c A + P V       O = A / l,  LSE = m + log l

    backward, with dO the cotangent of O and dLSE that of LSE,

        P = exp(x - LSE)        dV = P^T dO         dP = dO V^T
        dS = P (dP - delta + dLSE)      dQ = scale dS K         dK = scale dS^T Q

    A `Step` field says in which format the named value is kept; the default, FP32, is
    the carrier's own format and rounds nothing.

    Inputs and forward:
      inputs              format of Q, K, V and dO; wider arrays are rounded to it
      carrier             FP32 or FP64 (needs x64): format of everything else
      dot_accumulator     the running sum inside a matrix product or a row sum, whose
                          operands are rounded before; it is rounded after every
                          `dot_chunk` products (None: once, at its end)
      block_q, block_kv   tile sizes, clamped to the length; None is the whole length
      loop_order          outer loop; q_outer or kv_outer
      kv_order            the order in which the blocks of keys are visited
      scale_at            scale on the logits, or folded into the exponential's argument
      exponential         exp, exp2, or a polynomial for exp2 of degree `exp2_degree`
      normalise           A / l once at the end, at each step (FlashAttention-1), or
                          P / l before the product (materialised softmax; one block)
      row_sum_of          l sums P unrounded, or rounded as the product's operand
      rescale_threshold   keep the old m while m' - m is at most this (in log2 units)
      repeated_max_factor Qiu & Yao's fix: if a row's maximum repeats, use
                          factor * m (m > 0) or 0 (m < 0); None leaves m alone
      logits, shifted     x (after the product and after the scale), and x - m'
      row_max, row_sum, correction     m, l, c
      exponentiated       exp(x - m), before the factor `probability_scale`
      probability         P as operand of P V, after that factor
      product             P V of one block
      accumulator         A, or O where normalised at each step
      output, lse         O and LSE as returned
    Backward:
      backward_block_q, backward_block_kv   tile sizes
      probability_from    exp(x - LSE), or the forward softmax again (exp(x - m) / l)
      softmax_probability P as factor of dS
      backward_probability    P as operand of P^T dO
      delta_source        o: rowsum(dO O) with O as returned; o_hi_lo: with O as a sum
                          of two 16-bit numbers, round(O) + round(O - round(O));
                          o_f32: with O in the carrier; p_dp: rowsum(P dP)
      delta, dprobability, dlogits     delta, dP, and dS as operand of its products
      dlogits_scale       power of two on dS before it is rounded, undone afterwards
      gradient_scale_at   scale on dS before it is rounded, or on dQ and dK at the end
      dq_centre           dQ -= (rowsum(rounded dS) - its exact value) centre, with
                          centre the mean of the keys that the row sees, or its own
                          sum_j P_ij K_j ("row"). In exact arithmetic it subtracts 0.
                          The mean does not help where a few equal keys share a row.
      dq_accumulator, dk_accumulator, dv_accumulator     the running sums
      gradient            dQ, dK, dV as returned
    Ring attention over `ring_size` devices:
      ring_partial, ring_accumulator                     O sent, and O merged
      ring_gradient_partial, ring_gradient_accumulator   the same for gradients
    """

    name: str
    source: str
    inputs: NumberFormat = BF16
    carrier: NumberFormat = FP32
    dot_accumulator: Step = _FP32
    dot_chunk: int | None = None
    block_q: int | None = 64
    block_kv: int | None = 64
    loop_order: Literal["q_outer", "kv_outer"] = "q_outer"
    kv_order: Literal["forward", "reverse"] = "forward"
    scale_at: Literal["logits", "exponent"] = "logits"
    exponential: Literal["exp", "exp2", "exp2_polynomial"] = "exp"
    exp2_degree: int | None = None
    normalise: Literal["once", "each_step", "before_product"] = "once"
    row_sum_of: Literal["unrounded", "rounded"] = "unrounded"
    rescale_threshold: float = 0.0
    repeated_max_factor: float | None = None
    logits: Step = _FP32
    shifted: Step = _FP32
    row_max: Step = _FP32
    row_sum: Step = _FP32
    correction: Step = _FP32
    exponentiated: Step = _FP32
    probability: Step = _BF16
    probability_scale: float = 1.0
    product: Step = _FP32
    accumulator: Step = _FP32
    output: Step = _BF16
    lse: Step = _FP32
    backward_block_q: int | None = 64
    backward_block_kv: int | None = 64
    probability_from: Literal["lse", "softmax"] = "lse"
    softmax_probability: Step = _FP32
    backward_probability: Step = _BF16
    delta_source: Literal["o", "o_hi_lo", "o_f32", "p_dp"] = "o"
    delta: Step = _FP32
    dprobability: Step = _FP32
    dlogits: Step = _BF16
    dlogits_scale: float = 1.0
    gradient_scale_at: Literal["logits", "epilogue"] = "epilogue"
    dq_centre: Literal["none", "mean", "row"] = "none"
    dq_accumulator: Step = _FP32
    dk_accumulator: Step = _FP32
    dv_accumulator: Step = _FP32
    gradient: Step = _BF16
    ring_size: int = 1
    ring_partial: Step = _FP32
    ring_accumulator: Step = _FP32
    ring_gradient_partial: Step = _FP32
    ring_gradient_accumulator: Step = _FP32

    def __post_init__(self):
        for field in dataclasses.fields(self):
            fault = _fault(field, getattr(self, field.name))
            if fault is not None:
                raise ValueError(
                    f"{field.name} must be {fault}, got {getattr(self, field.name)!r}"
                )
        if self.normalise == "before_product" and self.block_kv is not None:
            raise ValueError(
                "normalise='before_product' needs the whole row: set block_kv=None"
            )
        if self.probability_from == "softmax" and self.backward_block_kv is not None:
            raise ValueError(
                "probability_from='softmax' needs the whole row: set "
                "backward_block_kv=None"
            )
        if (self.exponential == "exp2_polynomial") != (self.exp2_degree is not None):
            raise ValueError(
                "exp2_degree goes with exponential='exp2_polynomial', and only with it"
            )

    def replace_format(self, old: NumberFormat, new: NumberFormat) -> "Recipe":
        """A copy with every step kept in `old`, and `inputs`, kept in `new` instead."""
        changes: dict = {
            field.name: dataclasses.replace(step, format=new)
            for field in dataclasses.fields(self)
            if isinstance(step := getattr(self, field.name), Step)
            and step.format == old
        }
        if self.inputs == old:
            changes["inputs"] = new
        return dataclasses.replace(self, **changes)

    def with_inputs(self, fmt: NumberFormat) -> "Recipe":
        """The same algorithm on inputs of another format: BF16 to FP16 and back.

        Every step that was kept in the old input format is kept in the new one.
        """
        return self.replace_format(self.inputs, fmt)


def _fault(field: dataclasses.Field, value) -> str | None:
    """What `value` should have been for a field of `Recipe`, or None if it will do."""
    if field.type in (Step, NumberFormat):
        kind = "a Step" if field.type is Step else "a NumberFormat"
        return None if isinstance(value, field.type) else kind
    choices = get_args(field.type)
    if choices and isinstance(choices[0], str):
        return None if value in choices else f"one of {', '.join(choices)}"
    if "block" in field.name or field.name == "dot_chunk":
        fits = value is None or (isinstance(value, int) and value >= 1)
        return None if fits else "a whole number of at least 1, or None"
    if field.name in ("probability_scale", "dlogits_scale"):
        if not 0 < value < math.inf:
            return "positive and finite"
    if field.name == "dlogits_scale" and math.frexp(value)[0] != 0.5:
        return "a power of two"  # So that undoing it is exact.
    if field.name == "rescale_threshold" and not 0 <= value < math.inf:
        return "finite and at least 0"
    return None


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
    source="the Pallas kernels of this package",
    block_q=64,
    backward_block_kv=64,
    delta_source="o_hi_lo",
    dq_centre="mean",
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
        EXACT_FP32,
        EXACT_FP64,
    )
}
