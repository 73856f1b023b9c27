"""Tables: the command, a sweep that fails or is killed and goes on, launchers."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from dpbench.cli import main
from dpbench.cli.experiments import part_of
from dpbench.harness.reproduce.jobs import Job, run_job, table_jobs
from dpbench.harness.reproduce.tables import read_table
from tests.harness.reproduce.digits_table import edited
from tests.support.cli import dpbench, dpbench_in_a_process, start


def test_a_full_disk_is_told(
    definition: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("dpbench.harness.reproduce.reproduction.sweep", full)
    assert main(["reproduce", str(definition), "--runs", str(tmp_path / "runs")]) == 1
    assert "Finished runs are kept: free some, and call the same command again" in capsys.readouterr().err


def test_an_edited_plugin_is_another_job(definition: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = []
    for source in ("0123456789abcdef", "fedcba9876543210"):
        monkeypatch.setattr(
            "dpbench.harness.reproduce.jobs.foreign_code", lambda config, source=source: {"theirs": source}
        )
        folders.append(table_jobs(read_table(str(definition)), tmp_path)[0].folder)
    assert folders[0] != folders[1] and folders[0].endswith("-01234567")


def test_what_cannot_be_reproduced_is_one_clear_line(tmp_path: Path) -> None:
    for words, message in {
        "nowhere/table9": "there is no table 'nowhere/table9'.*Known: adaptive_quantile/.*claims",
        "claims rows=a": "claims takes no runs: only --out goes with it",
        "gradient_compression/table2x": "Did you mean gradient_compression/table",
        "gradient_compression/table1 rows=sigma_9": "has no row 'sigma_9'; known: sigma_0.7",
        "gradient_compression/table1 columns=x": "has no column 'x'",
        "gradient_compression/table1 seed=1": "'seed=1' is none of rows=",
        "gradient_compression/table1 seeds=0": "leaves nothing to run",
        "gradient_compression/table1 seeds=two": "'seeds=two' is none of",
        "gradient_compression/table1 launcher=slurm seeds=1": "there is no launcher=slurm",
        "gradient_compression/table1 rows=sigma_0.7 rows=sigma_1.1": "rows= is given twice",
        "gradient_compression/table1 trainer=tpu seeds=1": "there is no trainer=tpu",
    }.items():
        _, error = dpbench(tmp_path, "reproduce", *words.split(), status=1)
        assert error.count("\n") == 1
        assert error.startswith("dpbench: error: ")
        assert re.search(message, error), error


def test_seeds_are_a_number_or_a_list() -> None:
    assert part_of(["seeds=3"]).seeds == 3
    assert part_of(["seeds=[4,5]"]).seeds == (4, 5)
    table = read_table("gradient_compression/table1")
    assert table.selected((), (), 2).seeds == (0, 1)
    assert table.selected((), (), 7).seeds == tuple(range(7))


def reproduce(folder: Path, *words: str) -> list[str]:
    return ["reproduce", str(folder / "own" / "digits.yaml"), *words]


def results(folder: Path) -> dict[str, dict[str, Any]]:
    return {path.parent.name: json.loads(path.read_text()) for path in folder.rglob("result.json")}


@pytest.mark.long
def test_a_table_that_is_killed_goes_on(definition: Path, tmp_path: Path) -> None:
    edited(definition, "trainer.max_steps=6", "trainer.max_steps=1000")
    out, _ = dpbench_in_a_process(tmp_path, *reproduce(tmp_path, "rows=short", "seeds=1"))
    assert "2/2 done" in out
    done = {name: record["seconds"] for name, record in results(tmp_path).items()}
    assert len(done) == 2
    sweep = start(tmp_path, *reproduce(tmp_path, "seeds=1"))
    begun = time.monotonic()
    while not (releases := [*(tmp_path / "runs").rglob("long-private-*/ledger.jsonl")]) or not _halfway(releases[0]):
        assert sweep.poll() is None and time.monotonic() - begun < 1200
        time.sleep(0.02)
    os.kill(sweep.pid, signal.SIGKILL)
    sweep.wait(timeout=600)
    assert len(results(tmp_path)) == 2
    out, _ = dpbench_in_a_process(tmp_path, *reproduce(tmp_path, "seeds=1"))
    assert "4/4 done" in out
    after = results(tmp_path)
    assert len(after) == 4 and {name: after[name]["seconds"] for name in done} == done  # not run again
    written = pd.read_csv(tmp_path / "results" / "own_digits" / "runs.csv")
    assert len(written) == 4 and set(written["steps"]) == {3, 1000}
    assert [record["privacy"].get("releases") for name, record in after.items() if "long-private" in name] == [1000]


def _halfway(ledger: Path) -> bool:
    return ledger.read_bytes().count(b"\n") > 100


def test_a_run_keeps_its_threads_and_its_code(
    definition: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = table_jobs(read_table(str(definition)), tmp_path)[0]
    seen: list[int | None] = []

    def failing(job: Job, words: Sequence[str], threads: int | None) -> int:
        seen.append(threads)
        return 1

    monkeypatch.setattr("dpbench.harness.reproduce.jobs._run", failing)
    for threads in (1, None, 4):
        run_job(job, threads)
    assert seen == [1, 1, 1]
    run_job(replace(job, code_hash="another"), 1)
    assert len(seen) == 3 and job.state() == "failed"
    assert "the source of dpbench has changed since this table began" in job.failure()


def test_a_table_needs_the_scheduler_of_its_launcher(
    definition: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    words = ["reproduce", str(definition), "launcher=submitit", "rows=short", "seeds=1"]
    assert main([*words, "--runs", str(tmp_path / "runs")]) == 1
    assert 'launcher=submitit: Could not detect "srun"' in capsys.readouterr().err
