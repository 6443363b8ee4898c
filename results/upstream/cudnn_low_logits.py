"""cuDNN's dQ is NaN where all logits of a row are below some -88, at some lengths.

    python results/upstream/cudnn_low_logits.py

All logits are near one number c. Prints, by length and c, how many values of out, dQ,
dK and dV are not finite. Exact attention has none: a constant in all logits of a row
changes nothing.
"""

import jax
import jax.numpy as jnp
import numpy as np


@jax.jit
def attend(query, key, value, dout):
    def attention(*arrays):
        return jax.nn.dot_product_attention(*arrays, implementation="cudnn")

    out, pulled_back = jax.vjp(attention, query, key, value)
    return out, *pulled_back(dout)


def main():
    rng = np.random.default_rng(0)
    print("length    c  out dQ dK dV")
    for length in (256, 320, 384, 128, 200):
        for c in (-80, -87, -89, -100, -130, 130):
            query, key, value, dout = rng.normal(size=(4, 2, length, 2, 64))
            query *= 0.3
            query[..., 0], key[..., 0] = 1, 8 * c  # The scale is 1 / 8.
            arrays = (jnp.asarray(x, jnp.bfloat16) for x in (query, key, value, dout))
            found = [np.asarray(x, np.float32) for x in attend(*arrays)]
            print(f"{length:6} {c:4} ", *(int((~np.isfinite(x)).sum()) for x in found))


if __name__ == "__main__":
    main()
