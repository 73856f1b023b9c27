"""Canaries in a training: what the audit sees is what the plan declares, under every strategy, unit and sampling."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from numpy.typing import NDArray

from dpbench import strategies
from dpbench.capabilities.canaries.canaries import Canaries, GradientCanaries
from dpbench.capabilities.canaries.scores import Scores, ScoreSums
from dpbench.cli import main
from dpbench.data import ImageDataModule, UserDataModule
from dpbench.errors import ConfigurationError
from dpbench.harness.runs.record import is_audited
from dpbench.locks import open_locked
from dpbench.models import MLP
from dpbench.modules.image_classifier import ImageClassifier
from dpbench.privacy.accounting.ledger import read_ledger
from dpbench.privacy.accounting.seal import seal_of
from dpbench.privacy.mechanism.noise_process import Noise
from dpbench.privacy.sampling import TruncatedPoissonSampling
from dpbench.records import LocalTraining, Users
from tools.combinations import STRATEGIES

Seen = list[tuple[NDArray[np.float64], NDArray[np.bool_], float, float]]
CANARIES, STEPS = 200, 12
PRIVATE = {name: make for name, make in STRATEGIES.items() if "reference" not in name}


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
    """Small: with `full` sampling all of 40 users or 240 examples are in each lot, the canaries too."""
    full = sampling == "full"
    if unit == "user":
        size = 40 if full else 20
        return UserDataModule(
            "digits_users", expected_batch_size=size, sampling=sampling, val_users=60 * full, split="permutation"
        )
    size, held_out = (240, 1197) if full else (64, 0)
    return ImageDataModule(
        "digits", expected_batch_size=size, sampling=sampling, image_size=8, val_size=held_out, split="permutation"
    )


def train(
    make: Callable[..., strategies.PrivateStrategy],
    folder: Path,
    sampling: str = "poisson",
    unit: str = "example",
    steps: int = STEPS,
    hidden: int = 32,
    checkpoint: Path | None = None,
    devices: int = 1,
    processes: str = "auto",
    **options: Any,
) -> tuple[strategies.PrivateStrategy, pl.Trainer]:
    data = data_of(sampling, unit)
    facts = data.model_options()
    options = {"noise_multiplier": 0.5, "delta": 1e-4, "seed": 0, "ledger": str(folder / "ledger.jsonl"), **options}
    if unit == "user":
        options["records"] = Users(LocalTraining(lr=0.05, batch_size=10))
    if unit == "microbatch":
        options["microbatch_size"] = 4
    options.setdefault("audit", GradientCanaries(40 if unit == "user" else CANARIES, seed=1))
    strategy = make(**options)
    torch.manual_seed(0)
    module = ImageClassifier(MLP(**facts, hidden=[hidden]), partial(torch.optim.SGD, lr=0.05), facts["num_classes"])
    trainer = pl.Trainer(
        max_steps=steps,
        accelerator="cpu",
        devices=devices,
        strategy=processes,
        use_distributed_sampler=False,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        limit_val_batches=0,
        default_root_dir=str(folder),
        callbacks=[strategy],
    )
    trainer.fit(module, data, ckpt_path=checkpoint, weights_only=False)
    return strategy, trainer


def check(seen: Seen, strategy: strategies.PrivateStrategy) -> float:
    """Observations are the declared moves with the declared noise; returns its mean multiplier.

    With 2/3 or 3/2 of the noise, or of the moves, it fails.
    """
    canaries = strategy._releases.hook
    assert isinstance(canaries, Canaries)
    member = canaries.member
    replace_one, reach = canaries.sums.seen.replace_one, canaries.sums.seen.reach
    there = np.concatenate([drawn for _, drawn, _, _ in seen])
    moves = np.where(member, 0.5, -0.5) if replace_one else np.full(len(member), reach)
    residuals = np.concatenate([(x - np.where(drawn, moves, 0.0)) / z for x, drawn, z, _ in seen])
    assert there.any() and (replace_one or not (there.reshape(-1, len(member)) & ~member).any())
    for part in (residuals[there], residuals[~there]):
        assert abs(part.sum()) < 4.5 * np.sqrt(len(part))
    assert abs(residuals.std() - 1) < 4.5 / np.sqrt(2 * len(residuals)) < 0.3
    return float(np.mean([z for _, _, z, _ in seen]))


@pytest.mark.parametrize("name", PRIVATE)
def test_every_strategy_is_as_declared(name: str, seen: Seen, tmp_path: Path) -> None:
    strategy, _ = train(PRIVATE[name], tmp_path)
    assert len(seen) == STEPS
    z = check(seen, strategy)
    assert z >= 0.5 - 1e-6  # statistics beside the gradients, and groups without room, leave the rest more noise


@pytest.mark.parametrize("unit", ["example", "microbatch", "user"])
@pytest.mark.parametrize(
    "sampling",
    ["poisson", "fixed_size", *(pytest.param(name, marks=pytest.mark.slow) for name in ("truncated_poisson", "full"))],
)
def test_every_unit_and_sampling(sampling: str, unit: str, seen: Seen, tmp_path: Path) -> None:
    strategy, _ = train(strategies.DPSGD, tmp_path, sampling, unit, steps=4 if sampling == "full" else STEPS)
    check(seen, strategy)
    header = read_ledger(tmp_path / "ledger.jsonl").header
    assert header.population == strategy.mechanism.plan.sampling.population  # counts the canaries


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


@pytest.mark.parametrize("options", [{"max_grad_norm": 1e-3}, {"stability": 1.0}, {"discretization_threshold": 1e-3}])
def test_normalized_spikes_reach_what_is_declared(options: dict[str, float], seen: Seen, tmp_path: Path) -> None:
    """Of a hundred small bounds γ takes a tenth, and a correct run would be accused."""
    train(strategies.AutomaticClipping, tmp_path, hidden=64, noise_multiplier=1e-4, **options)
    x, drawn = (np.concatenate([row[part] for row in seen]) for part in (0, 1))
    assert x[drawn].mean() - x[~drawn].mean() == pytest.approx(1, abs=2e-3)


@pytest.mark.parametrize("values", ["rescaled", "kept"])
def test_spikes_that_keep_their_norm_reach_any_bound(values: str, seen: Seen, tmp_path: Path) -> None:
    """Bounds that adapt may grow above the norm that signs of a spike would have."""
    options = {"discretization_threshold": 1e-3, "discretization_values": values, "initial_max_grad_norm": 0.1}
    strategy, _ = train(strategies.AdaptiveQuantileClipping, tmp_path, hidden=64, **options)
    assert check(seen, strategy) >= 0.5 - 1e-6
    assert strategy.mechanism.plan.groups[0].max_grad_norm > 0.1


def test_a_model_without_room_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="have room for 1437 canaries, not 2000: take at most 1437"):
        train(strategies.DPSGD, tmp_path, hidden=64, audit=GradientCanaries(2000))
    with pytest.raises(ConfigurationError, match="an audit needs a larger model"):
        train(strategies.DPSGD, tmp_path, hidden=1, discretization_threshold=1e-3, max_grad_norm=10.0)


def test_what_is_not_private_is_not_audited(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="this strategy makes none: audit=none"):
        train(strategies.ClipOnly, tmp_path)


@pytest.mark.parametrize(("options", "message"), [({"canaries": 3}, "from 20 on"), ({"seed": -1}, "from 0 on")])
def test_options_out_of_range(options: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        GradientCanaries(**options)


def test_groups_without_room_are_left_out(seen: Seen, tmp_path: Path) -> None:
    """Biases of 32 and 10 coordinates cannot hold 200 canaries: the rest of the budget is audited, and says so."""
    strategy, _ = train(partial(strategies.DPSGD, clipping="per_parameter"), tmp_path)
    queries = strategy.mechanism.plan.queries
    assert sorted(scores_of(tmp_path)["left_out"].values()) == [10, 32]
    audited = sum((q.sensitivity / q.noise_std) ** 2 for q in queries if "weight" in q.name) ** -0.5
    assert check(seen, strategy) == pytest.approx(audited) and audited > 0.5 * 1.2


def scores_of(folder: Path) -> Any:
    return json.loads((folder / "audit.json").read_text())


def test_a_resumed_run_sees_the_same(tmp_path: Path) -> None:
    """Bit-identical, checkpoint and all."""
    train(strategies.DPSGD, tmp_path / "whole", steps=10, fingerprint="f")
    _, trainer = train(strategies.DPSGD, tmp_path / "parts", steps=6, fingerprint="f")
    trainer.save_checkpoint(tmp_path / "six.ckpt")
    train(strategies.DPSGD, tmp_path / "parts", steps=10, fingerprint="f", checkpoint=tmp_path / "six.ckpt")
    for other, message in ((GradientCanaries(CANARIES - 50, seed=1), "with other canaries"), (None, "with an audit")):
        options = {"audit": other, "checkpoint": tmp_path / "six.ckpt", "fingerprint": "f"}
        with pytest.raises(ConfigurationError, match=message):
            train(strategies.DPSGD, tmp_path / "x", **options)
    whole, parts = scores_of(tmp_path / "whole"), scores_of(tmp_path / "parts")
    assert whole == parts and whole["scores"]["releases"] == 10
    ledger = tmp_path / "whole" / "ledger.jsonl"
    assert whole["ledger"] == seal_of(ledger)._asdict()


def test_a_full_disk_keeps_nothing_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scores cannot be written: the error is told, and the ledger can be continued."""

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("dpbench.capabilities.canaries.canaries.write_scores", full)
    with pytest.raises(OSError, match="No space left"):
        train(strategies.DPSGD, tmp_path, steps=2)
    open_locked(tmp_path / "ledger.jsonl").close()


