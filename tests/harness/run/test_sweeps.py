"""Sweeps from the first word to the last table: a grid, a list, one that fails in part, Optuna."""

from __future__ import annotations

import json
import re
import statistics
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser

from dpbench.cli import main
from dpbench.data import ImageDataModule
from dpbench.errors import ConfigurationError, DPBenchError, Interrupted
from dpbench.harness.run import build
from dpbench.harness.run.jobs import launch
from tests.support.offline import SMALL

pytestmark = pytest.mark.usefixtures("here")
FEW = [*SMALL, "trainer.max_steps=2", "logger=none"]
PAGE = Path(__file__).parents[3] / "docs/sweeps.md"
HEAD = "| optimizer.lr | n | validation accuracy (%) | test accuracy (%) | epsilon (RDP) | epsilon (PLD) | steps |"


def of_the_page(name: str) -> str:
    """Write a file of docs/sweeps.md to where the page says."""
    text = (
        PAGE.read_text(encoding="utf-8").split(f"`my/experiment/{name}.yaml`")[1].split("```yaml\n")[1].split("```")[0]
    )
    Path("my/experiment").mkdir(parents=True)
    Path(f"my/experiment/{name}.yaml").write_text(text)
    return text


def results(folder: str) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(Path(folder).glob("*/result.json"))]


def test_a_grid_ends_with_its_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "-m", *FEW, "optimizer.lr=0.1,1", "seed=3,4", "hydra.sweep.dir=grid"]) == 0
    shown = capsys.readouterr().out
    text = Path("grid/table.md").read_text()
    assert text in shown and text.startswith(HEAD) and "Print this table again: dpbench table grid --group-by" in text
    own = [one["metrics"]["test/accuracy"] * 100 for one in results("grid") if one["config"]["optimizer"]["lr"] == 1]
    assert f"| {statistics.mean(own):.2f} ± {statistics.stdev(own):.2f} |" in text
    rows = pd.read_csv("grid/table.csv")
    assert rows["optimizer.lr"].tolist() == [0.1, 1] and rows["n"].tolist() == [2, 2]
    assert main(["account", "grid", "--json", "--selection", "geometric", "--mean-trials", "4"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert f"publishing all of them: epsilon {facts['epsilon']:.3f} (RDP) at delta=0.0001" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["strategy=dpsgd,clip_only", "strategy.target_epsilon=3,null", "seed=0"],
            "strategy=clip_only strategy.target_epsilon=3: ClipOnly is not private and cannot meet a target_epsilon",
        ),
        (
            ["model=mlp,mnist_cnn", "data.image_size=28,4"],
            "model=mnist_cnn data.image_size=4: model: mnist_cnn needs images of at least 14×14 pixels, not 1×4×4",
        ),
    ],
)
def test_what_would_fail_later_is_said_before_the_first_run(words: list[str], message: str) -> None:
    started = []
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        launch(["-m", "logger=none", *words], task=started.append)
    assert not started and not Path("multirun").exists()


def test_the_shape_of_images_is_known_before_they_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a network is made without weights."""
    data = ImageDataModule("digits", image_size=16, features="scattering")
    before = data.input_shape
    data.setup("fit")
    assert data.input_shape == before
    made: list[Any] = []
    monkeypatch.setattr("dpbench.harness.run._job_check.module_for", lambda *_: made.append(build.module_for(*_)))
    launch(["-m", "logger=none", "model=mlp"], lambda cfg: None)
    assert {parameter.device.type for parameter in made[0].parameters()} == {"meta"}


def test_runs_that_failed_are_named_and_the_others_shown(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["data.val_size=5000,100", "hydra.sweep.dir=sweep", "strategy=none"]
    few = [word for word in FEW if not word.startswith(("data.val_size", "strategy."))]
    assert main(["train", "-m", *few, *words]) == 1
    out, err = capsys.readouterr()
    assert err.startswith("dpbench: error: data.val_size=5000 leaves none of") and err.count("\n") == 1
    assert "| 100 | 1 |" in out
    assert "Choosing" not in out and "| inf | inf |" in out  # without privacy


def test_explicit_settings_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    """Pairs of values that belong together: a file for each, in a folder of one's own."""
    careful = of_the_page("careful")
    Path("my/experiment/bold.yaml").write_text(careful.replace("2.0", "1.0").replace("0.2", "0.1"))
    assert main(["train", "-m", "--config-dir=my", *FEW, "experiment=careful,bold", "hydra.sweep.dir=list"]) == 0
    assert "| experiment | n |" in capsys.readouterr().out
    settings = [one["config"] for one in results("list")]
    assert [(own["strategy"]["noise_multiplier"], own["optimizer"]["lr"]) for own in settings] == [(2, 0.2), (1, 0.1)]


