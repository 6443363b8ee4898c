"""Names for `jax.checkpoint`: what a policy that saves them leaves to be run again."""

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import pytest

from attn_jax import dot_product_attention
from attn_jax.kernels import architecture
from attn_jax.kernels.attention import attention
from attn_jax.kernels.tuning import Backward
from attn_jax.residuals import LSE_NAME, OUT_NAME

SAVED = jax.checkpoint_policies.save_only_these_names("attn_jax_out", "attn_jax_lse")
SHAPE = (1, 128, 2, 64)


def equations(jaxpr, into=lambda eqn: True) -> Iterator:
    """Those of a jaxpr and of all jaxprs within that `into` does not leave out."""
    for eqn in jaxpr.eqns:
        yield eqn
        if not into(eqn):
            continue
        for x in jax.tree.leaves(list(eqn.params.values())):
            inner = getattr(x, "jaxpr", x)
            if hasattr(inner, "eqns"):
                yield from equations(inner, into)


def gradients(attend, policy, arrays):
    """The jaxpr of gradients through a checkpointed function with attention in it."""

    @functools.partial(jax.checkpoint, policy=policy)
    def block(*arrays):
        return jnp.sin(attend(*arrays).astype(jnp.float32))

    def loss(*arrays):
        return block(*arrays).sum()

    return jax.make_jaxpr(jax.grad(loss, (0, 1, 2)))(*arrays)


def forward_runs(attend, policy) -> int:
    arrays = [jax.ShapeDtypeStruct(SHAPE, jnp.bfloat16)] * 3
    jaxpr = gradients(attend, policy, arrays)
    names = [str(eqn.params.get("name")) for eqn in equations(jaxpr.jaxpr)]
    assert any(name.startswith("attention_backward") for name in names)
    return names.count("attention_forward")


@pytest.mark.parametrize(
    ("backward", "target"),
    [("fused", "hopper"), ("two_kernels", "hopper"), ("two_kernels", "ampere")],
)
def test_with_the_names_saved_the_forward_kernel_runs_once(
    backward: Backward, target: architecture.Architecture
):
    def attend(*qkv):
        return attention(*qkv, scale=0.1, backward=backward)[0]

    with architecture.made_for(target):
        assert forward_runs(attend, None) == 2
        assert forward_runs(attend, SAVED) == 1


def test_the_names_are_those_that_users_read():
    assert (OUT_NAME, LSE_NAME) == ("attn_jax_out", "attn_jax_lse")


@pytest.mark.parametrize(
    ("implementation", "spared"), [("emulated", 2), ("reference", 2), ("xla", 1)]
)
def test_others_make_fewer_products_again(implementation, spared):
    """Q K^T and P V of the forward pass, as equations; XLA's backward pass wants P."""

    def attend(*qkv):
        return dot_product_attention(*qkv, implementation=implementation)

    def products(policy):
        arrays = [jax.ShapeDtypeStruct(SHAPE, jnp.bfloat16)] * 3
        jaxpr = gradients(attend, policy, arrays)
        found = [eqn.primitive.name for eqn in equations(jaxpr.jaxpr)]
        return found.count("dot_general")

    assert products(None) - products(SAVED) == spared
