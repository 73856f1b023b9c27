"""`dpbench workflow`: what it trains, which noise it chooses, what it writes, and one line for each bad input."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from dpbench.capabilities.auditing.audit import Verdict
from dpbench.capabilities.auditing.report import audit_run
from dpbench.capabilities.workflow import run as workflow_run
from dpbench.capabilities.workflow.plan import AUDITED, Plan, make_plan
from dpbench.capabilities.workflow.run import Row, chosen, page, upper_limit, write_page
from dpbench.cli import main
from dpbench.errors import ConfigurationError
from dpbench.harness.reproduce.jobs import Job
from dpbench.harness.runs.folder import RunFolder
from tests.support.cli import dpbench

TINY = [
    *("model=mlp", "model.hidden=[64]", "data=digits", "data.image_size=8", "data.train_size=200"),
    *("data.expected_batch_size=50", "optimizer=momentum", "optimizer.lr=0.1"),
]
PLACES = ["--out", "out", "--runs", "runs"]
PLAN = Plan(
    words=("model=mlp", "data=mnist", "strategy.clipping=per_layer", "strategy.max_grad_norm=2", "optimizer.lr=0.1"),
    data="mnist",
    model="mlp",
    strategy="dpsgd",
    records=2000,
    lot=128.0,
    steps=625,
    seed=3,
    noise=(1.0, 2.0),
)


def recall(z: float | None, recalled: float, limit: float, epsilon: float | None = None) -> Row:
    return {
        "noise_multiplier": z,
        "epsilon_rdp": epsilon,
        "epsilon_pld": epsilon,
        "recalled": recalled,
        "guessed": 0.1,
        "limit": limit,
        "audited": None if z is None else 0.5,
        "verdict": None if z is None else "CONSISTENT",
        "seconds": 1.0,
        "words": "x",
        "code_hash": "y",
    }


def results_of(*passing: bool) -> list[Row]:
    """Runs on noise, by increasing noise, of which some pass at 10 points."""
    noise = [recall(z, 0.3, 0.05 if good else 0.2, 8 / z) for z, good in enumerate(passing, 1)]
    return [recall(None, 0.99, 0.9), *noise]


def test_the_limit_is_none_too_low() -> None:
    rng, exceeded = np.random.default_rng(0), 0
    for _ in range(2000):
        recalled, guessed = rng.binomial(1000, 0.2) / 1000, rng.binomial(2000, 0.1) / 2000
        exceeded += upper_limit(recalled, 1000, guessed, 2000) < 0.1
    assert 0.035 < exceeded / 2000 < 0.065


def test_the_least_noise_is_chosen_above_which_all_passes() -> None:
    for passing, multiplier, words in (
        ((False, True, True), 2, "z = 2, which passes, as do all larger ones"),
        ((True, False, True), 3, "z = 3"),
        ((True, True, False), None, "No z passes"),
    ):
        noise = results_of(*passing)
        assert chosen(noise, 0.1) == multiplier
        assert words in page(PLAN, 0.1, noise, [])


def power_text(recalled: float) -> str:
    return page(PLAN, 0.1, [recall(None, recalled, recalled - 0.1)], [])


def test_power() -> None:
    assert "cannot detect memorization" not in power_text(0.91)
    assert "cannot detect memorization" in power_text(0.9).replace("\n", " ")
    assert "trainer.max_steps=1250" in power_text(0.5)


def test_what_runs_on_noise_and_on_data() -> None:
    table = PLAN.on_noise()
    none, _, two = (" ".join(table.words_of(row, table.columns[0])) for row in table.rows)
    for words in (none, two):
        assert words.startswith("data=random_noise ")
        for word in ("data.like=mnist", "data.train_size=2000", "data.expected_batch_size=128", "optimizer.lr=0.1"):
            assert f" {word} " in words
    assert none.endswith(" strategy=none")
    assert "strategy." not in none
    assert two.endswith(
        " strategy=dpsgd strategy.clipping=per_layer strategy.max_grad_norm=2 strategy.noise_multiplier=2"
    )
    data = PLAN.on_data(2.0)
    assert [row.name for row in data.rows] == ["none", "dpsgd", "adaptive_mean"]
    assert " ".join(data.words_of(data.rows[2], data.columns[0])).endswith(
        " strategy=adaptive_mean strategy.alpha=1.0 strategy.beta=2.0 strategy.clipping=per_layer"
        " strategy.noise_multiplier=2"
    )
    assert data.seeds == (3,) and data.columns[1].name == AUDITED
    assert "audit.canaries=400" in data.columns[1].words
    alone = replace(PLAN, strategy="adaptive_mean", words=("data=mnist",)).on_data(2.0)
    assert [row.name for row in alone.rows] == ["none", "adaptive_mean"]


def test_a_plan_of_words() -> None:
    plan = make_plan([*TINY, "seed=4", "trainer.max_steps=150", "strategy.max_grad_norm=0.5"])
    assert (plan.data, plan.model, plan.strategy) == ("digits", "mlp", "dpsgd")
    assert (plan.records, plan.lot, plan.steps, plan.seed) == (200, 50.0, 150, 4)
    assert not any("seed" in word for word in plan.words)
    assert not any("max_grad_norm" in word for word in plan.on_data(1.0).rows[2].words)
    ratios = np.diff(np.log(plan.noise))
    assert len(plan.noise) == 7 and np.ptp(ratios) < 0.02 and ratios[0] > 0
    assert make_plan(TINY, (1.0, 4.0)).noise == (1.0, 4.0)


def test_bad_input_is_one_line(tmp_path: Path) -> None:
    tiny = " ".join(TINY)
    for words, message in {
        "data=mnist": "name the model",
        "model=mlp": "name the data",
        f"{tiny} strategy.noise_multiplier=1": "sets strategy.noise_multiplier of its runs itself",
        f"{tiny} strategy=none": "remove strategy=none",
        f"{tiny} trainer.max_steps=-1": "set trainer.max_steps",
        f"{tiny} data.expected_batch_size=300": "between 1 and the 200 training records",
        f"{tiny} launcher=teleport": "there is no launcher=teleport",
        f"{tiny} --margin 0": "--margin must be between 0 and 100 points",
        "model=mlp data=random_noise": "trains on images with random labels",
        "model=mlp data=digits_users records=users": "set records=examples",
        "model=autoencoder data=digits module=reconstruction": "module=classifier",
        "model=[mlp] data=digits": "model takes one name, not ['mlp']",
    }.items():
        _, error = dpbench(tmp_path, "workflow", *words.split(), *PLACES, status=1)
        assert error.count("\n") == 1, error
        assert message in error, error
    assert not list(tmp_path.iterdir())


def test_the_page(tmp_path: Path) -> None:
    noise = results_of(False, True, True)
    table = """
