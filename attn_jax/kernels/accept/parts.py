"""What is checked and timed on a card, by its architecture."""

import dataclasses
from collections.abc import Iterator
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from attn_jax.audit.mask_cases import mask_cases
from attn_jax.kernels import tuning
from attn_jax.kernels.architecture import H100_MULTIPROCESSORS
from attn_jax.kernels.attention import attention
from attn_jax.kernels.checks import Check, N, S, T, compile_for
from attn_jax.kernels.tune.candidates import groups, head_dims
from attn_jax.kernels.tuning import Backward, Group
from attn_jax.mask import Mask
from attn_jax.recipe import Architecture
from attn_jax.timing import device_time, interleaved, reason

Pass = Literal["forward", "training"]
# Operations for each pair of query and key and each entry of a head: two products of
# two operations forward, five more backward.
_FLOPS: dict[Pass, int] = {"forward": 4, "training": 14}
_TOKENS, _WIDTH = 16384, 2048


def all_checks(
    architecture: Architecture, multiprocessors: int | None
) -> Iterator[Check]:
    """Every head dim and feature that the kernels have, the common ones first.

    Both designs of the backward pass by name, Hopper's fused one where the card has the
    multiprocessors that it needs (`design.backward_of`).
    """
    dims = list(head_dims(architecture))
    for feature in ("full", "causal"):
        for pair in dims:
            yield Check(*pair, feature)
    for pair in dims:
        yield Check(*pair, "causal", dtype="float16")
    for head_dim in (64, 128):
        yield Check(head_dim, head_dim, "causal", out_dtype="float32")
    for head_dim in (64, 128):
        for feature in mask_cases(T, S, N):
            yield Check(head_dim, head_dim, feature)
    for pair in dims:
        if pair[0] not in (64, 128):
            yield Check(*pair, "window")
            yield Check(*pair, "bias-for-all-heads")
    for pair in ((192, 128), (32, 256), (256, 32)):
        if pair not in dims:
            yield Check(*pair, "causal")
    designs: tuple[Backward, ...] = ("two_kernels", "fused")
    few = multiprocessors is not None and multiprocessors < H100_MULTIPROCESSORS
    if architecture == "hopper" and few:
        designs = ("two_kernels",)
    for head_dim in tuning.FUSED_HEAD_DIMS:
        for backward in designs:
            yield Check(head_dim, head_dim, "full", backward=backward)
            yield Check(head_dim, head_dim, "causal", backward=backward, queries=S)
            if (architecture, backward) == ("hopper", "fused"):
                # An even number of tiles: by double rings.
                yield Check(head_dim, head_dim, "causal", backward=backward, keys=T)
            if architecture == "hopper":
                yield Check(head_dim, head_dim, "window", backward=backward, queries=S)


@dataclasses.dataclass(frozen=True)
class SpeedCase:
    """Self-attention over 16384 tokens whose heads are 2048 wide together."""

    head_dim: int
    length: int
    is_causal: bool
    of: Pass

    @property
    def name(self) -> str:
        mask = "causal" if self.is_causal else "full"
        return f"head dim {self.head_dim}, {self.length} {mask}, {self.of}"

    @property
    def shape(self) -> tuple[int, int, int, int]:
        heads = _WIDTH // self.head_dim
        return _TOKENS // self.length, self.length, heads, self.head_dim

    @property
    def flops(self) -> float:
        """The field's count: half of them under a causal mask."""
        pairs = self.length**2 / (2 if self.is_causal else 1)
        batch, _, heads, head_dim = self.shape
        return _FLOPS[self.of] * batch * heads * head_dim * pairs


def speed_cases() -> list[SpeedCase]:
    return [
        SpeedCase(head_dim, length, is_causal, of)
        for head_dim in (128, 64)
        for length in (4096, 1024, 16384)
        for is_causal in (False, True)
        for of in _FLOPS
    ]


def timed(
    case: SpeedCase, architecture: Architecture, seconds: float
) -> dict[str, Any]:
    """Milliseconds of our kernels and of cuDNN's, all kernels of a program added up.

    `training` is the forward and the backward pass in one program. Where one of them
    cannot be timed its time is None and `refused` says why.
    """

    def ours(query, key, value):
        mask = Mask(is_causal=case.is_causal)
        return attention(query, key, value, scale=case.head_dim**-0.5, mask=mask)[0]

    def cudnn(query, key, value):
        return jax.nn.dot_product_attention(
            *(query, key, value), is_causal=case.is_causal, implementation="cudnn"
        )

    arrays = tuple(
        jax.random.normal(key, case.shape, jnp.bfloat16)
        for key in jax.random.split(jax.random.key(0), 4)
    )
    times, refused = {}, {}
    for name, attend in (("pallas", ours), ("cudnn", cudnn)):

        def program(query, key, value, dout, attend=attend):
            if case.of == "forward":
                return attend(query, key, value)
            out, backward = jax.vjp(attend, query, key, value)
            return out, backward(dout)

        try:
            compiled = compile_for(architecture, program, arrays)
            device_time(compiled, arrays, 2)
        except Exception as error:
            refused[name] = reason(error)
            continue
        times[name] = lambda runs, compiled=compiled: device_time(
            compiled, arrays, runs
        )[0]
    row: dict[str, Any] = {"refused": refused, "ms": {}, "tflops": {}}
    for name, taken in interleaved(times, seconds).items():
        if isinstance(taken, str):
            refused[name] = taken
            continue
        ms = float(np.median(taken))
        row["ms"][name] = ms
        row["tflops"][name] = case.flops / ms / 1e9
    return row


def tuned_groups(
    architecture: Architecture, multiprocessors: int | None
) -> list[Group]:
    """What a short tune goes through, in this order."""
    return [
        group
        for head_dim in (128, 64)
        for kernel in tuning.KERNEL_NAMES
        for group in groups(
            architecture, kernel, [(head_dim, head_dim)], multiprocessors
        )
    ]
