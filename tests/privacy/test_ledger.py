"""The ledger: round trip, damage, replay, phases."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import os
import signal
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from dpbench import locks
from dpbench.errors import LedgerError
from dpbench.privacy.accounting import ledger as module
from dpbench.privacy.accounting.ledger import Header, Release, read_ledger
from dpbench.privacy.accounting.seal import Seal, difference, seal_of
from dpbench.privacy.accounting.writer import LedgerWriter
from dpbench.privacy.events import SumQuery
from dpbench.privacy.sampling import FixedSizeSampling, PoissonSampling, ShuffledEpochs, sampling_from_dict

HEADER = Header("example", "add_or_remove_one", 1000, 1e-5, replay="abc")
POISSON = PoissonSampling(1000, 0.1)


def release(number: int, std: float = 1.1) -> Release:
    return Release(number, POISSON, (SumQuery("all", 1.0, std),), "0x1p+0")


def write(path: Path, count: int, header: Header = HEADER, start: int = 0, resume: bool = False) -> LedgerWriter:
    writer = LedgerWriter(path, header, start, resume)
    for number in range(start, start + count):
        writer.append(release(number))
    writer.close()
    return writer


@pytest.mark.parametrize("sampling", [POISSON, FixedSizeSampling(10, 3), ShuffledEpochs(10, 3)])
def test_sampling_round_trip(sampling: object) -> None:
    assert sampling_from_dict(sampling.to_dict()) == sampling  # type: ignore[attr-defined]
    with pytest.raises(LedgerError, match="unknown sampling kind"):
        sampling_from_dict({"kind": "magic"})


def test_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "ledger.jsonl"
    writer = write(path, 3)
    ledger = read_ledger(path)
    assert ledger.headers == [HEADER]
    assert ledger.releases == [(0, release(i)) for i in range(3)]
    assert ledger.damage is None
    assert sum(writer.events.values()) == 3


def test_seeds_are_told_and_older_ledgers_go_on(tmp_path: Path) -> None:
    """In a new phase, where an older version told no sources."""
    told = dataclasses.replace(HEADER, noise_source="n", lot_source="l")
    for known, secure in (
        (HEADER, False),
        (told, False),
        (dataclasses.replace(told, replay=None), False),
        (dataclasses.replace(HEADER, replay=None), True),
    ):
        path = tmp_path / f"{known}.jsonl"[-40:]
        write(path, 3, known)
        assert read_ledger(path).secure is secure
        path.unlink()
    old = tmp_path / "old.jsonl"
    write(old, 3)
    writer = LedgerWriter(old, told, 1, resume=True)
    for number in (1, 2):
        writer.append(release(number))
    writer.close()
    assert len(read_ledger(old).headers) == 2 and len(read_ledger(old).releases) == 5
    write(tmp_path / "new.jsonl", 3, told)
    with closing(LedgerWriter(tmp_path / "new.jsonl", dataclasses.replace(told, noise_source="m"), 3, True)) as other:
        other.append(release(3))
    assert len(read_ledger(tmp_path / "new.jsonl").headers) == 2


def test_on_disk_before_append_returns(tmp_path: Path) -> None:
    with closing(LedgerWriter(tmp_path / "l", HEADER)) as writer:
        writer.append(release(0))
        assert len(read_ledger(tmp_path / "l").releases) == 1


def test_an_existing_ledger_is_never_overwritten(tmp_path: Path) -> None:
    write(tmp_path / "l", 2)
    with pytest.raises(LedgerError, match="already records a run"):
        LedgerWriter(tmp_path / "l", HEADER)


@pytest.mark.parametrize("resume", [False, True])
def test_a_ledger_without_a_release_is_taken_over(tmp_path: Path, resume: bool) -> None:
    """Of a run that failed before its first one: it cost nothing, whatever its data and settings were."""
    write(tmp_path / "l", 0, dataclasses.replace(HEADER, unit="user", population=7))
    assert write(tmp_path / "l", 1, resume=resume).phase == 0
    ledger = read_ledger(tmp_path / "l")
    assert ledger.headers == [HEADER] and len(ledger.releases) == 1


@pytest.mark.parametrize("rest", ["{", "{}\n", "no ledger\n"])
def test_a_header_with_something_behind_it_is_not_taken_over(tmp_path: Path, rest: str) -> None:
    write(tmp_path / "l", 0)
    with (tmp_path / "l").open("a") as file:
        file.write(rest)
    (tmp_path / "other").write_text(rest)
    for name in ("l", "other"):
        before = (tmp_path / name).read_bytes()
        with pytest.raises(LedgerError, match="already records a run"):
            LedgerWriter(tmp_path / name, HEADER)
        assert (tmp_path / name).read_bytes() == before


def test_replay_is_not_written_again(tmp_path: Path) -> None:
    write(tmp_path / "l", 5)
    before = (tmp_path / "l").read_bytes()
    with closing(LedgerWriter(tmp_path / "l", HEADER, start=2, resume=True)) as writer:
        assert (writer.repeated.total(), writer.phase) == (3, 0)
        for number in range(2, 5):
            writer.append(release(number))
        assert (tmp_path / "l").read_bytes() == before
        assert sum(writer.events.values()) == 5
        writer.append(release(5))
        assert len(read_ledger(tmp_path / "l").releases) == 6
    again = LedgerWriter(tmp_path / "l", HEADER, start=2, resume=True)
    with closing(again), pytest.raises(LedgerError, match="another sum or other parameters"):
        again.append(release(3, std=9.0))


def test_a_replay_that_differs_goes_on_in_a_new_phase(tmp_path: Path) -> None:
    """What was recorded and is not repeated counts; what is released on the same lots again is one release with it."""
    write(tmp_path / "l", 5)
    with closing(LedgerWriter(tmp_path / "l", HEADER, start=2, resume=True)) as writer:
        writer.append(release(2))
        assert not writer.differs(release(3)) and writer.differs(release(3, std=9.0))
        writer.leave_replay()
        assert (writer.phase, writer.lot_phase, writer.repeated.total()) == (1, 0, 0)
        assert sorted(writer.joint) == [3, 4] and writer.joint[3][0].name == "earlier/all"
        assert writer.seal == seal_of(tmp_path / "l")
        for number in range(3, 6):
            writer.append(release(number))
        assert writer.seal == seal_of(tmp_path / "l")
    ledger = read_ledger(tmp_path / "l")
    assert [(phase, one.number) for phase, one in ledger.releases[4:]] == [(0, 4), (1, 3), (1, 4), (1, 5)]
    resumed = LedgerWriter(tmp_path / "l", dataclasses.replace(HEADER), start=4, resume=True, place=(1, 0))
    with closing(resumed):  # from a checkpoint of the new phase
        assert (resumed.phase, resumed.lot_phase, sorted(resumed.joint)) == (1, 0, [0, 1, 2, 3, 4])
    other = LedgerWriter(tmp_path / "l", dataclasses.replace(HEADER), start=2, resume=True, place=(0, 0))
    with closing(other):  # from the one before
        assert (other.phase, other.lot_phase, other.joint) == (2, 2, {})


@pytest.mark.parametrize(
    "header", [dataclasses.replace(HEADER, replay="other"), dataclasses.replace(HEADER, replay=None)]
)
def test_another_run_opens_a_phase_and_counts_everything(tmp_path: Path, header: Header) -> None:
    """Other settings with the old noise would reveal differences of sums, so the phase changes the noise's key."""
    write(tmp_path / "l", 5)
    writer = write(tmp_path / "l", 4, header, start=2, resume=True)
    assert writer.phase == 1
    ledger = read_ledger(tmp_path / "l")
    assert len(ledger.headers) == 2
    assert len(ledger.releases) == 9
    assert sum(writer.events.values()) == 9


