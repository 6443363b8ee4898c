"""An added bias and its gradient in the interpreted kernels, against FP64.

By the public function, as on a GPU. Each case is interpreted in another process under a
time limit, as in tests/test_kernels_interpret.py.
"""

from types import SimpleNamespace
from unittest.mock import patch

import jax
import numpy as np
import pytest

from attn_jax import dot_product_attention
from attn_jax.audit.mask_cases import mask_cases
from attn_jax.kernels import architecture, checks
from attn_jax.kernels.architecture import made_for
from attn_jax.kernels.checks import Check
from attn_jax.kernels.interpreter import interpreted
from attn_jax.recipe import Architecture
from tests.child_process import in_child_process

pytestmark = pytest.mark.ci

TIME_LIMIT = 180  # seconds; a case takes five to ten alone on a core
GPUS = {
    name: SimpleNamespace(compute_capability=capability, device_kind="some GPU")
    for capability, name in architecture.KERNELS.items()
}
T, S, N, K = 130, 150, 2, 1
# Head dim of V where it is another.
VALUE_DIM = {"bias-for-all-queries": 32}
CASES = [name for name, case in mask_cases(T, S, N).items() if case.bias is not None]


def _check_of(name: str) -> Check:
    head_dim = mask_cases(T, S, N)[name].head_dim
    value_dim = VALUE_DIM.get(name, head_dim)
    return Check(head_dim, value_dim, name, queries=T, keys=S)


def _results(
    target: Architecture, check: Check, implementation: str
) -> dict[str, np.ndarray]:
    """Of the public function, by the names of `checks.RESULTS`."""
    case = check.case
    options = {"mask": case.mask.dense, "is_causal": case.mask.is_causal}
    options |= {
        "local_window_size": case.mask.window,
        "query_seq_lengths": case.mask.query_lengths,
        "key_value_seq_lengths": case.mask.key_value_lengths,
        "query_segment_ids": case.mask.query_segment_ids,
        "key_value_segment_ids": case.mask.key_value_segment_ids,
    }

    @jax.jit
    def both(query, key, value, dout, dlse, _, sinks, bias):
        def attend(query, key, value, bias, sinks):
            return dot_product_attention(
                *(query, key, value, bias),
                sinks=sinks,
                soft_cap=case.soft_cap,
                return_residual=True,
                implementation=implementation,
                **options,
            )

        (out, lse), backward = jax.vjp(attend, query, key, value, bias, sinks)
        gradients = backward((dout, dlse.swapaxes(1, 2)))
        found = dict(zip(checks.RESULTS, (out, lse.swapaxes(1, 2), *gradients)))
        return {name: x for name, x in found.items() if x is not None}

    with patch.multiple(checks, N=N, K=K):
        inputs = checks._inputs(check)
    with patch.object(architecture, "default_device", lambda: GPUS[target]):
        return jax.device_get(both(*inputs))


def _interpreted(target: Architecture, check: Check) -> dict[str, np.ndarray]:
    with made_for(target), interpreted():
        return _results(target, check, "pallas")


# Those whose kernels differ from another's in how a bias is broadcast alone.
BROADCAST = {"bias-for-all-queries", "bias-for-all-keys", "bias-for-all-heads"}
DEFAULT = {"hopper": set(CASES) - BROADCAST, "ampere": {"bias-soft-cap"}}


@pytest.mark.parametrize(
    ("target", "name"),
    [
        pytest.param(
            *(target, name), marks=[pytest.mark.thorough] * (name not in names)
        )
        for target, names in DEFAULT.items()
        for name in CASES
    ],
)
def test_a_bias_and_its_gradient(target, name):
    with patch.multiple(checks, N=N, K=K):
        check = _check_of(name)
        found = in_child_process(_interpreted, target, check, seconds=TIME_LIMIT)
        bias = checks._inputs(check)[-1]
        assert (found["dbias"].shape, found["dbias"].dtype) == (bias.shape, bias.dtype)
        assert checks.judged(check, found, True).failed == ()
    if name == "bias-for-all-heads":
        # As tests/test_kernels_interpret.py has it, 2**-8 of all results at the most.
        emulated = _results(target, check, "emulated")
        for result in ("out", "dq", "dk", "dv", "dbias"):
            assert np.mean(found[result] == emulated[result]) >= 1 - 2**-8, result


def _scaled(scale: float, implementation: str):
    """out, dquery, dkey, dvalue and dbias, of a few pairs, one of them hidden."""
    rng = np.random.default_rng(0)
    shapes = (1, 40, 1, 32), (1, 70, 1, 32), (1, 70, 1, 32), (1, 40, 1, 32)
    query, key, value, dout = (
        rng.standard_normal(shape).astype("bfloat16") for shape in shapes
    )
    bias = rng.standard_normal((1, 1, 40, 70)).astype(np.float32)
    bias[0, 0, 3, 5] = -np.inf

    @jax.jit
    def both(*operands):
        def attend(query, key, value, bias):
            return dot_product_attention(
                *(query, key, value, bias), scale=scale, implementation=implementation
            )

        out, backward = jax.vjp(attend, *operands)
        return out, *backward(dout)

    with patch.object(architecture, "default_device", lambda: GPUS["hopper"]):
        return jax.device_get(both(query, key, value, bias))


def _scaled_and_interpreted(scale: float):
    with made_for("hopper"), interpreted():
        return _scaled(scale, "pallas")


@pytest.mark.parametrize("scale", [-0.3, pytest.param(0.0, marks=pytest.mark.thorough)])
def test_a_scale_that_is_not_positive_leaves_the_bias_as_it_is(scale):
    found = in_child_process(_scaled_and_interpreted, scale, seconds=TIME_LIMIT)
    exact = _scaled(scale, "reference")
    for name, got, want in zip("out dq dk dv dbias".split(), found, exact, strict=True):
        got, want = (x.astype(np.float64) for x in (got, want))
        # Rounded P and dS besides the result itself.
        assert np.linalg.norm(got - want) <= 2 * 2**-8 * np.linalg.norm(want), name
    assert found[-1][0, 0, 3, 5] == 0
