"""`dpbench tune` on the digits, from its command to what it publishes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import TensorDataset

from dpbench.capabilities.tune import planning, tuning
from dpbench.capabilities.tune.score import sum_of_scores
from dpbench.capabilities.tune.space import read_space
from dpbench.capabilities.tune.stated import BestOfTrials, Releases
from dpbench.capabilities.tune.trials import Trial, draw_trials
from dpbench.cli import main
from dpbench.data import ImageDataModule, PrivateDataLoader, UserDataModule
from dpbench.errors import ConfigurationError, Interrupted
from dpbench.harness.run import build
from dpbench.harness.run.train import train
from dpbench.harness.runs.folder import RunFolder
from dpbench.privacy.accounting.composition import Selection
from dpbench.privacy.accounting.ledger import read_ledger
from dpbench.privacy.sampling import FullParticipation
from tests.support.cli import TINY, dpbench

WORDS = [*TINY, "data.split=hash", "data.val_size=200", "trainer.max_steps=3", "optimizer.lr=0.001,0.5"]
WORDS += ["data.expected_batch_size=32,64", "--epsilon", "2", "--trials", "3", "--accountant", "rdp"]


NOT_SHARED = planning.LoadedData({}, ImageDataModule("digits"))
HELD_OUT = ["optimizer.lr=1,2", "data.split=hash", "data.val_size=9"]


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("tuned")

    def three_trials(space: Any, selection: Selection) -> Any:
        while len(trials := draw_trials(space, selection, np.random.default_rng(1))) < 2:
            pass
        return trials

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuning, "draw_trials", three_trials)
        out, err = dpbench(folder, "tune", *[word for word in WORDS if word != "logger=none"])
    return folder, out + err


def test_the_best_comes_out_as_a_run(tuned: tuple[Path, str]) -> None:
    folder, said = tuned
    record = json.loads((folder / "tuned/result.json").read_text())
    facts = json.loads((folder / "tuned/tuning.json").read_text())
    assert facts["chosen"][0] in ("optimizer.lr=0.001", "optimizer.lr=0.5") and "Whoever looks at all of them" in said
    assert set(record["metrics"]) == {"test/accuracy", "private/accuracy"}
    assert record["privacy"]["epsilon"]["rdp"] == pytest.approx(2.0, abs=0.01) and record["privacy"]["releases"] == 1
    out, _ = dpbench(folder, "account", "tuned")
    assert "best_of_trials" in out and "ledger intact              yes" in out
    dpbench(folder, "export", "tuned", "--out", "model")
    assert "It includes choosing among settings" in (folder / "model/README.md").read_text()


def test_nothing_tells_of_the_others(tuned: tuple[Path, str]) -> None:
    folder, said = tuned
    places = sorted((folder / "tuned").rglob("*"))
    names = [str(place.relative_to(folder / "tuned")) for place in places]
    assert names == [
        ".lock",
        "checkpoints",
        "checkpoints/last.ckpt",
        "config.yaml",
        "ledger.jsonl",
        "result.json",
        "tuning.json",
    ]
    assert len({place.stat().st_mtime for place in [*places, folder / "tuned"]}) == 1
    record = json.loads((folder / "tuned/result.json").read_text())
    assert record["seconds"] == record["seconds_total"] == 0.0
    text = said + "".join(place.read_text() for place in places if place.suffix in (".json", ".yaml", ".jsonl"))
    for word in (".trials", "val/", "nonprivate/", "trial 1", "1/3"):
        assert word not in text
    checkpoint = torch.load(folder / "tuned/checkpoints/last.ckpt", weights_only=True)
    assert "optimizer_states" not in checkpoint and list(checkpoint["callbacks"]) == ["dpbench.PrivateStrategy"]


def test_a_tuning_that_is_over_is_not_repeated(tuned: tuple[Path, str]) -> None:
    folder, _ = tuned
    _, err = dpbench(folder, "tune", *[word for word in WORDS if word != "logger=none"], status=1)
    assert "holds the result of a tuning" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["optimizer.lr=0.1"], "nothing is tuned"),
        (["optimizer.lr=1,2", "seed=3"], "seed=3: dpbench tune sets this itself"),
        (["optimizer.lr=1,2", "strategy.noise_multiplier=1"], "dpbench tune sets this itself"),
        (["model.hidden=interval(1,5)"], "an interval is possible where cost does not depend"),
        (["optimizer.lr=1,2", "data.split=permutation", "data.val_size=9"], "held out by a hash"),
        (
            ["optimizer.lr=1,2", "data.split=hash", "data.val_size=9", "--score", "speed"],
            "no metric 'speed' of a record",
        ),
        (["optimizer.lr=1,2", "data.split=hash", "data.val_size=9", "--score", "loss"], "--score-bound 5"),
        (
            ["optimizer.lr=1,2", "data.split=hash", "data.val_size=9", "data.sampling=fixed_size"],
            "set data.sampling=po",
        ),
        ([*HELD_OUT, "strategy=dpsgd,none"], "there is no key strategy.noise_multiplier"),
        ([*HELD_OUT, "strategy=clip_only"], "a setting trains without privacy"),
        ([*HELD_OUT, "strategy=noise_only"], "a setting trains without privacy"),
        ([*HELD_OUT, "diagnostics.training_records=10"], "diagnostics.training_records=10: dpbench tune sets"),
        (
            [*HELD_OUT, "data.sampling=cyclic_poisson", "strategy.noise=banded", "strategy.bands=2"],
            "set data.sampling=poisson",
        ),
        ([*HELD_OUT, "data.train_size=500,600"], "data.train_size=500,600: all trials have the same records"),
        ([*HELD_OUT, "trainer.devices=2"], "set trainer.devices=1"),
        (["optimizer.lr=1,2", "--selection", "best"], "--selection must be"),
        (["optimizer.lr=1,2", "--epsilon", "0"], "--epsilon must be a positive number"),
        (["optimizer.lr=1,2", "--trials", "0.5"], "at least 1"),
    ],
)
def test_refusals(tmp_path: Path, words: list[str], message: str) -> None:
    small = [word for word in TINY if word != "logger=none"]
    _, err = dpbench(tmp_path, "tune", *small, "trainer.max_steps=2", *words, status=1)
    assert message in err
    assert not (tmp_path / "tuned/ledger.jsonl").exists()


# ------------------------------------------------------------------------------------- score


class Forgetful(pl.LightningModule):
    """A module whose step keeps what it saw, fails on one record and is not finite on another."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.record_metrics = {"accuracy": 1}
        self.seen: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        (x,) = batch
        assert len(x) == 1
        self.seen.append(float(x[0, 0]))
        if x[0, 0] == 1:
            raise RuntimeError("a record that nobody expected")
        value = torch.full((1,), torch.nan) if x[0, 0] == 2 else x[:, 0] * sum(self.seen) * 100
        return {"loss": x.sum() - 1e9, "record_metrics": {"accuracy": lambda: value}}


