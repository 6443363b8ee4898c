"""Targets of an audit: how they are found and called, and what is said of bad ones."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_jax import reference
from attn_jax.audit.inputs import Shape
from attn_jax.audit.measure import Runner, measured
from attn_jax.audit.problem import MASKS, Problem
from attn_jax.audit.target import Adapter, Target, TargetError, resolve

SHAPE = Shape(2, 24, 40, 4, 2, 16)
LOG_2 = float(np.log(2.0))


def problem(mask: str = "full", **changes) -> Problem:
    return Problem(SHAPE, mask=mask, **changes)


def outcome(target: Target, problem: Problem, **options):
    attend = target.attend(problem.rules, scale=problem.scale)
    return Runner(attend, **options)(problem)


def exact(query, key, value, *, scale, mask=None, is_causal=False):
    """out and LSE [B, N, T]."""
    rules = reference.Mask(is_causal=is_causal, dense=mask)
    return reference.attention(query, key, value, scale=scale, mask=rules)


def jax_nn_like(query, key, value, bias=None, mask=None, *, scale=None, **more):
    return jax.nn.dot_product_attention(
        query, key, value, bias, mask, scale=scale, implementation="xla", **more
    )


def heads_first(q, k, v, sm_scale, causal=False):
    q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    out, lse = exact(q, k, v, scale=sm_scale, is_causal=causal)
    return out.swapaxes(1, 2), lse / LOG_2


def packed(qkv):
    query, key, value = (qkv[:, :, i] for i in range(3))
    return exact(query, key, value, scale=query.shape[-1] ** -0.5)[0]


def unscaled(query, key, value, mask=None, bias=None):
    rules = reference.Mask(dense=mask)
    return reference.attention(query, key, value, bias=bias, scale=1.0, mask=rules)[0]


ADAPTED = {
    "jax.nn": Target("jax.nn", jax_nn_like),
    "heads first": Target(
        "heads first",
        heads_first,
        Adapter(
            layout="BNTH",
            scale="positional",
            lse="always",
            lse_layout="BNT",
            lse_base="2",
            renamed={"is_causal": "causal"},
        ),
    ),
    "scaled outside": Target("unscaled", unscaled, Adapter(scale="outside")),
}


@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("name", ADAPTED)
def test_functions_are_called_as_they_want_it(name, mask):
    """A wrong layout, scale or base would be off by far more than two roundings: one
    of `outside`, of a query times a power of two, is exact."""
    here = problem(mask)
    found = outcome(ADAPTED[name], here)
    assert found.status == "measured" and not found.no_gradients, found
    assert ("lse" in found.results) == (name != "scaled outside")
    for tensor, m in measured(here, found.results).items():
        # LSE is measured in roundings of FP32, and in base 2 it is rounded once more.
        assert m.errors.units <= (4 if tensor == "lse" else 1.9), tensor


def test_one_packed_array_is_taken_where_lengths_are_equal():
    target = Target("packed", packed, Adapter(packed=True))
    assert outcome(target, problem()).status == "not taken"
    here = Problem(Shape(1, 24, 24, 2, 2, 16))
    found = measured(here, outcome(target, here).results)
    assert max(m.errors.units for m in found.values()) <= 1.1


@pytest.mark.parametrize("mask", MASKS)
def test_masks_reach_a_function_by_whatever_argument_it_has(mask):
    """Those of jax.nn's have one each, but for segment ids; another has an array."""
    here = problem(mask)
    for target in (resolve("xla"), Target("array", unscaled, Adapter(scale="outside"))):
        found = outcome(target, here)
        assert found.status == "measured", found
        errors = measured(here, found.results)
        assert errors["out"].errors.units < 2


@pytest.mark.parametrize("mask", ["full", "causal", "lengths"])
def test_a_required_causal_is_always_given(mask):
    def required(query, key, value, causal, *, scale, mask=None):
        assert isinstance(causal, bool)
        return exact(query, key, value, scale=scale, is_causal=causal, mask=mask)[0]

    target = Target("required", required, Adapter(renamed={"is_causal": "causal"}))
    found = outcome(target, problem(mask))
    assert found.status == "measured", found
    assert measured(problem(mask), found.results)["out"].errors.units < 1.1


def test_how_masks_are_passed_is_known():
    lengths = "query_seq_lengths and key_value_seq_lengths"
    ours = dict(causal="is_causal", window="local_window_size", lengths=lengths)
    ours |= dict(full="", packed="an array (mask)", bias="bias")
    arrays = dict.fromkeys(MASKS, "an array (mask)") | dict(full="", bias="bias")
    renamed = dict.fromkeys(MASKS, "") | dict(causal="causal")
    for target, said_by in (
        (resolve("xla"), ours),
        (ADAPTED["scaled outside"], arrays),
        (ADAPTED["heads first"], renamed),
    ):
        assert {mask: target.said_by(mask) for mask in MASKS} == said_by


