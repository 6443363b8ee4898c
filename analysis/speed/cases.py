"""The problems that are timed: their sizes, their masks, and how much work each is."""

import dataclasses
import fnmatch
from collections.abc import Sequence
from typing import Literal, cast

import numpy as np

from attn_jax.audit.inputs import Shape, documents
from attn_jax.mask import Mask
from train.config import UsageError, head_dim, image_tokens
from train.presets import PRESETS as MODELS

Pass = Literal["forward", "backward", "both"]
MaskName = Literal["full", "causal", "window", "packed"]
PASSES: tuple[Pass, ...] = ("forward", "backward", "both")
# Operations for each visible pair of query and key and each entry of a head: two
# products of two operations forward, five backward. Both: what a training step needs;
# products that a backward pass computes again are its own affair.
FLOPS_PER_PAIR: dict[Pass, int] = {"forward": 4, "backward": 10, "both": 14}
FLOPS = (
    "B N H pairs, times 4 forward, 10 backward, 14 both; pairs is T S, half of it if "
    "causal, and what the queries see, counted, with a window or packed documents"
)
_WINDOW = 1024


@dataclasses.dataclass(frozen=True)
class Case:
    """One problem of self-attention.

    Attributes:
      name: what `--cases` calls it.
      group: the figure it is drawn in.
      B, T, S, N, K, H: batch, queries, keys, heads, key/value heads, head dim.
      mask: `full`; `causal`; `window`, causal and no key further back than the last
        `window` (the query's own included); `packed`, causal within each of eight
        documents of unequal length.
      window: keys that a query sees, where the mask is one.
      dtype: of all inputs and results.
      families: of inputs (`attn_jax.audit.inputs`): errors are measured on each, times
        on the first.
    """

    name: str
    group: str
    B: int
    T: int
    S: int
    N: int
    K: int
    H: int
    mask: MaskName
    window: int | None = None
    dtype: str = "bfloat16"
    families: tuple[str, ...] = ("normal",)

    @property
    def shape(self) -> Shape:
        return Shape(self.B, self.T, self.S, self.N, self.K, self.H)

    @property
    def is_causal(self) -> bool:
        return self.mask != "full"

    @property
    def local_window(self) -> tuple[int, int] | None:
        """As `jax.nn.dot_product_attention` takes it: neighbours left and right."""
        return None if self.window is None else (self.window - 1, 0)

    @property
    def documents(self) -> np.ndarray | None:
        """The number of each position's document, [B, S]; None unless packed."""
        if self.mask != "packed":
            return None
        return np.broadcast_to(documents(self.S), (self.B, self.S))

    @property
    def rules(self) -> Mask:
        """The mask of one batch entry; all have the same."""
        ids = None if self.documents is None else self.documents[:1]
        return Mask(
            is_causal=self.is_causal,
            window=self.local_window,
            query_segment_ids=ids,
            key_value_segment_ids=ids,
        )

    @property
    def pairs(self) -> float:
        """Pairs of query and key that a head works on, by the field's convention."""
        if self.mask == "full":
            return float(self.T * self.S)
        if self.mask == "causal":
            return self.T * self.S / 2
        if self.window is not None:
            return float(sum(min(i + 1, self.window) for i in range(self.T)))
        counts = np.unique_counts(self.rules.query_segment_ids).counts
        return float(sum(n * (n + 1) // 2 for n in counts))

    def flops(self, of: Pass) -> float:
        """Floating-point operations of a pass, as `FLOPS` says."""
        return FLOPS_PER_PAIR[of] * self.B * self.N * self.H * self.pairs


def _lengths() -> list[Case]:
    """16384 tokens whose heads are 2048 wide together."""
    return [
        Case(
            *(f"h{H}-{S // 1024}k-{mask}", "lengths", 16384 // S, S, S),
            *(2048 // H, 2048 // H, H, mask),
        )
        for H in (128, 64)
        for S in (1024, 4096, 16384)
        for mask in ("full", "causal")
    ]


def _models() -> list[Case]:
    """What a training step of each preset but the demonstration computes in a block."""
    cases = []
    for name, config in MODELS.items():
        if name == "tiny":
            continue
        tokens = image_tokens(config) + config.model.text_length
        heads = config.model.heads
        cases.append(
            Case(
                *(f"model-{name}", "models", config.batch_size, tokens, tokens),
                *(heads, heads, head_dim(config), "full"),
            )
        )
    return cases


def _grouped() -> list[Case]:
    """Eight query heads to a key/value head, as cuDNN publishes its times."""
    return [
        Case(f"gqa-{S // 1024}k-{mask}", "grouped heads", 1, S, S, 64, 8, 128, mask)
        for S in (2048, 4096, 8192, 16384, 32768)
        for mask in ("full", "causal")
    ]


def _masked() -> list[Case]:
    return [
        Case(
            *(f"h{H}-{S // 1024}k-{mask}", "masks", 16384 // S, S, S),
            *(2048 // H, 2048 // H, H, mask),
            window=_WINDOW if mask == "window" else None,
        )
        for H in (128, 64)
        for S in (4096, 16384)
        for mask in ("window", "packed")
    ]


def _toy() -> list[Case]:
    windows = {"full": None, "causal": None, "window": 16, "packed": None}
    return [
        Case(
            *(f"toy-{mask}", "toy", 1, 64, 64, 2, 1, 64, cast(MaskName, mask)),
            window=window,
        )
        for mask, window in windows.items()
    ]


PRESETS: dict[str, tuple[Case, ...]] = {
    "toy": tuple(_toy()),
    "default": tuple(_lengths()),
    "full": tuple(_lengths() + _models() + _grouped() + _masked()),
}


def chosen(
    preset: str, patterns: Sequence[str] | None, families: tuple[str, ...]
) -> list[Case]:
    """The preset's cases, or those whose names match a shell pattern, in its order,
    with inputs of some families.

    Raises:
      UsageError: a pattern matches none of them.
    """
    names = [case.name for case in PRESETS[preset]]
    wanted = set(names if patterns is None else ())
    for pattern in patterns or ():
        matching = fnmatch.filter(names, pattern)
        if not matching:
            raise UsageError(
                f"--cases {pattern} is none of --preset={preset}: {', '.join(names)}"
            )
        wanted |= set(matching)
    return [
        dataclasses.replace(case, families=families)
        for case in PRESETS[preset]
        if case.name in wanted
    ]
