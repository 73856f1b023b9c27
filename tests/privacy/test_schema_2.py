"""Ledgers of schema 2: plans in their headers, checksums that come later, and whoever tampers with either."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dpbench.errors import ConfigurationError, LedgerError
from dpbench.privacy.accounting.composition import ledger_epsilon
from dpbench.privacy.accounting.ledger import Header, Ledger, Release, read_ledger
from dpbench.privacy.accounting.seal import seal_of
from dpbench.privacy.accounting.stated_plan import StatedPlan
from dpbench.privacy.events import SumQuery
from dpbench.privacy.mechanism.noise_process import Scheduled
from dpbench.privacy.mechanism.schedules import Factors
from dpbench.privacy.mechanism.training_plan import TrainingPlan
from dpbench.privacy.sampling import PoissonSampling
from tests.privacy.mechanisms import CASES
from tests.privacy.test_ledger import opened
from tests.privacy.test_training_plan import changed
from tests.support.releases import made, rows
from tests.support.releases import release as make_release

DPSGD = CASES["dpsgd"].plan()
PLAN = CASES["metrics"].plan(Scheduled(1.3, Factors((1.0, 1.0, 0.5))), size_factors=Factors((1.0, 1.5)))
COUNT = 4


def header_of(plan: TrainingPlan, replay: str | None = "abc") -> Header:
    sampling = plan.sampling
    return Header(
        unit=sampling.unit,
        neighboring_relation=sampling.neighboring_relation,
        population=sampling.population,
        delta=1e-5,
        replay=replay,
        microbatch_size=plan.summands.per_summand,
        plan=StatedPlan.from_dict(plan.to_dict()),
    )


HEADER = header_of(PLAN)


def release(number: int, plan: TrainingPlan = PLAN, checksum: str | None = "0x1p+0") -> Release:
    planned = plan.release(number)
    return Release(number, planned.sampling, planned.queries, checksum)


def lines_of(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def put(path: Path, lines: list[Any]) -> Ledger:
    path.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))
    return read_ledger(path)


def write(path: Path, plan: TrainingPlan = PLAN, count: int = COUNT, late: bool = False) -> Path:
    """A ledger, with each checksum in its line or, as older executors wrote them, in one behind it."""
    with opened(path, header_of(plan)) as writer:
        for number in range(count):
            writer.append(release(number, plan, f"{number}"))
    if late:
        lines = []
        for line in lines_of(path):
            checksum = line.pop("checksum", None)
            lines.append(line)
            if checksum is not None:
                lines.append({"record": "checksum", "number": line["number"], "checksum": checksum})
        put(path, lines)
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A ledger of schema 2."""
    return write(tmp_path / "l")


# ------------------------------------------------------------------------------- as it is written


@pytest.mark.parametrize("late", [False, True])
def test_round_trip(tmp_path: Path, late: bool) -> None:
    path = write(tmp_path / "l", late=late)
    ledger = read_ledger(path)
    assert ledger.damage is None and ledger.headers == [HEADER]
    assert ledger.releases == [(0, release(number, checksum=str(number))) for number in range(COUNT)]
    first, second, *_ = lines_of(path)
    assert first["schema"] == 2 and first["plan"] == PLAN.to_dict()
    assert ("checksum" in second) is not late


# ------------------------------------------------------------------------------- what does not follow the plan


def test_the_writer_refuses_what_readers_would_take_for_damage(tmp_path: Path) -> None:
    one = release(0)
    with opened(tmp_path / "l", HEADER) as writer:
        for wrong in (
            dataclasses.replace(one, sampling=PoissonSampling(240, 0.06)),
            dataclasses.replace(one, queries=one.queries[:1]),
        ):
            with pytest.raises(LedgerError, match="so the release was not made and not written"):
                writer.append(wrong)
        assert not read_ledger(tmp_path / "l").releases and not writer.events


def test_a_plan_of_other_records_is_refused() -> None:
    for name, value in (("population", 241), ("unit", "user"), ("microbatch_size", 2), ("neighboring_relation", "x")):
        with pytest.raises(LedgerError, match=f"the header has {name} "):
            dataclasses.replace(HEADER, **{name: value})


Edit = Callable[[list[Any]], list[Any]]


def edited(number: int, place: str, value: Any) -> Edit:
    return lambda lines: [*lines[:number], changed(lines[number], place, value), *lines[number + 1 :]]


def arranged(*numbers: int) -> Edit:
    return lambda lines: [lines[number] for number in numbers]


