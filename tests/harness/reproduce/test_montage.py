"""Pictures of what generators make: of the runs that the table shows, whatever made the results before."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image

from dpbench.harness.reproduce.jobs import Job, table_jobs
from dpbench.harness.reproduce.tables import read_table
from dpbench.harness.run.samples import grid, write_grid
from tests.harness.reproduce.digits_table import edited
from tests.harness.reproduce.test_outputs import finish
from tests.support.cli import dpbench


def made(job: Job, level: float) -> None:
    """A run of a generator that is finished, with gray images of that level of three classes of ten."""
    privacy = {"epsilon": {"rdp": 1.0, "pld": 1.0}, "unit": "example", "neighbouring_relation": "add_or_remove_one"}
    privacy["delta"] = 1e-5
    hashes = {"config_hash": job.config_hash, "code_hash": job.code_hash, "commit": "c", "seed": job.seed}
    hardware = {"cpu": "x", "threads": 1, "gpu": None}
    finish(job, metrics={"test/accuracy": level}, privacy=privacy, hardware=hardware, versions={}, **hashes)
    images = torch.full((30, 1, 4, 4), level)
    generator: Any = SimpleNamespace(num_classes=3, sample=lambda labels, noise: images)
    write_grid(grid(generator), job.run.samples)


@pytest.mark.drawn
def test_the_picture_is_drawn_of_all_cells_or_stays(
    definition: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dpbench.harness.reproduce.reproduction.sweep", lambda *_: None)
    edited(definition, "seeds: 2", "seeds: 1\nsamples: true")
    picture = tmp_path / "out" / "own_digits" / "samples.png"

    def width() -> int:
        """Of the picture that the command leaves."""
        told.append(dpbench(tmp_path, "reproduce", str(definition), "--out", "out", "--runs", "runs")[0])
        with Image.open(picture) as image:
            return image.width

    told: list[str] = []
    short, plain, long, last = table_jobs(read_table(str(definition)), tmp_path / "runs")
    made(short, 0.2)
    made(plain, 0.2)
    small = width()
    made(long, 0.8)
    made(last, 0.8)
    last.run.samples.unlink()
    assert width() == small
    assert "samples.png is not drawn, as no folder here has images of long, plain" in told[-1]
    made(last, 0.8)
    assert width() > small
    drawn = picture.read_bytes()
    shutil.rmtree(tmp_path / "runs")
    width()  # with no run folder at all
    assert picture.read_bytes() == drawn
