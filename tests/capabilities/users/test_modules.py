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
from torch.utils.data import DataLoader

import dpbench
from dpbench.data.loader import PrivateDataLoader
from dpbench.errors import ConfigurationError
from dpbench.records import LocalTraining
from dpbench.strategies import DPSGD, AdaptiveMeanClipping, ClipOnly, FederatedAveraging
from tests.capabilities.users.worlds import SIZES, WIDTH, Toy, fit, linear, loader_of, make_users
from tests.strategies.worlds import weights_of

LOCAL = LocalTraining(lr=0.1, batch_size=2, epochs=2)


def trained(folder: Path, module: Toy, **options: Any) -> Tensor:
    fit(folder, module, **{"steps": 3, "local": LOCAL, "make": ClipOnly, **options})
    return weights_of(module)


@pytest.fixture
def plain(tmp_path_factory: pytest.TempPathFactory) -> Tensor:
    """Weights of the plain module after the same training, without logs, hooks or metrics."""
    return trained(tmp_path_factory.mktemp("plain"), Toy(linear()))


# ----------------------------------------------------------------------------------------- accepted


class Measures(Toy):
    """Logs in every way, and updates a metric."""

    def __init__(self, net: nn.Module, momentum: float = 0.0) -> None:
        super().__init__(net, momentum)
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
        self.seen.append((float(logged.get("examples", 0)), int(self.error.total)))


@dpbench.independent("calls")
class Transfers(Toy):
    """Moves batches itself: each local batch passes the hooks, a cohort does not."""

    calls = 0

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        assert len(batch) == 2
        self.calls += 1
        return [batch[0] * 2, batch[1]]

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0] / 2, batch[1]]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("kind", [Measures, Transfers])
def test_it_trains_as_the_plain_module(tmp_path: Path, kind: Callable[..., Toy], plain: Tensor) -> None:
    module = kind(linear())
    torch.testing.assert_close(trained(tmp_path, module), plain)
    if isinstance(module, Transfers):
        assert module.calls and "on_after_batch_transfer" not in module.__dict__


def test_a_round_logs_means_over_its_local_steps(tmp_path: Path) -> None:
    """Also where a lot is checked by training a user once more."""
    module, loader = Measures(linear()), loader_of(make_users([3, 4, 2]), 3)
    trained(tmp_path, module, loader=loader, steps=1, local=LocalTraining(batch_size=2))
    assert module.seen == [(pytest.approx((2 + 1 + 2 + 2 + 2) / 5), 3 + 4 + 2)]


def test_autocast_sees_the_weights_of_each_step(tmp_path: Path) -> None:
    """An autocast may remember casts of weights, and a round of local training is within one."""
    options = {"local": LocalTraining(lr=0.3, batch_size=1, epochs=4), "max_grad_norm": 100.0, "steps": 1}
    exact = trained(tmp_path / "a", Toy(linear()), **options)
    mixed = trained(tmp_path / "b", Toy(linear()), trainer={"precision": "bf16-mixed"}, **options)
    assert (mixed - exact).norm() < 0.03 * (exact - weights_of(linear())).norm()


def test_first_bounds_from_noise(tmp_path: Path) -> None:
    class Source(Toy):
        def noise_batch(self, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
            return torch.randn(size, WIDTH, generator=generator), torch.randn(size, generator=generator)

    bounds = []
    for lr in (0.1, 0.2):
        local = LocalTraining(lr, batch_size=2, epochs=2)
        strategy = fit(tmp_path / str(lr), Source(linear()), steps=1, local=local, make=AdaptiveMeanClipping)
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
    local = LocalTraining(batch_size=None)
    strategy = fit(tmp_path, Offers(linear()), loader=loader_of(users, 4), steps=1, local=local, **options)
    shares = [float((users.batch(user, range(users.sizes[user]))[1] > 0).float().mean()) for user in (0, 2, 3)]
    assert strategy.mechanism.metrics["private/big"] == pytest.approx(sum(shares) / 4, abs=1e-4)


def test_loaders_of_torch_become_lots(tmp_path: Path, plain: Tensor) -> None:
    loader = PrivateDataLoader.from_dataloader(DataLoader(make_users(), batch_size=4, num_workers=1), seed=0)
    torch.testing.assert_close(trained(tmp_path, Toy(linear()), loader=loader), plain)


# ----------------------------------------------------------------------------------------- the server's weights


class Watches(pl.Callback):
    """The server's weights are what a lot began with, wherever a callback may look."""

    saved = 0

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        self.weights = weights_of(pl_module).clone()
        self.places = [(p.data_ptr(), p._version, None) for p in pl_module.parameters()]

    def on_after_backward(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        place = Path(trainer.default_root_dir, "mid.ckpt")
        trainer.save_checkpoint(place)
        saved = torch.load(place, weights_only=False)["state_dict"]
        assert torch.equal(torch.cat([x.flatten() for x in saved.values()]), self.weights)
        assert torch.equal(weights_of(pl_module), self.weights)
        assert self.places == [(p.data_ptr(), p._version, p.grad) for p in pl_module.parameters()]
        self.saved += 1


def test_the_server_is_untouched_until_the_optimizers_step(tmp_path: Path) -> None:
    watches = Watches()
    trained(tmp_path, Toy(linear()), trainer={"more": [watches]})
    assert watches.saved == 3


def test_the_server_comes_back_after_an_error(tmp_path: Path) -> None:
    @dpbench.independent("calls")
    class Fails(Toy):
        calls = 0

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            type(self).calls += 1
            if self.calls == 2:
                self.log("x", 1.0)
                raise KeyboardInterrupt
            return self.loss(batch)

    module = Fails(linear())
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        trained(tmp_path, module, steps=1)
    assert torch.equal(weights_of(module), weights_of(linear()))
    assert not {"training_step", "backward", "log", "log_dict"} & set(module.__dict__)


# ----------------------------------------------------------------------------------------- diverged users


@pytest.mark.parametrize(("make", "bad"), [(FederatedAveraging, float("inf")), (DPSGD, 1e22)])
def test_users_that_diverge_count_as_zero(tmp_path: Path, make: Any, bad: float) -> None:
    users = make_users()
    inputs = users.examples.tensors[0]  # type: ignore[attr-defined]
    inputs[users.rows(3)[0]], inputs[users.rows(5)[-1]] = bad, bad
    own = users.rows
    options = {"make": make, "steps": 1, "loader": loader_of(users, len(SIZES))}
    module = Toy(nn.Linear(WIDTH, 1))
    same = copy.deepcopy(module)
    with pytest.warns(UserWarning, match="updates of some users are not finite"):
        bad = trained(tmp_path / "bad", module, **options)
    assert float(module.trainer.callback_metrics["nonprivate/diverged_users"]) == 2
    users.rows = lambda user: own(2 if user in (3, 5) else user)  # type: ignore[method-assign]  # who has no example
    torch.testing.assert_close(bad, trained(tmp_path / "clean", same, **options), rtol=1e-5, atol=1e-6)
