"""Texts as tensors: sequences of characters or words, with the next tokens as targets.

All follow TensorFlow Federated's preprocessing for SHAKESPEARE and for next word prediction on Stack Overflow (Reddi et
al. 2021, "Adaptive Federated Optimization", appendix C), so that their models fit: 90 and 10,004 token numbers.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpbench.data.records import Collated, InBatches
from dpbench.errors import ConfigurationError, DataError, brief

CHARACTERS = "dhlptx@DHLPTX $(,048cgkoswCGKOSW[_#'/37;?bfjnrvzBFJNRVZ\"&*.26:\naeimquyAEIMQUY]!%)-159\r"
"""The 86 characters in the order of their numbers 1 to 86, as TensorFlow Federated numbers them."""
CHARACTER_TOKENS = len(CHARACTERS) + 4
"""Padding 0, the characters, unknown, begin, end."""
WORDS = 10_000
"""Size of a vocabulary of words."""
PLAIN = str.maketrans("‘’“”—–", "''\"\"--")
"""Typographic signs as the keyboard's, which vocabularies have."""
_NOT_LATIN = re.compile(r"[^\x00-\xff]")
_WORD = re.compile(r"[^\W\d_]+(?:'[^\W\d_]+)*|\d+|[^\w\s]")


class Sequences(InBatches):
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

    def batch_of(self, positions: Sequence[int]) -> Collated:
        """Return the batch of some records, a tuple of tensors."""
        """Inputs (R, T) and targets (R, T), int64."""
        sequences = self.tokens.index_select(0, torch.as_tensor(positions, dtype=torch.long)).long()
        return Collated((sequences[:, :-1].contiguous(), sequences[:, 1:].contiguous()))


def character_sequences(texts: Iterable[str], length: int = 80) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Encode texts as begin, characters, end; padded to a multiple of length + 1, and cut into pieces of that.

    Args:
        texts: The texts; typographic quotes and dashes become plain ones.
        length: T, of inputs and of targets.

    Returns:
        The pieces, (N, T + 1), and the number of pieces of each text.
    """
    unknown = len(CHARACTERS) + 1
    begin = unknown + 1
    end = unknown + 2
    # Latin-1 has one byte a character, so that a table of 256 entries numbers a whole text at once.
    number_of = np.full(256, unknown, np.uint8)
    number_of[np.frombuffer(CHARACTERS.encode("latin-1"), np.uint8)] = np.arange(1, unknown)
    no_piece = np.zeros((0, length + 1), np.uint8)  # numpy joins nothing of an empty list
    pieces = [no_piece]
    for text in texts:
        # A character that Latin-1 lacks becomes one that has no number either.
        encoded = _NOT_LATIN.sub("\0", text.translate(PLAIN)).encode("latin-1")
        tokens = np.concatenate([[begin], number_of[np.frombuffer(encoded, np.uint8)], [end]]).astype(np.uint8)
        pieces.append(np.pad(tokens, (0, -len(tokens) % (length + 1))).reshape(-1, length + 1))
    return np.concatenate(pieces), np.array([len(piece) for piece in pieces[1:]], np.int64)


def words(text: str) -> list[str]:
    """Split a text into words, numbers and signs, in lower case."""
    return _WORD.findall(text.translate(PLAIN).lower())


def by_frequency(counts: Mapping[str, int]) -> list[str]:
    """The most frequent first; those of equal frequency in the order of the alphabet."""
    return sorted(counts, key=lambda word: (-counts[word], word))


def read_vocabulary(path: Path, size: int = WORDS) -> list[str]:
    """Read a file that has a word at the beginning of each line, the most frequent first.

    Raises:
        DataError: There is no such file, it holds no word, or one twice.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"the vocabulary {path} cannot be read ({brief(error)}): give a file with one word per line."
        ) from error
    vocabulary = [line.split()[0].lower() for line in lines if line.strip()][:size]
    if not vocabulary:
        raise DataError(f"the vocabulary {path} contains no words.")
    word, count = Counter(vocabulary).most_common(1)[0]
    if count > 1:
        raise DataError(f"the vocabulary {path} contains the word {word!r} twice.")
    return vocabulary


def word_sequences(
    texts: Iterable[Sequence[str]],
    vocabulary: Sequence[str],
    length: int = 20,
    size: int = WORDS,
) -> NDArray[np.integer[Any]]:
    """Encode sentences as begin, words, end, cut at or padded to length + 1 tokens.

    A sentence with `length` words or more has no end, as in TensorFlow Federated.

    Args:
        texts: Words of each sentence.
        vocabulary: Vocabulary of at most `size` words; the n-th has number n (from 1).
        length: T, of inputs and of targets.
        size: Words that there are numbers for: unknown is size + 1, begin size + 2, end size + 3.

    Returns:
        (N, T + 1).
    """
    number_of = {word: number for number, word in enumerate(vocabulary, 1)}
    unknown = size + 1
    begin = size + 2
    end = size + 3
    rows = []
    for text in texts:
        row = [begin, *(number_of.get(word, unknown) for word in text[:length]), end]
        rows.append((row + [0] * length)[: length + 1])
    # Half the memory, where the numbers allow it.
    tokens: NDArray[np.integer[Any]] = np.array(rows, dtype=np.int16 if end < 2**15 else np.int32)
    return tokens.reshape(len(rows), length + 1)
