"""Designs of our backward pass, and Ampere's kernels, are timed by name."""

import dataclasses

import jax
import pytest

from analysis.speed import in_jax
from analysis.speed.cases import PRESETS
from attn_jax.kernels import tuning
from attn_jax.kernels.architecture import made_for
from tests.test_residuals import equations

# Kernels without a product, which come with others.
BESIDE = {"key_numbers", "row_sums", "query_gradient"}
TOY = {case.mask: case for case in PRESETS["toy"]}


@pytest.mark.parametrize(
    ("name", "mask", "kernel"),
    [
        ("pallas-fused", "full", "attention_backward_fused"),
        ("pallas-fused", "causal", "attention_backward_fused"),
        ("pallas-two-kernels", "full", "attention_backward_dq"),
        ("pallas-two-kernels", "packed", "attention_backward_dq"),
        ("pallas-fused", "packed", None),
    ],
)
def test_designs_of_our_backward_pass_are_timed_by_name(name, mask, kernel):
    case = dataclasses.replace(TOY[mask], H=64)
    arrays = in_jax._on_device(case, "normal")
    with made_for("hopper"):
        if kernel is None:
            with pytest.raises(NotImplementedError, match="does not take"):
                in_jax.attention(name, case, "backward")
            return
        attend = in_jax.attention(name, case, "backward")
        query, key, value, _, *ids = arrays

        def gradients(query, key, value, *ids):
            out, pullback = jax.vjp(lambda *x: attend(*x, *ids), query, key, value)
            return pullback(out)

        program = str(jax.make_jaxpr(gradients)(query, key, value, *ids))
        assert kernel in program
        said = in_jax._config(name, case, "backward")
        assert ("one pass" in said) == (name == "pallas-fused")


@pytest.mark.parametrize(
    ("name", "mask", "kernels"),
    [
        ("pallas-no-cures", "causal", ["forward", "backward_fused"]),
        ("pallas-no-cures", "packed", ["forward", "backward_dkv", "backward_dq"]),
        (
            "pallas-row-centre",
            "full",
            ["forward"] * 2 + ["backward_dkv", "backward_dq"],
        ),
        ("pallas-p-dp", "full", ["forward", "backward_delta", "backward_fused"]),
        ("pallas-bf16-weights", "causal", ["forward", "backward_fused"]),
        ("pallas-lazy-rescale", "full", ["forward", "backward_fused"]),
        ("pallas-repeated-max", "packed", ["forward", "backward_dkv", "backward_dq"]),
    ],
)
def test_options_of_our_kernels_are_timed_by_name(name, mask, kernels):
    """On a card that its pairs of heads fill; beside them there are sums."""
    case = dataclasses.replace(TOY[mask], H=64, B=66)
    query, key, value, _, *ids = in_jax._on_device(case, "normal")
    with made_for("hopper"):
        attend = in_jax.attention(name, case, "backward")

        def gradients(query, key, value, *ids):
            out, pullback = jax.vjp(lambda *x: attend(*x, *ids), query, key, value)
            return pullback(out)

        jaxpr = jax.make_jaxpr(gradients)(query, key, value, *ids)
        said = in_jax._config(name, case, "both")
    found = (str(e.params.get("name", "")) for e in equations(jaxpr.jaxpr))
    found = [x.removeprefix("attention_") for x in found if x.startswith("attention_")]
    assert sorted(set(found) - BESIDE) == sorted(set(kernels))
    assert found.count("forward") == kernels.count("forward")
    assert all(f"{k} {v}" in said for k, v in in_jax.OPTIONS[name].items())
    assert ("one pass" in said) == ("backward_fused" in kernels)


@pytest.mark.parametrize("mask", ["full", "causal"])
def test_kernels_for_ampere_are_timed_by_name(mask):
    case = dataclasses.replace(TOY[mask], H=64)
    query, key, value, _ = in_jax._on_device(case, "normal")
    attend = in_jax.attention("pallas-ampere", case, "backward")

    def gradients(*arrays):
        out, pullback = jax.vjp(attend, *arrays)
        return pullback(out)

    with in_jax.target("pallas-ampere"):
        program = str(jax.make_jaxpr(gradients)(query, key, value))
        said = in_jax._config("pallas-ampere", case, "both")
    # mma.sync, and no wgmma.
    assert " mma " in program and "wgmma" not in program
    tilings = tuning.configuration(
        *("ampere", 64, 64, case.S), is_causal=case.is_causal, listed=False
    )
    assert said == f"forward {tilings[0]}; dq {tilings[1]}; dkv {tilings[2]}"


def test_what_kernels_for_ampere_do_not_take_is_one_line():
    case = dataclasses.replace(TOY["packed"], H=80)
    arrays = in_jax._on_device(case, "normal")
    with pytest.raises(NotImplementedError, match="Ampere take head dims .* not 80"):
        in_jax._build("pallas-ampere", case, "forward", arrays)
