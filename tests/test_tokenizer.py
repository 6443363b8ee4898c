"""Captions to ids: reversible, padded, and never cut in silence."""

import numpy as np
import pytest

from train.data import make_tokenizer
from train.data.digits import DIGIT_NAMES
from train.data.shapes import Shapes, captions
from train.data.tokenizer import WORDS, ByteTokenizer, WordTokenizer


def test_bytes_are_reversible():
    tokenizer = ByteTokenizer(64)
    caption = "ein roter Kreis, 红色的圆, \x00\x7f"
    tokens = tokenizer.encode(caption)
    assert tokens.dtype == np.int32 and tokens.shape == (64,)
    used = tokens[tokens > 0]
    assert bytes((used - 1).astype(np.uint8)).decode() == caption
    assert np.all(tokens[len(used) :] == 0)
    assert 0 < tokens.max() < tokenizer.vocab_size


@pytest.mark.parametrize("name", ["byte", "word"])
def test_the_empty_caption_is_all_padding(name):
    assert not make_tokenizer(name, 12).encode("").any()


def test_words_are_reversible_over_the_whole_grammar():
    tokenizer = WordTokenizer(12)
    source = Shapes(32, "all", "train", 0)
    texts = captions(source.scenes(list(range(1000))))
    texts += [f"a handwritten {name}" for name in DIGIT_NAMES]
    for text in texts:
        tokens = tokenizer.encode(text)
        assert " ".join(WORDS[i - 1] for i in tokens if i > 0) == text
        assert tokenizer.overflow(text) == 0
    assert len(set(WORDS)) == len(WORDS)
    assert tokenizer.vocab_size == 1 + len(WORDS)


def test_word_ids_are_pinned():
    # Trained embeddings depend on them.
    ids = WordTokenizer(5).encode("a red circle below handwritten")
    assert ids.tolist() == [1, 5, 11, 31, 32]


def test_overflow_counts_what_encoding_drops():
    for tokenizer, caption in [
        (ByteTokenizer(4), "abcdef"),
        (WordTokenizer(4), "a red circle in the center"),
    ]:
        assert tokenizer.overflow(caption) == 2
        assert np.count_nonzero(tokenizer.encode(caption)) == 4


def test_unknown_words_and_names_raise_one_line():
    with pytest.raises(ValueError, match="'purple'.*byte tokenizer") as error:
        WordTokenizer(12).encode("a purple circle")
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="byte or word"):
        make_tokenizer("bpe", 12)
