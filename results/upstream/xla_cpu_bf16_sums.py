"""XLA's CPU compiler adds BF16 numbers up in BF16, in sums and in some dots.

Errors in units: of correctly rounded results, 1 is what none can be below.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

CONTRACT_ROWS = (((2,), (1,)), ((0, 1), (0, 2)))  # bnts, btnh -> bnsh
SWAPPED = (((1,), (2,)), ((0, 2), (0, 1)))


def normal(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape).astype(jnp.bfloat16)


def exact(x: jax.Array) -> np.ndarray:
    return np.asarray(x, np.float64)


def units(result: jax.Array, right: np.ndarray) -> float:
    rounded = exact(jnp.asarray(right, jnp.float32).astype(jnp.bfloat16))
    off, least = exact(result) - right, rounded - right
    return float(np.sqrt((off**2).mean() / (least**2).mean()))


print(f"JAX {jax.__version__}, {jax.default_backend()}")
for length in (64, 256, 1024, 4096):
    x, y = normal(0, 2, 4, length, 64), normal(1, 2, length, 4, 32)
    right = np.einsum("bnts,btnh->bnsh", exact(x), exact(y))
    dot = jax.jit(lambda x, y: lax.dot_general(x, y, CONTRACT_ROWS))(x, y)
    swapped = jax.jit(lambda x, y: lax.dot_general(y, x, SWAPPED))(x, y)

    def logits(key, query=y):
        return jnp.einsum("btnh,bsnh->bnts", query, key)

    (dkey,) = jax.jit(jax.linear_transpose(logits, normal(2, 2, 64, 4, 32)))(x)
    (dbias,) = jax.jit(jax.linear_transpose(lambda b: b + 0 * x, x[:1, :1, :1]))(x)
    summed = exact(x).sum((0, 1, 2), keepdims=True)
    print(
        f"{length:5} terms: dot_general {units(dot, right):5.2f}, operands swapped "
        f"{units(swapped, right.swapaxes(2, 3)):.2f}, dK of einsum "
        f"{units(dkey, right.swapaxes(1, 2)):5.2f}, gradient of a broadcast bias "
        f"{units(dbias, summed):5.2f}"
    )

try:
    wide = jnp.float32
    jax.block_until_ready(
        jax.jit(lambda x, y: lax.dot_general(x, y, CONTRACT_ROWS, None, wide))(x, y)
    )
    print("with preferred_element_type=float32: runs")
except jax.errors.JaxRuntimeError as error:
    print(f"with preferred_element_type=float32: {error}")
