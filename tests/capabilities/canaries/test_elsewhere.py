"""Canaries beside what other rooms do with records, parameters and lots."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch

from dpbench import DPSGD
from dpbench.callback.lightning_training import LightningTraining
from dpbench.capabilities.canaries.canaries import GradientCanaries
from dpbench.errors import ConfigurationError, OutOfMemory
from dpbench.harness.run.saved_config import read_config
from dpbench.harness.run.train import train
from dpbench.harness.runs.folder import RunFolder
from dpbench.records import examples
from tests.callback.test_loop import assert_alike
from tests.records.conftest import one_key  # noqa: F401 (a fixture)
from tests.records.test_folded_rows import Flat
from tests.records.test_one_by_one import assert_releases_of_the_engine
from tests.session import test_physical_batch as physical_batch
from tests.session import test_trainable as trainable
from tests.session.test_two_stages import first_stage, ledger_in
from tests.support.one_by_one import fit as fit_folded
from tests.support.processes import config_of

AUDIT = GradientCanaries(20, seed=2)


@pytest.mark.usefixtures("one_key")
def test_the_releases_of_the_engine(tmp_path: Path) -> None:
    assert_releases_of_the_engine(tmp_path, DPSGD, {"audit": AUDIT})


@pytest.mark.usefixtures("one_key")
def test_folded_rows(tmp_path: Path) -> None:
    weights = []
    for gradients in ("engine", "one_by_one"):
        torch.manual_seed(1)
        weights.append(fit_folded(tmp_path / gradients, Flat(), gradients=gradients, audit=AUDIT)[1])
    assert float((weights[0] - weights[1]).norm() / weights[0].norm()) < 2e-3


def test_a_plain_loop_is_the_callback(tmp_path: Path) -> None:
    assert_alike(partial(DPSGD, noise_multiplier=1.1, audit=AUDIT), tmp_path)


def test_what_was_seen_does_not_begin_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examples, "_RAISES_WHEN_FULL", ("cuda", "cpu"))
    physical_batch.full_in_forward(monkeypatch, lambda rows: rows > physical_batch.FITS)
    strategy = physical_batch.dpsgd(tmp_path, "auto", audit=AUDIT)
    with pytest.raises(OutOfMemory, match=r"cannot be restarted.*an audit.* set max_physical_batch_size to a number"):
        physical_batch.fit(strategy, tmp_path)


def test_parameters_that_change_on_the_way_are_refused(tmp_path: Path) -> None:
    change = trainable.At(3, trainable.unfreeze)
    with pytest.raises(ConfigurationError, match="an audit needs the same ones in each step"):
        trainable.fit(tmp_path, change, audit=GradientCanaries(20))
    assert len(trainable.book(tmp_path).releases) == 3


def test_a_second_stage_is_refused(tmp_path: Path) -> None:
    first_stage(tmp_path)
    with pytest.raises(ConfigurationError, match="cannot cover the earlier training"):
        DPSGD(noise_multiplier=1.0, after=ledger_in(tmp_path / "first"), audit=AUDIT)


def test_a_run_whose_audit_was_read_is_not_made_longer(tmp_path: Path) -> None:
    words = ["audit=gradient_canaries", "audit.canaries=20"]
    train(config_of(*words, "trainer.max_steps=3"), tmp_path / "run")
    with pytest.raises(ConfigurationError, match="was audited at its end: .* Train a new run of that many steps"):
        train(config_of(*words, "run.resume=true"), tmp_path / "run")


@pytest.mark.filterwarnings("ignore:You defined a `validation_step`")
def test_a_training_that_is_audited_is_carried_out_eagerly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = pytest.importorskip("tests.session.test_graphs")
    lines: list[str] = []
    monkeypatch.setattr(LightningTraining, "inform", lambda self, text: lines.append(text))
    recorder = graphs.Recorder()
    graphs.fit(tmp_path, monkeypatch, recorder, DPSGD, audit=AUDIT)
    assert recorder.repeats == 0 and any("looked at one by one" in line for line in lines)


def test_a_run_that_names_an_earlier_place_goes_on(tmp_path: Path) -> None:
    run, now = RunFolder(tmp_path), "capabilities.canaries.canaries"
    config = config_of("audit=gradient_canaries", "audit.canaries=20")
    for earlier in ("privacy.canaries.canaries", "privacy.auditing.canaries"):
        run.config.write_text(json.dumps(config).replace(now, earlier))
        assert read_config(run)["audit"] == config["audit"]
