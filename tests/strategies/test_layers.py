"""Recurrent layers, attention and transformers, trained privately: a record moves what is released by its bound."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from dpbench.errors import ConfigurationError, UnsupportedModuleError
from dpbench.privacy.mechanism.noise import grid_spacing
from dpbench.strategies import DPSGD
from tests.strategies.worlds import loader_of, trainer_for, weights_of

pytestmark = [
    pytest.mark.filterwarnings("ignore:enable_nested_tensor is True"),
    pytest.mark.filterwarnings("ignore:Found 4 module.* in eval mode"),  # Lightning's advice; here it is intended
    pytest.mark.filterwarnings("ignore:You defined a `validation_step`"),
]
SIZE, BOUND = 24, 0.5


class LastState(nn.Module):
    """The last state of a recurrent layer."""

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        states = self.layer(x if self.layer.batch_first else x.transpose(0, 1))[1]
        return (states[0] if isinstance(states, tuple) else states)[-1]


class SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.MultiheadAttention(4, 2, batch_first=True, dropout=0.2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, x, x, need_weights=False)[0].mean(1)


class SequenceFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 6, dropout=0.1), 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.transpose(0, 1)).mean(0)


NETWORKS = {
    "lstm": lambda: LastState(nn.LSTM(4, 4, num_layers=2, dropout=0.2, batch_first=True)),
    "gru": lambda: LastState(nn.GRU(4, 4, bidirectional=True)),
    "rnn": lambda: LastState(nn.RNN(4, 4, batch_first=True)),
    "attention": SelfAttention,
    "transformer": SequenceFirst,
}


class Weighted(pl.LightningModule):
    """The loss of a record counts with a weight: one of weight zero might as well not be there."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net, self.head = net, nn.Linear(4, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, weight = batch
        return (weight * self.head(self.net(x)).squeeze(1).square()).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def released(folder: Path, network: str, weight: float, scale: float) -> Tensor:
    """Sum of the first lot with its noise, where record 0 has this weight in the loss."""
    torch.manual_seed(1)
    module = Weighted(NETWORKS[network]())
    x, weights = torch.randn(SIZE, 5, 4), torch.ones(SIZE)
    x[0] *= scale
    weights[0] = weight
    before = weights_of(module)
    strategy = DPSGD(noise_multiplier=0.1, max_grad_norm=BOUND, seed=3, ledger=str(folder / f"{weight}.jsonl"))
    trainer_for(folder, strategy, 1).fit(module, loader_of(TensorDataset(x, weights), SIZE, kind="poisson"))
    return (before - weights_of(module)) * SIZE


@pytest.mark.parametrize("scale", [1.0, 30.0])
@pytest.mark.parametrize("network", NETWORKS)
def test_a_record_moves_the_release_by_at_most_its_bound(network: str, scale: float, tmp_path: Path) -> None:
    present = released(tmp_path, network, 1e6, scale)  # its gradient is far above the bound
    moved = float((present - released(tmp_path, network, 0.0, scale)).norm())
    rounding = 5 * grid_spacing(0.1 * BOUND)  # of both releases, five standard deviations
    assert 0.99 * BOUND < moved <= BOUND * (1 + 1e-4) + rounding


