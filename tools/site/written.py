"""Pages that are made at build: written only where they change, so that a second build reads nothing again."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
GENERATED = ROOT / "docs" / "reference" / "generated"


def write(name: str, text: str) -> None:
    """Write a page of docs/reference/generated/."""
    path = GENERATED / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")


def keep_only(pattern: str, names: set[str]) -> None:
    """Remove pages of a pattern that are made no more."""
    for path in GENERATED.glob(pattern):
        if path.name not in names:
            path.unlink()
