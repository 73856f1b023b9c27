"""Pictures of what generators make: of the runs that the table shows, whatever made the results before."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from dpbench.cli import main
from dpbench.harness.reproduce.jobs import Job, table_jobs
from dpbench.harness.reproduce.tables import read_table
from dpbench.harness.run.samples import grid, write_grid
from tests.harness.reproduce.digits_table import edited


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


def _width(path: Path) -> int:
    return np.asarray(Image.open(path)).shape[1]


def test_the_picture_is_drawn_of_all_cells_or_stays(
    jobs: list[Job], definition: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "out" / "own_digits" / "samples.png"
    for job in jobs[:2]:
        _finish(job, 0.2)
    assert _call(definition, tmp_path) == 0
    small = _width(picture)
    for job in jobs[2:]:
        _finish(job, 0.8, pictured=job is not jobs[3])
    assert _call(definition, tmp_path) == 0
    assert "samples.png is not drawn, as no folder here has images of long, plain" in capsys.readouterr().out
    assert _width(picture) == small
    _finish(jobs[3], 0.8)
    assert _call(definition, tmp_path) == 0
    assert _width(picture) > small
    drawn = picture.read_bytes()
    shutil.rmtree(tmp_path / "runs")
    assert _call(definition, tmp_path) == 0  # with no run folder at all
    assert picture.read_bytes() == drawn
