"""The append-only record of every release, written before the release is used.

A ledger is a JSONL file. A header line opens each *phase* (a run, or its continuation with other settings); a release
line holds the sampling event and the sum queries. From these any accountant computes the epsilon, long after the
run and without the training code (general_approach_2018, section 3).

Schema 2 (`Ledger` has the format): the header of a phase states its plan, from which the cost of each of its releases
follows, and a reader of the ledger compares each line with it. Schema 1 has no plans, and is read for ever; a run
that began under it continues with a phase of schema 2 in the same file. Schema 3 is schema 2 for phases whose
steps depend on one another (noise that is correlated among steps, batches of groups that take turns): older versions,
which would count them wrongly, refuse it.
"""

from __future__ import annotations

import json
import os
import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import AfterValidator, AliasChoices, BaseModel, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as validated

from dpbench.errors import LedgerError
from dpbench.privacy.accounting.stated_plan import STRICT, Count, StatedPlan, problem_of
from dpbench.privacy.events import METRIC, MICROBATCH, Event, Queries, SumQuery, equivalent_queries
from dpbench.privacy.sampling import Sampling, sampling_from_dict

if TYPE_CHECKING:
    import pandas as pd

FILE_NAME = "ledger.jsonl"  # in the folder of a run
SCHEMA = 3
WITH_ROUNDS = 3  # the schema of phases whose steps depend on one another
WITH_PLANS = 2
KEPT = "kept:"  # begins replay key and sources of a run without a seed, whose keys were in a file until it ended
WITHOUT_PLANS = 1  # the schema of phases that state no plan
_SEEDED = {"noise": "strategy", "batches": "PrivateDataLoader"}
_SMALLEST = 1e-100  # ratio of noise and sensitivity whose square is still a number
_NOT_A_LINE = (
    ValueError,  # ConfigurationError is one
    KeyError,
    TypeError,
    AttributeError,
    ArithmeticError,
    RecursionError,
    LedgerError,
)
"""Exceptions of reading a line that makes no sense."""


@validated(frozen=True, config=STRICT)
class Header:
    """Facts that hold for all releases of a phase of training.

    Attributes:
        unit: Unit of privacy, such as "example".
        neighboring_relation: "add_or_remove_one" or "replace_one".
        population: Number of records that can be drawn.
        delta: The δ that the run aims at.
        replay: Fingerprint of everything that determines the releases (seed included), or None. Only a run with
            the same fingerprint may repeat a release without it counting twice.
        phase: Number of this phase in the ledger.
        microbatch_size: μ. The queries state the sensitivity for one example; above 1, that of a *fixed* microbatch
            is half of it where examples are added or removed, and the same where they are replaced.
        noise_source: Hash of a seed or a kept key (and of all else that determines the noise); a ledger with the same
            hash in the same phase has the same noise. None: the operating system's entropy (or an older ledger). A
            reader of a seeded ledger can try seeds; kept keys have 128 random bits.
        lot_source: The same of its batches; None also if every batch holds all records.
        noise_end: Standard deviations at which the noise ends at the earliest; None: an older version's, 5.77 at worst.
        plan: Plan of all releases of the phase; None: written under schema 1, or by a program without a plan.
    """

    unit: str
    neighboring_relation: Annotated[
        str, Field(validation_alias=AliasChoices("neighboring_relation", "neighbouring_relation"))
    ]
    population: Count
    delta: Annotated[float, Field(gt=0, lt=1)]
    replay: str | None = None
    phase: int = 0
    microbatch_size: Count = 1
    noise_source: str | None = None
    lot_source: str | None = None
    noise_end: Annotated[float, Field(gt=0)] | None = None
    plan: StatedPlan | None = None

    @property
    def schema(self) -> int:
        """Schema of the phase: the oldest that can state it, so that older versions read phases that they know."""
        if self.plan is None:
            return WITHOUT_PLANS
        return WITH_ROUNDS if self.plan.has_rounds else WITH_PLANS

    def __post_init__(self) -> None:
        if self.plan is not None:
            self._compare_with(self.plan)

    def _compare_with(self, plan: StatedPlan) -> None:
        """Raise LedgerError where the plan is one of other records."""
        stated = {
            "unit": plan.sampling.unit,
            "neighboring_relation": plan.sampling.neighboring_relation,
            "population": plan.sampling.population,
            "microbatch_size": plan.summands.per_summand,
        }
        for name, value in stated.items():
            in_header = getattr(self, name)
            if in_header != value:
                raise LedgerError(f"the header has {name} {in_header!r}, its plan {value!r}")