def test_continuing_at_the_end_needs_no_phase(tmp_path: Path) -> None:
    plain = dataclasses.replace(HEADER, replay=None)
    write(tmp_path / "l", 3, plain)
    assert write(tmp_path / "l", 2, plain, start=3, resume=True).phase == 0
    assert len(read_ledger(tmp_path / "l").releases) == 5


def test_a_run_that_gets_a_seed_on_the_way_says_so(tmp_path: Path) -> None:
    """It has no seed to be recognized by until then, which is not an older version's silence."""
    write(tmp_path / "l", 3, dataclasses.replace(HEADER, replay=None))
    told = dataclasses.replace(HEADER, replay=None, noise_source="n", lot_source="l")
    assert write(tmp_path / "l", 2, told, start=3, resume=True).phase == 1
    ledger = read_ledger(tmp_path / "l")
    assert (ledger.header.noise_source, ledger.header.lot_source, ledger.secure) == ("n", "l", False)


def test_resumed_here_and_there(tmp_path: Path) -> None:
    """After 5 to 7 in a phase of their own, 10 from the older checkpoint does not follow there."""
    for header, start, count in ((HEADER, 0, 5), (HEADER, 5, 5), (dataclasses.replace(HEADER, replay="b"), 5, 2)):
        writer = write(tmp_path / "l", count, header, start, resume=True)
    assert writer.phase == 1
    assert write(tmp_path / "l", 2, dataclasses.replace(HEADER, replay="b"), start=10, resume=True).phase == 2
    ledger = read_ledger(tmp_path / "l")
    assert ledger.damage is None and len(ledger.releases) == 14


