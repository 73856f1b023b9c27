"""Canaries in a training with correlated noise: the mechanism that is audited is the one that the ledger states."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dpbench import DPSGD
from dpbench.capabilities.auditing.audit import AuditResult, Verdict, audit
from dpbench.capabilities.auditing.declared import statistics_noise
from dpbench.capabilities.canaries.canaries import GradientCanaries
from dpbench.cli import main
from dpbench.errors import ConfigurationError
from dpbench.privacy.accounting.ledger import read_ledger
from dpbench.privacy.mechanism.noise_process import Gaussian, Noise
from tests.capabilities.canaries.test_training import file_of, scores_of, train
from tools.audits.mutants import BANDED_MUTANTS, MUTANTS

STEPS = 41
banded = partial(train, DPSGD, sampling="cyclic_poisson", noise="banded", bands=3, noise_multiplier=0.8)
cohorts = partial(train, DPSGD, sampling="min_separation", unit="user", steps=14, noise_multiplier=2.0)


def audited(folder: Path) -> AuditResult:
    return audit(read_ledger(folder / "ledger.jsonl"), scores_of(folder))


def test_a_right_run_is_consistent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    banded(tmp_path, steps=STEPS, seed=2, metrics={"accuracy": 1.0})
    result = audited(tmp_path)
    assert result.verdict == Verdict.CONSISTENT, result.accused_by
    assert result.sound is not None and result.rounds is not None
    (game,) = (bound.epsilon for bound in result.bounds if bound.name == "release game")
    assert game is not None and 0.4 * result.sound < game < result.sound
    assert (result.releases, result.rounds.complete, result.rounds.length) == (STEPS, 13, 3)
    assert result.measured_mu == pytest.approx(result.declared_mu, rel=0.3)
    statistics = statistics_noise(scores_of(tmp_path).probes)
    assert statistics is not None and statistics.p_value > 0.01  # whitened, too
    assert main(["audit", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "a canary is scored once in 3 steps; complete rounds: 13; releases are whitened" in text
    assert "sizes of groups" in text


@pytest.mark.parametrize(
    ("name", "finder"),
    [
        ("independent noise as banded", "noise over declared"),
        ("Poisson lots in banded noise", "rate"),
        ("groups by the order of the data", "sizes of groups"),
    ],
)
def test_broken_runs_are_found(name: str, finder: str, tmp_path: Path) -> None:
    """All of these, by audits of the usual size: tests/tools/test_audits.py."""
    with BANDED_MUTANTS[name]():
        banded(tmp_path, steps=STEPS)
        assert finder in audited(tmp_path).accused_by


@pytest.mark.own_key
def test_a_resumed_run_sees_the_same(tmp_path: Path) -> None:
    banded(tmp_path / "whole", steps=14, fingerprint="f")
    _, trainer = banded(tmp_path / "parts", steps=7, fingerprint="f")
    trainer.save_checkpoint(tmp_path / "seven.ckpt")
    banded(tmp_path / "parts", steps=14, fingerprint="f", checkpoint=tmp_path / "seven.ckpt")
    assert file_of(tmp_path / "whole") == file_of(tmp_path / "parts")
    assert file_of(tmp_path / "whole")["schema"] == 4


def test_too_short_a_run_is_refused(tmp_path: Path) -> None:
    banded(tmp_path, steps=4)
    with pytest.raises(ConfigurationError, match="once in 3 releases, the first time after 5, and the run made 4"):
        audited(tmp_path)


class Own(Gaussian):
    @property
    def independent(self) -> bool:
        return False


class OwnNoise(DPSGD):
    def noise_process(self, noise_multiplier: float, factors: Any) -> Noise:
        return Own(noise_multiplier)


def test_other_correlated_noise_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="without stating how, so its cost is unknown"):
        train(OwnNoise, tmp_path)


@pytest.mark.parametrize(
    ("noise", "mutant"),
    [({"noise": "banded", "bands": 3}, None), ({}, "half of the noise")],
)
def test_lots_that_take_turns(noise: Any, mutant: str | None, tmp_path: Path) -> None:
    """Without amplification; independent noise too."""
    with MUTANTS[mutant]() if mutant else nullcontext():
        cohorts(tmp_path, **noise)
    result = audited(tmp_path)
    assert result.rounds is not None and result.rounds.length > 1
    assert ("noise over declared" in result.accused_by) if mutant else result.verdict == Verdict.CONSISTENT


def test_one_band_is_audited_as_ever(tmp_path: Path) -> None:
    banded(tmp_path, bands=1, steps=3, audit=GradientCanaries(50, seed=1))
    assert scores_of(tmp_path).rounds is None