def test_other_records_get_what_they_would_get_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The canaries' rows are sparse: at all other coordinates the sums are those of the lot."""
    strategy, _ = train(strategies.DPSGD, tmp_path, steps=1)
    canaries, mechanism = strategy._releases.hook, strategy.mechanism
    assert isinstance(canaries, Canaries)
    monkeypatch.setattr(canaries, "_in_lot", lambda release: canaries.member)
    mechanism.clear()
    canaries.insert(mechanism, 1)
    touched = int((mechanism.total != 0).sum())
    assert touched == canaries.member.sum()
    assert float(mechanism.total.abs().max()) == pytest.approx(1.0)  # each is clipped to the bound


@pytest.mark.parametrize("factor", [0.0, 2 / 3, 1.5])
def test_wrong_noise_is_not_as_declared(factor: float, seen: Seen, tmp_path: Path, monkeypatch: Any) -> None:
    """The check above is one that fails: with scaled noise, as a broken mechanism would have it."""
    add_noise = Noise.add_

    def scaled(self: Noise, total: torch.Tensor, *others: Any) -> torch.Tensor:
        clean = total.clone()
        return total.copy_(clean + factor * (add_noise(self, total, *others) - clean))

    monkeypatch.setattr(Noise, "add_", scaled)
    strategy, _ = train(strategies.DPSGD, tmp_path)
    with pytest.raises(AssertionError):
        check(seen, strategy)


