"""Ledgers of schema 2: plans in their headers, checksums that come later, and whoever tampers with either."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from dpbench.errors import ConfigurationError, LedgerError
from dpbench.privacy.accounting.composition import ledger_epsilon
from dpbench.privacy.accounting.ledger import Header, Ledger, Release, read_ledger
from dpbench.privacy.accounting.seal import seal_of
from dpbench.privacy.accounting.stated_plan import StatedPlan
from dpbench.privacy.accounting.writer import LedgerWriter
from dpbench.privacy.events import EARLIER, Event, SumQuery
from dpbench.privacy.mechanism.noise_process import Scheduled
from dpbench.privacy.mechanism.schedules import Factors
from dpbench.privacy.mechanism.training_plan import TrainingPlan
from dpbench.privacy.sampling import PoissonSampling
from tests.privacy.mechanisms import CASES
from tests.privacy.test_training_plan import COUNTS, NUMBERS, Shrinking, changed
from tests.support.releases import ReleaseEngine, made, rows
from tests.support.releases import release as make_release
from tools.golden.ledgers import LEDGERS

DELTA = 1e-5
PLAN = CASES["metrics"].plan(Scheduled(1.3, Factors((1.0, 1.0, 0.5))), size_factors=Factors((1.0, 1.5)))
COUNT = 6


def header_of(plan: TrainingPlan, replay: str | None = "abc") -> Header:
    sampling = plan.sampling
    return Header(
        unit=sampling.unit,
        neighboring_relation=sampling.neighboring_relation,
        population=sampling.population,
        delta=DELTA,
        replay=replay,
        microbatch_size=plan.summands.per_summand,
        plan=StatedPlan.from_dict(plan.to_dict()),
    )


HEADER = header_of(PLAN)


def release(number: int, plan: TrainingPlan = PLAN, checksum: str | None = "0x1p+0") -> Release:
    planned = plan.release(number)
    return Release(number, planned.sampling, planned.queries, checksum)


def put_checksums_apart(path: Path) -> None:
    """Give each checksum a line behind that of its release, as older executors wrote them."""
    lines = []
    for data in lines_of(path):
        checksum = data.pop("checksum", None)
        lines.append(data)
        if checksum is not None:
            lines.append({"record": "checksum", "number": data["number"], "checksum": checksum})
    path.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))


def write(path: Path, plan: TrainingPlan = PLAN, count: int = COUNT, late: bool = False) -> Path:
    """A ledger, with each checksum in its line or in one of its own."""
    with closing(LedgerWriter(path, header_of(plan))) as writer:
        for number in range(count):
            writer.append(release(number, plan, f"{number}"))
    if late:
        put_checksums_apart(path)
    return path


def contradiction(plan: StatedPlan, one: Release) -> str | None:
    return plan.contradiction(one.number, Event(one.sampling, one.queries))


def lines_of(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def put(path: Path, lines: list[Any]) -> Ledger:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return read_ledger(path)


# ------------------------------------------------------------------------------- as it is written


@pytest.mark.parametrize("late", [False, True])
def test_round_trip(tmp_path: Path, late: bool) -> None:
    path = write(tmp_path / "l", late=late)
    ledger = read_ledger(path)
    assert ledger.damage is None and ledger.headers == [HEADER]
    assert ledger.releases == [(0, release(number, checksum=str(number))) for number in range(COUNT)]
    first, second, *_ = lines_of(path)
    assert first["schema"] == 2 and first["neighboring_relation"] == "add_or_remove_one"
    assert first["plan"] == PLAN.to_dict()
    assert ("checksum" in second) is not late
    assert len(lines_of(path)) == 1 + COUNT * (2 if late else 1)


@pytest.mark.parametrize("name", CASES)
def test_epsilon_by_the_header_alone(tmp_path: Path, name: str) -> None:
    """Of each prefix, without a line of a release."""
    ledger = read_ledger(write(tmp_path / "l", CASES[name].plan()))
    assert ledger.damage is None and ledger.header.plan is not None
    for prefix in (1, 4, COUNT):
        by_plan = Ledger([ledger.header], [])
        by_plan.events = ledger.header.plan.events(prefix)  # type: ignore[misc]
        by_lines = ledger_epsilon(ledger.prefix(prefix), DELTA)
        assert ledger_epsilon(by_plan, DELTA) == pytest.approx(by_lines, rel=1e-8)
    assert ledger_epsilon(ledger.prefix(COUNT), DELTA) == ledger_epsilon(ledger, DELTA)


def test_a_training_writes_it(tmp_path: Path) -> None:
    releases = made(tmp_path)
    for step in range(3):
        make_release(releases, rows(step))
    ledger = read_ledger(tmp_path / "ledger.jsonl")
    assert ledger.damage is None and ledger.header.schema == 2
    assert ledger.header.plan == StatedPlan.from_dict(releases.mechanism.training_plan.to_dict())
    assert ledger.events == ledger.header.plan.events(3)


def test_both_spellings_of_the_relation_are_read(tmp_path: Path) -> None:
    path = write(tmp_path / "l")
    lines = lines_of(path)
    lines[0]["neighbouring_relation"] = lines[0].pop("neighboring_relation")
    assert put(path, lines).headers == [HEADER]
    lines[0]["neighboring_relation"] = lines[0]["neighbouring_relation"]
    with pytest.raises(LedgerError, match="Unexpected keyword argument, by this version .*: use the version"):
        put(path, lines)


def test_noise_of_a_users_own_is_not_compared(tmp_path: Path) -> None:
    plan = CASES["dpsgd"].plan(Shrinking())
    path = write(tmp_path / "l", plan)
    assert read_ledger(path).damage is None
    lines = lines_of(path)
    lines[2]["queries"][0]["noise_std"] *= 2
    assert put(path, lines).damage is None
    lines[2]["sampling"]["sample_rate"] /= 2
    assert "draws a batch by" in str(put(path, lines).damage)


def test_what_an_earlier_phase_answered_stands_beside(tmp_path: Path) -> None:
    """A replay that came out otherwise: its lots were used before, and cost both."""
    path = write(tmp_path / "l")
    with closing(LedgerWriter(path, HEADER, 3, True)) as writer:
        writer.leave_replay()
        for number in range(3, COUNT):
            one = release(number, checksum="other")
            writer.append(dataclasses.replace(one, queries=(*one.queries, *writer.joint[number])))
    ledger = read_ledger(path)
    assert ledger.damage is None and len(ledger.headers) == 2 and len(ledger.releases) == COUNT + 3
    assert any(query.name.startswith(EARLIER) for query in ledger.releases[-1][1].queries)
    lines = lines_of(path)
    for query in lines[-1]["queries"]:
        query["name"] = EARLIER + query["name"]
    assert "has no query of its own" in str(put(path, lines).damage)


# ------------------------------------------------------------------------------- what does not follow the plan


def test_the_writer_refuses_what_readers_would_take_for_damage(tmp_path: Path) -> None:
    one = release(0)
    other = dataclasses.replace(one, sampling=PoissonSampling(240, 0.06))
    more = dataclasses.replace(one, queries=one.queries[:1])
    path = tmp_path / "l"
    with closing(LedgerWriter(path, HEADER)) as writer:
        for wrong in (
            other,
            more,
            release(2)._replace_number(0) if False else dataclasses.replace(release(2), number=0),
        ):
            with pytest.raises(LedgerError, match="would contradict itself, and the release was not made"):
                writer.append(wrong)
        assert not read_ledger(path).releases and not writer.events
        writer.append(one)
    assert read_ledger(path).damage is None


def test_a_plan_of_other_records_is_refused() -> None:
    for name, value in (("population", 241), ("unit", "user"), ("microbatch_size", 2), ("neighboring_relation", "x")):
        with pytest.raises(LedgerError, match=f"the header has {name} "):
            dataclasses.replace(HEADER, **{name: value})


Edit = Callable[[list[Any]], list[Any]]


def edited(number: int, place: tuple[Any, ...], value: Any) -> Edit:
    return lambda lines: [*lines[:number], changed(lines[number], place, value), *lines[number + 1 :]]


EDITS: dict[str, Edit] = {
    "noise of one query": edited(3, ("queries", 0, "noise_std"), 1.01),
    "sensitivity of one query": edited(3, ("queries", 0, "sensitivity"), 0.69),
    "a query less": lambda lines: [*lines[:3], {**lines[3], "queries": lines[3]["queries"][:-1]}, *lines[4:]],
    "a query set aside": edited(3, ("queries", 0, "name"), "earlier/all"),
    "all queries set aside": lambda lines: [
        *lines[:3],
        {**lines[3], "queries": [{**one, "name": "earlier/x"} for one in lines[3]["queries"]]},
        *lines[4:],
    ],
    "smaller lots": edited(3, ("sampling", "sample_rate"), 0.05),
    "more records": edited(3, ("sampling", "population"), 2400),
    "another unit": edited(3, ("sampling", "unit"), "user"),
    "another scheme": edited(3, ("sampling",), {"kind": "full", "population": 240, "unit": "example"}),
    "another number": edited(3, ("number",), 3),
    "a number that is true": edited(2, ("number",), True),
    "a huge number": edited(3, ("number",), 10**30),
    "a checksum that is no word": edited(3, ("checksum",), 3),
    "a checksum that is a list": edited(3, ("checksum",), ["0x1p+0"]),
    "more noise in the plan": edited(0, ("plan", "noise", "noise_multiplier"), 2.6),
    "another schedule in the plan": edited(0, ("plan", "noise", "factors"), [[1.0, 99]]),
    "a schedule left out of the plan": edited(0, ("plan", "size_factors"), []),
    "smaller lots in the plan": edited(0, ("plan", "sampling", "sample_rate"), 0.01),
    "more records in the plan": edited(0, ("plan", "sampling", "population"), 2400),
    "another unit in the plan": edited(0, ("plan", "sampling", "unit"), "user"),
    "microbatches in the plan": edited(0, ("plan", "summands", "per_summand"), 2),
    "no plan": lambda lines: [{k: v for k, v in lines[0].items() if k != "plan"}, *lines[1:]],
    "null for a plan": edited(0, ("plan",), None),
    "a plan in schema 1": edited(0, ("schema",), 1),
    "schema 4": lambda lines: [*lines, {**lines[0], "schema": 4, "phase": 1}],
    "a schema that is true": lambda lines: [*lines, {**lines[0], "schema": True, "phase": 1}],
    "a schema that is a float": lambda lines: [*lines, {**lines[0], "schema": 2.0, "phase": 1}],
    "a schema that is a word": lambda lines: [*lines, {**lines[0], "schema": "2", "phase": 1}],
    "the header twice": lambda lines: [lines[0], *lines],
    "the header again": lambda lines: [*lines, lines[0]],
    "a header between": lambda lines: [*lines[:3], lines[0], *lines[3:]],
    "a line twice": lambda lines: [*lines[:3], lines[2], *lines[3:]],
    "a line left out": lambda lines: [*lines[:3], *lines[4:]],
    "two lines exchanged": lambda lines: [*lines[:2], lines[3], lines[2], *lines[4:]],
    "the header last": lambda lines: [*lines[1:], lines[0]],
    "releases again": lambda lines: [*lines, *lines[1:]],
    "nested garbage": lambda lines: [*lines, [[[[lines]]]]],
    "a line that is a number": lambda lines: [*lines, 3],
    "a line that is null": lambda lines: [*lines, None],
    "a record of another name": lambda lines: [*lines, {"record": ["release"]}],
    "a checksum for a release that has one": lambda lines: [
        *lines[:3],
        {"record": "checksum", "number": 1, "checksum": "1"},
        *lines[3:],
    ],
    "a checksum first": lambda lines: [{"record": "checksum", "number": 0, "checksum": "0"}, *lines],
}
EDITS_OF_CHECKSUMS: dict[str, Edit] = {
    "twice": lambda lines: [*lines[:3], lines[2], *lines[3:]],
    "before its release": lambda lines: [lines[0], lines[2], lines[1], *lines[3:]],
    "one line later": lambda lines: [*lines[:2], lines[3], lines[2], *lines[4:]],
    "at the end": lambda lines: [*lines[:2], *lines[3:], lines[2]],
    "of the release before": edited(4, ("number",), 0),
    "of the next one": edited(2, ("number",), 1),
    "of no number": edited(2, ("number",), None),
    "of a number that is false": edited(2, ("number",), False),
    "of a number that is a float": edited(4, ("number",), 1.0),
    "no word": edited(2, ("checksum",), None),
    "a number": edited(2, ("checksum",), 1.0),
    "a list": edited(2, ("checksum",), ["0"]),
    "with something else": edited(2, ("sampling",), {}),
    "none": lambda lines: [*lines[:2], {"record": "checksum", "number": 0}, *lines[3:]],
}


def outcomes(path: Path, lines: list[Any]) -> tuple[str, Ledger | None]:
    """What is said of a ledger with these lines; all of its errors are of one line."""
    try:
        ledger = put(path, lines)
    except LedgerError as error:
        return str(error), None
    return ledger.damage or "", ledger


@pytest.mark.parametrize("name", EDITS)
def test_edits_are_damage(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / "l")
    whole = ledger_epsilon(read_ledger(path), DELTA)
    said, ledger = outcomes(path, EDITS[name](lines_of(path)))
    assert said and "\n" not in said and len(said) < 600
    assert ledger is None or ledger.damage is not None
    assert whole > 0
    with pytest.raises(LedgerError):
        LedgerWriter(path, HEADER, COUNT, True)


@pytest.mark.parametrize("name", EDITS_OF_CHECKSUMS)
def test_edits_of_checksums_are_damage(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / "l", late=True)
    whole = read_ledger(path)
    said, ledger = outcomes(path, EDITS_OF_CHECKSUMS[name](lines_of(path)))
    assert said and "\n" not in said
    # No checksum changes what is counted.
    assert ledger is not None and ledger.events == whole.events


@pytest.mark.parametrize("place", [("noise_std",), ("sensitivity",)])
def test_numbers_of_a_release_that_make_no_sense(tmp_path: Path, place: tuple[str]) -> None:
    path = write(tmp_path / "l")
    for value in NUMBERS:
        said, _ = outcomes(path, edited(2, ("queries", 0, *place), value)(lines_of(write_again(path))))
        assert said.startswith("line 3 is damaged"), (value, said)


def write_again(path: Path) -> Path:
    path.unlink()
    return write(path)


@pytest.mark.parametrize(
    ("place", "values"),
    [
        (("plan", "noise", "noise_multiplier"), NUMBERS),
        (("plan", "noise", "factors", 0, 1), COUNTS),
        (("plan", "size_factors", 0, 0), [*NUMBERS, 1e6, 1e-6]),
        (("plan",), [3, "x", [], {}, [[[]]], True]),
    ],
)
def test_values_of_the_plan_that_make_no_sense(tmp_path: Path, place: tuple[Any, ...], values: list[Any]) -> None:
    path = write(tmp_path / "l")
    good = lines_of(path)
    for value in values:
        said, ledger = outcomes(path, edited(0, place, value)(good))
        assert said and "\n" not in said, value
        # The releases count as they are.
        assert ledger is not None and len(ledger.releases) == COUNT


@pytest.mark.parametrize("kind", ["magic", ["poisson"], None, {}])
def test_a_scheme_that_nobody_knows(tmp_path: Path, kind: Any) -> None:
    """As where the class of a user's own was not imported: the releases count, if they can be read."""
    path = write(tmp_path / "l")
    good = lines_of(path)
    ledger = put(path, edited(0, ("plan", "sampling", "kind"), kind)(good))
    assert str(ledger.damage).startswith("line 1 is damaged") and len(ledger.releases) == COUNT
    ledger = put(path, edited(3, ("sampling", "kind"), kind)(good))
    assert str(ledger.damage).startswith("line 4 is damaged") and len(ledger.releases) == COUNT - 1


