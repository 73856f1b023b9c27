"""Shakespeare's plays by role: the parts of the book, the counts of the real one, tokens, and clear errors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from dpbench.capabilities.users import shakespeare
from dpbench.capabilities.users.sources import UserData, user_source
from dpbench.data.texts import (
    CHARACTER_TOKENS,
    CHARACTERS,
    Sequences,
    character_sequences,
    read_vocabulary,
)
from dpbench.errors import ConfigurationError, DataError

BOOK = """\ufeff*** START OF THIS BOOK ***
by William Shakespeare
      Contents
               THE SONNETS
               KING JOHN
               THE TRAGEDY OF HAMLET
               THE COMEDY OF ERRORS
               VENUS AND ADONIS

THE SONNETS

From fairest creatures we desire increase,

KING JOHN

by William Shakespeare
ACT I. SCENE 1.
  KING JOHN. Now, say, Chatillon, what would
    France with us?
    Exit CHATILLON
  CHATILLON. Thus, after greeting.
  KING JOHN. Silence, good mother.
  KING JOHN. A second time.

THE TRAGEDY OF HAMLET

HAMLET.
[_Aside._]
A little more than kin.

And less than kind.

HAMLET.
Not so, my lord.

THE COMEDY OF ERRORS

AEGEON. Yet this my comfort
when your words are done,
DUKE. Say, in brief.
AEGEON. A heavier task.

VENUS AND ADONIS

Even as the sun with purple-coloured face
*** END OF THIS BOOK ***
"""


def book_at(root: Path, text: str = BOOK) -> Path:
    (root / "shakespeare").mkdir(parents=True, exist_ok=True)
    (root / "shakespeare" / "pg100.txt").write_text(text, encoding="utf-8")
    return root


def test_speeches_of_three_layouts(tmp_path: Path) -> None:
    lines = shakespeare.read_book(book_at(tmp_path))
    assert shakespeare.speeches_of_roles(lines) == {  # Chatillon and the duke say one thing each
        "KING JOHN: KING JOHN": [
            "Now, say, Chatillon, what would France with us?",
            "Silence, good mother.",
            "A second time.",
        ],
        "THE TRAGEDY OF HAMLET: HAMLET": ["A little more than kin. And less than kind.", "Not so, my lord."],
        "THE COMEDY OF ERRORS: AEGEON": ["Yet this my comfort when your words are done,", "A heavier task."],
    }


def read(tokens: torch.Tensor) -> str:
    names = {0: "·", 87: "?", 88: "<", 89: ">"}
    return "".join(names.get(int(t), CHARACTERS[(int(t) - 1) % 86]) for t in tokens)


def test_characters_are_those_of_tensorflow_federated() -> None:
    assert len(set(CHARACTERS)) == 86 and CHARACTER_TOKENS == 90
    tokens, pieces = character_sequences(["d’oh—ø§中", "", "abcdef"], length=7)
    assert tokens.dtype == np.uint8 and tokens.shape == (4, 8) and pieces.tolist() == [2, 1, 1]
    assert [read(torch.from_numpy(row)) for row in tokens] == ["<d'oh-??", "?>······", "<>······", "<abcdef>"]
    inputs, targets = Sequences(torch.from_numpy(tokens)).__getitems__([3, 0]).batch
    assert inputs.dtype == targets.dtype == torch.int64
    assert (read(inputs[0]), read(targets[0])) == ("<abcdef", "abcdef>")


def test_vocabulary_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "words.txt"
    path.write_text("The 300\nking 20\n\nking's 5\n")
    assert read_vocabulary(path) == ["the", "king", "king's"] and read_vocabulary(path, 1) == ["the"]
    for text, message in (("king\nKing\n", r"words\.txt contains the word 'king' twice"), ("\n", "contains no words")):
        path.write_text(text)
        with pytest.raises(DataError, match=message):
            read_vocabulary(path)
    with pytest.raises(DataError, match=r"none\.txt cannot be read"):
        read_vocabulary(tmp_path / "none.txt")


def load(root: Path, **options: object) -> UserData:
    return user_source("shakespeare_roles").read(root, False, options)


def test_characters_by_role(tmp_path: Path) -> None:
    data = load(book_at(tmp_path), sequence_length=10)
    assert data.train.names[:2] == ["KING JOHN: KING JOHN", "THE TRAGEDY OF HAMLET: HAMLET"]
    assert data.train.sizes.tolist() == [5 + 3, 5, 5]  # of 47 and 21, 43, and 45 characters and two marks, by 11
    inputs, targets = data.train.batch(1, [0, 1])
    assert read(inputs[0]) == "<A little " and read(targets[0]) == "A little m"
    assert read(inputs[1]) == "ore than k"  # the first of a piece is nobody's target, as in TFF
    assert data.model_options == {"vocabulary_size": 90}
    assert data.test_users is not None and data.test_users.names == data.train.names
    assert read(data.test_users.batch(1, [0])[0][0]) == "<Not so, m"


@pytest.mark.parametrize(
    ("book", "message"),
    [
        (
            BOOK.replace("AEGEON. ", "AEGEON ").partition("THE COMEDY OF ERRORS\n\n")[0] + "*** END OF",
            "lacks the work THE",
        ),
        ("<html>404</html>", r"lacks the line \*\*\* START"),
        (BOOK.replace(". ", " ").replace("HAMLET.\n", ""), "no speeches were found"),
    ],
)
def test_other_books(tmp_path: Path, book: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        load(book_at(tmp_path, book))


def test_clear_errors(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no .*pg100\.txt: get Project Gutenberg's e-book number 100 .* put it there"):
        load(tmp_path)
    (book_at(tmp_path) / "shakespeare" / "pg100.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="cannot be read as UTF-8"):
        load(tmp_path)
    with pytest.raises(ConfigurationError, match="sequence_length must be a whole number of tokens from 1 to 10000"):
        load(tmp_path, sequence_length=0)


@pytest.mark.slow
def test_the_real_book(data_folder: Path) -> None:
    """The facts' 62,343 and 8,822 sequences counted bytes: a curly quote is three."""
    data = load(data_folder)
    assert len({str(user).partition(":")[0] for user in data.train.names}) == 38
    tokens = data.train.examples.tokens  # type: ignore[attr-defined]
    assert (len(data.train), len(tokens), len(data.test)) == (1147, 62_196, 8_805)  # type: ignore[arg-type]
    hamlet = shakespeare.speeches_of_roles(shakespeare.read_book(data_folder))
    assert hamlet["THE TRAGEDY OF HAMLET, PRINCE OF DENMARK: HAMLET"][1] == "Ay, madam, it is common."
