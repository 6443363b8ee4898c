"""Programs of an attention, each compiled once, whoever wants its results.

One is traced in the thread that wants it, in the modes of that thread; several are
compiled side by side (`compile_each`).
"""

import concurrent.futures
import contextlib
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from attn_jax.audit.alone import ALONE
from attn_jax.audit.problem import GRADIENTS, Results
from attn_jax.audit.raised import contained
from attn_jax.audit.target import Attend
from attn_jax.xla_options import NO_GRAPHS

# Query, key, value, dout and, where there is one, the bias.
Arrays = Sequence[Any]
# How many of a part's are compiled at a time.
_THREADS = 4


def run(attend: Attend, arrays: Arrays, *, gradients: bool = True) -> Results:
    """out, lse if there is one and, with `gradients`, dquery, dkey, dvalue and, where
    there is a bias, dbias, for dLSE = 0. Raises what the attention raises."""
    lowered(attend, gradients, arrays).compile()
    with ALONE:
        return jax.device_get(_results(attend, gradients, *map(jnp.asarray, arrays)))


def run_compiled(
    attend: Attend,
    arrays: Arrays,
    options: Mapping[str, Any],
    *,
    gradients: bool = True,
) -> Results:
    """What `run` gives, compiled by itself with XLA's `options`."""
    program = lowered(attend, gradients, arrays)
    compiled = program.compile(compiler_options=dict(options))
    with ALONE:
        return jax.device_get(compiled(*map(jnp.asarray, arrays)))


def run_forward(attend: Attend, query, key, value, *bias) -> Results:
    """out, and lse if there is one, of a call that is not differentiated."""
    return run(attend, (query, key, value, query, *bias), gradients=False)


def compile_each(lower: Iterable[Callable[[], jax.stages.Lowered]]) -> None:
    """Traces one program after the other here, and has each compiled in a thread; waits
    for all: compilers try programs out on the device, and some that run there want it
    for themselves (`alone`). What one of them raises it will raise where it is run."""
    with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
        for each in lower:
            with contextlib.suppress(Exception):
                pool.submit(each().compile)


def results(attend: Attend, gradients: bool, query, key, value, dout, *bias) -> dict:
    """To be compiled: what `run` gives, as JAX arrays."""

    def named(out: Array, lse: Array | None) -> dict[str, Array]:
        return {"out": out} | ({} if lse is None else {"lse": lse})

    if not gradients:
        return named(*attend(query, key, value, *bias))
    (out, lse), pullback = jax.vjp(attend, query, key, value, *bias)
    zero = None if lse is None else jnp.zeros_like(lse)
    found = pullback((dout.astype(out.dtype), zero))
    names = (*GRADIENTS, "dbias") if bias else GRADIENTS
    return named(out, lse) | dict(zip(names, found, strict=True))


_results = functools.partial(
    jax.jit, static_argnums=(0, 1), compiler_options=NO_GRAPHS
)(results)


def lowered(attend: Attend, gradients: bool, arrays: Arrays) -> jax.stages.Lowered:
    """What `run` runs on such arrays, traced in this thread, which is when the
    attention is called."""
    types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]
    with contained():
        return _results.lower(attend, gradients, *types)
