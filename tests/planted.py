"""Attention with one defect each, and attention without, for audits to be tried on.

All take the arguments of `jax.nn.dot_product_attention`, and segment ids; nearly all
are `knobs.attention` with one knob turned.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attn_jax import api
from attn_jax.audit.finding import Kind
from attn_jax.audit.inputs import Shape
from attn_jax.audit.problem import TENSORS, Problem, Results
from attn_jax.mask import Mask
from attn_jax.recipe import FLASH2
from tests import planted_bias, planted_keys
from tests.knobs import Knobs, attention, bfloat16, same, scaled_query, truncated
from tests.planted_masks import band, longer, without, without_keys

GROUPED = Shape(2, 96, 160, 4, 2, 32)
SQUARE = Shape(2, 128, 128, 4, 4, 32)


def honest(**knobs):
    return functools.partial(attention, Knobs(**knobs))


def wrapped(around: Callable, function: Callable | None = None) -> Callable:
    """around(function, query, key, value, **rules) as a function of its own."""
    return functools.partial(around, function or honest())


@dataclasses.dataclass(frozen=True)
class Planted:
    """A defect: the kind of finding it must give, words one of which is in the cause in
    lower case, and a problem that shows it."""

    function: Callable
    expects: Kind
    cause: frozenset[str]
    problem: Problem = Problem(GROUPED)


def rules_of(problem: Problem) -> dict[str, Any]:
    """The mask of a problem as arguments."""
    rules = problem.rules
    arrays = {
        "query_seq_lengths": rules.query_lengths,
        "key_value_seq_lengths": rules.key_value_lengths,
        "query_segment_ids": rules.query_segment_ids,
        "key_value_segment_ids": rules.key_value_segment_ids,
    }
    given: dict[str, Any] = {
        name: jnp.asarray(x) for name, x in arrays.items() if x is not None
    }
    if rules.window is not None:
        given["local_window_size"] = rules.window
    return {"is_causal": rules.is_causal, **given}


def attend(function: Callable, problem: Problem) -> Callable:
    """(query, key, value) -> (out, LSE [B, N, T]), closed over mask and scale; a bias
    may be the fourth."""
    rules = rules_of(problem)
    if problem.scale_factor != 1:
        rules["scale"] = problem.scale
    swap = getattr(function, "layout", "BTNH") == "BNTH"

    def of(query, key, value, *bias):
        more = dict(zip(["bias"], bias))
        arrays = (x.swapaxes(1, 2) if swap else x for x in (query, key, value))
        residual = getattr(function, "residual", True)
        given = function(*arrays, **rules, **more, return_residual=residual)
        out, lse = given if residual else (given, None)
        out = out.swapaxes(1, 2) if swap else out
        return out, None if lse is None else lse.swapaxes(1, 2)

    return of


def results(function: Callable, problem: Problem) -> Results:
    """All results of a problem, for dLSE = 0."""
    query, key, value, dout, *bias = (jnp.asarray(x) for x in problem.arrays)
    of = attend(function, problem)
    (out, lse), vjp = jax.vjp(of, query, key, value, *bias)
    zeros = jax.tree_util.tree_map(jnp.zeros_like, lse)
    given = zip(TENSORS, (out, lse, *vjp((dout, zeros))))
    return {name: np.asarray(x) for name, x in given if x is not None}


# Attention without a defect ------------------------------------------------------


class Honest:
    """A function with what an adapter has to know of it."""

    def __init__(self, function: Callable, layout: str = "BTNH", residual: bool = True):
        self.function, self.layout, self.residual = function, layout, residual

    def __call__(self, *arrays, **rules):
        return self.function(*arrays, **rules)


def _jax_nn(*arrays, return_residual=False, **rules):
    """Segment ids become a mask; without its LSE, which has the inputs' type."""
    assert not return_residual
    ids = [rules.pop(f"{of}_segment_ids", None) for of in ("query", "key_value")]
    if ids[0] is not None:
        lengths = arrays[0].shape[1], arrays[1].shape[1]
        segments = Mask(query_segment_ids=ids[0], key_value_segment_ids=ids[1])
        rules["mask"] = segments.materialise(*lengths)
    return jax.nn.dot_product_attention(*arrays, implementation="xla", **rules)


def _heads_first(function, *arrays, return_residual=False, **rules):
    """[B, N, T, H], LSE [B, N, T]."""
    arrays = (x.swapaxes(1, 2) for x in arrays)
    out, lse = function(*arrays, return_residual=True, **rules)
    out, lse = out.swapaxes(1, 2), lse.swapaxes(1, 2)
    # The adapter takes [B, T, N] from every function.
    return (out, lse.swapaxes(1, 2)) if return_residual else out


