"""What dQ gains if the backward pass has the very P that the forward pass multiplied.

    python prototypes/consistent_probability.py [CAPTURE.npz ...]

P of the forward product is rounded to 16 bits, so O, and delta = rowsum(dO O) of it,
belong to other weights than the exp(S - LSE) of the backward pass: rows of dS do not
sum to zero, by some e_i, and dQ errs by e_i sum_j P_ij K_j. No rounding of O or dS is
to blame, and no centre but the row's own helps on every input.

Here the forward pass takes exp2(S - M) with M the maximum rounded to an integer, so
that every rescaling is a power of two and no block changes how P rounds, and divides
by the sum of the *rounded* P. The backward pass rounds exp2(S - n), n any integer, the
same way and divides by the same sum. Then O = P V holds for its P, and delta is that of
its dS. Beside it two cheaper cures of O alone: division by the sum of rounded P, and P
of the forward product in FP16.

FP64 but for the roundings named; dS in FP16 is scaled by one power of two for the head.
dK is made of dS in BF16, of the P that is named. Units: RMS error over that of the
exact result rounded once to BF16; what is rounded at last has at least 1. Of a capture
first each layer at each step, then all heads.
"""

import json
import sys
from collections.abc import Iterator, Sequence

import ml_dtypes
import numpy as np

from attn_jax.audit.inputs import FAMILIES, Shape, make_inputs

LENGTH, HEAD_DIM, HEADS = 512, 64, 4
Arrays = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def bf16(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)


def fp16(x: np.ndarray) -> np.ndarray:
    scale = 2.0 ** np.floor(14 - np.log2(np.abs(x).max()))
    return (x * scale).astype(np.float16).astype(np.float64) / scale


def two_bf16(x: np.ndarray) -> np.ndarray:
    """As the sum of two BF16 numbers, of what an FP32 accumulator holds."""
    x = x.astype(np.float32).astype(np.float64)
    return bf16(x) + bf16(x - bf16(x))


# Sums of squares: of the error after rounding to BF16, and of the rounding alone.
Squares = tuple[float, float]


def squares(found: np.ndarray, exact: np.ndarray) -> Squares:
    error, rounding = bf16(found) - exact, bf16(exact) - exact
    return float(np.sum(error**2)), float(np.sum(rounding**2))


def units(of_heads: Sequence[Squares]) -> float:
    """Of one head, or of several pooled."""
    error, rounding = np.sum(of_heads, axis=0)
    return float(np.sqrt(error / rounding))


def errors(arrays: Arrays, *, is_causal: bool) -> dict[str, Squares]:
    """Of one head."""
    query, key, value, dout = arrays
    logits = query @ key.T / np.sqrt(key.shape[1]) * np.log2(np.e)
    if is_causal:
        logits = np.where(np.tri(*logits.shape, dtype=bool), logits, -np.inf)
    highest = logits.max(axis=1, keepdims=True)
    weights = np.exp2(logits - highest)
    total = weights.sum(axis=1, keepdims=True)
    probability = weights / total
    dprobability = dout @ value.T
    out = probability @ value
    delta = (dout * out).sum(axis=1, keepdims=True)
    dlogits = probability * (dprobability - delta)
    exact_dq, exact_dk = dlogits @ key, dlogits.T @ query
    seen = np.tri(len(key)) if is_causal else np.ones((len(key),) * 2)
    mean = seen @ key / seen.sum(axis=1, keepdims=True)

    now = two_bf16(bf16(weights) @ value / total)
    by_sum = two_bf16(bf16(weights) @ value / bf16(weights).sum(axis=1, keepdims=True))
    fine = two_bf16(weights.astype(np.float16).astype(np.float64) @ value / total)
    rounded = bf16(np.exp2(logits - np.ceil(highest)))
    sums = rounded.sum(axis=1, keepdims=True)
    same, then = rounded / sums, two_bf16(rounded @ value / sums)

    passes = {
        "now": (probability, now),
        "sum of rounded P": (probability, by_sum),
        "FP16 P": (probability, fine),
        "same P": (same, then),
    }
    found = {
        f"out, {name}": squares(result, out) for name, (_, result) in passes.items()
    }
    for name, (weight, result) in passes.items():
        ds = weight * (dprobability - (dout * result).sum(axis=1, keepdims=True))
        for format_name, to in (("BF16", bf16), ("FP16", fp16)):
            left = to(ds).sum(axis=1, keepdims=True)
            for centre_name, centre in (("none", 0.0), ("mean", mean)):
                dq = to(ds) @ key - left * centre
                found[f"dQ, {name}, {format_name} dS, {centre_name}"] = squares(
                    dq, exact_dq
                )
        found[f"dK, {name}, BF16 dS"] = squares(bf16(ds).T @ query, exact_dk)
    return found


def drifting(seed: int) -> Arrays:
    """Keys whose mean goes from +8 to -8."""
    shape = Shape(1, LENGTH, LENGTH, 1, 1, HEAD_DIM)
    query, key, value, dout = heads(make_inputs("normal", seed, shape))[0]
    return query, bf16(key + np.linspace(8, -8, LENGTH)[:, None]), value, dout


def heads(inputs) -> list[Arrays]:
    """[B, L, N, H] as heads of [L, H] in FP64."""
    wide = [np.asarray(x).astype(np.float64) for x in inputs]
    batch, _, count, _ = wide[0].shape
    return [
        tuple(x[b, :, n] for x in wide)  # type: ignore[misc]
        for b in range(batch)
        for n in range(count)
    ]


def captured(path: str) -> Iterator[tuple[str, list[Arrays]]]:
    """Step and layer, and the heads, of a file of `python -m analysis capture`."""
    names = "query", "key", "value", "dout"
    with np.load(path) as arrays:
        described = json.loads(str(arrays["description"]))
        for i, one in enumerate(described["captures"]):
            inputs = (arrays[f"{i}_{x}"].view(ml_dtypes.bfloat16) for x in names)
            yield f"step {one['step']}, layer {one['layer']}", heads(inputs)


def show(title: str, all_errors: list[dict[str, Squares]]) -> None:
    count = len(all_errors)
    print(f"\n{title}: median, nine tenths, worst of {count} heads; pooled")
    for name in all_errors[0]:
        of_heads = [found[name] for found in all_errors]
        x = [units([one]) for one in of_heads]
        quantiles = f"{np.median(x):7.2f} {np.quantile(x, 0.9):7.2f} {max(x):7.2f}"
        print(f"  {name:38} {quantiles} {units(of_heads):7.2f}")


def main(paths: list[str]) -> None:
    shape = Shape(1, LENGTH, LENGTH, HEADS, HEADS, HEAD_DIM)
    for is_causal in (False, True):
        mask = "causal" if is_causal else "full"
        for family in FAMILIES:
            if family == "zero_k_one_v":
                continue
            draws = heads(make_inputs(family, 0, shape))
            show(f"{family}, {mask}", [errors(x, is_causal=is_causal) for x in draws])
        draws = [drifting(seed) for seed in range(HEADS)]
        show(f"drifting keys, {mask}", [errors(x, is_causal=is_causal) for x in draws])
    for path in paths:
        found = {
            label: [errors(x, is_causal=False) for x in of_layer]
            for label, of_layer in captured(path)
        }
        for label, of_layer in found.items():
            show(f"{path}, {label}", of_layer)
        show(path, [one for of_layer in found.values() for one in of_layer])


if __name__ == "__main__":
    main(sys.argv[1:])
