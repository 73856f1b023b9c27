"""Which method computes the gradients is found out on the first lot with records, before anything is released."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dpbench.callback.lightning_training import LightningTraining
from dpbench.data.lots import LotLoader, Lots, make_sampling
from dpbench.errors import UnsupportedModuleError
from dpbench.privacy.accounting.ledger import read_ledger
from dpbench.strategies import DPSGD, AdaptiveMeanClipping, ClipOnly
from tests.strategies.worlds import loader_of, trainer_for
from tests.support.one_by_one import (
    NETWORKS,
    Largest,
    Module,
    assert_releases_autograd,
    cross_entropy,
    data,
    fit,
    loop_of,
    pairs,
    plain,
    used,
)

BOUND = 0.3
ALONE = ("routing", "gradient penalty")
REFUSED = {
    "routing": "records are combined",
}


@pytest.mark.parametrize("name", NETWORKS)
def test_each_network_trains_and_is_right(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(LightningTraining, "inform", lambda self, text: lines.append(text))
    make, step = NETWORKS[name]
    torch.manual_seed(1)
    strategy = ClipOnly(max_grad_norm=BOUND)
    assert_releases_autograd(tmp_path, make(), step, strategy)
    is_known = name not in ALONE
    assert used(strategy) == ("engine" if is_known else "one_by_one")
    said = [line for line in lines if "gradients=auto" in line]
    assert len(said) == int(not is_known) and not any("off by" in line for line in said)


class Scaled(nn.Module):
    """A parameter of its own beside dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(6))
        self.dropout = nn.Dropout(0.2)
        self.out = nn.Linear(30, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.dropout(x * self.scale).flatten(1))


def test_own_parameters_beside_random_layers_stay_with_the_engine(tmp_path: Path) -> None:
    torch.manual_seed(1)
    strategy, _, _ = fit(tmp_path, Scaled(), gradients="auto")
    assert used(strategy) == "engine"


def test_a_loop_says_so_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where users see it: on Lightning's logger, whose level is INFO."""
    said: list[str] = []
    monkeypatch.setattr("dpbench.callback.loop.log_line", said.append)
    torch.manual_seed(1)
    make, step = NETWORKS["routing"]
    list(loop_of(tmp_path, make(), step, gradients="auto"))
    assert any(line.startswith("gradients=auto: record by record") for line in said)


class WithNoise(Module):
    def noise_batch(self, size: int, generator: torch.Generator) -> Any:
        return torch.randn(size, 5, 6, generator=generator), torch.arange(size) % 4


@pytest.mark.usefixtures("one_key")
@pytest.mark.parametrize("name", NETWORKS)
def test_first_bounds_on_noise_are_those_of_autograd(tmp_path: Path, name: str) -> None:
    """They are found before the first lot, and so before the method is chosen."""
    make, step = NETWORKS[name]
    bounds = []
    for gradients in ("one_by_one", "auto"):
        torch.manual_seed(1)
        ledger = str(tmp_path / gradients / "ledger.jsonl")
        strategy = AdaptiveMeanClipping(noise_multiplier=1.0, delta=1e-3, seed=1, gradients=gradients, ledger=ledger)
        trainer_for(tmp_path / gradients, strategy, 1).fit(WithNoise(make(), step), loader_of(data(40), 10))
        bounds.append([group.max_grad_norm for group in strategy.mechanism.training_plan.groups])
    assert min(bounds[0]) > 1e-3
    assert bounds[1] == pytest.approx(bounds[0], rel=1e-3)


def test_the_engine_alone_finds_no_bounds_of_what_it_does_not_know(tmp_path: Path) -> None:
    make, step = NETWORKS["lists and dictionaries"]
    strategy = AdaptiveMeanClipping(
        noise_multiplier=1.0,
        delta=1e-3,
        gradients="engine",
        ledger=str(tmp_path / "ledger.jsonl"),
    )
    with pytest.raises(UnsupportedModuleError, match="where no hook sees it"):
        trainer_for(tmp_path, strategy, 1).fit(WithNoise(make(), step), loader_of(data(40), 10))


