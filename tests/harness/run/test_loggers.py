"""`logger=csv|tensorboard|mlflow|many|none`: the same names everywhere."""

from __future__ import annotations

import signal
import warnings
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from pytorch_lightning.loggers import CSVLogger

from dpbench.cli import main
from dpbench.errors import Interrupted
from dpbench.harness.run.logs import EvaluationRow, logger_state
from dpbench.harness.run.train import train
from dpbench.harness.runs.folder import RunFolder
from dpbench.harness.runs.metrics_log import best_validation
from tests.strategies.worlds import Classifier, loader_of, pictures, trainer_for
from tests.support.offline import SMALL, config_of, only
from tests.support.signalled import Signals

pytestmark = pytest.mark.usefixtures("here")
FEW = [*SMALL, "trainer.max_steps=6", "hydra.run.dir=run"]
MEASURED = {"val/accuracy", "test/accuracy", "nonprivate/train_loss", "privacy/epsilon"}
BESIDE = {"privacy/epsilon_rdp", "privacy/epsilon_pld", "optimizer/lr"}


def own_log() -> pd.DataFrame:
    return pd.read_csv("run/metrics.csv", index_col="step")


def test_csv_beside_the_runs_own_log() -> None:
    assert main(["train", *FEW, "logger=csv"]) == 0
    own, theirs = own_log(), pd.read_csv("run/csv/version_0/metrics.csv")
    assert set(own) == MEASURED and set(theirs) == MEASURED | BESIDE | {"epoch", "step"}
    for name in MEASURED:
        assert theirs.groupby("step")[name].last().dropna().to_dict() == own[name].dropna().to_dict()
    last = theirs[theirs["step"] == 6].max()
    assert last["privacy/epsilon_rdp"] == pytest.approx(last["privacy/epsilon"]) and last["optimizer/lr"] == 0.15
    assert 0 < last["privacy/epsilon_pld"] < last["privacy/epsilon_rdp"]
    assert Path("run/csv/version_0/hparams.yaml").is_file() and not Path("run/wandb").exists()


def test_none_writes_what_it_wrote() -> None:
    assert main(["train", *FEW, "logger=none"]) == 0
    assert set(own_log()) == MEASURED
    assert not [name for name in ("wandb", "csv", "tensorboard", "loggers.json") if Path("run", name).exists()]


@pytest.mark.slow
def test_a_resumed_run_keeps_what_loggers_have_written() -> None:
    with pytest.raises(Interrupted):
        train(config_of(*FEW[:-1], "logger=csv"), Path("run"), [Signals(signal.SIGTERM, 3)])
    before = Path("run/csv/version_0/metrics.csv").read_bytes()
    assert main(["resume", "run"]) == 0
    assert Path("run/csv/version_0/metrics.csv").read_bytes() == before
    assert pd.read_csv("run/csv/version_1/metrics.csv")["step"].max() == 6


def test_tensorboard() -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert main(["train", *FEW, "logger=tensorboard"]) == 0
    events = EventAccumulator("run/tensorboard").Reload()
    assert set(events.Tags()["scalars"]) == MEASURED | BESIDE | {"epoch"}
    own = own_log()
    for name in MEASURED:
        logged = {event.step: event.value for event in events.Scalars(name)}
        assert logged == pytest.approx(own[name].dropna().to_dict())


def test_many() -> None:
    pytest.importorskip("tensorboard")
    assert main(["train", *FEW, "logger=many"]) == 0
    logged = set(pd.read_csv("run/csv/version_0/metrics.csv")) - {"epoch", "step"}
    assert logged <= only("run").summary.keys() and list(Path("run/tensorboard").glob("events.*"))


@pytest.mark.filterwarnings("ignore")  # of MLflow
def test_mlflow(monkeypatch: pytest.MonkeyPatch) -> None:
    client_of = pytest.importorskip("mlflow").MlflowClient
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with pytest.raises(Interrupted):
        train(config_of(*FEW[:-1], "logger=mlflow"), Path("run"), [Signals(signal.SIGTERM, 3)])
    assert main(["resume", "run", "trainer.max_steps=8"]) == 0
    client = client_of("sqlite:///mlflow.db")
    (run,) = client.search_runs([client.get_experiment_by_name("dpbench").experiment_id])
    assert run.info.run_id == logger_state(RunFolder(Path("run")), "mlflow")["run_id"] and run.info.status == "FINISHED"
    assert run.data.tags["mlflow.runName"] == "digits-mlp-dpsgd seed=0" and run.data.params["optimizer/lr"] == "0.15"
    assert set(run.data.metrics) == MEASURED | BESIDE | {"epoch"}
    assert [point.step for point in client.get_metric_history(run.info.run_id, "privacy/epsilon")][-1] == 8


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("logger=csv logger.csv.nmae=x", "logger.csv.nmae"),
        ("logger=csv logger.csv.version=[1]", "logger.csv.version must be"),
        (
            "logger=csv logger.csv._target_=torch.nn.Linear",
            "logger.csv._target_=torch.nn.Linear must be",
        ),
        ("logger=csv +logger.csv.x={_target_:os.system}", "there is no key logger.csv.x"),
        ("logger=csv +logger.colour=red", "there is no key logger.colour. Known: checkpoint, entity, mode, notes"),
        ("logger=wandb +logger.enttiy=me", "there is no key logger.enttiy. Did you mean logger.entity?"),
        ("logger=wandb logger.entity=a/b", "logger.entity must be a name without any of"),
        ("logger=aim", "there is no logger=aim. Known: csv, many, mlflow, none, tensorboard, wandb."),
    ],
)
def test_bad_input(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *FEW, *words.split()]) in (1, 2)
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and message in err
    assert not Path("run").exists()


class Talking(Classifier):
    """Logs its training loss as people do, and a figure of its validation."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", 1.0, batch_size=1)
        self.log("nonprivate/loss", 1.0, batch_size=1)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("hits", 0.5, batch_size=1)


@pytest.mark.parametrize("private", [True, False])
def test_a_private_metric_without_the_mark_is_told_of_once(tmp_path: Path, private: bool) -> None:
    from dpbench.callback.non_private import NonPrivate
    from dpbench.strategies import DPSGD

    strategy = DPSGD(noise_multiplier=1.0, seed=0, ledger=str(tmp_path / "l.jsonl")) if private else NonPrivate()
    log = CSVLogger(tmp_path)
    row = EvaluationRow([log])
    options: dict[str, Any] = {"logger": log, "log_every_n_steps": 1, "val_check_interval": 2}
    trainer = trainer_for(tmp_path, strategy, 6, more=[row], **options)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        trainer.fit(Talking(), loader_of(pictures(40), 10), torch_loader())
    told = [str(one.message) for one in said if "no epsilon covers" in str(one.message)]
    assert [text.split()[2] for text in told] == (["loss"] if private else [])


def torch_loader() -> Any:
    from torch.utils.data import DataLoader

    return DataLoader(pictures(10), batch_size=10)


def test_best_validation(tmp_path: Path) -> None:
    log = tmp_path / "metrics.csv"
    log.write_text("step,val/accuracy,val/mse,val/real_rate,test/accuracy\n1,0.5,2,1,1\n2,0.9,3,1,1\n3,0.8,,1,1\n")
    assert best_validation(log) == {"val/accuracy": 0.9, "val/mse": 2.0}
    assert best_validation(tmp_path / "none.csv") == {}
