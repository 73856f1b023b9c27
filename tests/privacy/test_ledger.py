"""The ledger: round trip, damage, replay, phases."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import runpy
import signal
import sys
from contextlib import closing
from pathlib import Path

import pytest

from dpbench import locks
from dpbench.errors import LedgerError
from dpbench.privacy.accounting.ledger import Header, Release, read_ledger
from dpbench.privacy.accounting.seal import Seal, difference, seal_of
from dpbench.privacy.accounting.writer import LedgerWriter
from dpbench.privacy.events import SumQuery
from dpbench.privacy.sampling import PoissonSampling

HEADER = Header("example", "add_or_remove_one", 1000, 1e-5, replay="abc")
OTHER = dataclasses.replace(HEADER, replay="other")
UNSEEDED = dataclasses.replace(HEADER, replay=None)
POISSON = PoissonSampling(1000, 0.1)


def release(number: int, std: float = 1.1) -> Release:
    return Release(number, POISSON, (SumQuery("all", 1.0, std),), "0x1p+0")


def opened(
    path: Path,
    header: Header = HEADER,
    start: int | None = None,
    known: Seal | None = None,
    place: tuple[int, int] | None = None,
) -> closing[LedgerWriter]:
    """A writer of a fresh run, or of one that resumes at a step."""
    return closing(LedgerWriter(path, header, start or 0, start is not None, known, place))


def write(path: Path, count: int, header: Header = HEADER, start: int | None = None) -> LedgerWriter:
    with opened(path, header, start) as writer:
        for number in range(count):
            writer.append(release(number + (start or 0)))
    return writer


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.jsonl"


def test_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "ledger.jsonl"
    with opened(path) as writer:
        writer.append(release(0))
        ledger = read_ledger(path)  # on disk before `append` returns
    assert ledger.headers == [HEADER] and ledger.damage is None
    assert ledger.releases == [(0, release(0))]
    assert writer.events.total() == 1
    assert '"schema":1' in path.read_text()


@pytest.mark.parametrize("rest", ["", "{", "{}\n", "no ledger\n"])
def test_an_existing_ledger_is_never_overwritten(path: Path, rest: str) -> None:
    """Nor a header with something behind it. A refused writer gives the lock back."""
    write(path, 0 if rest else 2)
    with path.open("a") as file:
        file.write(rest)
    before = path.read_bytes()
    for _ in range(2):
        with pytest.raises(LedgerError, match="already records a run"):
            opened(path)
    assert path.read_bytes() == before


@pytest.mark.parametrize("start", [None, 0])
def test_a_ledger_without_a_release_is_taken_over(path: Path, start: int | None) -> None:
    """Of a run that failed before its first one: it cost nothing, whatever its data and settings were."""
    write(path, 0, dataclasses.replace(HEADER, unit="user", population=7))
    assert write(path, 1, start=start).phase == 0
    ledger = read_ledger(path)
    assert ledger.headers == [HEADER] and len(ledger.releases) == 1


def test_a_replay_that_differs_goes_on_in_a_new_phase(path: Path) -> None:
    """What was recorded and is not repeated counts; what is released on the same lots again is one release with it."""
    write(path, 5)
    with opened(path, start=2) as writer:
        writer.append(release(2))
        assert not writer.differs(release(3)) and writer.differs(release(3, std=9.0))
        writer.leave_replay()
        assert (writer.phase, writer.lot_phase, writer.repeated.total()) == (1, 0, 0)
        assert sorted(writer.joint) == [3, 4] and writer.joint[3][0].name == "earlier/all"
        assert writer.seal == seal_of(path)
        for number in range(3, 6):
            writer.append(release(number))
        assert writer.seal == seal_of(path)
    releases = read_ledger(path).releases
    assert [(phase, one.number) for phase, one in releases[4:]] == [(0, 4), (1, 3), (1, 4), (1, 5)]
    with opened(path, start=4, place=(1, 0)) as writer:  # from a checkpoint of the new phase
        assert (writer.phase, writer.lot_phase, sorted(writer.joint)) == (1, 0, [0, 1, 2, 3, 4])
    with opened(path, start=2, place=(0, 0)) as writer:  # from the one before
        assert (writer.phase, writer.lot_phase, writer.joint) == (2, 2, {})


@pytest.mark.parametrize("header", [OTHER, UNSEEDED])
def test_another_run_opens_a_phase_and_counts_everything(path: Path, header: Header) -> None:
    """Other settings with the old noise would reveal differences of sums, so the phase changes the noise's key."""
    write(path, 5)
    writer = write(path, 4, header, start=2)
    ledger = read_ledger(path)
    assert (writer.phase, len(ledger.headers)) == (1, 2)
    assert len(ledger.releases) == writer.events.total() == 9


