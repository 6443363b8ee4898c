"""What tuning and acceptance do on a GPU, at one candidate and one case each."""

import pytest

from attn_jax.kernels import card, tuning
from attn_jax.kernels.accept import parts
from attn_jax.kernels.checks import Check, run
from attn_jax.kernels.tilings import ForwardTiling
from attn_jax.kernels.tune.candidates import groups, present
from attn_jax.kernels.tune.trial import CLASSES, Candidate, attempt, problems
from attn_jax.kernels.tuning import Group
from attn_jax.kernels.worker import Worker

pytestmark = pytest.mark.gpu

SECONDS = 180  # a candidate takes ten to twenty


@pytest.fixture(scope="module")
def gpu():
    """(worker, whose kernels its GPU runs)."""
    with Worker(card.ON_GPU) as worker:
        try:
            found = card.find(worker)
        except card.NoCard as error:
            pytest.skip(str(error))
        yield worker, found


@pytest.mark.parametrize("kernel", tuning.KERNEL_NAMES)
@pytest.mark.parametrize("is_causal", [None, False, True])
def test_an_entry_is_right_and_timed(gpu, kernel, is_causal):
    worker, found = gpu
    group = Group(found.architecture, kernel, 64, 64, is_causal)
    multiprocessors = found.described["multiprocessors"]
    if group not in groups(found.architecture, kernel, [(64, 64)], multiprocessors):
        pytest.skip("no such group on this card")
    candidate = Candidate(group, present(group)[0])
    row = worker.call(attempt, candidate, CLASSES, 0.1, True, seconds=SECONDS)
    assert row["refused"] is None, row
    assert row["times"].keys() == {problem.name for problem in problems(group)}
    for times in row["times"].values():
        assert times["ms"] > 0 and times["rounds"] >= 5
    # ptxas is there wherever JAX compiles kernels.
    assert row["registers"] > 0
    # A few integers may spill. Rows of an accumulator, 256 bytes and more, must not.
    assert row["spilled_bytes"] < 256


def test_a_wrong_tiling_is_found_before_it_is_timed(gpu):
    worker, found = gpu
    if found.architecture != "hopper":
        pytest.skip("a tiling of Hopper's forward kernel")
    # A causal mask cuts two blocks of a warpgroup, and the kernel hides one.
    tiling = ForwardTiling(rows=128, columns=64, warpgroups=1, stages=2)
    candidate = Candidate(Group("hopper", "forward", 64, 64, False), tiling)
    row = worker.call(attempt, candidate, CLASSES, 0.1, True, seconds=SECONDS)
    assert "causal: out is" in row["refused"] and "times" not in row


def test_a_check_and_a_case_of_speed(gpu):
    worker, found = gpu
    architecture = found.architecture
    check = Check(128, 128, "causal", dtype="float16")
    assert worker.call(run, check, architecture, seconds=SECONDS).failed == ()
    case = parts.SpeedCase(128, 1024, True, "training")
    row = worker.call(parts.timed, case, architecture, 0.1, seconds=SECONDS)
    assert row["refused"] == {} and row["ms"].keys() == {"pallas", "cudnn"}
