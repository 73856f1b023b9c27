"""Texts with labels or tags as tensors: numbers of words, and bags of words.

Bags follow TensorFlow Federated's preprocessing for tag prediction on Stack Overflow (Reddi et al. 2021, "Adaptive
Federated Optimization", appendix C), so that their models fit: 10,000 features.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from dpbench.data.records import Collated, InBatches
from dpbench.data.texts import WORDS, words
from dpbench.errors import ConfigurationError, brief

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix


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
        texts: The texts.
        vocabulary: Vocabulary of at most `size` words; the n-th has number n (from 1), all others have size + 1.
        length: T.
        size: Largest number of a known word.

    Returns:
        (N, T).
    """
    numbers = {word: number for number, word in enumerate(vocabulary or (), 1)}

    def number_of(word: str) -> int:
        if vocabulary is not None:
            return numbers.get(word, size + 1)
        # Not Python's own hash, which is another one in each process.
        digest = hashlib.blake2b(word.encode(), digest_size=8).digest()
        return int.from_bytes(digest) % size + 1

    tokens = [list(map(number_of, words(text)[:length])) for text in texts]
    rows = [row + [0] * (length - len(row)) for row in tokens]
    return np.array(rows, np.int64).reshape(len(rows), length)


BYTES = "bytes"
"""The tokenizer that knows no vocabulary: bytes of UTF-8, and an end."""


@cache
def _pretrained_tokenizer(name: str) -> Any:
    try:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(name)
    except ImportError as error:
        raise ConfigurationError('A tokenizer needs transformers: pip install "dpbench-lightning[hf]".') from error
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"data.options.tokenizer={name} cannot be loaded ({brief(error)}): name a folder with its files, or bytes."
        ) from error


class Tokenizer:
    """Token numbers of texts, from 1 on; 0 is padding.

    Args:
        name: "bytes", or a folder or name of a tokenizer of transformers, which must be of public texts.

    Attributes:
        count: Numbers that tokens may have, with that of padding.

    Raises:
        ConfigurationError: There is no such tokenizer, or transformers is not installed.
    """

    def __init__(self, name: str) -> None:
        self._pretrained: Any = None
        self.count = 256 + 2
        if name == BYTES:
            return
        self._pretrained = _pretrained_tokenizer(name)
        self.count = len(self._pretrained) + 1

    def rows(self, texts: Iterable[str], length: int) -> NDArray[np.int32]:
        """Encode texts, each cut at or padded to a length: a text is one row, and none is joined to another.

        Args:
            texts: The texts.
            length: Tokens of a row.

        Returns:
            (N, length).
        """
        rows = np.zeros((0, length), np.int32)
        encoded = [self.encoded(text)[:length] for text in texts]
        if encoded:
            rows = np.stack([np.pad(np.array(ids, np.int32) + 1, (0, length - len(ids))) for ids in encoded])
        return rows

    def encoded(self, text: str) -> list[int]:
        """The tokenizer's own numbers of a text, from 0 on, with an end where there is one."""
        if self._pretrained is None:
            return [*text.encode(), 256]
        ids: list[int] = self._pretrained(text)["input_ids"]
        end = self._pretrained.eos_token_id
        return ids if end is None or ids[-1:] == [end] else [*ids, end]

    def text(self, row: Sequence[int]) -> str:
        """The text of a row, up to its end.

        Args:
            row: Numbers as in `rows`.
        """
        ids = [number - 1 for number in row if number]
        if self._pretrained is None:
            return bytes(ids[: ids.index(256)] if 256 in ids else ids).decode(errors="replace")
        text: str = self._pretrained.decode(ids, skip_special_tokens=True)
        return text


class BagsOfWords(InBatches):
    """Texts as the share of each word of a vocabulary, with their tags; only nonzero shares are in memory.

    Args:
        features: (N, words), of float32.
        targets: (N, tags), of ones.
    """

    def __init__(self, features: csr_matrix, targets: csr_matrix) -> None:
        if features.shape[0] != targets.shape[0]:
            raise ConfigurationError(
                f"features and targets differ in length: {features.shape[0]} texts, tags of {targets.shape[0]}."
            )
        self.features = features
        self.targets = targets

    def __len__(self) -> int:
        return int(self.features.shape[0])

    def batch_of(self, positions: Sequence[int]) -> Collated:
        """Return the batch of some records, a tuple of tensors."""
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
    num_features: int,
    num_tags: int,
) -> BagsOfWords:
    """Encode texts as the share that each word has of all words of the text, unknown ones counted too.

    So are the features of tag prediction in TensorFlow Federated: the mean of the words' one-hot vectors.

    Args:
        texts: Words of each text.
        tags: Tags of each text; those that are not known are left out.
        vocabulary: Words, at most `num_features`.
        known_tags: At most `num_tags`.
        num_features: Columns of the features.
        num_tags: Columns of the targets.
    """
    features = []
    for text in texts:
        counts = Counter(text)
        features.append({word: count / len(text) for word, count in counts.items()})
    targets = [dict.fromkeys(marks, 1.0) for marks in tags]
    return BagsOfWords(
        _sparse(features, vocabulary, num_features),
        _sparse(targets, known_tags, num_tags),
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
