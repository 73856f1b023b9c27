"""`shakespeare_roles`: the next character that a role in Shakespeare's plays says.

The texts are Project Gutenberg's complete works (e-book 100). A user is a role of a play, from all 38 plays in the
three layouts that the edition of 2018 prints them in; names are taken as printed. (LEAF's rule, Caldas et al. 2018,
from which TensorFlow Federated's users come, knows one layout, and makes one user of roles of several plays.)
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import torch
from pydantic import Field

from dpbench.capabilities.users.dataset import UserDataset
from dpbench.capabilities.users.sources import UserData, by_users
from dpbench.data.noise import token_noise
from dpbench.data.texts import CHARACTER_TOKENS, Sequences, character_sequences
from dpbench.errors import DataError

Length = Annotated[int, Field(ge=1, le=10_000), "a whole number of tokens from 1 to 10000"]
Split = Literal["roles"]
Speeches = dict[str, list[str]]
"""Of each user, in their order."""

FILE = Path("shakespeare") / "pg100.txt"
TRAIN_SHARE = 0.9
"""Of a role's speeches, the first ones; at least one."""
_POEMS = ("SONNETS", "COMPLAINT", "PILGRIM", "PHOENIX", "LUCRECE", "VENUS")
_LAST_TITLE = "VENUS AND ADONIS"
_LAYOUTS = {
    "two blanks": re.compile(r"^  ([A-Z][A-Za-z .,'’\-]*?)\. (\S.*)"),
    "alone": re.compile(r"^\s{0,8}([A-Z][A-Z '’,\-]+)\.\s*$"),
    "margin": re.compile(r"^([A-Z][A-Za-z '’\-]*?)\. (\S.*)"),
}
_NO_ROLE = ("ACT", "SCENE", "EXIT", "EXEUNT", "ENTER")
_DIRECTIONS = ("[", "Enter", "Exit", "Exeunt", "ACT", "SCENE")


@by_users("shakespeare_roles")
def load_characters(root: Path, download: bool, split: Split = "roles", sequence_length: Length = 80) -> UserData:
    """Next character prediction: 1,147 roles, 62,196 training sequences of 80 characters, 8,805 for tests.

    The tokens are those of TensorFlow Federated's SHAKESPEARE: `dpbench.data.texts.character_sequences`. Counts are
    those of the edition of June 2018. The test sequences are the last tenth of each role's speeches.

    Args:
        root: Folder of the data sets; the book is `shakespeare/pg100.txt` in it.
        download: Not used: the book has to be there.
        split: "roles": a user is a role of a play, with two or more speeches.
        sequence_length: Characters of a sequence.
    """
    train, test = train_test(speeches_of_roles(read_book(root)))
    test_users = _sequences(test, sequence_length)
    return UserData(
        train=_sequences(train, sequence_length),
        test=test_users.examples,
        model_options={"vocabulary_size": CHARACTER_TOKENS},
        test_users=test_users,
        inputs={
            "sequence_length": sequence_length,
            "preparation": (
                "Encode texts by dpbench.data.texts.character_sequences with length=sequence_length; inputs are all "
                "tokens but the last."
            ),
        },
        noise_batch=partial(token_noise, length=sequence_length, vocabulary_size=CHARACTER_TOKENS),
        encode=lambda texts: character_sequences(texts, sequence_length)[0],
    )


def _sequences(speeches: Speeches, length: int) -> UserDataset:
    tokens, counts = character_sequences([speech for texts in speeches.values() for speech in texts], length)
    names = list(speeches)
    speakers = np.repeat(names, [len(texts) for texts in speeches.values()])
    return UserDataset(Sequences(torch.from_numpy(tokens)), np.repeat(speakers, counts), names)


def train_test(speeches: Speeches) -> tuple[Speeches, Speeches]:
    """The first nine tenths of each role's speeches (rounded down, at least one), and the last ones."""
    train: Speeches = {}
    test: Speeches = {}
    for user, texts in speeches.items():
        cut = max(1, int(TRAIN_SHARE * len(texts)))
        train[user] = texts[:cut]
        test[user] = texts[cut:]
    return train, test


