"""Programs of an attention, each compiled once, whoever wants its results.

One is traced in the thread that wants it, in the modes of that thread; it may be
compiled beside what else goes on (`begin`).
"""

import concurrent.futures
import contextlib
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array

from attn_jax.audit.inputs import Inputs
from attn_jax.audit.problem import GRADIENTS, Results
from attn_jax.audit.target import Attend
from attn_jax.xla_options import NO_GRAPHS

_begun: dict[tuple[Attend, bool], concurrent.futures.Future] = {}


def run(attend: Attend, inputs: Inputs, *, gradients: bool = True) -> Results:
    """out, lse if there is one and, with `gradients`, dquery, dkey and dvalue, for dLSE
    = 0. Raises what the attention raises."""
    begun = _begun.pop((attend, gradients), None)
    if begun is not None:
        concurrent.futures.wait([begun])
    return jax.device_get(_results(attend, gradients, *map(jnp.asarray, inputs)))


def run_forward(attend: Attend, query, key, value) -> Results:
    """out, and lse if there is one, of a call that is not differentiated."""
    return run(attend, Inputs(query, key, value, query), gradients=False)


def begin(
    attend: Attend,
    inputs: Inputs,
    pool: concurrent.futures.Executor,
    *,
    gradients: bool = True,
) -> None:
    """Traces the program and has it compiled in the pool, for `run` to find it there.
    What that raises `run` will raise again."""
    with contextlib.suppress(Exception):
        arrays = (jax.ShapeDtypeStruct(x.shape, x.dtype) for x in inputs)
        traced = _results.lower(attend, gradients, *arrays)
        _begun[attend, gradients] = pool.submit(traced.compile)


def results(attend: Attend, gradients: bool, query, key, value, dout) -> dict:
    """To be compiled: what `run` gives, as JAX arrays."""

    def named(out: Array, lse: Array | None) -> dict[str, Array]:
        return {"out": out} | ({} if lse is None else {"lse": lse})

    if not gradients:
        return named(*attend(query, key, value))
    (out, lse), pullback = jax.vjp(attend, query, key, value)
    zero = None if lse is None else jnp.zeros_like(lse)
    found = pullback((dout.astype(out.dtype), zero))
    return named(out, lse) | dict(zip(GRADIENTS, found, strict=True))


_results = functools.partial(
    jax.jit, static_argnums=(0, 1), compiler_options=NO_GRAPHS
)(results)
