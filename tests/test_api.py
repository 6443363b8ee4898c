"""The public function: signature, shapes, transformations, refusals, gradients."""

import functools
import inspect

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import attn_jax
from attn_jax import reference
from attn_jax.audit.error import unit_error
from attn_jax.formats import BF16
from attn_jax.kernels.attention import declared_recipe
from attn_jax.mask import Mask
from attn_jax.recipe import ATTN_JAX, FLASH2

CPU_IMPLEMENTATIONS = ("emulated", "reference", "xla")


def draw(shape, seed, dtype=jnp.bfloat16):
    values = np.random.default_rng(seed).standard_normal(shape)
    return jnp.asarray(values, jnp.float32).astype(dtype)


def inputs(B=2, T=40, S=56, N=4, K=2, H=64, dtype=jnp.bfloat16):
    query, dout = draw((B, T, N, H), 0, dtype), draw((B, T, N, H), 3, dtype)
    return query, draw((B, S, K, H), 1, dtype), draw((B, S, K, H), 2, dtype), dout


@functools.partial(jax.jit, static_argnums=0)
def with_gradients(attend, query, key, value, dout):
    """(out, gradients) in one program; `test_output_and_gradients...` goes op by op."""
    out, vjp = jax.vjp(attend, query, key, value)
    return out, vjp(dout)


def test_takes_the_whole_signature_of_jax_nn_in_its_order():
    ours = inspect.signature(attn_jax.dot_product_attention).parameters
    theirs = inspect.signature(jax.nn.dot_product_attention).parameters
    positional = [
        name for name, p in theirs.items() if p.kind == p.POSITIONAL_OR_KEYWORD
    ]
    assert list(ours)[: len(positional)] == positional
    assert set(theirs) <= set(ours)
    for name, parameter in theirs.items():
        assert ours[name].kind == parameter.kind, name
        assert ours[name].default == parameter.default, name


@pytest.mark.parametrize("implementation", CPU_IMPLEMENTATIONS)
@pytest.mark.parametrize("is_causal", [False, True])
def test_output_and_gradients_are_near_the_exact_ones(implementation, is_causal):
    query, key, value, dout = inputs()
    out, vjp = jax.vjp(
        lambda *args: attn_jax.dot_product_attention(
            *args, is_causal=is_causal, implementation=implementation
        ),
        query,
        key,
        value,
    )
    golden = reference.golden(query, key, value, dout, mask=Mask(is_causal=is_causal))
    exact = (golden.out, golden.dquery, golden.dkey, golden.dvalue)
    for name, x, y in zip("out dq dk dv".split(), (out, *vjp(dout)), exact):
        # A few roundings of 16 bit each; wrong wiring is hundreds of units off. XLA
        # rounds P and dP once more than the others.
        limit = 4.0 if implementation == "xla" else 1.7
        assert unit_error(x, y, BF16) <= limit, name


def test_arguments_mean_what_they_mean_in_jax_nn():
    query, key, value, _ = inputs(T=48, S=48, dtype=jnp.float32)
    lengths = jnp.array([30, 48])
    cases = [
        dict(is_causal=True, scale=0.3),
        dict(local_window_size=5),
        dict(local_window_size=(7, 2)),
        dict(key_value_seq_lengths=lengths),
        dict(bias=draw((1, 4, 48, 48), 5, jnp.float32)),
        dict(mask=draw((2, 1, 48, 48), 6) > -1),
    ]
    for case in cases:
        expected = jax.nn.dot_product_attention(query, key, value, **case)
        ours = attn_jax.dot_product_attention(
            query, key, value, implementation="reference", **case
        )
        # Both compute in FP32 with 48 terms a sum: 48 * 2^-24 of values up to about 4.
        np.testing.assert_allclose(
            ours, expected, atol=4 * 48 * 2.0**-24, err_msg=str(case)
        )


def test_segments_separate_documents_in_every_implementation():
    query, key, value, _ = inputs(T=48, S=48)
    ids = jnp.repeat(jnp.array([[0, 1, 2]] * 2), 16, axis=1)
    for implementation in CPU_IMPLEMENTATIONS:
        attend = functools.partial(
            attn_jax.dot_product_attention,
            query_segment_ids=ids,
            key_value_segment_ids=ids,
            implementation=implementation,
        )
        packed = jax.jit(attend)(query, key, value)
        alone = attn_jax.dot_product_attention(
            query[:, 16:32], key[:, 16:32], value[:, 16:32], implementation="reference"
        )
        # Each is within a few roundings of the exact result; another document's keys
        # move it by order one.
        np.testing.assert_allclose(
            packed[:, 16:32].astype(jnp.float32),
            alone.astype(jnp.float32),
            atol=4 * 4 * BF16.unit_roundoff,
            err_msg=implementation,
        )


