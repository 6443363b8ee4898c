"""Identities and invariances: what they find, and whom they do not accuse."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from attn_jax.audit import invariance, more, probes, visible
from attn_jax.audit.inputs import Shape
from attn_jax.audit.noise import logit_extent, rounding_noise, sampled_rows, seen_by
from attn_jax.audit.problem import MASKS, Problem
from attn_jax.audit.target import Adapter, Target
from attn_jax.formats import BF16
from attn_jax.mask import Mask
from tests import planted, planted_keys
from tests.audit_targets import attend, honest
from tests.knobs import bfloat16

SHAPE = Shape(2, 80, 96, 2, 1, 32)
POOR = "as accurate as its algorithm allows, which is poor here"
WORSE = "worse than its algorithm allows"
FAMILIES = "normal", "uniform", "wide", "lse-130", "sink", "zero_k_one_v"


def causes(results) -> set[tuple[str, str, str]]:
    return {(r.name, r.finding.kind, r.finding.cause) for r in results if r.finding}


@pytest.mark.parametrize(
    "name, mask",
    [
        # Each function and each mask.
        ("flash2", "full"),
        ("attn_jax", "window"),
        ("eager_bf16", "causal"),
        ("jax_nn", "packed"),
        ("plain", "lengths"),
        *(
            pytest.param(*case, marks=pytest.mark.thorough)
            for case in (
                ("flash2", "lengths"),
                ("attn_jax", "packed"),
                ("eager_bf16", "lengths"),
                ("jax_nn", "causal"),
                ("plain", "window"),
            )
        ),
    ],
)
def test_honest_attention_is_not_accused(name, mask):
    # What its algorithm is known for and no more.
    known = {
        "flash2": {"delta"},
        "eager_bf16": {"logits in 16 bits", "delta"},
        # Equal P, rounded after they are normalised, are all off one way.
        "plain": {"delta"},
    }
    target = honest(name, Problem(SHAPE, mask=mask).rules)
    for family in FAMILIES:
        results = list(probes.probe(target, Problem(SHAPE, family=family, mask=mask)))
        assert len({r.name for r in results}) == len(results) >= 8
        for _, kind, cause in causes(results):
            assert kind == POOR and cause in known.get(name, set()), (family, cause)
            assert name != "plain" or family == "zero_k_one_v"


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_honest_attention_in_other_types(dtype):
    problem = Problem(SHAPE, dtype, "uniform", "lengths")
    target = attend(problem.rules)
    assert causes(probes.probe(target, problem)) == set()


@pytest.mark.parametrize(
    "fault, found",
    [
        ("values of the last tile dropped", {"V = 1", "counted keys"}),
        ("last tile dropped", {"counted keys", "permuted keys: out"}),
        ("delta too small", {"ones column of K", "K + c: dquery"}),
        ("last queries miss in dV", {"sum of dV"}),
        ("keys in FP8", {"K + c: out", "K + c: dquery"}),
        ("no maximum", {"finite at extremes"}),
        ("divides by 0", {"finite at extremes", "rows that see nothing"}),
        ("LSE in log2", {"K + c: lse"}),
        ("LSE constant", {"K + c: lse", "lse at +1000"}),
    ],
)
def test_faults_are_found(fault, found):
    mask = "lengths" if fault == "divides by 0" else "full"
    problem = Problem(SHAPE, mask=mask)
    results = list(probes.probe(attend(problem.rules, fault), problem))
    accused = {name for name, kind, _ in causes(results) if kind != POOR}
    assert found <= accused
    # Nothing that the fault leaves alone is accused.
    untouched = {
        "last queries miss in dV": {"sum of dV"},
        "LSE in log2": {"K + c: lse", "lse at -1000", "lse at +1000"},
    }
    assert accused <= untouched.get(fault, accused)


def test_zeros_past_the_last_key_are_found_at_another_length():
    """cuDNN's dQ was NaN with 320 keys, where logits are below -90, and at 256 not."""
    whole = Problem(Shape(1, 128, 128, 2, 1, 32))
    target = planted.wrapped(planted_keys.filled_up)

    def attend_of(problem):
        return planted.attend(target, problem)

    found = causes(probes.probe(attend_of(whole), whole, attend_of=attend_of))
    last = "half a tile at extremes", "not finite", "what lies past the last key"
    assert {x for x in found if x[1] != POOR} == {last}
    right = probes.half_a_tile(lambda p: planted.attend(planted.honest(), p), whole)
    assert len(right) > 1 and all(result.finding is None for result in right)


