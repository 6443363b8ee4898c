"""Both designs of our backward pass are timed under names of their own."""

import dataclasses

import jax
import pytest

from analysis.speed import in_jax
from analysis.speed.cases import PRESETS
from attn_jax.kernels.architecture import made_for

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
                in_jax.attention(name, case)
            return
        attend = in_jax.attention(name, case)
        query, key, value, _, *ids = arrays

        def gradients(query, key, value, *ids):
            out, pullback = jax.vjp(lambda *x: attend(*x, *ids), query, key, value)
            return pullback(out)

        program = str(jax.make_jaxpr(gradients)(query, key, value, *ids))
        assert kernel in program
        said = in_jax._config(name, case, "backward")
        assert ("one pass" in said) == (name == "pallas-fused")
