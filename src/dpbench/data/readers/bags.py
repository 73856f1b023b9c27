"""Texts as bags of words with tags, sparse in memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from dpbench.data.records import Collated
from dpbench.errors import ConfigurationError

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix


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
        features, targets = self.__getitems__([range(len(self))[position]]).batch
        return features[0], targets[0]

    def __getitems__(self, positions: Sequence[int]) -> Collated:
        """Shares (R, words) and tags (R, tags), 0 or 1, float32."""
        index = np.asarray(positions, dtype=np.int64)
        return Collated((_dense(self.features, index), _dense(self.targets, index)))


def _dense(rows: csr_matrix, index: Any) -> Tensor:
    return torch.from_numpy(rows[index].toarray())


def bags(
    texts: Sequence[Sequence[str]],
    tags: Sequence[Sequence[str]],
    vocabulary: Sequence[str],
    known_tags: Sequence[str],
    width: int | None = None,
    height: int | None = None,
) -> BagsOfWords:
    """Texts as bags: of each word the share that it has of all words of the text, unknown ones counted too.

    So are the features of tag prediction in TensorFlow Federated: the mean of the words' one-hot vectors.

    Args:
        texts: Words of each text.
        tags: Tags of each text; those that are not known are left out.
        vocabulary: Words, at most `width`.
        known_tags: At most `height`.
        width: Number of features; None: as many as words.
        height: Number of targets; None: as many as known tags.
    """
    word_numbers = {word: number for number, word in enumerate(vocabulary)}
    tag_numbers = {tag: number for number, tag in enumerate(known_tags)}
    shares = [
        {word_numbers[word]: count / len(text) for word, count in Counter(text).items() if word in word_numbers}
        for text in texts
    ]
    marks = [dict.fromkeys((tag_numbers[tag] for tag in own if tag in tag_numbers), 1.0) for own in tags]
    return BagsOfWords(_sparse(shares, width or len(vocabulary)), _sparse(marks, height or len(known_tags)))


def _sparse(rows: Sequence[dict[int, float]], width: int) -> csr_matrix:
    from scipy.sparse import csr_matrix

    ends = np.concatenate([[0], np.cumsum([len(row) for row in rows])])
    places = np.array([place for row in rows for place in row], dtype=np.int32)
    values = np.array([value for row in rows for value in row.values()], dtype=np.float32)
    return csr_matrix((values, places, ends), shape=(len(rows), width))