@dataclass(frozen=True)
class Release:
    """One release.

    Attributes:
        number: Number within the run.
        sampling: How its batch was drawn.
        queries: The sums.
        checksum: Checksum of the *noised* sum, by which a replay is recognized; itself post-processing. None: unknown;
            the release counts, and can never be repeated.
    """

    number: int
    sampling: Sampling
    queries: Queries
    checksum: str | None = None


def with_units(queries: Queries, microbatch_size: int) -> Queries:
    """Queries with the unit that each sums, also where an older ledger does not tell.

    With microbatches every release sums over some; where no query says so, the ledger is older than the field, and then
    all but private metrics (by their names) were sums over microbatches.

    >>> with_units((SumQuery("all", 2.0, 1.0), SumQuery("metric/loss", 0.5, 1.0)), microbatch_size=4)
    (SumQuery(name='all', sensitivity=2.0, noise_std=1.0, unit='microbatch'), \
SumQuery(name='metric/loss', sensitivity=0.5, noise_std=1.0, unit=''))
    """
    if microbatch_size == 1 or any(query.unit for query in queries):
        return queries
    return tuple(query if query.name.startswith(METRIC) else query._replace(unit=MICROBATCH) for query in queries)


@lru_cache(maxsize=1024)
def _equivalent(queries: Queries) -> Queries:
    return equivalent_queries(queries)


def counted_event(release: Release) -> Event:
    """Normalize a release so that releases of equal cost are equal, whatever their bounds."""
    return Event(release.sampling, _equivalent(release.queries))


