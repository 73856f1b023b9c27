"""Processes that torchrun or srun has started: one run, one folder, one line where something is wrong."""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
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
from dpbench.harness.run.train import train
from dpbench.harness.runs.folder import RunFolder
from dpbench.privacy.accounting.ledger import read_ledger
from tests.support import forks
from tests.support.cli import FEW
from tests.support.forks import Fork
from tests.support.processes import TINY, TWO, config_of

OF_TORCHRUN = {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "RANK": "3", "LOCAL_RANK": "1"}
OF_SRUN = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "2", "SLURM_PROCID": "3", "SLURM_LOCALID": "1"}


@pytest.mark.parametrize("found", [OF_TORCHRUN, OF_SRUN], ids=["torchrun", "srun"])
def test_who_we_are(found: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert launched_process() is None and is_first()
    monkeypatch.setenv("SLURM_NTASKS", "4")  # of a job's script, which is one process
    assert launched_process() is None
    for name, value in found.items():
        monkeypatch.setenv(name, value)
    assert launched_process() == LaunchedProcess(rank=3, world=4, local_rank=1, nodes=2) and not is_first()
    for name in ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.setenv(name, "1")
    assert launched_process() is None


def test_several_nodes_without_anybody_who_starts_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *FEW, "+trainer.num_nodes=2", f"hydra.run.dir={tmp_path / 'run'}"]) == 1
    assert (
        "trainer.num_nodes=2 needs a process on each node: start the command by torchrun or" in capsys.readouterr().err
    )
    assert not (tmp_path / "run").exists()


