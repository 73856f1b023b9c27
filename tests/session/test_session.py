"""A session with a driver of thirty lines: the order of a step, and what is refused out of order."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from dpbench.data.loader import PrivateDataLoader
from dpbench.errors import ConfigurationError
from dpbench.guards import EVERY_TRAINING
from dpbench.privacy.accounting.ledger import read_ledger
from dpbench.privacy.budget import TrainingLength
from dpbench.privacy.processes import ALONE
from dpbench.records.training import TrainingStep
from dpbench.session.session import PrivateSession
from dpbench.strategies import DPSGD
from tests.guards.plain_training import PlainTraining
from tests.strategies.worlds import loader_of, pictures


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 3)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.layer(batch[0].flatten(1)), batch[1])


class Driver(PlainTraining):
    """Calls what a session mounts."""

    def __init__(self) -> None:
        module = Net()
        super().__init__(module, [SGD(module.parameters(), lr=0.1)])
        self.step: TrainingStep | None = None
        self.backward: Callable[..., None] | None = None

    def mount(self, step: TrainingStep, backward: Callable[..., None]) -> None:
        self.step = step
        self.backward = backward


def strategy(folder: Path) -> DPSGD:
    return DPSGD(noise_multiplier=1.0, delta=1e-3, seed=0, ledger=str(folder / "ledger.jsonl"))


def begun(folder: Path, steps: int = 4) -> tuple[PrivateSession, Driver, PrivateDataLoader]:
    session = strategy(folder).session(EVERY_TRAINING)
    driver = Driver()
    loader = loader_of(pictures())
    session.check(driver)
    session.attach()
    session.acquire(loader)
    session.begin(ALONE, 7, folder / "ledger.jsonl", TrainingLength(steps), {})
    return session, driver, loader


def test_the_seed_alone_is_no_key(tmp_path: Path) -> None:
    """By it, runs on neighboring data would share their noise."""
    assert_the_seed_alone_is_no_key(tmp_path)


def assert_the_seed_alone_is_no_key(tmp_path: Path, **options: Any) -> None:
    ledger = tmp_path / "ledger.jsonl"
    session = DPSGD(noise_multiplier=1.0, delta=1e-3, seed=5, ledger=str(ledger), **options).session(EVERY_TRAINING)
    session.check(Driver())
    session.attach()
    session.acquire(loader_of(pictures(), kind="poisson"))
    with pytest.raises(ConfigurationError, match="seed=5 needs a key.*a key that covers data and settings"):
        session.begin(ALONE, None, ledger, TrainingLength(4), {})
    session.end()
    assert not ledger.exists()


def gradients(driver: Driver, batch: Any) -> None:
    assert driver.step is not None and driver.backward is not None
    driver.backward(driver.step(batch, 0))


def update(driver: Driver) -> None:
    driver.optimizers[0].step()
    for function in driver.after_lot:
        function()


def test_a_driver_of_ones_own(tmp_path: Path) -> None:
    session, driver, loader = begun(tmp_path)
    before = copy.deepcopy(driver.module.state_dict())
    for batch, _ in zip(loader, range(4), strict=False):
        session.open(batch, rank=0)
        gradients(driver, batch)
        session.release()
        update(driver)
        session.close()
    session.end()
    assert len(read_ledger(tmp_path / "ledger.jsonl").releases) == 4
    assert any(not torch.equal(before[name], value) for name, value in driver.module.state_dict().items())
    assert session.guards == [] and not loader.lots.in_use and loader.before_lot is None


def test_a_refusal_that_is_swallowed(tmp_path: Path) -> None:
    class Refusing(Driver):
        automatic_optimization = False

    ledger = str(tmp_path / "ledger.jsonl")
    session = DPSGD(noise_multiplier=1.0, max_physical_batch_size=4, ledger=ledger).session(EVERY_TRAINING)
    with pytest.raises(ConfigurationError, match="needs automatic optimization"):
        session.check(Refusing())
    with pytest.raises(ConfigurationError, match="did not run"):
        session.attach()


def test_a_step_without_a_lot(tmp_path: Path) -> None:
    session, driver, loader = begun(tmp_path)
    with pytest.raises(ConfigurationError, match="did not run"):
        gradients(driver, next(iter(loader)))
    session.end()


def stepped(folder: Path) -> tuple[PrivateSession, Driver, Any]:
    """A session whose first lot has its gradients."""
    session, driver, loader = begun(folder)
    batch = next(iter(loader))
    session.open(batch, rank=0)
    gradients(driver, batch)
    return session, driver, batch


def test_two_releases_of_a_lot(tmp_path: Path) -> None:
    session, driver, batch = stepped(tmp_path)
    session.release()
    for again in (session.release, lambda: gradients(driver, batch)):
        with pytest.raises(ConfigurationError, match="the optimizer stepped twice"):
            again()
    session.end()


def test_a_lot_that_is_left_out(tmp_path: Path) -> None:
    session, _, loader = begun(tmp_path)
    lots = iter(loader)
    session.open(next(lots), rank=0)
    for left_out in (lambda: next(lots), session.refuse_skipped_lot):
        with pytest.raises(ConfigurationError, match="never released"):
            left_out()
    session.end()


def test_an_update_before_the_release(tmp_path: Path) -> None:
    session, driver, _ = stepped(tmp_path)
    with pytest.raises(ConfigurationError, match="stepped before the release"):
        driver.optimizers[0].step()
    session.end()


def test_a_copy_of_the_module_takes_no_session_with_it(tmp_path: Path) -> None:
    session, driver, _ = stepped(tmp_path)
    before = driver.module.layer.weight.detach().clone()
    copied = copy.deepcopy(driver.module)
    session.release()
    update(driver)
    assert torch.equal(copied.layer.weight, before)
    assert not torch.equal(driver.module.layer.weight, before)
    session.end()
