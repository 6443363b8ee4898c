"""dK and dV of tokamax's Mosaic GPU attention, run again on the same inputs.

Needs tokamax and a Hopper GPU. Inputs are the same in all runs, and so should be the
results, or nearly, where sums have no order.
"""

import importlib.metadata

import jax
import jax.numpy as jnp
import numpy as np
import tokamax

S, N, H = 4096, 4, 128
q, k, v, do = jax.random.normal(jax.random.key(0), (4, 1, S, N, H), jnp.bfloat16)


@jax.jit
def gradients(q, k, v):
    def attend(*qkv):
        return tokamax.dot_product_attention(*qkv, implementation="mosaic_gpu")

    return jax.vjp(attend, q, k, v)[1](do)


version = importlib.metadata.version("tokamax")
print(f"jax {jax.__version__}, tokamax {version}, {jax.devices()[0].device_kind}")
first = [np.asarray(x, np.float64) for x in gradients(q, k, v)]
for run in range(1, 11):
    again = [np.asarray(x, np.float64) for x in gradients(q, k, v)]
    lines = []
    for name, a, b in zip(("dQ", "dK", "dV"), first, again, strict=True):
        apart = np.sqrt(np.mean((a - b) ** 2) / np.mean(a**2))
        rows = np.mean(np.any(a != b, axis=-1))
        lines.append(f"{name} {apart:.1e} apart, {rows:.1%} of the rows")
    print(f"run {run}: " + "; ".join(lines))
