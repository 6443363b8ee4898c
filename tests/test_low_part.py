"""What rounding drops from out, in one byte: numbers, kernels, and where bytes go."""

import collections
import dataclasses
import re
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.experimental.mosaic import gpu as mgpu

from attn_jax.formats import BF16, FP16, Rounding, round_to, with_low_byte
from attn_jax.kernels import ampere_forward, hopper_forward, low_part, tuning
from attn_jax.kernels.architecture import made_for
from attn_jax.kernels.attention import attention
from attn_jax.kernels.interpreter import interpreted
from attn_jax.recipe import Architecture
from tests import low_part_oracle as oracle
from tests.child_process import in_child_process
from tests.gpu_compiler import Program, compiled

TIME_LIMIT = 120  # seconds
FORMATS = {"bfloat16": BF16, "float16": FP16}
DTYPES: dict[str, Any] = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}


def _numbers(dtype: str) -> np.ndarray:
    """FP32 numbers of many sizes, and what lies on a border, of both signs."""
    fmt, rng = FORMATS[dtype], np.random.default_rng(0)
    least = -40 if dtype == "float16" else -100
    some = rng.uniform(1, 2, 20000) * 2.0 ** rng.integers(least, 15, 20000)
    # The middle between two, to an even one above and below, and next to it; what is
    # below a power of two; halves of a byte's last place.
    spacing = 2.0**-fmt.mantissa_bits
    at = 1 + np.arange(-8, 64)[:, None] * spacing / 512
    near = 2.0 ** np.arange(-13, 14) * np.concatenate(
        [at, at + spacing, at + 5 * spacing, at - 2.0**-23, at + 2.0**-23]
    )
    of_format = [0.0, fmt.min_normal, 1.25 * fmt.min_normal, 65504 - 15.9]
    x = np.concatenate([some, near.ravel(), of_format])
    if dtype == "float16":
        tiny = np.arange(1, 4096) * 2.0**-34
        x = np.concatenate([x, tiny, 2.0**-14 - tiny])
    return np.concatenate([x, -x]).astype(np.float32)


def _rounded(x: np.ndarray, dtype: str) -> np.ndarray:
    return x.astype(DTYPES[dtype])


def _byte(exact: np.ndarray, out: np.ndarray) -> np.ndarray:
    integers = low_part.dropped(jnp.asarray(exact), jnp.asarray(out))
    return np.asarray(low_part.byte_of(integers))


def _completed(out: np.ndarray, low: np.ndarray) -> np.ndarray:
    return np.asarray(low_part.completed(jnp.asarray(out), jnp.asarray(low)))


def _assert_equal(found: np.ndarray, want: np.ndarray) -> None:
    """XLA on a CPU flushes FP32's subnormals."""
    np.testing.assert_allclose(found, want, rtol=0, atol=2.0**-126)


def _emulated(x: np.ndarray, out: np.ndarray, dtype: str) -> np.ndarray:
    wide = jnp.asarray(out.astype(np.float32))
    return np.asarray(with_low_byte(jnp.asarray(x), wide, FORMATS[dtype]))


@pytest.mark.parametrize("dtype", FORMATS)
def test_bytes_are_those_of_the_definition(dtype):
    x = _numbers(dtype)
    out = _rounded(x, dtype)
    found = _byte(x, out)
    np.testing.assert_array_equal(found, oracle.low_part(x, out))
    assert {-128, 127, 0} <= set(found)


@pytest.mark.parametrize("dtype", FORMATS)
def test_both_parts_make_the_number_to_within_a_part_of_a_spacing(dtype):
    x = _numbers(dtype)
    out = _rounded(x, dtype)
    low = _byte(x, out)
    whole = _completed(out, low)
    _assert_equal(whole, oracle.whole(out, low))
    error = abs(whole.astype(np.float64) - x)
    size = abs(x.astype(np.float64))
    bound = np.where(low == 127, 1 / 256, 1 / 512)
    # Subnormals: it is no further off than out.
    bound = np.where(size < FORMATS[dtype].min_normal, 1 / 2, bound)
    assert (error <= bound * oracle.spacings(size, dtype)).all()
    assert (error <= abs(out.astype(np.float64) - x)).all()
    # A number of the format loses nothing.
    own = _rounded(x, dtype).astype(np.float32)
    assert not _byte(own, out).any()


