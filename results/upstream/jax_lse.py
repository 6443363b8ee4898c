"""The log-sum-exp of jax.nn.dot_product_attention(return_residual=True).

1. It is rounded to the inputs' 16-bit format, on every path.
2. Nothing can be differentiated through it: its gradient is 0, silently.
3. A query that sees no key gets a finite number, where log(0) is -inf.

Needs jax and NumPy; a CPU will do. Exact values: NumPy in FP64 from the same inputs.
"""

import jax
import jax.numpy as jnp
import numpy as np

S, H = 4096, 64
attend = jax.nn.dot_product_attention
q, k, v = jax.random.normal(jax.random.key(0), (3, 1, S, 1, H), jnp.bfloat16)


def exact(keys, values):
    logits = wide(q) @ wide(keys).T / H**0.5
    top = logits.max(1, keepdims=True)
    weights = np.exp(logits - top)
    total = weights.sum(1, keepdims=True)
    return weights @ wide(values) / total, (top + np.log(total))[:, 0]


def wide(x):
    return np.asarray(x, np.float64)[0, :, 0]


def rms(x):
    return float(np.sqrt(np.mean(x**2)))


out, lse = exact(k, v)
_, theirs = attend(q, k, v, return_residual=True)
print(f"jax {jax.__version__} on {jax.devices()[0].device_kind}")
worst = abs(np.asarray(theirs, np.float64)[0, :, 0] - lse).max()
print(f"1. dtype {theirs.dtype}, largest error {worst:.3g}")

# What it is asked for: two halves of the keys, attended apart and merged.
for name in "the library's LSE", "the exact LSE":
    parts, logs = [], []
    for half in (slice(0, S // 2), slice(S // 2, S)):
        part, log = exact(k[:, half], v[:, half])
        if name == "the library's LSE":
            log = attend(q, k[:, half], v[:, half], return_residual=True)[1]
            log = np.asarray(log, np.float64)[0, :, 0]
        parts.append(part)
        logs.append(log)
    share = 1 / (1 + np.exp(np.subtract(*logs[::-1])))[:, None]
    merged = share * parts[0] + (1 - share) * parts[1]
    error = rms(merged - out) / rms(out)
    print(f"   exact halves merged by {name}: relative RMS {error:.2g}")

gradient = jax.grad(
    lambda q: attend(q, k, v, return_residual=True)[1].astype(jnp.float32).sum()
)(q)
print(f"2. largest gradient of LSE: {float(abs(gradient).max())}")

nothing = jnp.zeros((1, 1, S, S), bool)
blind = attend(q, k, v, mask=nothing, return_residual=True)[1]
print(f"3. LSE of queries that see no key: {float(blind[0, 0, 0]):.3g}")
