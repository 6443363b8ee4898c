"""Captions to token ids; no vocabulary files, no downloads.

Both tokenizers give `length` ids, padded on the right with 0. The empty caption is
all padding and serves as the null caption of classifier-free guidance.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int32

from train.data.digits import DIGIT_NAMES
from train.data.shapes import COLOURS, NUMBERS, SHAPES, plural

PAD = 0

# The order fixes the ids, hence the meaning of trained embeddings: append only.
WORDS: tuple[str, ...] = (
    *("a", *NUMBERS.values(), *COLOURS, *SHAPES, *map(plural, SHAPES)),
    *("at", "the", "top", "bottom", "left", "right", "in", "center"),
    *("of", "above", "below", "handwritten"),
    *(name for name in DIGIT_NAMES if name not in NUMBERS.values()),
)


@runtime_checkable
class Tokenizer(Protocol):
    """`encode` truncates to `length`; `overflow` says how many tokens that drops."""

    @property
    def length(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    def encode(self, caption: str) -> Int32[np.ndarray, " L"]: ...

    def overflow(self, caption: str) -> int: ...


def _pad(ids: Sequence[int], length: int) -> Int32[np.ndarray, " L"]:
    tokens = np.full(length, PAD, np.int32)
    kept = ids[:length]
    tokens[: len(kept)] = kept
    return tokens


@dataclass(frozen=True)
class ByteTokenizer:
    """UTF-8 bytes plus one, so that 0 is padding; any language, 257 ids."""

    length: int
    vocab_size: int = 257

    def encode(self, caption: str) -> Int32[np.ndarray, " L"]:
        return _pad([byte + 1 for byte in caption.encode()], self.length)

    def overflow(self, caption: str) -> int:
        return max(0, len(caption.encode()) - self.length)


_WORD_IDS = {word: index for index, word in enumerate(WORDS, start=1)}


@dataclass(frozen=True)
class WordTokenizer:
    """One id a word of the grammar of `shapes` and `digits`, 0 for padding.

    Raises ValueError on any other word.
    """

    length: int
    vocab_size: int = 1 + len(WORDS)

    def encode(self, caption: str) -> Int32[np.ndarray, " L"]:
        words = caption.split()
        unknown = [word for word in words if word not in _WORD_IDS]
        if unknown:
            raise ValueError(
                f"word {unknown[0]!r} of caption {caption!r} is not in the word "
                f"tokenizer's vocabulary ({', '.join(WORDS)}); the byte tokenizer "
                "takes any text"
            )
        return _pad([_WORD_IDS[word] for word in words], self.length)

    def overflow(self, caption: str) -> int:
        return max(0, len(caption.split()) - self.length)