def test_two_ledgers_in_one(tmp_path: Path) -> None:
    """The second one's header is of phase 0; renumbered, its releases follow its own plan only."""
    one = lines_of(write(tmp_path / "one"))
    other = lines_of(write(tmp_path / "other", CASES["dpsgd"].plan()))
    path = tmp_path / "l"
    assert "phase 0 stands where phase 1 is due" in str(put(path, [*one, *other]).damage)
    assert "has a noise multiplier of" in str(put(path, [*one[:1], *other[1:]]).damage)
    both = put(path, [*one, {**other[0], "phase": 1}, *other[1:]])
    assert both.damage is None and len(both.releases) == 2 * COUNT


def test_deep_nesting_is_damage(tmp_path: Path) -> None:
    path = write(tmp_path / "l")
    text = path.read_text()
    path.write_text(text + "[" * 100_000 + "\n")
    assert "is damaged" in str(read_ledger(path).damage)
    path.write_text(text.replace('"factors":', '"factors":' + "[" * 100_000 + "]" * 100_000 + ',"x":', 1))
    with pytest.raises(LedgerError, match="line 1 is damaged"):
        read_ledger(path)


@pytest.mark.parametrize("late", [False, True])
def test_cut_at_any_byte(tmp_path: Path, late: bool) -> None:
    """It is a shorter ledger or a damaged one, and what is cut from a line never counts as a whole one."""
    whole = write(tmp_path / "l", count=3, late=late).read_bytes()
    counts = set()
    for end in range(1, len(whole), 7):
        (tmp_path / "cut").write_bytes(whole[:end])
        try:
            ledger = read_ledger(tmp_path / "cut")
        except LedgerError:
            assert end <= whole.index(b"\n")
            continue
        assert whole[:end].endswith(b"\n") or str(ledger.damage).endswith("is cut off")
        counts.add(len(ledger.releases))
        assert len(ledger.releases) == whole[: whole.rfind(b"\n", 0, end) + 1].count(b'"queries"')
    assert {0, 1, 2} <= counts