class HeldOut:
    """Held-out records."""

    def __init__(self, rows: torch.Tensor) -> None:
        self.rows = TensorDataset(rows)

    held_out_batches = ImageDataModule.held_out_batches
    _batch_of = ImageDataModule._batch_of
    _held_out_record_of_row = ImageDataModule._held_out_record_of_row
    _collate_fn = None

    @property
    def val_set(self) -> TensorDataset:
        return self.rows


@pytest.mark.parametrize(("name", "bound"), [("accuracy", None), ("loss", 2.0)])
def test_a_record_moves_the_score_by_one_at_most(name: str, bound: float | None) -> None:
    rows = torch.tensor([[1.0, 0.0], [2.0, 0.0], [-5.0, 1.0], [5.0, 1.0], [0.001, 0.0], [7.0, 7.0]])
    module = Forgetful()
    whole = sum_of_scores(module, HeldOut(rows), name, bound)  # type: ignore[arg-type]
    for left_out in range(len(rows)):
        rest = torch.cat([rows[:left_out], rows[left_out + 1 :]])
        score = sum_of_scores(module, HeldOut(rest), name, bound)  # type: ignore[arg-type]
        assert 0 <= whole - score <= 1
    assert module.seen == []


def test_a_user_is_one_record_of_the_score() -> None:
    data = UserDataModule("digits_users", val_users=10, options={"users": 40})
    data.setup()
    batches = [batch_of() for batch_of in data.held_out_batches()]
    held_out = data._held_out_users
    assert held_out is not None and sorted(len(batch[1]) for batch in batches) == sorted(
        size for size in held_out.sizes if size
    )


