"""Canaries in a training: what the audit sees is what the plan declares, under every strategy, unit and sampling."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from dpbench import strategies
from dpbench.capabilities.auditing.declared import lot_sizes, statistics_noise
from dpbench.capabilities.canaries.canaries import Canaries, GradientCanaries
from dpbench.capabilities.canaries.probes import Probes
from dpbench.capabilities.canaries.scores import Scores, ScoreSums
from dpbench.cli import main
from dpbench.data import ImageDataModule, UserDataModule
from dpbench.errors import ConfigurationError
from dpbench.models import MLP
from dpbench.modules.image_classifier import ImageClassifier
from dpbench.privacy.accounting.ledger import read_ledger
from dpbench.privacy.accounting.seal import seal_of
from dpbench.privacy.sampling import TruncatedPoissonSampling
from dpbench.records import LocalTraining, Users
from tests.strategies.worlds import trainer_for
from tools.audits.mutants import _scaled
from tools.combinations import STRATEGIES

Seen = list[tuple[NDArray[np.float64], NDArray[np.bool_], float, float]]
CANARIES, STEPS = 200, 12
PRIVATE = [name for name in STRATEGIES if "reference" not in name and "layer" not in name]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """What is handed to the sums of scores, release by release."""
    rows: Seen = []
    add = ScoreSums.add

    def recorded(self: ScoreSums, *facts: Any) -> None:
        rows.append(facts)  # type: ignore[arg-type]
        add(self, *facts)

    monkeypatch.setattr(ScoreSums, "add", recorded)
    return rows


def data_of(sampling: str, unit: str) -> ImageDataModule | UserDataModule:
    """Small: with `full` sampling all of 40 users are in each lot, the canaries too."""
    full = sampling == "full"
    options: Any = {"sampling": sampling, "split": "permutation"}
    if unit == "user":
        return UserDataModule("digits_users", expected_batch_size=40 if full else 20, val_users=60 * full, **options)
    return ImageDataModule("digits", expected_batch_size=64, image_size=8, **options)


def train(
    make: Callable[..., strategies.PrivateStrategy],
    folder: Path,
    sampling: str = "poisson",
    unit: str = "example",
    steps: int = STEPS,
    hidden: int = 32,
    checkpoint: Path | None = None,
    devices: int = 1,
    **options: Any,
) -> tuple[strategies.PrivateStrategy, Any]:
    data = data_of(sampling, unit)
    facts = data.model_options()
    options = {
        "noise_multiplier": 0.5,
        "delta": 1e-4,
        "seed": 0,
        "ledger": str(folder / "ledger.jsonl"),
        "audit": GradientCanaries(40 if unit == "user" else CANARIES, seed=1),
        **options,
    }
    if unit == "user":
        options["records"] = Users(LocalTraining(lr=0.05, batch_size=10))
    if unit == "microbatch":
        options["microbatch_size"] = 4
    strategy = make(**options)
    torch.manual_seed(0)
    module = ImageClassifier(MLP(**facts, hidden=[hidden]), partial(torch.optim.SGD, lr=0.05), facts["num_classes"])
    processes = "auto" if devices == 1 else "ddp_fork"
    trainer = trainer_for(folder, strategy, steps, devices=devices, strategy=processes, limit_val_batches=0)
    trainer.fit(module, data, ckpt_path=checkpoint, weights_only=False)
    return strategy, trainer


def file_of(folder: Path) -> Any:
    return json.loads((folder / "audit.json").read_text())


def scores_of(folder: Path) -> Scores:
    return Scores.model_validate(file_of(folder)["scores"])


def is_right(probes: Probes) -> bool:
    tests = lot_sizes(probes), statistics_noise(probes)
    exact = (probes.largest, probes.difference, probes.surplus) == (1.0, 0.0, 0)
    return exact and all(test is None or test.p_value > 1e-3 for test in tests)


def observations(seen: Seen) -> tuple[NDArray[Any], NDArray[np.bool_], NDArray[Any]]:
    """Observations and who was drawn, (releases, m), and noise multipliers, (releases, 1)."""
    x, drawn, z, _ = zip(*seen, strict=True)
    return np.array(x), np.array(drawn), np.array(z)[:, None]


def check(seen: Seen, strategy: strategies.PrivateStrategy) -> float:
    """Observations are the declared moves with the declared noise; returns its mean multiplier.

    With 2/3 or 3/2 of the noise, or of the moves, it fails.
    """
    canaries = strategy._releases.hook
    assert isinstance(canaries, Canaries)
    member, facts = canaries.member, canaries.sums.seen
    x, drawn, z = observations(seen)
    moves = np.where(member, 0.5, -0.5) if facts.replace_one else facts.reach
    residuals = (x - drawn * moves) / z
    assert drawn.any() and (facts.replace_one or not drawn[:, ~member].any())
    for part in (residuals[drawn], residuals[~drawn]):
        assert abs(part.sum()) < 4.5 * np.sqrt(part.size)
    assert abs(residuals.std() - 1) < 4.5 / np.sqrt(2 * residuals.size) < 0.3
    return float(z.mean())


@pytest.mark.parametrize("name", PRIVATE)
def test_every_strategy_is_as_declared(name: str, seen: Seen, tmp_path: Path) -> None:
    strategy, _ = train(STRATEGIES[name], tmp_path)
    assert len(seen) == STEPS
    z = check(seen, strategy)
    assert z >= 0.5 - 1e-6  # statistics beside the gradients, and groups without room, leave the rest more noise
    probes = scores_of(tmp_path).probes
    assert is_right(probes) and probes.records >= 4 * 4 and probes.lots == STEPS


@pytest.mark.parametrize(
    ("sampling", "unit"),
    [
        ("poisson", "microbatch"),
        ("poisson", "user"),
        ("fixed_size", "example"),
        pytest.param("full", "user", marks=pytest.mark.slow),
    ],
)
def test_every_unit_and_sampling(sampling: str, unit: str, seen: Seen, tmp_path: Path) -> None:
    strategy, _ = train(strategies.DPSGD, tmp_path, sampling, unit, steps=4 if sampling == "full" else STEPS)
    check(seen, strategy)
    header = read_ledger(tmp_path / "ledger.jsonl").header
    assert header.population == strategy.mechanism.plan.sampling.population  # counts the canaries
    probes = scores_of(tmp_path).probes
    assert is_right(probes) and probes.records > 0
    assert probes.lots == len(seen)


def test_lots_of_a_chosen_largest_size_are_audited_as_such(
    seen: Seen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of these lots are cut; in others that are not, memory and noise would be others."""
    asked = TruncatedPoissonSampling(1437, 64 / 1437, max_batch_size=64)
    monkeypatch.setattr("dpbench.data.module.make_sampling", lambda *facts: asked)
    strategy, _ = train(strategies.DPSGD, tmp_path, "truncated_poisson")
    check(seen, strategy)
    (sampling,) = {release.sampling for _, release in read_ledger(tmp_path / "ledger.jsonl").releases}
    assert isinstance(sampling, TruncatedPoissonSampling)
    assert sampling.max_batch_size == 64 and sampling.population > 1437