def test_any_name_may_be_given_to_who_takes_all():
    adapter = Adapter(renamed={"is_causal": "causal"})
    Target("all", lambda q, k, v, **more: q, adapter).check_renamed()


def test_what_a_function_has_no_argument_for_is_not_taken():
    def bare(query, key, value):
        return unscaled(query, key, value)

    target = Target("bare", bare, Adapter(scale="outside"))
    found = outcome(target, problem("packed"))
    assert found.status == "not taken"
    assert "query_segment_ids" in found.reason and "mask" in found.reason
    assert outcome(target, problem()).status == "measured"


def test_a_bias_is_an_argument_and_has_a_gradient():
    def shifted(query, key, value, logits_shift=None, scale=None):
        return jax_nn_like(query, key, value, logits_shift, scale=scale)

    renamed = Adapter(renamed={"bias": "logits_shift"})
    for target in (ADAPTED["jax.nn"], Target("renamed", shifted, renamed)):
        here = problem("bias")
        found = outcome(target, here)
        assert found.status == "measured" and not found.no_gradients, found
        assert found.results["dbias"].shape == (1, 4, 24, 40)
        assert found.results["dbias"].dtype == jnp.bfloat16
        errors = measured(here, found.results)
        assert max(errors[name].errors.units for name in ("out", "dbias")) <= 1.9
    without = outcome(ADAPTED["heads first"], problem("bias"))
    assert (without.status, without.reason) == ("not taken", "no argument 'bias'")
    forward = outcome(ADAPTED["jax.nn"], problem("bias"), gradients=False)
    assert set(forward.results) == {"out", "lse"}


def test_a_bias_that_is_too_large_is_not_tried():
    large = Problem(Shape(1, 2**13, 2**13 + 1, 1, 1, 16), mask="bias")
    found = outcome(ADAPTED["jax.nn"], large)
    assert found.status == "out of memory" and "67117056 numbers" in found.reason


def _raises(query, key, value, scale=None, is_causal=False):
    raise RuntimeError("no kernel image\nfor this device")


def _exits(query, key, value, scale=None, is_causal=False):
    raise SystemExit(0)


def _wrong_shape(query, key, value, scale=None, is_causal=False):
    return query[:, :3]


def _wrong_type(query, key, value, scale=None, is_causal=False):
    return query.astype(jnp.int32)


def _two_results(query, key, value, scale=None, return_residual=False):
    return query


class Fatal(BaseException):
    pass


class Wordless(Exception):
    def __str__(self):
        raise RuntimeError("no words")


def _fatal(query, key, value, scale=None, is_causal=False):
    raise Fatal("out of\nthe blue")


def _wordless(query, key, value, scale=None, is_causal=False):
    raise Wordless


def _coloured(query, key, value, scale=None, is_causal=False):
    red, plain, title = "\x1b[1;31m", "\x1b[0m", "\x1b]0;title\x07"
    raise RuntimeError(f"{red}\n{title}too{plain}\tloud\x07\nfor this")


def _calls_back(query, key, value, scale=None, is_causal=False):
    def broken(q):
        raise ValueError("callback boom")

    return jax.pure_callback(broken, query, query, vmap_method="sequential")


def _with_lse(query, key, value, scale=None):
    return query, query[..., 0]


def _heads_first(query, key, value, scale=None):
    return query.swapaxes(1, 2)


def _lse_heads_first(query, key, value, scale=None, return_residual=False):
    return query, query[..., 0].swapaxes(1, 2)