def trials_of(folder: str) -> list[dict[str, Any]]:
    """The best trials of a search."""
    best: list[dict[str, Any]] = yaml.safe_load((Path(folder) / "optimization_results.yaml").read_text())
    return best


def test_without_optuna_its_installation_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    monkeypatch.delitem(sys.modules, "dpbench.harness.run._optuna", raising=False)
    assert main(["train", "-m", *FEW, "hydra/sweeper=optuna", "hydra.sweeper.direction=maximize"]) == 1
    assert 'hydra/sweeper=optuna is not installed: pip install "dpbench-lightning[optuna]"' in capsys.readouterr().err


def test_a_study_goes_on_with_the_trials_that_it_lacks(tmp_path: Path) -> None:
    """Failed trials are its own, and interrupted ones are not."""
    pytest.importorskip("optuna", minversion="5")
    from dpbench.harness.run._optuna import OptunaSweeper

    parse = OverridesParser.create().parse_overrides
    words = parse(["optimizer.lr=tag(log,interval(0.1,1))", "seed=1,2", "data.size=int(interval(3,5))", "model=mlp"])
    settings: dict[str, Any] = {"sampler": {"_target_": "optuna.samplers.RandomSampler", "seed": 0}}
    settings |= {"direction": "maximize", "n_jobs": 2, "study_name": "x"}
    seen: list[str] = []
    values: list[Any] = [[0.5], DPBenchError("diverged"), [0.75], Interrupted(2, "dpbench resume x"), [0.25]]

    def run_jobs(jobs: list[list[str]], number: int) -> list[Any]:
        assert number == len(seen)
        seen.extend(map(" ".join, jobs))
        return values[number : len(seen)]

    for number, made in ((2, 2), (4, 2), (4, 1), (4, 0)):
        assert len(OptunaSweeper(**settings, n_trials=number).search(words, tmp_path, run_jobs)) == made
    assert len(set(seen)) == 5
    assert all(re.fullmatch(r"optimizer\.lr=[\d.e-]+ seed=[12] data\.size=[345] model=mlp", job) for job in seen)
    (best,) = trials_of(str(tmp_path))
    assert (best["trial"], best["values"]) == (2, [0.75])
    assert seen[2].startswith(f"optimizer.lr={best['params']['optimizer.lr']} ")
    sweeper = OptunaSweeper(**settings, n_trials=9)
    with pytest.raises(ConfigurationError, match="seed=3,4: "):
        sweeper.search(parse(["seed=3,4"]), tmp_path, run_jobs)
    (tmp_path / "study.log").write_text("torn")
    with pytest.raises(ConfigurationError, match=r"study\.log cannot be opened: "):
        sweeper.search(words, tmp_path, run_jobs)


@pytest.mark.slow
def test_a_search_for_two_objectives_in_which_a_trial_diverges(capsys: pytest.CaptureFixture[str]) -> None:
    """Others are made and shown, and it is not to be resumed."""
    pytest.importorskip("optuna", minversion="5")
    words = "hydra/sweeper=optuna hydra/sweeper/sampler=grid hydra.sweep.dir=both hydra.sweeper.n_jobs=1"
    objectives = "objective=[val/accuracy,privacy/epsilon] hydra.sweeper.direction=[maximize,minimize]"
    assert main(["train", "-m", *FEW, *words.split(), *objectives.split(), "optimizer.lr=0.1,1e18"]) == 1
    out, err = capsys.readouterr()
    assert "diverged" in err and err.count("error: ") == 1 and "| 0.1 | 1 |" in out
    assert "not finished" not in out
    (one,), (best,) = results("both"), trials_of("both")
    assert best["values"] == [one["metrics"][name] for name in ("val/accuracy", "privacy/epsilon")]
    assert best["params"] == {"optimizer.lr": "0.1"}
