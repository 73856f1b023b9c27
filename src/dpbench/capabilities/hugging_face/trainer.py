"""Hugging Face's Trainer with private updates: a driver of `PrivateSteps`."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, SaveStrategy, TrainOutput, get_last_checkpoint

from dpbench.callback.loop import LoopTraining, Loss, PrivateSteps, refuse_second_training, require_private
from dpbench.callback.strategy import PrivateStrategy
from dpbench.capabilities.hugging_face.arguments import refuse_arguments
from dpbench.capabilities.hugging_face.model_losses import is_causal, loss_of
from dpbench.data.loader import PrivateDataLoader
from dpbench.data.records import ITEM
from dpbench.errors import ConfigurationError, brief
from dpbench.files import replacing
from dpbench.guards.earlier_fits import ledger_in
from dpbench.guards.lots import require_lot_loader
from dpbench.privacy.budget import TrainingLength
from dpbench.records.source import require_hook

STATE_FILE = "private_strategy.pt"
"""File of a checkpoint, with the strategy's state."""
_EXACT = ("loss", "train_loss", "total_flos")
"""Logged values that the Trainer computes of training records; in private training they are zero."""


class PrivateTrainer(Trainer):
    """Hugging Face's Trainer, with the released gradient of a strategy in the place of each batch's own.

    Optimizer, schedule, evaluation, callbacks, logging and saving are the Trainer's. Batches are drawn by Poisson
    sampling with `per_device_train_batch_size` as the expected size. The training loss, which is private, is not
    logged; `epsilon` is.

    Guarantee: that of the strategy, for all updates together. The unit is an item of `train_dataset`.

    Args:
        *args: Arguments of the Trainer.
        strategy: A new strategy. Without `ledger=`, the ledger is in the folder `output_dir`.
        loss: Function of the model and a batch that returns the mean of its records' losses. None: by the model's
            class, for causal, masked and sequence-to-sequence language models and for classifiers.
        unit: Word of the ledger for an item of `train_dataset`, such as "text", or "block" where texts were
            concatenated and cut: a text that is spread over several blocks is protected less. None: its attribute
            `unit`, or "item".
        **options: Arguments of the Trainer.

    Raises:
        ConfigurationError: An argument is not private.

    Example:
        >>> trainer = PrivateTrainer(  # doctest: +SKIP
        ...     model, args, train_dataset=texts, strategy=DPSGD(target_epsilon=8, delta=1e-5)
        ... )
        >>> trainer.train()  # doctest: +SKIP
    """

    model: Any
    optimizer: Any
    args: Any

    def __init__(
        self,
        *args: Any,
        strategy: PrivateStrategy,
        loss: Loss | None = None,
        unit: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        require_private(strategy)
        self.strategy = strategy
        self._unit = unit
        self._has_own_loss = loss is not None
        self._loss = loss or loss_of(self.model)
        self._steps: PrivateSteps | None = None
        self._state: dict[str, Any] | None = None
        self._refuse()
        if self.args.max_grad_norm > 0:
            self._training().inform(
                f"TrainingArguments.max_grad_norm={self.args.max_grad_norm} would clip the released gradient with its "
                "noise, and is set to 0: the strategy clips each record."
            )
            self.args.max_grad_norm = 0.0
        # First, so that a batch is over when other callbacks see its step.
        self.callback_handler.callbacks.insert(0, _Steps(self))

    def _refuse(self) -> None:
        """Refuse arguments and overridden methods, without a look at a record."""
        refuse_arguments(self)
        own = type(self)
        evaluates_only = self._has_own_loss or own.compute_loss is Trainer.compute_loss
        overrides = {
            "training_step": own.training_step is not PrivateTrainer.training_step,
            "compute_loss": not evaluates_only,
        }
        for name, is_overridden in overrides.items():
            if is_overridden:
                raise ConfigurationError(
                    f"{own.__name__} overrides {name}, which private training does not call: pass loss=, a function of "
                    "the model and a batch that returns the mean of its records' losses."
                )
        if getattr(self.data_collator, "seed", None) is not None:
            raise ConfigurationError(
                f"{type(self.data_collator).__name__}(seed=...) draws masks by a known seed, so that a record changes "
                "the masks of others: leave seed out (the strategy's seed= repeats a training)."
            )
        for tokenizer in (self.processing_class, getattr(self.data_collator, "tokenizer", None)):
            if getattr(tokenizer, "padding_side", "right") == "left" and is_causal(self.model):
                raise ConfigurationError(
                    "the tokenizer pads on the left, where a causal model counts the positions of padding, too: set "
                    'tokenizer.padding_side = "right" for training.'
                )

    # ------------------------------------------------------------------------------------- training

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        *args: Any,
        **options: Any,
    ) -> TrainOutput:
        """Train; as the Trainer's, with nan as the training loss.

        Raises:
            ConfigurationError: An argument is not private, or the checkpoint has no state of a strategy.
        """
        self._refuse()
        self._state = None
        folder: Any = resume_from_checkpoint or None
        if folder is True:
            folder = get_last_checkpoint(self.args.output_dir)  # type: ignore[no-untyped-call]
        if folder is None:
            refuse_second_training(self.strategy)
        else:
            self._state = _read_state(Path(folder) / STATE_FILE)
            self.args.ignore_data_skip = True  # the loader knows where to go on
        try:
            output = super().train(folder or resume_from_checkpoint, *args, **options)
        finally:
            if self._steps is not None:
                self._steps.end()
                self._steps = None
        return output._replace(training_loss=math.nan)

    def create_scheduler(self, num_training_steps: int, optimizer: Optimizer | None = None) -> Any:
        """As the Trainer's; then the private steps are checked, before a checkpoint moves optimizer and schedule on."""
        schedule = super().create_scheduler(num_training_steps, optimizer)
        if self.is_in_train:
            self.model.train()
            self._steps = PrivateSteps(self._training(), self.strategy)
            self._steps.check()
        return schedule

    def _training(self) -> LoopTraining:
        return _Training(self, self._loss)

    def get_train_dataloader(self) -> PrivateDataLoader:
        """Make Poisson batches with the data, the collator and the workers of the Trainer's own loader."""
        loader = super().get_train_dataloader()
        return PrivateDataLoader.poisson(
            loader.dataset,
            self.args.train_batch_size,
            self.strategy.seed,
            self._unit or getattr(loader.dataset, "unit", ITEM),
            collate_fn=loader.collate_fn,
            num_workers=loader.num_workers,
            pin_memory=loader.pin_memory and self.args.device.type == "cuda",
        )

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: object = None) -> Tensor:
        """Release the gradient of a batch, which no number of labels scales.

        Returns:
            Zero, in the place of the loss.
        """
        model.train()
        self.optimizer.train()
        self.steps.release(inputs)
        return torch.zeros((), device=self.args.device)

    @property
    def steps(self) -> PrivateSteps:
        """The private steps of the training that runs."""
        require_hook(self._steps is not None)
        assert self._steps is not None
        return self._steps

    def begin(self) -> None:
        """Begin the private steps; everything can still be refused."""
        steps = self.steps
        state = self.state
        if state.global_step >= state.max_steps:
            raise ConfigurationError(
                f"the checkpoint has made all {state.max_steps} steps: raise max_steps (or num_train_epochs)."
            )
        strategy = self.strategy
        resumes = self._state is not None
        if self._state is not None:
            strategy.load_state_dict(self._state)
        budget = steps.session.releases.budget
        ledger = strategy.ledger_path
        if ledger is None:
            seal = budget.seal if resumes else None
            ledger = ledger_in(Path(self.args.output_dir), budget.path, resumes, seal)
            steps.training.inform(f"The ledger of this training is {ledger}.")
        length = TrainingLength(state.max_steps, state.global_step)
        steps.begin(require_lot_loader(self.callback_handler.train_dataloader), ledger, length, resumes)

    # ------------------------------------------------------------------------------------- logs and checkpoints

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log without values that are exact for training records; with epsilon in their place."""
        steps = self._steps
        if steps is not None:
            exact = [name for name in _EXACT if logs.pop(name, None) is not None]
            number = self.strategy.releases
            is_due = steps.session.releases.budget.is_worth_logging(number, number - self.state.logging_steps)
            if self.strategy.private and exact and (is_due or "train_loss" in exact):
                logs["epsilon"] = self.strategy.epsilon()
        super().log(logs, start_time)

    def floating_point_ops(self, inputs: Any) -> int:
        """Zero: the size of a batch is private."""
        return 0

    def _save_rng_state(self, output_dir: str) -> None:
        """Save nothing: the state of random generators tells how many numbers a batch took."""


class _Steps(TrainerCallback):
    """The moments of private steps in a Trainer's loop.

    Args:
        trainer: The trainer.
    """

    def __init__(self, trainer: PrivateTrainer) -> None:
        self._trainer = trainer

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Begin."""
        self._trainer.begin()

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """End a batch after its update."""
        self._trainer.steps.close()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Save and stop before the step that would exceed the budget."""
        state.epoch = state.global_step / len(self._trainer.steps.session.loader)  # also of an epoch that is resumed
        is_over = self._trainer.steps.is_over
        control.should_training_stop |= is_over
        control.should_save |= is_over and args.save_strategy != SaveStrategy.NO

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Add the strategy's state to a checkpoint."""
        folder = Path(self._trainer.args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
        with replacing(folder / STATE_FILE) as file:
            torch.save(self._trainer.strategy.state_of_releases(), file)


class _Training(LoopTraining):
    """The training of a Trainer's model.

    Args:
        trainer: The trainer.
        loss: Function of the model and a batch.
    """

    def __init__(self, trainer: PrivateTrainer, loss: Loss) -> None:
        # Without the wrapper of accelerate.
        optimizer: Any = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
        super().__init__(trainer.model, loss, optimizer)
        self._accelerator = trainer.accelerator
        schedule = trainer.lr_scheduler
        settings = {name: value for name, value in vars(schedule).items() if name != "optimizer"} if schedule else {}
        callbacks = trainer.callback_handler.callbacks
        # Of these, the key of a seeded run is made.
        self.trainer = SimpleNamespace(
            lr_scheduler_configs=[SimpleNamespace(scheduler=settings, interval="step", frequency=1)],
            callbacks=[
                each for each in callbacks if not type(each).__module__.startswith(("transformers.", "dpbench."))
            ],
            precision=trainer.accelerator.mixed_precision,
        )

    def autocast(self) -> AbstractContextManager[Any]:
        """The Trainer's precision."""
        context: AbstractContextManager[Any] = self._accelerator.autocast()
        return context


def _read_state(path: Path) -> dict[str, Any]:
    """Read the strategy's state of a checkpoint.

    Raises:
        ConfigurationError: There is none, or it is damaged.
    """
    if not path.is_file():
        raise ConfigurationError(
            f"{path.parent} has no {path.name}: it is no checkpoint of a PrivateTrainer, or an unfinished one. Resume "
            "from an earlier one; its ledger has all releases."
        )
    try:
        state: dict[str, Any] = torch.load(path, weights_only=True)
    except Exception as error:  # whatever a damaged archive makes of unpickling
        raise ConfigurationError(
            f"{path} is damaged ({brief(error)}): resume from an earlier checkpoint; the ledger has all releases."
        ) from error
    return state