# ------------------------------------------------------------------------------- checksums that come later


@pytest.mark.parametrize("late", [False, True])
def test_a_replay_is_compared_wherever_its_checksum_stands(tmp_path: Path, late: bool) -> None:
    path = write(tmp_path / "l", late=late)
    before = path.read_bytes()
    per_release = 2 if late else 1
    with closing(LedgerWriter(path, HEADER, 2, True)) as writer:
        assert (writer.phase, writer.repeated.total()) == (0, COUNT - 2)
        assert writer.seal.lines == 1 + 2 * per_release
        for number in range(2, COUNT):
            assert writer.differs(release(number, checksum="another"))
            # A sum that is not known yet cannot be compared: it may not be used with this noise.
            assert writer.differs(release(number, checksum=None))
            writer.append(release(number, checksum=str(number)))
        assert path.read_bytes() == before and writer.seal == seal_of(path)
        writer.append(release(COUNT))
    assert len(read_ledger(path).releases) == COUNT + 1


@pytest.mark.parametrize("missing", [2, 4, COUNT - 1])
def test_a_release_without_checksum_is_never_repeated(tmp_path: Path, missing: int) -> None:
    """It counts, and the run goes on in a new phase with noise of its own."""
    path = tmp_path / "l"
    with closing(LedgerWriter(path, HEADER)) as writer:
        for number in range(COUNT):
            writer.append(release(number, checksum=None if number == missing else "x"))
    with closing(LedgerWriter(path, HEADER, 2, True)) as writer:
        assert (writer.phase, writer.lot_phase, writer.repeated.total()) == (1, 1, 0)
        for number in range(2, COUNT):
            writer.append(release(number, checksum="y"))
        assert writer.events.total() == 2 * COUNT - 2
    ledger = read_ledger(path)
    assert ledger.damage is None and len(ledger.releases) == 2 * COUNT - 2
    with closing(LedgerWriter(path, HEADER, COUNT, True)) as writer:  # nothing is repeated
        assert writer.phase == 1


