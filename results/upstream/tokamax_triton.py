"""tokamax's Pallas-Triton attention: fewer causal queries than keys; -inf as a bias.

Needs tokamax and an NVIDIA GPU. Keys that no query sees have gradients of zero.
"""

import importlib.metadata

import jax
import jax.numpy as jnp
import numpy as np
import tokamax

B, T, S, N, H = 2, 256, 512, 8, 128
keys = jax.random.split(jax.random.key(0), 4)
q, do = (jax.random.normal(key, (B, T, N, H), jnp.bfloat16) for key in keys[:2])
k, v = (jax.random.normal(key, (B, S, N, H), jnp.bfloat16) for key in keys[2:])


def attend(q, k, v, **options):
    return tokamax.dot_product_attention(q, k, v, implementation="triton", **options)


@jax.jit
def causal(q, k, v):
    return jax.vjp(lambda *x: attend(*x, is_causal=True), q, k, v)[1](do)


version = importlib.metadata.version("tokamax")
print(f"jax {jax.__version__}, tokamax {version}, {jax.devices()[0].device_kind}")
for run in range(3):
    for name, x in zip(("dK", "dV"), causal(q, k, v)[1:], strict=True):
        unseen = np.asarray(x, np.float32)[:, T:]
        rows = np.any(unseen != 0, axis=-1)
        print(
            f"run {run}: {name} of keys {T} to {S - 1}, which no query sees: "
            f"{np.mean(rows):.0%} of the rows are not zero, "
            f"{np.mean(~np.isfinite(unseen)):.1%} of the values not finite, "
            f"the largest of the others {np.nanmax(np.abs(unseen)):.3g}"
        )

bias = jnp.zeros((1, 1, T, S)).at[:, :, ::3, : S // 2].set(-jnp.inf)
out = np.asarray(jax.jit(attend)(q, k, v, bias=bias), np.float32)
nan = np.isnan(out).any(-1)
print(f"bias of -inf over the first half of the keys: {nan[:, ::3].mean():.0%} of")
print(f"those rows are NaN, and {np.delete(nan, slice(None, None, 3), 1).mean():.0%}")
print("of the others")
