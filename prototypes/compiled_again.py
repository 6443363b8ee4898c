"""Do two compilations of the kernels' programs give the same bits?

    python prototypes/compiled_again.py [--strategy ring] [--bias] [--seconds 60]

Compiles the plain kernels and one shard of context parallelism, forward and backward,
as often as the time allows, every second pair without XLA's autotuning, runs each ten
times, and says which result differs from the first. Several at once on one card make it
busy, which is when XLA's trials come out one way or the other. Needs a Hopper GPU.
"""

import argparse
import functools
import time

import jax
import ml_dtypes
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from attn_jax import context_parallel
from attn_jax.audit.inputs import Shape, make_inputs
from attn_jax.audit.invariance import same_bits
from attn_jax.kernels.attention import attention
from attn_jax.mask import Mask
from attn_jax.xla_options import RUN_ONCE

LENGTH, HEADS, KEY_HEADS, HEAD_DIM = 4096, 4, 2, 128
RUNS = 10
NAMES = "out", "lse", "dquery", "dkey", "dvalue", "dbias"


def whole(query, key, value, bias=None):
    """The plain kernels."""
    mask = Mask(is_causal=True)
    return attention(query, key, value, scale=HEAD_DIM**-0.5, bias=bias, mask=mask)


def one_shard(strategy: str, *given):
    """The same by way of a mesh of one device."""
    rows, lse = P(None, "seq"), P(None, None, "seq")

    def local(query, key, value, bias=None):
        return context_parallel.attention(
            *(query, key, value),
            bias=bias,
            axis_name="seq",
            strategy=strategy,
            is_causal=True,
            scale=HEAD_DIM**-0.5,
            implementation="pallas",
        )

    return jax.shard_map(
        local,
        mesh=Mesh(np.asarray(jax.devices()[:1]), ("seq",)),
        in_specs=(rows, rows, rows, lse)[: len(given)],
        out_specs=(rows, lse),
        check_vma=False,
    )(*given)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--strategy", default="ring")
    parser.add_argument("--bias", action="store_true")
    parser.add_argument("--seconds", type=float, default=60.0)
    options = parser.parse_args()
    shape = Shape(1, LENGTH, LENGTH, HEADS, KEY_HEADS, HEAD_DIM)
    rng = np.random.default_rng(1)
    dlse = rng.standard_normal((1, HEADS, LENGTH)).astype(np.float32)
    inputs = [*make_inputs("uniform", 0, shape), dlse]
    if options.bias:
        bias = rng.standard_normal((1, 1, LENGTH, LENGTH))
        inputs.append(bias.astype(ml_dtypes.bfloat16))
    first, made, differ = None, 0, 0
    end = time.monotonic() + options.seconds
    while time.monotonic() < end:
        for attend in (whole, functools.partial(one_shard, options.strategy)):

            def both(query, key, value, dout, dlse, *bias, attend=attend):
                results, pullback = jax.vjp(attend, query, key, value, *bias)
                return *results, *pullback((dout, dlse))

            chosen = RUN_ONCE if made % 4 >= 2 else None
            program = jax.jit(both).lower(*inputs).compile(compiler_options=chosen)
            for _ in range(RUNS):
                found = jax.device_get(program(*inputs))
                first = first or found
                for name, old, new in zip(NAMES, first, found):
                    if not same_bits(old, new):
                        differ += 1
                        count = int((old != new).sum())
                        print(f"compilation {made}: {name}, {count} of {new.size}")
            made += 1
    print(f"{made} compilations, {differ} results with other bits")
    return 1 if differ else 0


if __name__ == "__main__":
    raise SystemExit(main())