def followed_by(line: Any) -> Edit:
    return lambda lines: [*lines, line]


def header_again(schema: Any) -> Edit:
    return lambda lines: [*lines, {**lines[0], "schema": schema, "phase": 1}]


EDITS: list[tuple[str, Edit]] = [
    ("release 2 has a noise multiplier of", edited(3, "queries.0.noise_std", 1.01)),
    ("release 0 has a noise multiplier of", edited(0, "plan.noise.noise_multiplier", 2.6)),
    ("release 2 draws a batch by", edited(3, "sampling.sample_rate", 0.05)),
    ("release 1 draws a batch by", edited(0, "plan.size_factors", [])),
    (
        "release 2 has no query of its own",
        edited(3, "queries", [{"name": "earlier/x", "sensitivity": 1.0, "noise_std": 1.0}]),
    ),
    ("the header has population", edited(0, "plan.sampling.population", 2400)),
    ("release 3 follows release 1", edited(3, "number", 3)),
    ("Input should be a valid string", edited(3, "checksum", 3)),
    ("schema 1 has no plan", edited(0, "schema", 1)),
    ("ledger schema 4", header_again(4)),
    ("phase 0 is where phase 1 is due", arranged(0, 1, 2, 0, 3, 4)),
    ("release 1 follows release 1", arranged(0, 1, 2, 2, 3, 4)),
    ("release 1 follows release -1", lambda lines: [lines[0], {**lines[0], "phase": 1}, lines[2]]),
    ("neither a header nor a release after one", arranged(1, 2, 3, 4, 0)),
    ("neither a header nor a release after one", followed_by({"record": ["release"]})),
    ("line 6 is damaged (TypeError", followed_by(None)),
    (
        "the checksum of release 3 does not directly follow",
        followed_by({"record": "checksum", "number": 3, "checksum": "1"}),
    ),
    ("delta: Input should be", edited(0, "delta", 2.0)),
    ("microbatch_size: Input should be", edited(0, "microbatch_size", 0)),
    ("unit: Input should be", edited(0, "unit", ["x"])),
]


def outcome(path: Path, lines: list[Any]) -> str:
    """What readers say of a ledger with these lines."""
    try:
        return str(put(path, lines).damage)
    except LedgerError as error:
        return str(error)


def test_edits_are_damage(path: Path) -> None:
    lines = lines_of(path)
    for words, edit in EDITS:
        message = outcome(path, edit(lines))
        assert words in message and "\n" not in message and len(message) < 600, (words, message)
        with pytest.raises(LedgerError):
            opened(path, HEADER, COUNT)


def test_what_comes_after_damage_is_counted(path: Path) -> None:
    """Also where the plan makes no sense: the releases count as they are."""
    lines = lines_of(path)
    for place, scheme in ((0, "plan.sampling.kind"), (2, "sampling.kind")):
        ledger = put(path, edited(place, scheme, "magic")(lines))
        assert str(ledger.damage).startswith(f"line {place + 1} is damaged")
        assert len(ledger.releases) == COUNT - bool(place)


def test_numbers_of_a_release_that_make_no_sense(path: Path) -> None:
    lines = lines_of(path)
    for value in (math.nan, math.inf, 0.0, 1e300, 1e-300, True, "1"):
        message = outcome(path, edited(2, "queries.0.noise_std", value)(lines))
        assert message.startswith("line 3 is damaged") and "its plan" not in message, (value, message)


@pytest.mark.parametrize(
    "edit",
    [
        arranged(0, 1, 2, 2, 3, 4),
        edited(4, "number", 0),
        edited(2, "number", False),
        edited(2, "checksum", ["0"]),
    ],
)
def test_edits_of_checksums_are_damage(tmp_path: Path, edit: Edit) -> None:
    """No checksum changes what is counted."""
    path = write(tmp_path / "l", count=2, late=True)
    whole = read_ledger(path)
    ledger = put(path, edit(lines_of(path)))
    assert ledger.damage is not None and ledger.events == whole.events


def test_cut_at_any_byte(tmp_path: Path) -> None:
    """It is a shorter ledger or a damaged one, and what is cut from a line never counts as a whole one."""
    path = write(tmp_path / "l", count=2, late=True)
    whole = path.read_bytes()
    for end in range(whole.index(b"\n") + 1, len(whole), 7):
        path.write_bytes(whole[:end])
        ledger = read_ledger(path)
        lines = whole[:end].splitlines(keepends=True)
        assert lines[-1].endswith(b"\n") or str(ledger.damage).endswith("is cut off")
        assert len(ledger.releases) == sum(b'"queries"' in line and line.endswith(b"\n") for line in lines)