def test_a_run_goes_on_behind_a_release_without_checksum(tmp_path: Path) -> None:
    path = tmp_path / "l"
    with closing(LedgerWriter(path, HEADER)) as writer:
        writer.append(release(0, checksum=None))
    with closing(LedgerWriter(path, HEADER, 1, True)) as writer:
        assert (writer.phase, writer.repeated.total()) == (0, 0)
        writer.append(release(1))
    assert read_ledger(path).damage is None and len(read_ledger(path).headers) == 1


def test_a_disk_that_fills_up_in_a_line_and_has_room_again(tmp_path: Path) -> None:
    """What was written of the line is taken back."""
    path = tmp_path / "l"
    writer = LedgerWriter(path, HEADER)
    writer.append(release(0, checksum="a"))
    whole = writer._file

    class Full:
        def write(self, data: bytes) -> int:
            return whole.write(data[: len(data) // 2]) or 0

        def fileno(self) -> int:
            return whole.fileno()

    writer._file = Full()  # type: ignore[assignment]
    with pytest.raises(LedgerError, match="free some space and resume"):
        writer.append(release(1))
    writer._file = whole
    writer.close()
    ledger = read_ledger(path)
    assert ledger.damage is None and [one.checksum for _, one in ledger.releases] == ["a"]
    with closing(LedgerWriter(path, HEADER, 1, True)) as resumed:
        resumed.append(release(1))
    assert len(read_ledger(path).releases) == 2


# ------------------------------------------------------------------------------- schema 1

OLD = Path(__file__).parents[1] / "golden" / "ledgers"


def old_ledger(path: Path) -> ReleaseEngine:
    """A run of `made`, whose ledger is put into schema 1."""
    releases = made(path.parent)
    for step in range(4):
        make_release(releases, rows(step))
    state = releases.state_dict()
    releases.budget.close()
    lines = lines_of(path)
    lines[0]["neighbouring_relation"] = lines[0].pop("neighboring_relation")
    del lines[0]["plan"]
    lines[0]["schema"] = 1
    put(path, lines)
    releases.memory = state
    return releases


def test_a_run_of_schema_1_goes_on_in_a_phase_of_schema_2(tmp_path: Path) -> None:
    """Nothing is counted twice, nothing is lost; epsilon is that of both phases."""
    path = tmp_path / "ledger.jsonl"
    state = {**old_ledger(path).memory, "ledger": None}
    old = path.read_bytes()
    again = made(tmp_path, start=state)
    assert (again.phase, again.lot_phase, again.budget.repeated.total()) == (1, 1, 0)
    for step in (4, 5):
        make_release(again, rows(step))
    again.budget.close()
    ledger = read_ledger(path)
    assert ledger.damage is None and path.read_bytes().startswith(old)
    assert [header.schema for header in ledger.headers] == [1, 2]
    assert [(phase, one.number) for phase, one in ledger.releases] == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 4), (1, 5)]
    whole = made(tmp_path / "whole")
    for step in range(6):
        make_release(whole, rows(step))
    assert again.epsilon() == whole.epsilon() == ledger_epsilon(ledger, 1e-4)


