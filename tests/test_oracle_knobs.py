"""Every knob of a recipe on random numbers, against the oracle of `test_oracle`.

Op by op, as in `test_oracle_steps`.
"""

import dataclasses

import pytest

from attn_jax.audit.inputs import make_inputs
from attn_jax.formats import BF16, E4M3FN, FP16, Rounding, number_format
from attn_jax.mask import Mask
from attn_jax.recipe import Step
from tests.oracle_inputs import SHAPE, SMALL, random_dlse
from tests.oracle_outcome import Outcome

pytestmark = pytest.mark.ci

_BF16 = Step(BF16)
_CAUSAL, _WINDOW = Mask(is_causal=True), Mask(window=(9, 3))
_OPEN = Mask()
KNOBS: dict[str, tuple[Mask, dict]] = {
    "exp2, scale on the logits": (_OPEN, dict(exponential="exp2", logits=_BF16)),
    "exp, scale in the exponent": (
        _CAUSAL,
        dict(scale_at="exponent", shifted=_BF16, row_max=_BF16, probability=_BF16),
    ),
    "scaled query": (
        _WINDOW,
        dict(scaled_query=_BF16, logits=_BF16, exponential="exp2", gradient=_BF16),
    ),
    "scaled query, unit in the exponent": (
        _CAUSAL,
        dict(
            scaled_query=Step(FP16, Rounding.TOWARD_ZERO),
            scale_at="exponent",
            exponential="exp2",
            gradient_scale_at="logits",
            dlogits_scale=4.0,
            dlogits=_BF16,
            dq_centre="mean",
        ),
    ),
    "reverse": (_CAUSAL, dict(kv_order="reverse", accumulator=_BF16, row_sum=_BF16)),
    "each step": (
        _WINDOW,
        dict(normalise="each_step", accumulator=_BF16, product=_BF16, row_sum=_BF16),
    ),
    "rescale threshold": (
        _OPEN,
        dict(rescale_threshold=1.0, exponential="exp2", accumulator=_BF16),
    ),
    "row sum of rounded": (_WINDOW, dict(row_sum_of="rounded", probability=_BF16)),
    "E4M3 saturating": (
        _OPEN,
        dict(
            probability=Step(E4M3FN.saturating()),
            probability_scale=256.0,
            rescale_threshold=2.0,
        ),
    ),
    "repeated maximum": (_OPEN, dict(repeated_max_factor=2.0, accumulator=_BF16)),
    "o": (_CAUSAL, dict(output=_BF16, dlogits=_BF16)),
    "o_hi_lo": (_CAUSAL, dict(output=_BF16, delta_source="o_hi_lo", dlogits=_BF16)),
    "o_hi_lo8": (_CAUSAL, dict(output=_BF16, delta_source="o_hi_lo8", dlogits=_BF16)),
    "o_f32": (_CAUSAL, dict(output=_BF16, delta_source="o_f32", dlogits=_BF16)),
    "p_dp": (_CAUSAL, dict(output=_BF16, delta_source="p_dp", dlogits=_BF16)),
    "centre mean": (_WINDOW, dict(dq_centre="mean", dlogits=_BF16)),
    "centre row": (_WINDOW, dict(dq_centre="row", dlogits=_BF16, probability=_BF16)),
    "centre keys": (_WINDOW, dict(dq_centre="keys", dlogits=_BF16)),
    "centre keys, FP16": (
        _CAUSAL,
        dict(
            inputs=FP16,
            dlogits=_BF16,
            dq_centre="keys",
            dq_dlogits=Step(FP16),
            gradient_scale_at="logits",
            dlogits_scale=4.0,
        ),
    ),
    "gradient scale on the logits": (
        _OPEN,
        dict(gradient_scale_at="logits", dlogits=_BF16, dq_centre="mean"),
    ),
    "scaled dS": (
        _OPEN,
        dict(dlogits=Step(FP16), dlogits_scale=1024.0, dq_accumulator=_BF16),
    ),
    "dS of dQ in FP16": (
        _WINDOW,
        dict(dlogits=_BF16, dq_dlogits=Step(FP16), dq_centre="row", probability=_BF16),
    ),
    "integers": (
        _CAUSAL,
        dict(
            inputs=BF16,
            dlogits=_BF16,
            dq_centre="keys",
            dq_dlogits=Step(FP16),
            dq_sum="integers",
        ),
    ),
    "gradient sums": (
        _CAUSAL,
        dict(dq_accumulator=_BF16, dk_accumulator=_BF16, dv_accumulator=_BF16),
    ),
    "gradients by query head": (
        _WINDOW,
        dict(group_gradient=_BF16, dk_accumulator=Step(FP16), dv_accumulator=_BF16),
    ),
    "gradients by query head, narrow sum": (
        _WINDOW,
        dict(group_gradient=_BF16, group_accumulator=_BF16),
    ),
    "toward zero": (
        _OPEN,
        dict.fromkeys(
            ("logits", "probability", "accumulator", "row_sum", "output", "dlogits"),
            Step(BF16, Rounding.TOWARD_ZERO),
        ),
    ),
    "chained sums": (
        _OPEN,
        dict(
            dot_accumulator=Step(number_format(8, 13)),
            rowsum_accumulator=Step(number_format(8, 11)),
            dot_chunk=8,
            output=_BF16,
        ),
    ),
    "polynomial": (
        _OPEN,
        dict(exponential="exp2_polynomial", exp2_degree=4, probability=_BF16),
    ),
    "ring, lse": (_CAUSAL, dict(ring_size=4, ring_partial=_BF16)),
    "ring, sigmoid": (
        _CAUSAL,
        dict(
            ring_size=4,
            ring_merge="sigmoid",
            ring_accumulator=_BF16,
            ring_gradient_partial=_BF16,
        ),
    ),
    "ring, carry_whole": (
        _CAUSAL,
        dict(
            ring_size=4,
            ring_merge="carry_whole",
            exponential="exp2",
            probability_scale=2.0**15,
            ring_accumulator=_BF16,
            ring_gradient_partial=_BF16,
        ),
    ),
    "ring, two_pass": (
        _OPEN,
        dict(
            ring_size=2,
            ring_merge="two_pass",
            ring_partial=_BF16,
            ring_gradient_accumulator=_BF16,
            dq_centre="row",
            dq_dlogits=Step(E4M3FN, Rounding.TOWARD_ZERO),
        ),
    ),
    "ring, by query head": (
        _CAUSAL,
        dict(ring_size=4, group_gradient=_BF16, ring_gradient_partial=Step(FP16)),
    ),
    "ring, scaled query": (
        _CAUSAL,
        dict(
            ring_size=2,
            ring_merge="two_pass",
            scaled_query=_BF16,
            ring_gradient_partial=_BF16,
            gradient=_BF16,
        ),
    ),
    "ring, own keys last": (
        _CAUSAL,
        dict(ring_size=4, ring_own_keys="last", ring_gradient_accumulator=_BF16),
    ),
    # In units of 2^-16, and dS in three bits.
    "ring, integers": (
        _OPEN,
        dict(
            ring_size=2,
            ring_gradient_partial=_BF16,
            dq_centre="keys",
            dq_dlogits=Step(E4M3FN),
            dq_sum="integers",
        ),
    ),
    "ring, centre keys": (
        _CAUSAL,
        dict(ring_size=4, ring_gradient_partial=_BF16, dq_centre="keys"),
    ),
}


