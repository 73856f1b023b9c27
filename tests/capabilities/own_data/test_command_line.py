"""Own data on the command line: small tables of real data are trained privately and learned."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from sklearn.datasets import load_breast_cancer, load_diabetes

from tests.support.cli import dpbench


@pytest.mark.slow
@pytest.mark.parametrize(
    ("load", "options", "metric", "low", "high"),
    [
        (
            load_diabetes,
            "features=[[bmi,bp,s5],target] ranges={bmi:[-0.1,0.1],bp:[-0.1,0.1],s5:[-0.1,0.1],target:[0,350]} "
            "module=regression model=regression_mlp",
            "test/mean_squared_error",
            0,
            0.15,  # 0.19 is the variance
        ),
        (
            load_breast_cancer,
            "features=[[mean_radius,mean_texture,mean_concavity],target] "
            "ranges={mean_radius:[5,30],mean_texture:[5,40],mean_concavity:[0,0.5]} model=mlp model.hidden=[16]",
            "test/accuracy",
            0.8,
            1,
        ),
    ],
)
def test_a_table(load: Any, options: str, metric: str, low: float, high: float, tmp_path: Path) -> None:
    load(as_frame=True).frame.rename(columns=lambda name: name.replace(" ", "_")).to_csv(
        tmp_path / "own.csv", index=False
    )
    words = ["data=table", "data.options.path=own.csv", "data.options.held_out=0.2"]
    words += [f"data.options.{word}" if word[:5] in ("featu", "range") else word for word in options.split()]
    run = ["trainer.max_steps=100", "logger=none", "strategy.noise_multiplier=0.6", "optimizer.lr=0.5"]
    dpbench(tmp_path, "train", *words, *run, "hydra.run.dir=run")
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["privacy"]["epsilon"]["rdp"] > 0
    assert low < result["metrics"][metric] < high