def test_continuing_at_the_end_needs_no_phase(path: Path) -> None:
    write(path, 3, UNSEEDED)
    assert write(path, 2, UNSEEDED, start=3).phase == 0
    assert len(read_ledger(path).releases) == 5


def test_a_checkpoint_of_an_older_phase_does_not_go_on_in_the_newest(path: Path) -> None:
    write(path, 5)
    write(path, 5, start=5)
    assert write(path, 2, OTHER, start=5).phase == 1
    assert write(path, 2, OTHER, start=10).phase == 2
    ledger = read_ledger(path)
    assert ledger.damage is None and len(ledger.releases) == 14


@pytest.mark.parametrize(("start", "phase"), [(0, 1), (2, 2)])
def test_a_phase_whose_first_release_was_cut_goes_on_from_its_beginning_only(
    path: Path, start: int, phase: int
) -> None:
    write(path, 5)
    write(path, 1, OTHER, start=0)
    path.write_bytes(path.read_bytes()[:-10])
    assert write(path, 1, OTHER, start).phase == phase


def test_a_line_cut_by_a_crash_is_dropped_on_resume(path: Path) -> None:
    write(path, 5)
    whole = path.read_bytes()
    path.write_bytes(whole[:-10])
    ledger = read_ledger(path)
    assert (len(ledger.releases), ledger.damage) == (4, "line 6 is cut off")
    write(path, 3, start=2)
    assert path.read_bytes() == whole


def test_what_is_no_ledger(path: Path) -> None:
    with pytest.raises(LedgerError, match="No such file"):
        read_ledger(path)
    for text, message in (("", "it is empty"), ("hello\n", "line 1 is damaged")):
        path.write_text(text)
        with pytest.raises(LedgerError, match=message):
            read_ledger(path)


def test_contradictions_are_refused(path: Path) -> None:
    with pytest.raises(LedgerError, match="missing or empty"):
        opened(path, start=9)
    assert not path.exists()
    write(path, 3)
    with pytest.raises(LedgerError, match="population 1000, this run 7"):
        opened(path, dataclasses.replace(HEADER, population=7), start=3)
    with pytest.raises(LedgerError, match="has fewer"):
        opened(path, start=9)
    with pytest.raises(LedgerError, match="cannot write"):
        opened(path / "inside a file")


def test_keys_in_another_order_mean_the_same(path: Path) -> None:
    """As after a rewrite by another tool: no line may take over the queries of an earlier one."""
    with opened(path) as writer:
        for number, std in enumerate((10.0, 0.5, 0.5)):
            writer.append(release(number, std))
    before = read_ledger(path)
    lines = [json.dumps(json.loads(line), sort_keys=True) + "\n" for line in path.read_text().splitlines()]
    path.write_text("".join(lines))
    assert read_ledger(path) == before


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_one_process_writes_until_it_ends(path: Path) -> None:
    """Two `dpbench resume` of one run would each spend what is left of its budget.

    SIGKILL included, and although a process that it forked (a worker that loads data) lives on."""
    told, telling = os.pipe()
    holder = os.fork()
    if not holder:
        writer = LedgerWriter(path, HEADER)
        writer.append(release(0))
        worker = os.fork()
        if not worker:
            signal.pause()
        os.write(telling, worker.to_bytes(4, "little"))
        signal.pause()
    worker = int.from_bytes(os.read(told, 4), "little")
    try:
        for start in (None, 1):
            with pytest.raises(LedgerError, match="another process writes the ledger .*: .* Wait until it ends"):
                opened(path, start=start)
        os.kill(holder, signal.SIGKILL)
        os.waitpid(holder, 0)
        os.kill(worker, 0)  # still there
        write(path, 1, start=1)
    finally:
        os.kill(worker, signal.SIGKILL)
    assert len(read_ledger(path).releases) == 2


