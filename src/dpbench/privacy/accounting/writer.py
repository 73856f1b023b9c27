"""Writes the ledger: each release on disk before it is used, by one process at a time."""

from __future__ import annotations

import errno
import json
import os
from collections import Counter, deque
from dataclasses import fields, replace
from io import FileIO
from pathlib import Path
from typing import Any

from dpbench.errors import LedgerError
from dpbench.locks import open_locked
from dpbench.privacy.accounting.ledger import Header, Ledger, Release, counted_event, read_ledger
from dpbench.privacy.accounting.seal import RunningSeal, Seal, difference
from dpbench.privacy.events import EARLIER, Event, SumQuery

_SPELLING_OF_SCHEMA_1 = {"neighboring_relation": "neighbouring_relation"}


def _dump(data: dict[str, Any]) -> str:
    return json.dumps(data, separators=(",", ":"), allow_nan=False) + "\n"


def _header_line(header: Header) -> str:
    data: dict[str, Any] = {"record": "header", "schema": header.schema}
    for field in fields(header):
        data[field.name] = getattr(header, field.name)
    plan = data.pop("plan")
    if plan is None:
        data = {_SPELLING_OF_SCHEMA_1.get(name, name): value for name, value in data.items()}
    else:
        data["plan"] = plan.to_dict()
    return _dump(data)


def _release_line(release: Release) -> str:
    queries = []
    for query in release.queries:
        stated = query._asdict()
        if not query.unit:
            del stated["unit"]
        queries.append(stated)
    return _dump(
        {
            "record": "release",
            "number": release.number,
            "checksum": release.checksum,
            "sampling": release.sampling.to_dict(),
            "queries": queries,
        }
    )