@pytest.mark.parametrize("dtype", FORMATS)
def test_any_byte_is_read_as_defined(dtype):
    """Whatever out is, at a power of two and at 0, too."""
    numbers = np.arange(0x7C00 if dtype == "float16" else 0x7F80, dtype=np.uint16)
    out = numbers.view(DTYPES[dtype])[:, None]
    for sign in (1, -1):
        low = np.array([-128, -1, 0, 1, 127], np.int8)
        both = np.broadcast_arrays(sign * out, low)
        inside = both[1] >= np.where(both[0] == 0, 0, -128)
        out_of, low_of = (x[inside] for x in both)
        found = _completed(out_of, low_of)
        _assert_equal(found, oracle.whole(out_of, low_of))


@pytest.mark.parametrize("dtype", FORMATS)
def test_what_is_not_finite_stays_so(dtype):
    x = np.array([np.inf, -np.inf, np.nan, 3.4e38, -3.4e38], np.float32)
    if dtype == "float16":
        x = np.append(x, np.float32([65520, -65520, 1e9]))
    out = _rounded(x, dtype)
    assert not np.isfinite(out).any()
    assert not np.isfinite(_completed(out, _byte(x, out))).any()
    # Whatever the byte.
    for byte in (-128, -1, 0, 1, 127):
        low = np.full(out.shape, byte, np.int8)
        assert not np.isfinite(_completed(out, low)).any()
    assert np.isnan(_emulated(x, out, dtype)).all()


@pytest.mark.parametrize("dtype", FORMATS)
def test_the_emulators_number_is_that_of_the_definition(dtype):
    x = _numbers(dtype)
    out = _rounded(x, dtype)
    found = _emulated(x, out, dtype)
    _assert_equal(found, oracle.whole(out, oracle.low_part(x, out)))


def test_a_rounding_toward_zero_leaves_more_than_a_byte_holds():
    x = jnp.float32([1.0 + 2.0**-8, 1.0 + 2.0**-7 - 2.0**-20])
    out = round_to(x, BF16, Rounding.TOWARD_ZERO)
    most = 1 + 127 / 256 * 2.0**-7
    np.testing.assert_array_equal(with_low_byte(x, out, BF16), [most, most])


