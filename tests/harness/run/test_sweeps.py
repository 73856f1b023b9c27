"""Sweeps from the first word to the last table: a grid, a list, one that fails in part, Optuna."""

from __future__ import annotations

import csv
import json
import re
import signal
import statistics
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser

from dpbench.cli import main
from dpbench.data import ImageDataModule
from dpbench.errors import ConfigurationError, DPBenchError, Interrupted
from dpbench.harness.reports.end_of_sweep import end_of_sweep
from dpbench.harness.run import build
from dpbench.harness.run.jobs import launch
from dpbench.harness.runs.folder import RunFolder
from dpbench.harness.runs.sweep import Sweep
from tests.support.cli import HANGS, start
from tests.support.offline import SMALL, only

pytestmark = pytest.mark.usefixtures("here")
FEW = [*SMALL, "trainer.max_steps=3", "logger=none"]
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


def contents(folder: str) -> dict[Path, bytes]:
    """All files but those of wandb, whose service writes when it likes."""
    found = [path for path in Path(folder).rglob("*") if path.is_file() and "wandb" not in path.parts]
    return {path: path.read_bytes() for path in found}


def test_a_grid_ends_with_its_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "-m", *FEW, "optimizer.lr=0.1,1", "seed=3,4", "hydra.sweep.dir=grid"]) == 0
    shown = capsys.readouterr().out
    text = Path("grid/table.md").read_text()
    assert text in shown and text.startswith(HEAD) and "The same table again: dpbench table grid --group-by" in text
    own = [one["metrics"]["test/accuracy"] * 100 for one in results("grid") if one["config"]["optimizer"]["lr"] == 1]
    assert f"| {statistics.mean(own):.2f} ± {statistics.stdev(own):.2f} |" in text
    with Path("grid/table.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["optimizer.lr"], row["n"]) for row in rows] == [("0.1", "2"), ("1.0", "2")]
    assert float(rows[1]["test accuracy (%)"]) == pytest.approx(statistics.mean(own))
    assert "differ in more" not in text and "missing" not in text
    assert not list(Path("grid").glob("wandb"))  # nobody asked for it
    assert main(["account", "grid", "--json", "--selection", "geometric", "--mean-trials", "4"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert f"what all of them cost together: epsilon {facts['epsilon']:.3f} (RDP) at delta=0.0001" in text
    assert main(["table", "grid", "--group-by", "optimizer.lr"]) == 0
    assert capsys.readouterr().out.startswith("\n".join(text.splitlines()[:4]))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["strategy=dpsgd,clip_only", "strategy.target_epsilon=3,null", "seed=0"],
            "strategy=clip_only strategy.target_epsilon=3: ClipOnly is not private and cannot meet a target_epsilon",
        ),
        (
            ["strategy=discretized,dpsgd", "strategy.priors=[0.1,0.8,0.1]"],
            "strategy=dpsgd: priors are used by error correction only: set correction_threshold, too.",
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


def test_the_shape_of_images_is_known_before_they_are_loaded() -> None:
    """And a network is made without weights."""
    for options in ({"name": "digits", "image_size": 16, "features": "scattering"}, {"name": "digits"}):
        data = ImageDataModule(**options)
        before = data.input_shape
        data.setup("fit")
        assert data.input_shape == before
    made = []
    original = build.module_for

    def counted(config: dict[str, Any], options: Any) -> Any:
        module = original(config, options)
        made.append({parameter.device.type for parameter in module.parameters()})
        return module

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dpbench.harness.run._job_check.module_for", counted)
        launch(["-m", "logger=none", "model=mlp,mnist_cnn"], lambda cfg: None)
    assert made == [{"meta"}, {"meta"}]


def test_an_option_that_no_choice_has_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"there is no key strategy\.max_grad_nrm"):
        launch(["-m", "strategy=dpsgd,none", "strategy.max_grad_nrm=0.3,1"], task=lambda cfg: None)


def test_runs_that_failed_are_named_and_the_others_shown(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["data.val_size=5000,100", "hydra.sweep.dir=sweep", "strategy=none"]
    few = [word for word in FEW if not word.startswith(("data.val_size", "strategy."))]
    assert main(["train", "-m", *few, *words]) == 1
    out, err = capsys.readouterr()
    assert "dpbench: error: data.val_size=5000 leaves nothing" in err and err.count("error: ") == 1
    assert "| 100 | 1 |" in out
    assert "Choosing" not in out and "| inf | inf |" in out  # without privacy


def test_explicit_settings_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    """Pairs of values that belong together: a file for each, in a folder of one's own."""
    careful = of_the_page("careful")
    Path("my/experiment/bold.yaml").write_text(careful.replace("2.0", "1.0").replace("0.2", "0.1"))
    assert main(["train", "-m", "--config-dir=my", *FEW, "experiment=careful,bold", "hydra.sweep.dir=list"]) == 0
    rows = capsys.readouterr().out.split("| experiment | n |")[1].splitlines()
    assert [row[:8] for row in rows[2:4]] == ["| bold |", "| carefu"]
    settings = [one["config"] for one in results("list")]
    assert [(own["strategy"]["noise_multiplier"], own["optimizer"]["lr"]) for own in settings] == [(2, 0.2), (1, 0.1)]


@pytest.mark.long
def test_a_second_sweep_into_a_folder_has_its_own_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert end_of_sweep(Sweep(Path())) is None
    assert main(["train", "-m", *FEW, "optimizer.lr=0.1", "run.name=a", "hydra.sweep.dir=both"]) == 0
    assert main(["train", "-m", *FEW, "optimizer.lr=0.2,0.3", "run.name=b", "hydra.sweep.dir=both"]) == 0
    second = Path("both/table.md").read_text()
    assert "| 0.2 | 1 |" in second and "| 0.3 | 1 |" in second and "| 0.1 |" not in second
    assert "Choosing one of these 3 runs" in second
    assert main(["train", "-m", *FEW, "optimizer.lr=0.1", "run.name=a", "hydra.sweep.dir=both"]) == 1
    assert "both/0-a holds a finished run: choose another folder (hydra.run.dir; of a sweep" in capsys.readouterr().err


def trials_of(folder: str) -> list[dict[str, Any]]:
    """The best trials of a search, those of the page with the learning rate and the bound."""
    best: list[dict[str, Any]] = yaml.safe_load((Path(folder) / "optimization_results.yaml").read_text())
    return best


def test_a_study_goes_on_with_the_trials_that_it_lacks(tmp_path: Path) -> None:
    """Failed trials are its own, and interrupted ones are not."""
    pytest.importorskip("optuna", minversion="5")
    from dpbench.harness.run._optuna import OptunaSweeper

    words = ["optimizer.lr=tag(log,interval(0.1,1))", "seed=1,2", "data.size=int(interval(3,5))", "model=mlp"]
    overrides = OverridesParser.create().parse_overrides(words)
    settings: dict[str, Any] = {"sampler": {"_target_": "optuna.samplers.RandomSampler", "seed": 0}}
    settings |= {"direction": "maximize", "n_jobs": 2, "study_name": "x"}
    seen: list[list[str]] = []
    first: list[int] = []
    values: list[Any] = [[0.5], DPBenchError("diverged"), [0.75], Interrupted(2, "dpbench resume x"), [0.25]]

    def run_jobs(jobs: list[list[str]], number: int) -> list[Any]:
        first.append(number)
        seen.extend(jobs)
        return [values[number + place] for place in range(len(jobs))]

    for number, made in ((2, 2), (4, 2), (4, 1), (4, 0)):
        outcomes = OptunaSweeper(**settings, n_trials=number).search(overrides, tmp_path, run_jobs)
        assert len(outcomes) == made
    assert first == [0, 2, 4] and len({job[0] for job in seen}) == 5
    assert all(
        re.fullmatch(r"optimizer\.lr=[\d.e-]+ seed=[12] data\.size=[345] model=mlp", " ".join(job)) for job in seen
    )
    (best,) = trials_of(str(tmp_path))
    assert (best["trial"], best["values"]) == (2, [0.75])
    assert seen[2][0] == f"optimizer.lr={best['params']['optimizer.lr']}"
    other = OverridesParser.create().parse_overrides(["seed=3,4"])
    with pytest.raises(ConfigurationError, match="seed=3,4: "):
        OptunaSweeper(**settings, n_trials=9).search(other, tmp_path, run_jobs)
    (tmp_path / "study.log").write_text("torn")
    with pytest.raises(ConfigurationError, match=r"study\.log cannot be opened: "):
        OptunaSweeper(**settings, n_trials=9).search(overrides, tmp_path, run_jobs)


@pytest.mark.slow
def test_optuna(capsys: pytest.CaptureFixture[str]) -> None:
    """Three trials on digits; the best is the one with the best validation, and nothing of them is mixed up."""
    pytest.importorskip("optuna", minversion="5")
    of_the_page("rates")
    few = [word for word in FEW if not word.startswith("logger")]
    words = ["experiment=rates", "objective=val/accuracy", "hydra.sweep.dir=trials"]
    sweep = ["train", "-m", "--config-dir=my", *few, *words, "hydra.sweeper.sampler.seed=1"]
    assert main([*sweep, "hydra.sweeper.n_trials=2"]) == 0
    assert main([*sweep, "hydra.sweeper.n_trials=3"]) == 0  # the study goes on
    shown = capsys.readouterr().out
    found = results("trials")
    chosen = [(one["config"]["optimizer"]["lr"], one["config"]["strategy"]["max_grad_norm"]) for one in found]
    measured = [one["metrics"]["val/accuracy"] for one in found]
    best = trials_of("trials")[0]
    assert len(set(chosen)) == 3 and best["values"] == [max(measured)]
    assert chosen[best["trial"]] == chosen[measured.index(max(measured))]
    assert best["params"]["optimizer.lr"] == chosen[best["trial"]][0]
    folders = sorted(Path("trials").glob("[0-9]*"))
    assert [path.name[:2] for path in folders] == ["0-", "1-", "2-"]
    ledgers = [(path / "ledger.jsonl").read_text() for path in folders]
    assert len(set(ledgers)) == 3 and all(text.count("\n") == 4 for text in ledgers)  # a header and three releases
    names = [only(str(path)).run.display_name for path in folders]
    assert names == [f"digits-mlp-dpsgd optimizer.lr={lr} strategy.max_grad_norm={norm} seed=0" for lr, norm in chosen]
    lines = Path("trials/table.md").read_text().splitlines()
    assert lines[0] == HEAD.replace("optimizer.lr |", "optimizer.lr | strategy.max_grad_norm |")
    assert [line[:2] for line in lines[1:6]] == ["| ", "| ", "| ", "| ", ""]  # three trials, and no more
    assert "Choosing one of these 3 runs" in shown and "(dpbench account trials)" in shown
    before = contents("trials")
    assert main([*sweep, "hydra.sweeper.n_trials=3"]) == 0  # there is nothing left to do
    after = contents("trials")
    study = Path("trials/study.log")
    assert after.pop(study).startswith(before.pop(study))  # Optuna has noted that it was opened
    assert after == before
    database = [f"hydra.sweeper.storage=sqlite:///{Path.cwd()}/study.db", "hydra.sweeper.study_name=rates"]
    assert main([*sweep, *database, "hydra.sweep.dir=more", "hydra.sweeper.n_trials=1"]) == 0
    assert "Trials of the study rates in other folders count too" in capsys.readouterr().out


@pytest.mark.slow
def test_a_search_for_two_objectives_in_which_a_trial_diverges(capsys: pytest.CaptureFixture[str]) -> None:
    """Others are made and shown, and it is not to be resumed."""
    pytest.importorskip("optuna", minversion="5")
    words = ["hydra/sweeper=optuna", "hydra/sweeper/sampler=grid", "hydra.sweep.dir=both", "hydra.sweeper.n_jobs=1"]
    objectives = ["objective=[val/accuracy,privacy/epsilon]", "hydra.sweeper.direction=[maximize,minimize]"]
    assert main(["train", "-m", *FEW, *words, *objectives, "optimizer.lr=0.1,1e18"]) == 1
    out, err = capsys.readouterr()
    assert "diverged" in err and err.count("error: ") == 1 and "| 0.1 | 1 |" in out
    assert "not finished" not in out
    (one,) = results("both")
    values = [one["metrics"][name] for name in ("val/accuracy", "privacy/epsilon")]
    assert trials_of("both") == [
        {"trial": trials_of("both")[0]["trial"], "values": values, "params": {"optimizer.lr": "0.1"}}
    ]


@pytest.mark.parametrize(
    "more",
    [
        pytest.param((), id="one process", marks=pytest.mark.long),
        pytest.param(("trainer=ddp_cpu",), id="two processes", marks=pytest.mark.long),
    ],
)
def test_workers_of_joblib_save_and_end_with_their_parent(more: tuple[str, ...]) -> None:
    """They would train on, and begin the jobs that wait."""
    words = [*FEW, *more, "trainer.max_steps=1000000", "run.checkpoint_every_n_steps=5", "run.name=x", "seed=0,1,2"]
    process = start(Path.cwd(), "train", "-m", "launcher=joblib", "hydra.sweep.dir=sweep", *words)
    runs = [RunFolder(Path("sweep") / name) for name in ("0-x-seed_0", "1-x-seed_1")]
    while not all(run.checkpoint.exists() for run in runs):
        assert process.poll() is None, process.communicate()
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=HANGS)  # returns when all that have its standard error have ended
    assert process.returncode == -signal.SIGTERM, err
    assert all(run.partial_result.is_file() for run in runs), err
    assert not list(Path("sweep").glob("2-x*"))
