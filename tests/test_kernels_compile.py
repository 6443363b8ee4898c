"""The kernels compile to machine code that is as fast as it is meant to be.

Hopper's for the H200, Ampere's for the A100 and, to be tried there, for the H200.
Checked in what ptxas reports and in the disassembly, without a GPU: nothing spills to
memory, no matrix product is serialised, softmax overlaps with matrix products.
"""

import re
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import pytest

from attn_jax import dot_product_attention
from attn_jax.kernels import ampere_tiles
from attn_jax.kernels.architecture import made_for
from attn_jax.kernels.attention import attention
from attn_jax.kernels.compiler import shared_memory
from attn_jax.mask import Mask
from tests.child_process import in_child_process
from tests.gpu_compiler import Gpu, Kernel, Program, compiled

pytestmark = pytest.mark.ci

pytest.importorskip("jax_cuda13_plugin", reason="needs the extra `compile`")

TIME_LIMIT = 240  # seconds; three kernels take six alone on a core
# They make no product, and have tests of their own.
SUMS = {"attention_key_numbers", "attention_row_sums"}


# The fused backward kernel has a test beside its others.
def _forward_and_backward(
    head_dim: int,
    dtype: str,
    is_causal: bool,
    gpu: Gpu = "h200",
    key_length: int = 1100,
    value_dim: int | None = None,
) -> Program:
    query = jax.ShapeDtypeStruct((1, 1000, 4, head_dim), dtype)
    key = jax.ShapeDtypeStruct((1, key_length, 2, head_dim), dtype)
    value = jax.ShapeDtypeStruct((1, key_length, 2, value_dim or head_dim), dtype)

    def program(query, key, value):
        results, backward = jax.vjp(
            lambda *qkv: attention(
                *qkv, scale=0.1, mask=Mask(is_causal=is_causal), backward="two_kernels"
            ),
            query,
            key,
            value,
        )
        return results, backward(jax.tree.map(jnp.ones_like, results))

    return compiled(program, query, key, value, gpu=gpu)


def _float32_forward(gpu: Gpu = "h200") -> Program:
    query = jax.ShapeDtypeStruct((1, 1000, 4, 128), "bfloat16")
    return compiled(
        lambda *qkv: attention(*qkv, scale=0.1, out_dtype=jnp.dtype("float32")),
        query,
        query,
        query,
        gpu=gpu,
    )


def _check(
    program: Program, kernel_count: int, allowed_spills: Mapping[str, int] = {}
) -> None:
    """`allowed_spills`: bytes by the name of the kernel; else none. `SUMS` do not
    count."""
    program.kernels[:] = [k for k in program.kernels if k.name not in SUMS]
    assert len(program.kernels) == kernel_count
    spills = {k.name: k.spilled_bytes for k in program.kernels}
    assert {n: b for n, b in spills.items() if b > allowed_spills.get(n, 0)} == {}
    assert [k.name for k in program.kernels if k.serialised] == []
    # Every kernel: products are issued, and with one of them still in flight (1) the
    # exponentials (e) come before the wait for all (0).
    for kernel in program.kernels:
        assert re.search("M1e+0", kernel.order), kernel


@pytest.mark.parametrize(
    ("head_dim", "key_length", "is_causal"),
    # Few and many keys have tilings of their own.
    [
        pytest.param(64, 1100, True, marks=pytest.mark.thorough),
        (64, 4200, False),
        # Whole blocks alone are begun ahead.
        (128, 1100, False),
        (128, 1024, False),
        # As float16, which has a test of its own.
        pytest.param(128, 1100, True, marks=pytest.mark.thorough),
        pytest.param(64, 1100, False, marks=pytest.mark.thorough),
        pytest.param(64, 4200, True, marks=pytest.mark.thorough),
    ],
)
def test_compiles_without_spills_and_overlaps(head_dim, key_length, is_causal):
    arguments = (head_dim, "bfloat16", is_causal, "h200", key_length)
    program = in_child_process(_forward_and_backward, *arguments, seconds=TIME_LIMIT)
    # JAX 0.12 has one register too many at head dim 64: in dQ's kernel under a causal
    # mask, and in the forward kernel, behind its loop, where warpgroups stand by.
    newer = jax.__version_info__ >= (0, 12) and head_dim == 64
    name = "attention_backward_dq" if is_causal else "attention_forward"
    allowed = {name: 4} if newer else {}
    _check(program, kernel_count=3, allowed_spills=allowed)
    # None of dQ's exponentials is behind that wait: a barrier after it would draw them.
    (dq,) = [k for k in program.kernels if k.name == "attention_backward_dq"]
    assert "1e0M" in dq.order


