"""Bytes that the fusions of a training step read and write, compiled without a GPU.

    JAX_PLATFORMS=cpu python prototypes/step_traffic.py CASE [LAYERS] [MEGABYTES]

CASE is one of `python -m analysis step-speed`, on our kernels, with as many layers (3).
Lists what moves more than so many megabytes (60): arguments and results of each fusion,
as if caches held nothing. Products and kernels are left out; XLA tries nothing out, so
what it would time first may be fused otherwise on a card.
"""

import contextlib
import dataclasses
import re
import sys
from unittest.mock import patch

from attn_jax.kernels import compiler

DEVICES = list(compiler.devices("h200", 1))  # Before JAX is imported by others.

from analysis.experiments.step_speed import CASES  # noqa: E402
from analysis.step_programs import compile_part  # noqa: E402
from attn_jax import api  # noqa: E402
from attn_jax.kernels import architecture  # noqa: E402
from train.assemble import assemble  # noqa: E402

_BYTES = {
    "f32": 4,
    "s32": 4,
    "u32": 4,
    "bf16": 2,
    "f16": 2,
    "pred": 1,
    "s8": 1,
    "u8": 1,
}
_ARRAY = re.compile(rf"\b({'|'.join(_BYTES)})\[([\d,]*)\]")
_LINE = re.compile(r"\s*(?:ROOT )?%?([\w.\-]+) = (.*?) ([\w\-]+)\((.*)")


def size(types: str) -> int:
    total = 0
    for kind, lengths in _ARRAY.findall(types):
        count = 1
        for length in filter(None, lengths.split(",")):
            count *= int(length)
        total += count * _BYTES[kind]
    return total


def fusions(program: str):
    """(bytes, name, result, arguments) of each fusion that is no product."""
    types: dict[str, str] = {}
    for line in program[program.index("ENTRY") :].splitlines():
        match = _LINE.match(line)
        if match is None:
            continue
        name, result, operation, rest = match.groups()
        types[name] = result
        if operation != "fusion" or "gemm" in name:
            continue
        given = [types.get(x, "") for x in set(re.findall(r"%([\w.\-]+)", rest))]
        yield size(result) + sum(map(size, given)), name, result, given


def compiled(case: str, layers: int) -> str:
    config = CASES[case]
    model = dataclasses.replace(config.model, depth=layers)
    with contextlib.ExitStack() as stack:
        stack.enter_context(architecture.made_for("hopper"))
        stack.enter_context(patch.object(api, "_pallas_refusal", lambda *a, **k: None))
        stack.enter_context(
            patch.object(architecture, "default_device", lambda: DEVICES[0])
        )
        config = dataclasses.replace(config, attn="pallas", model=model)
        assembly = assemble(config, devices=DEVICES)
        program = compile_part(assembly, "step", tuned=False)
        return program.compiled.as_text()


def main(case: str, layers: str = "3", least: str = "60") -> None:
    found = list(fusions(compiled(case, int(layers))))
    for moved, name, result, given in found:
        if moved >= 1e6 * float(least):
            shapes = (re.sub(r"{[^}]*}", "", x)[:60] for x in (result, *given))
            print(f"{moved / 1e6:6.0f} MB  {name}: {' <- '.join(shapes)}")
    print(f"{sum(x[0] for x in found) / 1e6:6.0f} MB in all")


if __name__ == "__main__":
    main(*sys.argv[1:])
