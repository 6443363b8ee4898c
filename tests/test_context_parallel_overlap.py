"""XLA's schedule for GPUs: what travels round the ring does so while kernels run."""

import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from attn_jax import context_parallel
from tests.child_process import in_child_process
from tests.gpu_compiler import h200_mesh, partitioned

pytestmark = pytest.mark.ci

pytest.importorskip("jax_cuda13_plugin", reason="needs the extra `compile`")

TIME_LIMIT = 240  # seconds; some 15 alone on a core
SHARDS = 4


def _scheduled(strategy: str) -> str:
    """Both passes on four GPUs, in the order in which they are begun."""
    mesh = h200_mesh((SHARDS,), ("seq",), (AxisType.Auto,))
    spec = P(None, "seq")

    def local(query, key, value):
        return context_parallel.attention(
            *(query, key, value),
            axis_name="seq",
            strategy=strategy,
            layout="zigzag",
            is_causal=True,
            implementation="pallas",
        )[0]

    attend = jax.shard_map(local, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec)

    def both(query, key, value, dout):
        out, pullback = jax.vjp(attend, query, key, value)
        return out, pullback(dout)

    given = [
        jax.ShapeDtypeStruct(
            (1, SHARDS * 8192, heads, 128),
            jnp.bfloat16,
            sharding=NamedSharding(mesh, spec),
        )
        for heads in (32, 8, 8, 32)
    ]
    with jax.default_device(mesh.devices.flat[0]):  # Whose kernels are meant.
        hlo = partitioned(both, *given).hlo
    assert "is_scheduled=true" in hlo
    return hlo[hlo.index("\nENTRY") :]


# Of the second the backward pass is the first's.
@pytest.mark.parametrize(
    "strategy", ["ring", pytest.param("all_gather+ring", marks=pytest.mark.thorough)]
)
def test_messages_of_the_ring_travel_while_kernels_run(strategy):
    """XLA has one message on its way at a time. What it made of two at a time, and of
    keys that nothing kept from going round at once, were messages that it waits for: on
    four H200s 0.49 of 0.74 ms, and 1.93 of 3.64 with the backward pass (8192 tokens,
    `results/context-parallel-speed/nvidia-h200-x4-before.csv`)."""
    lines = in_child_process(_scheduled, strategy, seconds=TIME_LIMIT).splitlines()
    # After a pass's last kernel, the numbers of all keys: a device's own, then two's.
    few = re.compile(r"f32\[[12],1,8,512\].* collective-permute(-start)?\(")
    assert sum(bool(few.search(line)) for line in lines) == 2
    lines = [line for line in lines if not re.search(r"f32\[[12],1,8,512\]", line)]
    assert not [line for line in lines if re.search(r" collective-permute\(", line)]
    # A kernel of NCCL's beside one of attention, which counts on all multiprocessors,
    # made both passes of `all_gather+ring` 9 % slower. Its keys come before any work.
    gathers = sum(bool(re.search(r" all-gather(-start)?\(", line)) for line in lines)
    assert gathers == {"ring": 0, "all_gather+ring": 1}[strategy]
    # The kernel that adds the last keys ends the rows: nothing else makes out.
    out = re.compile(r"bf16\[1,8192,32,128\].* custom-call\(.*mosaic_gpu")
    ends = sum(bool(out.search(line)) for line in lines)
    assert ends == {"ring": 1, "all_gather+ring": 0}[strategy]
    # A kernel is told on the device what it is to do: the host waits for none.
    assert not any("conditional(" in line for line in lines)
    numbers: dict[str, int] = {}
    hidden = []
    for number, line in enumerate(lines):
        if found := re.search(r"(%\S+) = .* collective-permute-(start|done)\(", line):
            name, what = found.groups()
            if what == "start":
                numbers[name] = number
                continue
            (began,) = (numbers[x] for x in re.findall(r"\((%\S+)\)", line))
            hidden.append(any("mosaic_gpu" in x for x in lines[began:number]))
    # Keys three times, in the backward pass once with sums, and sums alone twice, home
    # the second time.
    assert len(hidden) == {"ring": 3 + 5, "all_gather+ring": 5}[strategy]
    assert all(hidden)


def test_copy_engines_are_asked_for_within_one_process():
    """XLA has no such messages between processes, nor on other devices."""

    def devices(platform: str, *processes: int):
        return [
            SimpleNamespace(platform=platform, process_index=process)
            for process in processes
        ]

    asked = context_parallel.compiler_options(devices("gpu", 0, 0))
    # An unknown name, or value, is an error.
    assert jax.jit(lambda x: x + 1).lower(1.0).compile(compiler_options=asked)(1.0) == 2
    assert asked and asked == context_parallel.compiler_options(devices("gpu", 3))
    for others in (("gpu", 0, 1), ("cpu", 0, 0), ("tpu", 0)):
        assert context_parallel.compiler_options(devices(*others)) == {}
    assert context_parallel.compiler_options([]) == {}