strategy,noise_multiplier,accuracy,claimed,sound,audited,audited_sound,verdict
none,,0.95,,,,,
dpsgd,2.0,0.9,4.2,4.0,3.1,3.9,CONSISTENT
"""
    none, private = pd.read_csv(io.StringIO(table)).astype(object).replace({math.nan: None}).to_dict("records")
    none["strategy"] = "none"
    text = page(PLAN, 0.1, noise, [none, private])
    write_page(tmp_path / "page", text, noise, [none, private])
    assert (tmp_path / "page" / "README.md").read_text(encoding="utf-8") == text
    assert "seed=3 --margin 10 --noise-multipliers 1,2" in text and "| chosen |" in text
    assert "| no privacy | 95.00 | ∞ | ∞ | – | – | – |" in text
    assert "| dpsgd | 90.00 | 4.20 | 4.00 | 3.10 | 3.90 | CONSISTENT |" in text
    assert pd.read_csv(tmp_path / "page" / "noise.csv")["noise_multiplier"].tolist()[1:] == [1, 2, 3]


def in_this_process(jobs: Sequence[Job], words: Sequence[str]) -> None:
    for job in jobs:
        if job.state() != "done":
            assert main(["train", *job.words, f"hydra.run.dir='{job.folder}'"]) == 0


def test_without_power_it_stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workflow_run, "sweep", in_this_process)
    words = ["workflow", *TINY, "trainer.max_steps=5", "--noise-multipliers", "1", *PLACES]
    assert "0/1 done" in dpbench(tmp_path, *words, "--status", status=1)[0]
    assert not (tmp_path / "out").exists()
    out, _ = dpbench(tmp_path, *words, status=1)
    assert "cannot detect memorization" in out
    assert "trainer.max_steps=10" in out and "Chosen" not in out
    assert (tmp_path / "out" / "workflow_digits_mlp" / "README.md").exists()


@pytest.mark.long
def test_the_whole(tmp_path: Path) -> None:
    """On 200 images: the most noise passes, the least does not."""
    words = ["workflow", *TINY, "trainer.max_steps=150", "--noise-multipliers", "1,30", *PLACES]
    dpbench(tmp_path, *words, status=1)
    folder = tmp_path / "out" / "workflow_digits_mlp"
    text = (folder / "README.md").read_text(encoding="utf-8")
    assert "Chosen: z = 30" in text
    noise = pd.read_csv(folder / "noise.csv")
    assert noise["recalled"][0] > 0.9 > noise["recalled"][1] > noise["recalled"][2]
    assert (noise["audited"][1:] < noise["epsilon_pld"][1:]).all() and set(noise["verdict"][1:]) == {"CONSISTENT"}
    runs = list((tmp_path / "runs" / "workflow_digits_mlp").glob("*/result.json"))
    assert len(runs) == 1 + 2 + 3
    (audited,) = [run.parent for run in runs if RunFolder(run.parent).audit.exists()]
    assert audit_run(audited, 0.999999).result.verdict == Verdict.CONSISTENT  # at 95 % some right runs are accused


@pytest.mark.parametrize("confidence", [0.0, 1.0, 95.0, math.nan])
def test_a_limit_at_no_confidence_is_refused(confidence: float) -> None:
    with pytest.raises(ConfigurationError, match=f"confidence must lie strictly between 0 and 1, not {confidence}"):
        upper_limit(0.2, 100, 0.1, 100, confidence)
