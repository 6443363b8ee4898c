"""The kernels of norms: interpreted, compiled, and on a mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from attn_jax.kernels.architecture import made_for
from attn_jax.kernels.interpreter import interpreted
from tests.child_process import in_child_process
from tests.gpu_compiler import Gpu, compiled
from train import head_norm_kernels, norm_kernels
from train.layers import Norms, Stream, gated_norm, rms_norm
from train.sharding import AXES

TIME_LIMIT = 120
# Of the largest number: six times the RMS of 60 roundings, each uniform to a unit
# roundoff of FP32 either way. A sum over tokens is of 32, one after the other, and of
# chunks in pairs (4 times for 321 tokens); a term has had a dozen roundings before, and
# a mean over a row is of 11 additions.
ROUNDING = 6 * (60 / 3) ** 0.5 * 2.0**-24


def mesh_of(*sizes: int) -> Mesh:
    devices = np.asarray(jax.devices()[: np.prod(sizes)])
    return Mesh(devices.reshape(sizes), AXES)


def kernels(mesh: Mesh) -> Norms:
    return Norms(norm_kernels.KernelNorm(mesh), head_norm_kernels.KernelHeadNorm(mesh))


def arrays(seed: int, shapes, dtypes):
    rng = np.random.default_rng(seed)
    # Off zero: a mean that is left out shows.
    return [
        jnp.asarray(rng.normal(0.5, 2, shape), dtype)
        for shape, dtype in zip(shapes, dtypes, strict=True)
    ]


def of_stream(shape, gated: bool, dtype):
    """(stream, scale, shift), gradients of (sum, norm)"""
    example = shape[0], 1, shape[2]
    shapes = shape, example, shape, example, example, shape, shape
    kinds = *[jnp.float32] * 2, dtype, *[jnp.float32] * 3, dtype
    x, gate, update, scale, shift, *gradients = arrays(0, shapes, kinds)
    stream = Stream(x, gate, update) if gated else Stream(x)
    return (stream, scale, shift), tuple(gradients)


def of_heads(shape, dtype):
    x, scale, gradient = arrays(
        1, (shape, shape[-1:], shape), (dtype, jnp.float32, dtype)
    )
    return (x, scale), gradient


def with_gradients(norm, inputs, gradient, dtype):
    out, pullback = jax.vjp(lambda *x: norm(*x, dtype), *inputs)
    return jax.tree.leaves((out, pullback(gradient)))


def _interpreted(kind: str, problem, dtype, races: bool):
    """Leaves of results and gradients: by the kernels."""
    inputs, gradient = problem
    norm = getattr(kernels(mesh_of(1, 1, 1, 1)), kind)
    with made_for("hopper"), interpreted(detect_races=races):
        run = jax.jit(lambda *x: with_gradients(norm, *x, dtype))
        return jax.device_get(run(inputs, gradient))


def _exact(kind: str, problem):
    """The same by `layers` in FP64."""
    plain = {"gated_norm": gated_norm, "rms_norm": rms_norm}[kind]
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), problem)
        return jax.device_get(with_gradients(plain, *wide, jnp.float64))


def assert_as_exact(found, exact):
    """But for the rounding to its format, and what FP32 leaves."""
    fits = np.abs(exact) * (float(jnp.finfo(found.dtype).eps) / 2)
    most = ROUNDING * np.abs(exact).max()
    assert (np.abs(np.asarray(found, np.float64) - exact) <= fits + most).all()


@pytest.mark.parametrize(
    ("kind", "shape", "gated", "dtype", "races"),
    [
        # Chunks that are not full, single tokens, and vectors of one, two and four.
        ("gated_norm", (2, 40, 384), True, jnp.bfloat16, True),
        ("gated_norm", (2, 33, 256), True, jnp.float16, False),
        ("gated_norm", (1, 34, 512), False, jnp.bfloat16, False),
        ("gated_norm", (3, 2, 128), True, jnp.float32, False),
        # A cell that is not full, one step, and rows of several vectors a thread.
        ("rms_norm", (2, 68, 8, 64), False, jnp.bfloat16, True),
        ("rms_norm", (1, 2, 8, 128), False, jnp.float16, False),
        ("rms_norm", (1, 16, 3, 96), False, jnp.float32, False),
    ],
)
def test_interpreted_kernels_are_as_exact_as_their_formats(
    kind, shape, gated, dtype, races
):
    problem = of_heads(shape, dtype)
    if kind == "gated_norm":
        problem = of_stream(shape, gated, dtype)
    found = in_child_process(
        *(_interpreted, kind, problem, dtype, races), seconds=TIME_LIMIT
    )
    exact = _exact(kind, problem)
    assert len(found) == len(exact)
    for one, other in zip(found, exact, strict=True):
        assert one.shape == other.shape
        assert_as_exact(one, other)


def test_what_kernels_do_not_take_is_left_to_layers():
    norms = kernels(mesh_of(1, 1, 1, 1))
    for width, kind in ((100, "f4"), (3200, "f4"), (128, "f2")):
        inputs, _ = of_stream((1, 4, width), True, jnp.bfloat16)
        x = jax.tree.map(lambda y: y.astype(kind), inputs)
        one, other = norms.gated_norm(*x, jnp.bfloat16), gated_norm(*x, jnp.bfloat16)
        assert all((a == b).all() for a, b in zip(one, other, strict=True))
    (x, scale), gradient = of_heads((1, 3, 5, 64), jnp.bfloat16)
    of_kernels = with_gradients(norms.rms_norm, (x, scale), gradient, x.dtype)
    of_layers = with_gradients(rms_norm, (x, scale), gradient, x.dtype)
    for a, b in zip(of_kernels, of_layers, strict=True):
        assert (a == b).all()


def _played_forward(of_tokens, of_example, *, dtype):
    x, update = of_tokens
    gate, scale, shift = of_example
    summed, out = gated_norm(Stream(x, gate, update), scale, shift, dtype)
    return (None if update is None else summed), out


def _played_backward(of_tokens, of_example):
    x, update, *gradients = of_tokens
    gate, scale = of_example

    def norm(x, scale, shift):
        return gated_norm(Stream(x), scale, shift, gradients[1].dtype)

    _, pullback = jax.vjp(norm, x, scale, jnp.zeros_like(scale))
    dx, *sums = pullback(tuple(gradients))
    dupdate = None
    if update is not None:
        dupdate = (gate * dx).astype(update.dtype)
        sums.append((dx * update.astype(dx.dtype)).sum(1, keepdims=True))
    return dx, dupdate, jnp.concatenate(sums, axis=1)


def _played_heads(x, gradient, scale):
    _, pullback = jax.vjp(lambda *y: rms_norm(*y, gradient.dtype), x, scale)
    dx, dscale = pullback(gradient)
    return dx, dscale[None]


@pytest.mark.parametrize("sizes", [(2, 2, 2, 1), (2, 1, 1, 2), (1, 2, 2, 2)])
@pytest.mark.parametrize("kind", ["gated_norm", "rms_norm"])
def test_on_a_mesh_each_device_has_its_part(monkeypatch, kind, sizes):
    """What the kernels are given, played by `layers`; sums over what a device has are
    added up over those that have the rest of it."""
    monkeypatch.setattr(norm_kernels, "_forward_kernel", _played_forward)
    monkeypatch.setattr(norm_kernels, "_backward_kernel", _played_backward)
    monkeypatch.setattr(head_norm_kernels, "_backward_kernel", _played_heads)
    problem = of_heads((4, 64, 4, 32), jnp.bfloat16)
    if kind == "gated_norm":
        problem = of_stream((4, 8, 128), True, jnp.bfloat16)
    norm = getattr(kernels(mesh_of(*sizes)), kind)
    run = jax.jit(lambda *x: with_gradients(norm, *x, jnp.bfloat16))
    found, exact = run(*problem), _exact(kind, problem)
    for one, other in zip(found, exact, strict=True):
        assert_as_exact(one, other)
    # Nothing with tokens is gathered.
    text = run.lower(*problem).compile().as_text() or ""
    assert "all-gather" not in text and "all-to-all" not in text


def _compiled(gpu: Gpu, width: int, gated: bool, dtype):
    """What is made of the three kernels for a model's stream and its heads of 64."""
    batch, length = 2, 1152
    kinds = [jax.ShapeDtypeStruct((batch, length, width), x) for x in ("f4", dtype)]
    stream, rounded = kinds
    example = jax.ShapeDtypeStruct((batch, 1, width), jnp.float32)
    heads = jax.ShapeDtypeStruct((batch, length, width // 64, 64), dtype)
    weights = jax.ShapeDtypeStruct((64,), jnp.float32)

    def run(x, update, dx, dout, gate, scale, shift, heads, weights):
        if not gated:
            gate = update = None
        example = gate, scale, shift
        return (
            norm_kernels._forward_kernel((x, update), example, dtype=dtype),
            norm_kernels._backward_kernel((x, update, dx, dout), example[:2]),
            head_norm_kernels._backward_kernel(heads, heads, weights),
        )

    given = stream, rounded, stream, rounded, example, example, example, heads, weights
    return compiled(run, *given, gpu=gpu)


# A format each, on either GPU.
ALWAYS = {(384, "a100"), (1152, "h200"), (3072, "a100")}


@pytest.mark.parametrize(
    ("width", "gated", "dtype", "gpu"),
    [
        pytest.param(*x, gpu, marks=[pytest.mark.ci] * ((x[0], gpu) not in ALWAYS))
        for gpu in ("a100", "h200")
        for x in (
            (384, True, jnp.float16),
            (1152, False, jnp.float32),
            (2048, True, jnp.bfloat16),
            (3072, True, jnp.bfloat16),
        )
    ],
)
def test_nothing_spills(gpu, width, gated, dtype):
    program = in_child_process(
        *(_compiled, gpu, width, gated, dtype), seconds=TIME_LIMIT, among=gpu
    )
    assert {kernel.name for kernel in program.kernels} == {
        "gated_norm_forward",
        "gated_norm_backward",
        "head_norm_backward",
    }
    assert all(kernel.spilled_bytes == 0 for kernel in program.kernels)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [384, 768, 1152])
@pytest.mark.parametrize("kind", ["gated_norm", "rms_norm"])
def test_on_a_gpu_they_are_as_exact_and_always_the_same(kind, width):
    problem = of_heads((4, 320, width // 64, 64), jnp.bfloat16)
    if kind == "gated_norm":
        problem = of_stream((4, 321, width), True, jnp.bfloat16)
    norm = getattr(kernels(mesh_of(1, 1, 1, 1)), kind)
    run = jax.jit(lambda *x: with_gradients(norm, *x, jnp.bfloat16))
    found, again = run(*problem), run(*problem)
    for one, same, other in zip(found, again, _exact(kind, problem), strict=True):
        assert np.asarray(one).tobytes() == np.asarray(same).tobytes()
        assert_as_exact(one, other)
