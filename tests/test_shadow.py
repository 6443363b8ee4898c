"""The audit inside a model: it changes nothing, and sees what an audit outside sees."""

import dataclasses
import functools
import json
import shutil
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P
from PIL import Image

from analysis import capture
from attn_jax import dot_product_attention
from attn_jax.audit.error import measure, yardstick
from attn_jax.audit.shadow import STATISTICS, TENSORS, make_probe, read, shadow
from attn_jax.formats import BF16, E4M3FN, round_to
from attn_jax.mask import Mask
from attn_jax.reference import golden
from train.__main__ import main
from train.assemble import assemble
from train.attention import shard_attention
from train.config import Config, MeshConfig, difference
from train.loop import run
from train.presets import PRESETS
from train.shadow import layer_by_layer, make_probes, make_shadowed
from train.sharding import AXES, put_batch
from train.step import draw_examples, example_losses, make_train_step

pytestmark = pytest.mark.usefixtures("shared_programs")
SHAPE = 4, 28, 2, 32
LAYERS = 3
# Sums of so many float32 terms, those of an entry and then all entries, are off by at
# most this share of the sum of sizes.
SUMS_OFF = (28 * 32 + 4 * 2) * 2.0**-24

xla: Any = functools.partial(dot_product_attention, implementation="xla")
reference: Any = functools.partial(dot_product_attention, implementation="reference")


def normal(seed: int, shape=SHAPE, dtype=jnp.bfloat16):
    return jax.random.normal(jax.random.key(seed), shape).astype(dtype)


def same_bits(one, other) -> bool:
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in pairs)


def assert_same_sums(found, expected, off: float) -> None:
    """`off`: of a sum, as a share of the sum of sizes."""
    root = np.sqrt(found.count)
    for field, rtol, atol in (
        ("units", off, 0.0),
        ("relative", off, 0.0),
        # The mean of |e| is at most its RMS.
        ("signed_mean", 0.0, off * expected.relative),
        ("signed_mean_ci", 0.0, 1.96 * off * expected.relative),
        ("directionality", 0.0, off * root),
    ):
        both = getattr(found, field), getattr(expected, field)
        np.testing.assert_allclose(*both, rtol=rtol, atol=atol, err_msg=field)


def assert_agree(one, other) -> None:
    """Statistics of the same errors, summed in another order."""
    off = 2 * SUMS_OFF
    for a, b in zip(read(one).values(), read(other).values(), strict=True):
        assert_same_sums(a, b, off)
        assert (a.non_finite, a.count) == (b.non_finite, b.count)
        # The same bins, over the RMS of the against-result.
        for field in ("p999", "maximum"):
            np.testing.assert_allclose(getattr(a, field), getattr(b, field), rtol=off)


def test_statistics_are_those_of_an_audit_outside():
    query, key, value, dout = (normal(seed) for seed in range(4))
    bias = normal(4, (1, 2, 28, 28), jnp.float32)
    options = {"is_causal": True, "mask": np.ones((1, 1, 28, 28), bool)}

    def loss(attention, query, key, value, bias, *probe):
        out = attention(query, key, value, *probe, bias=bias, **options)
        return (out * dout).astype(jnp.float32).sum(), out

    inputs = query, key, value, bias
    audited = shadow(xla, reference)
    (_, out), (*gradients, statistics) = jax.jit(
        jax.value_and_grad(
            functools.partial(loss, audited), argnums=range(5), has_aux=True
        )
    )(*inputs, make_probe())
    (_, plain), of_plain = jax.jit(
        jax.value_and_grad(functools.partial(loss, xla), argnums=range(4), has_aux=True)
    )(*inputs)
    assert same_bits((out, gradients), (plain, of_plain))

    exact = golden(
        query, key, value, dout, bias=bias, mask=Mask(is_causal=True)
    )._asdict()
    found = read(statistics)
    assert tuple(found) == TENSORS
    for x, name in zip((out, *gradients), TENSORS):
        expected = measure(x, yardstick(exact[name], BF16))
        assert found[name].count == x.size and found[name].non_finite == 0
        # The float32 reference itself is off by about 2**-22, of errors about 2**-9.
        assert_same_sums(found[name], expected, SUMS_OFF + 2.0**-12)
        error = np.abs(np.float64(x) - exact[name])
        for field, quantile in (("p999", 0.999), ("maximum", 1.0)):
            size = np.quantile(error, quantile, method="inverted_cdf")
            size /= np.sqrt(np.square(exact[name]).mean())
            assert 0.999 < getattr(found[name], field) / size < 1.251, (name, field)