def test_help_names_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["tune", "--help"])
    assert "within one" in capsys.readouterr().out


# ------------------------------------------------------------------------------------- refusals of parts


def test_a_space_that_cannot_be_drawn_from() -> None:
    many = [f"model.a{number}={','.join(map(str, range(15)))}" for number in range(2)]
    for words, message in {
        ("optimizer.lr=1,2", "optimizer.lr=3,4"): "optimizer.lr is given twice",
        ("optimizer.lr=interval(2,1)",): "no interval of numbers",
        ("optimizer.lr=range(0,0)",): "has no value",
        ("optimizer.lr=1,,2",): "optimizer.lr=1,,2",
    }.items():
        with pytest.raises(ConfigurationError, match=message):
            read_space(words)
    with pytest.raises(ConfigurationError, match="225 combinations that may differ in cost"):
        read_space(many).plans()


def test_noise_that_does_not_suffice() -> None:
    plan = planning.Planned((), (Releases(FullParticipation(10), 1.0, 10**9),))
    with pytest.raises(ConfigurationError, match="lower --trials or raise --epsilon"):
        planning.calibrated(planning.Request((), 1e-3, 1e-5, "rdp", 10.0, 1.0, "accuracy", None, True), [plan])


def test_a_trial_that_is_not_as_stated(tmp_path: Path) -> None:
    """Its releases are compared before its first batch, and none is made."""
    space = read_space([*TINY[:3], "optimizer.lr=1,2", "trainer.max_steps=2", "strategy=dpsgd"])
    (plan,) = planning.planned(space, 1e-4, NOT_SHARED)
    noisier = plan.at(3.0)
    config = planning.compose([*space.words, "optimizer.lr=1", "strategy.noise_multiplier=2.0"])
    with pytest.raises(ConfigurationError, match="not those that the ledger states"):
        train(config, tmp_path / "trial", [planning.PlanReader(noisier)], show=False)
    ledger = tmp_path / "trial/ledger.jsonl"
    assert not ledger.exists() or len(read_ledger(ledger).releases) == 0
    train(config, tmp_path / "as stated", [planning.PlanReader(plan.at(2.0))], show=False)


def test_own_code_and_a_loss(tmp_path: Path) -> None:
    """From a folder of configuration; what comes out is a loss again, although the score falls with it."""
    (tmp_path / "conf/module").mkdir(parents=True)
    (tmp_path / "conf/module/own.yaml").write_text(
        "# @package _global_\nmodule:\n  _target_: own_code_of_a_tuning.Own\n"
    )
    (tmp_path / "own_code_of_a_tuning.py").write_text(
        "from dpbench.modules import ImageClassifier\n\n\nclass Own(ImageClassifier):\n    pass\n"
    )
    words = [*WORDS, "module=own", "--config-dir", "conf", "--score", "loss", "--score-bound", "5"]
    out, _ = dpbench(tmp_path, "tune", *[word for word in words if word != "logger=none"])
    facts = json.loads((tmp_path / "tuned/tuning.json").read_text())
    if facts["chosen"] is None:  # Poisson may draw no trial
        assert "No trial came out" in out
        return
    assert "(1 - loss/5, with noise)" in out
    record = json.loads((tmp_path / "tuned/result.json").read_text())
    assert record["metrics"]["private/loss"] == pytest.approx(5 * (1 - facts["score"]))


