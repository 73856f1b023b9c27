"""Texts as tensors: sequences of characters or words, whose targets are the tokens that come next; bags of words.

All follow TensorFlow Federated's preprocessing for SHAKESPEARE and for next word and tag prediction on Stack Overflow
(Reddi et al. 2021, "Adaptive Federated Optimization", appendix C), so that their models fit: 90 and 10,004 token
numbers, and 10,000 features.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from dpbench.data.records import Collated
from dpbench.errors import ConfigurationError, DataError, brief

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix

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
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+")


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
        sequence = self.tokens[position].long()
        return sequence[:-1], sequence[1:]

    def __getitems__(self, positions: Sequence[int]) -> Collated:
        """Inputs (R, T) and targets (R, T), int64."""
        sequences = self.tokens.index_select(0, torch.as_tensor(positions, dtype=torch.long)).long()
        return Collated((sequences[:, :-1].contiguous(), sequences[:, 1:].contiguous()))


def character_sequences(texts: Iterable[str], length: int = 80) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Encode texts as begin, characters, end; padded to a multiple of length + 1, and cut into pieces of that.

    Args:
        texts: As they are; typographic quotes and dashes become plain ones.
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
    pieces: list[NDArray[np.uint8]] = []
    for text in texts:
        # A character that Latin-1 lacks becomes one that has no number either.
        encoded = _NOT_LATIN.sub("\0", text.translate(PLAIN)).encode("latin-1")
        count = -(-(len(encoded) + 2) // (length + 1))  # rounded up; begin and end are two tokens more
        tokens = np.zeros(count * (length + 1), np.uint8)
        tokens[0] = begin
        tokens[1 : 1 + len(encoded)] = number_of[np.frombuffer(encoded, np.uint8)]
        tokens[1 + len(encoded)] = end
        pieces.append(tokens.reshape(count, length + 1))
    counts = np.array([len(piece) for piece in pieces], dtype=np.int64)
    # Numpy joins nothing of an empty list: without texts there are no pieces, of the same length.
    no_piece = np.zeros((0, length + 1), np.uint8)
    return np.concatenate([no_piece, *pieces]), counts


def words(text: str) -> list[str]:
    """Split a text into words, numbers and signs, in lower case."""
    return _WORD.findall(text.translate(PLAIN).lower())


def sentences(text: str) -> list[list[str]]:
    """Split a text into the words of each sentence, which ends with a full stop, question mark or exclamation mark."""
    return [sentence for sentence in map(words, _SENTENCE_END.split(text.strip())) if sentence]


def by_frequency(counts: Mapping[str, int]) -> list[str]:
    """The most frequent first; those of equal frequency in the order of the alphabet."""
    return sorted(counts, key=lambda word: (-counts[word], word))


def most_frequent(texts: Iterable[Iterable[str]], size: int = WORDS) -> list[str]:
    """The most frequent words, those of equal frequency in the order of the alphabet.

    This is a statistic of its texts that no noise was added to: take it from texts that are public.
    """
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(text)
    return by_frequency(counts)[:size]


def read_vocabulary(path: Path, size: int = WORDS) -> list[str]:
    """Read a file that has a word at the beginning of each line, the most frequent first.

    Raises:
        DataError: There is no such file, it holds no word, or one twice.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"the vocabulary {path} cannot be read ({brief(error)}): give a file of a word a line."
        ) from error
    vocabulary = [line.split()[0].lower() for line in lines if line.strip()][:size]
    if not vocabulary:
        raise DataError(f"the vocabulary {path} contains no words.")
    word, count = Counter(vocabulary).most_common(1)[0]
    if count > 1:
        raise DataError(f"the vocabulary {path} holds the word {word!r} twice.")
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
        vocabulary: At most `size` words; the n-th has number n (from 1).
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


