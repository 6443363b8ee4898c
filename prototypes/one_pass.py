"""The Ampere backward pass in one kernel beside that in two, for measure_ampere.py."""

import contextlib
import os
import signal
import subprocess


def program(case, name, big, row):
    """(function of arrays, its arguments' shapes) of the package's two kernels, `base`,
    or a variant of the kernel in one pass."""
    import jax.numpy as jnp
    from ampere_backward_fused import Cut, backward_fused

    from attn_jax.centre import centre_of
    from attn_jax.formats import BF16
    from attn_jax.kernels import (
        ampere_backward_dkv,
        ampere_backward_dq,
        key_means,
        tuning,
    )
    from attn_jax.kernels.hopper_key_numbers import KeyNumbers
    from attn_jax.kernels.hopper_range import power_of_two, range_of

    head_dim, length, is_causal = case
    common = {"query_count": length, "key_count": length, "scale": head_dim**-0.5}
    common |= {"is_causal": is_causal}
    dq_tiling, dkv_tiling = (
        tuning.tiling(tuning.LONG[kernel, None], "ampere", head_dim, head_dim)
        for kernel in ("backward_dq", "backward_dkv")
    )

    def wide(x):
        return x.astype("float32")

    def two_kernels(query, key, value, dout, lse, dlse, out):
        delta = (wide(dout) * wide(out)).sum(axis=-1).swapaxes(1, 2) - dlse
        operands = query, key, value, dout, lse, delta
        centre = key_means.mean(key, is_causal, dq_tiling, length)
        dq = ampere_backward_dq.backward_dq(
            *operands, dlse, centre, tiling=dq_tiling, **common
        )
        return dq, *ampere_backward_dkv.backward_dkv(
            *operands, tiling=dkv_tiling, **common
        )

    def one_pass(query, key, value, dout, lse, dlse, out):
        excess = (wide(dout) * wide(out)).sum(axis=-1).swapaxes(1, 2)
        centre = centre_of(key, BF16)

        def in_each(x):
            return jnp.broadcast_to(x[..., None], centre.shape)

        largest = jnp.abs(wide(key)).max(axis=(1, 3))
        columns = jnp.abs(wide(value)).max(axis=1)
        numbers = KeyNumbers(
            centre=centre,
            key_factor=in_each(power_of_two(14 - jnp.frexp(largest)[1])),
            value_norm=in_each(jnp.linalg.norm(columns, axis=2)),
            unscale=jnp.ones_like(columns),
        )
        norm = jnp.linalg.norm(wide(dout), axis=-1).swapaxes(1, 2)
        return backward_fused(
            *(query, key, value, dout, lse, excess - dlse, dlse),
            range_of(numbers, norm, dlse, key),
            cut=cut,
            **common,
        )

    arguments = (big,) * 4 + (row, row, big)
    if name == "base":
        return two_kernels, arguments
    size, *words = name.split()
    queries, strip = map(int, size.split("x"))
    options = dict(word.split("=") for word in words if "=" in word)
    cut = Cut(
        queries=queries,
        strip=strip,
        registers=tuple(map(int, options.get("registers", ""))),
        buffers=int(options.get("buffers", 2)),
        adding=next((w for w in ("load", "integers") if w in words), "reduce"),
        turns="unordered" not in words,
        walk=options.get("walk"),
    )
    return one_pass, arguments


@contextlib.contextmanager
def limited(seconds):
    """Ends this process if the block takes longer, whatever it is in."""
    command = ["sh", "-c", f"sleep {seconds}; kill -9 {os.getpid()}"]
    with subprocess.Popen(command, start_new_session=True) as process:
        try:
            yield
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def timed(old, new, base, arguments, off):
    """Columns of a variant and, timed beside it, of the two kernels."""
    import jax
    import numpy as np

    from attn_jax.timing import device_time, interleaved

    row = {}
    found = jax.block_until_ready(new(*arguments))
    again = [new(*arguments) for _ in range(3)]
    row["same_bits"] = all(
        bool((a == b).all()) for other in again for a, b in zip(found, other)
    )
    row["off"] = off(found, base)
    if not row["off"] < 2.0**-6:
        each = (f"{off([a], [b]):.2g}" for a, b in zip(found, base))
        row["why"] = "wrong " + " ".join(each)
    timers = {
        (name, only): lambda runs, p=program, only=only: device_time(
            p, arguments, runs, only=only
        )[0]
        for name, program in (("base", old), ("new", new))
        for only in ("", "attention_")
    }
    times = interleaved(timers, 0.3)
    for taken in times.values():
        if isinstance(taken, str):
            return row | {"why": taken}, {}
    ms = {name: round(float(np.median(taken)), 4) for name, taken in times.items()}
    columns = {
        name: {
            "ms": ms[name, ""],
            "ms_kernels": ms[name, "attention_"],
            "of_base": round(ms["base", ""] / ms[name, ""], 3),
        }
        for name in ("new", "base")
    }
    return row | columns["new"], columns["base"]


class Begun:
    """A job's variants that a process has begun, for the next one if it is killed."""

    def __init__(self, path):
        self.path = path

    def read(self):
        return self.path.read_text().splitlines() if self.path.exists() else []

    def add(self, name):
        with open(self.path, "a") as file:
            file.write(f"{name}\n")