def _with_bias(head_dim: int, dtype: str) -> Program:
    query = jax.ShapeDtypeStruct((2, 1000, 4, head_dim), "bfloat16")
    key = jax.ShapeDtypeStruct((2, 1100, 2, head_dim), "bfloat16")
    bias = jax.ShapeDtypeStruct((1, 4, 1000, 1100), dtype)

    def program(query, key, value, bias):
        def attend(query, key, value, bias):
            return dot_product_attention(
                *(query, key, value, bias), implementation="pallas", is_causal=True
            )

        out, backward = jax.vjp(attend, query, key, value, bias)
        return out, backward(jnp.ones_like(out))

    return compiled(program, query, key, key, bias)


@pytest.mark.parametrize(
    ("head_dim", "dtype"),
    [
        (64, "bfloat16"),
        pytest.param(128, "float32", marks=pytest.mark.thorough),
    ],
)
def test_a_bias_compiles_alike(head_dim, dtype):
    program = in_child_process(_with_bias, head_dim, dtype, seconds=TIME_LIMIT)
    (dbias,) = [k for k in program.kernels if k.name == "attention_backward_dbias"]
    assert dbias.spilled_bytes == 0 and not dbias.serialised
    program.kernels.remove(dbias)
    # Tiles of the bias take registers that head dim 128 does not have.
    wide = {"attention_forward": 80, "attention_backward_dkv": 80}
    _check(program, kernel_count=3, allowed_spills=wide if head_dim == 128 else {})
    # In memory it is in its own type, and one for both entries of the batch.
    assert not re.search(r"\[2,4,1\d\d\d,1\d\d\d\]", program.hlo)
    if dtype == "bfloat16":
        assert not re.search(r"f32\[1,4,1000,1100\]", program.hlo)


def _optimisations_after_compiling() -> tuple[bool, bool]:
    name = "jax_disable_most_optimizations"
    before = jax.config.read(name)
    compiled(jnp.sin, jax.ShapeDtypeStruct((8,), "float32"))
    return before, jax.config.read(name)


def test_compiling_leaves_a_process_that_is_kept_as_it_was():
    before, after = in_child_process(_optimisations_after_compiling, seconds=TIME_LIMIT)
    assert before and after


@pytest.mark.thorough
def test_float16_compiles_alike():
    program = in_child_process(
        _forward_and_backward, 128, "float16", True, seconds=TIME_LIMIT
    )
    _check(program, kernel_count=3)


