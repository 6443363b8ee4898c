"""Options that a recipe asks Hopper's kernels for: what they compute, what is refused.

In the interpreter. What they are compiled to is in `test_kernel_options_compiled`."""

import dataclasses
import re
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from attn_jax import RECIPES, dot_product_attention, emulator, reference
from attn_jax.audit.error import unit_error
from attn_jax.audit.inputs import Inputs, Shape, make_inputs
from attn_jax.bounds import bound
from attn_jax.formats import BF16, FP16
from attn_jax.kernels import architecture
from attn_jax.kernels.architecture import made_for
from attn_jax.kernels.attention import attention, declared_recipe, unsupported
from attn_jax.kernels.hopper_softmax import P_SCALE
from attn_jax.kernels.interpreter import interpreted
from attn_jax.kernels.tuning import Backward
from attn_jax.mask import Mask
from attn_jax.recipe import ATTN_JAX, FLASH2, FLASH4, QIU_YAO, Recipe
from attn_jax.recipe_schema import Step
from tests.bounds_outcome import errors, excess
from tests.child_process import in_child_process
from tests.test_residuals import equations

THOROUGH = pytest.mark.thorough
TIME_LIMIT = 120  # seconds; a case takes three to seven alone on a core
# ATTN_JAX has dS in the inputs' format for dQ, too.
NO_CURES = dict(dq_centre="none", delta_source="o")
ROW = dict(dq_centre="row", delta_source="p_dp")
HALF = Step(FP16)
FINE = dict(probability=HALF, probability_scale=P_SCALE)
KEYS = dict(dq_centre="keys", dq_dlogits=HALF)
MEAN = dict(dq_centre="mean", dq_dlogits=HALF)
INTEGERS = dict(dq_centre="keys", dq_dlogits=HALF, dq_sum="integers")
NONE = dict(dq_centre="none", dq_dlogits=HALF)


@dataclasses.dataclass(frozen=True)
class Case:
    """`changes`: of ATTN_JAX. `same`: the least share of bits that are the emulator's.
    `dquery`: the most units of it, None where there is no such promise. `twice`: keys
    of the first batch entry stand there twice. Fewer bits are the same with sinks, with
    which the emulator's maximum begins, and of finer steps.
    """

    name: str
    changes: dict[str, Any]
    family: str
    shape: Shape = Shape(1, 130, 130, 2, 1, 64)
    mask: Mask = Mask(is_causal=True)
    sinks: tuple[float, ...] | None = None
    backward: Backward | None = None
    dtype: str = "bfloat16"
    same: float = 1 - 2**-8
    dquery: float | None = 1.7
    twice: bool = False

    def __str__(self) -> str:
        return self.name

    @property
    def recipe(self) -> Recipe:
        inputs = ATTN_JAX.with_inputs(FP16) if self.dtype == "float16" else ATTN_JAX
        return dataclasses.replace(inputs, **self.changes)

    def inputs(self) -> Inputs:
        half = np.float16 if self.dtype == "float16" else ml_dtypes.bfloat16
        inputs = make_inputs(self.family, 0, self.shape, half)
        if self.twice:
            inputs.key[0] = inputs.key[0].repeat(2, axis=0)[: self.shape.key_length]
        return inputs

    def dlse(self) -> np.ndarray:
        rows = self.shape.batch, self.shape.heads, self.shape.query_length
        return np.random.default_rng(1).standard_normal(rows).astype(np.float32)

    def given(self) -> dict[str, Any]:
        """What kernels, emulator and reference are given besides."""
        sinks = None if self.sinks is None else jnp.array(self.sinks, jnp.float32)
        scale = self.shape.head_dim**-0.5
        return {"mask": self.mask, "sinks": sinks, "scale": scale}


class Results(NamedTuple):
    out: np.ndarray
    lse: np.ndarray
    dquery: np.ndarray
    dkey: np.ndarray
    dvalue: np.ndarray