def read_book(root: Path) -> list[str]:
    """Lines of the book.

    Raises:
        DataError: The file is absent, or not this book.
    """
    path = root / FILE
    if not path.is_file():
        raise DataError(
            f"there is no {path}: get Project Gutenberg's e-book number 100 (The Complete Works of William "
            f"Shakespeare) as plain text (UTF-8), and put it there as {FILE.name}."
        )
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read as UTF-8 text ({error}): get an intact copy.") from error
    return text.split("\n")


def works(lines: list[str]) -> dict[str, list[str]]:
    """Lines of each work, by its title in the list of contents.

    Raises:
        DataError: A part of the book is missing.
    """
    start = _find(lines, lambda line: line.startswith("*** START"), 0, "the line *** START OF ...")
    end = _find(lines, lambda line: line.startswith("*** END"), start, "the line *** END OF ...")
    contents = _find(lines, lambda line: line.strip() == "Contents", start, "the list of contents")
    last = _find(lines, lambda line: line.strip() == _LAST_TITLE, contents, f"the title {_LAST_TITLE}")
    titles = list(filter(None, map(str.strip, lines[contents + 1 : last + 1])))
    places = [last]
    for title in titles:
        # Titles in the list of contents have other apostrophes than those above the works.
        is_title = partial(_same_letters, title)
        places.append(_find(lines[:end], is_title, places[-1] + 1, f"the work {title}"))
    places.append(end)
    return {title.replace("’", "'"): lines[places[i] : places[i + 1]] for i, title in enumerate(titles, 1)}


def _find(
    lines: list[str],
    is_wanted: Callable[[str], bool],
    start: int,
    subject: str,
) -> int:
    """Position of the first line from `start` on that is wanted."""
    for position in range(start, len(lines)):
        if is_wanted(lines[position]):
            return position
    raise DataError(
        f"{FILE} lacks {subject}: it is cut short or another book; get Project Gutenberg's e-book number 100 again."
    )


def _same_letters(title: str, line: str) -> bool:
    return _letters(line) == _letters(title)


def _letters(line: str) -> str:
    return re.sub(r"[^A-Z0-9 ]", "", line.upper()).strip()


def _is_poem(title: str) -> bool:
    return any(word in title for word in _POEMS)


def speeches_of_roles(lines: list[str]) -> Speeches:
    """Speeches of every role with two or more, by "PLAY: ROLE"."""
    speeches: Speeches = {}
    for title, work in works(lines).items():
        if _is_poem(title):
            continue
        for role, texts in _speeches_in_play(work).items():
            speeches[f"{title}: {role}"] = list(filter(None, texts))
    if not any(speeches.values()):
        raise DataError(f"no speeches were found in {FILE}: get Project Gutenberg's e-book number 100 as plain text.")
    return {user: texts for user, texts in speeches.items() if len(texts) >= 2}


def _speeches_in_play(lines: list[str]) -> Speeches:
    """Of a play, by role, in the layout that more lines have than any other."""
    layout = max(_LAYOUTS, key=lambda name: sum(map(bool, map(_LAYOUTS[name].match, lines))))
    speeches: Speeches = {}
    role = None
    for line in lines:
        match = _LAYOUTS[layout].match(line)
        if match and not match[1].upper().startswith(_NO_ROLE):
            role = match[1].upper().strip()
            speeches.setdefault(role, []).append("" if layout == "alone" else match[2])
        elif role and _is_spoken(line, layout):
            speeches[role][-1] = f"{speeches[role][-1]} {line.strip()}".lstrip()
    return speeches


def _is_spoken(line: str, layout: str) -> bool:
    """Return whether a line continues a speech, and is no stage direction."""
    text = line.strip()
    if not text or text.startswith(_DIRECTIONS):
        return False
    return layout != "two blanks" or line.startswith("    ")