def test_an_out_that_large_logits_change_is_found():
    """Without LSE, and where all is finite."""
    problem = Problem(SHAPE)

    def outs(function):
        run = planted.attend(function, problem)
        found = probes.extremes(lambda *x: (run(*x)[0], None), problem, gradients=False)
        names = "out at -125", "out at -1000", "out at +125", "out at +1000"
        assert {r.name for r in found} >= {*names}
        return {(r.name, r.finding.kind, r.finding.cause) for r in found if r.finding}

    cause = "result depends on what all keys share"
    at_1000 = "out at +1000", WORSE, cause
    for most, found in (
        (80.0, {("out at +125", WORSE, cause), at_1000}),
        (500.0, {at_1000}),
    ):
        clipped = planted.honest(logits=lambda x, most=most: jnp.minimum(x, most))
        assert outs(clipped) == found
    in_bfloat16 = planted.honest(logits=bfloat16)
    for keys in (96, 1024):  # Of many, one may have the whole row.
        problem = Problem(dataclasses.replace(SHAPE, key_length=keys))
        assert {x[1:] for x in outs(in_bfloat16)} == {(POOR, "logits in 16 bits")}
    assert outs(planted.honest()) == set()


def test_a_dropped_tile_is_wrong_wiring():
    problem = Problem(SHAPE)
    (result,) = probes.counted_keys(attend(Mask(), "last tile dropped"), problem)
    assert result.finding and result.finding.kind == "wrong wiring"
    assert result.measured == 1


def test_delta_is_named():
    # All averages far from zero: the error of out is large beside that of dS.
    problem = Problem(SHAPE, family="uniform")
    (bad,) = probes.ones_column(attend(Mask(), "delta from rounded out"), problem)
    assert bad.finding and (bad.finding.kind, bad.finding.cause) == (POOR, "delta")
    assert bad.measured > 3
    (good,) = probes.ones_column(attend(Mask()), problem)
    assert good.finding is None
    # A bound is worth what it is near to: rounding dS is all that is left here.
    assert good.measured > 0.25
    (wrong,) = probes.ones_column(attend(Mask(), "delta too small"), problem)
    assert wrong.finding and wrong.finding.kind == WORSE


def test_lse_in_bf16_is_named():
    results = probes.shifted_keys(attend(Mask(), "LSE in BF16"), Problem(SHAPE))
    assert causes(results) == {("K + c: lse", POOR, "LSE in BF16")}


def test_coarse_products_of_float32_are_named():
    problem = Problem(SHAPE, "float32", mask="causal")
    target = attend(problem.rules, "values rounded to TF32")
    (result,) = probes.unit_value(target, problem)
    assert result.finding and result.finding.cause == "products in TF32"


def test_nan_is_no_pass():
    def broken(q, k, v):
        return q * np.nan, None

    results = list(probes.probe(broken, Problem(SHAPE)))
    silent = {r.name for r in results if r.finding is None}
    # Gradients of K and V are 0, so they do not change with the order, and are as many
    # times 0 as one likes.
    assert silent <= {
        *(f"dO times 2^{k}: {name}" for k in (-30, 30) for name in ("dkey", "dvalue")),
        "permuted keys: dkey",
        "permuted keys: dvalue",
        "rows that see nothing",
    }