def test_a_line_cut_by_a_crash_is_dropped_on_resume(tmp_path: Path) -> None:
    write(tmp_path / "l", 5)
    whole = (tmp_path / "l").read_bytes()
    (tmp_path / "l").write_bytes(whole[:-10])
    ledger = read_ledger(tmp_path / "l")
    assert (len(ledger.releases), ledger.damage) == (4, "line 6 is cut off")
    write(tmp_path / "l", 3, start=2, resume=True)
    assert (tmp_path / "l").read_bytes() == whole


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "JSONDecodeError"),
        ('{"record":"release"}', "KeyError"),
        ('{"record":"header","schema":99}', "schema 99"),
        ('{"record":"release","number":9,"sampling":{"kind":"x"},"queries":[]}', "positive|queries"),
        ('{"record":"note"}', "neither a header"),
        ("\x00\x00", "JSONDecodeError"),
    ],
)
def test_damage_names_the_line_and_keeps_what_is_readable(tmp_path: Path, line: str, message: str) -> None:
    write(tmp_path / "l", 2)
    with (tmp_path / "l").open("a") as file:
        file.write(line + "\n")
    write_more = (tmp_path / "l").read_text() + (tmp_path / "l").read_text().splitlines()[1] + "\n"
    (tmp_path / "l").write_text(write_more)
    ledger = read_ledger(tmp_path / "l")
    assert len(ledger.releases) == 3  # what comes after the damage is still counted
    assert ledger.damage is not None
    assert ledger.damage.startswith("line 4 is damaged")
    with pytest.raises(LedgerError, match="line 4"):
        LedgerWriter(tmp_path / "l", HEADER, start=2, resume=True)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ((0, 1, 3), "release 2 follows release 0"),
        ((0, 2, 3), "release 1 follows"),
        ((0, 1, 2, 2, 3), "release 1 follows release 1"),
    ],
)
def test_missing_and_repeated_lines_are_noticed(tmp_path: Path, lines: tuple[int, ...], message: str) -> None:
    write(tmp_path / "l", 3)
    text = (tmp_path / "l").read_text().splitlines(keepends=True)
    (tmp_path / "l").write_text("".join(text[i] for i in lines))
    damage = read_ledger(tmp_path / "l").damage
    assert damage is not None
    assert message in damage