HONEST: dict[str, Callable] = {
    "plain, 16-bit P": honest(block=None),
    "plain, FP32 P": honest(block=None, narrow=same),
    "blocks of 32": honest(block=32),
    "blocks of 64": honest(block=64),
    "blocks of 128": honest(block=128),
    "last block first": honest(block=32, reverse=True),
    "exp2": honest(base_two=True),
    "delta from P dP": honest(delta_from="P dP"),
    "delta from FP32 O": honest(delta_from="unrounded out"),
    "FP32 everything": honest(narrow=same, delta_from="unrounded out"),
    "scaled query": wrapped(scaled_query),
    "keys repeated for every query head": wrapped(planted_keys.repeated),
    "textbook": Honest(planted_keys.textbook, residual=False),
    "heads first": Honest(wrapped(_heads_first), layout="BNTH"),
    "jax.nn": Honest(_jax_nn, residual=False),
    "reference": functools.partial(
        api.dot_product_attention, implementation="reference"
    ),
    "emulated FlashAttention-2": functools.partial(
        api.dot_product_attention, implementation="emulated", recipe=FLASH2
    ),
}


# Attention with a defect ---------------------------------------------------------

PLANTED: dict[str, Planted] = {}


def _plant(name, function, *causes, expects: Kind = "wrong wiring", on=None) -> None:
    words = frozenset(cause.lower() for cause in causes or (name,))
    PLANTED[name] = Planted(function, expects, words, on or Problem(GROUPED))


def _wiring(name: str, *causes: str, on: Problem | None = None, **knobs) -> None:
    _plant(name, honest(**knobs), *causes, on=on)


def _rounding(name: str, *causes: str, on: Problem | None = None, **knobs) -> None:
    kind = "worse than its algorithm allows"
    _plant(name, honest(**knobs), *causes, expects=kind, on=on)


CAUSAL = Problem(GROUPED, mask="causal")
WINDOW = Problem(GROUPED, mask="window")  # 20 keys to the left, 10 to the right
LENGTHS = Problem(GROUPED, mask="lengths")
PACKED = Problem(GROUPED, mask="packed")
WIDE = Problem(SQUARE)
BIAS = Problem(GROUPED, mask="bias")

_wiring("scale missing", scale=lambda scale, H: 1.0)
_wiring("scale applied twice", scale=lambda scale, H: scale * scale)
_wiring("scale off by a factor of 2", scale=lambda scale, H: 2 * scale)
_wiring("scale of another head dim", scale=lambda scale, H: (2 * H) ** -0.5)
_wiring("base of the exponential", scale=lambda scale, H: scale * np.log(2))
_wiring("causal ignored", on=CAUSAL, seen=without(is_causal=False))
_wiring("causal off by one (j < i)", on=CAUSAL, seen=band(None, -1))
_wiring(
    "causal off by one, mean of V for the first query",
    "causal off by one (j < i)",
    on=CAUSAL,
    seen=band(None, -1),
    hidden=-1e4,
)
_wiring("causal off by one (j <= i + 1)", on=CAUSAL, seen=band(None, 1))
_wiring("causal aligned to the last key", on=CAUSAL, seen=band(None, 160 - 96))
_wiring("mask inverted", on=WINDOW, seen=lambda seen, _: ~seen)
_wiring("window ignored", on=WINDOW, seen=without(window=None))
_wiring("window side ignored", on=WINDOW, seen=band(None, 10))
_wiring("window off by one on the left", on=WINDOW, seen=band(19, 10))
_wiring("window off by one on the right", on=WINDOW, seen=band(20, 11))
_wiring(
    "window two too far to the left",
    "hidden pairs carry weight",
    on=WINDOW,
    seen=lambda seen, given: band(given.window[0] + 2, given.window[1])(seen, given),
)
_wiring("window off by one on both sides", on=WINDOW, seen=band(19, 9))
_wiring("window sides swapped", on=WINDOW, seen=band(10, 20))
_wiring(
    "segment ids ignored",
    on=PACKED,
    seen=without(query_segment_ids=None, key_value_segment_ids=None),
)
_wiring("query lengths ignored", on=LENGTHS, seen=without(query_lengths=None))
_wiring("key lengths ignored", on=LENGTHS, seen=without(key_value_lengths=None))
_wiring("key lengths off by one", on=LENGTHS, seen=longer("key_value_lengths", -1))
_wiring(
    "a key too many",
    "key lengths off by one",
    on=LENGTHS,
    seen=longer("key_value_lengths", 1),
)
_wiring("query lengths off by one", on=LENGTHS, seen=longer("query_lengths", -1))
_wiring("lengths of another batch entry", on=LENGTHS, seen=lambda seen, _: seen[::-1])
_wiring("queries that see no key", on=LENGTHS, hidden=-1e4)
_wiring("causal the other way round", on=CAUSAL, seen=band(0, None))
_wiring(
    "GQA heads grouped wrongly",
    key_heads=lambda N, K: [n % K for n in range(N)],
    group=lambda x, K: x.reshape(*x.shape[:2], -1, K, x.shape[-1]).sum(2),
)
_plant("V of other heads", wrapped(planted_keys.other_values))
_wiring("first KV tile dropped", "KV tile dropped", seen=without_keys(0, 64))
_wiring("last KV tile dropped", "KV tile dropped", seen=without_keys(128, None))
_wiring("last partial tile unmasked", on=Problem(GROUPED, family="normal"), pad=True)
_wiring("stale maximum", block=32, rescale=False, delta_from="P dP")
_plant(
    "key and value exchanged",
    wrapped(lambda f, query, key, value, *a, **k: f(query, value, key, *a, **k)),
)


