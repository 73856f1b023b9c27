"""Own data on the command line: small tables of real data are trained privately and learned."""

from __future__ import annotations

import argparse
import decimal
import inspect
import json
from pathlib import Path

import pandas as pd
import pytest
from sklearn.datasets import load_breast_cancer, load_diabetes

from tests.support.cli import dpbench


def measured(folder: Path, *words: str) -> dict[str, float]:
    """Metrics of a run on a file."""
    common = ["logger=none", "strategy.noise_multiplier=0.6", "optimizer.lr=0.5", "hydra.run.dir=run"]
    dpbench(folder, "train", *common, *words)
    result = json.loads((folder / "run" / "result.json").read_text())
    assert result["privacy"]["epsilon"]["rdp"] > 0
    metrics: dict[str, float] = result["metrics"]
    return metrics


@pytest.mark.slow
def test_regression(tmp_path: Path) -> None:
    patients = load_diabetes(as_frame=True).frame
    patients.to_csv(tmp_path / "diabetes.csv", index=False)
    ranges = ", ".join([*(f"{name}: [-0.1, 0.1]" for name in ("age", "bmi", "bp", "s5")), "target: [0, 350]"])
    metrics = measured(
        tmp_path,
        *("data=table", "data.options.path=diabetes.csv", "module=regression", "model=regression_mlp"),
        "data.options.features=[[age, bmi, bp, s5], target]",
        f"data.options.ranges={{{ranges}}}",
        "trainer.max_steps=150",
        "data.options.held_out=0.2",
    )
    scaled = patients["target"].clip(0, 350) / 175 - 1
    assert metrics["test/mean_squared_error"] < 0.8 * scaled.var()


@pytest.mark.slow
def test_classification_of_a_table(tmp_path: Path) -> None:
    tumors = load_breast_cancer(as_frame=True).frame
    tumors.to_csv(tmp_path / "tumors.csv", index=False)
    metrics = measured(
        tmp_path,
        *("data=table", "data.options.path=tumors.csv", "model=mlp", "model.hidden=[16]"),
        "data.options.features=[[mean radius, mean texture, mean concavity], target]",
        "data.options.ranges={mean radius: [5, 30], mean texture: [5, 40], mean concavity: [0, 0.5]}",
        "trainer.max_steps=100",
        "data.options.held_out=0.2",
    )
    assert metrics["test/accuracy"] > 0.8


@pytest.mark.slow
def test_texts(tmp_path: Path) -> None:
    """Lines of the documentation of two modules: which one is it?"""
    rows = []
    for label, module in enumerate((argparse, decimal)):
        source = inspect.getsource(module if module is argparse else __import__("_pydecimal"))
        lines = [line.strip() for line in source.splitlines() if len(line.split()) > 4]
        rows += [(line, label) for line in lines[:900]]
    pd.DataFrame(rows, columns=["line", "label"]).to_csv(tmp_path / "lines.csv", index=False)
    metrics = measured(
        tmp_path,
        *("data=table", "data.options.path=lines.csv", "model=text_classifier", "data.options.text=labels"),
        *("data.options.features=[line, label]", "data.options.sequence_length=20"),
        *("trainer.max_steps=150", "optimizer.lr=4", "data.options.held_out=0.2"),
    )
    assert metrics["test/accuracy"] > 0.7
