"""dQ of fused attention kernels, on inputs with a mean: U[0, 1).

Kernels take delta = rowsum(dO * O) from the output as rounded to BF16. Rows of dS then
no longer sum to 0, and what is left multiplies the mean of the keys, which adds up over
all of them. Errors: relative RMS of dQ against FP64, over that of the exact dQ rounded
to BF16 once. "delta repaired" is FlashAttention-2's backward pass in FP32 but for P and
dS in BF16, with delta from the unrounded output, to show that nothing else is to blame.

Needs jax and NumPy; cudnn needs an NVIDIA GPU, tokamax a Hopper one. Other
implementations are left out where they do not run.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

S, N, H = 2048, 8, 128
q, k, v, do = (
    jax.random.uniform(key, (1, S, N, H)).astype(jnp.bfloat16)
    for key in jax.random.split(jax.random.key(0), 4)
)


def wide(x):
    return np.asarray(x, np.float64)[0].swapaxes(0, 1)


def bf16(x):
    return np.asarray(jnp.asarray(x, jnp.bfloat16), np.float64)


def parts():
    logits = wide(q) @ wide(k).swapaxes(1, 2) / H**0.5
    p = np.exp(logits - logits.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    return p, wide(do) @ wide(v).swapaxes(1, 2), p @ wide(v)


def dq(p, dp, delta, rounding=lambda x: x):
    return rounding(p * (dp - delta)) @ wide(k) / H**0.5


p, dp, out = parts()
delta = (wide(do) * out).sum(-1, keepdims=True)
exact = dq(p, dp, delta)


def units(x):
    least = np.sqrt(np.mean((bf16(exact) - exact) ** 2))
    return np.sqrt(np.mean((x - exact) ** 2)) / least


def gradient(attend):
    @jax.jit
    def of(q, k, v):
        _, pullback = jax.vjp(attend, q, k, v)
        return pullback(do)[0]

    return wide(of(q, k, v))


found = {
    name: functools.partial(jax.nn.dot_product_attention, implementation=name)
    for name in ("xla", "cudnn")
}
try:
    import tokamax

    for name in ("mosaic_gpu", "triton"):
        found[f"tokamax {name}"] = functools.partial(
            tokamax.dot_product_attention, implementation=name
        )
except ImportError:
    pass
print(f"jax {jax.__version__} on {jax.devices()[0].device_kind}, S = {S}: dQ in units")
for name, attend in found.items():
    try:
        print(f"{name}: {units(gradient(attend)):.3g}")
    except Exception as error:  # Whatever keeps an implementation from running here.
        print(f"{name}: not run ({str(error).splitlines()[0]})")
rounded = (wide(do) * bf16(out)).sum(-1, keepdims=True)
shipped = bf16(dq(p, dp, rounded, bf16))
print(f"emulated, delta from the rounded output: {units(shipped):.3g}")
print(f"emulated, delta repaired: {units(bf16(dq(p, dp, delta, bf16))):.3g}")
centre = wide(k).mean(1, keepdims=True)
ds = bf16(p * (dp - delta))
both = (ds @ wide(k) - ds.sum(-1, keepdims=True) * centre) / H**0.5
print(f"emulated, and rowsum(rounded dS) * mean(K) subtracted: {units(bf16(both)):.3g}")