def weights():
    return normal(7, (LAYERS, 3, 64, 64), jnp.float32) / 8


def layer(attention, x, weight, *probe):
    """Attention with a residual stream, [B, L, 64]."""
    rows = [(x @ w).astype(jnp.bfloat16).reshape(SHAPE) for w in weight]
    return x + attention(*rows, *probe).astype(jnp.float32).reshape(x.shape)


def unrolled(x, weights, attention, *probes):
    for number in range(LAYERS):
        one = functools.partial(layer, attention)
        x = one(x, weights[number], *(probe[number] for probe in probes))
    return x


def checkpointed(x, weights, attention, *probes):
    for number in range(LAYERS):
        one = jax.checkpoint(functools.partial(layer, attention))
        x = one(x, weights[number], *(probe[number] for probe in probes))
    return x


def scanned(x, weights, attention, *probes):
    def body(x, per_layer):
        return jax.checkpoint(functools.partial(layer, attention))(x, *per_layer), None

    return jax.lax.scan(body, x, (weights, *probes))[0]


def trained(model, attention, *probes):
    """Loss, gradients of the weights and of the probes, as training takes them."""
    x = normal(8, (SHAPE[0], SHAPE[1], 64), jnp.float32)

    def loss(weights, *probes):
        return jnp.square(model(x, weights, attention, *probes)).mean()

    arguments = tuple(range(1 + len(probes)))
    return jax.jit(jax.value_and_grad(loss, argnums=arguments))(weights(), *probes)


@pytest.fixture(scope="module")
def of_unrolled():
    return trained(unrolled, shadow(xla, reference), make_probe(LAYERS))


@pytest.mark.parametrize("model", [unrolled, checkpointed, scanned])
def test_model_keeps_its_bits_however_layers_are_run(model, of_unrolled):
    plain, audited = trained(model, xla), of_unrolled
    if model is not unrolled:
        audited = trained(model, shadow(xla, reference), make_probe(LAYERS))
    loss, (gradient, statistics) = audited
    assert same_bits((loss, (gradient,)), plain)
    assert statistics.shape == (LAYERS, len(TENSORS), STATISTICS)
    for number in range(LAYERS):
        assert_agree(statistics[number], of_unrolled[1][1][number])


def test_worse_attention_shows_in_its_layer_alone():
    calls = iter(range(LAYERS))

    def attention(query, key, value, probe):
        poor = next(calls) == 1

        def rough(query, key, value):
            still = jax.lax.stop_gradient(key)
            key = key + (rounded(still) - still)
            return xla(query, key, value)

        return shadow(rough if poor else xla, reference)(query, key, value, probe)

    def rounded(x):
        return round_to(x.astype(jnp.float32), E4M3FN).astype(x.dtype)

    statistics = trained(checkpointed, attention, make_probe(LAYERS))[1][1]
    for number, one in enumerate(statistics):
        units = {name: deviation.units for name, deviation in read(one).items()}
        for name in ("out", "dquery", "dkey"):
            # E4M3 has four bits less than BF16: a key is off by 16 roundings.
            assert (units[name] > 3) == (number == 1), (number, units)


