"""Head dims of every size, V's own too, in the kernels on a Hopper GPU."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_jax import reference
from attn_jax.audit.error import unit_error
from attn_jax.formats import BF16
from attn_jax.kernels.attention import attention
from attn_jax.mask import Mask

pytestmark = pytest.mark.gpu(capability="9.0")

# No block divides the lengths; more tiles than the card has multiprocessors.
B, T, S, N, K = 2, 1000, 1337, 16, 4
HEAD_DIMS = [
    *((h, h) for h in (32, 64, 96, 128, 192, 256)),
    *((192, 128), (32, 256), (256, 32), (64, 128)),
]
MASKS = {
    "full": Mask(),
    "causal": Mask(is_causal=True),
    "window": Mask(window=(70, 10)),
}


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize(("head_dim", "value_dim"), HEAD_DIMS)
def test_as_good_as_correctly_rounded_and_always_the_same(head_dim, value_dim, name):
    rng = np.random.default_rng(0)
    shapes = (B, T, N, head_dim), (B, S, K, head_dim), (B, S, K, value_dim)
    query, key, value, dout = (
        np.asarray(jnp.asarray(rng.standard_normal(x) + shift, jnp.bfloat16))
        # Keys far from zero, whose mean dQ must not see.
        for x, shift in zip((*shapes, (B, T, N, value_dim)), (0, 2, 0, 0))
    )
    mask = MASKS[name]

    @jax.jit
    def results(query, key, value, dout):
        def attend(query, key, value):
            return attention(query, key, value, scale=head_dim**-0.5, mask=mask)[0]

        out, backward = jax.vjp(attend, query, key, value)
        return out, *backward(dout)

    arguments = [jnp.asarray(x) for x in (query, key, value, dout)]
    first = jax.device_get(results(*arguments))
    for _ in range(5):
        again = jax.device_get(results(*arguments))
        chex.assert_trees_all_equal(first, again)
    golden = reference.golden(query, key, value, dout, mask=mask)
    exact = golden.out, golden.dquery, golden.dkey, golden.dvalue
    for field, got, want in zip(("out", "dq", "dk", "dv"), first, exact):
        assert unit_error(got, want, BF16) <= 1.7, field
