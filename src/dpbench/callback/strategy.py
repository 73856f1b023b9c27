"""Base of all private strategies: Lightning's hooks on one side, a source of records and its releases on the other.

    training_step → backward     the source: per-record gradients → discretize → clip → sum
    on_before_optimizer_step     the release: noise, ledger, division → p.grad, error correction, new bounds

A strategy designs a recipe; everything here is the same for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import pytorch_lightning as pl
import torch
from torch.optim import Optimizer

from dpbench.callback import run_key
from dpbench.callback.lightning_training import LightningTraining, count_batches, processes_of
from dpbench.callback.non_private import NonPrivate
from dpbench.callback.process_group import leave_group_at_exit
from dpbench.callback.strategy_options import StrategyOptions
from dpbench.data.loader import PrivateDataLoader
from dpbench.errors import ConfigurationError, shown
from dpbench.guards import LIGHTNING, Guard, earlier_fits
from dpbench.guards.agreement import are_alike, refuse_other_records
from dpbench.guards.choices import refuse_training_records
from dpbench.guards.divergence import LotsWithoutGradients, refuse_diverged
from dpbench.privacy.accounting.ledger import FILE_NAME
from dpbench.privacy.accounting.seal import STATE_KEY
from dpbench.privacy.accounting.writer import records_a_run
from dpbench.privacy.budget import Budget, TrainingLength, check_noise
from dpbench.privacy.mechanism.mechanism import Mechanism
from dpbench.privacy.mechanism.recipe import Recipe
from dpbench.privacy.releases import Observer, ReleaseEngine
from dpbench.records.source import ChosenGradients, InPieces, RecordsInTurn
from dpbench.session.session import PrivateSession

_NO_RELEASE = (
    "no private update was made for this batch: call self.manual_backward(loss) and self.optimizers().step() exactly "
    "once for each batch, also an empty one (steps that bypass Lightning's optimizer are not private)."
)
_EARLY = 50  # releases whose bounds are all logged: they move fast at first


class PrivateStrategy(StrategyOptions, pl.Callback):
    """A Lightning callback that makes every update of the model a private release.

    A strategy is a class with its own options as annotated fields and a method `design`; the options that all have are
    those of `StrategyOptions`.

    Guarantee: (ε, δ)-differential privacy of all updates together, with the unit of privacy and the neighboring
    relation of the sampling (an example, unless the batches draw others), and ε as the ledger gives it. It covers the
    weights, not metrics named `nonprivate/…`.

    Raises:
        ConfigurationError: An option is out of range, or neither noise_multiplier nor target_epsilon is given.
    """

    default_sampling = "poisson"

    def __post_init__(self) -> None:
        check_noise(self.noise_multiplier, self.target_epsilon)
        self.ledger_path = None if self.ledger is None else Path(self.ledger)
        recipe = self.design()
        if not isinstance(recipe, Recipe):
            raise ConfigurationError(
                f"{type(self).__name__}.design must return a Recipe (dpbench.privacy.mechanism.recipe), not "
                f"{shown(recipe)}: {'is a return missing?' if recipe is None else 'return one.'}"
            )
        self.recipe = self._with_common_parts(recipe)
        self._make_noise()  # refuses options that contradict one another
        after = self._earlier_ledger()
        budget = Budget(self.target_epsilon, self.delta, self.accountant, after)
        self._releases = ReleaseEngine(
            self.recipe,
            budget,
            self.noise_multiplier,
            self.seed,
            self.fingerprint,
            self._schedules(self.recipe),
            self.noise_process,
        )
        self._source = self._source_of_records()
        self._session = self.session(LIGHTNING)
        self._restored = False
        self._settings: run_key.Settings | None = None
        self._unused_lots = LotsWithoutGradients()
        self._fixed = True

    def _earlier_ledger(self) -> Path | None:
        """Path of the ledger that this training's begins with."""
        if self.after is None:
            return None
        if not self.recipe.private:
            raise ConfigurationError(f"{type(self).__name__} is not private, and has no ledger: leave out after.")
        if self.audit is not None:
            raise ConfigurationError(
                "an audit cannot cover the earlier training (after=...): set audit=None, or audit the stages "
                "separately."
            )
        path = Path(self.after)
        if not path.is_file():
            raise ConfigurationError(f"after={self.after!r} is not a file: name the ledger of the earlier training.")
        return path

    def session(self, guards: Sequence[type[Guard]]) -> PrivateSession:
        """A session that trains by this strategy, for another driver than a Trainer.

        Args:
            guards: Guards of the training.
        """
        return PrivateSession(
            self._releases,
            self._source,
            guards,
            self.audit,
            self.delta,
            self.executor,
        )

    @property
    def has_trained(self) -> bool:
        """Return whether it trains, or has trained."""
        releases = self._releases
        return releases.num_releases > 0 or self._session.is_attached or releases.budget.path is not None

    def take_solution(self) -> None:
        """Show the noise multiplier that a training has solved for."""
        self._set_solved("noise_multiplier", self._releases.noise_multiplier)

    def note_unused_lot(self, log: Callable[..., object] | None = None) -> None:
        """Warn once of a batch without a finite record; see `LotsWithoutGradients`."""
        self._unused_lots.note(self._releases.mechanism, self._source, log)

    @property
    def private(self) -> bool:
        """False for the error-free references, which have no ledger and no epsilon."""
        return self.recipe.private

    @property
    def releases(self) -> int:
        """Number of releases so far."""
        return self._releases.num_releases

    @property
    def observers(self) -> list[Observer]:
        """Called with each piece of a batch: (mechanism, parameter names, gradients of records, squared norms)."""
        return self._releases.observers

    @property
    def mechanism(self) -> Mechanism:
        """The mechanism that releases batches; a ConfigurationError if nothing was trained in this process."""
        return self._releases.mechanism

    @property
    def remaining_steps(self) -> int | None:
        """Steps that target_epsilon still allows, at most the planned ones; None without a target."""
        return self._releases.budget.remaining

    def epsilon(self, accountant: str | None = None) -> float:
        """Epsilon of all that the run (by its ledger; a new one begins at zero) released; infinite without privacy.

        Args:
            accountant: Name of an accountant; None: the strategy's.

        Raises:
            ConfigurationError: Nothing was trained in this process.
        """
        return self._releases.epsilon(accountant)

    # ------------------------------------------------------------------------------------- attach and detach

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Refuse settings under which the guarantee would not hold."""
        if stage != "fit":
            return
        leave_group_at_exit()
        self._restored = False
        _refuse_others(trainer, self)
        self._session.check(LightningTraining(trainer, pl_module))

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Let the source of records take over the training step and the backward pass."""
        if self._releases.may_draw_again:
            self._settings = run_key.settings_of(self._session.training, self)
        self._session.attach()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Take the batches over, fix the plan and open the ledger; everything can still be refused."""
        releases = self._releases
        loader = self._session.acquire(trainer.train_dataloader)
        ledger = self.ledger_path or self._ledger_beside_the_log(trainer)
        budget = releases.budget
        if not self._restored and not earlier_fits.goes_on(pl_module, ledger, budget.path, budget.after):
            if trainer.global_step:
                earlier_fits.refuse_unknown_past(None, self.private)
            releases.reset()
        alike = isinstance(self._source, RecordsInTurn) or are_alike(pl_module)
        key, key_of = self._run_key(trainer, pl_module, loader)
        horizon = TrainingLength(trainer.estimated_stepping_batches, trainer.global_step)
        sizes = getattr(pl_module, "record_metrics", {})
        processes = processes_of(trainer, alike)
        if isinstance(self._source, InPieces):
            self._source.keep_sizes(ledger.parent, processes, self._restored or records_a_run(ledger))
        self._session.begin(processes, key, ledger, horizon, sizes, key_of)
        if self.private and self.ledger_path is None:
            self._session.training.inform(f"The ledger of this training is {ledger}.")
        self.take_solution()

    def _ledger_beside_the_log(self, trainer: pl.Trainer) -> Path:
        """Path of the ledger where the strategy was given none, the same in all processes."""
        folder = Path(trainer.log_dir or trainer.default_root_dir)
        if not self.private:
            return folder / FILE_NAME
        budget = self._releases.budget
        seal = budget.seal if self._restored else None
        ledger = earlier_fits.ledger_in(folder, budget.path, self._restored, seal)
        ledger = trainer.strategy.broadcast(ledger)  # the first process may have begun it when another one looks
        if ledger.parent != folder and not self._restored and ledger != budget.path:
            first = folder / FILE_NAME
            self._session.training.inform(
                f"{first} records another run, and {ledger} records this one: their releases add up (dpbench account "
                f"{first} {ledger})."
            )
        return ledger

    def _run_key(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        loader: PrivateDataLoader,
    ) -> tuple[int | None, Callable[[int], int] | None]:
        """Check that all processes have the same records; return the key, and the rule of a kept one."""
        settings = self._settings
        self._settings = None  # it holds on to all that it was made of
        if settings is None:
            refuse_other_records(trainer, loader)
            return None, None
        first = self._releases.first_weights or run_key.weights_digest(pl_module)
        self._releases.first_weights = first
        key, key_of, contents = run_key.keys_of(self._session.training, self, settings, first, loader)
        refuse_other_records(trainer, loader, contents)
        return key, key_of

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Give the module back as it was."""
        self._session.end()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Give the module back also after an error."""
        self.teardown(trainer, pl_module, "fit")

    # ------------------------------------------------------------------------------------- one lot

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Begin a batch: its release, its records, and the random numbers of the model."""
        rank = 0 if getattr(pl_module, "same_randomness", False) else trainer.global_rank
        self._session.open(batch, rank)

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        """Release the sums of the batch to `p.grad`."""
        if optimizer is self._session.optimizer:
            self._session.release()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Show the epsilon so far; stop before the step that would exceed the budget."""
        if not self._session.released:
            raise ConfigurationError(_NO_RELEASE)
        self._session.close()
        count_batches(trainer)
        self.note_unused_lot(pl_module.log)
        trainer.should_stop = trainer.should_stop or self._releases.budget.exhausted
        last = trainer.should_stop or trainer.global_step == trainer.max_steps
        number = self.releases
        interval = max(trainer.log_every_n_steps, 1)  # type: ignore[attr-defined]
        if self.recipe.adaptation is not None and number <= _EARLY:
            interval = 1
        if last or number % interval == 0:
            epsilon = None
            budget = self._releases.budget
            if self.private and (last or budget.is_worth_logging(number, number - interval)):
                epsilon = budget.epsilon_here()
                # On the host: Lightning reads what a progress bar shows in each step up to the end of the epoch.
                on_host = torch.tensor(epsilon)
                pl_module.log("privacy/epsilon", on_host, prog_bar=True, logger=False, batch_size=1)
            _log(trainer, self._releases, epsilon)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Refuse choices by validation data that are training data."""
        if self._session.has_lots and self.private and not trainer.sanity_checking:
            refuse_training_records(trainer, self._session.loader.dataset)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Check that no batch of the epoch was left out."""
        _ = self._session.trained
        self._session.refuse_skipped_lot()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Log the last epsilon with the last accuracy."""
        if trainer.global_step and not self.releases:
            raise ConfigurationError(
                f"training has made {trainer.global_step} steps, none of them private: hooks of the private strategy "
                "did not run. A subclass that overrides a hook must call super()'s. Do not publish this model."
            )
        epsilon = self._releases.budget.epsilon_here() if self.private else None
        _log(trainer, self._releases, epsilon)

    # ------------------------------------------------------------------------------------- checkpoints

    @property
    def state_key(self) -> str:
        """Key of the state in a checkpoint, one for all strategies."""
        return STATE_KEY

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Write the state that a resumed run needs to go on with the same releases.

        Not by `state_dict`: a trainer with two strategies would be refused by Lightning, without the cause, before
        `setup` can.

        Raises:
            ConfigurationError: The training ran in other processes, which alone know its releases.
        """
        earlier_fits.refuse_unknown_training(trainer, self._session.is_admitted)
        checkpoint["callbacks"][STATE_KEY] = self.state_of_releases()

    def state_of_releases(self) -> dict[str, Any]:
        """State of a checkpoint, which `load_state_dict` takes: all releases so far, and the ledger that has them."""
        state = self._releases.state_dict()
        if isinstance(self._source, ChosenGradients):
            # The engine is tried again: it has to find out anew which rows are whose.
            state["gradients"] = "one_by_one" if self._source.next_method == "one_by_one" else None
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue after the releases of the checkpoint."""
        earlier_fits.refuse_unknown_past(state_dict.get("private", True), self.private)
        self._releases.load_state_dict(state_dict)
        if isinstance(self._source, ChosenGradients):
            self._source.method = state_dict.get("gradients")
            self._source.is_chosen = self._source.method is not None
        self._restored = True

    # ------------------------------------------------------------------------------------- outside of a Trainer

    def on_after_setup(self, **_: Any) -> None:
        """Lightning Fabric calls this once a model is set up, and none of the hooks that make training private.

        Raises:
            ConfigurationError: Always.
        """
        raise ConfigurationError(
            f"Lightning Fabric does not run the hooks of {type(self).__name__}, so training would continue without "
            "privacy: use a Lightning Trainer with callbacks=[strategy] (manual optimization leaves the loop to you)."
        )

    def on_after_optimizer_step(self, **_: Any) -> None:
        """Lightning Fabric calls this after each step; as `on_after_setup`."""
        self.on_after_setup()

    def __iter__(self) -> NoReturn:
        raise ConfigurationError(f"give the trainer a list: callbacks=[{type(self).__name__}(...)].")


