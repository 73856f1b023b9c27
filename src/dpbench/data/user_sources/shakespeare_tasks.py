"""`shakespeare_roles` and `shakespeare_words`: the next character, and the next word, of roles in plays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from dpbench.data.sequences import (
    CHARACTER_TOKENS,
    WORDS,
    Sequences,
    character_sequences,
    most_frequent,
    read_vocabulary,
    sentences,
    word_sequences,
    words,
)
from dpbench.data.user_data import UserData, by_users
from dpbench.data.user_sources import shakespeare
from dpbench.data.users import UserDataset

Length = Annotated[int, Field(ge=1, le=10_000), "a whole number of tokens from 1 to 10000"]
Split = Literal["roles", "leaf"]
Tokens = tuple[NDArray[Any], NDArray[np.int64]]


@by_users("shakespeare_roles")
def load_characters(
    root: Path,
    download: bool,
    split: Split = "roles",
    sequence_length: Length = 80,
) -> UserData:
    """Next character prediction: 1,147 roles, 62,196 training sequences of 80 characters, 8,805 for tests.

    The tokens are those of TensorFlow Federated's SHAKESPEARE: `dpbench.data.sequences.character_sequences`. Counts are
    those of the edition of June 2018. The test sequences are the last tenth of each role's speeches.

    Args:
        root: Folder of the data sets; the book is `shakespeare/pg100.txt` in it.
        download: Not used: the book has to be there.
        split: "roles": a user is a role of a play, with two or more speeches. "leaf": LEAF's rule, 692 users.
        sequence_length: Characters of a sequence.
    """
    encode = partial(character_sequences, length=sequence_length)
    return _split(
        _speeches(shakespeare.read_book(root), split),
        encode,
        CHARACTER_TOKENS,
        sequence_length,
    )


@by_users("shakespeare_words")
def load_words(
    root: Path,
    download: bool,
    split: Split = "roles",
    sequence_length: Length = 20,
    vocabulary: str = "poems",
) -> UserData:
    """Next word prediction: 1,147 roles, 54,990 training sentences, 8,161 for tests.

    The tokens are those of TensorFlow Federated's Stack Overflow next word prediction
    (`dpbench.data.sequences.word_sequences`): 10,004 numbers, whatever the vocabulary holds.

    Args:
        root: Folder of the data sets; the book is `shakespeare/pg100.txt` in it.
        download: Not used: the book has to be there.
        split: As for `shakespeare_roles`.
        sequence_length: Words of a sentence; longer ones are cut.
        vocabulary: "poems": all 7,189 words of the sonnets and the long poems, which no user speaks: it says nothing of
            the users, and covers 90 % of their words. "speeches": the 10,000 most frequent words of the training
            speeches, 97 % of them. These are computed from the data that are to be protected, without noise: the
            ledger's epsilon holds only for those who take the vocabulary as public, as the papers do with theirs. Else
            the path of a file of words.
    """
    lines = shakespeare.read_book(root)
    speeches = _speeches(lines, split)
    if vocabulary == "poems":
        known = most_frequent(words(line) for line in shakespeare.poems(lines))
    elif vocabulary == "speeches":
        train, _ = shakespeare.train_test(speeches)
        known = most_frequent(words(speech) for own in train.values() for speech in own)
    else:
        known = read_vocabulary(Path(vocabulary).expanduser())

    def encode(texts: Sequence[str]) -> Tokens:
        split_texts = [sentences(text) for text in texts]
        tokens = word_sequences(
            [sentence for text in split_texts for sentence in text],
            known,
            sequence_length,
        )
        return tokens, np.array([len(text) for text in split_texts], dtype=np.int64)

    return _split(speeches, encode, WORDS + 4, sequence_length)


def _speeches(lines: list[str], split: Split) -> shakespeare.Speeches:
    return shakespeare.speeches_of_roles(lines) if split == "roles" else shakespeare.speeches_by_leaf(lines)


def _split(
    speeches: shakespeare.Speeches,
    encode: Any,
    vocabulary_size: int,
    length: int,
) -> UserData:
    """Training and test sequences of users, by their speeches."""
    train, test = (_sequences(part, encode) for part in shakespeare.train_test(speeches))
    return UserData(
        train=train,
        test=test.examples,
        held_out="rows",
        model_options={"vocabulary_size": vocabulary_size},
        test_users=test,
        noise_batch=partial(_noise, length=length, vocabulary_size=vocabulary_size),
    )


def _sequences(speeches: Mapping[str, Sequence[str]], encode: Any) -> UserDataset:
    tokens, counts = encode([speech for own in speeches.values() for speech in own])
    names = list(speeches)
    of_speech = np.repeat(np.arange(len(names)), [len(own) for own in speeches.values()])
    users = np.asarray(names)[np.repeat(of_speech, counts)]
    return UserDataset(Sequences(torch.from_numpy(tokens)), users, names)


def _noise(
    size: int,
    generator: torch.Generator,
    length: int,
    vocabulary_size: int,
) -> tuple[Tensor, Tensor]:
    """Random tokens, inputs and targets (size, length), without padding."""
    tokens = torch.randint(1, vocabulary_size, (size, length + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]
