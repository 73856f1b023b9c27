"""A training that a Lightning Trainer drives."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from lightning_fabric.utilities import move_data_to_device
from pytorch_lightning.loggers.logger import DummyLogger
from pytorch_lightning.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.optim import Optimizer

from dpbench.callback.lines import log_line
from dpbench.data.records import Cohort
from dpbench.data.separate_records import SeparateRecords
from dpbench.errors import ConfigurationError
from dpbench.guards.packages import overrides
from dpbench.guards.parameters import parameters_of
from dpbench.guards.withheld_loss import records_withheld, without_loss
from dpbench.privacy.processes import Processes
from dpbench.records.training import ReplacedMethods, Training, TrainingStep
from dpbench.records.watched_hooks import look_on, transfer

_LIBRARIES = ("pytorch_lightning.", "lightning.", "dpbench.")  # whose hooks see no record
_TRANSFERS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


class LightningTraining(Training):
    """The training of a LightningModule by a Trainer: the module's hooks are replaced on this object alone.

    Args:
        trainer: Drives.
        module: Trained.

    Attributes:
        trainer: Drives.
    """

    def __init__(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        super().__init__(module)
        self.trainer = trainer
        self._methods = ReplacedMethods(module)
        self._hooks: list[ReplacedMethods] = []
        self._own_step: TrainingStep | None = None

    @property
    def automatic_optimization(self) -> bool:  # type: ignore[override]
        """As the module says."""
        return bool(self.module.automatic_optimization)

    @property
    def rank(self) -> int:  # type: ignore[override]
        """Of this process."""
        return self.trainer.global_rank

    @property
    def world_size(self) -> int:  # type: ignore[override]
        """Number of processes."""
        return self.trainer.world_size

    @property
    def should_stop(self) -> bool:
        """The Trainer's flag."""
        return self.trainer.should_stop

    @should_stop.setter
    def should_stop(self, value: bool) -> None:
        self.trainer.should_stop = value

    @property
    def datamodule(self) -> Any:
        """The Trainer's data module, or None."""
        return getattr(self.trainer, "datamodule", None)

    @property
    def optimizers(self) -> Sequence[Optimizer]:
        """All optimizers of the training."""
        return self.trainer.optimizers

    @property
    def schedulers(self) -> Sequence[Any]:
        """Learning rate schedulers that the Trainer steps."""
        return [config.scheduler for config in self.trainer.lr_scheduler_configs]

    @property
    def device(self) -> torch.device:
        """Device of the module."""
        return self.module.device  # type: ignore[no-any-return]

    @property
    def own_step(self) -> TrainingStep:
        """The module's `training_step`."""
        return self.module.training_step if self._own_step is None else self._own_step

    def mount(self, step: TrainingStep, backward: Callable[..., None]) -> None:
        """Replace `training_step` and `backward`; run the functions of the two moments after the module's own hooks."""
        self._own_step = self.module.training_step
        self._let_lots_pass()
        self._methods.replace("training_step", step)
        self._methods.replace("backward", backward)
        self._follow("on_train_batch_end", self.after_lot)
        if not self.automatic_optimization:
            self._methods.replace("clip_gradients", partial(_clip_released, self.module.clip_gradients))
        # In manual optimization no such hook is called.
        elif self._surround("on_before_zero_grad", records_withheld):
            self._follow("on_before_zero_grad", self.after_zero_grad)

    def watch_epochs(self, watched: Callable[[], AbstractContextManager[Any]]) -> None:
        """Run hooks of epochs, of the module and of callbacks, within a context."""
        for name in ("on_train_epoch_end", "on_train_epoch_start"):
            self._surround(name, watched)

    def _surround(self, name: str, context: Callable[[], AbstractContextManager[Any]]) -> bool:
        """Run hooks of the module and of callbacks within a context; False if there are none."""
        trainer: Any = self.trainer
        has_hooks = False
        for owner in (self.module, *trainer.callbacks):
            hook = getattr(owner, name)
            if not hook.__module__.startswith(_LIBRARIES):
                methods = ReplacedMethods(owner)
                methods.replace(name, _within(context, hook))
                self._hooks.append(methods)
                has_hooks = True
        return has_hooks

    def _let_lots_pass(self) -> None:
        """Have hooks that move a batch see separate records one by one, and cohorts not at all."""
        for owner in (self.module, self.datamodule):
            if owner is None:
                continue
            methods = ReplacedMethods(owner)
            for name in _TRANSFERS:
                hook = getattr(owner, name)
                if not hook.__module__.startswith(_LIBRARIES):
                    hook = self._watched(partial(transfer, name, hook), hook)
                methods.replace(name, _on_batches(hook))
            self._hooks.append(methods)
        start = self.module.on_train_batch_start
        if not start.__module__.startswith(_LIBRARIES):
            watched = partial(look_on, "on_train_batch_start", start, self)
            self._methods.replace("on_train_batch_start", self._watched(watched, start))

    def _watched(self, watched: Callable[..., Any], hook: Callable[..., Any]) -> Callable[..., Any]:
        """A hook that is watched while batches are trained on."""

        @functools.wraps(hook)
        def chosen(*args: Any, **kwargs: Any) -> Any:
            return (watched if self.trainer.training else hook)(*args, **kwargs)

        return chosen

    def _follow(self, name: str, functions: Sequence[Callable[[], None]]) -> None:
        hook = getattr(self.module, name)

        @functools.wraps(hook)
        def followed(*args: Any, **kwargs: Any) -> None:
            hook(*args, **kwargs)
            for function in functions:
                function()

        self._methods.replace(name, followed)

    def withhold_loss(self, after: Callable[[], None]) -> bool:
        """Give a module's own `optimizer_step` no loss, and schedules no records: in their sight no batch is."""
        self._methods.replace("lr_scheduler_step", _within(records_withheld, self.module.lr_scheduler_step))
        if not self.automatic_optimization or not overrides(self.module, "optimizer_step"):
            return False
        own_step = self.module.optimizer_step

        @functools.wraps(own_step)
        def step(epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
            closure = optimizer_closure and without_loss(optimizer_closure)
            own_step(epoch, batch_idx, optimizer, closure)
            after()

        self._methods.replace("optimizer_step", step)
        return True

    def restore(self) -> None:
        """Give the module its hooks back."""
        super().restore()
        self._methods.restore()
        while self._hooks:
            self._hooks.pop().restore()
        self._own_step = None

    def to_device(self, batch: Any) -> Any:
        """A batch, where the module is, by the module's hooks."""
        return self.trainer.strategy.batch_to_device(batch)

    def local_batches(self) -> Callable[[Any], Any]:
        """Move a batch as Lightning moves those of a loader, by the hooks of the module and the data module."""
        owners = [owner for owner in (self.module, self.datamodule) if owner is not None]
        if any(is_overridden(name, owner) for name in _TRANSFERS for owner in owners):
            return self._by_hooks
        return self._by_device

    def _by_hooks(self, batch: Any) -> Any:
        batch = self.trainer.precision_plugin.convert_input(batch)
        batch = self.module._on_before_batch_transfer(batch)
        return self.to_device(batch)

    def _by_device(self, batch: Any) -> Any:
        """Do the work of Lightning's own hooks, in a fifth of the time."""
        batch = self.trainer.precision_plugin.convert_input(batch)
        return move_data_to_device(batch, self.device)

    def largest(self, count: int) -> int:
        """The largest of the counts of all processes."""
        counts = torch.tensor(count, device=self.device)
        dist.all_reduce(counts, dist.ReduceOp.MAX)
        return int(counts)

    def autocast(self) -> AbstractContextManager[Any]:
        """The Trainer's precision."""
        return self.trainer.precision_plugin.train_step_context()

    @contextmanager
    def without_loggers(self) -> Iterator[None]:
        """Within, loggers are given nothing."""
        loggers = self.trainer.loggers
        self.trainer.loggers = [DummyLogger() for _ in loggers]
        try:
            yield
        finally:
            self.trainer.loggers = loggers

    def warn(self, text: str) -> None:
        """Show a warning, on the first process."""
        pl.utilities.rank_zero_warn(text)

    def inform(self, text: str) -> None:
        """Log a line, on the first process."""
        log_line(text)


def _clip_released(
    own: Callable[..., None],
    optimizer: Any,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Clip gradients in manual optimization, if there are any: those of the private part are released by the step.

    Raises:
        ConfigurationError: There is no gradient yet.
    """
    if all(p.grad is None for p in parameters_of(optimizer)):
        raise ConfigurationError(
            "self.clip_gradients finds no gradient, since the step of the optimizer releases it: remove the call; "
            "max_grad_norm clips each record."
        )
    own(optimizer, *args, **kwargs)


def count_batches(trainer: pl.Trainer) -> None:
    """Have the Trainer count at most one step a batch, also towards `max_steps`.

    In manual optimization Lightning counts the steps of all optimizers: a GAN would end after half of the releases for
    which its noise was computed.
    """
    if not trainer.lightning_module.automatic_optimization:
        loop = trainer.fit_loop.epoch_loop
        steps = loop.manual_optimization.optim_step_progress.total
        steps.completed = min(steps.completed, loop.total_batch_idx + 1)
        steps.ready = steps.completed


def processes_of(trainer: pl.Trainer, alike: bool) -> Processes:
    """The processes of a training, as releases see them.

    Args:
        trainer: The trainer that drives it.
        alike: True if their sum is that of one process.
    """
    broadcast = partial(_broadcast, trainer.strategy)  # no function of its own: a strategy that has trained is pickled
    return Processes(trainer.global_rank, trainer.world_size, broadcast, dist.all_reduce, alike)


def _broadcast(strategy: Any, value: Any) -> Any:
    """Broadcast a value of rank 0: tensors as they are, in place, and other objects pickled."""
    if not isinstance(value, Tensor):
        return strategy.broadcast(value)
    dist.broadcast(value, src=0)
    return value


def _within(context: Callable[[], AbstractContextManager[Any]], hook: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(hook)
    def within(*args: Any, **kwargs: Any) -> Any:
        with context():
            return hook(*args, **kwargs)

    return within


def _on_batches(hook: Any) -> Any:
    """Adapt a hook that is called with a batch to batches of other kinds."""

    @functools.wraps(hook)
    def wrapped(batch: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(batch, SeparateRecords):
            return batch.mapped(lambda one: hook(one, *args, **kwargs))
        return batch if isinstance(batch, Cohort) else hook(batch, *args, **kwargs)

    return wrapped