def test_a_header_that_makes_no_sense(tmp_path: Path) -> None:
    write(tmp_path / "l", 1)
    text = (tmp_path / "l").read_text()
    for bad in ('"delta":"x"', '"delta":2.0'):
        (tmp_path / "l").write_text(text.replace('"delta":1e-05', bad))
        with pytest.raises(LedgerError, match="delta: Input should be"):
            read_ledger(tmp_path / "l")


def test_what_is_no_ledger(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match="No such file"):
        read_ledger(tmp_path / "absent")
    (tmp_path / "empty").write_text("")
    with pytest.raises(LedgerError, match="it is empty"):
        read_ledger(tmp_path / "empty")
    (tmp_path / "text").write_text("hello\n")
    with pytest.raises(LedgerError, match="line 1 is damaged"):
        read_ledger(tmp_path / "text")


def test_contradictions_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "l", 3)
    with pytest.raises(LedgerError, match="population 1000, this run 7"):
        LedgerWriter(tmp_path / "l", dataclasses.replace(HEADER, population=7), 3, True)
    with pytest.raises(LedgerError, match="ends before"):
        LedgerWriter(tmp_path / "l", HEADER, 9, True)
    with pytest.raises(LedgerError, match="missing or empty"):
        LedgerWriter(tmp_path / "other", HEADER, 9, True)
    with pytest.raises(LedgerError, match="cannot write"):
        LedgerWriter(tmp_path / "l" / "inside a file", HEADER)


def test_a_full_disk_stops_the_release(tmp_path: Path) -> None:
    with closing(LedgerWriter(tmp_path / "l", HEADER)) as writer:
        writer.close()
        writer._file = open("/dev/full", "ab", buffering=0)  # noqa: SIM115
        with pytest.raises(LedgerError, match="No space left.*not made"):
            writer.append(release(0))
        assert not writer.events


def test_schema_is_in_the_file(tmp_path: Path) -> None:
    write(tmp_path / "l", 1)
    assert json.loads((tmp_path / "l").read_text().splitlines()[0])["schema"] == module.WITHOUT_PLANS


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-1.0", "0.0", "1e300", "1e-300", "true", '"1"', "null", "[1]"])
@pytest.mark.parametrize("name", ["sensitivity", "noise_std"])
def test_numbers_that_make_no_sense_are_damage(tmp_path: Path, name: str, value: str) -> None:
    write(tmp_path / "l", 3)
    lines = (tmp_path / "l").read_text().splitlines(keepends=True)
    old = {"sensitivity": '"sensitivity":1.0', "noise_std": '"noise_std":1.1'}[name]
    assert old in lines[2]
    lines[2] = lines[2].replace(old, f'"{name}":{value}')
    (tmp_path / "l").write_text("".join(lines))
    ledger = read_ledger(tmp_path / "l")
    assert ledger.damage is not None
    assert ledger.damage.startswith("line 3 is damaged")
    assert len(ledger.releases) == 2


@pytest.mark.parametrize("rate", ["NaN", "Infinity", "2.0", "-0.5", '"a"', "null"])
def test_rates_that_make_no_sense_are_damage(tmp_path: Path, rate: str) -> None:
    write(tmp_path / "l", 3)
    text = (tmp_path / "l").read_text().replace('"sample_rate":0.1', f'"sample_rate":{rate}')
    (tmp_path / "l").write_text(text)
    assert "line 2 is damaged" in str(read_ledger(tmp_path / "l").damage)


def test_keys_in_another_order_mean_the_same(tmp_path: Path) -> None:
    """As after a rewrite by another tool: no line may take over the queries of an earlier one."""
    with closing(LedgerWriter(tmp_path / "l", HEADER)) as writer:
        for number, std in enumerate((10.0, 0.5, 0.5)):
            writer.append(release(number, std))
    before = read_ledger(tmp_path / "l")
    lines = [json.dumps(json.loads(line), sort_keys=True) for line in (tmp_path / "l").read_text().splitlines()]
    (tmp_path / "l").write_text("\n".join(lines) + "\n")
    after = read_ledger(tmp_path / "l")
    assert after.releases == before.releases
    assert after.damage is None


