"""Pictures of what generators make: of the runs that the table shows, whatever made the results before."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

from dpbench.cli import main
from dpbench.harness.reproduce._outputs import strip
from dpbench.harness.reproduce.jobs import Job, table_jobs
from dpbench.harness.reproduce.tables import read_table
from dpbench.harness.run.samples import grid, write_grid
from tests.harness.reproduce.digits_table import edited
from tools.results import refresh


@pytest.fixture
def jobs(definition: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Job]:
    """Runs of a table with pictures, one seed, none of which is made."""
    monkeypatch.setattr("dpbench.harness.reproduce.reproduction.sweep", lambda *_: None)
    edited(definition, "seeds: 2", "seeds: 1\nsamples: true")
    return table_jobs(read_table(str(definition)), tmp_path / "runs")


def _finish(job: Job, level: float, pictured: bool = True) -> None:
    """As if the run were finished, with an accuracy and gray images of that level."""
    hardware = {"cpu": "x", "threads": 1, "gpu": None}
    privacy = {
        "epsilon": {"rdp": 1.0, "pld": 1.0}, "delta": 1e-5, "unit": "example",
        "neighbouring_relation": "add_or_remove_one",
    }  # fmt: skip
    record = {
        "metrics": {"test/accuracy": level}, "privacy": privacy, "config": {"run": {"name": "n"}}, "seed": job.seed,
        "seconds": 1, "steps": 6, "config_hash": job.config_hash, "code_hash": job.code_hash, "commit": "c",
        "hardware": hardware, "versions": {},
    }  # fmt: skip
    job.path.mkdir(parents=True, exist_ok=True)
    job.run.result.write_text(json.dumps(record), encoding="utf-8")
    job.run.samples.unlink(missing_ok=True)
    if pictured:
        _draw(job.run.samples, torch.full((30, 1, 4, 4), level))


def _draw(path: Path, images: torch.Tensor) -> None:
    generator: Any = SimpleNamespace(num_classes=3, sample=lambda labels, noise: images)  # three classes of ten
    write_grid(grid(generator), path)


def _call(definition: Path, tmp_path: Path, *words: str) -> int:
    return main(
        ["reproduce", str(definition), "--out", str(tmp_path / "out"), "--runs", str(tmp_path / "runs"), *words]
    )


def _level(folder: Path, job: Job) -> float | None:
    path = folder / "samples" / job.row / f"{job.column}.png"
    return round(Image.open(path).convert("L").getpixel((1, 1)) / 255, 2) if path.is_file() else None  # type: ignore[operator]


def _height(path: Path) -> int:
    return np.asarray(Image.open(path)).shape[0]


def _by_other_code(folder: Path, **columns: object) -> None:
    """What is held looks as if other code had made it."""
    pd.read_csv(folder / "runs.csv").assign(**columns).to_csv(folder / "runs.csv", index=False)


def test_a_strip_has_two_images_of_each_class(tmp_path: Path) -> None:
    _draw(tmp_path / "samples.png", torch.arange(30).div(30)[:, None, None, None].expand(-1, 3, 4, 4))
    shown = strip(tmp_path / "samples.png")
    centers = [round(float(shown[1, 4 * place + 1, 0]) / 255 * 30) for place in range(6)]
    assert centers == [0, 1, 10, 11, 20, 21]


def test_images_of_kept_runs_stay_and_new_ones_join(
    jobs: list[Job], definition: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "out" / "own_digits"
    for job in jobs[:2]:
        _finish(job, 0.2)
    assert _call(definition, tmp_path) == 0
    assert "samples.png has no images of long, private; long, plain" in capsys.readouterr().out
    small = _height(folder / "samples.png")
    _by_other_code(folder, code_hash="old")
    shutil.rmtree(tmp_path / "runs")
    for job in jobs[1:]:  # the second cell is run anew, the first stays
        _finish(job, 0.8)
    assert _call(definition, tmp_path, "--keep") == 0
    assert "has no images" not in capsys.readouterr().out
    assert [_level(folder, job) for job in jobs] == [0.2, 0.8, 0.8, 0.8]
    assert pd.read_csv(folder / "runs.csv")["value"].tolist() == [0.2, 0.8, 0.8, 0.8]
    assert _height(folder / "samples.png") > small
    shutil.rmtree(tmp_path / "runs")
    assert _call(definition, tmp_path, "--keep") == 0  # with no run folder at all
    assert [_level(folder, job) for job in jobs] == [0.2, 0.8, 0.8, 0.8]


@pytest.mark.long
def test_images_of_replaced_runs_go(jobs: list[Job], definition: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out" / "own_digits"
    for job in jobs:
        _finish(job, 0.2)
    assert _call(definition, tmp_path) == 0
    _by_other_code(folder, code_hash="old")
    for job in jobs:
        _finish(job, 0.8)
    assert _call(definition, tmp_path, "--replace") == 0
    assert [_level(folder, job) for job in jobs] == [0.8] * 4


@pytest.mark.long
def test_elsewhere_kept_images_come_along(jobs: list[Job], definition: Path, tmp_path: Path) -> None:
    for job in jobs:
        _finish(job, 0.2)
    assert _call(definition, tmp_path) == 0
    held = tmp_path / "out" / "own_digits"
    _by_other_code(held, code_hash="old", config_hash=[f"h{number}" for number in range(4)])
    shutil.rmtree(tmp_path / "runs")
    _finish(jobs[0], 0.8)  # of other settings than the one that is held: a table beside it
    assert _call(definition, tmp_path, "--keep") == 0
    beside = tmp_path / "runs" / "own_digits" / "table"
    assert [_level(beside, job) for job in jobs] == [0.8, 0.2, 0.2, 0.2]
    assert [_level(held, job) for job in jobs] == [0.2] * 4


@pytest.mark.long
def test_pages_are_written_again_with_their_pictures(
    jobs: list[Job], definition: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for job in jobs:
        _finish(job, 0.2)
    assert _call(definition, tmp_path) == 0
    folder = tmp_path / "out" / "own_digits"
    drawn = (folder / "samples.png").read_bytes()
    (folder / "samples.png").unlink()
    table = read_table(str(definition))
    monkeypatch.setattr(refresh, "table_names", lambda: [str(definition)])
    monkeypatch.setattr(refresh, "_PAGES", ())
    shutil.copytree(tmp_path / "out", tmp_path / "checkout" / "results")
    refresh.refresh(tmp_path / "checkout")
    again = tmp_path / "checkout" / "results" / table.folder
    assert (again / "samples.png").read_bytes() == drawn
    shutil.rmtree(again / "samples")  # as older versions wrote it
    refresh.refresh(tmp_path / "checkout")
    assert (again / "samples.png").read_bytes() == drawn