def _refuse_others(trainer: pl.Trainer, strategy: PrivateStrategy) -> None:
    """Refuse another strategy among the callbacks, or this one there twice: a batch can be released once only."""
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    strategies = [callback for callback in callbacks if isinstance(callback, PrivateStrategy | NonPrivate)]
    others = [other for other in strategies if other is not strategy] or strategies[1:]
    if others:
        raise ConfigurationError(
            f"the trainer has two strategies, {type(strategy).__name__} and {type(others[0]).__name__}, but a batch "
            "can be released only once: keep one of them."
        )


def epsilon_here(strategy: PrivateStrategy, accountant: str) -> float:
    """Epsilon at this step: without releases on disk that a resumed training has yet to repeat."""
    return strategy._releases.budget.epsilon_here(accountant)


def _log(trainer: pl.Trainer, releases: ReleaseEngine, epsilon: float | None) -> None:
    """Log private values: epsilon, adaptive bounds and released metrics; stop once released weights have diverged.

    Args:
        trainer: The trainer, with its loggers.
        releases: The releases so far.
        epsilon: Their epsilon; None where this point has none.
    """
    refuse_diverged(trainer.lightning_module, releases)
    recipe = releases.recipe
    values: dict[str, float] = {}
    if epsilon is not None:
        values["privacy/epsilon"] = epsilon
    if recipe.adaptation is not None:
        for group in releases.mechanism.plan.groups:
            values[f"privacy/bound/{group.name}"] = group.max_grad_norm
    values |= releases.mechanism.take_metrics()
    for logger in trainer.loggers if values else ():
        logger.log_metrics(values, step=releases.num_releases)  # Lightning counts one less
