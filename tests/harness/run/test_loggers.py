"""`logger=csv|tensorboard|mlflow|many|none`: the same names everywhere."""

from __future__ import annotations

import signal
import warnings
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from pytorch_lightning.loggers import CSVLogger
from torch.utils.data import DataLoader

from dpbench.callback.non_private import NonPrivate
from dpbench.cli import main
from dpbench.errors import Interrupted
from dpbench.harness.run.logs import EvaluationRow, logger_state
from dpbench.harness.run.train import train
from dpbench.harness.runs.folder import RunFolder
from dpbench.strategies import DPSGD
from tests.strategies.worlds import Classifier, loader_of, pictures, trainer_for
from tests.support.offline import SMALL, config_of, only
from tests.support.signalled import Signals

pytestmark = pytest.mark.usefixtures("here")
FEW = [*SMALL, "trainer.max_steps=6", "hydra.run.dir=run"]
MEASURED = {"val/accuracy", "test/accuracy", "nonprivate/train_loss", "privacy/epsilon"}
BESIDE = {"privacy/epsilon_rdp", "privacy/epsilon_pld", "optimizer/lr"}


def test_many_loggers_say_what_the_runs_own_log_says() -> None:
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    assert main(["train", *FEW, "logger=many"]) == 0
    own, theirs = pd.read_csv("run/metrics.csv", index_col="step"), pd.read_csv("run/csv/version_0/metrics.csv")
    assert set(own) == MEASURED and set(theirs) == MEASURED | BESIDE | {"epoch", "step"}
    assert set(theirs) - {"epoch", "step"} <= only("run").summary.keys()
    events = event_accumulator.EventAccumulator("run/tensorboard").Reload()
    assert set(events.Tags()["scalars"]) == MEASURED | BESIDE | {"epoch"}
    for name in MEASURED:
        expected = own[name].dropna().to_dict()
        assert theirs.groupby("step")[name].last().dropna().to_dict() == expected
        assert {event.step: event.value for event in events.Scalars(name)} == pytest.approx(expected)
    last = theirs[theirs["step"] == 6].max()
    assert last["privacy/epsilon_rdp"] == pytest.approx(last["privacy/epsilon"]) and last["optimizer/lr"] == 0.15
    assert 0 < last["privacy/epsilon_pld"] < last["privacy/epsilon_rdp"]


@pytest.mark.filterwarnings("ignore")  # of MLflow
def test_mlflow(monkeypatch: pytest.MonkeyPatch) -> None:
    client_of = pytest.importorskip("mlflow").MlflowClient
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with pytest.raises(Interrupted):
        train(config_of(*FEW[:-1], "logger=mlflow"), Path("run"), [Signals(signal.SIGTERM, 3)])
    assert main(["resume", "run"]) == 0
    client = client_of("sqlite:///mlflow.db")
    (run,) = client.search_runs([client.get_experiment_by_name("dpbench").experiment_id])
    assert run.info.run_id == logger_state(RunFolder(Path("run")), "mlflow")["run_id"] and run.info.status == "FINISHED"
    assert run.data.tags["mlflow.runName"] == "digits-mlp-dpsgd seed=0" and run.data.params["optimizer/lr"] == "0.15"
    assert set(run.data.metrics) == MEASURED | BESIDE | {"epoch"}


class Talking(Classifier):
    """Logs its training loss as people do, and a figure of its validation."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        for name in ("loss", "nonprivate/loss"):
            self.log(name, 1.0, batch_size=1)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("hits", 0.5, batch_size=1)


@pytest.mark.parametrize("private", [True, False])
def test_a_private_metric_without_the_mark_is_told_of_once(tmp_path: Path, private: bool) -> None:
    strategy = DPSGD(noise_multiplier=1.0, seed=0, ledger=str(tmp_path / "l.jsonl")) if private else NonPrivate()
    log = CSVLogger(tmp_path)
    options: dict[str, Any] = {"logger": log, "log_every_n_steps": 1, "val_check_interval": 2}
    trainer = trainer_for(tmp_path, strategy, 6, more=[EvaluationRow([log])], **options)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        trainer.fit(Talking(), loader_of(pictures(40), 10), DataLoader(pictures(10), batch_size=10))
    told = [str(one.message) for one in said if "no epsilon covers" in str(one.message)]
    assert [text.split()[2] for text in told] == (["loss"] if private else [])
