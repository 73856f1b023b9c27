"""Processes that torchrun or srun has started: one run, one folder, one line where something is wrong."""

from __future__ import annotations

import functools
import json
import os
import re
import signal
import socket
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from dpbench.cli import main
from dpbench.harness.run import _signals
from dpbench.harness.run.processes import (
    LaunchedProcess,
    first_of_node_first,
    is_first,
    launched_process,
    run_in_processes,
)
from dpbench.harness.runs.folder import RunFolder
from dpbench.privacy.accounting.ledger import read_ledger
from tests.support import forks
from tests.support.cli import FEW
from tests.support.forks import Fork
from tests.support.processes import TINY

OF_TORCHRUN = {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "RANK": "3", "LOCAL_RANK": "1"}
ENDLESS = ["dpbench", "train", *TINY, "trainer.max_steps=30000", "hydra.run.dir=run"]
OF_SRUN = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "2", "SLURM_PROCID": "3", "SLURM_LOCALID": "1"}


@pytest.mark.parametrize("found", [OF_TORCHRUN, OF_SRUN], ids=["torchrun", "srun"])
def test_who_we_are(found: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_NTASKS", "4")  # of a job's script, which is one process
    assert launched_process() is None and is_first()
    for name, value in found.items():
        monkeypatch.setenv(name, value)
    assert launched_process() == LaunchedProcess(rank=3, world=4, local_rank=1, nodes=2) and not is_first()
    monkeypatch.setenv("WORLD_SIZE" if found is OF_TORCHRUN else "SLURM_STEP_NUM_TASKS", "1")
    assert launched_process() is None


def test_a_sweep_is_made_by_one_process(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name, value in OF_TORCHRUN.items():
        monkeypatch.setenv(name, value)
    assert main(["train", "-m", *FEW, "seed=0,1"]) == 1
    assert "a sweep is made by one process" in capsys.readouterr().err


def test_a_ctrl_c_that_torchrun_hands_on_is_no_second_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    stops = _signals.StopSignals()
    for _ in range(2):
        stops.hear(signal.SIGINT)
    assert stops.number == signal.SIGINT
    monkeypatch.setattr(_signals, "_ECHO", 0.0)
    with pytest.raises(KeyboardInterrupt):
        stops.hear(signal.SIGINT)


def load(log: Path) -> None:
    """Stands in for a download in two processes, which write down when they come and go."""
    for word in ("comes", "goes"):
        with log.open("a") as file:
            file.write(f"{os.environ['RANK']} {word}\n")
        time.sleep(0.2)


def test_two_processes_of_a_node_do_not_download_at_once(tmp_path: Path) -> None:
    load_once = functools.partial(first_of_node_first, functools.partial(load, tmp_path / "log"))
    run_in_processes(load_once, 2, "ddp_fork", RunFolder(tmp_path / "run"))
    assert (tmp_path / "log").read_text().splitlines() == ["0 comes", "0 goes", "1 comes", "1 goes"]


def both(folder: Path, commands: Sequence[Sequence[str]], srun: bool = False) -> list[Fork]:
    """Start two processes as torchrun starts them on one node, or srun on two.

    Each is a module with its arguments, or "-c" with a program.
    """
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = str(one.getsockname()[1])
    processes = []
    for rank, (module, *words) in zip("01", commands, strict=True):
        if srun:
            step = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "2", "SLURM_NTASKS": "2"}
            own = {**step, "SLURM_JOB_NAME": "x", "SLURM_JOB_ID": "1", "SLURM_PROCID": rank, "SLURM_LOCALID": "0"}
        else:
            own = {**OF_TORCHRUN, "WORLD_SIZE": "2", "RANK": rank, "LOCAL_RANK": rank}
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        processes.append(forks.start(folder, module, words, {**os.environ, **place, **own}))
    return processes


def ends(processes: Sequence[Fork]) -> tuple[list[int | None], list[str]]:
    told = [process.communicate(timeout=600)[1] for process in processes]
    return [process.returncode for process in processes], told


def until_a_checkpoint(processes: Sequence[Fork], run: RunFolder) -> None:
    while not run.checkpoint.exists():
        assert processes[0].poll() is None, processes[0].communicate(timeout=1)
        time.sleep(0.05)


@pytest.mark.long
def test_one_that_dies_ends_the_others_with_one_line_and_a_run_that_goes_on(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    processes = both(tmp_path, [ENDLESS, ENDLESS])
    until_a_checkpoint(processes, run)
    processes[0].kill()
    statuses, told = ends(processes)
    assert statuses == [-signal.SIGKILL, 1]
    line = r"dpbench: error: another process of this training has ended \(this is 1 of 2, from 0\)\. .*"
    assert re.fullmatch(line + r"start them again with: dpbench resume \S+/run\n", told[1]), told
    made = len(read_ledger(run.ledger).releases)
    again = ["dpbench", "resume", "run", f"trainer.max_steps={made + 5}"]
    statuses, told = ends(both(tmp_path, [again, again], srun=True))
    assert statuses == [0, 0], told
    book = read_ledger(run.ledger)
    assert (len(book.releases), len(book.headers)) == (made + 5, 1)  # none is counted twice


@pytest.mark.long
def test_a_notice_to_one_stops_all(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    processes = both(tmp_path, [ENDLESS, ENDLESS])
    until_a_checkpoint(processes, run)
    processes[1].send_signal(signal.SIGUSR1)
    statuses, told = ends(processes)
    assert statuses == [138, 138]
    assert "continue with: dpbench resume" in told[0] and told[1] == ""
    assert json.loads(run.partial_result.read_text())["steps"] == len(read_ledger(run.ledger).releases)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("word", "other", "line"),
    [
        ("seed=0", "seed=1", r"\S+ has another seed than \S+: 1, not 0\. All processes of a training need the same\."),
        ("strategy.noise_multiplier=0", "seed=0", r"noise_multiplier must be a positive number.*"),
    ],
)
def test_what_is_wrong_is_told_once(tmp_path: Path, word: str, other: str, line: str) -> None:
    statuses, told = ends(both(tmp_path, [[*ENDLESS, word], [*ENDLESS, word, other]]))
    assert statuses == [1, 1]
    assert re.fullmatch(f"dpbench: error: {line}\n", "".join(told)), told
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_folder_that_is_not_shared_is_one_line(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from dpbench.harness.run import processes\n"
        "processes._VISIBLE_WITHIN = 0.5\n"
        "folder = Path(sys.argv[1]); folder.mkdir(); processes.require_shared_folder(folder)"
    )
    commands = [["-c", program, str(tmp_path / name)] for name in "ab"]
    statuses, told = ends(both(tmp_path, commands))
    assert 0 not in statuses  # whoever is told first goes, and the other may find nobody
    assert "a run on several nodes needs a folder that they share (hydra.run.dir)" in told[1]
    assert "ReportedByAnotherRank" in told[0]