# ------------------------------------------------------------------------------- checksums that come later


@pytest.mark.parametrize("late", [False, True])
def test_a_replay_is_compared_wherever_its_checksum_stands(tmp_path: Path, late: bool) -> None:
    path = write(tmp_path / "l", late=late)
    before = path.read_bytes()
    with opened(path, HEADER, 2) as writer:
        assert (writer.phase, writer.repeated.total()) == (0, COUNT - 2)
        assert writer.seal.lines == (5 if late else 3)
        for number in range(2, COUNT):
            assert writer.differs(release(number, checksum="another"))
            # A sum that is not known yet cannot be compared: it may not be used with this noise.
            assert writer.differs(release(number, checksum=None))
            with pytest.raises(LedgerError, match="another sum or other parameters"):
                writer.append(release(number, checksum="another"))
            writer.append(release(number, checksum=str(number)))
        assert path.read_bytes() == before and writer.seal == seal_of(path)
        writer.append(release(COUNT))
    assert len(read_ledger(path).releases) == writer.events.total() == COUNT + 1


def test_a_release_without_checksum_is_never_repeated(tmp_path: Path) -> None:
    """It counts, and the run goes on behind it, or else in a new phase with noise of its own."""
    path = tmp_path / "l"
    with opened(path, HEADER) as writer:
        for number in range(COUNT):
            writer.append(release(number, checksum="x" if number % 2 else None))
    for start, count in ((COUNT, COUNT), (1, 2 * COUNT - 1)):
        with opened(path, HEADER, start) as writer:
            assert (writer.phase, writer.repeated.total()) == (int(start < COUNT), 0)
            for number in range(start, COUNT):
                writer.append(release(number, checksum="y"))
        ledger = read_ledger(path)
        assert ledger.damage is None and len(ledger.releases) == writer.events.total() == count


def test_a_disk_that_fills_up_in_a_line_and_has_room_again(tmp_path: Path) -> None:
    """What was written of the line is taken back."""
    path = tmp_path / "l"
    with opened(path, HEADER) as writer:
        writer.append(release(0))
        whole = writer._file

        class Full:
            def write(self, data: bytes) -> int:
                return whole.write(data[: len(data) // 2]) or 0

            def fileno(self) -> int:
                return whole.fileno()

        writer._file = Full()  # type: ignore[assignment]
        with pytest.raises(LedgerError, match="No space left.*free some space and resume"):
            writer.append(release(1))
        assert writer.events.total() == 1
        writer._file = whole
    with opened(path, HEADER, 1) as resumed:
        resumed.append(release(1))
    ledger = read_ledger(path)
    assert ledger.damage is None and len(ledger.releases) == 2


# ------------------------------------------------------------------------------- schema 1


def test_a_run_of_schema_1_goes_on_in_a_phase_of_schema_2(tmp_path: Path) -> None:
    """Nothing is counted twice, nothing is lost; epsilon is that of both phases."""
    path = tmp_path / "ledger.jsonl"
    releases = made(tmp_path)
    for step in range(2):
        make_release(releases, rows(step))
    state = {**releases.state_dict(), "ledger": None}
    releases.budget.close()
    header, *lines = lines_of(path)
    header["neighbouring_relation"] = header.pop("neighboring_relation")
    del header["plan"]
    put(path, [{**header, "schema": 1}, *lines])
    old = path.read_bytes()
    again = made(tmp_path, start=state)
    assert (again.phase, again.lot_phase, again.budget.repeated.total()) == (1, 1, 0)
    for step in (2, 3):
        make_release(again, rows(step))
    ledger = read_ledger(path)
    assert ledger.damage is None and path.read_bytes().startswith(old)
    assert [header.schema for header in ledger.headers] == [1, 2]
    assert [(phase, one.number) for phase, one in ledger.releases] == [(0, 0), (0, 1), (1, 2), (1, 3)]
    assert again.epsilon() == ledger_epsilon(ledger, 1e-4)


# ------------------------------------------------------------------------------- other plans


def test_what_no_lot_can_be() -> None:
    stated = StatedPlan.from_dict({**PLAN.to_dict(), "size_factors": [[1.0, 2], [1e6, 1]]})
    with pytest.raises(ConfigurationError, match="must lie"):
        stated.event(5)
    assert stated.event(1).queries == (SumQuery("equivalent", 1.0, 1.3),)
