"""The kernels at every head dim, and with a head dim of V's own, against FP64.

Each case is interpreted in another process under a time limit, as in
tests/test_kernels_interpret.py. Lengths that fill no block; keys far from zero, whose
mean dQ must not see.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from attn_jax import emulator, reference
from attn_jax.audit.error import unit_error
from attn_jax.formats import BF16, FP16
from attn_jax.kernels import (
    ampere_backward_dbias,
    hopper_backward_dbias,
    schedule,
    tuning,
    visibility,
)
from attn_jax.kernels.architecture import made_for
from attn_jax.kernels.attention import attention, declared_recipe
from attn_jax.kernels.interpreter import interpreted
from attn_jax.mask import Mask
from attn_jax.recipe import Architecture
from tests.child_process import in_child_process

pytestmark = pytest.mark.ci

TIME_LIMIT = 180  # seconds; a case takes four to eight alone on a core
FORMATS = {"bfloat16": BF16, "float16": FP16}
DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
S = 200
CAUSAL = Mask(is_causal=True)


class Case(NamedTuple):
    head_dim: int
    value_dim: int
    mask: Mask = Mask()
    dtype: str = "bfloat16"
    heads: int = 2
    T: int = 150
    out_dtype: str | None = None

    def inputs(self):
        """query, key, value, dout, dlse, with one key/value head."""
        rng = np.random.default_rng(1)

        def normal(length: int, heads: int, dim: int, mean: float = 0.0):
            x = rng.standard_normal((1, length, heads, dim)) + mean
            return x.astype(DTYPES[self.dtype])

        query = normal(self.T, self.heads, self.head_dim)
        key, value = normal(S, 1, self.head_dim, 2), normal(S, 1, self.value_dim)
        dout = normal(self.T, self.heads, self.value_dim)
        dlse = rng.standard_normal((1, self.heads, self.T)).astype(np.float32)
        return query, key, value, dout, dlse


class Results(NamedTuple):
    out: np.ndarray
    lse: np.ndarray
    dquery: np.ndarray
    dkey: np.ndarray
    dvalue: np.ndarray


# Between them: each head dim, both formats, masks that the kernels count by themselves
# and one with lists, V wider and narrower than Q and K, grouped heads and single ones,
# FP32 output.
CASES = {
    "32": Case(32, 32, CAUSAL, dtype="float16"),
    "96-window": Case(96, 96, Mask(window=(40, 10)), heads=1),
    "192-float32": Case(192, 192, heads=1, out_dtype="float32"),
    "32-256": Case(32, 256, CAUSAL, heads=1, T=70),
}
MLA = Case(192, 128, CAUSAL)  # multi-head latent attention
LONGEST = Case(256, 256, CAUSAL, heads=1)


def _kernels(
    architecture: Architecture, case: Case, detect_races: bool = False
) -> Results:
    @jax.jit
    def both(query, key, value, mask, dout, dlse):
        def forward(query, key, value):
            scale = case.head_dim**-0.5
            dtype = np.dtype(case.out_dtype or query.dtype)
            return attention(query, key, value, scale=scale, mask=mask, out_dtype=dtype)

        results, backward = jax.vjp(forward, query, key, value)
        gradients = backward((dout.astype(results[0].dtype), dlse))
        return Results(*results, *gradients)

    query, key, value, dout, dlse = case.inputs()
    mask = jax.tree.map(jnp.asarray, case.mask)
    with made_for(architecture), interpreted(detect_races=detect_races):
        return jax.device_get(both(query, key, value, mask, dout, dlse))


def _check(case: Case, results: Results) -> None:
    """The project's bar, 1.7 units; see tests/test_kernels_interpret.py."""
    golden = reference.golden(*case.inputs(), mask=case.mask)
    for field in ("out", "dquery", "dkey", "dvalue"):
        got, want = getattr(results, field), getattr(golden, field)
        assert got.shape == want.shape, field
        assert unit_error(got, want, FORMATS[case.dtype]) <= 1.7, field
    # As in tests/test_kernels_interpret.py: products of logits add up to 40 at most.
    bound = 2.0**-24 * ((case.head_dim + 5) * 40 + S + 8)
    assert np.abs(results.lse - golden.lse).max() <= bound


# Ampere: V wider than what out leaves through; the others are in tests below.
OF_AMPERE = {"32-256"}


@pytest.mark.parametrize(
    ("architecture", "name"),
    [("hopper", name) for name in CASES]
    + [
        pytest.param(
            *("ampere", name), marks=[pytest.mark.thorough] * (name not in OF_AMPERE)
        )
        for name in CASES
    ],
)
def test_every_head_dim_is_as_good_as_correctly_rounded(architecture, name):
    case = CASES[name]
    results = in_child_process(_kernels, architecture, case, seconds=TIME_LIMIT)
    _check(case, results)


