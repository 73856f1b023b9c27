"""The append-only record of every release, written before the release is used.

A ledger is a JSONL file. A header line opens each *phase* (a run, or its continuation with other settings); a release
line holds the sampling event and the sum queries. From these any accountant computes the epsilon, long after the
run and without the training code (general_approach_2018, section 3).
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path

from dpbench.errors import LedgerError
from dpbench.privacy.events import METRIC, MICROBATCH, Event, SumQuery, equivalent_queries
from dpbench.privacy.sampling import Sampling, sampling_from_dict

FILE_NAME = "ledger.jsonl"  # in the folder of a run
SCHEMA = 1
_SEEDED = {"noise": "that of the strategy", "lots": "that of the LotLoader"}
_SMALLEST = 1e-100  # ratio of noise and sensitivity whose square is still a number


@dataclass(frozen=True)
class Header:
    """Facts that hold for all releases of a phase of training.

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
        noise_source: Of a seeded run, a hash of what its noise comes from; another ledger that has it in the same
            phase has the same noise. None: the operating system's entropy (or an older ledger). Whoever reads a seeded
            ledger can try seeds.
        lot_source: The same of its lots; None also where every lot holds everybody.
        noise_end: Standard deviations at which the noise ends at the earliest; None: an older version's, 5.77 at worst.
    """

    unit: str
    neighbouring_relation: str
    population: int
    delta: float
    replay: str | None = None
    phase: int = 0
    microbatch_size: int = 1
    noise_source: str | None = None
    lot_source: str | None = None
    noise_end: float | None = None

    def __post_init__(self) -> None:
        if not (isinstance(self.delta, float) and 0 < self.delta < 1):
            raise LedgerError(f"delta must be a number between 0 and 1, not {self.delta!r}")
        for name in ("population", "microbatch_size"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise LedgerError(f"{name} must be a positive whole number, not {value!r}")
        if not isinstance(self.unit, str):
            raise LedgerError(f"unit must be a word, not {self.unit!r}")
        for name in ("replay", "noise_source", "lot_source"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise LedgerError(f"{name} must be a word or null, not {value!r}")
        if self.noise_end is not None and not (type(self.noise_end) in (int, float) and self.noise_end > 0):
            raise LedgerError(f"noise_end must be a positive number or null, not {self.noise_end!r}")


@dataclass(frozen=True)
class Release:
    """One release.

    Attributes:
        number: Number within the run.
        sampling: How its lot was drawn.
        queries: What was summed.
        checksum: Of the *noised* sum, by which a replay is recognized; itself post-processing.
    """

    number: int
    sampling: Sampling
    queries: tuple[SumQuery, ...]
    checksum: str | None = None


def with_units(queries: tuple[SumQuery, ...], microbatch_size: int) -> tuple[SumQuery, ...]:
    """Queries with the unit that each sums, also where an older ledger does not tell.

    With microbatches every release sums over some; where no query says so, the ledger is older than the field, and then
    all but private metrics (by their names) were sums over microbatches.

    >>> with_units((SumQuery("all", 2.0, 1.0), SumQuery("metric/loss", 0.5, 1.0)), microbatch_size=4)
    (SumQuery(name='all', sensitivity=2.0, noise_std=1.0, unit='microbatch'), \
SumQuery(name='metric/loss', sensitivity=0.5, noise_std=1.0, unit=''))
    """
    if microbatch_size == 1 or any(query.unit for query in queries):
        return queries
    return tuple(q if q.name.startswith(METRIC) else q._replace(unit=MICROBATCH) for q in queries)


@lru_cache(maxsize=1024)
def _equivalent(queries: tuple[SumQuery, ...]) -> tuple[SumQuery, ...]:
    return equivalent_queries(queries)


def counted_event(release: Release) -> Event:
    """Put what a release costs into a form in which releases of equal cost are equal, however their bounds differ."""
    return Event(release.sampling, _equivalent(release.queries))


@dataclass
class Ledger:
    """A ledger in memory.

    Attributes:
        headers: One per phase.
        releases: In the order of writing; (phase, release).
        damage: None, or what is wrong with the first line that is.
        doubt: None, or why it is not what its run left, in the eyes of who knows (a result, a checkpoint).
    """

    headers: list[Header] = field(default_factory=list)
    releases: list[tuple[int, Release]] = field(default_factory=list)
    damage: str | None = None
    doubt: str | None = None

    @property
    def wrong(self) -> str | None:
        """Why no epsilon from it is proven, if so."""
        return self.damage or self.doubt

    @cached_property
    def events(self) -> Counter[Event]:
        """How often each release was made, those of equal cost counted together; for a ledger that was read whole."""
        return Counter(counted_event(release) for _, release in self.releases)

    @property
    def secure(self) -> bool:
        """Whether nobody can draw its noise and its lots again: both came from the operating system's entropy."""
        return all(one.replay is one.noise_source is one.lot_source is None for one in self.headers)

    @property
    def header(self) -> Header:
        """The newest header."""
        return self.headers[-1]


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
        except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError, LedgerError) as error:
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
    """Raise LedgerError unless all headers and releases speak of one population, unit and neighboring relation.

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
            if sampling.unit != header.unit:
                raise LedgerError(
                    f"{name} contradicts itself: its header says that a record is one {header.unit}, a release one "
                    f"{sampling.unit}."
                )
            if sampling.population != header.population or relation not in ("none", header.neighbouring_relation):
                raise LedgerError(
                    f"{name} contradicts itself: its header says {header.neighbouring_relation} among "
                    f"{header.population} records, a release {sampling.kind} sampling among {sampling.population}."
                )


def check_own_randomness(ledgers: Mapping[str, Ledger]) -> None:
    """Raise LedgerError where two ledgers drew the same noise or the same lots for different releases.

    The difference of two sums with one noise is not private, and releases of the same lots are not amplified by
    sampling independently: composition would say too little. The same releases twice are merely counted twice.

    Args:
        ledgers: By the name that the error shows.
    """
    drawn: dict[tuple[str, int, str], list[tuple[str, dict[int, str | None]]]] = {}
    for name, ledger in ledgers.items():
        made: dict[int, dict[int, str | None]] = {}
        for phase, release in ledger.releases:
            made.setdefault(phase, {})[release.number] = release.checksum
        for phase, mine in made.items():
            header = ledger.headers[phase]
            for what, source in (("noise", header.noise_source), ("lots", header.lot_source)):
                if source is None:
                    continue
                others = drawn.setdefault((what, phase, source), [])
                for other, theirs in others:
                    if any(theirs.get(number, checksum) != checksum for number, checksum in mine.items()):
                        raise LedgerError(
                            f"{name} and {other} drew their {what} from one seed, for different releases: together "
                            "they reveal more than composition says, and no epsilon covers both. Publish one of them, "
                            f"or train one again with another seed (seed=...; in Python {_SEEDED[what]})."
                        )
                others.append((name, mine))


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
        if not all(type(number) in (int, float) for query in queries for number in query[1:3]):
            raise LedgerError("sensitivity and noise_std must be numbers")
        if not all(isinstance(word, str) for query in queries for word in (query.name, query.unit)):
            raise LedgerError("name and unit of a query must be words")
        if not queries or not all(_SMALLEST < query.noise_std / query.sensitivity < 1 / _SMALLEST for query in queries):
            raise LedgerError("a release needs queries with positive and finite sensitivity and noise_std")
        cache[event] = (sampling_from_dict(data["sampling"]), queries)
    phase, number, checksum = len(ledger.headers) - 1, data["number"], data.get("checksum")
    if type(number) is not int:
        raise LedgerError(f"{number!r} is no number of a release")
    before = ledger.releases[-1] if ledger.releases else (-1, Release(-1, *cache[event]))
    ledger.releases.append((phase, Release(number, *cache[event], checksum)))
    if phase == before[0] or phase == 0:
        follows = number == before[1].number + 1
    else:  # another phase may repeat numbers
        follows = number <= 1 + max((one.number for _, one in ledger.releases[:-1]), default=-1)
    if not follows and ledger.damage is None:
        raise LedgerError(f"release {number} follows release {before[1].number}")