@dataclass
class Ledger:
    """A ledger in memory.

    The file has one JSON object a line:

    - `{"record": "header", "schema": 2, ..., "plan": {...}}` opens a phase: the fields of `Header`, with the plan as
      `StatedPlan` tells it. Phases are numbered from 0. Schema 1 has no plan, and spells `neighbouring_relation`, which
      is read in schema 2, too.
    - `{"record": "release", "number": n, "checksum": "...", "sampling": {...}, "queries": [...]}`: a release of the
      phase before it, on disk before it is used. Numbers go on from line to line; a new phase may repeat some.
    - `{"record": "checksum", "number": n, "checksum": "..."}`, by earlier versions, from schema 2 on: directly after
      the line of a release without a checksum, if its sum was computed after its line was written.

    In a phase of schema 2 each release must follow its plan (`StatedPlan.contradiction`); the cost of a noise process
    of a foreign class is not compared. A line that is not so is damage. So is a phase that begins within a
    round, of which the first step states the cost, unless it goes on where the phase before ended.

    Attributes:
        headers: One per phase.
        releases: Pairs (phase, release), in the order of writing.
        damage: None, or the error in the first damaged line.
        doubt: None, or the reason why it is not the one that its run left, by a result or a checkpoint.
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
        """Return whether its noise and its batches cannot be drawn again.

        Both then came from the operating system's entropy, as kept keys do.
        """
        for header in self.headers:
            for source in (header.replay, header.noise_source, header.lot_source):
                if source is not None and not source.startswith(KEPT):
                    return False
        return True

    @property
    def header(self) -> Header:
        """The newest header."""
        return self.headers[-1]

    def to_pandas(self) -> pd.DataFrame:
        """Return one row for each released sum: number, phase, sampling, rate, name, sensitivity, noise_std, unit."""
        import pandas as pd

        if self.wrong is not None:
            warnings.warn(f"the ledger is damaged: {self.wrong}.", stacklevel=2)
        rows = []
        for phase, release in self.releases:
            for query in release.queries:
                rows.append(
                    {
                        "number": release.number,
                        "phase": phase,
                        "sampling": release.sampling.kind,
                        "rate": release.sampling.rate,
                        **query._asdict(),
                    }
                )
        return pd.DataFrame(rows, columns=["number", "phase", "sampling", "rate", *SumQuery._fields])

    def prefix(self, releases: int) -> Ledger:
        """The ledger as it was after so many releases, in the order of writing, with its damage and doubt."""
        return Ledger(
            headers=self.headers,
            releases=self.releases[:releases],
            damage=self.damage,
            doubt=self.doubt,
        )


def read_ledger(path: str | os.PathLike[str]) -> Ledger:
    """Read a ledger as far as it is intact.

    Args:
        path: The file.

    Returns:
        All readable lines; `damage` names the first one that is not. If lines are missing, every epsilon computed from
        the rest is a lower bound.

    Raises:
        LedgerError: There is no such file, or not even a header is readable.
    """
    path = Path(path)
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise LedgerError(f"cannot read the ledger {path}: {error.strerror}.") from None
    reader = _Reader()
    ledger = reader.ledger
    tail = lines.pop()
    for number, line in enumerate(lines, start=1):
        try:
            reader.read(line)
        except ValidationError as error:
            ledger.damage = ledger.damage or f"line {number} is damaged ({problem_of(error)})"
        except _NOT_A_LINE as error:
            ledger.damage = ledger.damage or f"line {number} is damaged ({type(error).__name__}: {error})"
    if tail:
        ledger.damage = ledger.damage or f"line {len(lines) + 1} is cut off"
    if not ledger.headers:
        raise LedgerError(f"{path} is not a dpbench ledger: {ledger.damage or 'it is empty'}.")
    return ledger


_SAME_UNITS = {"item": "example"}  # an item as given is what loaders of other libraries' data sets call an example


def check_one_population(ledgers: Mapping[str, Ledger]) -> None:
    """Raise LedgerError unless all headers and releases speak of one population, unit and neighboring relation.

    Args:
        ledgers: Ledgers by the name that the error shows.
    """
    headers = [(name, header) for name, ledger in ledgers.items() for header in ledger.headers]
    for name, header in headers:
        first_name, first = headers[0]
        for field_name in ("unit", "neighboring_relation", "population"):
            mine, other = (getattr(each, field_name) for each in (header, first))
            if _SAME_UNITS.get(mine, mine) != _SAME_UNITS.get(other, other):
                raise LedgerError(
                    f"{name} has {field_name} {mine!r}, {first_name} {other!r}: runs on different data or with "
                    "different guarantees do not compose into one epsilon; account for each separately."
                )
    for name, ledger in ledgers.items():
        header = ledger.header
        for sampling in {release.sampling for _, release in ledger.releases}:
            relations = ("none", header.neighboring_relation)
            same_records = sampling.population == header.population and sampling.unit == header.unit
            if not same_records or sampling.neighboring_relation not in relations:
                raise LedgerError(
                    f"{name} contradicts itself: its header says {header.neighboring_relation} among "
                    f"{header.population} {header.unit}s, a release {sampling.kind} sampling among "
                    f"{sampling.population} {sampling.unit}s."
                )


_Checksums = dict[int, str | None]
"""Number of each release of a phase → its checksum."""


def check_own_randomness(ledgers: Mapping[str, Ledger]) -> None:
    """Raise LedgerError where two ledgers drew the same noise or the same batches for different releases.

    The difference of two sums with one noise is not private, and releases of the same batches are not amplified by
    sampling independently: composition would say too little. The same releases twice are merely counted twice.

    Args:
        ledgers: Ledgers by the name that the error shows.
    """
    # (noise or batches, phase, source) → (name, checksums) of the ledgers that have it.
    drawn: dict[tuple[str, int, str], list[tuple[str, _Checksums]]] = {}
    for name, ledger in ledgers.items():
        for phase, mine in _checksums_by_phase(ledger).items():
            header = ledger.headers[phase]
            sources = {
                "noise": header.noise_source,
                "batches": header.lot_source,
            }
            for kind, source in sources.items():
                if source is None:
                    continue
                earlier = drawn.setdefault((kind, phase, source), [])
                for other, theirs in earlier:
                    if _differ(mine, theirs):
                        origin = "kept key" if source.startswith(KEPT) else "seed"
                        raise LedgerError(
                            f"{name} and {other} drew their {kind} from the same {origin}, for different "
                            "releases: no epsilon covers both. Publish only one of them, or train one again with "
                            f"another seed (seed=...; in Python that of the {_SEEDED[kind]}) or, without a seed, from "
                            "the beginning."
                        )
                earlier.append((name, mine))


def _checksums_by_phase(ledger: Ledger) -> dict[int, _Checksums]:
    """Phase → number of each of its releases → checksum."""
    phases: dict[int, _Checksums] = {}
    for phase, release in ledger.releases:
        checksums = phases.setdefault(phase, {})
        checksums[release.number] = release.checksum
    return phases


def _differ(mine: _Checksums, theirs: _Checksums) -> bool:
    """Return whether two ledgers have different sums under one number, or sums that cannot be compared."""
    for number, checksum in mine.items():
        if number not in theirs:
            continue
        if checksum is None or theirs[number] != checksum:
            return True
    return False


def _with_noise(queries: list[SumQuery]) -> list[SumQuery]:
    for query in queries:
        if not _SMALLEST < query.noise_std / query.sensitivity < 1 / _SMALLEST:
            raise ValueError("a release needs queries with positive and finite sensitivity and noise_std")
    return queries


_QUERIES = TypeAdapter(Annotated[list[SumQuery], Field(min_length=1), AfterValidator(_with_noise)], config=STRICT)
_CHECKSUM: TypeAdapter[str | None] = TypeAdapter(str | None, config=STRICT)


class _Numbered(BaseModel, strict=True):
    number: int


class _ChecksumLine(_Numbered, extra="forbid"):
    record: str
    checksum: str


class _Reader:
    """Reads the lines of a ledger, one after the other.

    Attributes:
        ledger: The ledger as read so far.
    """

    def __init__(self) -> None:
        self.ledger = Ledger()
        self._events: dict[bytes, tuple[Sampling, Queries]] = {}
        # Number of the release in the line before, if its checksum may follow.
        self._awaiting: int | None = None
        self._largest_number = -1

    def read(self, line: bytes) -> None:
        """Add the content of a line.

        Raises:
            LedgerError: It makes no sense, or none in this place; or one of `_NOT_A_LINE`.
        """
        awaiting = self._awaiting
        self._awaiting = None
        data = json.loads(line.decode())  # given bytes, json first guesses their encoding
        record = data["record"]
        if record == "header":
            self._read_header(data)
        elif record == "release" and self.ledger.headers:
            self._read_release(data, line)
        elif record == "checksum" and self.ledger.headers:
            self._read_checksum(data, awaiting)
        else:
            raise LedgerError("neither a header nor a release after one")

    def _read_header(self, data: dict[str, Any]) -> None:
        schema = data.pop("schema")
        if type(schema) is not int or not WITHOUT_PLANS <= schema <= SCHEMA:
            raise LedgerError(
                f"it was written with ledger schema {schema}, and this version of dpbench reads schemas up to "
                f"{SCHEMA}: use the version that wrote it"
            )
        del data["record"]
        headers = self.ledger.headers
        header = Header(**{name: value for name, value in data.items() if name != "plan"})
        headers.append(header)
        due = len(headers) - 1
        if header.phase != due:
            raise LedgerError(f"phase {header.phase} is where phase {due} is due")
        if schema == WITHOUT_PLANS:
            if "plan" in data:
                raise LedgerError(f"a header of schema {WITHOUT_PLANS} has no plan")
            return
        # With a plan that makes no sense the phase is still one: its releases count as they are.
        plan = StatedPlan.from_dict(data["plan"])
        headers[-1] = replace(header, plan=plan)

    def _read_release(self, data: dict[str, Any], line: bytes) -> None:
        ledger = self.ledger
        plan = ledger.header.plan
        phase = len(ledger.headers) - 1
        sampling, queries = self._event(data, line)
        number = _Numbered(**data).number
        checksum = data.get("checksum")
        if plan is not None:
            checksum = _CHECKSUM.validate_python(checksum)
        last_phase, last_number = -1, -1
        if ledger.releases:
            last_phase, last_number = ledger.releases[-1][0], ledger.releases[-1][1].number
        is_due = number == last_number + 1
        if phase not in (0, last_phase):
            # Another phase may repeat numbers.
            is_due = number <= self._largest_number + 1
        # From here on it counts, whatever else is wrong with it.
        release = Release(number, sampling, queries, checksum)
        ledger.releases.append((phase, release))
        self._largest_number = max(self._largest_number, number)
        if not is_due and ledger.damage is None:
            raise LedgerError(f"release {number} follows release {last_number}")
        if sampling.at(number) != sampling:
            raise LedgerError(f"release {number} draws a batch of another step: {sampling.to_dict()}")
        if phase != last_phase and number != last_number + 1 and number % sampling.cycle:
            raise LedgerError(f"release {number} begins a phase within a round of {sampling.cycle} batches")
        if plan is None:
            return
        if checksum is None:
            self._awaiting = number
        contradiction = plan.contradiction(number, Event(sampling, queries))
        if contradiction is not None:
            raise LedgerError(contradiction)

    def _event(self, data: dict[str, Any], line: bytes) -> tuple[Sampling, Queries]:
        """Sampling and queries of a release's line; lines that say the same share them."""
        # Lines of equal cost end equally, as the writer writes them; with keys in another order nothing is remembered.
        key = line
        sampling_at = line.find(b'"sampling"')
        queries_at = line.find(b'"queries"')
        if 0 <= sampling_at < queries_at:
            key = line[sampling_at:]
        if key not in self._events:
            queries = tuple(_QUERIES.validate_python(data["queries"]))
            sampling = sampling_from_dict(data["sampling"])
            self._events[key] = (sampling, queries)
        return self._events[key]

    def _read_checksum(self, data: dict[str, Any], awaiting: int | None) -> None:
        line = _ChecksumLine(**data)
        number = line.number
        if number != awaiting:
            raise LedgerError(
                f"the checksum of release {number} does not directly follow the line of that release, or is a second "
                "one"
            )
        releases = self.ledger.releases
        phase, release = releases[-1]
        releases[-1] = (phase, replace(release, checksum=line.checksum))