@pytest.mark.parametrize("more", [{}, {"local_window_size": (9, 0)}], ids=str)
def test_an_offset_gives_the_last_queries_what_they_see_among_all(more):
    query, key, value, _ = inputs(T=48, S=48)
    for implementation in CPU_IMPLEMENTATIONS:
        attend = functools.partial(
            attn_jax.dot_product_attention,
            is_causal=True,
            implementation=implementation,
            **more,
        )
        every = attend(query, key, value)
        for offset in (32, jnp.array([32, 32])):
            last = attend(query[:, 32:], key, value, query_offset=offset)
            # Sums of other lengths, then a rounding to 16 bit: neighbours at most.
            np.testing.assert_allclose(
                last.astype(jnp.float32),
                every[:, 32:].astype(jnp.float32),
                atol=4 * BF16.unit_roundoff,
                err_msg=implementation,
            )


def test_unbatched_inputs_and_the_residual_have_jax_nn_shapes():
    query, key, value, _ = inputs()
    out, lse = attn_jax.dot_product_attention(
        query, key, value, implementation="reference", return_residual=True
    )
    assert out.shape == query.shape and lse.shape == query.shape[:3]
    one, one_lse = attn_jax.dot_product_attention(
        query[1], key[1], value[1], implementation="reference", return_residual=True
    )
    np.testing.assert_array_equal(one, out[1])
    np.testing.assert_array_equal(one_lse, lse[1])
    logits = np.einsum(
        "tnh,snh->tns",
        np.asarray(query[1], np.float64),
        np.repeat(np.asarray(key[1], np.float64), 2, axis=1),
    )
    expected = np.log(np.exp(logits / 8).sum(-1))
    # Natural log, FP32: sums of 64 and 56 terms of size up to about 4.
    np.testing.assert_allclose(one_lse, expected, atol=4 * 120 * 2.0**-24)


@pytest.mark.parametrize("implementation", ["emulated", "reference"])
def test_the_residual_is_differentiable(implementation):
    query, key, value, _ = inputs(B=1, N=2, K=2)
    dlse = draw((1, 40, 2), 7, jnp.float32)

    def total(*args):
        _, lse = attn_jax.dot_product_attention(
            *args, implementation=implementation, return_residual=True
        )
        return jnp.sum(lse * dlse)

    dquery, dkey, dvalue = jax.jit(jax.grad(total, (0, 1, 2)))(query, key, value)
    golden = reference.golden(
        query, key, value, jnp.zeros_like(query), dlse.swapaxes(1, 2)
    )
    assert unit_error(dquery, golden.dquery, BF16) <= 1.7
    assert unit_error(dkey, golden.dkey, BF16) <= 1.7
    assert not np.any(np.asarray(dvalue, np.float32))


@pytest.mark.parametrize("implementation", CPU_IMPLEMENTATIONS)
def test_transformations_change_no_bit(implementation):
    query, key, value, dout = inputs()

    def loss(query, key, value):
        out = attn_jax.dot_product_attention(
            query, key, value, implementation=implementation, is_causal=True
        )
        return jnp.vdot(out.astype(jnp.float32), dout[: len(out)].astype(jnp.float32))

    grads = jax.jit(jax.grad(loss, (0, 1, 2)))(query, key, value)
    remat = jax.jit(jax.grad(jax.checkpoint(loss), (0, 1, 2)))(query, key, value)
    for plain, again in zip(grads, remat):
        np.testing.assert_array_equal(plain, again)

    def attend(query, key, value):
        return attn_jax.dot_product_attention(
            query, key, value, implementation=implementation
        )

    mapped = jax.jit(jax.vmap(attend))(query, key, value)
    batched = jax.jit(attend)(query, key, value)
    if implementation == "xla":  # XLA may choose another product for another rank.
        ulp = 2 * BF16.unit_roundoff
        np.testing.assert_allclose(
            mapped.astype(jnp.float32), batched.astype(jnp.float32), rtol=ulp, atol=ulp
        )
    else:
        np.testing.assert_array_equal(mapped, batched)