def test_a_lock_is_of_the_file_that_is_there(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever held it may have removed the file while another one waited to open it."""
    real = locks._lock
    kept = locks.open_locked(path)

    def removed_meanwhile(file: object) -> None:
        if not kept.closed:
            path.unlink()
            kept.close()
        real(file)  # type: ignore[arg-type]

    monkeypatch.setattr(locks, "_lock", removed_meanwhile)
    with locks.open_locked(path) as file:
        assert os.path.samestat(os.fstat(file.fileno()), path.stat())


def test_a_file_system_without_locks_warns_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(locks.fcntl, "flock", none)
    monkeypatch.setattr(locks, "_told", set())
    with pytest.warns(UserWarning, match="cannot be locked"):
        write(path, 1)
    write(path.with_name("second"), 1)


def test_ledgers_are_written_where_the_system_has_no_locks(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fcntl", None)
    without = runpy.run_path(locks.__file__)
    with pytest.warns(UserWarning, match="cannot be locked"), without["open_locked"](path) as file:
        file.write(b"{}")
    assert path.read_bytes() == b"{}"


def test_a_resumed_run_has_the_seals_of_an_uninterrupted_one(path: Path) -> None:
    """Also while it repeats releases that are on disk already."""
    seals = []
    with opened(path) as writer:
        for number in range(6):
            seals.append(writer.seal)
            assert writer.seal == seal_of(path)
            writer.append(release(number))
    with opened(path, start=2, known=seals[2]) as again:
        for number in range(2, 6):
            assert again.seal == seals[number]
            assert again.repeated.total() == 6 - number
            again.append(release(number))
        assert again.seal == writer.seal
        again.append(release(6))
        assert again.seal == seal_of(path)
    assert Seal.read(json.loads(json.dumps(seals[2]._asdict()))) == seals[2]
    assert Seal.read({"lines": "5", "sha256": "ab"}) is None
    with opened(path, OTHER, start=2) as other:
        assert other.seal == seal_of(path)


def test_another_ledger_than_the_checkpoint_knew(path: Path) -> None:
    seal = write(path, 5).seal
    write(path, 3, start=5)  # it may grow
    assert difference(path, seal, "the checkpoint") is None
    lines = path.read_text().splitlines(keepends=True)
    for old, new, count, message in (
        ("", "", 4, "4 lines, and the checkpoint at least 6: it was cut short"),
        ('"noise_std":1.1', '"noise_std":11.0', 6, "edited"),
        ("abc", "xyz", 6, "to another run"),
    ):
        path.write_text("".join(line.replace(old, new) for line in lines[:count]))
        with pytest.raises(LedgerError, match=rf"cannot continue .*{message}.*Restore the ledger"):
            opened(path, start=5, known=seal)


def test_each_line_is_that_of_its_own_release(tmp_path: Path) -> None:
    """What is equal may be written otherwise (1 and 1.0): no line may depend on what was released before."""
    whole = Release(0, PoissonSampling(1000, 1), (SumQuery("all", 2, 1.0),), "0x1p+0")
    real = Release(1, PoissonSampling(1000, 1.0), (SumQuery("all", 2.0, 1.0),), "0x1p+0")
    assert whole.sampling == real.sampling and whole.queries == real.queries

    def lines(name: str, *releases: Release) -> list[str]:
        with opened(tmp_path / name) as writer:
            for one in releases:
                writer.append(one)
        return (tmp_path / name).read_text().splitlines()[1:]

    assert lines("together", whole, real) == [*lines("whole", whole), *lines("real", real)]
    assert '"sensitivity":2,' in lines("again", whole)[0]
