"""Meshes of eight virtual devices and of two processes train as one device does."""

import dataclasses
import functools
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_jax import context_parallel
from train.__main__ import parse_config
from train.assemble import assemble
from train.config import MeshConfig, UsageError
from train.loop import run
from train.precision import make_policy
from train.presets import PRESETS
from train.sample import on_one_device
from train.sharding import make_mesh, put_batch, rows_of_process
from train.step import compile_step, make_train_step
from train.validate import validate

# Every mesh is compared with one device, in whichever worker.
pytestmark = [pytest.mark.ci, pytest.mark.usefixtures("shared_programs")]
REPOSITORY = Path(__file__).resolve().parent.parent
TINY = PRESETS["tiny"]
CONFIG = dataclasses.replace(
    TINY,
    attn="reference",
    attention_inputs="compute",
    batch_size=8,
    model=dataclasses.replace(TINY.model, width=64, heads=2, depth=1),
    optimizer=dataclasses.replace(TINY.optimizer, warmup=0),
)
MESHES = [
    (8, 1, 1),
    pytest.param((2, 2, 2), marks=pytest.mark.thorough),
    pytest.param((1, 4, 2), marks=pytest.mark.thorough),
]


def batches_of(count: int):
    generator = np.random.default_rng(0)
    for _ in range(count):
        yield {
            "image": generator.integers(0, 256, (8, 32, 32, 3), np.uint8),
            "tokens": generator.integers(0, 30, (8, 12)).astype(np.int32),
        }


@functools.cache
def losses_on(mesh: MeshConfig, device_count: int, steps: int = 3, **changes):
    """Loss of each step, the final state, and the compiled program."""
    config = dataclasses.replace(CONFIG, mesh=mesh, **changes)
    parts = assemble(config, jax.devices()[:device_count])
    step = make_train_step(parts.parts, parts.optimizer, parts.attention_fn)
    losses, compiled = [], None
    with jax.default_matmul_precision(make_policy(config).matmul):
        state = parts.fresh_state()
        for rows in batches_of(steps):
            batch = put_batch(parts.mesh, rows)
            if compiled is None:
                compiled = compile_step(step, state, parts.shardings, batch, parts.mesh)
            state, metrics = compiled(state, batch)
            losses.append(float(metrics["loss"]))
    return losses, state, compiled


