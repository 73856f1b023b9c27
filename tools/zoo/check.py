"""One network of the zoo: trained privately for a few batches, and its first release compared with plain autograd."""

from __future__ import annotations

import copy
import math
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.data import default_collate

from dpbench import fix
from dpbench.callback.lightning_training import LightningTraining
from dpbench.data.loader import PrivateDataLoader
from dpbench.data.sampler import PrivateBatchSampler, make_sampling
from dpbench.errors import DPBenchError
from dpbench.strategies import ClipOnly
from tools.trainers import trainer_for
from tools.zoo.network import Network, without_dropout

ENGINE = "engine"
RECORD_BY_RECORD = "record by record"
REFUSED = "refused"
WRONG = "WRONG"
FAILED = "failed"
BROKEN = "does not train by itself"
PATHS = (ENGINE, RECORD_BY_RECORD, REFUSED, WRONG, FAILED, BROKEN)

TOLERANCE = 1e-4
_BATCHES = 3
_SMALL = 1e-3
"""A parameter whose gradient is smaller than this share of the whole is compared with that share."""
_NOTICE = "gradients=auto: record by record"
"""How a training begins the line that says why it cannot use the engine."""


class Outcome(NamedTuple):
    """Outcome of one network.

    Attributes:
        path: One of `PATHS`.
        reason: Reason why the engine is not used.
        error: Largest relative error of a parameter's update; None: there is no reference.
        precision: Bits of the numbers compared: 64 or 32.
        parameters: Number of trainable ones.
        fixes: Number of layers that `dpbench.fix` replaced.
    """

    path: str
    reason: str = ""
    error: float | None = None
    precision: int = 64
    parameters: int = 0
    fixes: int = 0


class Reference(NamedTuple):
    """Plain autograd, record by record.

    Attributes:
        bound: Norm of the first record's gradient: larger ones are clipped.
        mean: Of the clipped gradients, for each trainable parameter.
    """

    bound: float
    mean: list[Tensor]


class RandomStep(Exception):
    """A step that was to have a reference draws random numbers."""


def check(build: Callable[[], Network], private: bool = True) -> Outcome:
    """Train a network, and compare.

    Args:
        build: Makes it.
        private: Whether its step is a function of each record; a network with BatchNorm is changed by `dpbench.fix`
            first. Else it should be refused as it is, and there is no reference.
    """
    try:
        return _check_in(torch.float64, build, private)
    except _Broken:  # float32 is written into the network somewhere
        pass
    try:
        return _check_in(torch.float32, build, private)
    except _Broken as error:
        return Outcome(BROKEN, str(error))


class _Broken(Exception):
    """A network does not train by itself."""


def _check_in(dtype: torch.dtype, build: Callable[[], Network], private: bool) -> Outcome:
    with _default_dtype(dtype):
        try:
            network = _network_in(dtype, build, private)
            has_reference = private and not (network.is_random or network.keep_dropout)
            expected = reference(network) if has_reference else None
            _train_plainly(network)
        except Exception as error:
            raise _Broken(_first_line(error)) from error
        outcome = Outcome(
            ENGINE,
            precision=torch.finfo(dtype).bits,
            parameters=sum(p.numel() for p in _trainable(network.model)),
            fixes=len(network.fixes),
        )
        bound = 1.0 if expected is None else expected.bound
        try:
            with _collected_notices() as lines:
                released = train(network, bound)
        except DPBenchError as error:
            return outcome._replace(path=REFUSED, reason=" ".join(str(error).split()))
        except Exception as error:
            return outcome._replace(path=FAILED, reason=_first_line(error))
    notices = [line for line in lines if line.startswith(_NOTICE)]
    if notices:
        outcome = outcome._replace(path=RECORD_BY_RECORD, reason=notices[0].partition("cannot be used: ")[2])
    if expected is None:
        return outcome
    difference = largest_error(released, expected.mean)
    outcome = outcome._replace(error=difference)
    return outcome if difference <= TOLERANCE else outcome._replace(path=WRONG)


def _network_in(dtype: torch.dtype, build: Callable[[], Network], private: bool) -> Network:
    torch.manual_seed(0)
    network = build()
    network.model.to(dtype).train()
    if private and _has_batch_norm(network.model):
        network.fixes = fix(network.model)
    if not network.keep_dropout:
        without_dropout(network.model)
    network.records = [_record_in(dtype, record) for record in network.records]
    return network


