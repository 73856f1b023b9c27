"""Who says what in Shakespeare's plays: speeches by role, from Project Gutenberg's complete works (e-book 100).

Two splits. `roles`: a user is a role of a play, from all 38 plays in the three layouts that the edition of 2018 prints
them in; names are taken as printed. `leaf`: LEAF's rule (Caldas et al. 2018), from which TensorFlow Federated's users
come. It knows one layout and finds plays by the line "by William Shakespeare"; where that line is missing, roles of
several plays that have the same name become one user.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

from dpbench.errors import DataError

Speeches = dict[str, list[str]]
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
_LEAF_NAME = re.compile(r"^  ([a-zA-Z][a-zA-Z ]*)\. (.*)")
_LEAF_GOES_ON = re.compile(r"^    (.*)")
_LEAF_LINES = 124_195  # LEAF reads no further
_LEAF_TITLE_LINES = range(2, 7)  # above "by William Shakespeare"


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
    at = _find(lines, lambda line: line.strip() == "Contents", start, "the list of contents")
    last = _find(lines, lambda line: line.strip() == _LAST_TITLE, at, f"the title {_LAST_TITLE}")
    titles = [line.strip() for line in lines[at + 1 : last + 1] if line.strip()]
    starts = []
    at = last
    for title in titles:
        at = _find(lines[:end], partial(_is_title, title=title), at + 1, f"the work {title}")
        starts.append(at)
    return {
        title.replace("’", "'"): lines[first:behind]
        for title, first, behind in zip(titles, starts, [*starts[1:], end], strict=True)
    }


def poems(lines: list[str]) -> list[str]:
    """Lines of the works that no role speaks: the sonnets and the long poems."""
    return [line for title, own in works(lines).items() if _is_poem(title) for line in own[1:]]


def speeches_of_roles(lines: list[str]) -> Speeches:
    """Speeches of every role with two or more, by "PLAY: ROLE"."""
    spoken: Speeches = {}
    for title, own in works(lines).items():
        if not _is_poem(title):
            spoken |= {f"{title}: {role}": speeches for role, speeches in _speeches(own).items()}
    return _with_two(spoken)


def _speeches(lines: list[str]) -> Speeches:
    """Of a play, by role, in the layout that more lines have than any other."""
    layout = max(_LAYOUTS, key=lambda name: sum(bool(_LAYOUTS[name].match(line)) for line in lines))
    spoken: Speeches = {}
    role = None
    for line in lines:
        found = _LAYOUTS[layout].match(line)
        if found and not found[1].upper().startswith(_NO_ROLE):
            role = found[1].upper().strip()
            spoken.setdefault(role, []).append(found[2] if layout != "alone" else "")
        elif role and _goes_on(line, layout):
            spoken[role][-1] = f"{spoken[role][-1]} {line.strip()}".lstrip()
    return {role: [speech for speech in speeches if speech] for role, speeches in spoken.items()}


def _goes_on(line: str, layout: str) -> bool:
    """Whether a line is part of a speech, and no stage direction."""
    said = line.strip()
    return bool(said) and not said.startswith(_DIRECTIONS) and (layout != "two blanks" or line.startswith("    "))


def speeches_by_leaf(lines: list[str]) -> Speeches:
    """Speeches of every role with two or more as LEAF's rule finds them, by TensorFlow Federated's kind of name."""
    spoken: Speeches = {}
    play = None
    user = None
    for number, line in enumerate(lines[:_LEAF_LINES]):
        if "by William Shakespeare" in line:
            above = (lines[number - k].strip() for k in _LEAF_TITLE_LINES)
            play = next((title for title in above if title), "")
            user = None
        elif play is not None and (found := _LEAF_NAME.match(line)):
            user = re.sub(r"\W", "_", f"{play}_{found[1]}")
            spoken.setdefault(user, []).append(found[2])
        elif user is not None and (found := _LEAF_GOES_ON.match(line)):
            spoken[user][-1] += f" {found[1].strip()}"
    return _with_two(spoken)


def train_test(speeches: Speeches) -> tuple[Speeches, Speeches]:
    """The first nine tenths of each role's speeches (rounded down, at least one), and the others."""
    cut = {user: max(1, int(TRAIN_SHARE * len(own))) for user, own in speeches.items()}
    return (
        {user: own[: cut[user]] for user, own in speeches.items()},
        {user: own[cut[user] :] for user, own in speeches.items()},
    )


def _with_two(spoken: Speeches) -> Speeches:
    if not any(spoken.values()):
        raise DataError(f"no speeches were found in {FILE}: get Project Gutenberg's e-book number 100 as plain text.")
    return {user: speeches for user, speeches in spoken.items() if len(speeches) >= 2}


def _is_poem(title: str) -> bool:
    return any(word in title for word in _POEMS)


def _is_title(line: str, title: str) -> bool:
    return _letters(line) == _letters(title)


def _letters(line: str) -> str:
    return re.sub(r"[^A-Z0-9 ]", "", line.upper()).strip()


def _find(
    lines: list[str],
    is_it: Callable[[str], bool],
    start: int,
    what: str,
) -> int:
    """Position of the first line from `start` on that is it."""
    for position in range(start, len(lines)):
        if is_it(lines[position]):
            return position
    raise DataError(
        f"{FILE} lacks {what}: it is cut short or another book; get Project Gutenberg's e-book number 100 again."
    )