# Op by op, a chain of chunks compiles a program for every shape in it.
_CHAINED = "chained sums"

# What is theirs alone another case has, too, here or in exact arithmetic.
_FURTHER_KNOBS = {"exp2, scale on the logits", "row sum of rounded", "E4M3 saturating"}
_FURTHER_KNOBS |= {"o", "o_hi_lo", "o_hi_lo8", "o_f32", "centre mean", "centre keys"}
_FURTHER_KNOBS |= {"gradient scale on the logits", "dS of dQ in FP16"}
_FURTHER_KNOBS |= {"ring, lse", "ring, centre keys", "ring, by query head"}
_FURTHER_KNOBS |= {"ring, two_pass", "gradients by query head"}


def _knob(name: str):
    marks = [pytest.mark.thorough] * (name in _FURTHER_KNOBS)
    return pytest.param(name, marks=marks)


@pytest.mark.parametrize("name", [_knob(name) for name in KNOBS if name != _CHAINED])
def test_every_knob_on_random_numbers(name):
    _check_knob(name, jit=False)


# In exact arithmetic chains are in test_oracle_steps.
@pytest.mark.thorough
@pytest.mark.usefixtures("fully_optimised")
def test_chained_sums_on_random_numbers():
    _check_knob(_CHAINED, jit=True)


def _check_knob(name: str, jit: bool) -> None:
    mask, changes = KNOBS[name]
    recipe = dataclasses.replace(SMALL, **changes)
    family = "repeated_max" if name == "repeated maximum" else "normal"
    if "centre keys" in name:
        family = "offset"  # Others hardly have a centre.
    inputs = make_inputs(family, 0, SHAPE)
    outcome = Outcome(recipe, inputs, random_dlse(SHAPE), mask=mask, jit=jit)
    outcome.check()
