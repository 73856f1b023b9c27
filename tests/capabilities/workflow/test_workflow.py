"""`dpbench workflow`: what it trains, which noise it chooses, what it writes, and one line for each bad input."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from dpbench.capabilities.auditing.audit import Verdict
from dpbench.capabilities.auditing.report import audit_run
from dpbench.capabilities.workflow import run as workflow_run
from dpbench.capabilities.workflow.plan import AUDITED, Plan, make_plan
from dpbench.capabilities.workflow.run import Row, chosen, page, upper_limit, write_page
from dpbench.cli import main
from dpbench.harness.reproduce.jobs import Job
from dpbench.harness.runs.folder import RunFolder

TINY = [
    *("model=mlp", "model.hidden=[64]", "data=digits", "data.image_size=8", "data.train_size=200"),
    *("data.expected_batch_size=50", "optimizer=momentum", "optimizer.lr=0.1"),
]
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


@pytest.mark.parametrize(
    ("passing", "multiplier", "words"),
    [
        ((False, True, True), 2, "z = 2, which passes, and so does all more noise"),
        ((True, True, True), 1, "z = 1"),
        ((True, False, True), 3, "z = 3"),
        ((True, True, False), None, "No z is chosen"),
    ],
)
def test_the_least_noise_is_chosen_above_which_all_passes(
    passing: Sequence[bool], multiplier: float | None, words: str
) -> None:
    noise = results_of(*passing)
    assert chosen(noise, 0.1) == multiplier
    assert words in page(PLAN, 0.1, noise, [])


def power_text(recalled: float) -> str:
    return page(PLAN, 0.1, [recall(None, recalled, recalled - 0.1)], [])


def test_power() -> None:
    assert "proves nothing" not in power_text(0.91)
    assert "proves nothing" in power_text(0.9).replace("\n", " ")
    assert "trainer.max_steps=1250" in power_text(0.5)


def test_what_runs_on_noise_and_on_data() -> None:
    table = PLAN.on_noise()
    none, _, two = (table.words_of(row, table.columns[0]) for row in table.rows)
    assert none[0] == "data=random_noise" and none[-1] == "strategy=none" and "data=mnist" not in none
    for word in ("data.like=mnist", "data.train_size=2000", "data.expected_batch_size=128", "optimizer.lr=0.1"):
        assert word in none and word in two
    assert not any(word.startswith("strategy.") for word in none)
    assert two[-4:] == (
        "strategy=dpsgd", "strategy.clipping=per_layer", "strategy.max_grad_norm=2", "strategy.noise_multiplier=2",
    )  # fmt: skip
    data = PLAN.on_data(2.0)
    rows = {row.name: data.words_of(row, data.columns[0]) for row in data.rows}
    assert list(rows) == ["none", "dpsgd", "adaptive_mean"]
    assert rows["adaptive_mean"][-5:] == (
        "strategy=adaptive_mean", "strategy.alpha=1.0", "strategy.beta=2.0", "strategy.clipping=per_layer",
        "strategy.noise_multiplier=2",
    )  # fmt: skip
    own = replace(PLAN, strategy="adaptive_mean", words=("data=mnist", "strategy.alpha=1.5")).on_data(2.0)
    assert [row.name for row in own.rows] == ["none", "adaptive_mean"] and "strategy.alpha=1.5" in own.rows[1].words
    assert "data=mnist" in rows["none"] and data.seeds == (3,)
    assert data.columns[1].name == AUDITED and "audit.canaries=400" in data.columns[1].words


def test_a_plan_of_words() -> None:
    plan = make_plan([*TINY, "seed=4", "trainer.max_steps=150", "strategy.max_grad_norm=0.5"])
    assert (plan.data, plan.model, plan.strategy) == ("digits", "mlp", "dpsgd")
    assert (plan.records, plan.lot, plan.steps, plan.seed) == (200, 50.0, 150, 4)
    assert not any("seed" in word for word in plan.words)
    assert not any("max_grad_norm" in word for word in plan.on_data(1.0).rows[2].words)
    ratios = np.diff(np.log(plan.noise))
    assert len(plan.noise) == 7 and np.ptp(ratios) < 0.02 and ratios[0] > 0
    assert make_plan(TINY, (1.0, 4.0)).noise == (1.0, 4.0)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["data=mnist"], "name the model"),
        (["model=mlp"], "name the data"),
        ([*TINY, "strategy.noise_multiplier=1"], "sets strategy.noise_multiplier of its runs itself"),
        ([*TINY, "audit=gradient_canaries"], "sets audit of its runs itself"),
        ([*TINY, "hydra.run.dir=x"], "sets hydra.run.dir of its runs itself"),
        ([*TINY, "data.inserted.records=10"], "sets data.inserted.records of its runs itself"),
        ([*TINY, "strategy=none"], "remove strategy=none"),
        ([*TINY, "trainer.max_steps=-1"], "set trainer.max_steps"),
        ([*TINY, "optimizer.lr=fast"], "optimizer.lr must be"),
        ([*TINY, "data.expected_batch_size=300"], "between 1 and the 200 training records"),
        ([*TINY, "launcher=teleport"], "there is no launcher=teleport"),
        ([*TINY, "seed=1,2"], "seed=1,2"),
        ([*TINY, "nonsense"], "nonsense"),
        ([*TINY, "--margin", "0"], "--margin must be between 0 and 100 points"),
        (["model=mlp", "data=random_noise"], "whether random labels of images are learned"),
        (["model=mlp", "data=digits_users", "records=users"], "with records=examples"),
        (["model=char_lstm", "data=shakespeare_roles", "module=next_token"], "choose data= of digits"),
        (["model=autoencoder", "data=digits", "module=reconstruction"], "module=classifier"),
        (["model=nothing", "data=digits"], "there is no model=nothing"),
        (["model=[mlp]", "data=digits"], "model takes one name, not ['mlp']"),
        ([*TINY, "optimizer.lr=0.1,0.2"], "optimizer.lr=0.1,0.2"),
        ([*TINY, "optimizer.lrr=0.1"], "Did you mean optimizer.lr?"),
    ],
)
def test_bad_input_is_one_line(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["workflow", *words, "--out", str(tmp_path / "out"), "--runs", str(tmp_path / "runs")]) == 1
    error = capsys.readouterr().err
    assert error.startswith("dpbench: error: ") and error.count("\n") == 1, error
    assert message in error, error
    assert not list(tmp_path.iterdir())


def test_the_page(tmp_path: Path) -> None:
    noise = results_of(False, True, True)
    none = {"strategy": "none", "noise_multiplier": None, "accuracy": 0.95, "claimed": None, "sound": None}
    none |= {"audited": None, "audited_sound": None, "verdict": None}
    private = {"strategy": "dpsgd", "noise_multiplier": 2.0, "accuracy": 0.9, "claimed": 4.2, "sound": 4.0}
    private |= {"audited": 3.1, "audited_sound": 3.9, "verdict": "CONSISTENT"}
    text = page(PLAN, 0.1, noise, [none, private])
    write_page(tmp_path / "page", text, noise, [none, private])
    assert (tmp_path / "page" / "README.md").read_text(encoding="utf-8") == text
    for words in (
        "dpbench workflow model=mlp data=mnist",
        "seed=3 --margin 10 --noise-multipliers 1,2",
        "| chosen |",
    ):
        assert words in text, words
    assert "| no privacy | 95.00 | ∞ | ∞ | – | – | – |" in text
    assert "| dpsgd | 90.00 | 4.20 | 4.00 | 3.10 | 3.90 | CONSISTENT |" in text
    table = pd.read_csv(tmp_path / "page" / "noise.csv")
    assert len(table) == 4 and math.isnan(table["noise_multiplier"][0])
    assert len(pd.read_csv(tmp_path / "page" / "data.csv")) == 2


def in_this_process(jobs: Sequence[Job], words: Sequence[str]) -> None:
    for job in jobs:
        if job.state() != "done":
            assert main(["train", *job.words, f"hydra.run.dir='{job.folder}'"]) == 0


def test_without_power_it_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(workflow_run, "sweep", in_this_process)
    places = ["--out", str(tmp_path / "out"), "--runs", str(tmp_path / "runs")]
    words = ["workflow", *TINY, "trainer.max_steps=5", "--noise-multipliers", "1", *places]
    assert main([*words, "--status"]) == 1
    assert "0/1 done" in capsys.readouterr().out and not (tmp_path / "out").exists()
    assert main(words) == 1
    out = capsys.readouterr().out
    assert "proves nothing" in out and "trainer.max_steps=10" in out and "Chosen" not in out
    assert "proves nothing" in (tmp_path / "out" / "workflow_digits_mlp" / "README.md").read_text(encoding="utf-8")


@pytest.mark.long
def test_the_whole(tmp_path: Path) -> None:
    """On 200 images: the most noise passes, the least does not; what diverges by so much noise is said."""
    places = ["--out", str(tmp_path / "out"), "--runs", str(tmp_path / "runs")]
    words = ["workflow", *TINY, "trainer.max_steps=150", "--noise-multipliers", "1,30", *places]
    assert main(words) == 1
    folder = tmp_path / "out" / "workflow_digits_mlp"
    text = (folder / "README.md").read_text(encoding="utf-8")
    assert "Chosen: z = 30" in text
    noise = pd.read_csv(folder / "noise.csv")
    assert noise["recalled"][0] > 0.9 > noise["recalled"][1] > noise["recalled"][2]
    assert (noise["audited"][1:] < noise["epsilon_pld"][1:]).all() and set(noise["verdict"][1:]) == {"CONSISTENT"}
    runs = list((tmp_path / "runs" / "workflow_digits_mlp").glob("*/result.json"))
    assert len(runs) == 1 + 2 + 3
    # The bounds of adaptive mean clipping follow the noise where there is so much of it, and the weights with them.
    attempts = sorted((tmp_path / "runs" / "workflow_digits_mlp").glob("*/attempt.json"))
    failed = [path for path in attempts if json.loads(path.read_text())["error"]]
    assert [path.parent.name.split("-")[:2] for path in failed] == [
        ["adaptive_mean", "audited"],
        ["adaptive_mean", "plain"],
    ]
    assert all("released weights have diverged" in path.read_text() for path in failed)
    audited = [run.parent for run in runs if RunFolder(run.parent).audit.exists()]
    for place in audited:  # at 95 % some noise of a right run is accused
        assert audit_run(place, 0.999999).result.verdict == Verdict.CONSISTENT
    assert len(audited) == 1
    for run in runs:
        config: dict[str, Any] = json.loads((run.parent / RunFolder.result).read_text())["config"]
        assert config["trainer"]["max_steps"] == 150 and config["data"]["expected_batch_size"] == 50
