"""Numbers of K and V for Ampere's one-pass backward kernel: results, machine code."""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from attn_jax.centre import centre_from
from attn_jax.formats import BF16, FP32
from attn_jax.kernels import ampere_key_numbers
from attn_jax.kernels.ampere_key_numbers import additions, key_numbers, rows_of
from attn_jax.kernels.architecture import made_for
from attn_jax.kernels.hopper_key_numbers import KeyNumbers
from attn_jax.kernels.interpreter import interpreted
from tests.child_process import in_child_process
from tests.gpu_compiler import Program, compiled

TIME_LIMIT = 120  # seconds
U = 2.0**-24
MOST = FP32.max_finite


@dataclasses.dataclass(frozen=True)
class Case:
    """`power`: of two, that K and V are multiplied by."""

    batch: int
    count: int
    heads: int
    head_dim: int
    power: int = 0

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.batch, self.count, self.heads, self.head_dim

    def inputs(self) -> tuple[np.ndarray, np.ndarray]:
        """K and V. Every second column of K has a mean; of the last head V is zero, and
        of K a few rows are left, of the first batch entry's last head none."""
        rng = np.random.default_rng(0)
        means = 3 * rng.choice((-1, 1), self.head_dim) * (np.arange(self.head_dim) % 2)
        key, value = rng.standard_normal((2, *self.shape))
        key += means
        if self.heads > 1:
            value[:, :, -1] = 0
            key[:, : -self.count // 8, -1] = 0
            key[0, :, -1] = 0
        # Not every number of BF16's largest exponents is one of its numbers.
        key, value = (np.ldexp(x, self.power) for x in (key, value))
        key, value = (x.clip(-BF16.max_finite, BF16.max_finite) for x in (key, value))
        return key.astype(ml_dtypes.bfloat16), value.astype(ml_dtypes.bfloat16)


def _found(key: np.ndarray, value: np.ndarray) -> list[KeyNumbers]:
    """Twice."""
    program = jax.jit(lambda *x: key_numbers(*x))
    with made_for("ampere"):
        return [jax.tree.map(np.asarray, program(key, value)) for _ in "12"]


def _interpreted(*arrays: np.ndarray) -> list[KeyNumbers]:
    with interpreted(detect_races=True):
        return _found(*arrays)


def _in_interpreter(*arrays: np.ndarray) -> list[KeyNumbers]:
    return in_child_process(_interpreted, *arrays, seconds=TIME_LIMIT)


def _check(found: list[KeyNumbers], key: np.ndarray, value: np.ndarray) -> None:
    numbers, again = found
    for x, same in zip(numbers, again, strict=True):
        np.testing.assert_array_equal(x.view(np.uint32), same.view(np.uint32))
    key, value = (x.astype(np.float64) for x in (key, value))
    _check_centre(np.asarray(numbers.centre), key)
    shape = numbers.centre.shape
    top = 2 * abs(key).max(axis=(1, 3))
    exponent = np.where(top > 0, (15 - np.frexp(top)[1]).clip(-100, 100), 0)
    factor = np.broadcast_to(2.0 ** exponent[..., None], shape)
    np.testing.assert_array_equal(numbers.key_factor, factor)
    # Half of what the sum of H rounded squares is off by, and the root's 2^-23.
    norm = np.linalg.norm(abs(value).max(axis=1), axis=2)
    norm = np.broadcast_to(norm[..., None], shape)
    norm = np.where(norm > MOST, np.inf, norm)
    rtol = (key.shape[3] / 2 + 2) * U
    np.testing.assert_allclose(numbers.value_norm, norm, rtol=rtol, atol=0)
    np.testing.assert_array_equal(numbers.unscale, np.ones(shape))


def _check_centre(centre: np.ndarray, key: np.ndarray) -> None:
    """The mean, rounded to few digits: of any number that is as near the mean as FP32
    sums come, which is one c but where c's rounding has a tie in between."""
    _, count, _, head_dim = key.shape
    # A key alone is its mean, also where it is divided by 1.
    roundings = min(additions(count, head_dim), count - 1) + 4 * (count > 1)
    off = 1.01 * U * roundings
    mean, size, square = key.mean(axis=1), abs(key).mean(axis=1), (key**2).mean(axis=1)
    # Neither the place nor whether a column has a centre is in doubt.
    exponent = np.frexp(square)[1]
    for sign in (-1, 1):
        np.testing.assert_array_equal(exponent, np.frexp(square * (1 + sign * off))[1])
    stands_out = 17 * mean**2 > square
    doubt = 17 * (2 * off * abs(mean) * size) + off * square
    assert (abs(17 * mean**2 - square) >= doubt).all()
    stands_out &= square * count < MOST
    place = 2.0 ** (((exponent + 1) >> 1) + 2 - (BF16.mantissa_bits + 1))
    low, high = (
        np.where(stands_out, np.rint((mean + sign * off * size) / place) * place, 0)
        for sign in (-1, 1)
    )
    assert (low <= centre).all() and (centre <= high).all()
    assert (low == high).mean() > 0.99


CASES = [
    # Several heads and batch entries, a last chunk of few keys.
    Case(2, 300, 3, 64),
    # Fewer keys than a chunk has.
    Case(1, 1, 1, 128),
    Case(2, 101, 2, 128, power=-40),
    # Whole chunks.
    Case(1, 512, 2, 64, power=30),
    # Ten chunks, which a warpgroup does not read at once.
    Case(1, 1163, 1, 128),
    # Squares overflow, and K - c might; the smallest power of two.
    Case(1, 300, 2, 64, power=100),
    Case(1, 150, 1, 128, power=126),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_numbers_against_float64(case):
    arrays = case.inputs()
    found = _in_interpreter(*arrays)
    _check(found, *arrays)
    assert found[0].centre.any() == (abs(case.power) < 60)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case",
    [
        *CASES,
        *(Case(1, count, 2, 128) for count in (127, 128, 129)),
        # More chunks of a head than are read in one turn, in whole turns and not.
        Case(1, 16384, 2, 128),
        Case(1, 16400, 3, 64),
        # CTAs side by side.
        Case(4, 1024, 16, 128),
        Case(3, 1337, 8, 64),
        Case(1, 40, 1, 64, power=-60),
    ],
    ids=str,
)
def test_numbers_on_a_gpu(case):
    arrays = case.inputs()
    _check(_found(*arrays), *arrays)


# (what is odd, batch entry, key, head, column): in the first chunk, in rows that two
# chunks read, in the last row.
ODD_KEYS = [
    (np.inf, 0, 0, 0, 0),
    (-np.inf, 1, 299, 1, 63),
    (np.nan, 1, 250, 2, 5),
    (-np.nan, 0, 43, 3, 62),
]
# Two in a head: it is NaN.
ODD_VALUES = [
    (-np.inf, 0, 299, 1, 0),
    (np.nan, 0, 17, 2, 63),
    (np.inf, 0, 18, 2, 9),
    (-np.nan, 1, 128, 3, 62),
]
ODD_CASE = Case(2, 300, 5, 64)


def _with_odd_entries() -> tuple[np.ndarray, np.ndarray]:
    arrays = ODD_CASE.inputs()
    for array, odd in zip(arrays, (ODD_KEYS, ODD_VALUES), strict=True):
        for x, b, row, n, column in odd:
            array[b, row, n, column] = x
    return arrays


def _check_odd_entries(whole: KeyNumbers, found: KeyNumbers) -> None:
    """Their heads show them, and nothing else is changed."""
    centre, factor, norm = (x.copy() for x in whole[:3])
    for _, b, _, n, column in ODD_KEYS:
        assert centre[b, n, 1] != 0
        centre[b, n, column], factor[b, n] = 0, np.nan
    for x, b, _, n, _ in ODD_VALUES:
        norm[b, n] = np.nan if np.isnan(x) or n == 2 else np.inf
    np.testing.assert_array_equal(found.centre, centre)
    np.testing.assert_array_equal(found.key_factor, factor)
    np.testing.assert_array_equal(found.value_norm, norm)


def test_what_is_not_finite_shows_in_its_head_alone():
    runs = (_in_interpreter(*x)[0] for x in (ODD_CASE.inputs(), _with_odd_entries()))
    _check_odd_entries(*runs)


@pytest.mark.gpu
def test_what_is_not_finite_shows_on_a_gpu():
    runs = (_found(*x)[0] for x in (ODD_CASE.inputs(), _with_odd_entries()))
    _check_odd_entries(*runs)


def _sums_of_chunks(case: Case) -> np.ndarray:
    with made_for("ampere"), interpreted(detect_races=True):
        return np.asarray(jax.jit(ampere_key_numbers._parts)(*case.inputs()))


@pytest.mark.parametrize("case", [CASES[0], CASES[4]], ids=str)
def test_chunks_have_each_key_once(case):
    """c has few digits: sums that lack a key might not show in it."""
    parts = in_child_process(_sums_of_chunks, case, seconds=TIME_LIMIT)
    rows = rows_of(case.head_dim)
    key, value = (x.astype(np.float64).swapaxes(1, 2) for x in case.inputs())
    off = 1.01 * U * additions(rows, case.head_dim)
    for chunk in range(-(-case.count // rows)):
        own = slice(chunk * rows, (chunk + 1) * rows)
        some = key[:, :, own]
        total, square, top, _ = np.moveaxis(parts[:, :, :, chunk], 2, 0)
        assert (abs(total - some.sum(axis=2)) <= off * abs(some).sum(axis=2)).all()
        np.testing.assert_allclose(square, (some**2).sum(axis=2), rtol=off, atol=0)
        # Maxima are also of rows that the chunk before has.
        wide = slice(max(min(own.start, case.count - rows), 0), own.stop)
        np.testing.assert_array_equal(top, abs(key[:, :, wide]).max(axis=2))
        found = parts[:, :, 3, chunk]
        np.testing.assert_array_equal(found, abs(value[:, :, wide]).max(axis=2))


# Of integers, of which FP32 sums are exact; several turns, the last not of whole ones.
PARTS = {64: 133, 128: 45}


def _exact_parts(head_dim: int) -> tuple[np.ndarray, int, int]:
    """(parts, chunks, keys): past the last chunk NaN, up to whole turns."""
    rng = np.random.default_rng(0)
    chunks, turn = PARTS[head_dim], 4096 // head_dim
    held = -(-chunks // turn) * turn
    parts = np.full((2, 3, 4, held, head_dim), np.nan, np.float32)
    parts[:, :, :, :chunks] = rng.integers(0, 9, (2, 3, 4, chunks, head_dim))
    parts[:, :, 0] += np.float32(3 + rng.integers(0, 64, head_dim))
    # As if a chunk had one key.
    parts[:, :, 1] += np.float32(67**2)
    parts[0, 1, 2, chunks - 1, 7], parts[0, 1, 3, chunks - 1, 7] = 2.0**20, 2.0**21
    return parts, chunks, chunks


def _of_exact_parts(head_dim: int) -> list[np.ndarray]:
    parts, chunks, count = _exact_parts(head_dim)
    program = jax.jit(lambda x: ampere_key_numbers._of_head(x, chunks, count))
    with made_for("ampere"), interpreted(detect_races=True):
        return [np.asarray(x) for x in program(parts)]


@pytest.mark.parametrize("head_dim", [64, 128])
def test_chunks_are_all_counted_and_no_more(head_dim):
    parts, chunks, count = _exact_parts(head_dim)
    found = in_child_process(_of_exact_parts, head_dim, seconds=TIME_LIMIT)
    real = parts[:, :, :, :chunks].astype(np.float64)
    mean = (real[:, :, 0].sum(axis=2) / count).astype(np.float32)
    square = (real[:, :, 1].sum(axis=2) / count).astype(np.float32)
    top, top_value = real[:, :, 2:].max(axis=3).swapaxes(0, 2).swapaxes(1, 2)
    columns = map(jnp.asarray, (mean, square, top.astype(np.float32)))
    centre = centre_from(*columns, inputs=BF16)
    assert (np.asarray(centre) != 0).any()
    np.testing.assert_array_equal(found[0], centre)
    exponent = 14 - np.frexp(top.max(axis=2))[1]
    factor = np.broadcast_to(2.0 ** exponent[..., None], found[1].shape)
    np.testing.assert_array_equal(found[1], factor)
    norm = np.linalg.norm(top_value, axis=2)
    norm = np.broadcast_to(norm[..., None], found[2].shape)
    np.testing.assert_allclose(found[2], norm, rtol=(head_dim / 2 + 2) * U, atol=0)


def _compiled(shape: tuple[int, ...], x64: bool) -> Program:
    array = jax.ShapeDtypeStruct(shape, "bfloat16")
    with made_for("ampere"), jax.enable_x64(x64):
        return compiled(lambda k, v: key_numbers(k, v), array, array, gpu="a100")


@pytest.mark.parametrize(
    ("shape", "x64", "ctas"),
    [
        ((1, 16384, 16, 128), False, 4),
        ((2, 1000, 2, 64), True, 3),
        pytest.param((16, 1024, 32, 64), False, 4, marks=pytest.mark.thorough),
        pytest.param((2, 1000, 2, 128), False, 3, marks=pytest.mark.thorough),
    ],
)
def test_compiles_to_two_launches_that_read_once(shape, x64, ctas):
    """Of the first so many CTAs fit a multiprocessor by their registers, each with
    64 KiB to read: fewer where the last chunk's rows are masked."""
    pytest.importorskip("jax_cuda13_plugin", reason="needs the extra `compile`")
    program = in_child_process(
        *(_compiled, shape, x64), seconds=TIME_LIMIT, among="a100"
    )
    # And one that fills in what is always 1.
    assert program.count("custom-call") == 2 and program.count("fusion") <= 1
    end, parts = sorted(program.kernels, key=lambda kernel: kernel.name)
    assert parts.name == "attention_key_parts" and end.name == "attention_key_numbers"
    for kernel in (parts, end):
        assert kernel.spilled_bytes == 0 and kernel.shared_memory <= 2048
        assert not {"LDL", "STL", "RED", "ATOM", "ATOMG", "ATOMS"} & kernel.opcodes
    assert parts.registers <= 65536 // (ctas * 128) and end.registers <= 168
    reads, wide = (
        [x for x in kernel.instructions if x.startswith("LD.")]
        for kernel in (parts, end)
    )
    # 128 values of K and as many of V, which others are told of when all are there.
    assert reads == 64 * ["LD.E.64"] and set(wide) == {"LD.E.128"}
    stores = parts.instructions.index("STS.128")
    assert "LD.E.64" not in parts.instructions[stores:]
