"""XLA:GPU forgets, joining a slice and a kernel, that a result begins as an operand.

On a Hopper GPU, or compiled for one without a GPU (jax-cuda13-plugin installed,
JAX_PLATFORMS=cpu, and `attn_jax` to describe the GPU)."""

import re

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.experimental import pallas as pl

ROWS, COLUMNS = 256, 128


def add_to_first_half(more_ref, sum_ref):
    half = pl.ds(0, ROWS // 2)
    sum_ref[half] = sum_ref[half] + more_ref[half]


def add(x, more):
    """x with `more` added to the first half of its rows, where x lies."""
    total = jax.new_ref(x)
    plgpu.kernel(add_to_first_half, out_type=())(more, total)
    return total[...]


@jax.jit
def program(x, both):
    return add(x * 2, both[1])  # A slice that is contiguous.


@jax.jit
def barred(x, both):
    return add(x * 2, jax.lax.optimization_barrier(both[1]))


x, both = jnp.ones((ROWS, COLUMNS)), jnp.ones((2, ROWS, COLUMNS))
print(f"jax {jax.__version__} on {jax.default_backend()}")
if jax.default_backend() == "gpu":
    compiled = [f.lower(x, both).compile() for f in (program, barred)]
else:
    from jax.sharding import SingleDeviceSharding

    from attn_jax.kernels import compiler

    device = compiler.devices("h200", 1)[0]
    x, both = (
        jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=SingleDeviceSharding(device))
        for a in (x, both)
    )
    with jax.default_device(device):
        compiled = [f.lower(x, both).compile() for f in (program, barred)]
for name, executable in zip(("slice", "slice behind a barrier"), compiled):
    text = executable.as_text()
    entry = text[text.index("ENTRY") :]
    calls = re.findall(r" (fusion|custom-call)\(.*", entry)
    kept = "output_to_operand_aliasing" in entry
    print(f"{name}: {calls}, the entry's result begins as an operand: {kept}")
    if jax.default_backend() == "gpu":
        out = executable(x, both)
        print("  first half 3:", bool((out[: ROWS // 2] == 3).all()), end=", ")
        print("second half 2:", bool((out[ROWS // 2 :] == 2).all()))