@pytest.mark.parametrize("sizes", MESHES)
def test_mesh_gives_the_loss_of_one_device(sizes):
    mesh = MeshConfig(data=sizes[0], fsdp=sizes[1], tensor=sizes[2])
    losses, state, _ = losses_on(mesh, 8)
    # fp32 sums in another order: relative 1e-6 is 17 units of its last place.
    alone, _, _ = losses_on(MeshConfig(), 1)
    np.testing.assert_allclose(losses, alone, rtol=1e-6)
    kernel = state.params["blocks"][0]["query"]["kernel"]
    shard = kernel.addressable_shards[0].data.shape
    assert shard == (64 // sizes[1], 64 // sizes[2])
    moments = [
        leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(state.optimizer)
        if "query" in jax.tree_util.keystr(path) and leaf.ndim == 2
    ]
    assert len(moments) == 2  # mean and mean square
    assert {leaf.sharding for leaf in moments} == {kernel.sharding}


@pytest.mark.parametrize(
    ("how", "devices"),
    [
        ("zigzag", 2),
        pytest.param("all_gather", 4, marks=pytest.mark.thorough),
        pytest.param("all_gather+ring", 4, marks=pytest.mark.thorough),
        pytest.param("ulysses", 2, marks=pytest.mark.thorough),
        ("ring+ulysses", 4),
    ],
)
def test_tokens_spread_over_devices_give_the_loss_of_one(how, devices):
    changes = dict(attn="emulated", recipe="exact_fp32", context_parallel=how)
    mesh = MeshConfig(data=2, seq=devices)
    losses, _, compiled = losses_on(mesh, 2 * devices, **changes)
    alone, _, _ = losses_on(MeshConfig(), 1, **changes)
    # As above, and parts of attention are merged in FP32.
    np.testing.assert_allclose(losses, alone, rtol=1e-6)
    program = compiled.as_text()
    for name, message in (("zigzag", "collective-permute"), ("ulysses", "all-to-all")):
        assert name not in how or message in program


@pytest.mark.parametrize(
    ("how", "width"), [("contiguous", "partials"), ("ring+ulysses", "wire")]
)
def test_widths_between_devices_reach_attention(how, width):
    """The model's attention has the bits of the library's, and not those of FP32."""
    narrow = {width: "16-bit"}
    config = dataclasses.replace(
        CONFIG,
        **dict(attn="emulated", attention_inputs="bf16", context_parallel=how),
        **dict(mesh=MeshConfig(data=1, seq=4), **narrow),
    )
    rng = np.random.default_rng(0)
    given = [jnp.asarray(rng.normal(size=(2, 16, 2, 32)), jnp.bfloat16) for _ in "qkvo"]

    def both_passes(attend):
        def run(*inputs, cotangent):
            out, pullback = jax.vjp(attend, *inputs)
            return out, *pullback(cotangent)

        return jax.jit(run)(*given[:3], cotangent=given[3])

    def library(**widths):
        strategy = "ring" if how == "contiguous" else how
        return both_passes(
            functools.partial(
                context_parallel.dot_product_attention,
                **dict(strategy=strategy, shards=4, implementation="emulated"),
                **widths,
            )
        )

    parts = assemble(config, jax.devices()[:4])
    got = both_passes(parts.attention_fn)
    chex.assert_trees_all_equal(got, library(**narrow))
    # What goes between the devices is dK, whatever the width stands for.
    assert (got[2] != library()[2]).any()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (dict(attn="xla"), "needs --attn=pallas or --attn=emulated"),
        (dict(shadow="reference"), "needs --mesh.seq 1"),
        (
            dict(context_parallel="zigzag"),
            "a multiple of 16, as with --model.text-leng",
        ),
        (
            dict(mesh=MeshConfig(seq=4, ulysses=2)),
            "--mesh.ulysses needs --context-parallel=ring.ulysses, not contiguous",
        ),
        (
            dict(context_parallel="ring+ulysses", mesh=MeshConfig(seq=4, ulysses=3)),
            "--mesh.ulysses is 3; it must divide --mesh.seq 4",
        ),
        (
            dict(context_parallel="ring+ulysses", mesh=MeshConfig(seq=3)),
            "--mesh.ulysses is 2; it must divide --mesh.seq 3",
        ),
        (
            dict(context_parallel="ring+ulysses", mesh=MeshConfig(seq=4, ulysses=0)),
            "--mesh.ulysses is 0; it must be at least 1",
        ),
        (
            dict(mesh=MeshConfig(), partials="16-bit"),
            "--partials=16-bit needs --mesh.seq 2 or more",
        ),
        (
            dict(context_parallel="ulysses", mesh=MeshConfig(seq=2), wire="16-bit"),
            "--wire=16-bit needs keys .* use --context-parallel=contiguous",
        ),
        (
            dict(context_parallel="ring+ulysses", mesh=MeshConfig(seq=2))
            | dict(partials="16-bit"),
            "--partials=16-bit needs keys",
        ),
    ],
)
def test_tokens_that_cannot_be_spread_are_refused(changes, says):
    config = dataclasses.replace(
        CONFIG, **(dict(attn="emulated", mesh=MeshConfig(seq=8)) | changes)
    )
    with pytest.raises(UsageError, match=says) as caught:
        validate(config)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("how", ["ulysses", "ring+ulysses"])
def test_heads_that_ulysses_cannot_deal_out_are_refused(how):
    mesh = MeshConfig(data=1, seq=4, ulysses=None if how == "ulysses" else 4)
    config = dataclasses.replace(
        CONFIG, attn="emulated", mesh=mesh, context_parallel=how
    )
    with pytest.raises(UsageError, match="do not divide the 2 heads of query"):
        assemble(config, jax.devices()[:4])


def test_images_are_drawn_on_one_device_wherever_tokens_were_spread():
    changes = dict(attn="emulated", context_parallel="ring+ulysses", wire="16-bit")
    mesh = MeshConfig(data=2, seq=4, ulysses=2)
    assembly = on_one_device(dataclasses.replace(CONFIG, mesh=mesh, **changes))
    assert assembly.mesh.size == 1 and assembly.attention.parallel is None


def test_data_parallel_program_gathers_nothing():
    """Attention inside shard_map stays on its device; only gradients are summed."""
    program = losses_on(MeshConfig(data=8), 8)[2].as_text()
    assert "all-reduce" in program
    assert "all-gather" not in program