def test_discretized_spikes_reach_the_bound(seen: Seen, tmp_path: Path) -> None:
    strategy, _ = train(strategies.DPSGD, tmp_path, hidden=64, discretization_threshold=1e-3, max_grad_norm=2.0)
    assert check(seen, strategy) == pytest.approx(0.5)
    assert is_right(scores_of(tmp_path).probes)


def test_normalized_spikes_reach_what_is_declared(seen: Seen, tmp_path: Path) -> None:
    """Of a hundred small bounds γ takes a tenth, and a correct run would be accused."""
    train(strategies.AutomaticClipping, tmp_path, hidden=64, noise_multiplier=1e-4, steps=4, max_grad_norm=1e-3)
    x, drawn, _ = observations(seen)
    assert x[drawn].mean() - x[~drawn].mean() == pytest.approx(1, abs=2e-3)


def test_spikes_that_keep_their_norm_reach_any_bound(seen: Seen, tmp_path: Path) -> None:
    """Bounds that adapt may grow above the norm that signs of a spike would have."""
    options = {"discretization_threshold": 1e-3, "discretization_values": "kept", "initial_max_grad_norm": 0.1}
    strategy, _ = train(strategies.AdaptiveQuantileClipping, tmp_path, hidden=64, **options)
    assert check(seen, strategy) >= 0.5 - 1e-6
    assert strategy.mechanism.plan.groups[0].max_grad_norm > 0.1


