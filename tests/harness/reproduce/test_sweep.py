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
from submitit.core.utils import FailedJobError

from dpbench.cli import main
from dpbench.cli.experiments import part_of
from dpbench.errors import ConfigurationError
from dpbench.harness.reproduce.jobs import Job, run_job, table_jobs
from dpbench.harness.reproduce.tables import read_table
from dpbench.harness.run.jobs import _submitit_error
from tests.harness.reproduce.digits_table import edited
from tests.support.cli import dpbench_in_a_process, start


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


def test_words_may_follow_options(definition: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["reproduce", str(definition), "--status", "--runs", str(tmp_path / "runs"), "rows=short", "seeds=1"]
    assert main(words) == 0
    assert "0/2 done" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main([*words, "--statsu"])
    assert "unrecognized arguments: --statsu" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere/table9"], "there is no table 'nowhere/table9'.*Known: adaptive_quantile/.*claims"),
        (["claims", "rows=a"], "claims takes no runs: only --out goes with it"),
        (["gradient_compression/table2x"], "Did you mean gradient_compression/table"),
        (["gradient_compression/table1", "rows=sigma_9"], "has no row 'sigma_9'; known: sigma_0.7"),
        (["gradient_compression/table1", "columns=x"], "has no column 'x'"),
        (["gradient_compression/table1", "seed=1"], "'seed=1' is none of rows="),
        (["gradient_compression/table1", "seeds=0"], "leaves nothing to run"),
        (["gradient_compression/table1", "seeds=two"], "'seeds=two' is none of"),
        (["gradient_compression/table1", "launcher=slurm", "seeds=1"], "there is no launcher=slurm"),
        (["gradient_compression/table1", "rows=sigma_0.7", "rows=sigma_1.1"], "rows= is given twice"),
        (["gradient_compression/table1", "trainer=cpu", "trainer=gpu"], "trainer= is given twice"),
        (["gradient_compression/table1", "trainer=tpu", "seeds=1"], "there is no trainer=tpu"),
    ],
)
def test_what_cannot_be_reproduced_is_one_clear_line(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["reproduce", *words]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and error.startswith("dpbench: error: ")
    assert re.search(message, error), error


def test_seeds_are_a_number_or_a_list() -> None:
    assert part_of(["seeds=3"]).seeds == 3
    assert part_of(["seeds=0,"]).seeds == (0,)
    assert part_of(["seeds=[4,5]"]).seeds == (4, 5)
    table = read_table("gradient_compression/table1")
    assert table.selected((), (), 2).seeds == (0, 1)
    assert table.selected((), (), 7).seeds == tuple(range(7))


def test_a_damaged_result_is_named(definition: Path, tmp_path: Path) -> None:
    jobs = table_jobs(read_table(str(definition)).selected(["short"], (), 1), tmp_path)
    jobs[0].path.mkdir(parents=True)
    (jobs[0].path / "result.json").write_text("{")
    with pytest.raises(ConfigurationError, match="result.json is damaged: delete"):
        jobs[0].result()


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


@pytest.mark.long
@pytest.mark.parametrize("workers", [0, 2])
def test_a_table_that_is_told_to_stop_begins_no_other_run(workers: int, definition: Path, tmp_path: Path) -> None:
    edited(definition, "trainer.max_steps=6", "trainer.max_steps=1000")
    launcher = ["launcher=joblib", f"hydra.launcher.n_jobs={workers}"] if workers else []
    words = reproduce(tmp_path, "rows=long", "columns=private", "seeds=5", *launcher)
    sweep = start(tmp_path, *words)
    begun = time.monotonic()
    while not any(map(_halfway, (tmp_path / "runs").rglob("long-private-*/ledger.jsonl"))):
        assert sweep.poll() is None and time.monotonic() - begun < 1200
        time.sleep(0.02)
    sweep.send_signal(signal.SIGTERM)
    sweep.wait(timeout=600)
    assert sweep.returncode == -signal.SIGTERM
    while not (saved := [*(tmp_path / "runs").rglob("partial_result.json")]):
        assert time.monotonic() - begun < 1200
        time.sleep(0.1)
    assert len([*(tmp_path / "runs").rglob("ledger.jsonl")]) <= max(workers, 1)
    assert len(saved) <= max(workers, 1)


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


@pytest.mark.long
def test_failed_runs_are_listed_and_tried_again(
    definition: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["reproduce", edited(definition, "strategy=none", "'strategy=none', 'optimizer.lr=-1'"), "rows=short"]
    assert main([*words, "seeds=1"]) == 1
    shown = capsys.readouterr().out
    assert "1/2 done, 0 begun, 1 failed" in shown and "output.log" in shown
    assert "short, plain, seed 0" in shown and "optimizer.lr must be" in shown.partition("short, plain")[2]
    assert "–" in shown  # the missing cell stays
    attempts = (tmp_path / "runs").rglob("attempt.json")
    (folder,) = [path.parent for path in attempts if json.loads(path.read_text())["error"]]
    assert main([*words, "seeds=1", "--status"]) == 1
    modified = (folder / "attempt.json").stat().st_mtime_ns
    assert main([*words, "seeds=1"]) == 1
    assert (folder / "attempt.json").stat().st_mtime_ns > modified


@pytest.mark.long
def test_another_launcher_gives_the_same_figures(definition: Path, tmp_path: Path) -> None:
    basic, other = tmp_path / "basic", tmp_path / "other"
    for folder, words in ((basic, ()), (other, ("launcher=joblib",))):
        command = [*reproduce(tmp_path, "rows=short", "seeds=1", *words), "--runs", str(folder)]
        dpbench_in_a_process(tmp_path, *command)
    one, two = results(basic), results(other)
    assert set(one) == set(two) and len(one) == 2
    for name in one:
        assert one[name]["metrics"]["test/accuracy"] == pytest.approx(two[name]["metrics"]["test/accuracy"], abs=0.01)


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (FailedJobError("sbatch: error: a\nsbatch: fatal: b"), "launcher=submitit: sbatch: fatal: b."),
        (FailedJobError("Job (task=0) failed during processing with trace:\n-----\nx\n-----"), "with trace."),
    ],
)
def test_what_submitit_says_is_one_line(error: RuntimeError, cause: str) -> None:
    assert str(_submitit_error(error)).endswith(cause)


def test_a_table_needs_the_scheduler_of_its_launcher(
    definition: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    words = ["reproduce", str(definition), "launcher=submitit", "rows=short", "seeds=1"]
    assert main([*words, "--runs", str(tmp_path / "runs")]) == 1
    assert 'launcher=submitit: Could not detect "srun"' in capsys.readouterr().err