@pytest.mark.parametrize("implementation", CPU_IMPLEMENTATIONS)
def test_runs_inside_shard_map(implementation):
    mesh = jax.make_mesh(
        (2,),
        ("data",),
        axis_types=(jax.sharding.AxisType.Auto,),
        devices=jax.devices()[:2],
    )
    query, key, value, _ = inputs()

    def attend(query, key, value):
        return attn_jax.dot_product_attention(
            query, key, value, implementation=implementation
        )

    rows = PartitionSpec("data")
    sharded = jax.shard_map(
        attend, mesh=mesh, in_specs=(rows,) * 3, out_specs=rows, check_vma=False
    )
    np.testing.assert_array_equal(
        jax.jit(sharded)(query, key, value), jax.jit(attend)(query, key, value)
    )


@pytest.mark.parametrize("implementation", CPU_IMPLEMENTATIONS)
def test_works_with_x64_on(implementation):
    query, key, value, dout = inputs()

    def attend(*args):
        return attn_jax.dot_product_attention(*args, implementation=implementation)

    with jax.enable_x64(True):
        results = with_gradients(attend, query, key, value, dout)
    # Waited for: what a program dies of is to be this test's.
    out, grads = jax.block_until_ready(results)
    assert out.dtype == jnp.bfloat16
    assert [g.dtype for g in grads] == [jnp.bfloat16] * 3


def test_emulated_follows_the_recipe_it_is_given():
    # Values in [0, 1) make delta from the rounded output, as in flash2, cost dQ dearly.
    shape = (1, 256, 2, 64)
    rng = np.random.default_rng(0)
    query, key, value = (
        jnp.asarray(rng.random(shape), jnp.float32).astype(jnp.bfloat16)
        for _ in range(3)
    )
    dout = draw(shape, 3)
    golden = reference.golden(query, key, value, dout)

    def error(recipe):
        def attend(*args):
            return attn_jax.dot_product_attention(
                *args, implementation="emulated", recipe=recipe
            )

        _, gradients = with_gradients(attend, query, key, value, dout)
        return unit_error(gradients[0], golden.dquery, BF16)

    assert error(None) <= 1.7 < 10 < error(FLASH2)


CAUSAL = jnp.bfloat16, 64, 256, Mask(is_causal=True)


@pytest.mark.parametrize(
    ("head_dim", "options", "expected"),
    [
        (64, {}, declared_recipe(jnp.bfloat16, 64, 256, target="hopper", pairs=34)),
        pytest.param(
            *(64, dict(is_causal=True)),
            declared_recipe(*CAUSAL, target="hopper", pairs=34),
            marks=pytest.mark.ci,
        ),
        pytest.param(
            *(96, {}, declared_recipe(jnp.bfloat16, 96, 256, target="hopper")),
            marks=pytest.mark.thorough,
        ),
        (48, {}, ATTN_JAX),
        pytest.param(
            *(64, dict(bias=jnp.ones((1, 2, 256, 256)))),
            declared_recipe(jnp.bfloat16, 64, 256, target="hopper", has_bias=True),
            marks=pytest.mark.ci,
        ),
    ],
)
def test_emulated_follows_the_kernels_if_not_told_otherwise(
    head_dim, options, expected
):
    """Found: it had the centre of a backward pass that the kernels no longer ran."""
    shape = (17, 256, 2, head_dim)  # so many that one pass fills half of a card
    arrays = [draw(shape, seed) + 1 for seed in range(4)]

    def gradients(recipe):
        def attend(*args):
            return attn_jax.dot_product_attention(
                *args, implementation="emulated", recipe=recipe, **options
            )

        return with_gradients(attend, *arrays)

    chex.assert_trees_all_equal(gradients(None), gradients(expected), strict=True)


def test_recipes_of_both_backward_passes_differ():
    """Else the test above could not fail."""
    full = declared_recipe(jnp.bfloat16, 64, 256, target="hopper", pairs=34)
    causal = declared_recipe(*CAUSAL, target="hopper", pairs=34)
    assert (full.dq_centre, causal.dq_centre) == ("keys", "mean")


