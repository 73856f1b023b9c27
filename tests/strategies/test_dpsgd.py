"""DPSGD inside Lightning: exact updates, lots, budgets, resume, refusals."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from dpbench.data.loader import PrivateDataLoader
from dpbench.data.records import Collated
from dpbench.data.sampler import PrivateBatchSampler, make_sampling
from dpbench.errors import BudgetExhausted, ConfigurationError, UnsupportedModuleError
from dpbench.privacy.accounting.composition import epsilon, ledger_epsilon
from dpbench.privacy.accounting.ledger import Ledger, read_ledger
from dpbench.privacy.events import Event, SumQuery
from dpbench.strategies import DPSGD
from tests.strategies.worlds import (
    Classifier,
    clipped_sum,
    crashed,
    fit,
    loader_of,
    pictures,
    trainer_for,
    weights_of,
)

QUIET = 1e-9  # a noise multiplier whose noise is below float32's resolution


def make_classifier(**options: Any) -> Classifier:
    torch.manual_seed(3)
    return Classifier(**options)


def without_dropout(manual: bool = False) -> Classifier:
    module = make_classifier(manual=manual)
    module.net[4] = nn.Identity()
    return module


def book(folder: Path) -> Ledger:
    return read_ledger(folder / "ledger.jsonl")


@pytest.mark.parametrize(("manual", "clipping"), [(False, "flat"), (True, "per_layer")])
def test_updates_equal_the_reference(tmp_path: Path, manual: bool, clipping: str) -> None:
    """SGD with momentum on record-by-record clipped gradients, computed in float64 by hand."""
    module = without_dropout(manual)
    reference = copy.deepcopy(module).double()
    parameters = list(reference.parameters())
    lots = PrivateBatchSampler(make_sampling("poisson", 60, 12), 0)
    optimizer = torch.optim.SGD(parameters, lr=0.5, momentum=0.9)
    groups = 1 if clipping == "flat" else 3
    for step in range(4):
        images, labels = pictures()[torch.from_numpy(lots.lot(step))]
        losses = [reference.loss(one) for one in zip(images.double().split(1), labels.split(1), strict=True)]
        for group in zip(*[iter(parameters)] * (6 // groups), strict=True):
            for p, total in zip(group, clipped_sum(losses, group, 0.3 / groups**0.5), strict=True):
                p.grad = total / 12
        optimizer.step()
    fit(tmp_path, module, 4, max_grad_norm=0.3, clipping=clipping, noise_multiplier=QUIET)
    torch.testing.assert_close(weights_of(module).double(), weights_of(reference), rtol=1e-5, atol=1e-6)


def test_gradients_inside_a_step_are_those_outside(tmp_path: Path) -> None:
    """In pieces and by hand they are computed where Lightning has made the precision the default of new tensors."""
    ends = []
    for manual, size in ((False, None), (False, 5), (True, None)):
        module = without_dropout(manual)
        options = {"noise_multiplier": 0.1, "max_physical_batch_size": size, "trainer": {"precision": "64-true"}}
        fit(tmp_path / f"{manual} {size}", module, 3, **options)
        ends.append(weights_of(module))
    assert all((end - ends[0]).norm() < 1e-4 * ends[0].norm() for end in ends[1:])


@pytest.mark.parametrize(
    ("kind", "relation", "sensitivity"),
    [("poisson", "add_or_remove_one", 2.0), ("fixed_size", "replace_one", 4.0)],
)
def test_the_ledger_states_sampling_sensitivity_and_noise(
    tmp_path: Path, kind: str, relation: str, sensitivity: float
) -> None:
    loader = loader_of(pictures(), kind=kind)
    strategy = fit(tmp_path, make_classifier(), loader=loader, max_grad_norm=2.0, noise_multiplier=1.5)
    ledger = book(tmp_path)
    (query,) = ledger.releases[0][1].queries
    assert (query.sensitivity, query.noise_std) == (sensitivity, 3.0)
    assert ledger.releases[0][1].sampling == loader.lots.sampling
    assert ledger.header.neighboring_relation == relation
    assert strategy.epsilon() == pytest.approx(ledger_epsilon(ledger, 1e-3))
    assert pickle.loads(pickle.dumps(strategy)).epsilon() == strategy.epsilon()


@pytest.mark.parametrize(("fingerprint", "seed"), [("other", 0), ("x", 1)])
def test_a_changed_run_never_reuses_noise(tmp_path: Path, fingerprint: str, seed: int) -> None:
    """Resumed with other settings after a crash: new noise, and the lost releases stay counted."""
    start = crashed(tmp_path, make_classifier(), 6, 3, fingerprint="x")
    loader = loader_of(pictures())
    before = loader.lots.lot(4).tolist()
    options = {"fingerprint": fingerprint, "seed": seed, "start": start}
    strategy = fit(tmp_path, make_classifier(), 6, loader=loader, **options)
    assert loader.lots.lot(4).tolist() != before  # a lot that was spent is not drawn again
    ledger = book(tmp_path)
    assert len(ledger.headers) == 2
    assert len(ledger.releases) == 5 + 3
    assert strategy.epsilon() == pytest.approx(ledger_epsilon(ledger, 1e-3))


SYSTEM = torch.Generator()


class Augmented(TensorDataset):
    """Records that are others each time, and that no seed repeats."""

    def __getitems__(self, positions: list[int]) -> Any:
        images, labels = self.tensors[0][positions], self.tensors[1][positions]
        return Collated((images + 0.5 * torch.rand(images.shape, generator=SYSTEM), labels))


def test_a_replay_that_differs_goes_on_with_new_noise(tmp_path: Path) -> None:
    """The same noise on another sum would reveal the difference of the two."""

    def loader() -> PrivateDataLoader:
        return PrivateDataLoader(
            Augmented(*pictures().tensors), PrivateBatchSampler(make_sampling("poisson", 60, 12), 0)
        )

    start = crashed(tmp_path, make_classifier(), 6, 3, loader=loader(), fingerprint="x")
    with pytest.warns(UserWarning, match="release 3 differs from its record.*new phase of the ledger, with new noise"):
        strategy = fit(tmp_path, make_classifier(), 6, loader=loader(), fingerprint="x", start=start)
    ledger = book(tmp_path)
    assert [(phase, one.number) for phase, one in ledger.releases[5:]] == [(1, n) for n in range(3, 6)]
    again = [len(one.queries) for phase, one in ledger.releases if phase == 1]
    assert again == [2, 2, 1]  # on the lots of releases 3 and 4, with what these have shown of them
    assert len({one.checksum for _, one in ledger.releases}) == len(ledger.releases)
    assert strategy.epsilon() == pytest.approx(ledger_epsilon(ledger, 1e-3))


def test_replaced_loaders_are_refused(tmp_path: Path) -> None:
    class Reloading(Classifier):
        def train_dataloader(self) -> Any:
            return loader_of(pictures())

    trainer = trainer_for(tmp_path, DPSGD(noise_multiplier=1.0), 20, reload_dataloaders_every_n_epochs=1)
    with pytest.raises(ConfigurationError, match="loader was replaced during the run"):
        trainer.fit(Reloading())


def test_training_stops_before_the_step_that_would_exceed_the_budget(tmp_path: Path) -> None:
    strategy = fit(tmp_path, make_classifier(), 500, target_epsilon=3.0)
    assert 0 < strategy.releases < 500
    assert strategy.epsilon() <= 3.0
    one_more = Event(loader_of(pictures()).lots.sampling, (SumQuery("all", 1.0, 1.0),))
    assert epsilon({one_more: strategy.releases + 1}, 1e-3) > 3.0


def test_min_steps_cannot_override_the_budget(tmp_path: Path) -> None:
    with pytest.raises(BudgetExhausted, match="is spent"):
        fit(tmp_path, make_classifier(), 500, target_epsilon=3.0, trainer={"min_steps": 400})
    assert ledger_epsilon(book(tmp_path), 1e-3) <= 3.0


# ------------------------------------------------------------------------------------------------- refusals


class TwoBackwards(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(self.loss(batch))
        self.manual_backward(self.loss(batch))


class SkipsSome(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        return None if batch_idx % 2 else super().training_step(batch, batch_idx)


class PartialOptimizer(Classifier):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.net[0].parameters(), lr=0.1)


class TwoOptimizers(Classifier):
    def configure_optimizers(self) -> Any:
        return [super().configure_optimizers(), super().configure_optimizers()]


class PastLightning(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.loss(batch).backward()
        self.optimizers(use_pl_optimizer=False).step()


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        pytest.param(TwoBackwards, {"manual": True}, "backward was called twice", id="twice"),
        pytest.param(SkipsSome, {}, "returned no loss for a batch that is not empty", id="skips"),
        pytest.param(SkipsSome, {"manual": True}, "no private update was made for this batch", id="some"),
        pytest.param(PartialOptimizer, {}, "does not update net.1.weight", id="partial"),
        pytest.param(
            TwoOptimizers, {"manual": True}, '2 optimizers.*with a parameter group each.*"lr"', id="two optimizers"
        ),
        pytest.param(PastLightning, {"manual": True}, "stepped before the release of the batch", id="past"),
    ],
)
def test_modules_that_break_the_guarantee_are_refused(tmp_path: Path, kind: Any, options: Any, message: str) -> None:
    with pytest.raises((ConfigurationError, UnsupportedModuleError), match=message):
        fit(tmp_path, kind(**options))


@pytest.mark.parametrize(
    ("options", "message"),
    [({"gradient_clip_val": 1.0}, "gradient_clip_val.*max_grad_norm"), ({"limit_train_batches": 1}, "limit_train")],
    ids=["clipping", "limit"],
)
def test_trainer_settings_are_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=message):
        fit(tmp_path, make_classifier(), trainer=options)
    assert not (tmp_path / "ledger.jsonl").exists()


def test_fp16_is_refused(tmp_path: Path) -> None:
    trainer = trainer_for(tmp_path, DPSGD(noise_multiplier=1.0), 3)
    trainer.strategy.precision_plugin.precision = "16-mixed"  # a GPU's setting, on the CPU
    with pytest.raises(ConfigurationError, match="precision=16-mixed"):
        trainer.fit(make_classifier(), loader_of(pictures()))


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        pytest.param(DataLoader(pictures(), 12, shuffle=True), "PrivateDataLoader.from_dataloader", id="plain"),
        pytest.param([loader_of(pictures())] * 2, "several loaders .* adds the gradient of the public loss", id="two"),
        pytest.param(loader_of(pictures(), kind="shuffled"), "no accountant covers 'shuffled_epochs'", id="shuffled"),
    ],
)
def test_unknown_sampling_is_refused(tmp_path: Path, loader: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        fit(tmp_path, make_classifier(), loader=loader)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "set noise_multiplier, target_epsilon"),
        ({"noise_multiplier": 0.0}, "a positive number from 1e-12 to 1e.12, not 0.0; use strategy=none"),
        ({"target_epsilon": 0.0}, "target_epsilon must be a positive number"),
        ({"noise_multiplier": 1.0, "delta": 0.0}, "delta must lie strictly between 0 and 1"),
        ({"noise_multiplier": 1.0, "accountant": "magic"}, "unknown accountant"),
    ],
    ids=["noise", "no noise", "epsilon", "delta", "accountant"],
)
def test_options_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        DPSGD(**options)


def test_large_delta_warns(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="not below 1/60"):
        fit(tmp_path, make_classifier(), steps=1, delta=0.1)


def test_target_that_no_noise_reaches(tmp_path: Path) -> None:
    options: dict[str, Any] = {"noise_multiplier": None, "target_epsilon": 1e-9, "delta": 1e-12}
    with pytest.raises(ConfigurationError, match="no noise_multiplier up to"):
        fit(tmp_path, make_classifier(), 100, **options)
    with pytest.raises(ConfigurationError, match="set max_steps or max_epochs"):
        fit(tmp_path, make_classifier(), -1, **options)