def test_non_finite_errors_are_counted_and_left_out():
    query, key, value = (normal(seed) for seed in range(3))
    value = value.at[1, 3, 1, 5].set(jnp.inf)

    def loss(probe):
        return shadow(xla, reference)(query, key, value, probe).astype("float32")[0]

    def total(probe):
        return loss(probe).sum()

    found = read(jax.grad(total)(make_probe()))["out"]
    assert found.non_finite == SHAPE[1] and found.count == np.prod(SHAPE)
    assert 0.9 < found.units < 3


def test_unit_of_a_result_that_is_rounded_already():
    query, key, value = (normal(seed) for seed in range(3))

    def found(against):
        def loss(probe):
            out = shadow(xla, against)(query, key, value, probe)
            return jnp.square(out.astype(jnp.float32)).sum()

        return read(jax.jit(jax.grad(loss))(make_probe()))["out"]

    def rounded(*inputs):
        return reference(*inputs).astype(jnp.bfloat16)

    itself = found(lambda *inputs: xla(*(x.astype(jnp.bfloat16) for x in inputs)))
    assert itself.units == itself.maximum == itself.directionality == 0
    coarse = found(rounded)
    expected = coarse.relative / BF16.rms_roundoff
    np.testing.assert_allclose(coarse.units, expected, rtol=SUMS_OFF)


@pytest.mark.parametrize(
    ("attention", "probe", "words"),
    [
        (xla, make_probe(LAYERS), "make_probe()"),
        (lambda *inputs: xla(*inputs)[:, 1:], make_probe(), "differ in shape"),
        (
            lambda *inputs: xla(*inputs).astype(jnp.float8_e5m2),
            make_probe(),
            "not float8_e5m2",
        ),
    ],
)
@pytest.mark.usefixtures("as_users_call_it")
def test_what_cannot_be_compared_is_refused_in_one_line(attention, probe, words):
    inputs = [normal(seed) for seed in range(3)]
    with pytest.raises(ValueError) as error:
        jax.grad(
            lambda probe: (
                shadow(attention, reference)(*inputs, probe).astype("float32").sum()
            )
        )(probe)
    assert words in str(error.value) and "\n" not in str(error.value)
    with pytest.raises(ValueError, match="one probe"):
        read(make_probe(LAYERS))


@pytest.mark.parametrize("axis", ["data", "tensor"])
@pytest.mark.parametrize("checked", [False, True])
def test_devices_of_a_mesh_add_up(axis, checked):
    grid = np.asarray(jax.devices()[:2]).reshape([1 + (a == axis) for a in AXES])
    mesh = Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))
    audited = shadow(xla, reference)
    sharded = shard_attention(audited, mesh, jnp.bfloat16, P())
    if checked:
        spec = P("data", None, "tensor", None)
        sharded = jax.shard_map(
            audited, mesh=mesh, in_specs=(*3 * (spec,), P()), out_specs=spec
        )
    *inputs, dout = (normal(seed) for seed in range(4))

    def statistics(attention):
        def loss(probe):
            one = jax.checkpoint(attention)
            return (one(*inputs, probe) * dout).astype(jnp.float32).sum()

        return jax.jit(jax.grad(loss))(make_probe())

    assert_agree(statistics(sharded), statistics(audited))


TINY = PRESETS["tiny"]
CONFIG = dataclasses.replace(
    TINY,
    attn="xla",
    shadow="reference",
    shadow_every=3,
    steps=6,
    batch_size=8,
    log_every=1,
    model=dataclasses.replace(TINY.model, width=64, heads=1, depth=2, remat=True),
    optimizer=dataclasses.replace(TINY.optimizer, warmup=0),
    eval=dataclasses.replace(
        TINY.eval,
        every=0,
        examples=8,
        captions=8,
        novel=0,
        batch_size=8,
        grid=4,
        sampler_steps=2,
    ),
    checkpoint=dataclasses.replace(TINY.checkpoint, every=5, keep=9),
)


def rows_in(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "shadow.jsonl").open()]


