"""Sweeps, tables, preemption and training on two nodes, through a real Slurm."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from pathlib import Path

import pytest
import torch

from tests.cluster.runs import (
    SMALL,
    alone,
    begun,
    command,
    dpbench,
    same,
    steps_of,
    sweep_is_as_on_one_machine,
    weights_of,
)
from tests.cluster.slurm import Slurm, wait
from tests.harness.reproduce.digits_table import TABLE

SUBMITTED = ("launcher=submitit", "hydra.launcher.cpus_per_task=1", "hydra.launcher.partition=low")


def test_a_sweep_gives_the_runs_of_one_machine(slurm: Slurm, tmp_path: Path) -> None:
    sweep_is_as_on_one_machine(tmp_path, SUBMITTED, slurm.environment)


def test_a_table_goes_on_after_the_death_of_its_controller(slurm: Slurm, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(TABLE.replace("max_steps=6", "max_steps=400"))
    words = ("reproduce", "mine.yaml", "seeds=1", "--runs", "runs", *SUBMITTED)
    with open(tmp_path / "first.log", "wb") as log:
        first = subprocess.Popen(command(*words), cwd=tmp_path, env=alone(slurm.environment), stdout=log, stderr=log)
    results = tmp_path / "runs" / "mine"
    wait(lambda: any(steps_of(run) > 5 for run in results.glob("long-private-*")), "no run begins", 600)
    first.send_signal(signal.SIGKILL)
    first.wait()
    again = dpbench(*words, folder=tmp_path, environment=slurm.environment)
    assert again.returncode == 0, again.stderr
    assert len(list(results.glob("*/result.json"))) == 4
    for run in results.glob("*-private-*"):
        steps = json.loads((run / "result.json").read_text())["steps"]
        assert steps_of(run) == steps, "a run was trained twice"
    assert "| 6 steps |" in (tmp_path / "results" / "mine" / "table.md").read_text()


@pytest.mark.parametrize("told", [True, False], ids=["told before", "killed"])
def test_a_preempted_job_goes_on_as_if_nothing_had_been(slurm: Slurm, tmp_path: Path, told: bool) -> None:
    words = ("-m", *SMALL, "trainer.max_steps=1500", "run.checkpoint_every_n_steps=100")
    with open(tmp_path / "sweep.log", "wb") as log:
        sweep = subprocess.Popen(
            command("train", *words, *SUBMITTED, "hydra.sweep.dir=slurm"),
            cwd=tmp_path,
            env=alone(slurm.environment),
            stdout=log,
            stderr=log,
        )
    run = tmp_path / "slurm" / "0-digits-mlp-dpsgd"
    begun(run, 120)
    (job,) = set(slurm("squeue", "-h", "-t", "running", "-o", "%A").split())
    if told:  # by Slurm, before it gives the nodes to a job of a partition of higher priority
        slurm("sbatch", "-p", "high", "--exclusive", "-N2", "--output=/dev/null", "--wrap=sleep 5")
    else:  # as by a node that fails
        slurm("scontrol", "requeue", job)
    assert sweep.wait(600) == 0, (tmp_path / "sweep.log").read_text()
    assert dpbench("train", *words, "hydra.sweep.dir=here", folder=tmp_path).returncode == 0
    assert same(run, tmp_path / "here" / run.name)
    assert len(list((tmp_path / "slurm").glob("[0-9]*"))) == 1


def test_a_cluster_that_does_not_answer(slurm: Slurm, tmp_path: Path) -> None:
    text = re.sub("SlurmctldPort=.*", "SlurmctldPort=1", (slurm.folder / "slurm.conf").read_text())
    (tmp_path / "slurm.conf").write_text(text)
    there = {**slurm.environment, "SLURM_CONF": str(tmp_path / "slurm.conf")}
    made = dpbench("train", "-m", *SMALL, *SUBMITTED, "seed=1", folder=tmp_path, environment=there)
    assert made.returncode == 1
    assert "dpbench: error: launcher=submitit: sbatch: error: " in made.stderr and "Traceback" not in made.stderr


def test_a_table_that_is_interrupted_leaves_its_jobs_in_the_queue(slurm: Slurm, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(TABLE)
    words = ("reproduce", "mine.yaml", "seeds=1", "--runs", "runs", *SUBMITTED)
    with open(tmp_path / "first.log", "wb") as log:
        first = subprocess.Popen(command(*words), cwd=tmp_path, env=alone(slurm.environment), stdout=log, stderr=log)
    wait(lambda: bool(list(tmp_path.glob("runs/mine/*/output.log"))), "no run begins", 600)
    first.send_signal(signal.SIGTERM)
    assert first.wait(300) == -signal.SIGTERM
    wait(lambda: len(list(tmp_path.glob("runs/mine/*/result.json"))) == 4, "the jobs have not gone on", 600)


def test_a_training_on_two_nodes_is_that_of_one_process(slurm: Slurm, tmp_path: Path) -> None:
    words = ("train", *SMALL, "trainer.max_steps=20")
    step = ["srun", "-p", "low", "-N2", "--ntasks-per-node=1", "--export=ALL"]
    there = {**alone(slurm.environment), "MASTER_ADDR": "127.0.0.1"}  # the nodes' names are known to Slurm only
    made = subprocess.run(
        [*step, *command(*words, "hydra.run.dir=two")],
        cwd=tmp_path,
        env=there,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert made.returncode == 0, made.stderr
    assert made.stdout.count("test accuracy") == 1  # one of the two tells what came out
    assert dpbench(*words, "hydra.run.dir=one", folder=tmp_path).returncode == 0
    two, one = (json.loads((tmp_path / name / "result.json").read_text()) for name in ("two", "one"))
    assert (two["config"]["trainer"]["devices"], two["config"]["trainer"]["num_nodes"]) == (1, 2)
    assert two["privacy"]["epsilon"] == one["privacy"]["epsilon"]
    assert two["metrics"]["test/accuracy"] == pytest.approx(one["metrics"]["test/accuracy"], abs=0.01)
    first, other = weights_of(tmp_path / "two"), weights_of(tmp_path / "one")
    for name, value in first.items():  # the same lots and noise: else they would be far apart
        torch.testing.assert_close(value, other[name], rtol=1e-4, atol=1e-5)
