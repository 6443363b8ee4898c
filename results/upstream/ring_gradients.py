"""Gradients summed around a ring of devices in the inputs' 16-bit format.

TransformerEngine's ring attention for JAX starts the backward pass with
`dq = jnp.zeros_like(q)` and adds every device's part to it, in BF16; dK and dV travel
around the ring in BF16 as well (transformer_engine/jax/cpp_extensions/attention.py,
`FusedRingAttnBwdPrimitive`, commit d0067d0). Its forward pass merges in FP32. Here the
same sums in NumPy: parts are exact, then rounded to BF16, as a kernel returns them, and
added in BF16 or in FP32. Relative RMS errors against FP64, over that of the exact
gradient rounded to BF16 once. Needs NumPy and ml_dtypes.
"""

import ml_dtypes
import numpy as np

HEADS, S, H = 8, 2048, 64


def rounded(x):
    return np.asarray(x, np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)


def rms(x):
    return np.sqrt(np.mean(x**2))


rng = np.random.default_rng(0)
errors = {}
for _ in range(HEADS):
    q, k, v, do = rounded(rng.standard_normal((4, S, H)))
    p = np.exp(q @ k.T / H**0.5)
    p /= p.sum(1, keepdims=True)
    dp = do @ v.T
    ds = p * (dp - (p * dp).sum(1, keepdims=True)) / H**0.5
    for size in (1, 2, 4, 8, 16, 32, 64):
        blocks = np.split(np.arange(S), size)
        for name, parts in {
            "dQ": [ds[:, block] @ k[block] for block in blocks],
            "dK": [ds[block].T @ q[block] for block in blocks],
            "dV": [p[block].T @ do[block] for block in blocks],
        }.items():
            truth = sum(parts)
            narrow, wide = np.zeros_like(truth), np.zeros_like(truth)
            for part in map(rounded, parts):
                narrow = rounded(narrow + part)
                wide = wide + part
            least = rms(rounded(truth) - truth)
            found = rms(narrow - truth) / least, rms(rounded(wide) - truth) / least
            errors.setdefault((size, name), []).append(found)
print("devices   dQ: BF16, FP32   dK: BF16, FP32   dV: BF16, FP32")
for size in (1, 2, 4, 8, 16, 32, 64):
    cells = (np.mean(errors[size, name], 0) for name in ("dQ", "dK", "dV"))
    print(f"{size:7}   " + "   ".join(f"{a:8.2f}, {b:4.2f}" for a, b in cells))
