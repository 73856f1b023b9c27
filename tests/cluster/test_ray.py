"""Sweeps, tables and dying workers, through a real Ray of two workers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.runs import SMALL, alone, begun, command, dpbench, same, steps_of, sweep_is_as_on_one_machine
from tests.cluster.slurm import wait
from tests.harness.reproduce.digits_table import TABLE


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Of a cluster of two nodes with a core each."""
    pytest.importorskip("ray", reason="needs Ray: pip install -e plugins/dpbench-ray")
    from ray.cluster_utils import Cluster

    cluster: Any = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()
    yield cluster.address
    cluster.shutdown()


def on(address: str, *words: str) -> tuple[str, ...]:
    return ("launcher=ray", f"hydra.launcher.address='{address}'", *words)


def worker_of(job: int) -> int | None:
    """Process in which Ray runs a job."""
    for entry in Path("/proc").iterdir():
        try:
            if (entry / "cmdline").read_bytes().startswith(f"ray::job {job}".encode()):
                return int(entry.name)
        except OSError:
            continue
    return None


def test_a_sweep_gives_the_runs_of_one_machine(address: str, tmp_path: Path) -> None:
    sweep_is_as_on_one_machine(tmp_path, on(address))


def test_a_table(address: str, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(TABLE)
    made = dpbench("reproduce", "mine.yaml", "seeds=1", "--runs", "runs", *on(address), folder=tmp_path)
    assert made.returncode == 0, made.stderr
    runs = list((tmp_path / "runs" / "mine").glob("*/result.json"))
    assert len(runs) == 4
    assert {json.loads(path.read_text())["steps"] for path in runs} == {3, 6}


def test_a_killed_worker_goes_on_as_if_nothing_had_been(address: str, tmp_path: Path) -> None:
    words = ("-m", *SMALL, "trainer.max_steps=1500", "run.checkpoint_every_n_steps=100")
    with open(tmp_path / "sweep.log", "wb") as log:
        words_there = ("train", *words, *on(address), "hydra.sweep.dir=ray")
        sweep = subprocess.Popen(command(*words_there), cwd=tmp_path, env=alone(), stdout=log, stderr=log)
    run = tmp_path / "ray" / "0-digits-mlp-dpsgd"
    begun(run, 120)
    worker = worker_of(0)
    assert worker is not None
    os.kill(worker, signal.SIGKILL)
    assert sweep.wait(600) == 0, (tmp_path / "sweep.log").read_text()
    assert dpbench("train", *words, "hydra.sweep.dir=here", folder=tmp_path).returncode == 0
    assert same(run, tmp_path / "here" / run.name)
    assert steps_of(run) == 1500


def test_a_job_that_fails_does_not_stop_the_others(address: str, tmp_path: Path) -> None:
    words = ("-m", *SMALL, "trainer.max_steps=5", "data.train_size=100,100000")  # more than there are, as loading shows
    made = dpbench("train", *words, *on(address), "hydra.sweep.dir=ray", folder=tmp_path)
    assert made.returncode == 1 and "dpbench: error: " in made.stderr and "Traceback" not in made.stderr
    assert len(list((tmp_path / "ray").glob("*/result.json"))) == 1


def test_a_ctrl_c_saves_what_is_there(address: str, tmp_path: Path) -> None:
    with open(tmp_path / "sweep.log", "wb") as log:
        words = ("train", "-m", *SMALL, "trainer.max_steps=5000", *on(address), "hydra.sweep.dir=ray")
        sweep = subprocess.Popen(command(*words), cwd=tmp_path, env=alone(), stdout=log, stderr=log)
    run = tmp_path / "ray" / "0-digits-mlp-dpsgd"
    begun(run, 20)
    sweep.send_signal(signal.SIGINT)
    assert sweep.wait(600) == 130
    wait(lambda: (run / "partial_result.json").is_file(), "the run has not saved", 300)
    assert "Traceback" not in (tmp_path / "sweep.log").read_text()