@pytest.mark.parametrize("name", [name for name in LEDGERS if not name.startswith("plan")])
def test_ledgers_of_schema_1_are_read_without_plans(name: str) -> None:
    path = OLD / f"{name}.jsonl"
    assert '"schema":2' not in path.read_text()
    assert all(header.plan is None and header.schema == 1 for header in read_ledger(path).headers)


def test_a_checksum_line_in_schema_1_is_damage(tmp_path: Path) -> None:
    path = tmp_path / "l"
    header = dataclasses.replace(HEADER, plan=None)
    with closing(LedgerWriter(path, header)) as writer:
        writer.append(release(0, checksum=None))
    assert '"checksum":null' in path.read_text() and '"schema":1' in path.read_text()
    lines = [*lines_of(path), {"record": "checksum", "number": 0, "checksum": "a"}]
    assert "does not stand directly after" in str(put(path, lines).damage)


# ------------------------------------------------------------------------------- other plans


def plans() -> Iterator[TrainingPlan]:
    for case in CASES.values():
        yield case.plan()
        yield case.plan(Scheduled(0.7, Factors((1.0, 0.7))))


def test_another_plan_opens_a_phase(tmp_path: Path) -> None:
    """Without a seed, too: its releases would not follow the plan that stands there."""
    path = tmp_path / "l"
    one, other = header_of(CASES["dpsgd"].plan(), None), header_of(CASES["per_layer"].plan(), None)
    with closing(LedgerWriter(path, one)) as writer:
        writer.append(release(0, CASES["dpsgd"].plan()))
    with closing(LedgerWriter(path, other, 1, True)) as writer:
        assert writer.phase == 1
        writer.append(release(1, CASES["per_layer"].plan()))
    assert read_ledger(path).damage is None
    with closing(LedgerWriter(path, other, 2, True)) as writer:
        assert writer.phase == 1


def test_no_release_of_another_plan_that_costs_less_passes(tmp_path: Path) -> None:
    """Each release of each plan against each other plan: equal in cost and lot, or damage."""
    for place, plan in enumerate(plans()):
        stated = StatedPlan.from_dict(plan.to_dict())
        for other in plans():
            found = contradiction(stated, release(0, other))
            event, its = plan.event(0), other.event(0)
            alike = event.sampling == its.sampling and math.isclose(
                event.queries[0].noise_std, its.queries[0].noise_std, rel_tol=1e-9
            )
            assert (found is None) == alike, (place, found)


def test_what_no_lot_can_be(tmp_path: Path) -> None:
    stated = StatedPlan.from_dict({**PLAN.to_dict(), "size_factors": [[1.0, 2], [1e6, 1]]})
    with pytest.raises(ConfigurationError, match="must hold"):
        contradiction(stated, release(5))
    assert contradiction(stated, release(0)) is None
    assert stated.event(1).queries == (SumQuery("equivalent", 1.0, 1.3),)