class Summed(Weighted):
    """Says mean, and sums."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * len(batch[0])


@pytest.mark.parametrize("network", ["lstm", "attention"])
def test_a_dependence_on_the_number_of_records_is_seen_through_dropout(network: str, tmp_path: Path) -> None:
    strategy = DPSGD(noise_multiplier=1.0, seed=3, gradients="engine", ledger=str(tmp_path / "ledger.jsonl"))
    data = TensorDataset(torch.randn(SIZE, 5, 4), torch.ones(SIZE))
    with pytest.raises(UnsupportedModuleError, match="a product sums over records|number of records"):
        trainer_for(tmp_path, strategy, 1).fit(Summed(NETWORKS[network]()), loader_of(data, 12))


class Frozen(pl.LightningModule):
    """A pretrained body with batch normalization in evaluation mode, and a new head."""

    def __init__(self, woken: bool = False) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv1d(1, 4, 2), nn.BatchNorm1d(4), nn.ReLU()).eval()
        self.head, self.woken, self.modes = nn.Linear(16, 1), woken, []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.woken:
            self.train()

    def loss(self, batch: Any) -> Tensor:
        return self.head(self.body(batch[0][:, None]).flatten(1)).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.modes.append((self.training, self.body.training))
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.loss(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        groups = [{"params": self.body.parameters(), "lr": 1e-3}, {"params": self.head.parameters(), "lr": 0.1}]
        return torch.optim.SGD(groups)


@pytest.mark.parametrize("woken", [False, True])
def test_batch_norm_in_evaluation_mode(woken: bool, tmp_path: Path) -> None:
    """Lightning keeps the mode, also after validation; who wakes it up is refused."""
    module, data = Frozen(woken), TensorDataset(torch.randn(SIZE, 5))
    before = copy.deepcopy(module.body[1])
    strategy = DPSGD(noise_multiplier=1.0, max_grad_norm=BOUND, seed=3, ledger=str(tmp_path / "ledger.jsonl"))
    trainer = trainer_for(tmp_path, strategy, 4, val_check_interval=2)
    loaders = loader_of(data, 12), torch.utils.data.DataLoader(data, 12)
    if woken:
        with pytest.raises(UnsupportedModuleError, match=r"BatchNorm1d was put into training mode"):
            trainer.fit(module, *loaders)
        return
    trainer.fit(module, *loaders)
    assert set(module.modes) == {(True, False)} and strategy.releases == 4
    assert torch.equal(before.running_mean, module.body[1].running_mean)
    assert not torch.equal(before.weight, module.body[1].weight)


class Language(pl.LightningModule):
    """Positions are looked up once for a lot."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions, self.out = nn.Embedding(7, 4), nn.Embedding(9, 4), nn.Linear(4, 7)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0]
        x = self.tokens(x) + self.positions(torch.arange(x.shape[1])[None])
        return self.out(x.tanh()).sin().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def test_shared_positions_in_lots_and_in_pieces_of_them(tmp_path: Path) -> None:
    weights = []
    for size in (None, 5):
        torch.manual_seed(1)
        module, data = Language(), TensorDataset(torch.randint(0, 7, (SIZE, 6)))
        strategy = DPSGD(
            noise_multiplier=1e-3, max_grad_norm=0.01, seed=3, max_physical_batch_size=size,
            ledger=str(tmp_path / f"{size}.jsonl"),
        )  # fmt: skip
        trainer_for(tmp_path, strategy, 3).fit(module, loader_of(data, 12))
        assert strategy._source.method == "engine"  # though positions are added outside of any module's forward
        weights.append(weights_of(module))
    assert torch.allclose(*weights, atol=1e-6)


class TwoOptimizers(Frozen):
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.body, self.head)]


def test_several_optimizers_are_refused_with_parameter_groups_as_the_remedy(tmp_path: Path) -> None:
    strategy = DPSGD(noise_multiplier=1.0, seed=3, ledger=str(tmp_path / "ledger.jsonl"))
    module = TwoOptimizers()
    module.automatic_optimization = False
    with pytest.raises(ConfigurationError, match=r'optimizer with a parameter group each.*"params".*"lr"') as error:
        trainer_for(tmp_path, strategy, 1).fit(module, loader_of(TensorDataset(torch.randn(SIZE, 5)), 12))
    assert "\n" not in str(error.value)


