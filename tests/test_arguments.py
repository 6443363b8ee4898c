"""Arguments that no implementation can use, and manual meshes with their type checks.

What is refused here would otherwise give a number: integers truncate the output,
complex inputs lose their imaginary part, a soft cap of 0 makes every logit the same.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

import attn_jax
from attn_jax.bounds import bound
from attn_jax.formats import BF16, Rounding
from attn_jax.recipe import FLASH2, Step


def inputs(B=2, T=5, S=7, N=4, K=2, H=8, dtype=jnp.float32):
    rng = np.random.default_rng(0)
    shapes = (B, T, N, H), (B, S, K, H), (B, S, K, H)
    return [jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes]


@pytest.mark.usefixtures("as_users_call_it")
@pytest.mark.parametrize("implementation", ["reference", "emulated", "xla", None])
@pytest.mark.parametrize(
    ("sizes", "arguments", "hint"),
    [
        (dict(S=0), {}, "at least 1"),
        (dict(T=0), {}, "at least 1"),
        (dict(H=0), {}, "at least 1"),
        (dict(K=0), {}, "at least 1"),
        (dict(dtype=int), {}, "query must be floating"),
        (dict(dtype=complex), {}, "query must be floating"),
        ({}, dict(mask=np.ones((1, 1, 5, 7), np.float32)), "^mask must be bool"),
        ({}, dict(mask=np.ones((1, 1, 4, 7), bool)), "^mask must broadcast"),
        ({}, dict(bias=np.ones((1, 1, 5, 7), bool)), "bias must be floating"),
        ({}, dict(key_value_seq_lengths=[2.5, 3.0]), "^key_value_seq_lengths must be "),
        ({}, dict(query_seq_lengths=[2, 3, 4]), "^query_seq_lengths must have shape"),
        ({}, dict(local_window_size=(-1, 2)), "^local_window_size must be "),
    ],
)
def test_meaningless_inputs_are_refused_in_one_line(
    implementation, sizes, arguments, hint
):
    with pytest.raises(ValueError, match=hint) as caught:
        attn_jax.dot_product_attention(
            *inputs(**sizes), implementation=implementation, **arguments
        )
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("as_users_call_it")
@pytest.mark.parametrize("implementation", ["reference", "emulated"])
@pytest.mark.parametrize("soft_cap", [0.0, -2.0, float("nan"), float("inf")])
def test_a_soft_cap_must_be_positive_and_finite(implementation, soft_cap):
    with pytest.raises(ValueError, match="soft_cap must be positive"):
        attn_jax.dot_product_attention(
            *inputs(), implementation=implementation, soft_cap=soft_cap
        )


_STOCHASTIC = dataclasses.replace(FLASH2, lse=Step(BF16, Rounding.STOCHASTIC))


@pytest.mark.usefixtures("as_users_call_it")
@pytest.mark.parametrize(
    "key", [0, "a", 1.5, [0, 1], np.uint32(3), np.arange(3, dtype=np.uint32)], ids=str
)
def test_what_is_no_key_is_refused_in_one_line(key):
    with pytest.raises(ValueError, match="one key of jax.random") as caught:
        attn_jax.emulator.attention(*inputs(), recipe=_STOCHASTIC, rounding_key=key)
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("as_users_call_it")
@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (dict(recipe="flash2"), "RECIPES\\['flash2'\\]"),
        (dict(out_dtype=jnp.int32), "out_dtype must be a floating type"),
        (dict(soft_cap="3"), "soft_cap must be a Python number"),
        (dict(soft_cap=1e39), "which a fp32 carrier holds"),
        (dict(scale=1e39), "which a fp32 carrier holds"),
        (dict(scale=1e-39), "which a fp32 carrier holds"),
        (
            dict(scale=1e-9, recipe=dataclasses.replace(FLASH2, dlogits_scale=2.0**99)),
            "which a fp32 carrier holds",
        ),
    ],
)
def test_the_emulator_refuses_what_it_would_get_wrong(arguments, hint):
    with pytest.raises(ValueError, match=hint) as caught:
        attn_jax.emulator.attention(*inputs(), **dict(recipe=FLASH2) | arguments)
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("as_users_call_it")
@pytest.mark.parametrize(
    ("changes", "dtype", "arguments", "hint"),
    [
        (dict(ring_size=2), jnp.float32, {}, "T to be a multiple of it, got T=5"),
        ({}, jnp.float16, {}, "takes bf16 inputs, got fp16"),
        (dict(carrier=BF16), jnp.float32, {}, "FP32 or FP64, not bf16"),
        ({}, jnp.float32, dict(dout=np.ones((2, 5, 4, 1))), "dout must have the shape"),
        ({}, jnp.float32, dict(confidence="x"), "between 0 and 1, got 'x'"),
        ({}, jnp.float32, dict(scale=1e39), "which a fp32 carrier holds"),
    ],
)
def test_bounds_refuse_what_the_emulator_refuses(changes, dtype, arguments, hint):
    recipe = dataclasses.replace(FLASH2, **changes)
    with pytest.raises((ValueError, NotImplementedError), match=hint) as caught:
        bound(recipe, *inputs(dtype=dtype), **arguments)
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="recipe must be a Recipe"):
        bound("flash2", *inputs())  # pyright: ignore[reportArgumentType]


@pytest.mark.usefixtures("as_users_call_it")
def test_a_traced_soft_cap_is_refused_in_one_line():
    @jax.jit
    def attend(soft_cap):
        return attn_jax.dot_product_attention(
            *inputs(), implementation="reference", soft_cap=soft_cap
        )

    with pytest.raises(ValueError, match="soft_cap must be a Python number"):
        attend(2.0)


@pytest.mark.parametrize("implementation", ["reference", "emulated"])
def test_gradients_of_inputs_that_all_devices_share(implementation):
    """Queries split over a mesh axis, all else the same on each device: the gradients
    of the latter are sums over the devices, under shard_map's own checks."""
    mesh = jax.make_mesh(
        (2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2]
    )
    query, key, value = inputs(B=1, T=8, dtype=jnp.bfloat16)
    sinks, bias = jnp.arange(4.0), jnp.ones((1, 1, 1, 7))
    weights = jnp.asarray(np.random.default_rng(1).standard_normal(query.shape))

    def attend(query, key, value, bias, sinks):
        return attn_jax.dot_product_attention(
            query, key, value, bias, sinks=sinks, implementation=implementation
        )

    rows, whole = PartitionSpec(None, "data"), PartitionSpec()
    sharded = jax.shard_map(
        attend,
        mesh=mesh,
        in_specs=(rows, whole, whole, whole, whole),
        out_specs=rows,
    )
    arguments = query, key, value, bias, sinks
    here, there = (
        jax.jit(
            jax.grad(
                lambda *xs, f=f: jnp.sum(f(*xs).astype(jnp.float32) * weights),
                range(5),
            )
        )(*arguments)
        for f in (attend, sharded)
    )
    for name, x, y in zip("query key value bias sinks".split(), here, there):
        x, y = np.asarray(x, np.float32), np.asarray(y, np.float32)
        # Two halves rounded to 8 bits each and their sum once more, where the whole
        # is rounded once: four times half an ulp of the largest, which a half can
        # exceed by cancellation, but not fourfold. A device left out is off by half.
        np.testing.assert_allclose(
            y, x, atol=4 * 4 * 2.0**-8 * abs(x).max(), err_msg=name
        )