def test_a_refused_command_leaves_no_folder(tmp_path: Path) -> None:
    dpbench(tmp_path, "tune", *TINY[:3], "optimizer.lr=1,2", "--out", "none", status=1)
    assert not (tmp_path / "none").exists()


def test_data_are_loaded_once() -> None:
    """For trials that differ in their batches; with other records, or a user's own batches, each loads its own."""
    words = [*TINY[:3], "strategy=dpsgd", "strategy.noise_multiplier=1.0", "trainer.max_steps=2", "optimizer.lr=1"]
    config, larger, fewer = (
        planning.compose([*words, word])
        for word in ("data.expected_batch_size=32", "data.expected_batch_size=64", "data.train_size=500")
    )
    strategy = build.build_strategy(config, RunFolder(Path("unused")))
    module = build.build_data(config, strategy)
    assert isinstance(module, ImageDataModule)
    loaded = planning.LoadedData(config["data"], module)
    assert loaded.of(fewer) is None and loaded.of(larger) is module
    shared = build.build_data(larger, strategy, loaded.of(larger))
    assert isinstance(shared, ImageDataModule) and shared.train_set is module.train_set
    assert (shared.sampling.sample_rate, module.sampling.sample_rate) == (64 / 1437, 32 / 1437)

    class OwnBatches(ImageDataModule):
        def train_dataloader(self) -> PrivateDataLoader:
            return super().train_dataloader()

    assert planning.LoadedData(config["data"], OwnBatches("digits")).of(larger) is None


def test_an_interrupted_tuning_names_its_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: Any) -> Any:
        raise Interrupted(2, "dpbench resume tuned/.trials/0123")

    monkeypatch.setattr(tuning, "best_trial", interrupted)
    _, err = dpbench(tmp_path, "tune", *[word for word in WORDS if word != "logger=none"], status=130)
    assert "continue with: the same command" in err and "0123" not in err


def test_a_trial_that_was_killed_goes_on(tmp_path: Path) -> None:
    """With its checkpoint, or anew without one; a divergence is the lowest score."""
    space = read_space([*TINY[:3], "optimizer.lr=1,2", "trainer.max_steps=4", *HELD_OUT[1:], "strategy=dpsgd"])
    (plan,) = planning.planned(space, 1e-4, NOT_SHARED)
    best = BestOfTrials(plan.releases[0].sampling.population, 2.0, None, (plan.at(2.0),), "accuracy", 1.0)
    request = planning.Request((), 1.0, 1e-4, "rdp", 2.0, None, "accuracy", None, False)

    class Killed(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *arguments: Any) -> None:
            if trainer.global_step == 2:
                raise KeyboardInterrupt

    config = planning.compose([*space.words, "optimizer.lr=1", "strategy.noise_multiplier=2.0", "strategy.delta=1e-4"])
    for number, every in enumerate((500, 1)):
        place = tmp_path / f"{number}"
        config["run"]["checkpoint_every_n_steps"] = every
        with pytest.raises((KeyboardInterrupt, Interrupted, SystemExit)):
            train(config, place, [Killed()], show=False)
        assert not (place / "result.json").exists()
        score = tuning._run(request, space, NOT_SHARED, Trial(("optimizer.lr=1",), 5), best, place)
        assert score is not None and 0 <= score <= 30
        assert len(read_ledger(place / "ledger.jsonl").releases) >= 4
    nowhere = Trial(("optimizer.lr=1e30",), 6)
    assert tuning._run(request, space, NOT_SHARED, nowhere, best, tmp_path / "diverged") is None