def labeled_words(
    texts: Iterable[str],
    vocabulary: Sequence[str] | None = None,
    length: int = 100,
    size: int = WORDS,
) -> NDArray[np.int64]:
    """Encode the words of texts, cut at or padded with 0 to a length.

    Without a vocabulary, which would be a statistic of the texts that no noise was added to, a word's number is a hash
    of the word: a few rare words share one.

    Args:
        texts: As they are.
        vocabulary: At most `size` words; the n-th has number n (from 1), all others have size + 1.
        length: T.
        size: Largest number of a known word.

    Returns:
        (N, T).
    """
    unknown = size + 1
    number_of = {word: number for number, word in enumerate(vocabulary or (), 1)}
    rows = []
    for text in texts:
        row = []
        for word in words(text)[:length]:
            if vocabulary is None and word not in number_of:
                # Not Python's own hash, which is another one in each process.
                digest = hashlib.blake2b(word.encode(), digest_size=8).digest()
                number_of[word] = int.from_bytes(digest) % size + 1
            row.append(number_of.get(word, unknown))
        rows.append(row + [0] * (length - len(row)))
    return np.array(rows, np.int64).reshape(len(rows), length)


class BagsOfWords(Dataset[tuple[Tensor, Tensor]]):
    """Texts as the share of each word of a vocabulary, with their tags; in memory only what is not zero.

    Args:
        features: (N, words), of float32.
        targets: (N, tags), of ones.
    """

    def __init__(self, features: csr_matrix, targets: csr_matrix) -> None:
        if features.shape[0] != targets.shape[0]:
            raise ConfigurationError(f"{features.shape[0]} texts have the tags of {targets.shape[0]}.")
        self.features = features
        self.targets = targets

    def __len__(self) -> int:
        return int(self.features.shape[0])

    def __getitem__(self, position: int) -> tuple[Tensor, Tensor]:
        """Shares (words,) and tags (tags,), 0 or 1, float32."""
        # The range counts a negative position from the end, and raises IndexError, by which an iteration ends.
        features, targets = self.__getitems__([range(len(self))[position]]).batch
        return features[0], targets[0]

    def __getitems__(self, positions: Sequence[int]) -> Collated:
        """Shares (R, words) and tags (R, tags), 0 or 1, float32."""
        index = np.asarray(positions, dtype=np.int64)
        features = torch.from_numpy(self.features[index].toarray())
        targets = torch.from_numpy(self.targets[index].toarray())
        return Collated((features, targets))


def bags_of_words(
    texts: Sequence[Sequence[str]],
    tags: Sequence[Sequence[str]],
    vocabulary: Sequence[str],
    known_tags: Sequence[str],
    num_features: int | None = None,
    num_tags: int | None = None,
) -> BagsOfWords:
    """Encode texts as the share that each word has of all words of the text, unknown ones counted too.

    So are the features of tag prediction in TensorFlow Federated: the mean of the words' one-hot vectors.

    Args:
        texts: Words of each text.
        tags: Tags of each text; those that are not known are left out.
        vocabulary: Words, at most `num_features`.
        known_tags: At most `num_tags`.
        num_features: Columns of the features; None: as many as words.
        num_tags: Columns of the targets; None: as many as known tags.
    """
    features = []
    for text in texts:
        counts = Counter(text)
        features.append({word: count / len(text) for word, count in counts.items()})
    targets = [dict.fromkeys(marks, 1.0) for marks in tags]
    return BagsOfWords(
        _sparse(features, vocabulary, num_features or len(vocabulary)),
        _sparse(targets, known_tags, num_tags or len(known_tags)),
    )


def _sparse(rows: Sequence[Mapping[str, float]], columns: Sequence[str], width: int) -> csr_matrix:
    """A matrix of rows {column: value}, of which only those with known columns are taken."""
    from scipy.sparse import csr_matrix

    # The three arrays of the format: values, their columns, and where each row ends.
    number_of = {column: number for number, column in enumerate(columns)}
    places: list[int] = []
    values: list[float] = []
    ends = [0]
    for row in rows:
        for column, value in row.items():
            if column in number_of:
                places.append(number_of[column])
                values.append(value)
        ends.append(len(places))
    matrix = (np.array(values, np.float32), np.array(places, np.int32), np.array(ends))
    return csr_matrix(matrix, shape=(len(rows), width))