@pytest.mark.parametrize(
    ("head_dim", "value_dim", "dtype", "is_causal", "allowed_spills"),
    [
        (32, 32, "float16", True, {}),
        pytest.param(96, 96, "float16", False, {}, marks=pytest.mark.thorough),
        pytest.param(192, 128, "bfloat16", True, {}, marks=pytest.mark.thorough),
        pytest.param(192, 192, "bfloat16", False, {}, marks=pytest.mark.thorough),
        # Once a tile, outside the loop over the keys.
        pytest.param(
            *(256, 256, "bfloat16", False, {"attention_forward": 48}),
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_other_head_dims_compile_alike(
    head_dim, value_dim, dtype, is_causal, allowed_spills
):
    arguments = (head_dim, dtype, is_causal, "h200", 1100, value_dim)
    program = in_child_process(_forward_and_backward, *arguments, seconds=TIME_LIMIT)
    _check(program, kernel_count=3, allowed_spills=allowed_spills)
    for kernel in program.kernels:
        if kernel.name in allowed_spills:
            assert not {"LDL", "STL"} & _of_the_loop(kernel)


def _of_the_loop(kernel: Kernel) -> set[str]:
    """Instructions of the forward kernel from the first product of its loop over keys,
    which follows on the first exponentials, to the branch before the last product."""
    names = [name.partition(".")[0] for name in kernel.instructions]
    exponentials = [i for i, x in enumerate(kernel.instructions) if x == "MUFU.EX2"]
    start = names.index("HGMMA", exponentials[0])
    after = names.index("HGMMA", exponentials[-1])
    branch = max(i for i in range(start, after) if names[i] == "BRA")
    assert start < exponentials[-1] < branch
    return set(names[start:branch])


def test_float32_output_compiles_alike():
    program = in_child_process(_float32_forward, seconds=TIME_LIMIT)
    _check(program, kernel_count=1)


def _ampere(
    gpu: Gpu, head_dim: int, dtype: str, is_causal: bool, value_dim: int | None = None
) -> Program:
    with made_for("ampere"):
        return _forward_and_backward(
            head_dim, dtype, is_causal, gpu, value_dim=value_dim
        )


def _ampere_float32_forward() -> Program:
    with made_for("ampere"):
        return _float32_forward("a100")


def _compiled_for_a100(*call) -> Program:
    """Mosaic GPU goes on compiling for the GPU that a process first compiled for."""
    return in_child_process(*call, seconds=TIME_LIMIT, among="a100")


# Bytes, by head dim and kernel: integers that tiles as large as registers allow leave
# no room for. These tilings were faster than smaller ones that spill nothing
# (`results/prototypes/ampere.csv`).
_SPILLED = {(128, "attention_forward"): 60, (64, "attention_backward_dkv"): 28}


def _check_ampere(program: Program, head_dim: int, kernel_count: int) -> None:
    program.kernels[:] = [k for k in program.kernels if k.name not in SUMS]
    assert len(program.kernels) == kernel_count
    for kernel in program.kernels:
        assert kernel.spilled_bytes <= _SPILLED.get((head_dim, kernel.name), 0), kernel
        # Two CTAs fit a multiprocessor: each has the other's products to wait under.
        assert kernel.shared_memory <= ampere_tiles.SMEM_LIMIT_FOR_TWO, kernel
        assert kernel.registers <= 255
        assert {"HMMA", "LDSM", "LDGSTS"} <= kernel.opcodes, kernel
        # Exponentials stand between products, again and again: P V of a strip of keys
        # goes on while the next strip's weights are made. At H = 128 a block of dK and
        # dV has 16 queries, which are one strip.
        one_strip = (head_dim, kernel.name) == (128, "attention_backward_dkv")
        assert re.search("mem" if one_strip else "(me){4}", kernel.order), kernel


@pytest.mark.slow
@pytest.mark.parametrize(
    ("head_dim", "is_causal"),
    [
        (64, True),
        (128, False),
        pytest.param(64, False, marks=pytest.mark.thorough),
        pytest.param(128, True, marks=pytest.mark.thorough),
    ],
)
def test_ampere_compiles_and_fits_twice(head_dim, is_causal):
    arguments = ("a100", head_dim, "bfloat16", is_causal)
    program = _compiled_for_a100(_ampere, *arguments)
    _check_ampere(program, head_dim, kernel_count=3)


@pytest.mark.parametrize(
    ("head_dim", "value_dim", "is_causal", "kernel_count"),
    # dK and dV have a kernel each where registers do not hold both.
    [
        (256, 256, True, 4),
        pytest.param(32, 32, False, 3, marks=pytest.mark.thorough),
        pytest.param(96, 96, True, 3, marks=pytest.mark.thorough),
        pytest.param(192, 192, True, 4, marks=pytest.mark.thorough),
        pytest.param(192, 128, True, 3, marks=pytest.mark.thorough),
        pytest.param(32, 256, True, 3, marks=pytest.mark.thorough),
        pytest.param(128, 64, True, 3, marks=pytest.mark.thorough),
    ],
)
def test_ampere_compiles_at_other_head_dims(
    head_dim, value_dim, is_causal, kernel_count
):
    """Nothing spills, and two CTAs fit but for dQ at the longest heads."""
    arguments = ("a100", head_dim, "bfloat16", is_causal, value_dim)
    program = _compiled_for_a100(_ampere, *arguments)
    program.kernels[:] = [k for k in program.kernels if k.name not in SUMS]
    assert len(program.kernels) == kernel_count
    for kernel in program.kernels:
        assert kernel.spilled_bytes == 0 and kernel.registers <= 255, kernel
        alone = (head_dim, kernel.name) == (256, "attention_backward_dq")
        limit = shared_memory("a100") if alone else ampere_tiles.SMEM_LIMIT_FOR_TWO
        assert kernel.shared_memory <= limit, kernel
        assert {"HMMA", "LDSM", "LDGSTS"} <= kernel.opcodes, kernel


def _ampere_with_everything(head_dim: int, soft_cap: float | None) -> Program:
    """A bias, and every rule of a mask at once."""
    T, S = 1000, 1100
    query = jax.ShapeDtypeStruct((2, T, 4, head_dim), "bfloat16")
    key = jax.ShapeDtypeStruct((2, S, 2, head_dim), "bfloat16")
    bias = jax.ShapeDtypeStruct((1, 4, T, S), "bfloat16")
    query_ids, key_ids = (jax.ShapeDtypeStruct((2, n), "int32") for n in (T, S))
    dense = jax.ShapeDtypeStruct((1, 4, T, S), "bool")

    def program(query, key, bias, query_ids, key_ids, dense):
        mask = Mask(
            is_causal=True,
            window=(300, None),
            dense=dense,
            query_segment_ids=query_ids,
            key_value_segment_ids=key_ids,
        )

        def attend(query, key, value, bias):
            options = {"scale": 0.1, "mask": mask, "soft_cap": soft_cap}
            return attention(query, key, value, bias=bias, **options)

        results, backward = jax.vjp(attend, query, key, key, bias)
        return results, backward(jax.tree.map(jnp.ones_like, results))

    with made_for("ampere"):
        arguments = (query, key, bias, query_ids, key_ids, dense)
        return compiled(program, *arguments, gpu="a100")


@pytest.mark.parametrize(
    ("head_dim", "soft_cap", "allowed_spills"),
    # What a mask compares, and a cap's derivative, come on top of tiles that leave no
    # register free.
    [
        (128, None, {"attention_forward": 160}),
        pytest.param(
            *(64, 20.0, {"attention_backward_dq": 72, "attention_backward_dkv": 88}),
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_ampere_compiles_with_everything(head_dim, soft_cap, allowed_spills):
    program = _compiled_for_a100(_ampere_with_everything, head_dim, soft_cap)
    program.kernels[:] = [k for k in program.kernels if k.name not in SUMS]
    assert len(program.kernels) == 4
    for kernel in program.kernels:
        assert kernel.spilled_bytes <= allowed_spills.get(kernel.name, 0), kernel
        assert kernel.shared_memory <= ampere_tiles.SMEM_LIMIT_FOR_TWO, kernel
        assert kernel.registers <= 255


@pytest.mark.thorough
def test_ampere_float16_compiles_alike():
    program = _compiled_for_a100(_ampere, "a100", 128, "float16", True)
    _check_ampere(program, 128, kernel_count=3)


def test_ampere_float32_output_compiles_alike():
    program = _compiled_for_a100(_ampere_float32_forward)
    _check_ampere(program, 128, kernel_count=1)


@pytest.mark.thorough
def test_ampere_compiles_for_hopper():
    arguments = ("h200", 128, "bfloat16", True)
    program = in_child_process(_ampere, *arguments, seconds=TIME_LIMIT)
    _check_ampere(program, 128, kernel_count=3)


def _public_function_on_an_a100() -> Program:
    query = jax.ShapeDtypeStruct((1, 1000, 4, 64), "bfloat16")
    return compiled(dot_product_attention, query, query, query, gpu="a100")


def test_an_a100_gets_the_ampere_kernels():
    program = _compiled_for_a100(_public_function_on_an_a100)
    _check_ampere(program, 64, kernel_count=1)
