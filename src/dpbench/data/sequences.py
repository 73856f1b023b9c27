"""Text as sequences of tokens, whose targets are the tokens that come next: characters and words.

Both follow TensorFlow Federated's preprocessing for SHAKESPEARE and Stack Overflow next word prediction (Reddi et al.
2021, "Adaptive Federated Optimization", appendix C), so that their models fit: 90 and 10,004 token numbers.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from dpbench.data.records import Collated
from dpbench.errors import ConfigurationError, DataError, brief

CHARACTERS = "dhlptx@DHLPTX $(,048cgkoswCGKOSW[_#'/37;?bfjnrvzBFJNRVZ\"&*.26:\naeimquyAEIMQUY]!%)-159\r"
"""The 86 characters in the order of their numbers 1 to 86, as TensorFlow Federated numbers them."""
CHARACTER_TOKENS = len(CHARACTERS) + 4
"""Padding 0, the characters, unknown, begin, end."""
WORDS = 10_000
"""Size of a vocabulary of words."""
PLAIN = str.maketrans("‘’“”—–", "''\"\"--")
"""Typographic signs as the keyboard's, which vocabularies have."""
_FAR = re.compile(r"[^\x00-\xff]")
_WORD = re.compile(r"[^\W\d_]+(?:'[^\W\d_]+)*|\d+|[^\w\s]")
_SENTENCE = re.compile(r"(?<=[.!?])\s+")


class Sequences(Dataset[tuple[Tensor, Tensor]]):
    """Inputs and targets: a sequence without its last token, and without its first.

    Args:
        tokens: (N, T + 1), whole numbers of any type; 0 is padding.
    """

    def __init__(self, tokens: Tensor) -> None:
        if tokens.dim() != 2 or tokens.shape[1] < 2:
            raise ConfigurationError(f"sequences are (N, T + 1) tokens, not {tuple(tokens.shape)}.")
        self.tokens = tokens

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, position: int) -> tuple[Tensor, Tensor]:
        """Inputs (T,) and targets (T,), int64."""
        both = self.tokens[position].long()
        return both[:-1], both[1:]

    def __getitems__(self, positions: Sequence[int]) -> Collated:
        """Inputs (R, T) and targets (R, T), int64."""
        both = self.tokens.index_select(0, torch.as_tensor(positions, dtype=torch.long)).long()
        return Collated((both[:, :-1].contiguous(), both[:, 1:].contiguous()))


def character_sequences(texts: Iterable[str], length: int = 80) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Texts as begin, characters, end; padded to a multiple of length + 1, and cut into pieces of that.

    Args:
        texts: As they are; typographic quotes and dashes become plain ones.
        length: T, of inputs and of targets.

    Returns:
        The pieces, (N, T + 1), and the number of pieces of each text.
    """
    table = np.full(256, len(CHARACTERS) + 1, np.uint8)  # unknown
    table[np.frombuffer(CHARACTERS.encode("latin-1"), np.uint8)] = np.arange(1, len(CHARACTERS) + 1)
    begin = len(CHARACTERS) + 2
    end = len(CHARACTERS) + 3
    known = [_FAR.sub("\0", text.translate(PLAIN)).encode("latin-1") for text in texts]
    pieces = [-(-(len(text) + 2) // (length + 1)) for text in known]
    tokens = np.zeros((sum(pieces), length + 1), np.uint8)
    flat = tokens.reshape(-1)
    at = 0
    for text, count in zip(known, pieces, strict=True):
        flat[at] = begin
        flat[at + 1 : at + 1 + len(text)] = table[np.frombuffer(text, np.uint8)]
        flat[at + 1 + len(text)] = end
        at += count * (length + 1)
    return tokens, np.array(pieces, dtype=np.int64)


def words(text: str) -> list[str]:
    """Words, numbers and signs of a text, in lower case."""
    return _WORD.findall(text.translate(PLAIN).lower())


def sentences(text: str) -> list[list[str]]:
    """Words of each sentence; a sentence ends with a full stop, a question mark or an exclamation mark."""
    return [found for sentence in _SENTENCE.split(text.strip()) if (found := words(sentence))]


def most_frequent(texts: Iterable[Iterable[str]], size: int = WORDS) -> list[str]:
    """The most frequent words, those of equal frequency in the order of the alphabet.

    This is a statistic of its texts that no noise was added to: take it from texts that are public.
    """
    counts = Counter(word for text in texts for word in text)
    return sorted(counts, key=lambda word: (-counts[word], word))[:size]


def read_vocabulary(path: Path, size: int = WORDS) -> list[str]:
    """Words of a file that has one at the beginning of each line, the most frequent first.

    Raises:
        DataError: There is no such file, it holds no word, or one twice.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"the vocabulary {path} cannot be read ({brief(error)}): give a file of a word a line."
        ) from error
    found = [line.split()[0].lower() for line in lines if line.strip()][:size]
    if not found:
        raise DataError(f"the vocabulary {path} holds no word.")
    if len(set(found)) < len(found):
        twice = Counter(found).most_common(1)[0][0]
        raise DataError(f"the vocabulary {path} holds the word {twice!r} twice.")
    return found


def word_sequences(
    texts: Iterable[Sequence[str]],
    vocabulary: Sequence[str],
    length: int = 20,
    size: int = WORDS,
) -> NDArray[np.integer[Any]]:
    """Sentences as begin, words, end, cut at or padded to length + 1 tokens.

    A sentence with `length` words or more has no end, as in TensorFlow Federated.

    Args:
        texts: Words of each sentence.
        vocabulary: At most `size` words; the n-th has number n (from 1).
        length: T, of inputs and of targets.
        size: Words that there are numbers for: unknown is size + 1, begin size + 2, end size + 3.

    Returns:
        (N, T + 1).
    """
    numbers = {word: number for number, word in enumerate(vocabulary, 1)}
    unknown = size + 1
    begin = size + 2
    end = size + 3
    rows = [[begin, *(numbers.get(word, unknown) for word in text[:length]), end][: length + 1] for text in texts]
    tokens = np.zeros((len(rows), length + 1), np.int16 if end < 2**15 else np.int32)
    for row, own in zip(tokens, rows, strict=True):
        row[: len(own)] = own
    return tokens
