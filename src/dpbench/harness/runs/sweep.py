"""A sweep that has ended, for reports."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dpbench.harness.runs.command import key_of, words_of
from dpbench.harness.runs.folder import RunFolder, finished_runs_below


@dataclass(frozen=True)
class Sweep:
    """A sweep that was started.

    Attributes:
        folder: Folder that contains its runs.
        swept: Keys to which it gave several values, as far as its words say so.
        before: Runs that were finished there before it began.
        study: Name of the study, for a sweeper that keeps its trials in a database.
    """

    folder: Path
    swept: tuple[str, ...] = ()
    before: frozenset[Path] = frozenset()
    study: str | None = None

    def finished(self) -> list[RunFolder]:
        """Its runs that have a result."""
        return [run for run in finished_runs_below([self.folder]) if run.path not in self.before]

    def differing(self) -> tuple[str, ...]:
        """Keys in which its runs differ, except the seed: by its words, and by the choices of its sweeper."""
        values: dict[str, set[str]] = {}
        for run in self.finished():
            for word in words_of(run):
                values.setdefault(key_of(word), set()).add(word)
        keys = dict.fromkeys(self.swept)
        for key, words in values.items():
            if len(words) > 1:
                keys[key] = None
        keys.pop("seed", None)
        return tuple(keys)
