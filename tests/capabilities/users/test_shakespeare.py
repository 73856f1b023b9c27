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
    word_sequences,
    words,
)
from dpbench.errors import ConfigurationError, DataError

BOOK = """\ufeff
*** START OF THIS BOOK ***
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


def test_the_first_nine_tenths_are_for_training() -> None:
    speeches = {"many": [str(i) for i in range(25)], "two": ["a", "b"]}
    train, test = shakespeare.train_test(speeches)
    assert (len(train["many"]), train["two"], test["two"]) == (22, ["a"], ["b"])
    assert {user: train[user] + test[user] for user in speeches} == speeches


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
    one, other = Sequences(torch.from_numpy(tokens))[3]
    assert torch.equal(one, inputs[0]) and torch.equal(other, targets[0])


def test_sentences_of_words() -> None:
    assert words("Who’s there? ANSWER me.") == ["who's", "there", "?", "answer", "me", "."]
    tokens = word_sequences([["a", "b"], ["a", "x", "b", "a", "a"], ["b", "b", "b"]], ["a", "b"], length=4)
    pad, oov, bos, eos = 0, 10_001, 10_002, 10_003
    assert tokens.tolist() == [[bos, 1, 2, eos, pad], [bos, 1, oov, 2, 1], [bos, 2, 2, 2, eos]]


def test_vocabulary_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "words.txt"
    path.write_text("The 300\nking 20\n\nking's 5\n")
    assert read_vocabulary(path) == ["the", "king", "king's"]
    assert read_vocabulary(path, 1) == ["the"]
    path.write_text("king\nKing\n")
    with pytest.raises(DataError, match=r"words\.txt holds the word 'king' twice"):
        read_vocabulary(path)
    path.write_text("\n")
    with pytest.raises(DataError, match="contains no words"):
        read_vocabulary(path)
    with pytest.raises(DataError, match=r"none\.txt cannot be read"):
        read_vocabulary(tmp_path / "none.txt")


def load(root: Path, name: str, **options: object) -> UserData:
    return user_source(name).read(root, False, options)


def test_characters_by_role(tmp_path: Path) -> None:
    data = load(book_at(tmp_path), "shakespeare_roles", sequence_length=10)
    assert data.train.names == [
        "KING JOHN: KING JOHN", "THE TRAGEDY OF HAMLET: HAMLET", "THE COMEDY OF ERRORS: AEGEON"
    ]  # fmt: skip
    assert data.train.sizes.tolist() == [
        -(-(47 + 2) // 11) + -(-(21 + 2) // 11),
        -(-(43 + 2) // 11),
        -(-(45 + 2) // 11),
    ]
    inputs, targets = data.train.batch(1, [0, 1])
    assert read(inputs[0]) == "<A little " and read(targets[0]) == "A little m"
    assert read(inputs[1]) == "ore than k"  # the first of a piece is nobody's target, as in TFF
    assert data.model_options == {"vocabulary_size": 90}
    assert data.test_users is not None and data.test_users.names == data.train.names
    assert read(data.test_users.batch(1, [0])[0][0]) == "<Not so, m"
    assert data.noise_batch is not None
    noise, after = data.noise_batch(3, torch.Generator().manual_seed(0))
    assert noise.shape == after.shape == (3, 10) and noise.min() >= 1 and noise.max() < 90


def test_clear_errors(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no .*pg100\.txt: get Project Gutenberg's e-book number 100 .* put it there"):
        load(tmp_path, "shakespeare_roles")
    short = BOOK[: BOOK.index("THE COMEDY OF ERRORS\n\nAEGEON")] + "*** END OF THIS BOOK ***"
    with pytest.raises(DataError, match="lacks the work THE COMEDY OF ERRORS: it is cut short or another book"):
        load(book_at(tmp_path, short), "shakespeare_roles")
    with pytest.raises(DataError, match=r"lacks the line \*\*\* START"):
        load(book_at(tmp_path, "<html>404</html>"), "shakespeare_roles")
    with pytest.raises(DataError, match="no speeches were found"):
        load(book_at(tmp_path, BOOK.replace(". ", " ").replace("HAMLET.\n", "")), "shakespeare_roles")
    (tmp_path / "shakespeare" / "pg100.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="cannot be read as UTF-8"):
        load(tmp_path, "shakespeare_roles")
    with pytest.raises(ConfigurationError, match="sequence_length must be a whole number of tokens from 1 to 10000"):
        load(tmp_path, "shakespeare_roles", sequence_length=0)
    with pytest.raises(ConfigurationError, match="split must be"):
        load(tmp_path, "shakespeare_roles", split="plays")


def test_the_real_book(data_folder: Path) -> None:
    lines = shakespeare.read_book(data_folder)
    speeches = shakespeare.speeches_of_roles(lines)
    train, test = shakespeare.train_test(speeches)
    assert len({user.partition(":")[0] for user in speeches}) == 38
    assert (len(speeches), sum(map(len, train.values())), sum(map(len, test.values()))) == (1147, 26_905, 3_622)
    hamlet = train["THE TRAGEDY OF HAMLET, PRINCE OF DENMARK: HAMLET"]
    assert hamlet[:2] == ["Not so, my lord, I am too much i’ the sun.", "Ay, madam, it is common."]
    assert any(speech.startswith("To be, or not to be, that is the question") for speech in hamlet)


@pytest.mark.parametrize(
    ("name", "options", "users", "examples", "unknown"),
    [  # the facts' 62,343 and 8,822 sequences counted bytes: a curly quote is three
        ("shakespeare_roles", {}, 1147, (62_196, 8_805), (0, 1e-5)),
    ],
)
def test_the_real_counts(
    name: str, options: dict[str, object], users: int, examples: tuple[int, int], unknown: tuple[float, float],
    data_folder: Path,
) -> None:  # fmt: skip
    data = load(data_folder, name, **options)
    tokens = data.train.examples.tokens  # type: ignore[attr-defined]
    assert len(data.train) == users and (len(tokens), len(data.test)) == examples  # type: ignore[arg-type]
    assert data.train.sizes.min() >= 1 and data.train.sizes.sum() == examples[0]
    assert int(tokens.max()) == data.model_options["vocabulary_size"] - 1
    oov = data.model_options["vocabulary_size"] - 3
    share = float((tokens == oov).sum() / (tokens > 0).sum())
    assert unknown[0] <= share <= unknown[1]
