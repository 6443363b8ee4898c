"""Which GPU gets which kernels, and what is refused where."""

import functools
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from attn_jax import dot_product_attention
from attn_jax.formats import FP16
from attn_jax.kernels import architecture, design, tuning
from attn_jax.kernels.attention import attention, backward_of
from attn_jax.kernels.hopper_fused_work import Shapes
from attn_jax.mask import Mask

QUERY = jax.ShapeDtypeStruct((1, 128, 2, 64), jnp.bfloat16)


@pytest.fixture
def gpu(monkeypatch):
    """`gpu("8.0")`: computations are placed on a GPU of that compute capability."""

    def place(capability: str) -> None:
        device = SimpleNamespace(compute_capability=capability, device_kind="some GPU")
        monkeypatch.setattr(architecture, "default_device", lambda: device)

    return place


def attend(query, **options):
    return dot_product_attention(query, query, query, **options)


def products(**options) -> set[str]:
    """Names of the matrix products in the traced program."""
    return products_in(str(jax.make_jaxpr(lambda x: attend(x, **options))(QUERY)))


def products_in(jaxpr: str) -> set[str]:
    return set(re.findall(r"\b(?:wgmma_ref|mma|dot_general)\b", jaxpr))


def test_the_gpu_says_whose_kernels_run(gpu):
    assert architecture.chosen() == "hopper"
    for capability, name in {"8.0": "ampere", "9.0": "hopper"}.items():
        gpu(capability)
        assert architecture.chosen() == name


def test_kernels_can_be_made_for_another_gpu(gpu):
    gpu("9.0")
    with architecture.made_for("ampere"):
        assert architecture.chosen() == "ampere"
        assert products(implementation="pallas") == {"mma"}
    assert architecture.chosen() == "hopper"


@pytest.mark.parametrize("capability", ["8.6", "8.9", "10.0", "12.0"])
def test_other_gpus_are_refused_in_one_line(gpu, capability):
    gpu(capability)
    with pytest.raises(NotImplementedError, match="8.0 or 9.0.*some GPU") as error:
        jax.eval_shape(lambda q: attend(q, implementation="pallas"), QUERY)
    assert "\n" not in str(error.value)


def test_each_gpu_gets_its_gradients(gpu):
    for capability, product, backward in (
        ("8.0", "mma", ["dq", "dkv"]),
        ("9.0", "wgmma_ref", ["fused"]),
    ):
        gpu(capability)
        # A new function each time: JAX keeps what it has traced.
        many = jax.ShapeDtypeStruct((64, *QUERY.shape[1:]), QUERY.dtype)
        jaxpr = str(jax.make_jaxpr(lambda x: jax.vjp(attend, x)[1](x))(many))
        assert products_in(jaxpr) == {product}
        kernels = "forward", *(f"backward_{name}" for name in backward)
        assert all(f"attention_{name}" in jaxpr for name in kernels)


@pytest.mark.parametrize("capability", ["8.0", "9.0"])
@pytest.mark.parametrize(
    "options",
    [
        dict(is_causal=True, query_offset=jnp.array([3])),
        dict(local_window_size=4, sinks=jnp.zeros(2), soft_cap=5.0),
        dict(key_value_seq_lengths=jnp.array([5])),
        dict(bias=jnp.ones((1, 1, 128, 128))),
    ],
    ids=str,
)
def test_kernels_are_the_default_with_every_feature(gpu, capability, options):
    gpu(capability)
    product = {"8.0": "mma", "9.0": "wgmma_ref"}[capability]
    assert products(**options) == {product}


SQUARE, LONGER = (1, 256, 2, 64), (1, 384, 1, 64)
WINDOW_OF_LENGTHS = Mask(window=(64, 0), key_value_lengths=jnp.array([9]))