def reference(network: Network) -> Reference:
    """Clipped and averaged gradients of each record's loss alone.

    Raises:
        RandomStep: Two seeds give two losses.
    """
    model = copy.deepcopy(network.model)
    trainable = _trainable(model)
    collate = network.collate or default_collate
    total = [torch.zeros_like(parameter) for parameter in trainable]
    bound = None
    for record in network.records:
        loss = network.step(model, collate([copy.copy(record)]))
        gradients = torch.autograd.grad(loss, trainable, allow_unused=True, materialize_grads=True)
        norm = float(torch.stack([gradient.square().sum() for gradient in gradients]).sum().sqrt())
        if bound is None:
            bound = norm or 1.0
            if not loss.isfinite():
                raise ValueError(f"the loss of a record is {float(loss)}")
            torch.manual_seed(1)
            again = network.step(model, collate([copy.copy(record)]))
            if not torch.allclose(loss, again, rtol=1e-5):
                raise RandomStep(f"the step is random: its loss is {float(loss)}, and then {float(again)}")
        factor = min(1.0, bound / norm) if norm else 1.0
        for sum_, gradient in zip(total, gradients, strict=True):
            sum_.add_(factor * gradient / len(network.records))
    assert bound is not None
    return Reference(bound, total)


def train(network: Network, bound: float) -> list[Tensor]:
    """Release the clipped sums of a few batches of all records; the weights stay as they are.

    Returns:
        For each trainable parameter, of the first batch: the mean of the clipped gradients.
    """
    size = len(network.records)
    sampler = PrivateBatchSampler(make_sampling("full", size, size), None)
    loader = PrivateDataLoader(network.records, sampler, collate_fn=network.collate)  # type: ignore[arg-type]
    module = _Module(network)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = trainer_for(Path(folder), [ClipOnly(max_grad_norm=bound, seed=0)], _BATCHES)
        trainer.fit(module, loader)
    return module.released


def largest_error(released: list[Tensor], expected: list[Tensor]) -> float:
    """Largest distance of what is released for a parameter from what is expected, relative to the latter."""
    norm = math.hypot(*(float(gradient.double().norm()) for gradient in expected))
    errors = []
    for actual, right in zip(released, expected, strict=True):
        size = max(float(right.norm()), _SMALL * norm)
        distance = float((actual - right).norm())
        errors.append(distance / size if size else distance)
    return float("nan") if any(map(math.isnan, errors)) else max(errors)


class _Module(pl.LightningModule):
    """Trains a network by SGD that does not move, and keeps the first gradient that its optimizer sees."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        self.net = copy.deepcopy(network.model)
        self._of_network = (network.step,)
        self.released: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (step,) = self._of_network
        return step(self.net, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trainable = _trainable(self.net)

        def keep(*_: Any) -> None:
            if not self.released:
                gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in trainable]
                self.released = [gradient.detach().clone() for gradient in gradients]

        optimizer = torch.optim.SGD(trainable, lr=0.0)
        optimizer.register_step_post_hook(keep)
        return optimizer


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _record_in(dtype: torch.dtype, record: Any) -> Any:
    def converted(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return copy.copy(x).apply(converted) if hasattr(x, "edge_index") else x
        return x.to(dtype) if x.is_floating_point() else x

    return tree_map(converted, record)


def _train_plainly(network: Network) -> None:
    """Make a step without privacy."""
    model = copy.deepcopy(network.model)
    optimizer = torch.optim.SGD(_trainable(model), lr=0.0)
    collate = network.collate or default_collate
    batch = collate([copy.copy(record) for record in network.records])
    network.step(model, batch).backward()  # type: ignore[no-untyped-call]
    optimizer.step()


def _trainable(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _has_batch_norm(model: nn.Module) -> bool:
    return any(isinstance(layer, nn.modules.batchnorm._BatchNorm) for layer in model.modules())


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


@contextmanager
def _collected_notices() -> Iterator[list[str]]:
    """The lines that a training says of itself, whatever becomes of loggers (Hydra, Lightning's other name)."""
    lines: list[str] = []

    def inform(self: LightningTraining, text: str) -> None:
        lines.append(text)

    with patch.object(LightningTraining, "inform", inform):
        yield lines
