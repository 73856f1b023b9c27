"""`PrivateLoop`: to the last bit what a Lightning Trainer makes, and the same refusals."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from pytorch_lightning.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from dpbench import DPSGD, AdaptiveMeanClipping, AdaptiveQuantileClipping, LotLoader, NonPrivate, PrivateLoop
from dpbench.callback.strategy import PrivateStrategy
from dpbench.data.lots import Lots, make_sampling
from dpbench.errors import BudgetExhausted, ConfigurationError, LedgerError, UnsupportedModuleError
from dpbench.harness.reports.account import AccountingRequest, account
from dpbench.privacy.accounting.ledger import read_ledger
from dpbench.privacy.budget import Budget

STEPS = 25  # more than an epoch


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(120, 6, generator=generator)
    return TensorDataset(x, (x[:, 0] > 0).long())


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 2))


def loss(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def loader(size: int = 12) -> LotLoader:
    return LotLoader.poisson(data(), size, seed=5)


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = network()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return loss(self.model, batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.05)


def by_trainer(strategy: PrivateStrategy, folder: Path) -> nn.Module:
    module = Module()
    options: Any = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    trainer = pl.Trainer(
        max_steps=STEPS, callbacks=[strategy], logger=False, accelerator="cpu", default_root_dir=folder, **options
    )
    trainer.fit(module, loader())
    return module.model


def by_loop(strategy: PrivateStrategy, steps: int = STEPS, **own: Any) -> nn.Module:
    model = own.get("model") or network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    made = list(PrivateLoop(model, optimizer, loader(), strategy, own.get("loss", loss), steps))
    assert made == list(range(1, len(made) + 1))
    return model


STRATEGIES: dict[str, Callable[..., PrivateStrategy]] = {
    "flat": lambda **o: DPSGD(max_grad_norm=0.5, noise_multiplier=1.1, **o),
    "target": lambda **o: DPSGD(target_epsilon=4.0, delta=1e-3, clipping="per_layer", **o),
    "pieces": lambda **o: DPSGD(noise_multiplier=1.1, max_physical_batch_size=5, **o),
    "microbatches": lambda **o: DPSGD(noise_multiplier=1.1, microbatch_size=3, **o),
    "quantile": lambda **o: AdaptiveQuantileClipping(
        noise_multiplier=0.8, count_noise_std=2.0, clipping="per_layer", **o
    ),
    "discretized": lambda **o: DPSGD(
        noise_multiplier=1.1, discretization_threshold=0.01, correction_threshold=1.0, **o
    ),
}


@pytest.mark.parametrize("name", STRATEGIES)
def test_it_is_the_callback_to_the_last_bit(name: str, tmp_path: Path) -> None:
    assert_alike(STRATEGIES[name], tmp_path)


def assert_alike(make: Callable[..., PrivateStrategy], tmp_path: Path) -> None:
    one = make(seed=7, ledger=str(tmp_path / "a.jsonl"))
    two = make(seed=7, ledger=str(tmp_path / "b.jsonl"))
    trainer, loop = by_trainer(one, tmp_path), by_loop(two)
    for (key, a), b in zip(trainer.state_dict().items(), loop.state_dict().values(), strict=True):
        assert torch.equal(a, b), key
    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "b.jsonl").read_bytes()
    assert one.epsilon() == two.epsilon() > 0 and one.noise_multiplier == two.noise_multiplier
    assert len(read_ledger(tmp_path / "b.jsonl").releases) == STEPS


def test_an_evaluation_in_between_changes_nothing(tmp_path: Path) -> None:
    plain = by_loop(STRATEGIES["flat"](seed=7, ledger=str(tmp_path / "a.jsonl")))
    model, x = network(), data().tensors[0]
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    strategy = STRATEGIES["flat"](seed=7, ledger=str(tmp_path / "b.jsonl"))
    training = PrivateLoop(model, optimizer, loader(), strategy, loss, STEPS)
    seen = []
    for step in training:
        model.eval()
        with torch.no_grad():
            seen.append(model(x).mean())
        torch.rand(step)
        assert training.epsilon() > 0
    assert len(seen) == STEPS
    assert all(torch.equal(a, b) for a, b in zip(plain.state_dict().values(), model.state_dict().values(), strict=True))


def test_a_schedule_that_was_made_before(tmp_path: Path) -> None:
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    strategy = STRATEGIES["flat"](seed=7, ledger=str(tmp_path / "ledger.jsonl"))
    for _ in PrivateLoop(model, optimizer, loader(), strategy, loss, 3):
        schedule.step()
    assert optimizer.param_groups[0]["lr"] == 0.05 / 8


def test_it_stops_where_the_budget_is_spent(tmp_path: Path) -> None:
    strategy = DPSGD(noise_multiplier=1.1, target_epsilon=1.5, delta=1e-3, ledger=str(tmp_path / "l.jsonl"))
    with pytest.warns(UserWarning, match=r"stopped after \d+ of 1000 steps"):
        by_loop(strategy, steps=1000)
    assert 1 <= strategy.releases < 1000 and strategy.epsilon() <= 1.5
    with pytest.raises(BudgetExhausted):
        by_loop(DPSGD(noise_multiplier=0.1, target_epsilon=0.01, delta=1e-3, ledger=str(tmp_path / "m.jsonl")))


@pytest.mark.slow
def test_epsilon_is_by_the_accountant_of_the_budget(tmp_path: Path) -> None:
    options: dict[str, Any] = {"target_epsilon": 2.0, "delta": 1e-3, "accountant": "pld", "seed": 1}
    one, two = (DPSGD(**options, ledger=str(tmp_path / name)) for name in ("a.jsonl", "b.jsonl"))
    log = CSVLogger(tmp_path)
    trainer = pl.Trainer(
        max_steps=10,
        log_every_n_steps=3,
        callbacks=[one],
        logger=log,
        accelerator="cpu",
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    trainer.fit(Module(), loader())
    training = PrivateLoop(model := network(), torch.optim.SGD(model.parameters(), 0.1), loader(), two, loss, 10)
    assert len(list(training)) == 10
    logged = pd.read_csv(Path(log.log_dir) / "metrics.csv")["privacy/epsilon"].dropna()
    shown = trainer.progress_bar_metrics["privacy/epsilon"]
    for spent in (one.epsilon(), training.epsilon(), two.epsilon(), logged.iloc[-1], shown):
        assert 2.0 * (1 - 1e-4) < spent <= 2.0 * (1 + 1e-6)
    assert one.epsilon("rdp") > 2.5


def test_a_slow_accountant_is_logged_less_often() -> None:
    quick, slow = Budget(None, 1e-5, "rdp"), Budget(None, 1e-5, "pld")
    for interval in (1, 10, 50):
        points = [n for n in range(interval, 20_000, interval) if slow.is_worth_logging(n, n - interval)]
        assert len(points) < 50 and points[0] == interval
        for before, after in pairwise(points):
            assert after <= max(1.6 * before, before + interval)
        assert all(quick.is_worth_logging(n, n - interval) for n in range(interval, 2000, interval))


@pytest.mark.filterwarnings("default:a noise multiplier of")
def test_noise_that_protects_nobody_is_named(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"a noise multiplier of 1e-09 protects no example: .* epsilon=5e\+17"):
        by_loop(DPSGD(noise_multiplier=1e-9, ledger=str(tmp_path / "a.jsonl")), steps=2)


def test_leaving_the_loop_gives_everything_back(tmp_path: Path) -> None:
    strategy, model, lots = DPSGD(noise_multiplier=1.0, ledger=str(tmp_path / "l.jsonl")), network(), loader()
    training = PrivateLoop(model, torch.optim.SGD(model.parameters(), 0.1), lots, strategy, loss, STEPS)
    for step in training:
        if step == 3:
            break
    assert not any(module._forward_hooks for module in model.modules()) and not lots.lots.in_use
    assert len(read_ledger(tmp_path / "l.jsonl").releases) == 3 and math.isfinite(training.epsilon())
    with pytest.raises(ConfigurationError, match="has trained already"):
        next(iter(training))
    with pytest.raises(LedgerError):  # the ledger of another training
        by_loop(DPSGD(noise_multiplier=1.0, ledger=str(tmp_path / "l.jsonl")))


class Queue:
    """A loss that remembers earlier lots."""

    def __init__(self) -> None:
        self.last = torch.zeros(6)

    def __call__(self, model: Any, batch: Any) -> Tensor:
        shifted = batch[0] + self.last
        self.last = batch[0].mean(0).detach() if len(batch[0]) else self.last
        return F.cross_entropy(model(shifted), batch[1])


class Statistics(nn.Linear):
    def __init__(self) -> None:
        super().__init__(6, 2)
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        self.mean += x.detach().mean(0)  # type: ignore[operator]
        return super().forward(x)


@pytest.mark.parametrize(
    ("own", "error", "message"),
    [
        ({"loss": Queue().__call__}, UnsupportedModuleError, "records of an earlier batch"),
        ({"loss": lambda m, b: None}, ConfigurationError, "gave a NoneType"),
        ({"model": nn.Sequential(nn.Linear(6, 2), nn.BatchNorm1d(2))}, UnsupportedModuleError, "BatchNorm"),
        ({"model": Statistics()}, UnsupportedModuleError, "the forward pass changes"),
    ],
    ids=["queue", "none", "batchnorm", "statistics"],
)
def test_records_are_checked_as_in_a_trainer(
    own: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        by_loop(DPSGD(noise_multiplier=1.0, ledger=str(tmp_path / "l.jsonl")), **own)


def counting() -> Callable[[Any, Any], Tensor]:
    center = torch.zeros(6)

    def count(model: Any, batch: Any) -> Tensor:
        nonlocal center
        center = 0.5 * center + batch[0].sum(0)
        return F.cross_entropy(model(batch[0] - center), batch[1])

    return count


def decorated() -> Callable[[Any, Any], Tensor]:
    inner = counting()
    return lambda model, batch: inner(model, batch)


def defaults(model: Any, batch: Any, kept: list[Any] = [0.0]) -> Tensor:  # noqa: B006 (it is the point)
    kept[0] = kept[0] + batch[0].sum(0)
    return F.cross_entropy(model(batch[0] - kept[0]), batch[1])


def stateful(kept: dict[str, Tensor], model: Any, batch: Any) -> Tensor:
    kept["c"] = kept["c"] + batch[0].sum(0)
    return F.cross_entropy(model(batch[0] - kept["c"]), batch[1])


def attribute(model: Any, batch: Any) -> Tensor:
    attribute.last = attribute.last + batch[0].sum(0)  # type: ignore[attr-defined]
    return F.cross_entropy(model(batch[0] - attribute.last), batch[1])  # type: ignore[attr-defined]


attribute.last = torch.zeros(6)  # type: ignore[attr-defined]
NUMBERS: list[float] = []


def reads(model: Any, batch: Any) -> Tensor:
    reads.last.append(float(batch[0].mean()))  # type: ignore[attr-defined]
    NUMBERS.extend(reads.last[:-1])  # type: ignore[attr-defined]
    return loss(model, batch)


reads.last = []  # type: ignore[attr-defined]


def backward(model: Any, batch: Any) -> Tensor:
    loss(model, batch).backward()
    return loss(model, batch)


@pytest.mark.parametrize(
    ("own", "error", "message"),
    [
        (counting(), UnsupportedModuleError, "records of an earlier batch"),
        (decorated(), UnsupportedModuleError, "records of an earlier batch"),
        (defaults, UnsupportedModuleError, "records of an earlier batch"),
        (partial(stateful, {"c": torch.zeros(6)}), UnsupportedModuleError, "records of an earlier batch"),
        (attribute, UnsupportedModuleError, "records of an earlier batch"),
        (backward, ConfigurationError, "leave backward"),
        (lambda m, b: loss(m, b).detach(), ConfigurationError, "has no gradient"),
    ],
    ids=["nonlocal", "decorated", "default", "partial", "attribute", "backward", "detached"],
)
def test_a_loss_cannot_carry_a_lot(own: Any, error: type[Exception], message: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=message):
        by_loop(DPSGD(noise_multiplier=1.0, ledger=str(tmp_path / "l.jsonl")), loss=own)


def test_attributes_of_a_loss_are_put_back(tmp_path: Path) -> None:
    by_loop(DPSGD(noise_multiplier=1.0, ledger=str(tmp_path / "l.jsonl")), loss=reads)
    assert not NUMBERS and not reads.last  # type: ignore[attr-defined]


def test_a_network_that_is_not_of_the_model_is_not_trained(tmp_path: Path) -> None:
    head = nn.Linear(2, 2)
    before = [parameter.clone() for parameter in head.parameters()]
    own = lambda m, b: F.cross_entropy(head(m(b[0])), b[1])  # noqa: E731
    by_loop(DPSGD(noise_multiplier=1.0, ledger=str(tmp_path / "l.jsonl")), loss=own)
    assert all(torch.equal(a, b) and b.grad is None for a, b in zip(before, head.parameters(), strict=True))


def test_harmless_losses_train(tmp_path: Path) -> None:
    teacher = nn.Linear(6, 2).requires_grad_(False)

    def distilled(model: Any, batch: Any, *, weight: float = 0.5) -> Tensor:
        counted = 0

        def count() -> None:
            nonlocal counted
            counted += 1

        count()
        return loss(model, batch) + weight * F.mse_loss(model(batch[0]), later(batch[0]))

    strategy = DPSGD(noise_multiplier=1.0, ledger=str(tmp_path / "l.jsonl"))
    model = network()
    training = PrivateLoop(model, torch.optim.SGD(model.parameters(), 0.1), loader(), strategy, distilled, 3)
    later = teacher
    assert list(training) == [1, 2, 3]


def test_two_trainings_do_not_share_a_loader(tmp_path: Path) -> None:
    def started(name: str, lots: LotLoader) -> tuple[Any, DPSGD]:
        model, strategy = network(), DPSGD(noise_multiplier=1.0, ledger=str(tmp_path / name))
        return iter(PrivateLoop(model, torch.optim.SGD(model.parameters(), 0.1), lots, strategy, loss, 5)), strategy

    shared = loader()
    one, _ = started("a", shared)
    two, refused = started("b", shared)
    assert next(one) == 1
    with pytest.raises(ConfigurationError, match="in use by another training"):
        next(two)
    assert list(one) == [2, 3, 4, 5] and not refused.releases and not (tmp_path / "b").exists()


def test_the_body_of_the_loop_takes_no_lots_and_replaces_no_parameter_alone(tmp_path: Path) -> None:
    def replace(model: Any, lots: LotLoader) -> None:
        model[0].weight = nn.Parameter(torch.zeros(8, 6))

    def take(model: Any, lots: LotLoader) -> None:
        next(iter(lots))

    acts = ((replace, "updates trainable parameters to which nothing is released"), (take, "iterated elsewhere"))
    for number, (act, message) in enumerate(acts):
        model, strategy = network(), DPSGD(noise_multiplier=1.0, ledger=str(tmp_path / str(number)))
        lots = LotLoader(data(), Lots(make_sampling("fixed_size", 120, 12), None))
        training = iter(PrivateLoop(model, torch.optim.SGD(model.parameters(), 0.1), lots, strategy, loss, 5))
        assert next(training) == 1
        act(model, lots)
        with pytest.raises(ConfigurationError, match=message):
            list(training)
        assert strategy.releases == 1 and not lots.lots.in_use


def test_a_second_step_is_refused(tmp_path: Path) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    strategy = DPSGD(noise_multiplier=1.0, ledger=str(tmp_path / "l.jsonl"))
    training = iter(PrivateLoop(model, optimizer, loader(), strategy, loss, 3))
    assert next(training) == 1
    with pytest.raises(ConfigurationError, match="stepped twice"):
        optimizer.step()
    training.close()  # type: ignore[attr-defined]
    optimizer.step()


def test_a_trainer_takes_no_lots_of_a_loop(tmp_path: Path) -> None:
    lots, options = loader(), {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    model = network()
    strategy = DPSGD(noise_multiplier=1.0, ledger=str(tmp_path / "loop.jsonl"))
    training = iter(PrivateLoop(model, torch.optim.SGD(model.parameters(), 0.1), lots, strategy, loss, 3))
    next(training)
    for callback in (DPSGD(noise_multiplier=1.0, ledger=str(tmp_path / "trainer.jsonl")), NonPrivate()):
        trainer = pl.Trainer(max_steps=2, callbacks=[callback], accelerator="cpu", **options)  # type: ignore[arg-type]
        with pytest.raises(ConfigurationError, match="in use by another training"):
            trainer.fit(Module(), lots)
    assert next(training) == 2


@pytest.mark.parametrize("error", [ValueError("broken"), KeyboardInterrupt()])
@pytest.mark.parametrize("private", [True, False])
def test_lots_are_free_after_an_error(private: bool, error: BaseException, tmp_path: Path) -> None:
    class Broken(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            raise error

    lots = loader()
    for number, module in enumerate((Broken(), Module())):
        callback = DPSGD(noise_multiplier=1.0, ledger=str(tmp_path / f"{number}.jsonl")) if private else NonPrivate()
        trainer = pl.Trainer(
            max_steps=2, callbacks=[callback], accelerator="cpu", logger=False, enable_progress_bar=False,
            enable_checkpointing=False,
        )  # fmt: skip
        if number:
            trainer.fit(module, lots)
        else:
            with pytest.raises((ValueError, KeyboardInterrupt, SystemExit)):
                trainer.fit(module, lots)
        assert not lots.lots.in_use


def test_a_later_evaluation_gives_back_no_lots_of_another(tmp_path: Path) -> None:
    lots, strategy = loader(), DPSGD(noise_multiplier=1.0, ledger=str(tmp_path / "trainer.jsonl"))
    options: Any = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    trainer = pl.Trainer(max_steps=2, callbacks=[strategy], accelerator="cpu", logger=False, **options)
    trainer.fit(Module(), lots)
    model, other = network(), DPSGD(noise_multiplier=1.0, ledger=str(tmp_path / "loop.jsonl"))
    training = iter(PrivateLoop(model, torch.optim.SGD(model.parameters(), 0.1), lots, other, loss, 3))
    next(training)
    strategy.teardown(trainer, Module(), "validate")
    assert lots.lots.in_use and next(training) == 2


def test_two_that_share_noise_or_lots_have_no_epsilon_together(tmp_path: Path) -> None:
    """The ledgers of the same releases compose, counted twice; others of the same seed do not."""

    def train(name: str, seed: int | None, lots: int | None, weights: int = 0, z: float = 1.0) -> Path:
        model = network(weights)
        optimizer, ledger = torch.optim.SGD(model.parameters(), 0.1), tmp_path / f"{name}.jsonl"
        strategy = DPSGD(noise_multiplier=z, seed=seed, ledger=str(ledger))
        list(PrivateLoop(model, optimizer, LotLoader.poisson(data(), 12, seed=lots), strategy, loss, 3))
        return ledger

    first = train("first", seed=7, lots=5)
    one = account([first], AccountingRequest(delta=1e-3)).facts["epsilon"]
    for other in (train("same", 7, 5), train("other", 8, 6, 1), train("secure", None, None, 1)):
        assert account([first, other], AccountingRequest(delta=1e-3)).facts["epsilon"] > one
    for what, other in (
        ("noise", train("noise", seed=7, lots=6, weights=1)),
        ("lots", train("lots", seed=8, lots=5, weights=1)),
        ("lots", train("scaled", seed=7, lots=5, weights=1, z=2.0)),  # noise of another mechanism is other noise
    ):
        with pytest.raises(LedgerError, match=f"drew their {what} from one seed"):
            account([first, other], AccountingRequest(delta=1e-3))


def test_what_needs_a_trainer_is_refused(tmp_path: Path) -> None:
    model, ledger = network(), str(tmp_path / "l.jsonl")
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    private = DPSGD(noise_multiplier=1.0, ledger=ledger)
    refused: list[tuple[Any, ...]] = [
        ("set the path of the ledger", model, sgd, loader(), DPSGD(noise_multiplier=1.0)),
        ("is not a private strategy", model, sgd, loader(), NonPrivate()),
        ("not a Module", Module(), sgd, loader(), private),
        ("is unknown", model, sgd, torch.utils.data.DataLoader(data(), 12), private),
    ]
    for message, *parts in refused:
        with pytest.raises(ConfigurationError, match=message):
            PrivateLoop(*parts, loss, 5)
    later: list[tuple[str, type[PrivateStrategy], dict[str, Any]]] = [
        ("the module offers no metric loss", DPSGD, {"metrics": {"loss": 1.0}}),
        ("set initial_max_grad_norm", AdaptiveMeanClipping, {}),
    ]
    for message, kind, options in later:
        strategy = kind(noise_multiplier=1.0, ledger=str(tmp_path / "later.jsonl"), **options)
        with pytest.raises(ConfigurationError, match=message):
            list(PrivateLoop(model, sgd, loader(), strategy, loss, 5))
    for steps in (0, 2.5, True, "3"):
        with pytest.raises(ConfigurationError, match="from 1 on"):
            PrivateLoop(model, sgd, loader(), private, loss, steps)  # type: ignore[arg-type]
    part = torch.optim.SGD(list(model.parameters())[:2], 0.1)
    with pytest.raises(ConfigurationError, match="does not update"):
        list(PrivateLoop(model, part, loader(), private, loss, 5))
    with pytest.raises(ConfigurationError, match="scales the loss"), torch.autocast("cpu", torch.float16):
        list(PrivateLoop(model, sgd, loader(), DPSGD(noise_multiplier=1.0, ledger=str(tmp_path / "h")), loss, 5))