@pytest.mark.parametrize("mask", [*MASKS, "packed causal", "packed lengths", "dense"])
def test_keys_are_counted_without_the_mask(mask, monkeypatch):
    monkeypatch.setattr(visible, "_TILE", 2**10)  # Several runs of queries.
    rng = np.random.default_rng(0)
    dense = Mask(dense=rng.random((1, SHAPE.heads, 80, 96)) < 0.5)
    packed, lengths = MASKS["packed"](SHAPE), MASKS["lengths"](SHAPE)
    others = {
        "dense": dense,
        "packed causal": dataclasses.replace(packed, is_causal=True),
        "packed lengths": dataclasses.replace(
            packed,
            query_lengths=lengths.query_lengths,
            key_value_lengths=lengths.key_value_lengths,
        ),
    }
    rules = others[mask] if mask in others else MASKS[mask](SHAPE)
    classes = np.arange(96) // 10 % 4
    seen = rules.materialise(80, 96)
    seen = np.ones((1, 1, 80, 96), bool) if seen is None else np.asarray(seen)
    expected = np.stack([seen[..., classes == c].sum(-1) for c in range(4)], -1)
    runs = list(visible.counted(rules, SHAPE, classes, 4))
    assert len(runs) > 1 and runs[-1][1] == 80
    got = np.concatenate([counts for _, _, counts in runs], 1)
    np.testing.assert_array_equal(got, expected.swapaxes(1, 2))
    rows = sampled_rows(80, 2**18)
    assert rows[0] == 0 and rows[-1] == 79 and len(rows) == 16
    np.testing.assert_array_equal(seen_by(rules, rows, 96), seen[:, :, rows])
    keys = visible.key_classes(rules, SHAPE)
    assert (keys is None) == (mask in ("causal", "window", "dense", "packed causal"))
    if keys is not None:
        seen = np.broadcast_to(seen, (2, 1, 80, 96))
        for b in range(2):
            for one in np.unique(keys[b]):
                alike = seen[b, 0][:, keys[b] == one]
                assert (alike == alike[:, :1]).all()