def test_releases_missing_between_phases_are_noticed(tmp_path: Path) -> None:
    write(tmp_path / "l", 5)
    write(tmp_path / "l", 3, dataclasses.replace(HEADER, replay="other"), start=4, resume=True)
    assert read_ledger(tmp_path / "l").damage is None
    lines = (tmp_path / "l").read_text().splitlines(keepends=True)
    (tmp_path / "l").write_text("".join(line for line in lines if '"number":4,' not in line))
    assert "release 5 follows release 3" in str(read_ledger(tmp_path / "l").damage)
    (tmp_path / "l").write_text("".join(lines).replace('"phase":1', '"phase":7'))
    assert "phase 7 stands where phase 1 is due" in str(read_ledger(tmp_path / "l").damage)


@pytest.mark.parametrize("bad", ['"microbatch_size":"4"', '"microbatch_size":0', '"population":true', '"unit":["x"]'])
def test_header_types(tmp_path: Path, bad: str) -> None:
    write(tmp_path / "l", 1)
    name = bad.split(":", maxsplit=1)[0]
    header, *rest = (tmp_path / "l").read_text().splitlines()
    data = {**json.loads(header), **json.loads("{" + bad + "}")}
    assert name.strip('"') in data
    (tmp_path / "l").write_text("\n".join([json.dumps(data), *rest]) + "\n")
    with pytest.raises(LedgerError, match="Input should be"):
        read_ledger(tmp_path / "l")


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    """Two `dpbench resume` of one run would each spend what is left of its budget."""
    path = tmp_path / "l"
    with closing(LedgerWriter(path, HEADER)) as writer:
        writer.append(release(0))
        before = path.read_bytes()
        for resume in (False, True):
            with pytest.raises(LedgerError, match=r"another process writes the ledger .*l: .* Wait until it ends"):
                LedgerWriter(path, HEADER, start=int(resume), resume=resume)
        assert path.read_bytes() == before
        writer.append(release(1))
    write(path, 1, start=2, resume=True)
    assert len(read_ledger(path).releases) == 3


def test_a_refused_writer_gives_the_lock_back_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match="missing or empty"):
        LedgerWriter(tmp_path / "l", HEADER, 9, True)
    assert not (tmp_path / "l").exists()
    write(tmp_path / "l", 2)
    with pytest.raises(LedgerError, match="already records a run"):
        LedgerWriter(tmp_path / "l", HEADER)
    write(tmp_path / "l", 1, start=2, resume=True)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_the_lock_ends_with_the_process_that_holds_it(tmp_path: Path) -> None:
    """SIGKILL included, and although a process that it forked (a worker that loads data) lives on."""
    path = tmp_path / "l"
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
        with pytest.raises(LedgerError, match="another process"):
            LedgerWriter(path, HEADER, start=1, resume=True)
        os.kill(holder, signal.SIGKILL)
        os.waitpid(holder, 0)
        os.kill(worker, 0)  # still there
        write(path, 1, start=1, resume=True)
    finally:
        os.kill(worker, signal.SIGKILL)
    assert len(read_ledger(path).releases) == 2


