"""`PrivateLoop`: to the last bit what a Lightning Trainer makes, and the same refusals."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from dpbench import DPSGD, AdaptiveQuantileClipping, NonPrivate, PrivateDataLoader, PrivateLoop
from dpbench.callback.strategy import PrivateStrategy
from dpbench.errors import BudgetExhausted, ConfigurationError, LedgerError, UnsupportedModuleError
from dpbench.harness.reports.account import AccountingRequest, account
from dpbench.privacy.accounting.ledger import read_ledger
from dpbench.privacy.budget import Budget
from tests.strategies.worlds import loader_of, trainer_for

STEPS = 11  # more than an epoch


def data() -> TensorDataset:
    x = torch.randn(120, 6, generator=torch.Generator().manual_seed(3))
    return TensorDataset(x, (x[:, 0] > 0).long())


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 2))


def loss(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def loader(seed: int | None = 5, kind: str = "poisson") -> PrivateDataLoader:
    return loader_of(data(), 12, seed, kind)


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = network()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return loss(self.model, batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.05)


def private(ledger: Path, **options: Any) -> DPSGD:
    return DPSGD(**{"noise_multiplier": 1.0, "ledger": str(ledger), **options})


def loop(
    strategy: PrivateStrategy,
    steps: int = 3,
    lots: PrivateDataLoader | None = None,
    model: nn.Module | None = None,
    loss: Any = loss,
) -> PrivateLoop:
    model = model or network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    return PrivateLoop(model, optimizer, lots or loader(), strategy, loss, steps)


STRATEGIES: dict[str, Callable[..., PrivateStrategy]] = {
    "target in pieces": partial(DPSGD, target_epsilon=4.0, delta=1e-3, clipping="per_layer", max_physical_batch_size=5),
    "microbatches": partial(DPSGD, noise_multiplier=1.1, microbatch_size=3),
    "quantile": partial(AdaptiveQuantileClipping, noise_multiplier=0.8, count_noise_std=2.0, clipping="per_layer"),
    "discretized": partial(DPSGD, noise_multiplier=1.1, discretization_threshold=0.01, correction_threshold=1.0),
}


@pytest.mark.parametrize("name", STRATEGIES)
def test_it_is_the_callback_to_the_last_bit(name: str, tmp_path: Path) -> None:
    assert_alike(STRATEGIES[name], tmp_path)


def assert_alike(make: Callable[..., PrivateStrategy], tmp_path: Path) -> None:
    one = make(seed=7, ledger=str(tmp_path / "a.jsonl"))
    two = make(seed=7, ledger=str(tmp_path / "b.jsonl"))
    module, model = Module(), network()
    trainer_for(tmp_path, one, STEPS).fit(module, loader())
    assert list(loop(two, STEPS, model=model)) == [*range(1, STEPS + 1)]
    for (key, a), b in zip(module.model.state_dict().items(), model.state_dict().values(), strict=True):
        assert torch.equal(a, b), key
    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "b.jsonl").read_bytes()
    assert one.epsilon() == two.epsilon() > 0 and one.noise_multiplier == two.noise_multiplier
    assert len(read_ledger(tmp_path / "b.jsonl").releases) == STEPS


def test_what_is_done_in_between_changes_nothing(tmp_path: Path) -> None:
    """An evaluation, and random numbers."""
    plain, model, x = network(), network(), data().tensors[0]
    list(loop(private(tmp_path / "a.jsonl", seed=7), model=plain))
    training = loop(private(tmp_path / "b.jsonl", seed=7), model=model)
    for step in training:
        model.eval()
        with torch.no_grad():
            model(x)
        torch.rand(step)
        assert training.epsilon() > 0
    assert all(torch.equal(a, b) for a, b in zip(plain.state_dict().values(), model.state_dict().values(), strict=True))


def test_it_stops_where_the_budget_is_spent(tmp_path: Path) -> None:
    strategy = private(tmp_path / "l.jsonl", noise_multiplier=1.1, target_epsilon=1.5, delta=1e-3)
    with pytest.warns(UserWarning, match=r"stopped after \d+ of 1000 steps"):
        list(loop(strategy, 1000))
    assert 1 <= strategy.releases < 1000 and strategy.epsilon() <= 1.5
    with pytest.raises(BudgetExhausted):
        list(loop(private(tmp_path / "m.jsonl", noise_multiplier=0.1, target_epsilon=0.01, delta=1e-3)))


def test_a_slow_accountant_is_logged_less_often() -> None:
    quick, slow = Budget(None, 1e-5, "rdp"), Budget(None, 1e-5, "pld")
    assert slow.is_worth_logging(50, 0) and slow.is_worth_logging(450, 400)
    assert quick.is_worth_logging(400, 350) and not slow.is_worth_logging(400, 350)


@pytest.mark.filterwarnings("default:noise_multiplier=")
def test_noise_that_protects_nobody_is_named(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"noise_multiplier=1e-09 protects no example: .* epsilon=5e\+17"):
        list(loop(private(tmp_path / "a.jsonl", noise_multiplier=1e-9), 2))


def test_leaving_the_loop_gives_everything_back(tmp_path: Path) -> None:
    strategy, model, lots = private(tmp_path / "l.jsonl"), network(), loader()
    training = loop(strategy, STEPS, lots, model)
    for step in training:
        if step == 3:
            break
    assert not any(module._forward_hooks for module in model.modules()) and not lots.lots.in_use
    assert len(read_ledger(tmp_path / "l.jsonl").releases) == 3 and math.isfinite(training.epsilon())
    with pytest.raises(ConfigurationError, match="has already trained"):
        next(iter(training))
    with pytest.raises(LedgerError):  # the ledger of another training
        list(loop(private(tmp_path / "l.jsonl")))


# ------------------------------------------------------------------------------------------------- losses


def defaults(model: Any, batch: Any, kept: list[Tensor] = []) -> Tensor:  # noqa: B006 (it is the point)
    kept.append(batch[0].sum(0))
    return F.cross_entropy(model(batch[0] - kept[0]), batch[1])


def backward(model: Any, batch: Any) -> Tensor:
    loss(model, batch).backward()
    return loss(model, batch)


class Statistics(nn.Linear):
    def __init__(self) -> None:
        super().__init__(6, 2)
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        self.mean += x.detach().mean(0)  # type: ignore[operator]
        return super().forward(x)


REFUSED: dict[str, tuple[Any, type[Exception], str]] = {
    "default": (defaults, UnsupportedModuleError, "records of an earlier batch"),
    "none": (lambda model, batch: None, ConfigurationError, "returned a NoneType"),
    "backward": (backward, ConfigurationError, "leave backward"),
    "detached": (lambda model, batch: loss(model, batch).detach(), ConfigurationError, "has no gradient"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_loss_cannot_carry_a_lot(name: str, tmp_path: Path) -> None:
    own, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        list(loop(private(tmp_path / "l.jsonl"), STEPS, loss=own))


def test_records_are_checked_as_in_a_trainer(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModuleError, match="the forward pass .* changes"):
        list(loop(private(tmp_path / "l.jsonl"), model=Statistics()))


# ------------------------------------------------------------------------------------------------- lots


def test_lots_of_a_loop_are_no_other_trainings(tmp_path: Path) -> None:
    lots = loader()
    earlier = private(tmp_path / "earlier.jsonl")
    trainer = trainer_for(tmp_path, earlier, 1)
    trainer.fit(Module(), lots)
    training = iter(loop(private(tmp_path / "a.jsonl"), 4, lots))
    assert next(training) == 1
    refused = private(tmp_path / "b.jsonl")
    with pytest.raises(ConfigurationError, match="in use by another training"):
        trainer_for(tmp_path, refused, 2).fit(Module(), lots)
    assert not refused.releases and not (tmp_path / "b.jsonl").exists()
    with pytest.raises(ConfigurationError, match="in use by another training"):
        trainer_for(tmp_path, NonPrivate(), 2).fit(Module(), lots)
    earlier.teardown(trainer, Module(), "validate")  # of a later evaluation
    assert lots.lots.in_use
    assert list(training) == [2, 3, 4]


@pytest.mark.parametrize("is_private", [True, False])
def test_lots_are_free_after_an_error(is_private: bool, tmp_path: Path) -> None:
    class Broken(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            raise ValueError("broken")

    lots = loader()
    with pytest.raises(ValueError, match="broken"):
        trainer_for(tmp_path, private(tmp_path / "a.jsonl") if is_private else NonPrivate(), 2).fit(Broken(), lots)
    assert not lots.lots.in_use


def replace(model: Any, lots: PrivateDataLoader) -> None:
    model[0].weight = nn.Parameter(torch.zeros(8, 6))


def take(model: Any, lots: PrivateDataLoader) -> None:
    next(iter(lots))


@pytest.mark.parametrize(
    ("act", "message"),
    [(replace, "updates trainable parameters without a released gradient"), (take, "iterated elsewhere")],
)
def test_the_body_of_the_loop_takes_no_lots_and_replaces_no_parameter_alone(
    act: Any, message: str, tmp_path: Path
) -> None:
    model, lots, strategy = network(), loader(None, "fixed_size"), private(tmp_path / "l.jsonl")
    training = iter(loop(strategy, 5, lots, model))
    assert next(training) == 1
    act(model, lots)
    with pytest.raises(ConfigurationError, match=message):
        next(training)
    assert strategy.releases == 1 and not lots.lots.in_use


def test_a_second_step_is_refused(tmp_path: Path) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    training: Any = iter(PrivateLoop(model, optimizer, loader(), private(tmp_path / "l.jsonl"), loss, 3))
    assert next(training) == 1
    with pytest.raises(ConfigurationError, match="stepped twice"):
        optimizer.step()
    training.close()
    optimizer.step()


def test_two_that_share_noise_or_lots_have_no_epsilon_together(tmp_path: Path) -> None:
    """The ledgers of the same releases compose, counted twice; others of the same seed do not."""

    def train(seed: int, lots: int, weights: int = 0) -> Path:
        ledger = tmp_path / f"{len(list(tmp_path.iterdir()))}.jsonl"
        list(loop(private(ledger, seed=seed), 1, loader(lots), network(weights)))
        return ledger

    first, request = train(7, 5), AccountingRequest(delta=1e-3)
    one = account([first], request).facts["epsilon"]
    assert account([first, train(8, 6, 1)], request).facts["epsilon"] > one
    for what, other in (("noise", train(7, 6, 1)), ("batches", train(8, 5, 1))):
        with pytest.raises(LedgerError, match=f"drew their {what} from the same seed"):
            account([first, other], request)


def test_what_needs_a_trainer_is_refused(tmp_path: Path) -> None:
    model = network()
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    part = torch.optim.SGD(model[0].parameters(), 0.1)
    own = private(tmp_path / "l.jsonl")
    refused: list[tuple[Any, ...]] = [
        ("set the path of the ledger", model, sgd, loader(), DPSGD(noise_multiplier=1.0)),
        ("is not a private strategy", model, sgd, loader(), NonPrivate()),
        ("not a Module", Module(), sgd, loader(), own),
        ("is unknown", model, sgd, DataLoader(data(), 12), own),
        ("does not update", model, part, loader(), own),
    ]
    for message, *parts in refused:
        with pytest.raises(ConfigurationError, match=message):
            list(PrivateLoop(*parts, loss, 5))
    for steps in (0, True):
        with pytest.raises(ConfigurationError, match="at least 1"):
            loop(own, steps)
    with pytest.raises(ConfigurationError, match="scales the loss"), torch.autocast("cpu", torch.float16):
        list(loop(private(tmp_path / "h.jsonl")))