def test_noise_is_that_of_rounding():
    """Rounding errors drawn at random have the predicted variance, not just less."""
    problem = Problem(Shape(1, 32, 256, 1, 1, 32), family="offset")
    q, k, v, do = (x.astype(np.float64)[0, :, 0] for x in problem.inputs)
    noise = rounding_noise(problem.inputs, Mask(), problem.scale, BF16)
    extent = logit_extent(problem.inputs, Mask(), problem.scale)
    np.testing.assert_array_equal(extent.seen, noise.seen)
    np.testing.assert_allclose(extent.shift, noise.shift, rtol=1e-6)
    x = problem.scale * q @ k.T
    p = np.exp(x - x.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    ds = p * (do @ v.T - (p * (do @ v.T)).sum(-1, keepdims=True))
    rng = np.random.default_rng(0)
    sums = []
    for _ in range(200):
        # Uniform with the RMS that is allowed, u / sqrt(3).
        e = rng.uniform(-1, 1, (2, *p.shape)) * BF16.unit_roundoff
        delta = (p * e[1] * (do @ v.T)).sum(-1, keepdims=True)
        sums.append((ds * (1 + e[0]) - p * delta).sum(-1))
    measured = np.square(sums).mean(0)
    # Allowed besides: rounded P whose sum is not 1, the delta^2 P^2 of `row_sum`.
    ratio = measured.sum() / noise.row_sum[0, :, 0].sum()
    assert 0.3 < ratio < 1.1


# Invariance.


def of_fault(fault):
    return lambda mask: attend(mask, fault)


def _unscaled(query, key, value, *, scale=None):
    return jax.nn.dot_product_attention(query, key, value)


def _told(query, key, value, *, scale=None):
    return jax.nn.dot_product_attention(query, key, value, scale=scale)


@pytest.mark.parametrize(("function", "is_right"), [(_told, True), (_unscaled, False)])
def test_a_scale_that_is_ignored_is_found(function, is_right):
    """Problems have the scale that it has by itself."""
    rows = list(more.vary(Target("", function, Adapter(lse=None)), Problem(SHAPE)))
    scaled = [row for row in rows if row.get("name", "").startswith("scale")]
    assert len(scaled) == 4
    found = {f["cause"] for row in scaled for f in row["findings"]}
    assert found == (set() if is_right else {"result depends on the scale"})
    rest = [row for row in rows if "name" in row and row not in scaled]
    assert rest and not any(row["findings"] for row in rest)
    without = Target("", function, Adapter(lse=None, scale="none"))
    rows = more.vary(without, Problem(SHAPE))
    assert not any("scale" in row.get("name", "") for row in rows)


@pytest.mark.parametrize(
    ("errors", "says"),
    [
        # Some rows alone; all of them, some more than others.
        (np.where(np.arange(64) < 3, 50.0, 1.4), "positions 0 to 2 of heads 0"),
        (np.where(np.arange(64) < 3, 900.0, 40.0), ""),
        (np.full(64, 9.0), ""),
        (50.0 * (np.arange(64) == 9), "position 9"),  # Most have no error at all.
        # From end to end, which is no place.
        (np.where(np.arange(64) % 63, 1.4, 50.0), "far off, heads 0"),
    ],
)
def test_rows_are_named_where_the_others_are_right(errors, says):
    said = more._concentrated(errors[None, :, None])
    assert says in said and bool(says) == bool(said)


def test_what_is_wrong_is_run_again():
    """Some rows of out, and of LSE, of which they are not named."""

    def off(query, key, value, return_residual=False):
        out, lse = planted.honest()(query, key, value, return_residual=True)
        out, lse = out.at[:, 5:7].multiply(2), lse.at[:, 5:7].add(1)
        return (out, lse) if return_residual else out

    rows = list(more.again(Target("", off), Problem(SHAPE), ["out", "lse"]))
    assert [row["tensor"] for row in rows] == ["out", "lse"]
    assert "positions 5 to 6 of heads 0, 1" in rows[0]["rows"]
    assert not rows[1]["rows"] and not any(row["findings"] for row in rows)


@pytest.mark.parametrize(
    "name, mask",
    [
        pytest.param("flash2", "causal", marks=pytest.mark.ci),
        ("jax_nn", "lengths"),
        pytest.param("plain", "packed", marks=pytest.mark.thorough),
    ],
)
def test_honest_attention_is_invariant(name, mask):
    problem = Problem(dataclasses.replace(SHAPE, heads=4, key_heads=2), mask=mask)
    target = honest(name, problem.rules)
    records = invariance.invariances(
        target, problem, attend_of=lambda rules: honest(name, rules)
    )
    assert {r.name for r in records} == {
        "re-run",
        "batch size",
        "batch position",
        "padded queries",
        "padded keys",
        "hidden keys",
        "head position",
        "layers",
        "mapping",
    }
    assert [r for r in records if r.finding] == []
    assert all(r.bit_equal == (r.ulps == 0) for r in records)


def test_without_other_masks_arrays_are_left_alone():
    problem = Problem(SHAPE, mask="lengths")
    records = invariance.invariances(attend(problem.rules), problem)
    assert {r.name for r in records} == {"re-run", "head position", "layers", "mapping"}


def test_other_bits_in_a_rerun_are_found():
    problem = Problem(SHAPE)
    records = invariance.invariances(attend(Mask(), "irreproducible"), problem)
    found = {r.tensor: r for r in records if r.name == "re-run" and r.finding}
    assert set(found) == {"out"}
    finding = found["out"].finding
    assert finding and (finding.kind, finding.cause) == ("not reproducible", "re-run")
    assert 0 < found["out"].ulps <= 2


def test_bits_that_hang_on_how_xla_compiles_are_found(monkeypatch):
    # On a CPU nothing is tuned; whether casts to 16 bits are left out stands for it.
    options = {"xla_allow_excess_precision": False}
    monkeypatch.setattr(invariance, "_untuned", lambda: options)
    problem = Problem(SHAPE)

    def rounded_twice(query, key, value):
        out, lse = attend(Mask())(query, key, value)
        return (out * out.dtype.type(1.1)) * out.dtype.type(0.9), lse

    for target, hangs in ((rounded_twice, True), (attend(Mask()), False)):
        records = invariance.invariances(target, problem)
        found = [r for r in records if r.name == "tuning"]
        assert {r.tensor for r in found} >= {"out", "dquery", "dkey", "dvalue"}
        findings = [r.finding for r in found if r.finding]
        assert bool(findings) == hangs
        assert {(f.kind, f.cause) for f in findings} <= {("not reproducible", "tuning")}
        # One line for all results, with the largest of their differences.
        off = [r for r in found if not r.bit_equal]
        assert {f.tensors for f in findings} <= {tuple(r.tensor for r in off)}
        assert all(f.evidence["ulps"] == max(r.ulps for r in off) for f in findings)


def test_the_batch_position_is_found():
    records = invariance.invariances(attend(Mask(), "batch position"), Problem(SHAPE))
    found = {r.finding.cause for r in records if r.finding}
    assert found == {"result depends on the batch position"}


def test_other_results_in_a_loop_over_layers_are_found(monkeypatch):
    # Stands for what XLA made on a GPU of kernels that write into an operand: rows of
    # out were zero.
    loop = lax.map

    def forgetful(attend, layers):
        out, lse = loop(attend, layers)
        return out.at[:, :, 0].set(0), lse

    monkeypatch.setattr(lax, "map", forgetful)
    records = invariance.invariances(attend(Mask()), Problem(SHAPE))
    found = {r.finding.cause for r in records if r.finding}
    assert found == {"result depends on the layers"}


def test_other_results_under_vmap_are_found(monkeypatch):
    mapped = jax.vmap

    def forgetful(attend):
        def call(*stacked):
            out, lse = mapped(attend)(*stacked)
            return out.at[:, :, 0].set(0), lse

        return call

    monkeypatch.setattr(jax, "vmap", forgetful)
    records = invariance.invariances(attend(Mask()), Problem(SHAPE))
    found = {r.finding.cause for r in records if r.finding}
    assert found == {"result depends on the mapping"}


def test_lengths_that_are_not_heeded_are_found():
    # The target takes no lengths, so hidden keys are seen and get gradients.
    problem = Problem(SHAPE)
    records = invariance.invariances(
        attend(Mask()), problem, attend_of=lambda mask: attend(Mask())
    )
    found = {(r.name, r.finding.kind) for r in records if r.finding}
    assert ("padded keys", WORSE) in found
    assert ("hidden keys", "wrong wiring") in found


def without_mean(mask: Mask, leak=0.0, of_all=0.0):
    """An honest attention of keys without their mean, differentiated; `leak`: dK that
    hidden keys get of their own, `of_all`: what all get alike."""

    @jax.custom_vjp
    def leaky(key):
        return key

    def backward(key, dkey):
        off = of_all + leak * jnp.sign(key)
        return ((dkey.astype(jnp.float32) + off).astype(key.dtype),)

    leaky.defvjp(lambda key: (key, key), backward)

    def target(q, k, v):
        q, k, v = (x.astype(jnp.float32) for x in (q, leaky(k), v))
        k = k - k.mean(1, keepdims=True)
        k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], 2) for x in (k, v))
        logits = q.shape[-1] ** -0.5 * jnp.einsum("btnh,bsnh->bnts", q, k)
        visible = mask.materialise(*logits.shape[2:])
        if visible is not None:
            logits = jnp.where(visible, logits, -jnp.inf)
        p = jax.nn.softmax(logits)
        return jnp.einsum("bnts,bsnh->btnh", p, v).astype(jnp.bfloat16), None

    return target