def _in_turn_without_races(case: Case) -> Results:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schedule, "H100_MULTIPROCESSORS", 1)
        return _kernels("hopper", case, detect_races=True)


def test_longest_heads_on_ampere_are_as_good():
    """Where blocks have one stage, Q and dO stay in shared memory, and dK and dV have a
    kernel each; without races."""
    case = LONGEST._replace(T=70)
    results = in_child_process(_kernels, "ampere", case, True, seconds=TIME_LIMIT)
    _check(case, results)


def test_longest_heads_are_as_good_one_tile_after_the_other():
    """Where out leaves in parts, all through one buffer, which the next tile takes
    over, and two warpgroups share the rows of dK and dV."""
    results = in_child_process(_in_turn_without_races, LONGEST, seconds=TIME_LIMIT)
    _check(LONGEST, results)


@pytest.mark.parametrize("architecture", ["hopper", "ampere"])
def test_v_of_its_own_head_dim_follows_the_recipe(architecture):
    """As tests/test_kernels_interpret.py has it, 2**-8 of all results at the most."""
    case = MLA
    results = in_child_process(_kernels, architecture, case, seconds=TIME_LIMIT)
    _check(case, results)
    recipe = declared_recipe(case.dtype, 192, S, case.mask, architecture, 128)

    @jax.jit
    def emulate(query, key, value, dout, dlse):
        results, backward = jax.vjp(
            lambda *qkv: emulator.attention(*qkv, recipe=recipe, mask=case.mask),
            query,
            key,
            value,
        )
        return Results(*results, *backward((dout, dlse)))

    emulated = emulate(*case.inputs())
    for name in ("out", "dquery", "dkey", "dvalue"):
        same = np.mean(getattr(results, name) == np.asarray(getattr(emulated, name)))
        assert same >= 1 - 2**-8, name


def _dbias(architecture: Architecture, case: Case) -> np.ndarray:
    query, key, value, dout, dlse = case.inputs()
    golden = reference.golden(query, key, value, dout, dlse)
    delta = (dout.astype(float) * golden.out).sum(-1).swapaxes(1, 2) - dlse
    padded = (
        np.pad(x, ((0, 0), (0, -x.shape[1] % 8), (0, 0), (0, 0)))
        for x in (query, key, value, dout)
    )
    statistics = (np.asarray(x, np.float32) for x in (golden.lse, delta))
    bias = np.zeros((1, 1, case.T, S), np.float32)
    kernels = {"ampere": ampere_backward_dbias, "hopper": hopper_backward_dbias}
    run = jax.jit(
        lambda *arrays: kernels[architecture].backward_dbias(
            *arrays,
            query_count=case.T,
            key_count=S,
            scale=case.head_dim**-0.5,
            mask=visibility.rules(Mask(), 1, case.T, S),
            band=visibility.Band(None, None),
        )
    )
    with made_for(architecture), interpreted():
        return jax.device_get(run(*padded, *statistics, bias))


@pytest.mark.parametrize(
    "architecture", ["hopper", pytest.param("ampere", marks=pytest.mark.thorough)]
)
def test_dbias_at_long_heads(architecture):
    """dS is exact but for FP32: its size is that of P (dP - delta), 16 at most here."""
    case = MLA._replace(mask=Mask(), T=70)
    got = in_child_process(_dbias, architecture, case, seconds=TIME_LIMIT)
    bias = np.zeros((1, 1, case.T, S), np.float32)
    want = reference.golden(*case.inputs(), bias=bias).dbias
    assert want is not None
    np.testing.assert_allclose(got, want, rtol=0, atol=2.0**-24 * (192 + 8) * 16)


@pytest.mark.parametrize("architecture", ["hopper", "ampere"])
def test_a_pair_of_head_dims_takes_the_larger_ones_tiling(architecture):
    for tilings in (tuning.FORWARD, tuning.BACKWARD_DQ, tuning.BACKWARD_DKV):
        for head_dim in tuning.HEAD_DIMS[architecture]:
            own = tuning.tiling(tilings, architecture, head_dim, head_dim)
            assert own is tilings[architecture][head_dim]
            assert own is tuning.tiling(tilings, architecture, 32, head_dim)
        mla = tuning.tiling(tilings, architecture, 192, 128)
        of_architecture = tilings[architecture]
        assert mla is of_architecture.get((192, 128), of_architecture[192])


def test_a_causal_mask_cuts_one_block_of_a_warpgroup_on_hopper():
    for tiling in tuning.FORWARD["hopper"].values():
        assert tiling.columns % tiling.rows == 0
