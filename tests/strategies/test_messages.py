"""What is refused of a step, a batch or an option says what it is, and the remedy that it names works."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import default_collate

from dpbench.callback.lightning_training import LightningTraining
from dpbench.callback.loop import PrivateLoop
from dpbench.data.lots import LotLoader
from dpbench.errors import ConfigurationError, UnsupportedModuleError
from dpbench.strategies import DPSGD, AdaptiveQuantileClipping, ClipOnly
from tests.strategies.worlds import loader_of, trainer_for
from tests.support.one_by_one import Module, cross_entropy, data, plain


def penalized_gradient(net: nn.Module, batch: Any) -> Tensor:
    x = batch[0].clone().requires_grad_(True)
    output = net(x)
    (gradient,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    return F.cross_entropy(output, batch[1]) + (gradient.flatten(1).norm(dim=1) - 1).square().mean()


def lasso(net: nn.Module, batch: Any) -> Tensor:
    return cross_entropy(net, batch) + 0.01 * sum(p.abs().sum() for p in net.parameters())


def proximal(net: nn.Module, batch: Any) -> Tensor:
    return cross_entropy(net, batch) + 0.01 * sum((p - 1).square().sum() for p in net.parameters())


def linear() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(30, 4))


def sines() -> nn.Module:
    class Sine(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.sin()

    return nn.Sequential(nn.Flatten(), nn.Linear(30, 8), Sine(), nn.Linear(8, 4))


class Scaled(nn.Module):
    """A parameter in a list, or in a module of its own."""

    def __init__(self, own_module: bool) -> None:
        super().__init__()
        self.out = linear()
        scale = nn.Parameter(torch.ones(4))
        self.scale = Scale(scale) if own_module else nn.ParameterList([scale])

    def forward(self, x: Tensor) -> Tensor:
        x = self.out(x)
        return self.scale(x) if isinstance(self.scale, Scale) else x * self.scale[0]


class Scale(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class OfTheModule(Module):
    """A parameter of the LightningModule itself."""

    def __init__(self) -> None:
        super().__init__(linear(), cross_entropy)
        self.scale = nn.Parameter(torch.ones(4))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(batch[0]) * self.scale, batch[1])


class Manual(Module):
    def __init__(self, net: nn.Module, step: Any) -> None:
        super().__init__(net, step)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss = super().training_step(batch, batch_idx)
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()


def train(tmp_path: Path, module: Any, loader: Any = None, **options: Any) -> None:
    strategy = DPSGD(noise_multiplier=1.0, delta=1e-3, ledger=str(tmp_path / "ledger.jsonl"), **options)
    trainer_for(tmp_path, strategy, 2).fit(module, loader or loader_of(data(40), 10))


@pytest.mark.parametrize("net", [plain, sines])
def test_gradients_inside_the_loss(tmp_path: Path, net: Callable[[], nn.Module]) -> None:
    with pytest.raises(UnsupportedModuleError, match=r"gradients inside the loss, .* gradients=\"auto\""):
        train(tmp_path / "engine", Module(net(), penalized_gradient), gradients="engine")
    train(tmp_path / "manual", Manual(net(), penalized_gradient))
    train(tmp_path / "auto", Module(net(), penalized_gradient))


def test_a_gradient_penalty_in_a_loop(tmp_path: Path) -> None:
    net = plain()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    strategy = DPSGD(noise_multiplier=1.0, delta=1e-3, ledger=str(tmp_path / "ledger.jsonl"))
    lots = LotLoader.poisson(data(40), 10)
    assert len(list(PrivateLoop(net, optimizer, lots, strategy, loss=penalized_gradient, steps=2))) == 2


@pytest.mark.parametrize(
    "module",
    [
        lambda: Module(plain(), lasso),
        lambda: Module(plain(), proximal),
        lambda: Module(linear(), penalized_gradient),
        lambda: OfTheModule(),
        lambda: Module(Scaled(own_module=False), cross_entropy),
        lambda: Module(Scaled(own_module=True), cross_entropy),
    ],
)
def test_parameters_used_outside_of_any_forward(tmp_path: Path, module: Callable[[], Any]) -> None:
    """In a penalty, in a list, on the LightningModule: the engine takes them as record by record does."""
    weights = []
    for gradients in ("engine", "one_by_one"):
        torch.manual_seed(1)
        own = module()
        ledger = str(tmp_path / f"{gradients}.jsonl")
        strategy = ClipOnly(max_grad_norm=0.3, gradients=gradients, ledger=ledger)
        trainer_for(tmp_path, strategy, 2).fit(own, LotLoader.poisson(data(40), 40))
        weights.append(torch.cat([p.detach().flatten() for p in own.parameters()]))
    torch.testing.assert_close(*weights)


def test_the_hook_that_penalties_belong_into(tmp_path: Path) -> None:
    """It comes after the release, and moves the weights by just what it says."""

    def shrink(optimizer: Any, args: Any, kwargs: Any) -> None:
        with torch.no_grad():
            for group in optimizer.param_groups:
                for p in group["params"]:
                    p.copy_(p.sign() * (p.abs() - 0.01 * group["lr"]).clamp(min=0))

    class Shrinking(Module):
        shrinks = True

        def configure_optimizers(self) -> torch.optim.Optimizer:
            optimizer = super().configure_optimizers()
            if self.shrinks:
                optimizer.register_step_post_hook(shrink)
            return optimizer

    nets = []
    for shrinks in (False, True):
        torch.manual_seed(1)
        module = Shrinking(linear(), cross_entropy)
        module.shrinks = shrinks
        lots = LotLoader.poisson(data(40), 40)
        strategy = ClipOnly(max_grad_norm=0.3, ledger=str(tmp_path / f"{shrinks}.jsonl"))
        trainer_for(tmp_path, strategy, 1).fit(module, lots)
        nets.append(module.net[1].weight.detach())
    weights = nets[0]
    torch.testing.assert_close(nets[1], weights.sign() * (weights.abs() - 0.01).clamp(min=0))


def test_the_reason_is_what_the_engine_cannot_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(LightningTraining, "inform", lambda self, text: lines.append(text))
    train(tmp_path, Module(plain(), penalized_gradient), gradients="auto")
    (line,) = [line for line in lines if "record by record" in line]
    assert "gradients inside the loss" in line and "off by" not in line


@pytest.mark.parametrize("gradients", ["auto", "engine"])
def test_losses_that_are_not_one_number(tmp_path: Path, gradients: str) -> None:
    def each(net: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(net(batch[0]), batch[1], reduction="none")

    def detached(net: nn.Module, batch: Any) -> Tensor:
        return cross_entropy(net, batch).detach()

    for kind in (Module, Manual):
        with pytest.raises(ConfigurationError, match="one number, not a tensor of shape .* return the mean"):
            train(tmp_path / kind.__name__, kind(plain(), each), gradients=gradients)
        with pytest.raises(ConfigurationError, match=r"the loss has no gradient|depends on no trainable parameter"):
            train(tmp_path / kind.__name__, kind(plain(), detached), gradients=gradients)
    train(tmp_path / "mean", Module(plain(), lambda net, batch: each(net, batch).mean()), gradients=gradients)


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad")
@pytest.mark.parametrize("loss", [float, lambda loss: [loss]])
def test_losses_that_are_no_tensors(tmp_path: Path, loss: Any) -> None:
    with pytest.raises(ConfigurationError, match="returned a (float|list) as its loss: return the tensor"):
        train(tmp_path, Module(plain(), lambda net, batch: loss(cross_entropy(net, batch))), gradients="one_by_one")


def masked(net: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(net(batch["x"] * batch["mask"]), batch["y"])


MASK = torch.arange(30).view(5, 6) % 2


def with_mask(records: Any, expanded: bool) -> Any:
    x, y = default_collate(records)
    mask = MASK.expand(len(records), *MASK.shape) if expanded else MASK
    return {"x": x, "y": y, "mask": mask}


def test_entries_of_a_batch_that_are_no_records(tmp_path: Path) -> None:
    def loader(expanded: bool) -> LotLoader:
        return LotLoader.poisson(data(40), 20, collate_fn=lambda records: with_mask(records, expanded))

    with pytest.raises(ConfigurationError, match=r"the shapes .*\(5, 6\).*: .*register_buffer"):
        train(tmp_path / "shared", Module(plain(), masked), loader(False), gradients="engine")
    train(tmp_path / "auto", Module(plain(), masked), loader(False))
    train(tmp_path / "rows", Module(plain(), masked), loader(True), gradients="engine")

    class Buffered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mask", MASK.clone())
            self.net = plain()

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x * self.mask)

    train(tmp_path / "buffer", Module(Buffered(), cross_entropy), gradients="engine")


def test_records_of_several_lengths(tmp_path: Path) -> None:
    def ragged(records: Any) -> Any:
        return [x[: 1 + int(y)] for x, y in records], torch.stack([y for _, y in records])

    def padded(records: Any) -> Any:
        xs, y = ragged(records)
        x = pad_sequence([*xs, torch.zeros(5, 6)], batch_first=True)[:-1]
        return x, y

    def loader(collate_fn: Any) -> LotLoader:
        return LotLoader.poisson(data(40), 20, collate_fn=collate_fn)

    with pytest.raises(ConfigurationError, match=r"have the shapes .*pad_sequence"):
        train(tmp_path / "ragged", Module(plain(), cross_entropy), loader(ragged), gradients="engine")
    train(tmp_path / "padded", Module(plain(), cross_entropy), loader(padded), gradients="engine")


def test_batches_without_tensors(tmp_path: Path) -> None:
    def arrays(records: Any) -> Any:
        return np.stack([x.numpy() for x, _ in records]), np.array([int(y) for _, y in records])

    def tensors(records: Any) -> Any:
        return tuple(torch.from_numpy(x) for x in arrays(records))

    def texts(records: Any) -> Any:
        return ["a" * int(y) for _, y in records]

    def counted(records: Any) -> Any:
        return texts(records), torch.arange(len(records))

    def of_texts(net: nn.Module, batch: Any) -> Tensor:
        words = batch[0]
        x = torch.tensor([[float(len(word))] * 30 for word in words])
        return F.cross_entropy(net(x), torch.tensor([len(word) for word in words]))

    def loader(collate_fn: Any) -> LotLoader:
        return LotLoader.poisson(data(40), 20, collate_fn=collate_fn)

    with pytest.raises(ConfigurationError, match=r"holds ndarray\): .*torch.from_numpy"):
        train(tmp_path / "arrays", Module(plain(), cross_entropy), loader(arrays), gradients="engine")
    train(tmp_path / "tensors", Module(plain(), cross_entropy), loader(tensors), gradients="engine")
    with pytest.raises(ConfigurationError, match=r"holds str\): .* torch.arange"):
        train(tmp_path / "texts", Module(plain(), of_texts), loader(texts), gradients="engine")
    with pytest.raises(UnsupportedModuleError, match="contains a list of values of records"):
        train(tmp_path / "counted", Module(plain(), of_texts), loader(counted), gradients="engine")
    train(tmp_path / "alone", Module(plain(), of_texts), loader(counted))


class Opaque:
    def __init__(self, records: Any) -> None:
        self.x, self.y = default_collate(records)


def test_batches_that_cannot_be_looked_into(tmp_path: Path) -> None:
    lots = LotLoader.poisson(data(40), 20, collate_fn=Opaque)
    with pytest.raises(ConfigurationError, match="contains a Opaque, .* dictionaries, lists, tuples or dataclasses"):
        train(
            tmp_path,
            Module(plain(), lambda net, batch: F.cross_entropy(net(batch.x), batch.y)),
            lots,
            gradients="engine",
        )


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("target_delta", "Did you mean delta"),
        ("sigma", "Did you mean noise_multiplier"),
        ("l2_norm_clip", "Did you mean max_grad_norm"),
        ("num_microbatches", "Did you mean microbatch_size"),
        ("epochs", "The Trainer says how long: max_steps or max_epochs"),
        ("batch_size", r"LotLoader.poisson\(dataset, expected_batch_size=...\)"),
        ("poisson_sampling", r"LotLoader.poisson\(dataset, expected_batch_size=...\)"),
        ("secure_mode", "operating system's entropy where no seed is given"),
    ],
)
def test_names_of_other_packages(name: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"DPSGD has no option '{name}'\..*{message}"):
        DPSGD(noise_multiplier=1.0, **{name: 1})


def test_a_name_that_a_strategy_lacks_is_not_proposed() -> None:
    with pytest.raises(ConfigurationError, match="has no option 'l2_norm_clip'") as caught:
        AdaptiveQuantileClipping(noise_multiplier=1.0, l2_norm_clip=1.0)
    assert "mean max_grad_norm?" not in str(caught.value)