def test_a_lock_is_of_the_file_that_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever held it may have removed the file while another one waited to open it."""
    path, real = tmp_path / "l", locks._lock
    kept = locks.open_locked(path)

    def removed_meanwhile(file: object) -> None:
        if not kept.closed:
            path.unlink()
            kept.close()
        real(file)  # type: ignore[arg-type]

    monkeypatch.setattr(locks, "_lock", removed_meanwhile)
    with locks.open_locked(path) as file:
        assert os.path.samestat(os.fstat(file.fileno()), path.stat())


def test_a_file_system_without_locks_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(locks.fcntl, "flock", none)
    monkeypatch.setattr(locks, "_told", set())
    with pytest.warns(UserWarning, match="file system without locks"):
        write(tmp_path / "a", 1)
    write(tmp_path / "b", 1)


def test_the_seal_is_that_of_the_file(tmp_path: Path) -> None:
    with closing(LedgerWriter(tmp_path / "l", HEADER)) as writer:
        for number in range(4):
            writer.append(release(number))
            assert writer.seal == seal_of(tmp_path / "l")
    assert writer.seal == Seal(5, hashlib.sha256((tmp_path / "l").read_bytes()).hexdigest())
    assert Seal.read(json.loads(json.dumps(writer.seal._asdict()))) == writer.seal
    assert [Seal.read(data) for data in (None, 3, {}, {"lines": "5", "sha256": "ab"})] == [None] * 4


def test_a_resumed_run_has_the_seals_of_an_uninterrupted_one(tmp_path: Path) -> None:
    """Also while it repeats releases that are on disk already."""
    seals = []
    with closing(LedgerWriter(tmp_path / "l", HEADER)) as writer:
        for number in range(6):
            seals.append(writer.seal)
            writer.append(release(number))
    again = LedgerWriter(tmp_path / "l", HEADER, start=2, resume=True, known=seals[2])
    with closing(again):
        for number in range(2, 6):
            assert again.seal == seals[number]
            assert again.repeated.total() == 6 - number
            again.append(release(number))
        assert again.seal == writer.seal
        again.append(release(6))
        assert again.seal == seal_of(tmp_path / "l")
    other = LedgerWriter(tmp_path / "l", dataclasses.replace(HEADER, replay="other"), start=2, resume=True)
    with closing(other):
        assert other.seal == seal_of(tmp_path / "l")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda lines: lines[:4], "4 lines of at least 6 that the checkpoint knows: it was cut"),
        (lambda lines: [line.replace('"noise_std":1.1', '"noise_std":11.0') for line in lines], "edited"),
        (lambda lines: [*lines[:3], lines[3].replace("0x1p+0", "0x1p+1"), *lines[4:]], "edited"),
        (lambda lines: [lines[0].replace("abc", "xyz"), *lines[1:]], "of another run"),
    ],
    ids=["cut", "noise", "checksum", "header"],
)
def test_another_ledger_than_the_checkpoint_knew(
    tmp_path: Path, change: Callable[[list[str]], list[str]], message: str
) -> None:
    seal = write(tmp_path / "l", 5).seal
    write(tmp_path / "l", 3, start=5, resume=True)  # it may grow
    assert difference(tmp_path / "l", seal, "the checkpoint") is None
    lines = (tmp_path / "l").read_text().splitlines(keepends=True)
    (tmp_path / "l").write_text("".join(change(lines[:6])))
    with pytest.raises(LedgerError, match=rf"cannot continue .*{message}.*Restore the ledger"):
        LedgerWriter(tmp_path / "l", HEADER, start=5, resume=True, known=seal)


def test_each_line_is_that_of_its_own_release(tmp_path: Path) -> None:
    """What is equal may be written otherwise (1 and 1.0): no line may depend on what was released before."""
    kinds = [(PoissonSampling(1000, 1.0), 2.0), (PoissonSampling(1000, 1), 2), (PoissonSampling(1000, 1.0), 2.0)]
    releases = [
        Release(n, sampling, (SumQuery("all", bound, 1.0),), "0x1p+0") for n, (sampling, bound) in enumerate(kinds)
    ]
    assert releases[0].sampling == releases[1].sampling and releases[0].queries == releases[1].queries

    def lines(*written: Release) -> list[str]:
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.jsonl"
        with closing(LedgerWriter(path, HEADER)) as writer:
            for release in written:
                writer.append(release)
        return path.read_text(encoding="utf-8").splitlines()[1:]

    together = lines(*releases)
    assert together == [line for release in releases for line in lines(release)]
    assert together[0] != together[1].replace('"number":1', '"number":0')