def _result(change: Callable) -> Callable:
    """The output, and LSE [B, T, N] if there is one, changed on the way out."""

    def of(function, *arrays, return_residual=False, **rules):
        out, lse = function(*arrays, return_residual=True, **rules)
        out, lse = change(out, lse)
        return (out, lse) if return_residual else out

    return wrapped(of)


def _heads_for_positions(function, *arrays, return_residual=False, **rules):
    given = function(*(x.swapaxes(1, 2) for x in arrays), return_residual=True, **rules)
    out, lse = given
    return (out.swapaxes(1, 2), lse.swapaxes(1, 2)) if return_residual else out


_plant("layout swapped", wrapped(_heads_for_positions), on=WIDE)
_plant(
    "LSE in another layout",
    _result(lambda out, lse: (out, lse.swapaxes(1, 2))),
)
_wiring("LSE in base 2", lse=lambda lse, m, scale: lse / np.log(2))
_wiring("LSE rounded to BF16", lse=lambda lse, m, scale: bfloat16(lse))
_wiring(
    "LSE rounded to FP16",
    lse=lambda lse, m, scale: lse.astype(jnp.float16).astype(jnp.float32),
)
_wiring("LSE negated", lse=lambda lse, m, scale: -lse)
_wiring("LSE without the maximum", lse=lambda lse, m, scale: lse - m)
_wiring("LSE is the maximum alone", lse=lambda lse, m, scale: m)
_wiring("LSE mixes bases", lse=lambda lse, m, scale: m + (lse - m) / np.log(2))
_wiring("LSE has the unscaled maximum", lse=lambda lse, m, scale: lse - m + m / scale)
_wiring("LSE is the row sum", lse=lambda lse, m, scale: jnp.exp(lse - m))
_plant(
    "LSE of unscaled logits",
    wrapped(
        lambda f, *a, return_residual=False, **k: (
            (f(*a, **k), f(*a, return_residual=True, **(k | {"scale": 1.0}))[1])
            if return_residual
            else f(*a, **k)
        )
    ),
)
_plant(
    "results in another layout",
    _result(lambda out, lse: (out.swapaxes(1, 2).reshape(out.shape), lse)),
)


def _output(name: str, finish: Callable) -> None:
    """Wrong in the output alone: delta does not come from it."""
    _wiring(name, finish=finish, delta_from="P dP")


_output("not normalised", lambda acc, total, value: acc)
_output("normalised by the number of keys", lambda acc, total, v: acc / v.shape[2])
_output(
    "P not applied",
    lambda acc, total, value: jnp.broadcast_to(value.mean(2, keepdims=True), acc.shape),
)


def _gradients(name: str, *causes: str, dq=same, dk=same, dv=same) -> None:
    def of(grads, scale):
        return tuple(f(g, scale) for f, g in zip((dq, dk, dv), grads))

    _wiring(name, *causes, gradients=of)


def _unscaled(g, scale):
    return g / scale


def _twice(g, scale):
    return g * scale


def _negative(g, scale):
    return -g


def _zero(g, scale):
    return jnp.zeros_like(g)


def _reverse(axis: int):
    return lambda g, scale: jnp.flip(g, axis)


_gradients("dQ without the scale", dq=_unscaled)
_gradients("dK without the scale", dk=_unscaled)
_gradients("dQ and dK without the scale", dq=_unscaled, dk=_unscaled)
_gradients("gradient scaled twice", dq=_twice, dk=_twice)
_gradients("gradient with the wrong sign", dq=_negative, dk=_negative)
_gradients("gradient is zero", dq=_zero)
_gradients("dQ of another head", "gradient of another head", dq=_reverse(2))
_gradients(
    "gradients of another batch entry",
    "gradient of another head",
    dq=_reverse(0),
    dk=_reverse(0),
    dv=_reverse(0),
)
_wiring(
    "dK and dV exchanged",
    gradients=lambda grads, scale: (grads[0], grads[2], grads[1]),
)


def _grouped(x, K):
    return x.reshape(*x.shape[:2], K, -1, x.shape[-1])


