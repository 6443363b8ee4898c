"""Has XLA compile programs for the CPU in a fraction of the time, as for no user.

For programs that are compiled with few optimisations anyway: those compiled with all
(`fully_optimised`) are left as they are.
"""

import os

import jax
from jax._src import compiler

# Fused operations go to LLVM straight, not through passes of MLIR that take longer than
# all else, and a program is not cut in parts for threads that other tests keep busy.
_FLAGS = (
    "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters "
    "--xla_cpu_parallel_codegen_split_count=1"
)


def _field(number: int, value: bytes | int) -> bytes:
    """A field of a message, in the encoding of protocol buffers."""

    def varint(n: int) -> bytes:
        return bytes([n]) if n < 128 else bytes([n % 128 + 128]) + varint(n // 128)

    if isinstance(value, int):
        return varint(8 * number) + varint(value)
    return varint(8 * number + 2) + varint(len(value)) + value


# `_FLAGS` as CompileOptionsProto has them, in the executable's build options (3), there
# in the debug options (3), which no binding has, and which `compiler_options` of a
# program cannot take: they are a map. What another XLA may not know it passes over.
_OPTIONS = _field(
    3,
    _field(
        3,
        _field(500, _field(1, b"xla_cpu_disable_new_fusion_emitters") + _field(2, b""))
        + _field(323, 1),
    ),
)


def compile_quickly() -> None:
    """For this process, whose flags hold for all of its programs, and those it starts.

    XLA reads the flags once, so they are set only after that.
    """
    given = os.environ.get("XLA_FLAGS", "").replace(_FLAGS, "").strip()
    os.environ["XLA_FLAGS"] = given
    _ = compiler.CompileOptions().executable_build_options.debug_options
    os.environ["XLA_FLAGS"] = f"{given} {_FLAGS}".strip()
    of_flags = compiler.get_compile_options

    def get_compile_options(*args, **kwargs):
        options = of_flags(*args, **kwargs)
        if not jax.config.read("jax_disable_most_optimizations"):
            return options
        # A message after a message adds to its fields.
        return options.ParseFromString(options.SerializeAsString() + _OPTIONS)

    compiler.get_compile_options = get_compile_options
