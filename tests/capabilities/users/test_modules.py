"""Local training of modules as people write them: logs, hooks, metrics, precisions, errors; and what is left of it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
import torchmetrics
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Subset

import dpbench
from dpbench.capabilities.users.dataset import UserDataset
from dpbench.data.lots import LotLoader
from dpbench.errors import ConfigurationError
from dpbench.records import LocalTraining, Users
from dpbench.strategies import DPSGD, AdaptiveMeanClipping, ClipOnly, FederatedAveraging
from tests.capabilities.users.worlds import SIZES, WIDTH, Toy, fit, linear, loader_of, make_users, naive_training
from tests.strategies.worlds import trainer_for, weights_of

LOCAL = LocalTraining(lr=0.1, batch_size=2, epochs=2)


def trained(folder: Path, module: Toy, **options: Any) -> Tensor:
    fit(folder, module, **{"steps": 3, "local": LOCAL, "make": ClipOnly, **options})
    return weights_of(module)


@pytest.fixture
def plain(tmp_path_factory: pytest.TempPathFactory) -> Tensor:
    """Weights of the plain module after the same training."""
    return trained(tmp_path_factory.mktemp("plain"), Toy(linear()))


# ----------------------------------------------------------------------------------------- accepted


class OneArgument(Toy):
    def training_step(self, batch: Any) -> Tensor:  # type: ignore[override]
        return self.loss(batch)


class ADictionary(Toy):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": self.loss(batch), "more": 3}


class Checkpointed(Toy):
    def loss(self, batch: Any) -> Tensor:
        outputs = checkpoint(self.net, batch[0], use_reentrant=False)
        return (outputs.flatten(1).mean(1) - batch[1]).square().mean()


class Measures(Toy):
    """Logs in every way, and updates a metric."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__(net)
        self.error = torchmetrics.MeanSquaredError()
        self.seen: list[tuple[float, int]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.error(self.net(batch[0]).squeeze(1), batch[1])
        self.log("train/error", self.error, on_step=False, on_epoch=True)
        self.log("train/loss", loss, True, sync_dist=True, on_epoch=True, on_step=True)
        self.log_dict(dictionary={"a": loss, "b": float(loss.detach())}, on_epoch=True)
        self.log(name="examples", value=np.float32(len(batch[0])))
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        logged = self.trainer.callback_metrics
        self.seen.append((float(logged["examples"]), int(self.error.total)))


class ReadsTheTrainer(Toy):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        assert self.trainer.datamodule is None and self.trainer.max_steps == 3
        assert self.optimizers().param_groups[0]["lr"] == 1.0
        return self.loss(batch)


@dpbench.independent("calls")
class Transfers(Toy):
    """Moves batches itself: each local batch passes the hooks, a cohort does not."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__(net)
        self.calls: list[str] = []

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        assert isinstance(batch, list | tuple) and len(batch) == 2
        self.calls.append("before")
        return [batch[0] * 2, batch[1]]

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.calls.append("after")
        return [batch[0] / 2, batch[1]]


class Compiled(Toy):
    def __init__(self, net: nn.Module) -> None:
        super().__init__(torch.compile(net, backend="eager"))


ACCEPTED = [OneArgument, ADictionary, Checkpointed, Measures, ReadsTheTrainer, Transfers, Compiled]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("kind", ACCEPTED, ids=lambda kind: kind.__name__)
def test_it_trains_as_the_plain_module(tmp_path: Path, kind: Callable[..., Toy], plain: Tensor) -> None:
    module = kind(linear())
    torch.testing.assert_close(trained(tmp_path, module), plain)
    if isinstance(module, Transfers):
        assert set(module.calls) == {"before", "after"} and "on_after_batch_transfer" not in module.__dict__


def test_a_round_logs_means_over_its_local_steps(tmp_path: Path) -> None:
    """Also where a lot is checked by training a user once more."""
    module, users = Measures(linear()), make_users([3, 4, 2])
    loader = loader_of(users, 3)
    trained(tmp_path, module, users=users, loader=loader, steps=2, local=LocalTraining(lr=0.1, batch_size=2))
    assert module.seen[0] == (pytest.approx((2 + 1 + 2 + 2 + 2) / 5), 3 + 4 + 2)


def test_autocast_sees_the_weights_of_each_step(tmp_path: Path) -> None:
    """An autocast may remember casts of weights, and a round of local training is within one."""
    options = {"local": LocalTraining(lr=0.3, batch_size=1, epochs=4), "max_grad_norm": 100.0, "steps": 1}
    exact = trained(tmp_path / "a", Toy(linear()), **options)
    mixed = trained(tmp_path / "b", Toy(linear()), trainer={"precision": "bf16-mixed"}, **options)
    moved = exact - weights_of(linear())
    assert (mixed - exact).norm() < 0.03 * moved.norm()


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "64-true"])
def test_precisions(tmp_path: Path, precision: str) -> None:
    assert trained(tmp_path, Toy(linear()), trainer={"precision": precision}).isfinite().all()


def test_first_bounds_from_noise(tmp_path: Path) -> None:
    class Source(OneArgument):
        def noise_batch(self, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
            return torch.randn(size, WIDTH, generator=generator), torch.randn(size, generator=generator)

    bounds = []
    for local in (LOCAL, LocalTraining(lr=0.2, batch_size=2, epochs=2)):
        strategy = fit(tmp_path / str(local.lr), Source(linear()), steps=1, local=local, make=AdaptiveMeanClipping)
        bounds.append(strategy.mechanism.training_plan.groups[0].max_grad_norm)
    assert 1.3 < bounds[1] / bounds[0] < 2.5  # of updates, which grow with the local lr
    with pytest.raises(ConfigurationError, match="give the data module"):
        fit(tmp_path / "none", Toy(linear()), steps=1, make=AdaptiveMeanClipping)


def test_private_metrics_are_of_users(tmp_path: Path) -> None:
    """The mean of a user's first local batch, before its training."""

    class Offers(Toy):
        record_metrics = {"big": 1, "pair": 2}  # noqa: RUF012

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            big = (batch[1] > 0).float()
            return {"loss": self.loss(batch), "record_metrics": {"big": big, "pair": torch.stack([big, 1 - big], 1)}}

    users = make_users([8, 0, 6, 5])
    options = {"metrics": {"big": 1.0, "pair": 1.0}, "metrics_share": 0.5, "noise_multiplier": 1e-6}
    strategy = fit(
        tmp_path, Offers(linear()), loader=loader_of(users, 4), steps=1, local=LocalTraining(batch_size=None), **options
    )
    shares = [float((users.batch(user, range(size))[1] > 0).float().mean()) for user, size in ((0, 8), (2, 6), (3, 5))]
    assert strategy.mechanism.metrics["private/big"] == pytest.approx(sum(shares) / 4, abs=1e-4)


def test_one_strategy_fits_twice(tmp_path: Path, plain: Tensor) -> None:
    source = Users(LOCAL)
    for folder in "ab":
        strategy = ClipOnly(noise_multiplier=1.0, seed=0, records=source)
        module, loader = Toy(linear()), loader_of(make_users())
        trainer_for(tmp_path / folder, strategy, 3).fit(module, loader)
        assert torch.equal(weights_of(module), plain)
        copied = copy.deepcopy(module)
        trainer_for(tmp_path / f"{folder}2", strategy, 3).fit(copied, loader)
        assert strategy.releases == 3 and (weights_of(copied) - plain).norm() > 1e-3
        assert not {"training_step", "backward", "log"} & set(copied.__dict__)


@pytest.mark.parametrize("workers", [0, 2])
def test_loaders_of_torch_become_lots(tmp_path: Path, workers: int) -> None:
    users, module = make_users(), Toy(linear())
    loader = LotLoader.from_dataloader(DataLoader(users, batch_size=4, num_workers=workers), seed=0)
    assert loader.lots.sampling.unit == "user"
    torch.testing.assert_close(trained(tmp_path, module, loader=loader), trained(tmp_path / "b", Toy(linear())))


# ----------------------------------------------------------------------------------------- the server's weights


class Watches(pl.Callback):
    """The server's weights are what a lot began with, wherever a callback may look."""

    def __init__(self, place: Path) -> None:
        self.place, self.saved = place, 0

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        self.state = {name: x.clone() for name, x in pl_module.state_dict().items()}
        self.versions = [p._version for p in pl_module.parameters()]
        self.places = [p.data_ptr() for p in pl_module.parameters()]

    def on_before_backward(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        trainer.save_checkpoint(self.place)
        found = torch.load(self.place, weights_only=False)["state_dict"]
        assert all(torch.equal(found[name], x) for name, x in self.state.items())
        self.saved += 1

    def on_after_backward(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        assert all(torch.equal(pl_module.state_dict()[name], x) for name, x in self.state.items())
        assert self.versions == [p._version for p in pl_module.parameters()]
        assert self.places == [p.data_ptr() for p in pl_module.parameters()]
        assert all(p.grad is None for p in pl_module.parameters())


@pytest.mark.filterwarnings("ignore:Found 1 module")
def test_the_server_is_untouched_until_the_optimizers_step(tmp_path: Path) -> None:
    watches = Watches(tmp_path / "mid.ckpt")
    net = nn.Sequential(linear(), nn.BatchNorm1d(1).eval())
    net[1].train = lambda mode=True: net[1]  # type: ignore[method-assign]
    trained(tmp_path, Toy(net), trainer={"more": [watches]})
    assert watches.saved == 3


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_the_server_comes_back_after_an_error(tmp_path: Path, error: type[BaseException]) -> None:
    @dpbench.independent("calls")
    class Fails(Toy):
        calls = 0

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            type(self).calls += 1
            if self.calls == 2:
                self.log("x", 1.0)
                raise error
            return self.loss(batch)

    module = Fails(linear())
    with pytest.raises((error, SystemExit)):
        trained(tmp_path, module, steps=1)
    assert torch.equal(weights_of(module), weights_of(linear()))
    assert not {"training_step", "backward", "log", "log_dict"} & set(module.__dict__)


# ----------------------------------------------------------------------------------------- diverged users


class Logs(pl.Callback):
    def __init__(self) -> None:
        self.diverged: list[float] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.diverged.append(float(trainer.callback_metrics.get("nonprivate/diverged_users", 0)))


@pytest.mark.parametrize("make", [ClipOnly, FederatedAveraging, DPSGD])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e22])
def test_users_that_diverge_count_as_zero(tmp_path: Path, make: Any, bad: float) -> None:
    inputs = torch.randn(sum(SIZES), WIDTH, generator=torch.Generator().manual_seed(9))
    users = make_users(inputs=inputs)
    inputs[users.rows(3)[0]], inputs[users.rows(5)[-1]] = bad, bad
    rows = np.concatenate([users.rows(user) for user in range(len(SIZES)) if user not in (3, 5)])
    others = Subset(users.examples, rows.tolist())
    owner = [user for user in range(len(SIZES)) if user not in (3, 5) for _ in range(SIZES[user])]
    clean = UserDataset(others, owner, names=range(len(SIZES)))
    ends, logs = [], Logs()
    for data, more in ((users, [logs]), (clean, [])):
        torch.manual_seed(1)
        module, options = Toy(nn.Linear(WIDTH, 1)), {"loader": loader_of(data, len(SIZES)), "trainer": {"more": more}}
        context = pytest.warns(UserWarning, match="updates of some users are not finite") if more else None
        if context is None:
            trained(tmp_path / "clean", module, make=make, **options)
        else:
            with context:
                trained(tmp_path / "bad", module, make=make, **options)
        ends.append(weights_of(module))
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-5, atol=1e-6)
    assert logs.diverged == [2.0] * 3


def test_the_plain_module_is_the_slow_truth(plain: Tensor) -> None:
    wanted = naive_training(Toy(linear()), loader_of(make_users()), LOCAL, 3)
    torch.testing.assert_close(plain.double(), weights_of(wanted), rtol=1e-4, atol=1e-5)
