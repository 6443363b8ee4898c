"""Random cases: what is drawn, that sound attention passes, and that no other does."""

import csv
import dataclasses
import functools
import json

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from analysis import case_check, cases
from analysis.__main__ import main
from analysis.experiments import random_cases
from attn_jax import dot_product_attention
from attn_jax.kernels import key_means, tuning, visibility
from attn_jax.mask import Mask

# Cases of the emulator that once failed, by what was wrong: (seed, number, longest).
REGRESSIONS: dict[str, tuple[int, int, int]] = {}
SMALL = 96

pytestmark = [pytest.mark.ci, pytest.mark.usefixtures("shared_programs")]


def command(*options, out) -> list[str]:
    common = ["--implementation", "emulated", "--longest", str(SMALL)]
    return ["random-cases", *common, *options, "--out", str(out)]


# ------------------------------------------------------------------------ the generator


def test_a_case_is_a_function_of_seed_and_number():
    number = 3 * cases.BATCH * cases.PROGRAMS + 5 * cases.BATCH + 2
    key = cases.program_number(number)
    assert key == 5
    program = cases.program(7, key)
    assert program == cases.program(7, key) != cases.program(8, key)
    case = cases.case(7, number, program)
    assert case == cases.case(7, number, program) != cases.case(8, number, program)
    first = [cases.case(7, number - 2 + i, program) for i in range(cases.BATCH)]
    once, again = (cases.batch(7, program, first) for _ in range(2))
    chex.assert_trees_all_equal(once, again)
    # An entry's arrays do not depend on its neighbours.
    alone = cases.batch(7, program, [case])
    np.testing.assert_array_equal(alone.inputs.key[0], once.inputs.key[2])
    # All of a description is JSON.
    for part in (program, case):
        given = dataclasses.asdict(part)
        assert json.loads(json.dumps(given)) == json.loads(json.dumps(given))


