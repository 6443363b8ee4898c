"""dK and dV that each query head of a group rounds before they are added up."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from attn_jax import emulator, on_tensor_cores
from attn_jax.audit.inputs import Inputs, Shape, make_inputs
from attn_jax.bounds import bound
from attn_jax.formats import BF16, E4M3FN, E5M2, FP16, FP32, Rounding
from attn_jax.recipe import EXACT_FP32, Step
from attn_jax.reference import golden
from tests.bounds_outcome import computed, errors, excess
from tests.oracle_inputs import BLOCKS, SMALL, random_dlse
from tests.oracle_outcome import FIELDS, Outcome

pytestmark = pytest.mark.ci

THOROUGH = pytest.mark.thorough
_BF16 = Step(BF16)
EIGHTS = dict.fromkeys(BLOCKS, 8)
# Query and key heads, and changes.
CASES: dict[str, tuple[int, int, dict]] = {
    "one head": (1, 1, {}),
    "no groups, ring": (
        3,
        3,
        dict(ring_size=2, ring_merge="carry", ring_gradient_partial=_BF16),
    ),
    "three": (3, 1, dict(backward_block_kv=None, backward_block_q=5)),
    "two of two": (4, 2, dict(gradient_scale_at="logits", dlogits_scale=8.0)),
    "eight, narrow sums": (
        8,
        1,
        dict(dk_accumulator=_BF16, dv_accumulator=Step(FP16)),
    ),
    "two of two, ring": (4, 2, dict(ring_size=2, ring_merge="carry")),
    "five, summed in 16 bits": (5, 1, dict(group_accumulator=_BF16)),
    "three, summed in 8 bits": (3, 1, dict(group_accumulator=Step(E5M2))),
    "four, ring, summed in 16 bits": (
        4,
        1,
        dict(ring_size=2, ring_merge="carry", group_accumulator=Step(FP16)),
    ),
    "four, ring": (
        4,
        1,
        dict(ring_size=4, ring_merge="carry", ring_gradient_partial=Step(FP16)),
    ),
}


ALWAYS = "three", "four, ring", "five, summed in 16 bits"


@pytest.mark.parametrize(
    "name",
    [pytest.param(x, marks=[pytest.mark.thorough] * (x not in ALWAYS)) for x in CASES],
)
def test_every_bit_is_the_oracle_s(name, x64):
    """Sums of cut addends leave no freedom: all results are one number. With a key head
    for each query head they are those without the field: rounding twice is once."""
    heads, key_heads, changes = CASES[name]
    settings = EIGHTS | dict(dot_chunk=4, output=_BF16, gradient=_BF16, dlogits=_BF16)
    base = on_tensor_cores(SMALL, "hopper")
    base = dataclasses.replace(base, dot_alignment=10, **(settings | changes))
    shape = Shape(1, 16, 24, heads, key_heads, 8)
    inputs, dlse = make_inputs("normal", 0, shape), random_dlse(shape)
    apart = dataclasses.replace(base, group_gradient=_BF16)
    outcome, plain = (Outcome(recipe, inputs, dlse) for recipe in (apart, base))
    outcome.check_bits(FIELDS)
    for field in FIELDS:
        differs = (plain.got[field] != outcome.got[field]).any()
        assert differs == (field in ("dkey", "dvalue") and heads > key_heads), field


@pytest.mark.parametrize("ring_size", [1, 4])
def test_in_the_carrier_it_is_another_order_of_additions(ring_size):
    inputs = make_inputs("normal", 0, Shape(1, 32, 48, 8, 2, 16))
    inputs = Inputs(*(np.asarray(x, np.float32) for x in inputs))
    base = dataclasses.replace(SMALL, **EIGHTS, ring_size=ring_size)
    recipes = (
        dataclasses.replace(base, group_gradient=step)
        for step in (None, Step(FP32), _BF16)
    )
    one, other, rounded = (computed(recipe, inputs, jit=True) for recipe in recipes)
    sizes = absolute_terms(inputs)
    # In either order a sum of n terms, in FP32, is off by n 2^-24 of their sizes. Those
    # of dS, over head dims and keys, come before it; exp and the hops add a few.
    n = 4 * 32 + 2 * (16 + 48) + 16
    for name in ("dkey", "dvalue"):
        limit = 2 * n * 2.0**-24 * sizes[name]
        assert (np.abs(one[name] - other[name]) <= limit).all()
        assert (np.abs(one[name] - rounded[name]) > limit).any()


def absolute_terms(inputs: Inputs) -> dict[str, np.ndarray]:
    """The sizes of all that dK and dV add up, [B, S, K, H]: with absolute values for
    the inputs but in P, and sums for differences."""
    q, k, v, do = (x.astype(np.float64) for x in inputs)
    (B, S, K, H), G = k.shape, q.shape[2] // k.shape[2]
    k, v = (np.repeat(x, G, axis=2) for x in (k, v))
    p = np.exp(np.einsum("btnh,bsnh->bnts", q, k) * H**-0.5)
    p /= p.sum(-1, keepdims=True)
    q, v, do = np.abs(q), np.abs(v), np.abs(do)
    dp = np.einsum("btnh,bsnh->bnts", do, v)
    ds = p * (dp + (p * dp).sum(-1, keepdims=True)) * H**-0.5

    def over_group(terms, factors):
        each = np.einsum("bnts,btnh->bsnh", terms, factors)
        return each.reshape(B, S, K, G, H).sum(3)

    return {"dkey": over_group(ds, q), "dvalue": over_group(p, do)}


@pytest.mark.parametrize(
    ("step", "ring_size"),
    [
        pytest.param(_BF16, 4, id="bf16-4"),
        pytest.param(Step(BF16, Rounding.TOWARD_ZERO), 1, id="toward zero-1"),
        pytest.param(Step(E4M3FN.saturating()), 1, id="e4m3-1"),
        *(
            pytest.param(step, ring_size, id=f"{name}-{ring_size}", marks=THOROUGH)
            for name, step, ring_size in (
                ("bf16", _BF16, 1),
                ("toward zero", Step(BF16, Rounding.TOWARD_ZERO), 4),
                ("e4m3", Step(E4M3FN.saturating()), 4),
            )
        ),
    ],
)
def test_its_roundings_are_bounded_and_need_their_term(step, ring_size):
    """In an otherwise exact recipe they are all the error."""
    inputs = make_inputs("normal", 0, Shape(1, 24, 20, 4, 1, 16))
    plain = dataclasses.replace(EXACT_FP32, ring_size=ring_size)
    recipe = dataclasses.replace(plain, group_gradient=step)
    found = errors(computed(recipe, inputs, jit=True), golden(*inputs))
    for kind in ("deterministic", "probabilistic"):
        worst = excess(found, bound(recipe, *inputs, kind=kind, confidence=0.9999))
        assert max(worst.values()) <= 1, (kind, worst)
        assert min(worst["dkey"], worst["dvalue"]) > 0.2, (kind, worst)
        worst = excess(found, bound(plain, *inputs, kind=kind, confidence=0.9999))
        assert min(worst["dkey"], worst["dvalue"]) > 1, (kind, worst)


def test_a_sum_in_16_bits_is_no_longer_a_program_for_more_heads():
    """Written out XLA took twice as long to compile it with each head, from 20 on."""
    recipe = dataclasses.replace(
        EXACT_FP32, group_gradient=_BF16, group_accumulator=_BF16
    )

    def gradients(*qkv):
        attend = functools.partial(emulator.attention, recipe=recipe)
        out, pullback = jax.vjp(lambda *qkv: attend(*qkv)[0], *qkv)
        return pullback(out)

    def length(heads: int) -> int:
        shapes = (1, 8, heads, 16), (1, 8, 1, 16), (1, 8, 1, 16)
        qkv = [jax.ShapeDtypeStruct(shape, "float32") for shape in shapes]
        return jax.jit(gradients).lower(*qkv).as_text().count("stablehlo.")

    assert length(24) == length(3)