@dataclasses.dataclass(frozen=True)
class Case:
    architecture: Architecture
    head_dim: int
    dtype: str = "bfloat16"
    query_count: int = 77
    key_count: int = 75

    def forward(self, out_dtype) -> tuple[Any, ...]:
        """out, low and LSE of one kernel."""
        kernels = {"hopper": hopper_forward, "ampere": ampere_forward}
        tilings = tuning.configuration(
            *(self.architecture, self.head_dim, self.head_dim, self.key_count),
            is_causal=False,
            listed=False,
        )
        rng = np.random.default_rng(2)
        # Padded as TMA wants it.
        lengths = (-(-n // 8) * 8 for n in (self.query_count, *2 * [self.key_count]))
        arrays = (
            rng.standard_normal((2, n, 2, self.head_dim), np.float32) for n in lengths
        )
        with made_for(self.architecture):
            return kernels[self.architecture].forward(
                *(jnp.asarray(x.astype(DTYPES[self.dtype])) for x in arrays),
                query_count=self.query_count,
                key_count=self.key_count,
                scale=0.2,
                is_causal=False,
                tiling=tilings.forward,
                out_dtype=jnp.dtype(out_dtype),
                residual=True,
            )


def _interpreted(case: Case):
    with interpreted(detect_races=True):
        return _outputs(case)


def _outputs(case: Case) -> tuple[np.ndarray, ...]:
    """O in FP32, out and low."""
    exact, none, _ = case.forward("float32")
    assert none is None
    return tuple(map(np.asarray, (exact, *case.forward(case.dtype)[:2])))


CASES = [
    Case("hopper", 128),
    Case("hopper", 64, "float16"),
    Case("ampere", 64),
    Case("ampere", 128, "float16"),
]
# out leaves in parts.
OTHER_HEAD_DIMS = [
    Case("hopper", 192),
    Case("hopper", 96, "float16"),
    Case("hopper", 32),
    Case("ampere", 96),
    Case("ampere", 256, "float16"),
]


@pytest.mark.parametrize(
    "case",
    [*CASES, *(pytest.param(x, marks=pytest.mark.thorough) for x in OTHER_HEAD_DIMS)],
    ids=str,
)
def test_kernels_leave_the_byte_of_every_row_there_is(case):
    _check(case, in_child_process(_interpreted, case, seconds=TIME_LIMIT))


@pytest.mark.gpu(capability="9.0")
@pytest.mark.parametrize("case", [*CASES, *OTHER_HEAD_DIMS], ids=str)
@pytest.mark.parametrize("lengths", [(77, 75), (1000, 1100), (256, 4224)])
def test_kernels_leave_the_byte_on_a_gpu(case, lengths):
    query_count, key_count = lengths
    case = dataclasses.replace(case, query_count=query_count, key_count=key_count)
    _check(case, _outputs(case))


def _check(case: Case, outputs: tuple[np.ndarray, ...]) -> None:
    """Bit by bit: all that differs between the kernels is what is stored."""
    exact, out, low = outputs
    assert low.dtype == np.int8 and low.shape == out.shape == exact.shape
    assert out.shape[1] == case.query_count
    np.testing.assert_array_equal(out, exact.astype(DTYPES[case.dtype]))
    np.testing.assert_array_equal(low, oracle.low_part(exact, out))


class _Threads:
    """What the code behind `store` is made of, for 128 threads at once, in NumPy."""

    def __init__(self, gmem: np.ndarray):
        self.memory = gmem.reshape(-1)

    def run(self, code, arguments, monkeypatch) -> None:
        types = SimpleNamespace(
            Value=None,
            IntegerType=SimpleNamespace(get_signless=lambda bits: bits),
            VectorType=SimpleNamespace(get=lambda shape, bits: bits),
            MemRefType=lambda x: SimpleNamespace(
                get_strides_and_offset=lambda: (list(x.strides), 0)
            ),
        )
        for name, value in {
            "ir": types,
            "arith": SimpleNamespace(
                addi=np.add,
                subi=lambda x, y: (x - y + 2**31) % 2**32 - 2**31,
                muli=np.multiply,
                andi=np.bitwise_and,
                shrui=np.right_shift,
                remui=np.remainder,
                minsi=np.minimum,
                select=np.where,
                extui=lambda _, x: x,
                cmpi=lambda compare, x, y: compare(x, y),
                CmpIPredicate=SimpleNamespace(ne=np.not_equal, sgt=np.greater),
            ),
            "llvm": SimpleNamespace(ptrtoint=lambda _, x: x),
            "vector": SimpleNamespace(
                extract=lambda x, *, static_position, **_: x[:, static_position[0]]
            ),
            "utils": SimpleNamespace(
                c=lambda n, _: np.int64(n),
                thread_idx=lambda: np.arange(128),
                memref_ptr=lambda _: np.int64(0),
                bitcast=self._bits,
                shfl_bfly=lambda x, lanes: x[np.arange(128) ^ lanes],
                inline_ptx=self._instruction,
            ),
        }.items():
            monkeypatch.setattr(low_part, name, value)
        code(None, *arguments)

    @staticmethod
    def _bits(x: np.ndarray, _) -> np.ndarray:
        """Two numbers of FP32 as two integers, two of 16 bits as one."""
        whole = np.ascontiguousarray(x).view(np.int32).astype(np.int64)
        return whole if x.itemsize == 4 else whole[:, 0]

    def _instruction(self, text: str, *operands, predicate=None, **_):
        if text.startswith("mov.b32"):
            return operands[0]
        if text.startswith("prmt.b32"):
            low, high, order = operands
            both = (low & 0xFFFFFFFF) | (high & 0xFFFFFFFF) << 32
            digits = (order >> 4 * i & 7 for i in range(4))
            return sum((both >> 8 * d & 0xFF) << 8 * i for i, d in enumerate(digits))
        found = re.fullmatch(r"st\.global\.v(\d)\.b32 \[\$0 \+ (\d+)\], .*;", text)
        assert found and int(found[1]) == len(operands) - 1
        words = np.stack([x & 0xFFFFFFFF for x in operands[1:]], axis=1)
        rows = np.ascontiguousarray(words.astype(np.uint32)).view(np.int8)
        for address, row in zip(
            (operands[0] + int(found[2]))[predicate], rows[predicate]
        ):
            assert address % len(row) == 0  # aligned
            assert (self.memory[address : address + len(row)] == _UNTOUCHED).all()
            self.memory[address : address + len(row)] = row
        return None


_UNTOUCHED = 99


def _fragments(x: np.ndarray) -> SimpleNamespace:
    """As threads hold an accumulator (PTX ISA, wgmma and mma.m16n8k16)."""
    rows, columns = x.shape
    thread = np.arange(128)[:, None]
    row = 16 * (thread // 32) + thread % 32 // 4
    column = 2 * (thread % 4) + np.arange(2)
    shape = mgpu.WGMMA_LAYOUT.registers_shape(x.shape)
    registers = np.empty(shape, object)
    for place in np.ndindex(shape):
        strip, group, half = place[0], place[1], place[4]
        registers[place] = x[64 * strip + 8 * half + row, 8 * group + column]
    return SimpleNamespace(registers=registers, shape=(rows, columns))


def test_accumulators_are_alike():
    of_mma = mgpu.MMALayouts(jnp.bfloat16).acc
    assert of_mma == mgpu.WGMMA_LAYOUT


# What stands for the compiler's values is of other types.
@pytest.mark.usefixtures("as_users_call_it")
@pytest.mark.parametrize("count", [128, 61, 0, -40])
@pytest.mark.parametrize("columns", [32, 64, 96, 128])
@pytest.mark.parametrize("dtype", FORMATS)
def test_bytes_go_where_they_belong(columns, count, dtype, monkeypatch):
    """Each thread's registers to each place of memory, by the code of the GPU."""
    rng = np.random.default_rng(columns)
    exact = rng.standard_normal((128, columns)).astype(np.float32)
    # Halves, to an even number above or below.
    exact[::7] = np.float32(1 + rng.integers(0, 64, exact[::7].shape) / 256)
    out = _rounded(exact, dtype)
    integers = np.asarray(low_part.dropped(jnp.asarray(exact), jnp.asarray(out)))
    low = _byte(exact, out)
    gmem = np.full((128, 2, columns), _UNTOUCHED, np.int8)
    view = SimpleNamespace(type=gmem[:, 0])
    kept, code = [exact, out], low_part.store_dropped
    if dtype == "float16":
        kept, code = [integers.astype(np.int64)], low_part.store_bytes
    rows = SimpleNamespace(registers=np.array([np.int64(count)], object))
    arguments = [view, *map(_fragments, kept), rows]
    _Threads(gmem).run(code, arguments, monkeypatch)
    stored = max(count, 0)
    np.testing.assert_array_equal(gmem[:stored, 0], low[:stored])
    assert (gmem[stored:, 0] == _UNTOUCHED).all() and (gmem[:, 1] == _UNTOUCHED).all()


@pytest.mark.usefixtures("as_users_call_it")
def test_the_code_for_bf16_rounds_as_dropped_does(monkeypatch):
    """All 2^16 ways to lie between two numbers, to an even and to an odd one."""
    bits = np.arange(1 << 16, dtype=np.uint32)
    for first in (0x3F80, 0x3F81, 0x0000, 0xC000):
        exact = (bits + np.uint32(first << 16)).view(np.float32).reshape(-1, 128)
        out = _rounded(exact, "bfloat16")
        gmem = np.full(exact.shape, _UNTOUCHED, np.int8)
        with monkeypatch.context() as patch:
            view = SimpleNamespace(type=gmem)
            rows = SimpleNamespace(registers=np.array([np.int64(512)], object))
            pair = map(_fragments, (exact, out))
            _Threads(gmem).run(low_part.store_dropped, [view, *pair, rows], patch)
        np.testing.assert_array_equal(gmem, _byte(exact, out))


def _compiled(case: Case) -> Program:
    query = jax.ShapeDtypeStruct((1, 1000, 4, case.head_dim), case.dtype)

    def program(query):
        def attend(query):
            return attention(query, query, query, scale=0.1)[0]

        return jax.vjp(attend, query)

    with made_for(case.architecture):
        gpu = "a100" if case.architecture == "ampere" else "h200"
        return compiled(program, query, gpu=gpu)


@pytest.mark.ci
@pytest.mark.parametrize(
    ("case", "stores"),
    [
        (Case("hopper", 128), {"STG.E.128": 4}),
        (Case("hopper", 96), {"STG.E.128": 2, "STG.E.64": 2}),
        (Case("ampere", 64), {"STG.E.128": 4}),
    ],
    ids=str,
)
def test_16_bytes_leave_at_a_time(case, stores):
    """Of rows of 64 or 128 by a warpgroup, a row's 16 neighbours by each thread."""
    pytest.importorskip("jax_cuda13_plugin", reason="needs the extra `compile`")
    among = {"among": "a100"} if case.architecture == "ampere" else {}
    program = in_child_process(_compiled, case, seconds=TIME_LIMIT, **among)
    (kernel,) = (k for k in program.kernels if k.name == "attention_forward")
    found = collections.Counter(kernel.instructions)
    assert {name: found[name] for name in stores} == stores
    assert kernel.spilled_bytes == 0
