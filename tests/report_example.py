"""Reports of an audit for tests: a usual one, an empty one and a crowded one."""

import dataclasses
import itertools
import math
import sys

import numpy as np

from attn_jax.audit.error import Errors
from attn_jax.audit.finding import Finding
from attn_jax.audit.problem import TENSORS
from attn_jax.audit.report import Cell, Report

FAMILIES = "normal", "uniform", "offset", "wide", "zero_k_one_v"
LENGTHS = 256, 1024, 4096
AWKWARD = (
    math.nan,
    math.inf,
    -math.inf,
    -0.0,
    5e-324,
    sys.float_info.max,
    0.1 + 0.2,
)


def tensor_errors(units: float, *, degenerate=False, ratio: float | None = 0.6):
    error = Errors(
        units=units,
        degenerate=degenerate,
        relative=units * 1.1e-3,
        maximum=units * 6e-3,
        p999=units * 4e-3,
        signed_mean=-units * 1e-6,
        signed_mean_ci=units * 3e-6,
        directionality=1.3,
    )
    return {**dataclasses.asdict(error), "two_times_rule": ratio}


def cell(
    family="normal",
    mask="full",
    dtype="bfloat16",
    length=1024,
    status="measured",
    **more,
) -> Cell:
    return Cell(family, mask, dtype, 2, length, length, 8, 2, 128, status, **more)


def cells(
    families=FAMILIES, masks=("full", "causal"), dtypes=("bfloat16",), tensors=TENSORS
) -> list[Cell]:
    """dQ of the families with a mean grows with the length, nothing else does."""
    rng = np.random.default_rng(0)
    return [
        cell(
            family,
            mask,
            dtype,
            length,
            errors={
                tensor: tensor_errors(
                    rng.uniform(1, 1.6)
                    * (
                        (length / 64) ** 1.2
                        if tensor == "dquery" and family in ("uniform", "offset")
                        else 1
                    ),
                    degenerate=family == "zero_k_one_v" and tensor != "out",
                )
                for tensor in tensors
            },
            seconds=rng.uniform(0.1, 3),
        )
        for dtype, family, mask, length in itertools.product(
            dtypes, families, masks, LENGTHS
        )
    ]


def example(**changes) -> Report:
    """A kernel that rounds dS of a mean that cancels, and does not take one mask."""
    steps = {
        "dlogits": 0.83,
        "backward_probability": 0.1,
        "delta": 0.05,
        "gradient": 0.02,
    }
    fields = {
        "target": "attention_kernels.flash:attend",
        "environment": {
            "device": "NVIDIA H100 80GB HBM3",
            "jax": "0.11.2",
            "jaxlib": "0.11.2",
            "numpy": "2.4.1",
            "python": "3.12.11",
            "attn_jax": "0.1.0",
            "date": "2025-11-23T12:00:00+00:00",
            "x64": False,
            "command": "attn_jax audit attention_kernels.flash:attend",
        },
        "settings": {
            "dtype": "bfloat16",
            "shapes": [[2, n, n, 8, 2, 128] for n in LENGTHS],
            "families": list(FAMILIES),
            "masks": ["full", "causal", "packed"],
            "gradients": True,
        },
        "canaries": ["sum order", "exp", "fp32 products"],
        "cells": [
            *cells(),
            cell(mask="packed", status="not taken", reason="no argument segment_ids"),
            cell(
                "wide", length=16384, status="out of memory", reason="34 GiB asked for"
            ),
        ],
        "findings": [
            Finding(
                "not taken",
                "packed sequences",
                "The target has no argument for segment ids.",
                where=("packed",),
            ),
            Finding(
                "as accurate as its algorithm allows, which is poor here",
                "dlogits",
                "dQ is 231 units off where keys have a mean, as dS is rounded to BF16; "
                "subtract the mean of the keys first.",
                ("dquery",),
                tuple(f"offset, causal, {n} keys" for n in (*LENGTHS, *range(9))),
                {"units": 231.4, "predicted": 228.0, "recipe": "flash2"},
            ),
        ],
        "attribution": [
            {
                "tensor": tensor,
                "recipe": "flash2_op_by_op",
                "residual": residual,
                "measured": measured,
                "predicted": predicted,
                "step": step,
                "share": share,
            }
            for tensor, measured, predicted, residual in (
                ("out", 1.21, 1.2, 0.05),
                ("dquery", 231.4, 228.0, 4.1),
                ("dvalue", 1.6, 1.58, 0.1),
            )
            for step, share in steps.items()
        ],
        "fits": True,
        "probes": [
            {
                "name": "exp2 of a logit",
                "measured": 1.4,
                "bound": 2.0,
                "unit": "ulp",
                "passed": True,
            },
            {
                "name": "rows that see nothing",
                "measured": math.nan,
                "bound": 0.0,
                "unit": "",
                "passed": False,
            },
        ],
        "invariances": [
            {
                "name": "the same call again",
                "tensor": "dquery",
                "bit_equal": False,
                "largest_difference": 4.0,
                "measured": 0.7,
                "bound": 0.0,
            },
            {
                "name": "the same call again",
                "tensor": "out",
                "bit_equal": True,
                "largest_difference": 0.0,
                "measured": 0.0,
                "bound": 0.0,
            },
        ],
        "merges": [
            {
                "parts": parts,
                "tensor": tensor,
                "units": slope * parts**0.5,
                "predicted": predicted,
            }
            for tensor, slope, predicted in (("out", 1.17, 1.25), ("lse", 1.0, None))
            for parts in (2, 4, 8, 16)
        ],
        "growth": {"out": 0.5, "lse": 0.5},
        "merging": "16-bit partial results",
    }
    return Report(**(fields | changes))


def empty(**changes) -> Report:
    return Report(**({"target": "m:f", "environment": {}, "settings": {}} | changes))


def crowded() -> Report:
    """More, longer and larger of everything than an audit has."""
    wide = "\N{CJK UNIFIED IDEOGRAPH-5BBD}" * 40
    families = *FAMILIES, "a_family_of_a_very_long_name", wide
    tensors = [*TENSORS, "dsinks", "a_tensor_of_a_very_long_name"]
    some = cells(families, tensors=tensors)
    odd = [*AWKWARD, 0.0, 1e-12, 1e15]
    some += [
        cell("normal", length=n, errors={"out": tensor_errors(x)})
        for n, x in zip(range(300, 3000, 270), odd, strict=True)
    ]
    attribution = [
        row | {"tensor": tensor, "recipe": wide, "measured": x, "share": x}
        for row in example().attribution
        for tensor, x in zip(tensors, odd, strict=False)
    ]
    merges = [
        {"parts": parts, "tensor": "out", "units": x, "predicted": x}
        for parts, x in enumerate(odd, 1)
    ]
    return example(
        target=wide * 5, cells=some, attribution=attribution, merges=merges, fits=False
    )