def _results(attend, case: Case) -> Results:
    @jax.jit
    def both(query, key, value, dout, dlse):
        results, backward = jax.vjp(attend, query, key, value)
        return Results(*results, *backward((dout, dlse)))

    results = both(*case.inputs(), case.dlse())
    return Results(*(np.asarray(x) for x in results))


def kernels(case: Case, races: bool = False) -> Results:
    def attend(*qkv):
        options = {"recipe": case.recipe, "backward": case.backward}
        return attention(*qkv, **case.given(), **options)

    with made_for("hopper"), interpreted(detect_races=races):
        return _results(attend, case)


def _declared(case: Case) -> Recipe:
    shape = case.shape
    with made_for("hopper"):
        return declared_recipe(
            *(case.dtype, shape.head_dim, shape.key_length, case.mask),
            query_length=shape.query_length,
            backward=case.backward,
            recipe=case.recipe,
        )


def ids(length: int) -> np.ndarray:
    return (np.arange(length, dtype=np.int32) // 60)[None]


LONGER = Shape(1, 70, 330, 1, 1, 64)
CASES = [
    Case("row p_dp", ROW, "offset", Shape(1, 70, 100, 2, 1, 64)),
    Case("one pass, no cures", NO_CURES, "offset", backward="fused", dquery=None),
    # Keys and V that have means, here and there others: delta is as good as O.
    Case(
        "P in FP16",
        FINE | KEYS,
        "drift",
        Shape(1, 140, 330, 2, 1, 64),
        Mask(),
        dquery=1.3,
        same=0.98,
    ),
]
FURTHER = [
    Case("row p_dp, two tiles", ROW, "offset"),
    Case("keys o", dict(dq_centre="keys", delta_source="o"), "normal"),
    # P is not exactly 1 at a row's maximum, which delta has and dP has not.
    Case("lazy", dict(rescale_threshold=8.0), "wide", LONGER, Mask(), dquery=None),
    Case("mean p_dp", dict(delta_source="p_dp"), "uniform"),
    Case("none", NO_CURES, "offset", backward="two_kernels", dquery=None),
    Case("none fp16 dS", NONE, "normal", backward="fused", dquery=1.1),
    Case("keys fp16 dS p_dp", dict(dq_centre="keys", dq_dlogits=HALF)
         | dict(delta_source="p_dp"), "offset", dquery=1.1),
    Case("fp16 none", dict(dq_centre="none"), "normal", backward="fused",
         dtype="float16", same=0.98),
    Case("fp16 keys", dict(dq_centre="keys"), "offset", dtype="float16", same=0.98),
    Case("row, documents, sinks", ROW, "offset", Shape(1, 150, 200, 2, 1, 64),
         Mask(query_segment_ids=ids(150), key_value_segment_ids=ids(200)),
         sinks=(0.5, 2.0), same=0.97),
    Case("lazy, window, sinks", dict(rescale_threshold=1.0, dq_centre="row"), "normal",
         Shape(1, 150, 290, 2, 1, 64), Mask(window=(64, 0)), sinks=(1.5, -2.0)),
    Case("P in FP16, documents, sinks", FINE, "normal", Shape(1, 150, 200, 2, 1, 64),
         Mask(query_segment_ids=ids(150), key_value_segment_ids=ids(200)),
         sinks=(0.5, 2.0), same=0.95),
    Case("P in FP16, row", FINE | ROW, "repeated_max", same=0.98),
    Case("P in FP16, repeated", FINE | ROW | dict(repeated_max_factor=2.0),
         "repeated_max", LONGER, Mask(), same=0.98),
    Case("lazy and repeated", dict(rescale_threshold=4.0, repeated_max_factor=1.5)
         | ROW, "wide", LONGER, Mask(), sinks=(0.5,), same=0.98),

]  # fmt: skip


@pytest.mark.parametrize(
    "case",
    CASES + [pytest.param(case, marks=pytest.mark.thorough) for case in FURTHER],
    ids=str,
)
def test_kernels_follow_their_recipe_under_options(case):
    check(case)


def check(case: Case) -> None:
    """The emulator's bits but for the order of additions (as said in
    tests/test_kernels_interpret.py), its errors, within the bounds."""
    results = in_child_process(kernels, case, seconds=TIME_LIMIT)
    recipe = _declared(case)
    assert {k: getattr(recipe, k) for k in case.changes} == case.changes
    emulated = _results(
        lambda *qkv: emulator.attention(*qkv, recipe=recipe, **case.given()), case
    )
    arguments = *case.inputs(), case.dlse()
    golden = reference.golden(*arguments, **case.given())
    fmt = FP16 if case.dtype == "float16" else BF16
    for name in ("out", "dquery", "dkey", "dvalue"):
        got, predicted = getattr(results, name), getattr(emulated, name)
        assert np.mean(got == predicted) >= case.same, name
        exact = getattr(golden, name)
        units = unit_error(got, exact, fmt)
        assert abs(units - unit_error(predicted, exact, fmt)) <= 0.03, name
        bar = {"dquery": case.dquery, "dkey": None}.get(name, 1.7)
        assert bar is None or units <= bar, name
    found = {k: np.asarray(v, np.float64) for k, v in results._asdict().items()}
    limits = bound(recipe, *arguments, **case.given())
    assert max(excess(errors(found, golden), limits).values()) <= 1


def _forward(case: Case):
    def attend(*qkv):
        return attention(*qkv, **case.given(), recipe=case.recipe)

    with made_for("hopper"), interpreted():
        return jax.device_get(jax.jit(attend)(*case.inputs()[:3]))


def _emulated(case: Case):
    def attend(*qkv):
        return emulator.attention(*qkv, recipe=_declared(case), **case.given())

    return jax.device_get(jax.jit(attend)(*case.inputs()[:3]))


@pytest.mark.parametrize(
    ("changes", "family"),
    [
        (dict(rescale_threshold=8.0), "wide"),
        (dict(repeated_max_factor=2.0), "repeated_max"),
    ],
    ids=str,
)
def test_the_maximum_is_the_recipes(changes, family):
    """Of the first family maxima grow by less than 8 from block to block as well as by
    more; two keys of the second share it. LSE, which has m in it, is the emulator's to
    its last bits."""
    case = Case("", changes, family, LONGER, Mask())
    out, lse = in_child_process(_forward, case, seconds=TIME_LIMIT)
    want, want_lse = _emulated(case)
    assert np.mean(out == want) >= case.same
    np.testing.assert_allclose(lse, want_lse, rtol=2.0**-21)
    plain = dataclasses.replace(case, changes={})
    assert np.mean(out == _emulated(plain)[0]) < case.same
    golden = reference.golden(*case.inputs(), **case.given())
    assert unit_error(out, golden.out, BF16) <= 1.7


@pytest.mark.thorough
def test_what_a_factor_leaves_nothing_of_is_zero():
    """Logits near -130 where the maximum repeats and is taken for 0."""
    of = dict(repeated_max_factor=2.0), "lse-130", Shape(2, 70, 330, 1, 1, 64), Mask()
    case = Case("", *of, twice=True)
    results = in_child_process(kernels, case, seconds=TIME_LIMIT)
    gone = np.isneginf(results.lse)
    # Without that maxima repeat by chance.
    assert gone[0].all() and gone[1].mean() < 0.1
    assert all(np.isfinite(x.astype(np.float32)).all() for x in results[2:])
    assert not results.out.swapaxes(1, 2)[gone].any()
    assert not results.dquery.swapaxes(1, 2)[gone].any()


@pytest.mark.thorough
@pytest.mark.parametrize("case", [*CASES, FURTHER[-1]], ids=str)
def test_no_races_under_options(case):
    in_child_process(kernels, case, True, seconds=TIME_LIMIT)


# ------------------------------------------------------------- what runs, and refusals


def _kernel_names(changes: dict | None, backward=None, out_dtype=None) -> list[str]:
    query = jax.ShapeDtypeStruct((1, 256, 2, 64), jnp.bfloat16)
    recipe = None if changes is None else dataclasses.replace(ATTN_JAX, **changes)

    def attend(x):
        options = {"backward": backward, "out_dtype": out_dtype, "recipe": recipe}
        return jax.vmap(
            lambda x: attention(x[None], x[None], x[None], scale=0.125, **options)[0]
        )(x)

    def gradient(x):
        out, backward = jax.vjp(attend, x)
        return backward(out)

    jaxpr = jax.make_jaxpr(gradient)(query)
    names = [str(e.params.get("name", "")) for e in equations(jaxpr.jaxpr)]
    prefix = "attention_"
    names = [n.removeprefix(prefix) for n in names if n.startswith(prefix)]
    return [n.removeprefix("backward_") for n in names]


@pytest.mark.parametrize(
    ("changes", "backward", "kernels"),
    [
        (
            None,
            "fused",
            ["key_numbers", "forward", "row_sums", "fused", "query_gradient"],
        ),
        (None, None, ["key_numbers", "forward", "row_sums", "dq", "dkv"]),
        ({}, None, ["forward", "row_sums", "dq", "dkv"]),
        (
            dict(dq_centre="keys"),
            None,
            ["key_numbers", "forward", "row_sums", "fused", "query_gradient"],
        ),
        (NO_CURES, "fused", ["forward", "row_sums", "fused", "query_gradient"]),
        pytest.param(
            NO_CURES, None, ["forward", "row_sums", "dq", "dkv"], marks=THOROUGH
        ),
        (
            NONE,
            "fused",
            ["key_numbers", "forward", "row_sums", "fused", "query_gradient"],
        ),
        (NONE, None, ["key_numbers", "forward", "row_sums", "dq", "dkv"]),
        (MEAN, None, ["key_numbers", "forward", "row_sums", "dq", "dkv"]),
        (ROW, None, ["forward", "delta", "forward", "dq", "dkv"]),
        (
            NO_CURES | dict(delta_source="p_dp"),
            "fused",
            ["forward", "delta", "fused", "query_gradient"],
        ),
    ],
)
def test_options_choose_the_kernels(changes, backward, kernels):
    with made_for("hopper"):
        assert _kernel_names(changes, backward) == kernels


def test_a_byte_of_out_is_kept_for_both_parts_alone():
    query = jax.ShapeDtypeStruct((1, 256, 2, 64), jnp.bfloat16)

    def kept(source):
        recipe = dataclasses.replace(ATTN_JAX, delta_source=source)

        def pullback(*qkv):
            return jax.vjp(lambda *x: attention(*x, scale=0.1, recipe=recipe), *qkv)[1]

        arrays = jax.tree.leaves(jax.eval_shape(pullback, query, query, query))
        return sorted((x.shape, x.dtype.name) for x in arrays)

    assert kept("o") == kept("p_dp")
    byte = (1, 256, 2, 64), "int8"
    assert kept("o_hi_lo8") == sorted([*kept("o"), byte])


SHORT = Mask(key_value_lengths=np.array([7], np.int32))


@pytest.mark.parametrize(
    ("recipe", "options", "message"),
    [
        (
            FLASH4,
            {},
            "'flash4' on 'pallas': exponential='exp2_polynomial', but .*'exp2'",
        ),
        (QIU_YAO, {}, "scale_at='logits'.*'exponent'"),
        (FLASH2, {}, None),
        (dataclasses.replace(FLASH2, ring_size=2), {}, "ring_size=2.* have 1"),
        (dict(delta_source="o_f32"), {}, "delta_source='o_f32'.*'o_hi_lo8' or 'o' or"),
        (dict(delta_source="o_hi_lo"), {}, "delta_source='o_hi_lo', but .*'o_hi_lo8'"),
        (dict(dq_dlogits=Step(BF16)), {}, "dq_dlogits=Step.bf16.*None or Step.fp16"),
        (dict(dq_dlogits=HALF), {}, None),
        (dict(group_gradient=Step(BF16)), {}, "group_gradient=Step.bf16.*have None"),
        (MEAN, {"mask": SHORT, "soft_cap": 3.0}, None),
        (MEAN, {"backward": "fused"}, "dq_centre='mean', but backward='fused' does"),
        (dict(dq_centre="keys"), {}, None),
        (dict(dq_centre="keys"), {"mask": SHORT}, "one-pass kernel's.*does not take"),
        (dict(dq_centre="keys"), {"soft_cap": 3.0}, "one-pass kernel's"),
        (dict(dq_centre="keys"), {"backward": "two_kernels"}, "backward='two_kernels'"),
        (dict(dq_centre="row"), {"backward": "fused"}, "backward='fused' does not"),
        (dict(dq_centre="none"), {"backward": "fused"}, None),
        (NONE, {"mask": SHORT}, None),
        (dict(dq_centre="row"), {"mask": SHORT, "soft_cap": 3.0}, None),
        (FINE, {"mask": SHORT, "soft_cap": 3.0}, None),
        (dict(probability=HALF), {}, "fp16.*have.*bf16.*, or .*_scale 32768.0"),
        (dict(probability_scale=2.0), {}, "probability_scale=2.0.*1.0, or probability"),
        (FINE | dict(rescale_threshold=8.0), {}, "rescale_threshold=8.0.*needs 0"),
        (ATTN_JAX.with_inputs(FP16), {}, "inputs=fp16.*bf16"),
    ],
)
def test_what_kernels_lack_is_refused_in_one_line(recipe, options, message):
    if isinstance(recipe, dict):
        recipe = dataclasses.replace(ATTN_JAX, **recipe)
    query = jnp.zeros((1, 256, 2, 64), jnp.bfloat16)
    with made_for("hopper"):
        reason = unsupported(query, query, query, recipe=recipe, **options)
    if message is None:
        assert reason is None
    else:
        assert re.search(message, reason) and "\n" not in reason


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (NO_CURES, ["forward", "row_sums", "dq", "dkv"]),
        (
            INTEGERS,
            [
                *("forward", "row_sums", "key_parts", "key_numbers"),
                *("clear", "fused", "query_gradient"),
            ],
        ),
        (
            dict(INTEGERS, dq_dlogits=None, dq_sum="numbers"),
            "dq_dlogits=None, but .*Ampere have Step.fp16.* with dq_centre 'keys'",
        ),
        (dict(INTEGERS, dq_sum="numbers"), "dq_sum='numbers', but .*'integers' with"),
        (dict(dq_centre="row"), "dq_centre='row', but the kernels for Ampere have"),
        (dict(delta_source="p_dp"), "delta_source='p_dp'.*Ampere"),
        (MEAN, "dq_dlogits=Step.fp16.*with dq_centre 'keys', and only with it"),
        (dict(rescale_threshold=8.0), "rescale_threshold=8.0.*Ampere have 0.0"),
        (FINE, "probability=Step.fp16.*Ampere have Step.bf16"),
        (dict(repeated_max_factor=2.0), "repeated_max_factor=2.0.*Ampere have None"),
    ],
    ids=str,
)
def test_ampere_has_fewer_options(changes, message):
    with made_for("ampere"):
        if isinstance(message, list):
            assert _kernel_names(changes) == message
            return
        with pytest.raises(NotImplementedError, match=message) as error:
            _kernel_names(changes)
    assert "\n" not in str(error.value)


def test_users_ask_by_a_recipe(monkeypatch):
    device = SimpleNamespace(compute_capability="9.0", device_kind="some GPU")
    monkeypatch.setattr(architecture, "default_device", lambda: device)
    query = jax.ShapeDtypeStruct((1, 128, 2, 64), jnp.bfloat16)

    def attend(recipe, implementation="pallas"):
        options = {"implementation": implementation, "recipe": recipe}
        return jax.eval_shape(
            lambda q: dot_product_attention(q, q, q, **options), query
        )

    row = dataclasses.replace(RECIPES["attn_jax"], dq_centre="row")
    assert attend(row).shape == query.shape
    with pytest.raises(NotImplementedError, match="exp2_polynomial"):
        attend(FLASH4)
    with pytest.raises(ValueError, match="'emulated' or 'pallas'"):
        attend(row, "xla")