_wiring(
    "GQA sum missing, the first head",
    "GQA sum missing",
    group=lambda x, K: _grouped(x, K)[:, :, :, 0],
)
_wiring(
    "GQA sum missing, the last head",
    "GQA sum missing",
    group=lambda x, K: _grouped(x, K)[:, :, :, -1],
)
_wiring(
    "GQA sum missing, a mean",
    "GQA sum missing",
    group=lambda x, K: _grouped(x, K).mean(3),
)
_wiring("delta missing", delta=lambda delta, total: jnp.zeros_like(delta))
_wiring("delta added", delta=lambda delta, total: -delta)
_wiring("delta of another head", delta=lambda delta, total: jnp.roll(delta, 1, 1))
_wiring("delta of the wrong O", delta=lambda delta, total: delta * total)
_wiring(
    "mask missing in the backward pass",
    "causal ignored in the backward pass",
    on=CAUSAL,
    seen_backward=without(is_causal=False),
)
_wiring("LSE stop_gradient", "LSE", dlse=jnp.zeros_like)


def _dropped(p):
    kept = jax.random.bernoulli(jax.random.key(0), 0.9, p.shape)
    return jnp.where(kept, p / 0.9, 0.0)


def _clipped(p):
    return jnp.where(p < 2.0**-4, 0.0, p)


def _coarse_but_for_the_first(p):
    return p.at[1:].set(jax.lax.reduce_precision(p[1:], 8, 4))


_wiring("dropout left on", "dropout", block=None, applied=_dropped)
_rounding("P clipped", "P clipped", weights=_clipped)
_rounding("BF16 accumulator", "accumulator", "P V", block=16, accumulator=bfloat16)
_rounding("BF16 row sum", "row_sum", block=16, row_sum=bfloat16)
_rounding("BF16 logits", "logits", on=Problem(GROUPED, family="wide"), logits=bfloat16)
UNIFORM = Problem(GROUPED, family="uniform")
_rounding("P truncated", "truncat", "P", "bias", on=UNIFORM, narrow=truncated)
_rounding("output truncated", "truncat", "out", on=UNIFORM, narrow_out=truncated)

for _name, (_around, _cause) in planted_bias.WIRED.items():
    _plant(_name, wrapped(_around), _cause, on=BIAS)
_plant(
    "dbias summed in BF16",
    wrapped(planted_bias.in_bfloat16),
    "",
    expects="worse than its algorithm allows",
    # What two entries lose is one more rounding.
    on=Problem(Shape(12, 40, 48, 2, 2, 32), mask="bias"),
)

_counter = itertools.count()


def _noisy(out, lse):
    seed = jax.pure_callback(
        lambda: np.int32(next(_counter)),
        jax.ShapeDtypeStruct((), jnp.int32),
        vmap_method="sequential",
    )
    noise = jax.random.normal(jax.random.key(seed), out.shape, jnp.float32)
    return (out * (1 + 2.0**-7 * noise)).astype(out.dtype), lse


def _host(out, lse):
    shape = jax.ShapeDtypeStruct(out.shape, out.dtype)
    return jax.pure_callback(np.asarray, shape, out, vmap_method="sequential"), lse


def _one_shape(function, query, key, *arrays, **rules):
    if key.shape[1] % 128:
        raise NotImplementedError(f"{key.shape[1]} keys: not a multiple of 128")
    return function(query, key, *arrays, **rules)


_zeros = wrapped(planted_keys.filled_up)
_plant("zeros past the last key", _zeros, "", expects="not finite")
_plant(
    "irreproducible",
    _result(_noisy),
    "",
    expects="not reproducible",
)
_plant(
    "depends on the batch position",
    honest(weights=_coarse_but_for_the_first),
    "batch",
    expects="worse than its algorithm allows",
)
_plant(
    "x64 changes the result",
    honest(
        weights=lambda p: p.astype(jnp.result_type(float)),
        lse=lambda lse, m, scale: lse.astype(jnp.float32),
    ),
    "x64",
    expects="not reproducible",
)
_plant(
    "NaN where a query sees no key",
    honest(guard=False),
    "",
    expects="not finite",
    on=LENGTHS,
)
_plant(
    "NaN for very negative logits",
    honest(guard=False, subtract_maximum=False),
    "",
    expects="not finite",
    on=Problem(GROUPED, family="lse-130"),
)
_plant("raises at one shape", wrapped(_one_shape), "", expects="fails")
_plant(
    "wrong shape",
    _result(lambda out, lse: (out[:, :-1], lse)),
    "",
    expects="fails",
)
_plant(
    "wrong type",
    _result(lambda out, lse: (out.astype(jnp.float16), lse)),
    "",
    expects="fails",
)
_plant("not differentiable", _result(_host), "", expects="fails")