@pytest.mark.parametrize(
    ("target", "shapes", "mask", "soft_cap", "design"),
    [
        ("hopper", (SQUARE, SQUARE), Mask(), None, "fused"),
        ("hopper", (SQUARE, LONGER), Mask(), None, "fused"),
        ("hopper", (SQUARE, SQUARE), Mask(is_causal=True), None, "fused"),
        ("hopper", (SQUARE, LONGER), Mask(is_causal=True), None, "two_kernels"),
        ("hopper", (SQUARE, SQUARE), Mask(window=(64, 0)), None, "fused"),
        ("hopper", (SQUARE, SQUARE), Mask(True, (9, 9)), None, "fused"),
        ("hopper", (SQUARE, LONGER), Mask(window=(64, 0)), None, "two_kernels"),
        ("hopper", (SQUARE, SQUARE), Mask(window=(None, 4)), None, "two_kernels"),
        ("hopper", (SQUARE, SQUARE), WINDOW_OF_LENGTHS, None, "two_kernels"),
        ("hopper", (SQUARE, SQUARE), Mask(), 30.0, "two_kernels"),
        ("hopper", ((1, 256, 2, 96),) * 2, Mask(), None, "two_kernels"),
        ("hopper", (SQUARE, (1, 256, 2, 128)), Mask(), None, "two_kernels"),
        ("ampere", (SQUARE, SQUARE), Mask(), None, "fused"),
        ("ampere", (SQUARE, LONGER), Mask(), None, "fused"),
        ("ampere", (SQUARE, SQUARE), Mask(is_causal=True), None, "fused"),
        ("ampere", (SQUARE, LONGER), Mask(is_causal=True), None, "two_kernels"),
        ("ampere", (SQUARE, SQUARE), Mask(window=(64, 0)), None, "two_kernels"),
        ("ampere", (SQUARE, SQUARE), Mask(), 30.0, "two_kernels"),
        ("ampere", ((1, 256, 2, 96),) * 2, Mask(), None, "two_kernels"),
        ("ampere", (SQUARE, (1, 256, 2, 128)), Mask(), None, "two_kernels"),
    ],
)
def test_one_pass_backward_is_for_what_it_takes(target, shapes, mask, soft_cap, design):
    chosen = functools.partial(backward_of, *shapes, target, mask, soft_cap=soft_cap)
    assert chosen(wanted="fused") == design
    assert chosen(wanted="two_kernels") == "two_kernels"
    assert chosen(wanted="fused", has_bias=True) == "two_kernels"


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_ampere_makes_gradients_in_one_pass_of_many_keys_in_bf16(head_dim, is_causal):
    def chosen(length: int, **options) -> str:
        shape = 1, length, 2, head_dim
        return backward_of(shape, shape, "ampere", Mask(is_causal), **options)

    least = design.LEAST_KEYS[head_dim] * (2 if is_causal else 1)
    assert (chosen(least - 1), chosen(least)) == ("two_kernels", "fused")
    for wanted in (None, "fused"):
        assert chosen(least, inputs=FP16, wanted=wanted) == "two_kernels"


@pytest.mark.parametrize(
    ("length", "heads", "key_heads", "is_causal", "design"),
    [
        # 32 tiles of key heads for 108 multiprocessors, 256 of query heads.
        (4096, 8, 1, False, "two_kernels"),
        # 64, of which the longest sees twice the mean.
        (4096, 8, 2, True, "two_kernels"),
        # 128: some multiprocessors have two, the others one.
        (2048, 64, 8, False, "two_kernels"),
        (2048, 64, 8, True, "two_kernels"),
        (8192, 64, 8, False, "fused"),
        (8192, 64, 8, True, "fused"),
        (4096, 2, 2, False, "fused"),
    ],
)
def test_ampere_makes_gradients_in_one_pass_if_groups_of_heads_fill_the_card(
    monkeypatch, length, heads, key_heads, is_causal, design
):
    monkeypatch.setattr(architecture, "multiprocessors", lambda: None)  # an A100's
    shapes = (1, length, heads, 128), (1, length, key_heads, 128)
    assert backward_of(*shapes, "ampere", Mask(is_causal)) == design
    assert backward_of(*shapes, "ampere", Mask(is_causal), wanted="fused") == "fused"


@pytest.mark.parametrize(
    ("multiprocessors", "design"), [(114, "two_kernels"), (132, "fused")]
)
def test_one_pass_backward_needs_the_whole_card(monkeypatch, multiprocessors, design):
    """Fewer multiprocessors than a ring has CTAs: they would wait for ever."""
    device = SimpleNamespace(compute_capability="9.0", core_count=multiprocessors)
    monkeypatch.setattr(architecture, "default_device", lambda: device)
    assert backward_of(SQUARE, SQUARE, "hopper", wanted="fused") == design


