"""The revision whose weights the golden runs must have, to the bit: the one that raised `RANDOM_NUMBERS` last.

Every later revision is compared with that one, and not with its parent alone: differences do not add up.
"""

from __future__ import annotations

import re
import subprocess
import tarfile
from io import BytesIO
from pathlib import Path

ROOT = Path(__file__).parents[2]
_FILE = "src/dpbench/privacy/randomness.py"
_RECORD = "tests/golden/numbers.json"
_NUMBER = re.compile(r"^RANDOM_NUMBERS = (\d+)", re.MULTILINE)


def git(*words: str) -> bytes:
    """What a git command prints.

    Raises:
        subprocess.CalledProcessError: It failed.
    """
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, check=True).stdout


def last_raise() -> str | None:
    """The commit that changed `RANDOM_NUMBERS` last; None outside a checkout, or where its history is cut off."""
    try:
        if git("rev-parse", "--is-shallow-repository").strip() != b"false":
            return None
        found = git("log", "-1", "--format=%H", "-G", "^RANDOM_NUMBERS = ", "--", _FILE).decode().strip()
    except (OSError, subprocess.CalledProcessError):
        return None
    return found or None


def to_match() -> str | None:
    """The commit to compare with: the last raise, or the first with golden runs where that is later; None: neither."""
    raised = last_raise()
    if raised is None or git("ls-tree", raised, "--", _RECORD):
        return raised
    added = git("log", "--diff-filter=A", "--format=%H", "--", _RECORD).decode().split()
    return added[-1] if added else None


def random_numbers(revision: str | None = None) -> int | None:
    """`RANDOM_NUMBERS` of a revision; None: of the files as they are."""
    text = (ROOT / _FILE).read_bytes() if revision is None else git("show", f"{revision}:{_FILE}")
    found = _NUMBER.search(text.decode())
    return int(found[1]) if found else None


def is_present(revision: str) -> bool:
    """Whether the files are those of a revision, so that there is nothing to compare."""
    return not git("diff", "--name-only", revision, "--", "src").strip()


def extract(revision: str, folder: Path) -> Path:
    """Put the files of a revision into a folder, without touching the checkout."""
    with tarfile.open(fileobj=BytesIO(git("archive", "--format=tar", revision, "--", "src", "conf"))) as archive:
        archive.extractall(folder, filter="data")
    if git("ls-tree", revision, "--", "tools/golden"):
        with tarfile.open(fileobj=BytesIO(git("archive", "--format=tar", revision, "--", "tools"))) as archive:
            archive.extractall(folder, filter="data")
    return folder