def _whole_lse(query, key, value, scale=None, return_residual=False):
    return query, query[..., 0].astype(jnp.int32)


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (_fatal, "RuntimeError: it raises Fatal: out of"),
        (_wordless, "^Wordless$"),
        (_coloured, "^RuntimeError: too loud\N{REPLACEMENT CHARACTER}$"),
        (_calls_back, "callback boom"),
        (_whole_lse, "it returns int32 for LSE"),
        (_with_lse, r"2 results, not an array of .* \(--lse always, if the second is"),
        (
            _heads_first,
            r"4, 24, 16\), not an array of .* \(--layout BNTH, if query, key",
        ),
        (_lse_heads_first, r"\(2, 24, 4\) \(BTN\): --lse-layout BNT$"),
        (_raises, "RuntimeError: no kernel image"),
        (_exits, r"it calls sys.exit\(0\)"),
        (_wrong_shape, r"it returns bfloat16 of \(2, 3, 4, 16\)"),
        (_wrong_type, "it returns int32 for inputs of bfloat16"),
        (_two_results, r"bfloat16 of .* where \(out, LSE\) was asked for"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_bad_functions_fail_in_one_line(function, says):
    found = outcome(Target("bad", function), problem())
    assert found.status == "failed" and "\n" not in found.reason
    with pytest.raises(AssertionError, match=says):
        raise AssertionError(found.reason)


def test_what_cannot_be_differentiated_is_measured_forward():
    def forward_only(query, key, value, scale=None):
        shape = jax.ShapeDtypeStruct(query.shape, query.dtype)
        return jax.pure_callback(
            lambda q, k, v: np.asarray(exact(q, k, v, scale=float(scale))[0]),
            *(shape, query, key, value),
        )

    found = outcome(Target("forward", forward_only), problem())
    assert found.status == "measured" and set(found.results) == {"out"}
    assert "JVP" in found.no_gradients or "differentia" in found.no_gradients


def test_a_backward_pass_that_refuses_leaves_the_forward_pass():
    """As JAX's attention_mgpu does under a causal mask."""

    @jax.custom_vjp
    def half(query, key, value):
        return exact(query, key, value, scale=SHAPE.head_dim**-0.5)[0]

    def refuses(residuals, dout):
        raise NotImplementedError("no causal backward pass yet")

    half.defvjp(lambda *arrays: (half(*arrays), arrays), refuses)
    found = outcome(Target("half", half), problem())
    assert found.status == "measured" and set(found.results) == {"out"}
    assert found.no_gradients == "NotImplementedError: no causal backward pass yet"


@pytest.mark.parametrize("ends", [SystemExit(0), Fatal("boom")])
def test_a_backward_pass_that_ends_its_process_leaves_the_forward_pass(ends):
    """It would end the audit with 0, which says that all is well."""

    @jax.custom_vjp
    def half(query, key, value):
        return exact(query, key, value, scale=SHAPE.head_dim**-0.5)[0]

    def refuses(residuals, dout):
        raise ends

    half.defvjp(lambda *arrays: (half(*arrays), arrays), refuses)
    found = outcome(Target("half", half), problem())
    assert found.status == "measured" and set(found.results) == {"out"}
    assert "sys.exit(0)" in found.no_gradients or "Fatal" in found.no_gradients


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("nothing", "no target 'nothing'; there are pallas"),
        (
            "no.such.module:f",
            "cannot import no.such.module: .*; install it, or run where",
        ),
        ("jax.nn:no_such", "jax.nn has no function 'no_such'"),
        ("jax.numpy:pi", "jax.numpy has 'pi', but it cannot be called"),
        ("fractions:Fraction", "is a class: name a function, or an instance of it"),
        ("emulated:flash9", "no recipe 'flash9'; there are flash2"),
    ],
)
def test_bad_names_are_said_in_one_line(name, says):
    with pytest.raises(TargetError, match=says) as raised:
        resolve(name)
    assert "\n" not in str(raised.value)


def test_a_script_that_ends_itself_is_no_target(tmp_path, monkeypatch):
    (tmp_path / "ends_itself.py").write_text("raise SystemExit(0)")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(TargetError, match="cannot import ends_itself: SystemExit: 0"):
        resolve("ends_itself:f")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("raise GeneratorExit('boom')", "cannot import odd: GeneratorExit: boom"),
        (
            "def __getattr__(name):\n    raise RuntimeError('boom')",
            "odd has no function 'f': RuntimeError: boom",
        ),
        (
            "import jax\njax.config.update('jax_debug_nans', True)\nf = max",
            "jax_debug_nans is on",
        ),
        (
            "import jax\nf = max\n"
            "jax.config.update('jax_numpy_rank_promotion', 'raise')",
            "jax_numpy_rank_promotion is 'raise', in the environment or by importing",
        ),
        (
            "import jax\njax.config.update('jax_transfer_guard', 'disallow')\nf = max",
            "jax_transfer_guard is 'disallow'",
        ),
    ],
)
def test_odd_modules_are_said_in_one_line(text, says, tmp_path, monkeypatch):
    (tmp_path / "odd.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "odd", raising=False)
    try:
        with pytest.raises(TargetError, match=says) as raised:
            resolve("odd:f")
    finally:
        jax.config.update("jax_debug_nans", False)
        jax.config.update("jax_numpy_rank_promotion", "allow")
        jax.config.update("jax_transfer_guard", None)
        sys.modules.pop("odd", None)
    assert "\n" not in str(raised.value)


def test_names_find_functions():
    assert resolve("emulated:flash2").function is resolve("reference").function
    assert resolve("jax.nn:dot_product_attention").function is resolve("xla").function
    assert resolve("xla").adapter.more == {"implementation": "xla"}