@pytest.mark.parametrize(
    ("fault", "is_found"),
    [({}, False), (dict(leak=1e-8), True), (dict(of_all=0.001), True)],
    ids=["none", "of its own", "of all"],
)
def test_what_a_mean_of_all_keys_passes_on_is_rounding(fault, is_found):
    """Of a hidden key's own any amount is found, and of a share one that is more than
    row sums of dS in BF16 can come to, 1.1e-4 here."""
    problem = Problem(SHAPE)
    records = invariance.invariances(
        without_mean(Mask(), **fault),
        problem,
        attend_of=lambda mask: without_mean(mask, **fault),
    )
    (record,) = (r for r in records if (r.name, r.tensor) == ("hidden keys", "dkey"))
    assert not record.bit_equal and (record.finding is not None) == is_found
    assert (record.measured > record.bound) == is_found
    if not is_found:
        # Sums are in FP32, and what BF16 allows is far more.
        assert record.measured < 1e-2 < 1 < record.bound


def test_block_sizes_are_compared():
    variants = {"64": attend(Mask()), "16": attend(Mask(), "last tile dropped")}
    records = invariance.invariances(variants["64"], Problem(SHAPE), attends=variants)
    found = {r.name for r in records if r.finding}
    assert found == {"block size, 16 against 64"}


def test_units_of_the_last_place():
    x = np.array([1.0, 2.0, np.nan, np.inf], np.float32)
    assert invariance.largest_ulps(x, x) == 0
    y = x.copy()
    y[0] = 1 + 3 * 2.0**-23
    assert invariance.largest_ulps(x, y) == 3
    y[3] = 1
    assert invariance.largest_ulps(x, y) == np.inf
    zero = np.zeros(1, np.float32)
    assert invariance.same_bits(x, x.copy()) and not invariance.same_bits(zero, -zero)