def test_the_command_line_audits(tmp_path: Path) -> None:
    words = ["audit=gradient_canaries", "audit.canaries=100", "model=mlp", "model.hidden=[16]", "data.image_size=8"]
    small = [*words, "logger=none", "trainer.max_steps=4", f"hydra.run.dir={tmp_path / 'run'}"]
    assert main(["train", *small]) == 0
    assert scores_of(tmp_path / "run")["scores"]["releases"] == 4
    assert is_audited(json.loads((tmp_path / "run" / "result.json").read_text())["config"])


def test_nothing_to_audit_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "audit=gradient_canaries", "strategy=none", f"hydra.run.dir={tmp_path / 'run'}"]) == 1
    assert "choose a private strategy, or audit=none" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.own_key
def test_two_processes_see_what_one_sees(tmp_path: Path) -> None:
    sums = []
    for name, devices in (("one", {}), ("two", {"devices": 2, "processes": "ddp_fork"})):
        train(strategies.DPSGD, tmp_path / name, steps=4, **devices)
        sums.append(Scores.model_validate(scores_of(tmp_path / name)["scores"]))
    one, two = sums
    np.testing.assert_array_equal(one.drawn, two.drawn)
    np.testing.assert_allclose(one.llr, two.llr, rtol=1e-3, atol=1e-3)


@pytest.mark.long
def test_a_discriminator_is_audited(seen: Seen, tmp_path: Path) -> None:
    words = ["experiment=pyvacy/gan", "data=digits", "audit=gradient_canaries", "audit.canaries=300", "logger=none"]
    assert main(["train", *words, "trainer.max_steps=6", f"hydra.run.dir={tmp_path / 'run'}"]) == 0
    residuals = np.concatenate([(x - drawn) / z for x, drawn, z, _ in seen])
    assert abs(residuals.std() - 1) < 4.5 / np.sqrt(2 * len(residuals)) < 0.3
