"""Which GPU gets which kernels, and what is refused where."""

import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from attn_jax import dot_product_attention
from attn_jax.kernels import architecture

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
    for capability, product in {"8.0": "mma", "9.0": "wgmma_ref"}.items():
        gpu(capability)
        # A new function each time: JAX keeps what it has traced.
        jaxpr = str(jax.make_jaxpr(lambda x: jax.vjp(attend, x)[1](x))(QUERY))
        assert products_in(jaxpr) == {product}
        kernels = "forward", "backward_dq", "backward_dkv"
        assert all(f"attention_{name}" in jaxpr for name in kernels)


@pytest.mark.parametrize(
    "options",
    [
        dict(is_causal=True, query_offset=jnp.array([3])),
        dict(local_window_size=4),
        dict(key_value_seq_lengths=jnp.array([5])),
    ],
    ids=str,
)
def test_a_mask_that_kernels_lack_is_refused_and_not_left_out(gpu, options):
    gpu("8.0")
    with pytest.raises(NotImplementedError, match="is_causal alone so far"):
        jax.eval_shape(lambda q: attend(q, implementation="pallas", **options), QUERY)