class Checkpointed(Frozen):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant, self.below = reentrant, nn.Linear(5, 5)

    def loss(self, batch: Any) -> Tensor:
        x = self.below(batch[0])[:, None] if self.current_epoch == 0 else batch[0][:, None]
        hidden = torch.utils.checkpoint.checkpoint(self.body, x, use_reentrant=self.reentrant)
        return self.head(hidden.flatten(1)).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class CheckpointedFirst(Checkpointed):
    """Nothing trained is below, so that autograd never comes to the checkpoint."""

    def loss(self, batch: Any) -> Tensor:
        x = batch[0][:, None].clone().requires_grad_()
        hidden = torch.utils.checkpoint.checkpoint(self.body, x, use_reentrant=self.reentrant)
        return self.head(hidden.flatten(1)).square().mean()


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("kind", [Checkpointed, CheckpointedFirst])
def test_reentrant_checkpointing_is_refused_with_the_remedy(
    kind: type[Checkpointed], reentrant: bool, tmp_path: Path
) -> None:
    strategy = DPSGD(noise_multiplier=1.0, seed=3, ledger=str(tmp_path / "ledger.jsonl"))
    trainer, loader = trainer_for(tmp_path, strategy, 2), loader_of(TensorDataset(torch.randn(SIZE, 5)), 12)
    if reentrant:
        with pytest.raises(UnsupportedModuleError, match="use_reentrant=False"):
            trainer.fit(kind(True), loader)
    else:
        trainer.fit(kind(False), loader)
        assert strategy.releases == 2


class Compiled(Frozen):
    """Compiled in one of the ways that there are."""

    def __init__(self, way: str, backend: str) -> None:
        super().__init__()
        if way == "net":
            self.body = torch.compile(self.body, backend=backend)
        elif way == "in place":
            self.body.compile(backend=backend)


def _compiled(way: str, backend: str, folder: Path) -> Tensor:
    torch.manual_seed(1)
    torch._dynamo.reset()
    module = Compiled(way, backend)
    strategy = DPSGD(noise_multiplier=1e-3, max_grad_norm=BOUND, seed=3, ledger=str(folder / f"{way}.jsonl"))
    trained = torch.compile(module, backend=backend) if way == "module" else module
    trainer_for(folder, strategy, 3).fit(trained, loader_of(TensorDataset(torch.randn(SIZE, 5)), 12))
    return weights_of(module)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.long)])
@pytest.mark.parametrize("way", ["net", "in place", "module"])
def test_compiled_networks(way: str, backend: str, tmp_path: Path) -> None:
    assert torch.allclose(_compiled(way, backend, tmp_path), _compiled("not", backend, tmp_path), atol=1e-5)


class Prune(pl.Callback):
    """Changes what the weight is between two epochs."""

    def on_train_epoch_end(self, trainer: pl.Trainer, module: Any) -> None:
        torch.nn.utils.prune.l1_unstructured(module.out, "weight", 0.5)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_what_computes_a_weight_is_refused(tmp_path: Path) -> None:
    """Pruning before or during the training, and TorchScript, which lets no hooks in."""
    data = TensorDataset(torch.randint(0, 7, (SIZE, 5)))
    pruned, scripted = Language(), Language()
    torch.nn.utils.prune.l1_unstructured(pruned.out, "weight", 0.5)
    scripted.out = torch.jit.script(nn.Sequential(nn.Linear(4, 7)))
    for module, more, message in (
        (pruned, [], r"out \(Linear\) is pruned, .*make it plain"),
        (Language(), [Prune()], r"out \(Linear\) is pruned, .*make it plain"),
        (scripted, [], "is compiled by TorchScript, which lets no hooks in"),
    ):
        options = {"seed": 3, "gradients": "engine", "ledger": str(tmp_path / "ledger.jsonl")}
        strategy = DPSGD(noise_multiplier=1.0, max_grad_norm=BOUND, **options)
        with pytest.raises(UnsupportedModuleError, match=message):
            trainer_for(tmp_path, strategy, 4, more=more).fit(module, loader_of(data, 12))
        (tmp_path / "ledger.jsonl").unlink(missing_ok=True)