@pytest.fixture(scope="module")
def audited_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("audited") / "run"
    run(dataclasses.replace(CONFIG, run_dir=str(folder)))
    return folder


@pytest.mark.ci
def test_run_writes_a_row_for_each_layer_and_tensor(audited_run):
    rows = rows_in(audited_run)
    assert [(row["step"], row["layer"], row["tensor"]) for row in rows] == [
        (step, layer, tensor)
        for step in (3, 6)
        for layer in range(2)
        for tensor in TENSORS
    ]
    for row in rows:
        assert row["against"] == "reference" and row["non_finite"] == 0
        assert row["count"] == 8 * 28 * 64
        assert 0.9 < row["units"] < 3 and row["p999"] <= row["maximum"] < 1
    log = (audited_run / "log.txt").read_text()
    assert "step 6  against reference: out 1." in log
    image = Image.open(audited_run / "shadow.png").convert("RGB")
    colours = image.getcolors(maxcolors=2**24)
    assert colours is not None and len(colours) > 10


def losses(folder) -> list[dict]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    return [{key: row[key] for key in row if key != "images_per_s"} for row in rows]


@pytest.mark.ci
def test_run_is_the_same_without(audited_run, tmp_path):
    run(dataclasses.replace(CONFIG, shadow="none", run_dir=str(tmp_path)))
    assert losses(tmp_path) == losses(audited_run)
    assert not (tmp_path / "shadow.jsonl").exists()


@pytest.mark.ci
def test_resumed_run_goes_on_with_its_rows(audited_run, tmp_path, capfd):
    folder = shutil.copytree(audited_run, tmp_path / "run")
    # As if killed after the sixth step, which no checkpoint has, amid its last row.
    shutil.rmtree(folder / "checkpoints" / "6")
    (folder / "DONE").unlink()
    with (folder / "shadow.jsonl").open("a") as file:
        file.write('{"step": 6, "lay')
    run(dataclasses.replace(CONFIG, run_dir=str(folder)))
    assert "resuming from step 5" in capfd.readouterr().err
    assert rows_in(folder) == rows_in(audited_run)


def test_audit_may_change_from_one_start_to_the_next():
    other = dataclasses.replace(CONFIG, shadow="emulated", shadow_every=7)
    assert difference(CONFIG, other) == []


@pytest.mark.ci
def test_rows_are_what_an_audit_of_captured_inputs_finds(audited_run):
    (one,) = capture.capture(audited_run, [5], [1], CONFIG.batch_size)
    query, key, value, dout = (jnp.asarray(x) for x in one.inputs)
    out, pullback = jax.vjp(xla, query, key, value)
    results = out, *pullback(dout)
    exact = golden(query, key, value, dout)._asdict()
    rows = {
        row["tensor"]: row
        for row in rows_in(audited_run)
        if (row["step"], row["layer"]) == (6, 1)
    }
    for x, name in zip(results, TENSORS):
        expected = measure(x, yardstick(exact[name], BF16))
        # Two programs: a few of 14336 inputs fall to the other side of a rounding.
        np.testing.assert_allclose(rows[name]["units"], expected.units, rtol=0.01)
        np.testing.assert_allclose(rows[name]["relative"], expected.relative, rtol=0.01)


@pytest.mark.parametrize(
    "against", [pytest.param("reference", marks=pytest.mark.thorough), "emulated"]
)
def test_parts_of_a_batch_give_what_the_batch_gives(against, monkeypatch):
    config = dataclasses.replace(CONFIG, shadow=against)
    *inputs, dout = (normal(seed, (8, 28, 1, 64), jnp.float32) for seed in range(4))

    def statistics():
        shadowed = make_shadowed(assemble(config, jax.devices()[:1]))
        assert shadowed is not None
        attend = functools.partial(shadowed, *inputs)
        return jax.jit(jax.grad(lambda p: (attend(p) * dout).sum()))(make_probe())

    whole = statistics()
    # Logits of three entries at once; the parts of eight that fit are of two.
    monkeypatch.setattr("train.shadow._LOGITS_AT_ONCE", 3 * 28 * 28)
    assert_agree(statistics(), whole)
    assert 0.9 < read(whole)["out"].units < 3