@pytest.mark.parametrize("name", REFUSED)
def test_the_engine_alone_refuses(tmp_path: Path, name: str) -> None:
    make, step = NETWORKS[name]
    torch.manual_seed(1)
    with pytest.raises(UnsupportedModuleError, match=REFUSED[name]):
        fit(tmp_path, make(), step=step, gradients="engine", loader=loader_of(data(40), 10))
    path = tmp_path / "ledger.jsonl"
    assert not path.exists() or not read_ledger(path).releases


@pytest.mark.usefixtures("one_key")
def test_it_is_the_engine_to_the_bit(tmp_path: Path) -> None:
    """Where the engine knows the network: the trial leaves no trace, dropout included."""
    weights = []
    for gradients in ("engine", "auto"):
        torch.manual_seed(1)
        net = nn.Sequential(nn.Flatten(), nn.Dropout(0.2), nn.Linear(30, 4))
        strategy, released, _ = fit(tmp_path / gradients, net, gradients=gradients)
        weights.append(released)
    assert torch.equal(weights[0], weights[1]) and used(strategy) == "engine"


class Centred(nn.Module):
    """The mean over positions of an embedding that all records share: handed on for each, it is one over records."""

    def __init__(self, positions: int) -> None:
        super().__init__()
        self.table = nn.Embedding(positions, 6)
        self.out = nn.Linear(30, 4)
        self.positions = positions

    def forward(self, x: Tensor) -> Tensor:
        return self.out((x + self.table(torch.arange(self.positions)).mean(0)).flatten(1))


@pytest.mark.parametrize("positions", [4, 5, 7, 12])
def test_positions_as_many_as_records(tmp_path: Path, positions: int) -> None:
    for gradients in ("auto", "engine"):
        torch.manual_seed(1)
        strategy = ClipOnly(max_grad_norm=BOUND, gradients=gradients)  # type: ignore[arg-type]
        assert_releases_autograd(tmp_path / gradients, Centred(positions), cross_entropy, strategy)
        assert used(strategy) == "engine"


class Positions(nn.Embedding):
    """Looks only at the shape of what it is given."""

    def forward(self, x: Tensor) -> Tensor:
        return F.embedding(torch.arange(x.shape[1]), self.weight)


class Positioned(nn.Module):
    """Positions that are given the records, and return what all share."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = Positions(5, 6)
        self.out = nn.Linear(30, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out((x + self.positions(x)).flatten(1))


def test_a_layer_is_shared_by_what_it_returns(tmp_path: Path) -> None:
    torch.manual_seed(1)
    strategy = ClipOnly(max_grad_norm=BOUND)
    assert_releases_autograd(tmp_path, nn.Sequential(Positioned()), cross_entropy, strategy)
    assert used(strategy) == "engine"


class Masked(nn.Module):
    """Attention under a mask of each record's own, over positions that all share."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Embedding(5, 6)
        layer = nn.TransformerEncoderLayer(6, 2, 12, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1)
        self.out = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = x[..., 0] > 0.5
        hidden = hidden & (torch.arange(5) > 0)
        return self.out(self.encoder(x + self.positions(torch.arange(5)), src_key_padding_mask=hidden)[:, 0])