class LedgerWriter:
    """Appends releases to a ledger file, each on disk (in the system's buffers) before `append` returns.

    A header with a plan begins a phase of schema 2, one without a plan a phase of schema 1 (`Ledger` has the format).

    Holds an exclusive lock on the file from before it is read until `close`: two processes that resume one run would
    spend its budget twice.

    Args:
        path: The file; its folder is made.
        header: Header of this run. Its `phase` is set here.
        start: Releases that the restored checkpoint had made; 0 for a fresh run.
        resume: True to continue an existing ledger.
        known: Seal of the ledger when the checkpoint was saved; None if unknown.
        place: (phase, phase of its batches) of the checkpoint; None if unknown.

    Attributes:
        phase: Number of the phase that this writer writes; part of the key of the noise, so that a continuation with
            other settings never adds old noise to new sums.
        lot_phase: Phase of the batches that are drawn: this one, or an earlier one after a replay with another sum.
        joint: Queries that were answered on the batches of this run before, by the number of the release: a further
            release on such a batch is one release with them.
        events: How often each release was made, all phases together, those of equal cost counted as one.
        repeated: Those of them that this run will repeat, because it resumes from an earlier checkpoint.

    Raises:
        LedgerError: Another process writes the file, it holds a release (or is no intact ledger) and `resume` is False,
            is damaged in the middle, ends before the checkpoint or differs from its seal, or the folder cannot be
            written.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        header: Header,
        start: int = 0,
        resume: bool = False,
        known: Seal | None = None,
        place: tuple[int, int] | None = None,
    ) -> None:
        self.path = Path(path)
        self.joint: dict[int, tuple[SumQuery, ...]] = {}
        self._ahead: deque[tuple[Release, bytes]] = deque()  # to be repeated, each with its lines
        self._pending_header = ""
        self._seal = RunningSeal()
        self.events: Counter[Event] = Counter()
        self.repeated: Counter[Event] = Counter()
        self._file = self._open()
        try:
            self._header = self._begin(
                replace(header, phase=0),
                start,
                resume,
                known,
            )
            self.phase = self._header.phase
            self.lot_phase = self.phase
            if place is not None and place[0] == self.phase:
                self.lot_phase = place[1]
            if self.lot_phase < self.phase:
                for phase, release in read_ledger(self.path).releases:
                    if self.lot_phase <= phase < self.phase:
                        self._join(release)
        except BaseException as error:
            if not os.fstat(self._file.fileno()).st_size:
                self.path.unlink(missing_ok=True)  # nothing was recorded: leave no empty ledger behind
            self._file.close()
            if isinstance(error, OSError):
                raise LedgerError(f"cannot write the ledger {self.path}: {error.strerror}.") from None
            raise

    def _open(self) -> FileIO:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            return open_locked(self.path)
        except BlockingIOError:
            raise LedgerError(
                f"another process writes the ledger {self.path}: two at once would spend the budget twice. Wait until "
                "it ends, or choose another folder."
            ) from None
        except OSError as error:
            raise LedgerError(f"cannot write the ledger {self.path}: {error.strerror}.") from None

    def _begin(
        self,
        header: Header,
        start: int,
        resume: bool,
        known: Seal | None,
    ) -> Header:
        size = os.fstat(self._file.fileno()).st_size
        if size and (start or not _without_release(self.path)):
            if not resume:
                raise LedgerError(
                    f"{self.path} already records a run: resume that run, give this one another folder (a trainer's "
                    "default_root_dir=... or logger, or a strategy's ledger=...), or, with a new model, move the file "
                    "away."
                )
            return self._continue(header, start, known)
        if start:
            raise LedgerError(
                f"the checkpoint has {start} releases, but {self.path} is missing or empty: a logger takes a new "
                "folder for each trainer, and the ledger is in the first one. Pass its path to the strategy "
                "(ledger=.../ledger.jsonl), or copy it there."
            )
        os.ftruncate(self._file.fileno(), 0)  # of a run that failed before its first release, and cost nothing
        self._write(_header_line(header))
        return header

    def _continue(
        self,
        header: Header,
        start: int,
        known: Seal | None,
    ) -> Header:
        """Go on in the newest phase of the file, or in a new one where the run is another one than made it."""
        ledger = self._read_intact()
        if known is not None:
            other = difference(self.path, known, witness="the checkpoint")
            if other is not None:
                raise LedgerError(f"cannot continue {self.path}: it has {other}. Restore the ledger of this run.")
        last = ledger.header
        _refuse_another_training_set(self.path, header, last)
        numbers = {release.number for _, release in ledger.releases}
        if start and start - 1 not in numbers:
            raise LedgerError(f"the checkpoint has {start} releases, but {self.path} has fewer: restore the ledger.")
        self.events.update(ledger.events)
        header = replace(header, phase=last.phase)
        is_same_run = header == last
        newest = [release for phase, release in ledger.releases if phase == last.phase]
        # Else the releases before `start` were made in another phase.
        is_here = start == 0
        if newest:
            is_here = newest[0].number <= start <= newest[-1].number + 1
        ahead = [release for release in newest if release.number >= start]
        # Noise may be repeated on a sum that can be compared only: the difference of two sums with one noise is exact.
        comparable = all(release.checksum is not None for release in ahead)
        content = self.path.read_bytes()
        if is_same_run and is_here and comparable and header.replay is not None:
            blocks = _with_their_checksums(content)
            first = len(blocks) - len(ahead)
            self._seal.update(b"".join(blocks[:first]))
            self._ahead.extend(zip(ahead, blocks[first:], strict=True))
            self.repeated.update(map(counted_event, ahead))
            return header
        self._seal.update(content)
        if is_same_run and is_here and not ahead:
            return header
        header = replace(header, phase=last.phase + 1)
        # Not on disk until there is a release: its budget may allow none.
        self._pending_header = _header_line(header)
        return header

    def _read_intact(self) -> Ledger:
        """The ledger, without the piece of a line that a process was writing when it died."""
        ledger = read_ledger(self.path)
        if ledger.damage is None:
            return ledger
        if not ledger.damage.endswith("cut off"):
            raise LedgerError(f"cannot continue {self.path}: {ledger.damage}.")
        # That release was not used, or its sum is not known here: the piece may go.
        content = self.path.read_bytes()
        end = content.rindex(b"\n") + 1
        os.truncate(self.path, end)
        return ledger

    def _join(self, release: Release) -> None:
        """Note a release on a batch of this run in an earlier phase."""
        answered = [query._replace(name=EARLIER + query.name) for query in release.queries]
        self.joint[release.number] = (*self.joint.get(release.number, ()), *answered)

    @property
    def seal(self) -> Seal:
        """Seal of the lines up to the newest release of this run, repeated or new."""
        return self._seal.seal

    def differs(self, release: Release) -> bool:
        """Return whether a release is recorded with another sum or other parameters."""
        return bool(self._ahead) and self._ahead[0][0] != release

    def leave_replay(self) -> None:
        """Go on in a new phase, with noise of its own: releases that will not be repeated count as recorded.

        The batches stay those of the phase before, with their queries in `joint`.
        """
        for release, lines in self._ahead:
            self._seal.update(lines)
            self._join(release)
        self._ahead.clear()
        self.repeated.clear()
        self.phase += 1
        self._header = replace(self._header, phase=self.phase)
        self._pending_header = _header_line(self._header)

    def append(self, release: Release) -> None:
        """Record a release; must return before the release is used.

        A replay of a release that this phase has recorded already (after a crash) is not written again: the same
        noise on the same sum is the same release.

        Args:
            release: The release; without a checksum it can never be repeated.

        Raises:
            LedgerError: The disk is full, the replay `differs` and was not left, or the release does not follow the
                plan of its phase.
        """
        if self.differs(release):
            raise LedgerError(
                f"{self.path} records release {release.number} with another sum or other parameters: repeated with the "
                "same noise, it would reveal the difference."
            )
        if self._ahead:
            _, lines = self._ahead.popleft()
            self._seal.update(lines)
            self.repeated[counted_event(release)] -= 1
            return
        self._require_plan(release)
        try:
            self._write(self._pending_header + _release_line(release))
        except OSError as error:
            raise LedgerError(
                f"cannot write the ledger {self.path}: {error.strerror}. The release was not made; "
                "free some space and resume the run."
            ) from None
        self._pending_header = ""
        self.events[counted_event(release)] += 1

    def _require_plan(self, release: Release) -> None:
        """Raise LedgerError for a release that readers would take for damage, which is a bug of the caller."""
        plan = self._header.plan
        if plan is None:
            return
        wrong = plan.contradiction(release.number, Event(release.sampling, release.queries))
        if wrong is not None:
            raise LedgerError(
                f"{wrong}: noise or sampling changed since the start of this run, so the release was not made and not "
                f"written to {self.path}. This is a bug."
            )

    def _write(self, text: str) -> None:
        """Append whole lines.

        Raises:
            OSError: The disk is full; nothing of them is left in the file, behind which others may be written.
        """
        data = text.encode()
        descriptor = self._file.fileno()
        size = os.fstat(descriptor).st_size
        if self._file.write(data) != len(data):
            os.ftruncate(descriptor, size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._seal.update(data)

    def close(self) -> None:
        """Close the file and give the lock back."""
        self._file.close()


def _with_their_checksums(content: bytes) -> list[bytes]:
    """Lines of a ledger, each release's with the line of its checksum, where that has one of its own."""
    blocks: list[bytes] = []
    for line in content.splitlines(keepends=True):
        if json.loads(line)["record"] == "checksum":
            blocks[-1] += line
        else:
            blocks.append(line)
    return blocks


def records_a_run(path: Path) -> bool:
    """Return whether there is a file that a new run must leave unchanged; a header alone cost nothing."""
    return path.is_file() and path.stat().st_size > 0 and not _without_release(path)


def _without_release(path: Path) -> bool:
    try:
        ledger = read_ledger(path)
    except LedgerError:  # it is something else
        return False
    return ledger.damage is None and not ledger.releases


def _refuse_another_training_set(path: Path, header: Header, last: Header) -> None:
    for name in ("unit", "neighboring_relation", "population", "microbatch_size"):
        mine = getattr(header, name)
        recorded = getattr(last, name)
        if mine != recorded:
            raise LedgerError(
                f"{path} has {name} {recorded!r}, this run {mine!r}: "
                "a ledger describes one training set. Start a new run."
            )