@pytest.mark.parametrize(
    ("batch", "length", "heads", "full", "causal"),
    [
        # 128 of 132 multiprocessors busy, and all of them under a causal mask.
        (16, 1024, 16, "fused", "fused"),
        (1, 4096, 8, "fused", "fused"),
        (1, 2048, 4, "two_kernels", "two_kernels"),
        # 64 tiles, of which two causal ones go to a CTA.
        (1, 4096, 2, "two_kernels", "two_kernels"),
        (1, 8192, 1, "two_kernels", "two_kernels"),
        (1, 16384, 1, "fused", "two_kernels"),
    ],
)
def test_one_pass_backward_is_where_it_fills_the_card(
    batch, length, heads, full, causal
):
    shape = (batch, length, heads, 128)
    chosen = functools.partial(backward_of, shape, shape, "hopper")
    assert (chosen(Mask()), chosen(Mask(is_causal=True))) == (full, causal)
    assert chosen(Mask(is_causal=True), wanted="fused") == "fused"


@pytest.mark.parametrize(
    ("batch", "length", "heads", "key_heads", "is_causal", "parts"),
    [
        # Half of the card by one CTA for all heads of a tile, and an eighth.
        (1, 2048, 64, 8, True, 2),
        (1, 512, 64, 8, True, 8),
        (1, 2048, 16, 1, False, 8),
        # The card is full; eight heads one after the other are slower by themselves.
        (1, 16384, 64, 8, True, 4),
        (1, 8192, 64, 8, False, 1),
        # Four are not, or not by more than the sums cost.
        (8, 2048, 32, 8, True, 1),
        (4, 8192, 32, 8, True, 1),
        (4, 8192, 32, 32, True, 1),
    ],
)
def test_query_heads_are_dealt_in_as_many_parts_as_pays(
    batch, length, heads, key_heads, is_causal, parts
):
    """As `results/prototypes/parts.csv` has it."""
    shapes = Shapes(batch, length, length, heads, key_heads, 128)
    plan = tuning.fused(128, length, is_causal=is_causal)
    assert shapes.in_parts(plan, is_causal=is_causal).parts == parts
    query, key = (batch, length, heads, 128), (batch, length, key_heads, 128)
    assert backward_of(query, key, "hopper", Mask(is_causal)) == "fused"


def _in_a_scan(attend):
    return lambda x, bias: jax.lax.scan(
        lambda x, _: (attend(x, bias), None), x, None, length=2
    )[0]


@pytest.mark.parametrize(
    "transform",
    [lambda attend: attend, jax.jit, jax.checkpoint, _in_a_scan],
    ids=["plain", "jit", "remat", "scan"],
)
def test_the_kernel_for_dbias_runs_where_a_bias_is_differentiated_alone(transform):
    bias = jax.ShapeDtypeStruct((1, 2, 128, 1), jnp.bfloat16)

    def kernels(argnums, held=lambda x: x):
        @transform
        def attend(x, bias):
            return attention(x, x, x, scale=0.125, bias=held(bias))[0]

        def loss(x, bias):
            return attend(x, bias).astype(jnp.float32).sum()

        jaxpr = str(jax.make_jaxpr(jax.grad(loss, argnums))(QUERY, bias))
        assert "attention_backward_dq" in jaxpr
        return "attention_backward_dbias" in jaxpr

    assert kernels(1) and kernels((0, 1))
    assert not kernels(0)
    assert not kernels((0, 1), held=jax.lax.stop_gradient)


def test_backward_is_the_one_asked_for(gpu):
    gpu("9.0")

    def gradients(backward):
        def attend(x):
            return attention(x, x, x, scale=0.125, backward=backward)[0]

        return str(jax.make_jaxpr(lambda x: jax.vjp(attend, x)[1](x))(QUERY))

    assert "attention_backward_fused" in gradients("fused")
    assert "attention_backward_dq" not in gradients("fused")
    assert "attention_backward_dq" in gradients("two_kernels")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_tilings_without_a_plan_do_without_the_one_pass_kernel(gpu, dtype):
    """A window's tilings of a caller, of the table that other masks have."""
    gpu("9.0")
    shape = jax.ShapeDtypeStruct((8, 4096, 8, 64), dtype)
    window = Mask(window=(64, 0))
    assert backward_of(shape.shape, shape.shape, "hopper", window) == "fused"
    tilings = tuning.configuration(
        *("hopper", 64, 64, 4096), is_causal=False, listed=True
    )

    def loss(query, key, value):
        out, _ = attention(query, key, value, scale=0.1, mask=window, tilings=tilings)
        return out.astype(jnp.float32).sum()

    traced = str(jax.make_jaxpr(jax.grad(loss))(shape, shape, shape))
    assert "attention_backward_dq" in traced
    assert "attention_backward_fused" not in traced