def test_attention_under_a_mask_stays_with_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In each batch: the gradient of attention is looked at where the input of a layer is public."""
    lines: list[str] = []
    monkeypatch.setattr(LightningTraining, "inform", lambda self, text: lines.append(text))
    torch.manual_seed(1)
    strategy, _, _ = fit(tmp_path, Masked(), gradients="auto")
    assert used(strategy) == "engine" and not lines


def test_a_first_lot_of_which_nothing_can_be_said(tmp_path: Path) -> None:
    """No record of it has a finite gradient: the engine is tried again on the next one."""
    lots = iter(range(10**6))

    class Diverging(Module):
        lot = 0

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.lot = next(lots)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            return loss * float("nan") if self.lot < 2 else loss

    class First(pl.Callback):
        """Before the strategy opens a lot, the module knows which it is."""

        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            module.lot = batch_idx

    torch.manual_seed(1)
    make, step = NETWORKS["routing"]
    strategy = DPSGD(noise_multiplier=1.0, delta=1e-3, seed=1, ledger=str(tmp_path / "ledger.jsonl"))
    trainer = trainer_for(tmp_path, First(), 6, more=[strategy])
    with pytest.warns(UserWarning, match="no record of a batch has a finite gradient"):
        trainer.fit(Diverging(make(), step), loader_of(data(40), 10))
    assert used(strategy) == "one_by_one" and strategy.releases == 6


@pytest.mark.parametrize(("net", "step"), [(Largest, cross_entropy), (plain, pairs)])
def test_what_mixes_records_is_run_record_by_record(tmp_path: Path, net: Any, step: Any) -> None:
    torch.manual_seed(1)
    strategy, _, _ = fit(tmp_path, net(), step=step, gradients="auto", loader=loader_of(data(40), 10))
    assert used(strategy) == "one_by_one"


def test_statistics_of_batches_stay_refused(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(30))
    with pytest.raises(UnsupportedModuleError, match="mixes the records"):
        fit(tmp_path, net, step=cross_entropy, gradients="auto", loader=loader_of(data(40), 10))


def test_mixing_beside_a_limit_of_the_engine(tmp_path: Path) -> None:

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scales = nn.ParameterList([nn.Parameter(torch.ones(30))])
            self.out = nn.Linear(30, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = x.flatten(1)
            return self.out((x - x.mean(0)) * self.scales[0])

    torch.manual_seed(1)
    strategy, _, _ = fit(tmp_path, Both(), gradients="auto", loader=loader_of(data(40), 10))
    assert used(strategy) == "one_by_one"


def test_first_lots_without_records_and_of_one(tmp_path: Path) -> None:
    make, _ = NETWORKS["routing"]
    torch.manual_seed(1)
    strategy, weights, _ = fit(tmp_path, make(), steps=12, gradients="auto", loader=loader_of(data(40), 1))
    assert weights.isfinite().all() and used(strategy) == "one_by_one"
    assert len(read_ledger(tmp_path / "ledger.jsonl").releases) == 12


def test_an_interrupted_run_goes_on_by_the_same_method(tmp_path: Path) -> None:
    def net() -> nn.Module:
        torch.manual_seed(1)
        return NETWORKS["routing"][0]()

    _, whole, _ = fit(tmp_path / "whole", net(), steps=8, gradients="auto")
    _, _, half = fit(tmp_path / "half", net(), steps=4, gradients="auto")
    half.save_checkpoint(tmp_path / "half.ckpt")
    strategy, resumed, _ = fit(tmp_path / "half", net(), steps=8, gradients="auto", start=tmp_path / "half.ckpt")
    assert torch.equal(whole, resumed) and used(strategy) == "one_by_one"


def test_a_step_that_fails_says_so_itself(tmp_path: Path) -> None:
    def broken(net: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(net(batch[0]), batch[2])

    with pytest.raises(IndexError):
        fit(tmp_path, plain(), step=broken, gradients="auto")


def test_logs_and_states_of_the_trial(tmp_path: Path) -> None:
    """Nothing of it is logged, and the module is as it was."""
    calls: list[str] = []

    class Logging(Module):
        def __init__(self, net: nn.Module) -> None:
            super().__init__(net, cross_entropy)
            self.seen = 0.0

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.log("train/loss", 1.0)
            self.seen += 0.5
            if len(batch[0]) == 12:
                calls.append("whole")
            return super().training_step(batch, batch_idx)

    class Seen(Logging):
        def on_before_zero_grad(self, optimizer: Any) -> None:
            calls.append(str(self.seen))

    strategy = ClipOnly(max_grad_norm=BOUND)
    loader = LotLoader(data(), Lots(make_sampling("full", 12, 12), None))
    trainer_for(tmp_path, strategy, 1).fit(Seen(plain()), loader)
    assert [call for call in calls if call != "whole"] == ["0.5"]