def test_a_model_without_room_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="have room for 1437 canaries, not 2000: take at most 1437"):
        train(strategies.DPSGD, tmp_path, hidden=64, audit=GradientCanaries(2000))
    with pytest.raises(ConfigurationError, match="an audit needs a larger model"):
        train(strategies.DPSGD, tmp_path, hidden=1, discretization_threshold=1e-3, max_grad_norm=10.0)
    with pytest.raises(ConfigurationError, match="from 20 on"):
        GradientCanaries(3)


def test_what_is_not_private_is_not_audited(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigurationError, match="this strategy makes no private releases"):
        train(strategies.ClipOnly, tmp_path)
    assert main(["train", "audit=gradient_canaries", "strategy=none", f"hydra.run.dir={tmp_path / 'run'}"]) == 1
    assert "choose a private strategy, or set audit=none" in capsys.readouterr().err


def test_groups_without_room_are_left_out(seen: Seen, tmp_path: Path) -> None:
    """Biases of 32 and 10 coordinates cannot hold 200 canaries: the rest of the budget is audited, and says so."""
    strategy, _ = train(partial(strategies.DPSGD, clipping="per_parameter"), tmp_path)
    queries = strategy.mechanism.plan.queries
    assert sorted(file_of(tmp_path)["left_out"].values()) == [10, 32]
    audited = sum((q.sensitivity / q.noise_std) ** 2 for q in queries if "weight" in q.name) ** -0.5
    assert check(seen, strategy) == pytest.approx(audited) and audited > 0.5 * 1.2


def test_a_resumed_run_sees_the_same(tmp_path: Path) -> None:
    """Bit-identical, checkpoint and all; the statistics of an adaptive bound too."""
    fit = partial(train, partial(strategies.AdaptiveQuantileClipping, count_noise_std=4.0), fingerprint="f")
    fit(tmp_path / "whole", steps=7)
    _, trainer = fit(tmp_path / "parts", steps=3)
    resume = partial(fit, steps=7, checkpoint=tmp_path / "three.ckpt")
    trainer.save_checkpoint(tmp_path / "three.ckpt")
    resume(tmp_path / "parts")
    for other, message in ((GradientCanaries(CANARIES - 50, seed=1), "with other canaries"), (None, "with an audit")):
        with pytest.raises(ConfigurationError, match=message):
            resume(tmp_path / "x", audit=other)
    whole = file_of(tmp_path / "whole")
    assert whole == file_of(tmp_path / "parts") and whole["scores"]["releases"] == 7
    assert whole["ledger"] == seal_of(tmp_path / "whole" / "ledger.jsonl")._asdict()


def test_other_records_get_what_they_would_get_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The canaries' rows are sparse: at all other coordinates the sums are those of the lot."""
    strategy, _ = train(strategies.DPSGD, tmp_path, steps=1)
    canaries, mechanism = strategy._releases.hook, strategy.mechanism
    assert isinstance(canaries, Canaries) and strategy.observers == []  # taken back at the end
    monkeypatch.setattr(canaries, "_in_lot", lambda release: canaries.member)
    mechanism.clear()
    canaries.insert(mechanism, 1)
    assert int((mechanism.total != 0).sum()) == canaries.member.sum()
    assert float(mechanism.total.abs().max()) == pytest.approx(1.0)  # each is clipped to the bound


@pytest.mark.parametrize("factor", [2 / 3, 1.5])
def test_wrong_noise_is_not_as_declared(factor: float, seen: Seen, tmp_path: Path) -> None:
    """The check above is one that fails: with scaled noise, as a broken mechanism would have it."""
    with _scaled(factor)():
        strategy, _ = train(strategies.DPSGD, tmp_path)
    with pytest.raises(AssertionError):
        check(seen, strategy)


@pytest.mark.slow
@pytest.mark.own_key
def test_two_processes_see_what_one_sees(tmp_path: Path) -> None:
    for devices in (1, 2):
        train(strategies.DPSGD, tmp_path / str(devices), steps=4, devices=devices)
    one, two = (scores_of(tmp_path / name) for name in "12")
    np.testing.assert_array_equal(one.drawn, two.drawn)
    np.testing.assert_allclose(one.llr, two.llr, rtol=1e-3, atol=1e-3)
    assert is_right(two.probes) and two.probes.records > one.probes.records  # each process measures some of its own
    assert (one.probes.lots, one.probes.size_squared) == (two.probes.lots, two.probes.size_squared)
