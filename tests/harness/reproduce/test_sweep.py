"""Tables: the command, a sweep that fails or is killed and goes on, launchers."""

from __future__ import annotations

import errno
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dpbench.cli import main
from dpbench.cli.experiments import part_of
from dpbench.errors import Interrupted
from dpbench.harness.reproduce.jobs import Job, run_job, sweep, table_jobs
from dpbench.harness.reproduce.tables import read_table
from tests.support.cli import dpbench


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
        "claims rows=a": "claims is computed without runs and accepts only --out",
        "gradient_compression/table2x": "Did you mean gradient_compression/table",
        "gradient_compression/table1 rows=sigma_9": "has no row 'sigma_9'; known: sigma_0.7",
        "gradient_compression/table1 columns=x": "has no column 'x'",
        "gradient_compression/table1 seed=1": "unknown argument 'seed=1': give rows=",
        "gradient_compression/table1 seeds=0": "leaves nothing to run",
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
    assert read_table("gradient_compression/table1").selected((), (), 7).seeds == tuple(range(7))


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


def test_a_table_that_is_told_to_stop_begins_no_other_run(
    definition: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped: list[str] = []
    monkeypatch.setattr("dpbench.harness.reproduce.jobs._run", lambda job, *_: stopped.append(job.name) or 130)
    with pytest.raises(Interrupted):
        sweep(table_jobs(read_table(str(definition)), tmp_path), ["launcher=basic"])
    assert len(stopped) == 1


def test_a_table_needs_the_scheduler_of_its_launcher(
    definition: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    words = ["reproduce", str(definition), "launcher=submitit", "rows=short", "seeds=1"]
    assert main([*words, "--runs", str(tmp_path / "runs")]) == 1
    assert 'launcher=submitit: Could not detect "srun"' in capsys.readouterr().err
