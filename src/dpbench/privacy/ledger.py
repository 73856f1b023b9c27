"""The append-only record of every release, written before the release is used.

A ledger is a JSONL file. A header line opens each *phase* (a run, or its continuation with other settings); a release
line holds the sampling event and the sum queries. From these any accountant computes the epsilon, long after the
run and without the training code (general_approach_2018, section 3).
"""

from __future__ import annotations

import errno
import json
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from dpbench.errors import LedgerError
from dpbench.privacy.plan import SumQuery, equivalent_queries
from dpbench.privacy.sampling import Sampling, sampling_from_dict

SCHEMA = 1
_SMALLEST = 1e-100  # ratio of noise and sensitivity whose square is still a number


Event = tuple[Sampling, tuple[SumQuery, ...]]
"""What one release costs: how its lot was drawn and what was summed."""


@dataclass(frozen=True)
class Header:
    """What holds for all releases of a phase.

    Attributes:
        unit: Unit of privacy, such as "example".
        neighbouring_relation: "add_or_remove_one" or "replace_one".
        population: Number of records that can be drawn.
        delta: The δ that the run aims at.
        replay: Fingerprint of everything that determines the releases (seed included), or None. Only a run with
            the same fingerprint may repeat a release without it counting twice.
        phase: Number of this phase in the ledger.
        microbatch_size: μ. The queries state the sensitivity for one example; above 1, that of a *fixed* microbatch
            is half of it where examples are added or removed, and the same where they are replaced.
    """

    unit: str
    neighbouring_relation: str
    population: int
    delta: float
    replay: str | None = None
    phase: int = 0
    microbatch_size: int = 1

    def __post_init__(self) -> None:
        if not (isinstance(self.delta, float) and 0 < self.delta < 1):
            raise LedgerError(f"delta must be a number between 0 and 1, not {self.delta!r}")
        for name in ("population", "microbatch_size"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise LedgerError(f"{name} must be a positive whole number, not {value!r}")
        if not isinstance(self.unit, str):
            raise LedgerError(f"unit must be a word, not {self.unit!r}")


@dataclass(frozen=True)
class Release:
    """One release.

    Attributes:
        number: Number within the run.
        sampling: How its lot was drawn.
        queries: What was summed.
        checksum: Of the *noised* sum, by which a replay is recognised; itself post-processing.
    """

    number: int
    sampling: Sampling
    queries: tuple[SumQuery, ...]
    checksum: str | None = None


@lru_cache(maxsize=1024)
def _equivalent(queries: tuple[SumQuery, ...]) -> tuple[SumQuery, ...]:
    return equivalent_queries(queries)


def counted_event(release: Release) -> Event:
    """What a release costs, in a form in which releases of equal cost are equal, however their bounds differ."""
    return release.sampling, _equivalent(release.queries)


@dataclass
class Ledger:
    """A ledger in memory.

    Attributes:
        headers: One per phase.
        releases: In the order of writing; (phase, release).
        damage: None, or what is wrong with the first line that is.
    """

    headers: list[Header] = field(default_factory=list)
    releases: list[tuple[int, Release]] = field(default_factory=list)
    damage: str | None = None

    @cached_property
    def events(self) -> Counter[Event]:
        """How often each release was made, those of equal cost counted together; for a ledger that was read whole."""
        return Counter(counted_event(release) for _, release in self.releases)

    @property
    def header(self) -> Header:
        """The newest header."""
        return self.headers[-1]


def _dump(data: dict[str, Any]) -> str:
    return json.dumps(data, separators=(",", ":"), allow_nan=False) + "\n"


def _header_line(header: Header) -> str:
    return _dump({"record": "header", "schema": SCHEMA, **asdict(header)})


def _release_line(release: Release) -> str:
    queries = [query._asdict() for query in release.queries]
    head = {"record": "release", "number": release.number, "checksum": release.checksum}
    return _dump({**head, "sampling": release.sampling.to_dict(), "queries": queries})


def read_ledger(path: str | os.PathLike[str]) -> Ledger:
    """Read a ledger as far as it is intact.

    Args:
        path: The file.

    Returns:
        All that is readable; `damage` names the first line that is not. What is missing makes every epsilon that
        is computed from the rest a lower bound.

    Raises:
        LedgerError: There is no such file, or not even a header is readable.
    """
    path = Path(path)
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise LedgerError(f"cannot read the ledger {path}: {error.strerror}.") from None
    ledger = Ledger()
    tail = lines.pop()
    cache: dict[bytes, tuple[Sampling, tuple[SumQuery, ...]]] = {}
    other_schema = None
    for number, line in enumerate(lines, start=1):
        try:
            _read_line(line, ledger, cache)
        except _OtherSchema as error:
            other_schema = other_schema or error.schema
            ledger.damage = ledger.damage or f"line {number} is damaged ({error})"
        except (ValueError, KeyError, TypeError, ArithmeticError, LedgerError) as error:
            ledger.damage = ledger.damage or f"line {number} is damaged ({type(error).__name__}: {error})"
    if tail:
        ledger.damage = ledger.damage or f"line {len(lines) + 1} is cut off"
    if not ledger.headers and other_schema:
        raise LedgerError(
            f"{path} was written with ledger schema {other_schema}, and this version of dpbench reads schema {SCHEMA}: "
            "use the version that wrote it."
        )
    if not ledger.headers:
        raise LedgerError(f"{path} is no dpbench ledger: {ledger.damage or 'it is empty'}.")
    return ledger


def check_one_population(ledgers: Mapping[str, Ledger]) -> None:
    """Raise LedgerError unless all headers and releases speak of one population, unit and neighbouring relation.

    Args:
        ledgers: By the name that the error shows.
    """
    first: tuple[str, Header] | None = None
    for name, ledger in ledgers.items():
        for header in ledger.headers:
            first = first or (name, header)
            for field_name in ("unit", "neighbouring_relation", "population"):
                mine, other = getattr(header, field_name), getattr(first[1], field_name)
                if mine != other:
                    raise LedgerError(
                        f"{name} has {field_name} {mine!r}, {first[0]} {other!r}: runs on other data or under another "
                        "guarantee do not compose into one epsilon; account for each alone."
                    )
        header = ledger.header
        for sampling in {release.sampling for _, release in ledger.releases}:
            relation = sampling.neighbouring_relation
            if sampling.population != header.population or relation not in ("none", header.neighbouring_relation):
                raise LedgerError(
                    f"{name} contradicts itself: its header says {header.neighbouring_relation} among "
                    f"{header.population} records, a release {sampling.kind} sampling among {sampling.population}."
                )


class _OtherSchema(LedgerError):
    def __init__(self, schema: object) -> None:
        super().__init__(f"schema {schema}, but this version of dpbench reads schema {SCHEMA}")
        self.schema = schema


def _read_line(line: bytes, ledger: Ledger, cache: dict[bytes, tuple[Sampling, tuple[SumQuery, ...]]]) -> None:
    data = json.loads(line.decode())  # given bytes, json first guesses their encoding
    if data["record"] == "header":
        if data["schema"] != SCHEMA:
            raise _OtherSchema(data["schema"])
        ledger.headers.append(Header(**{k: v for k, v in data.items() if k not in ("record", "schema")}))
        if ledger.header.phase != len(ledger.headers) - 1:
            raise LedgerError(f"phase {ledger.header.phase} stands where phase {len(ledger.headers) - 1} is due")
        return
    if data["record"] != "release" or not ledger.headers:
        raise LedgerError("neither a header nor a release after one")
    where = line.find(b'"sampling"')
    # Lines of equal cost end equally, as this module writes them; with the keys in another order nothing is remembered.
    event = line[where:] if 0 <= where < line.find(b'"queries"') else line
    if event not in cache:
        queries = tuple(SumQuery(**query) for query in data["queries"])
        if not all(type(number) in (int, float) for query in queries for number in query[1:]):
            raise LedgerError("sensitivity and noise_std must be numbers")
        if not queries or not all(_SMALLEST < query.noise_std / query.sensitivity < 1 / _SMALLEST for query in queries):
            raise LedgerError("a release needs queries with positive and finite sensitivity and noise_std")
        cache[event] = (sampling_from_dict(data["sampling"]), queries)
    phase, number, checksum = len(ledger.headers) - 1, data["number"], data.get("checksum")
    if type(number) is not int:
        raise LedgerError(f"{number!r} is no number of a release")
    before = ledger.releases[-1] if ledger.releases else (-1, Release(-1, *cache[event]))
    ledger.releases.append((phase, Release(number, *cache[event], checksum)))
    due, same = before[1].number + 1, phase == before[0] or phase == 0  # another phase may repeat numbers
    if (number > due or (number != due and same)) and ledger.damage is None:
        raise LedgerError(f"release {number} follows release {before[1].number}")


class LedgerWriter:
    """Appends releases to a ledger file, each on disk (in the system's buffers) before `append` returns.

    Args:
        path: The file; its folder is made.
        header: Of this run. Its `phase` is set here.
        start: Releases that the restored checkpoint had made; 0 for a fresh run.
        resume: Whether an existing ledger may be continued.

    Attributes:
        phase: Number of the phase that this writer writes; part of the key of the noise, so that a continuation with
            other settings never adds old noise to new sums.
        events: How often each release was made, all phases together, those of equal cost counted as one.

    Raises:
        LedgerError: The file exists and `resume` is False, is damaged in the middle, ends before the checkpoint,
            or the folder cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str], header: Header, start: int = 0, resume: bool = False) -> None:
        self.path = Path(path)
        self._recorded: dict[int, Release] = {}
        self.events: Counter[Event] = Counter()
        lines: list[str] = []
        header = Header(**{**asdict(header), "phase": 0})
        if self.path.exists() and self.path.stat().st_size:
            if not resume:
                raise LedgerError(
                    f"{self.path} already records a run: resume that run, choose another folder, or move the file away."
                )
            header = self._continue(header, start, lines)
        elif start:
            raise LedgerError(f"the checkpoint had made {start} releases, but {self.path} is missing or empty.")
        else:
            lines.append(_header_line(header))
        self.phase = header.phase
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115 (closed by close)
            self._write("".join(lines))
        except OSError as error:
            raise LedgerError(f"cannot write the ledger {self.path}: {error.strerror}.") from None

    def _continue(self, header: Header, start: int, lines: list[str]) -> Header:
        ledger = read_ledger(self.path)
        if ledger.damage is not None:
            if not ledger.damage.endswith("cut off"):
                raise LedgerError(f"cannot continue {self.path}: {ledger.damage}.")
            # The process died while writing, before the release was used: the piece of a line may go.
            whole = self.path.read_bytes()
            os.truncate(self.path, whole.rindex(b"\n") + 1)
        self.events.update(ledger.events)
        last = ledger.header
        header = Header(**{**asdict(header), "phase": last.phase})
        for name in ("unit", "neighbouring_relation", "population", "microbatch_size"):
            if getattr(header, name) != getattr(last, name):
                raise LedgerError(
                    f"{self.path} has {name} {getattr(last, name)!r}, this run {getattr(header, name)!r}: "
                    "one ledger describes one training set. Start a new run."
                )
        mine = {release.number: release for phase, release in ledger.releases if phase == len(ledger.headers) - 1}
        made = {release.number for _, release in ledger.releases}
        if start and start - 1 not in made:
            raise LedgerError(f"the checkpoint had made {start} releases, but {self.path} ends before.")
        ahead = {number: release for number, release in mine.items() if number >= start}
        began = min(mine, default=0) <= start  # else this phase's releases before `start` were made in another one
        same = header == last and header.replay is not None and began
        if same:
            self._recorded = ahead
        elif header != last or ahead:
            header = Header(**{**asdict(header), "phase": last.phase + 1})
            lines.append(_header_line(header))
        return header

    @property
    def replays(self) -> int:
        """Recorded releases that this run will repeat, because it resumes from an earlier checkpoint."""
        return len(self._recorded)

    def append(self, release: Release) -> None:
        """Record a release; must return before the release is used.

        A replay of a release that this phase has recorded already (after a crash) is not written again: the same
        noise on the same sum is the same release.

        Raises:
            LedgerError: The disk is full or the replay differs from what was recorded.
        """
        recorded = self._recorded.pop(release.number, None)
        if recorded is not None:
            if recorded != release:
                raise LedgerError(
                    f"release {release.number} is in {self.path} with another sum or other parameters: repeating it "
                    "with the same noise would reveal the difference. Something in the run is random beyond its seed "
                    "(such as augmentation in the data set), or the machine or its number of threads "
                    "(OMP_NUM_THREADS) differs: resume with another seed, or as before."
                )
            return
        try:
            self._write(_release_line(release))
        except OSError as error:
            raise LedgerError(
                f"cannot write the ledger {self.path}: {error.strerror}. The release was not made; "
                "free some space and resume the run."
            ) from None
        self.events[counted_event(release)] += 1

    def _write(self, text: str) -> None:
        data = text.encode()
        if self._file.write(data) != len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self) -> None:
        """Close the file."""
        self._file.close()