def step_of(config: Config, audited: bool):
    """The parts of a run on two devices, its step, and a batch."""
    assembly = assemble(config, jax.devices()[:2])
    shadowed = make_shadowed(assembly) if audited else None
    step = make_train_step(
        assembly.parts, assembly.optimizer, assembly.attention_fn, shadowed
    )
    rng = np.random.default_rng(0)
    rows = {
        "image": rng.integers(0, 256, (8, 32, 32, 3), np.uint8),
        "tokens": rng.integers(0, 30, (8, 12)).astype(np.int32),
    }
    return assembly, step, put_batch(assembly.mesh, rows)


def test_program_of_a_plain_step_does_not_depend_on_the_audit():
    def text(config, audited=False):
        assembly, step, batch = step_of(config, audited)
        return jax.jit(step).lower(assembly.abstract_state(), batch).as_text()

    model = dataclasses.replace(CONFIG.model, depth=1)
    config = dataclasses.replace(CONFIG, model=model)
    plain = text(config)
    assert plain == text(dataclasses.replace(config, shadow="none"))
    assert plain != text(config, audited=True)


@pytest.mark.thorough
@pytest.mark.parametrize("sizes", [MeshConfig(tensor=2), MeshConfig(fsdp=2)])
def test_loss_and_gradients_keep_their_bits_on_a_mesh(sizes, fully_optimised):
    model = dataclasses.replace(CONFIG.model, width=128, heads=2, depth=1)
    config = dataclasses.replace(CONFIG, mesh=sizes, model=model)
    assembly, _, batch = step_of(config, audited=False)
    shadowed = make_shadowed(assembly)
    assert shadowed is not None
    rng = np.random.default_rng(0)

    # Off the start, where the gates are closed and attention has no gradient.
    def weights_like(leaf):
        noise = rng.standard_normal(leaf.shape) / 16
        rows = (leaf.ndim == 1) + noise
        return jax.device_put(rows.astype(leaf.dtype), leaf.sharding)

    params = jax.tree.map(weights_like, assembly.abstract_state().params)

    def loss(params, probes):
        attend = assembly.attention_fn
        if probes is not None:
            attend = layer_by_layer(shadowed, probes)
        examples = draw_examples(config, batch, 0)
        return example_losses(assembly.parts, attend, params, examples).mean()

    taken = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))
    plain, (gradients, _) = taken(params, None)
    audited, (of_audited, statistics) = taken(params, make_probes(config))
    assert same_bits((plain, gradients), (audited, of_audited))
    assert all(0.9 < deviation.units < 3 for deviation in read(statistics[0]).values())


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["--shadow=fast"], ["fast", "reference"]),
        (["--shadow=xla", "--attn=xla"], ["--shadow=xla", "--shadow=reference"]),
        (["--shadow=xla", "--attn=baseline"], ["--attn=baseline", "itself"]),
        (["--shadow=reference", "--attn=reference"], ["itself", "--shadow=xla"]),
        (["--shadow=emulated"], ["--attn=pallas", "--shadow=reference"]),
        (["--shadow=reference", "--shadow-every=0"], ["--shadow-every", "at least 1"]),
    ],
)
def test_a_mistake_is_exit_2_and_one_line(
    arguments, names, capfd, tmp_path, monkeypatch
):
    monkeypatch.setattr("train.loop._Trainer", None)
    assert main([*arguments, f"--run-dir={tmp_path / 'run'}"]) == 2
    err = capfd.readouterr().err
    assert len(err.splitlines()) == 1, err
    assert all(name in err for name in names), err
    assert not (tmp_path / "run" / "config.json").exists()