def test_what_is_drawn_reaches_every_edge():
    programs = [cases.program(0, number) for number in range(cases.PROGRAMS)]
    assert {p.H for p in programs} == set(tuning.HEAD_DIMS["hopper"])
    assert {p.dtype for p in programs} == {"bfloat16", "float16"}
    assert {63, 64, 65, 127, 128, 129, 1} <= {n for p in programs for n in (p.T, p.S)}
    longest = max(max(p.T, p.S) for p in programs)
    assert 1000 < longest <= cases.LONGEST
    assert sum(p.T != p.S for p in programs) > 90
    assert {p.N // p.K for p in programs} >= {1, 2, 3, 4, 8}
    for feature in (
        *("dense", "ids", "offset", "sinks", "soft_cap", "wide", "window"),
        *("query_lengths", "key_lengths", "is_causal", "scale", "bias"),
    ):
        share = np.mean([getattr(p, feature) not in (None, False) for p in programs])
        assert 0.1 < share < 0.7, feature
    assert {p.residual for p in programs} == {"no", "zero", "random"}
    drawn = [
        cases.case(0, number, programs[cases.program_number(number)])
        for number in range(2000)
    ]
    assert len({case.family for case in drawn}) == 10
    assert any(case.query_length == 0 for case in drawn)
    assert any(case.key_length == 0 for case in drawn)
    assert {"none match", "documents", None} <= {case.ids for case in drawn}
    assert {"nothing", "late rows", None} <= {case.dense for case in drawn}
    zero = {case.changed[0] for case in drawn if case.changed and not case.changed[1]}
    assert zero == {"query", "key", "value", "dout"}


# ---------------------------------------------------------------------------- the check


def masks(program: cases.Program) -> Mask:
    numbers = range(cases.BATCH)
    drawn = [cases.case(0, number, program) for number in numbers]
    return cases.batch(0, program, drawn).mask


def test_pairs_seen_are_those_of_the_mask():
    for number in range(12):
        program = cases.program(0, number, SMALL)
        mask = masks(program)
        expected = mask.materialise(program.T, program.S)
        expected = True if expected is None else np.asarray(expected)
        found = case_check.seen_pairs(program, mask)
        np.testing.assert_array_equal(found, np.broadcast_to(expected, found.shape))


def test_the_centre_is_the_one_that_the_kernels_subtract():
    kinds = {"all": 0, "causal": 0, "ids": 0, "interval": 0}
    for number in range(60):
        program = cases.program(0, number, 200)
        kind = "causal" if program.is_causal else "all"
        if program.rules > program.is_causal or program.bias:
            kind = "ids" if program.ids else "interval"
        kinds[kind] += 1
        if kinds[kind] > 2:
            continue
        drawn = [cases.case(0, n, program) for n in range(cases.BATCH)]
        batch = cases.batch(0, program, drawn)
        key, mask = jnp.asarray(batch.inputs.key), batch.mask
        tiling = tuning.tiling(tuning.BACKWARD_DQ, "hopper", program.H, program.H)
        if visibility.is_static(mask) and not program.bias:
            found = key_means.mean(key, mask.is_causal, tiling, program.T)
        else:
            arrays = visibility.rules(mask, cases.BATCH, program.T, program.S)
            band = visibility.Band(*mask.band)
            rows = tiling.rows
            found = key_means.mean_under(key, arrays, band, program.T, rows)
        found = np.asarray(found).swapaxes(1, 2)  # [B, C, K, H]
        if found.shape[1] not in (1, program.T) or program.T == 1:
            found = found.repeat(tiling.rows, 1)[:, : program.T]
        centre, error = case_check.kernel_centre(program, batch)
        assert (np.abs(found - centre) <= error).all(), program
    assert min(kinds.values()) >= 2


def test_a_ratio_is_infinite_for_nan_and_zero_without_a_bound():
    exact, limit = np.array([1.0, 0.0, -np.inf, 2.0]), np.array([0.5, 0.0, 0.0, np.inf])
    assert not case_check.ratios(exact, exact, limit).any()
    off = case_check.ratios(exact + [1, 1e-30, 0, 9], exact, limit)
    np.testing.assert_allclose(off, [2, np.inf, 0, 0], rtol=1e-9)
    nan = case_check.ratios(np.array([np.nan, 0, 0, np.nan]), exact, limit)
    np.testing.assert_array_equal(nan, [np.inf, 0, np.inf, 0])


def test_fp64_is_off_by_the_size_of_the_terms_that_it_sums():
    """An exact 0 of terms of 1, which FP64 has as 3e-13, beside results of 1e-3."""
    exact, limit = np.array([1e-3, 3e-13]), np.full(2, 1e-16)
    x = np.array([1e-3, 0.0])
    assert case_check.ratios(x, exact, limit)[1] > 1
    assert not case_check.ratios(x, exact, limit, np.ones(2)).any()
    assert case_check.ratios(x - [0, 3e-12], exact, limit, np.ones(2))[1] > 1


def test_keys_that_agree_in_a_column_fail_nothing(monkeypatch):
    """Those of very negative logits: dQ is 0 in their column, FP64's has what is left
    of terms thousands of times as large as the largest dQ."""
    program = cases.program(31, 83, 1500)
    program = dataclasses.replace(program, T=128, S=128, H=64)
    of_run = [cases.case(31, number, program) for number in range(664, 672)]
    of_run = [dataclasses.replace(x, family="lse-130", changed=None) for x in of_run]
    batch = cases.batch(31, program, of_run)
    attend = case_check.attention_of(program, "emulated")
    found = jax.device_get(case_check.compiled(program, attend, batch)(*batch))

    def failed() -> list[str]:
        rows = case_check.judged(program, of_run, batch, found, found, "emulated")
        return [row["failed"] for row in rows if row["failed"]]

    assert not failed()
    whole = case_check.ratios
    monkeypatch.setattr(case_check, "ratios", lambda *given: whole(*given[:3]))
    assert "dq[" in failed()[0]


def fitting(condition) -> int:
    """The number of the first small program of which a condition holds."""
    return next(
        number
        for number in range(cases.PROGRAMS)
        if condition(cases.program(0, number, SMALL))
    )


@functools.cache
def one_run():
    """A program in which some see nothing, a run of it, and the emulator's results."""

    def suits(p: cases.Program) -> bool:
        enough = min(p.T, p.S) > 8 and p.N > 1
        return enough and p.query_lengths and p.residual == "random" and not p.sinks

    program = cases.program(0, fitting(suits), SMALL)
    first = program.number * cases.BATCH
    of_run = [cases.case(0, first + i, program) for i in range(cases.BATCH)]
    batch = cases.batch(0, program, of_run)
    attend = case_check.attention_of(program, "emulated")
    found = jax.device_get(case_check.compiled(program, attend, batch)(*batch))
    return program, of_run, batch, found


def verdicts(change) -> list[str]:
    program, of_run, batch, found = one_run()
    first, second = ({k: x.copy() for k, x in found.items()} for _ in range(2))
    change(first, second, of_run)
    judge = case_check.judged
    rows = judge(program, of_run, batch, first, second, "emulated")
    return [row["failed"] for row in rows]


def both(name, index, value):
    def change(first, second, of_run):
        for results in (first, second):
            results[name][index] = value

    return change


def not_zero(first, second, of_run):
    program, _, batch, _ = one_run()
    hidden = ~case_check.seen_pairs(program, batch.mask).any(-1)
    b, n, t = np.argwhere(hidden)[0]
    for results in (first, second):
        results["out"][b, t, n, 0] = 2.0**-20


def another_bit(first, second, of_run):
    second["dv"][5].view(np.uint16)[0, 0, 0] ^= 1


@pytest.mark.parametrize(
    ("change", "entry", "reason"),
    [
        (both("dk", (3, 0, 0, 0), np.nan), 3, "not finite"),
        (both("lse", (2, 1, 0), 50.0), 2, "bounds of"),
        (another_bit, 5, "second run"),
        (not_zero, None, "not zero where nothing is seen"),
    ],
)
def test_what_is_wrong_in_one_entry_fails_it_alone(change, entry, reason):
    found = verdicts(change)
    assert sum(map(bool, found)) == 1
    (failed,) = filter(None, found)
    assert reason in failed
    assert entry is None or found[entry] == failed


def test_what_the_emulator_gives_passes():
    assert not any(verdicts(lambda first, second, of_run: None))


# -------------------------------------------------------------------------- the command


def test_sound_attention_passes_and_a_second_call_goes_on(
    tmp_path, capsys, monkeypatch
):
    assert main(command("--seed", "5", "--cases", "20", out=tmp_path)) == 0
    captured = capsys.readouterr()
    result = json.loads(captured.out.splitlines()[-1])
    assert result["rows"] == 20 and result["failed"] == result["refused"] == 0
    assert "Largest error in units of its bound" in captured.err
    with open(result["files"][0]) as file:
        rows = list(csv.DictReader(file))
    assert [int(row["case"]) for row in rows] == list(range(20))
    for name in ("out", "dq", "dk", "dv"):
        # Neither exceeded nor far from what happens.
        assert 0.2 < max(float(row[f"{name}_ratio"] or 0) for row in rows) <= 1
    with open(result["files"][1]) as file:
        described = json.load(file)
    assert len(described["programs"]) == 3 and described["settings"]["seed"] == 5
    monkeypatch.setattr(case_check, "compiled", lambda *_: pytest.fail("measured"))
    assert main(command("--seed", "5", "--cases", "20", out=tmp_path)) == 0
    capsys.readouterr()
    assert main(command("--seed", "5", "--cases", "21", out=tmp_path)) == 2
    assert "other settings" in capsys.readouterr().err


def shifted_by_one(program, implementation):
    """Sees what `query_offset` one larger would show."""
    attend = ATTENTION_OF(program, implementation)

    def wrong(query, key, value, mask, sinks, bias):
        offset = mask.query_offset
        offset = jnp.int32(0) if offset is None else offset
        offset = jnp.broadcast_to(offset + 1, query.shape[:1])
        mask = dataclasses.replace(mask, query_offset=offset)
        return attend(query, key, value, mask, sinks, bias)

    return wrong


def delta_from_rounded_output(program, implementation):
    recipe = dataclasses.replace(
        case_check.recipe_of(program), delta_source="o", dq_centre="none"
    )

    def wrong(query, key, value, mask, sinks, bias):
        return dot_product_attention(
            query,
            key,
            value,
            mask=mask.dense,
            is_causal=mask.is_causal,
            key_value_seq_lengths=mask.key_value_lengths,
            implementation="emulated",
            return_residual=program.residual != "no",
            recipe=recipe,
        )

    return wrong


ATTENTION_OF = case_check.attention_of


def a_causal_one(program: cases.Program) -> bool:
    plain = program.N <= 2 and not (program.dense or program.ids or program.sinks)
    return plain and program.is_causal and program.T > 20 < program.S


def a_plain_one(program: cases.Program) -> bool:
    plain = program.rules == program.is_causal + program.key_lengths
    plain &= program.soft_cap is program.scale is program.bias is None
    plain &= not program.sinks
    return plain and not program.wide and program.T > 20 and program.S > 20


@pytest.mark.parametrize(
    ("wrong", "condition"),
    [
        (shifted_by_one, a_causal_one),
        (delta_from_rounded_output, a_plain_one),
    ],
)
def test_wrong_attention_is_named_by_its_cases(
    wrong, condition, tmp_path, capsys, monkeypatch
):
    program = str(fitting(condition))
    monkeypatch.setattr(case_check, "attention_of", wrong)
    options = ["--programs", program, "--cases", "1000"]
    assert main(command(*options, out=tmp_path)) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert "of 8 cases failed" in error and "bounds of" in error
    first = int(program) * cases.BATCH
    number = int(error.split("failed: ")[1].split(" ")[0])
    assert number in range(first, first + cases.BATCH)
    # The rows are kept, and the case alone fails again.
    with open(tmp_path / "cpu-emulated.csv") as file:
        rows = {int(row["case"]): row["failed"] for row in csv.DictReader(file)}
    assert len(rows) == 8 and rows[number]
    if wrong is shifted_by_one:
        assert main(command("--only", str(number), out=tmp_path)) == 1
        error = capsys.readouterr().err
        assert f"Program(number={program}" in error and f"number={number}" in error


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--cases", "0"], "--cases"),
        (["--only", "-1"], "--only"),
        (["--programs", "7", "--cases", "8"], "no case"),
        (["--implementation", "pallas"], "needs a GPU"),
        (["--only", "3", "--implementation", "pallas"], "emulated runs anywhere"),
    ],
)
def test_unusable_options_are_refused_in_one_line(options, reason, tmp_path, capsys):
    assert main(command(*options, out=tmp_path)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert reason in line


@pytest.mark.parametrize(
    ("error", "code"), [(NotImplementedError("no"), 0), (ImportError("no"), 1)]
)
def test_only_what_an_implementation_refuses_may_go_unjudged(
    error, code, tmp_path, monkeypatch
):
    def checked(seed, task, *more):
        if task.program.number == 0:
            raise error
        return whole(seed, task, *more)

    whole = random_cases._checked
    monkeypatch.setattr(random_cases, "_checked", checked)
    options = ["--cases", str(2 * cases.BATCH), "--longest", "24"]
    assert main(command(*options, out=tmp_path)) == code


@pytest.mark.parametrize("name", REGRESSIONS)
def test_what_once_failed_passes(name, tmp_path):
    seed, number, longest = REGRESSIONS[name]
    options = ["--seed", str(seed), "--only", str(number), "--longest", str(longest)]
    assert main(command(*options, out=tmp_path)) == 0