def test_heads_on_the_tensor_axis_reach_attention_unsplit():
    """Each device's attention sees whole sequences of its own heads and rows."""
    from train.attention import shard_attention

    mesh = make_mesh(dataclasses.replace(CONFIG, mesh=MeshConfig(tensor=2, fsdp=2)))
    seen = []

    def attention(query, key, value):
        seen.append(query.shape)
        return value

    array = jnp.ones((8, 28, 2, 32))
    shard_attention(attention, mesh, jnp.bfloat16)(array, array, array)
    assert seen == [(2, 28, 1, 32)]


def test_mesh_that_does_not_fit_says_what_would():
    for mesh in (MeshConfig(data=3), MeshConfig(fsdp=16), MeshConfig(fsdp=3)):
        with pytest.raises(UsageError, match="does not fit 8 devices"):
            make_mesh(dataclasses.replace(CONFIG, mesh=mesh))
    uneven = dataclasses.replace(CONFIG, batch_size=12, mesh=MeshConfig())
    with pytest.raises(UsageError, match="--batch-size 12 cannot be spread"):
        make_mesh(uneven)
    assert dict(make_mesh(CONFIG).shape)["data"] == 8


def test_one_process_feeds_the_whole_batch():
    assert rows_of_process(make_mesh(CONFIG), 16) == (0, 1)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.parametrize(
    "attention",
    [
        ["--attn=xla"],
        # A device in each, and messages between them.
        [
            *("--attn=emulated", "--recipe=exact_fp32"),
            *("--mesh.seq=2", "--context-parallel=zigzag"),
        ],
    ],
)
def test_two_processes_train_to_the_loss_of_one(attention, tmp_path, monkeypatch):
    """Started by jax.distributed on this machine; process 0 alone writes and speaks."""
    command = [
        *(sys.executable, "-m", "train", *attention),
        *"--steps=3 --batch-size=8 --log-every=1 --precision=fp32".split(),
        *"--attention-inputs=fp32 --model.width=64 --model.heads=1".split(),
        *"--model.depth=1 --optimizer.warmup=0 --eval.examples=8".split(),
        *"--eval.captions=8 --eval.novel=0 --eval.batch-size=8".split(),
        *"--eval.grid=4 --eval.sampler-steps=2 --checkpoint.every=2".split(),
    ]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    if "--mesh.seq=2" in attention:
        environment["XLA_FLAGS"] = ""  # which asks for eight devices

    def launch(folder: Path, *more: str) -> subprocess.Popen:
        return subprocess.Popen(
            [*command, f"--run-dir={folder}", *more],
            cwd=REPOSITORY,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    together, single = tmp_path / "two", tmp_path / "one"
    config = parse_config([*command[3:], f"--run-dir={single}"])
    config = dataclasses.replace(config, mesh=MeshConfig())
    port = free_port()
    joined = ["--distributed.enabled", f"--distributed.coordinator=127.0.0.1:{port}"]
    joined += ["--distributed.processes=2"]
    processes = [
        launch(together, *joined, f"--distributed.process-id={number}")
        for number in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=280) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], outputs
    # Gloo, which carries the sums between CPU processes, prints lines of its own.
    printed = [
        [line for line in out.splitlines() if not line.startswith("[Gloo]")]
        for out, _ in outputs
    ]
    assert printed[1] == [] and len(printed[0]) == 1
    assert "step 3/3" in outputs[0][1] and "step 3/3" not in outputs[1][1]
    waiting = f"waiting for the other processes at 127.0.0.1:{port}"
    assert all(waiting in error for _, error in outputs)
    # Of the devices of this process one.
    monkeypatch.setattr(jax, "devices", lambda *_, known=jax.devices(): known[:1])
    two, one = json.loads(printed[0][0]), run(config)
    alone = json.loads((single / "environment.json").read_text())
    assert set(alone["mesh"].values()) == {1}

    def losses(folder: Path) -> list[float]:
        rows = map(json.loads, (folder / "metrics.jsonl").open())
        return [row["loss"] for row in rows if "loss" in row]

    assert len(losses(together)) == 3
    mesh = json.loads((together / "environment.json").read_text())["mesh"]
    assert ("--mesh.seq=2" in attention) == (mesh["seq"] == 2)
    assert mesh["seq"] == 1 or mesh["data"] == 1
    # As for one process with a mesh: fp32 sums in another order.
    np.testing.assert_allclose(losses(together), losses(single), rtol=1e-6)
    np.testing.assert_allclose(two["held_out_loss"], one["held_out_loss"], rtol=1e-5)
    assert (together / "samples.png").exists()