def test_float32_output_is_not_rounded():
    query, key, value, dout = inputs()
    golden = reference.golden(query, key, value, dout)
    for implementation in ("emulated", "reference"):
        out = attn_jax.dot_product_attention(
            query, key, value, implementation=implementation, out_dtype=jnp.float32
        )
        assert out.dtype == jnp.float32
        error = np.linalg.norm(np.asarray(out, np.float64) - golden.out)
        # Only P is rounded in the emulated one: below half a BF16 rounding in norm.
        assert error <= 0.75 * BF16.unit_roundoff * np.linalg.norm(golden.out)


@pytest.mark.usefixtures("as_users_call_it")
def test_refusals_are_one_line_that_says_what_works():
    query, key, value, _ = inputs()
    attend = attn_jax.dot_product_attention
    refusals = [
        (dict(implementation="pallas"), NotImplementedError, "'emulated'"),
        (dict(implementation="cudnn"), NotImplementedError, "'xla'"),
        (dict(implementation="flash"), ValueError, "pallas, emulated, reference"),
        (
            dict(implementation="xla", return_residual=True),
            NotImplementedError,
            "'reference'",
        ),
        (dict(implementation="xla", soft_cap=5.0), NotImplementedError, "'emulated'"),
        (
            dict(implementation="xla", out_dtype=jnp.float32),
            NotImplementedError,
            "'emulated'",
        ),
        (dict(implementation="xla", recipe=FLASH2), ValueError, "'emulated'"),
        (dict(scale=jnp.float32(2)), ValueError, "multiply query"),
        (dict(query_segment_ids=jnp.zeros((2, 40), int)), ValueError, "together"),
    ]
    for arguments, error, hint in refusals:
        with pytest.raises(error) as caught:
            attend(query, key, value, **arguments)
        message = str(caught.value)
        assert hint in message and "\n" not in message, message
    with pytest.raises(ValueError, match="multiple"):
        attend(query[:, :, :3], key, value)


def test_none_chooses_what_can_run():
    query, key, value, _ = inputs()
    np.testing.assert_array_equal(
        attn_jax.dot_product_attention(query, key, value),
        attn_jax.dot_product_attention(query, key, value, implementation="xla"),
    )
    np.testing.assert_array_equal(
        attn_jax.dot_product_attention(query, key, value, soft_cap=3.0),
        attn_jax.dot_product_attention(
            query, key, value, soft_cap=3.0, implementation="reference"
        ),
    )


@pytest.mark.parametrize("implementation", CPU_IMPLEMENTATIONS)
def test_queries_without_keys_give_zero(implementation):
    query, key, value, dout = inputs()
    lengths = jnp.array([0, 56])

    def attend(query, key, value):
        return attn_jax.dot_product_attention(
            query,
            key,
            value,
            key_value_seq_lengths=lengths,
            implementation=implementation,
        )

    out, gradients = with_gradients(attend, query, key, value, dout)
    assert not np.any(np.asarray(out[0], np.float32))
    assert np.all(np.isfinite(np.asarray(out[1], np.float32)))
    for gradient in gradients:
        assert not np.any(np.asarray(gradient[0], np.float32))


@pytest.mark.usefixtures("as_users_call_it")
def test_values_of_the_wrong_kind_are_refused_in_one_line():
    query, key, value, _ = inputs()
    refusals = [
        (dict(scale="a"), "scale"),
        (dict(scale=float("nan")), "scale"),
        (dict(out_dtype="bogus"), "out_dtype"),
        (dict(out_dtype=jnp.int32), "floating"),
        (dict(out_dtype=np.float64), "jax_enable_x64"),
        (dict(recipe="flash2", implementation="emulated"), "RECIPES['flash2']"),
        (dict(is_causal=jnp.array(True)), "is_causal"),
    ]
    for arguments, hint in refusals:
        with pytest.raises(ValueError) as caught:
            attn_jax.dot_product_attention(query, key, value, **arguments)
        assert hint in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="one type"):
        attn_jax.dot_product_attention(query, key.astype(jnp.float32), value)


@pytest.mark.usefixtures("as_users_call_it")
def test_windows_may_be_numpy_numbers_or_lists():
    query, key, value, _ = inputs()

    def attend(window):
        return attn_jax.dot_product_attention(
            query, key, value, local_window_size=window, implementation="reference"
        )

    np.testing.assert_array_equal(attend(np.int64(3)), attend((3, 3)))
    np.testing.assert_array_equal(attend([3, 2]), attend((3, 2)))