def test_a_sweep_is_made_by_one_process(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name, value in OF_TORCHRUN.items():
        monkeypatch.setenv(name, value)
    assert main(["train", "-m", *FEW, "seed=0,1"]) == 1
    assert "a sweep is made by one process" in capsys.readouterr().err


def test_a_ctrl_c_that_torchrun_hands_on_is_no_second_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    stops = _signals.StopSignals()
    stops.hear(signal.SIGINT)
    stops.hear(signal.SIGINT)
    assert stops.number == signal.SIGINT
    monkeypatch.setattr(_signals, "_ECHO", 0.0)
    with pytest.raises(KeyboardInterrupt):
        stops.hear(signal.SIGINT)


class Downloads:
    """Stands in for `load` in two processes, which write down when they come and go."""

    def __init__(self, log: Path) -> None:
        self._log = log

    def __call__(self) -> None:
        for word in ("comes", "goes"):
            with self._log.open("a") as file:
                file.write(f"{os.environ['RANK']} {word}\n")
            time.sleep(0.2)


def test_two_processes_of_a_node_do_not_download_at_once(tmp_path: Path) -> None:
    load = functools.partial(first_of_node_first, Downloads(tmp_path / "log"))
    run_in_processes(load, 2, "ddp_fork", RunFolder(tmp_path / "run"))
    assert (tmp_path / "log").read_text().splitlines() == ["0 comes", "0 goes", "1 comes", "1 goes"]


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def environments(srun: bool = False) -> list[dict[str, str]]:
    """Of two processes as torchrun starts them on one node, or srun on two."""
    here = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    if srun:
        step = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "2", "SLURM_NTASKS": "2", "SLURM_JOB_NAME": "x"}
        return [{**here, **step, "SLURM_JOB_ID": "1", "SLURM_PROCID": r, "SLURM_LOCALID": "0"} for r in "01"]
    world = {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    return [{**here, **world, "RANK": rank, "LOCAL_RANK": rank} for rank in "01"]


def both(folder: Path, commands: Sequence[Sequence[str]], srun: bool = False) -> list[Fork]:
    """Start a module with its arguments, or "-c" with a program, in each of two processes."""
    processes = []
    for (module, *words), own in zip(commands, environments(srun), strict=True):
        processes.append(forks.start(folder, module, words, {**os.environ, **own}))
    return processes


def ends(processes: Sequence[Fork | subprocess.Popen[str]]) -> tuple[list[int], list[str]]:
    told = [process.communicate(timeout=600)[1] for process in processes]
    return [process.returncode for process in processes], told


@pytest.mark.long
@pytest.mark.parametrize("how", ["torchrun", "srun"])
def test_they_are_one_run_equal_to_that_of_processes_of_our_own(tmp_path: Path, how: str) -> None:
    train(config_of(*TWO), tmp_path / "whole")
    words = ["dpbench", "train", *TINY, "trainer=ddp_cpu", "trainer.max_steps=8"]  # a folder named by the time
    statuses, told = ends(both(tmp_path, [words, words], srun=how == "srun"))
    assert statuses == [0, 0], told
    assert told == ["", ""]
    (run,) = (path.parent for path in tmp_path.glob("outputs/*/*/result.json"))
    assert len(list(tmp_path.glob("outputs/*/*"))) == 1 and not list(run.glob(".shared*"))
    whole = tmp_path / "whole"
    assert (run / "ledger.jsonl").read_bytes() == (whole / "ledger.jsonl").read_bytes()
    record, other = (json.loads((place / "result.json").read_text()) for place in (run, whole))
    assert record["metrics"] == other["metrics"]
    kept = record["config"]["trainer"]
    assert (kept["devices"], kept["num_nodes"]) == ((1, 2) if how == "srun" else (2, 1))


@pytest.mark.long
def test_torchrun_on_two_nodes(tmp_path: Path) -> None:
    torchrun = shutil.which("torchrun", path=str(Path(sys.executable).parent))
    assert torchrun is not None
    port, run = free_port(), tmp_path / "run"
    place = ["--nnodes=2", "--nproc_per_node=1", "--master_addr=127.0.0.1", f"--master_port={port}"]
    words = ["dpbench", "train", *TINY, "trainer=ddp_cpu", f"hydra.run.dir={run}"]
    nodes = [
        subprocess.Popen(
            [torchrun, *place, f"--node_rank={rank}", "-m", *words],
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    statuses, told = ends(nodes)
    assert statuses == [0, 0], told
    assert json.loads((run / "result.json").read_text())["config"]["trainer"]["num_nodes"] == 2


@pytest.mark.long
@pytest.mark.parametrize("dead", [0, 1])
def test_one_that_dies_ends_the_others_with_one_line_and_a_run_that_goes_on(tmp_path: Path, dead: int) -> None:
    words = ["dpbench", "train", *TINY, "trainer.max_steps=30000", "run.checkpoint_every_n_steps=20"]
    run = RunFolder(tmp_path / "run")
    processes = both(tmp_path, [[*words, "hydra.run.dir=run"]] * 2)
    while not run.checkpoint.exists():
        assert processes[0].poll() is None, processes[0].communicate()
        time.sleep(0.05)
    processes[dead].kill()
    statuses, told = ends(processes)
    assert statuses[dead] == -signal.SIGKILL and statuses[1 - dead] == 1
    line = rf"dpbench: error: another process of this training has ended \(this is {1 - dead} of 2, from 0\)\. .*"
    assert re.fullmatch(line + r"start them again with: dpbench resume \S+/run\n", told[1 - dead]), told
    made = len(read_ledger(run.ledger).releases)
    again = ["dpbench", "resume", "run", f"trainer.max_steps={made + 5}"]
    statuses, told = ends(both(tmp_path, [again, again], srun=True))
    assert statuses == [0, 0], told
    book = read_ledger(run.ledger)
    assert (len(book.releases), len(book.headers)) == (made + 5, 1)  # none is counted twice


@pytest.mark.long
def test_a_notice_to_one_stops_all(tmp_path: Path) -> None:
    words = ["dpbench", "train", *TINY, "trainer.max_steps=30000", "hydra.run.dir=run"]
    run = RunFolder(tmp_path / "run")
    processes = both(tmp_path, [words, words])
    while not run.checkpoint.exists():
        assert processes[0].poll() is None, processes[0].communicate()
        time.sleep(0.05)
    processes[1].send_signal(signal.SIGUSR1)
    statuses, told = ends(processes)
    assert statuses == [138, 138]
    assert "continue with: dpbench resume" in told[0] and told[1] == ""
    assert json.loads(run.partial_result.read_text())["steps"] == len(read_ledger(run.ledger).releases)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ("seed=0", "seed=1"),
            r"\S+ has another seed than \S+: 1, not 0\. All processes of a training need the same\.",
        ),
        (
            ("strategy.noise_multiplier=0", "strategy.noise_multiplier=0"),
            r"noise_multiplier must be a positive number.*",
        ),
    ],
)
def test_what_is_wrong_is_told_once(tmp_path: Path, words: tuple[str, str], line: str) -> None:
    begin = ["dpbench", "train", *TINY, "hydra.run.dir=run"]
    statuses, told = ends(both(tmp_path, [[*begin, word] for word in words]))
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
