"""Options that a recipe asks Hopper's kernels for: what they are compiled to."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest

from attn_jax.kernels.attention import attention
from attn_jax.mask import Mask
from attn_jax.recipe import ATTN_JAX
from tests.child_process import in_child_process
from tests.gpu_compiler import Program, compiled
from tests.test_kernel_options import FINE, ROW, THOROUGH, TIME_LIMIT


def _compiled(
    changes: dict, head_dim: int, is_causal: bool, gradients: bool
) -> Program:
    query = jax.ShapeDtypeStruct((1, 1000, 4, head_dim), "bfloat16")
    key = jax.ShapeDtypeStruct((1, 1100, 2, head_dim), "bfloat16")

    def attend(*qkv):
        mask, recipe = (
            Mask(is_causal=is_causal),
            dataclasses.replace(ATTN_JAX, **changes),
        )
        return attention(*qkv, scale=0.1, mask=mask, recipe=recipe)

    def program(*qkv):
        if not gradients:
            return attend(*qkv)
        results, backward = jax.vjp(attend, *qkv)
        return backward(jax.tree.map(jnp.ones_like, results))[0]

    return compiled(program, query, key, key)


@pytest.mark.ci
@pytest.mark.parametrize(
    ("changes", "head_dim", "is_causal", "kernels"),
    [
        pytest.param(
            *(dict(dq_centre="row"), 128, True, ["dq", "forward", "forward"]),
            marks=THOROUGH,
        ),
        (dict(rescale_threshold=8.0), 128, False, ["forward"]),
        (FINE, 128, True, ["forward", "key_numbers"]),
        pytest.param(
            *(ROW, 64, False, ["delta", "dq", "forward", "forward"]), marks=THOROUGH
        ),
        pytest.param(
            dict(rescale_threshold=8.0), 64, True, ["forward"], marks=THOROUGH
        ),
        pytest.param(
            *(dict(repeated_max_factor=2.0), 128, True, ["forward"]), marks=THOROUGH
        ),
    ],
)
def test_options_compile_without_spills_and_overlap(
    changes, head_dim, is_causal, kernels
):
    pytest.importorskip("jax_cuda13_plugin", reason="needs the extra `compile`")
    arguments = changes, head_dim, is_causal, "dq" in kernels
    program = in_child_process(_compiled, *arguments, seconds=TIME_LIMIT)
    names = [k.name.removeprefix("attention_") for k in program.kernels]
    assert sorted(x.removeprefix("backward_") for x in names) == kernels
    for kernel in program.kernels:
        assert kernel.spilled_bytes == 0 and not kernel.serialised, kernel
        if not kernel.name.endswith(("sums", "numbers")):
            assert re.search("M1e+0", kernel.order), kernel


def _lowered(x64: bool, query, key, **options) -> jax.stages.Lowered:
    def program(*qkv):
        results, backward = jax.vjp(
            lambda *qkv: attention(*qkv, scale=0.1, **options), *qkv
        )
        return backward(jax.tree.map(jnp.ones_like, results))

    with jax.enable_x64(x64):
        traced = jax.jit(program).trace(query, key, key)
        return traced.lower(lowering_platforms=("cuda",))


@pytest.mark.ci
@pytest.mark.parametrize(
    "changes",
    [ROW, pytest.param(dict(dq_centre="keys"), marks=THOROUGH)],
    ids=str,
)
def test_options_lower_with_x64_on(changes):
    query = jax.ShapeDtypeStruct((2, 200, 4, 64), "bfloat16")
    changes = changes | dict(rescale_threshold=8.0, repeated_max_factor=2.0)
    recipe = dataclasses.replace(ATTN_JAX, **changes)
    gradients = _lowered(True, query, query, recipe=recipe).out_info
    assert all(g.dtype == jnp.bfloat16 for g in gradients)
