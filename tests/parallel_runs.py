"""Context-parallel attention on the tests' CPU devices, and the exact results."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from attn_jax import context_parallel, reference
from attn_jax.context_parallel import ring
from attn_jax.mask import Mask

ULYSSES = 2


def mesh_of(shards: int, strategy: str) -> Mesh:
    both = strategy == "ring+ulysses"
    sizes = (shards, ULYSSES) if both else (shards,)
    devices = np.asarray(jax.devices()[: int(np.prod(sizes))]).reshape(sizes)
    names = ("ring", "ulysses") if both else ("ring",)
    return Mesh(devices, names, axis_types=(AxisType.Auto,) * len(names))


def sharded(shards: int, strategy: str, layout: str, *, ids=None, **options):
    """attention(q, k, v, bias=None) of whole arrays, dealt to devices in the layout's
    order."""
    mesh = mesh_of(shards, strategy)
    axis = mesh.axis_names if len(mesh.axis_names) > 1 else mesh.axis_names[0]
    rows, lse = P(None, mesh.axis_names), P(None, None, mesh.axis_names)
    attend = functools.partial(
        context_parallel.attention,
        axis_name=axis,
        strategy=strategy,
        layout=layout,
        **options,
    )

    def local(q, k, v, bias, ids):
        given = {} if ids is None else dict(zip(_IDS, ids, strict=True))
        return attend(q, k, v, bias=bias, **given)

    def whole(q, k, v, bias=None):
        for_all = bias is None or bias.shape[2] == 1
        run = jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(rows, rows, rows, P() if for_all else lse, rows),
            out_specs=(rows, lse),
        )
        to = functools.partial(context_parallel.to_layout, shards=shards, layout=layout)
        back = functools.partial(
            context_parallel.from_layout, shards=shards, layout=layout
        )
        for axis in (2, 3):
            if bias is not None and bias.shape[axis] > 1:
                bias = to(bias, axis=axis)
        out, rows_lse = run(to(q), to(k), to(v), bias, jax.tree.map(to, ids))
        return back(out), back(rows_lse, axis=2)

    return whole


_IDS = "query_segment_ids", "key_value_segment_ids"


def simulated(shards: int, strategy: str, layout: str, *, ids=None, **options):
    given = {} if ids is None else dict(zip(_IDS, ids, strict=True))
    given |= dict(shards=shards, strategy=strategy, layout=layout)

    def whole(q, k, v, bias=None):
        return context_parallel.simulate(q, k, v, bias=bias, **given, **options)

    return whole


def both_passes(attend):
    """(out, LSE, dQ, dK, dV) of (q, k, v, dO, dLSE), compiled; with a bias, too, and
    dbias."""

    @jax.jit
    def run(q, k, v, dout, dlse, *bias):
        results, pullback = jax.vjp(attend, q, k, v, *bias)
        return *results, *pullback((dout.astype(results[0].dtype), dlse))

    return run


def stale_keys(monkeypatch) -> None:
    """diffusers issue 14265: at each hop the backward pass of a ring reads this
    device's own keys, those of the first hop. What travels is what travelled, and the
    forward pass is as it was."""
    backward, add_backward = ring.backward, ring.add_backward

    def wrong(static, x, *residuals):
        def add(block, meetings, total, shard, *more, **options):
            shard = x.meets(None, 0)
            return add_backward(block, meetings, total, shard, *more, **options)

        with monkeypatch.context() as patch:
            patch.setattr(ring, "add_backward", add)
            return backward(static, x, *residuals)

    monkeypatch.setattr(ring, "backward", wrong)


def arrays(query_shape, key_shape, dtype, seed=0):
    """q, k, v, dO and dLSE."""
    rng = np.random.default_rng(seed)
    B, T, N, _ = query_shape
    shapes = query_shape, key_shape, key_shape, query_shape
    return *(jnp.asarray(rng.standard_normal(s), dtype) for s in shapes), jnp.asarray(
        rng.standard_normal((B, N, T)), jnp.promote_types(dtype, jnp.float32)
    )


def exact(given, bias=None, *, is_causal=False, local_window_size=None, ids=None):
    """(out, LSE, dQ, dK, dV) in FP64; with a bias, too, and dbias."""
    mask = Mask(is_causal, local_window_size)
    if ids is not None:
        mask = Mask(
            is_causal,
            local_window_size,
            query_segment_ids=ids[0],
            key_value_segment_ids=ids[1],
        )
    found = reference.golden(*given, bias=bias, mask=mask)
    return found[:5] if bias is None else found[:6]
