"""What all private strategies share: the path from a lot's loss to `p.grad`, inside Lightning's loops.

    training_step → backward (per-record gradients, clip, sum) → on_before_optimizer_step (ledger, noise, p.grad)

A strategy says how a lot becomes a sum (`plan`); everything here is the same for all of them.
"""

from __future__ import annotations

import functools
import hashlib
import json
from abc import abstractmethod
from collections import Counter
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from pytorch_lightning.strategies import DDPStrategy
from torch import Tensor
from torch.optim import Optimizer

from dpbench.errors import BudgetExhausted, ConfigurationError
from dpbench.privacy.accounting import (
    calibrate_noise_multiplier,
    check_accountant,
    check_delta,
    epsilon,
    remaining_releases,
)
from dpbench.privacy.clipping import clip_and_sum
from dpbench.privacy.engine import LossReduction, PerRecordEngine
from dpbench.privacy.ledger import Event, Header, LedgerWriter, Release
from dpbench.privacy.noise import fresh_key, keyed_generator
from dpbench.privacy.plan import ReleasePlan
from dpbench.privacy.sampling import Sampling
from dpbench.strategies import guards

_NOISE_STREAM, _MODEL_STREAM = 2, 3  # lots are keyed by stream 1, see data.lots
_UNBOUNDED = 10**7  # releases that a run without an end is checked for


class PrivateStrategy(pl.Callback):
    """A Lightning callback that makes every update of the model a private release.

    Guarantee: (ε, δ)-differential privacy of all updates together, with an example as the unit, the neighbouring
    relation of the sampling, and ε as the ledger gives it. It covers the weights, not metrics named `nonprivate/…`.

    Args:
        noise_multiplier: Standard deviation of the noise in units of the clipping bound.
        target_epsilon: Budget. Alone, the noise multiplier is found for the planned number of steps; beside a
            noise_multiplier, training stops before the step that would exceed it.
        delta: δ of the guarantee; below 1 / number of records.
        accountant: Name of the accountant that calibrates and stops, see `privacy.accounting.ACCOUNTANTS`.
        seed: Key of noise (and of the model's own randomness), for runs that can be repeated; whoever knows it
            can subtract the noise. Two different runs on the same data need different seeds: noise that two releases
            share protects neither. None takes the operating system's entropy: use that for models to be published.
        max_physical_batch_size: Lots are processed in pieces of at most so many records; the result is the same.
        loss_reduction: How `training_step` combines records: "mean" or "sum".
        ledger: Path of the ledger; by default `ledger.jsonl` in the trainer's log folder.
        fingerprint: Names everything else that determines the run (data, model, code). With it, a run resumed after
            a crash repeats the releases after its checkpoint instead of spending new ones.

    Raises:
        ConfigurationError: A value is out of range, or neither noise_multiplier nor target_epsilon is given.
    """

    default_sampling = "poisson"

    def __init__(
        self,
        noise_multiplier: float | None = None,
        target_epsilon: float | None = None,
        delta: float = 1e-5,
        accountant: str = "rdp",
        seed: int | None = None,
        max_physical_batch_size: int | None = None,
        loss_reduction: LossReduction = "mean",
        ledger: str | None = None,
        fingerprint: str | None = None,
    ) -> None:
        super().__init__()
        if noise_multiplier is None and target_epsilon is None:
            raise ConfigurationError("give a noise_multiplier, a target_epsilon, or both (then training stops there).")
        for name, value in (("noise_multiplier", noise_multiplier), ("target_epsilon", target_epsilon)):
            if value is not None and not 0 < value < float("inf"):
                hint = "; use strategy=none to train without privacy" if name == "noise_multiplier" else ""
                raise ConfigurationError(f"{name} must be a positive number, not {value}{hint}.")
        if max_physical_batch_size is not None and max_physical_batch_size < 1:
            raise ConfigurationError(f"max_physical_batch_size must be at least 1, not {max_physical_batch_size}.")
        if seed is not None and seed < 0:
            raise ConfigurationError(f"seed must not be negative, got {seed}.")
        check_delta(delta)
        check_accountant(accountant)
        self.noise_multiplier, self.target_epsilon = noise_multiplier, target_epsilon
        self.delta, self.accountant = delta, accountant
        self.seed = seed
        self.max_physical_batch_size = max_physical_batch_size
        self.loss_reduction = loss_reduction
        self.ledger_path = None if ledger is None else Path(ledger)
        self.fingerprint = fingerprint
        self.releases = 0
        self._key = fresh_key() if seed is None else seed
        self._verified = False
        self._engine: PerRecordEngine | None = None
        self._plan: ReleasePlan | None = None
        self._writer: LedgerWriter | None = None
        self._spent: Counter[Event] = Counter()
        self._remaining: int | None = None
        self._records = 0
        self._absorbed = self._released = False

    # ------------------------------------------------------------------------------------- for the strategies

    @abstractmethod
    def plan(self, engine: PerRecordEngine, sampling: Sampling, noise_multiplier: float) -> ReleasePlan:
        """How each lot is released: groups, bounds, noise."""

    def epsilon(self, accountant: str = "rdp") -> float:
        """Epsilon of everything released so far, at `delta`.

        Raises:
            ConfigurationError: Nothing was trained in this process.
        """
        if self._plan is None:
            raise ConfigurationError(
                "nothing was trained in this process (with ddp_spawn the training ran in others): read the ledger, for "
                "example with `dpbench account`."
            )
        return epsilon(self._spent, self.delta, accountant)

    # ------------------------------------------------------------------------------------- attach and detach

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Refuse settings under which the guarantee would not hold."""
        if stage != "fit":
            return
        guards.refuse_trainer_settings(trainer, pl_module)
        if sum(isinstance(callback, PrivateStrategy) for callback in trainer.callbacks) > 1:  # type: ignore[attr-defined]
            raise ConfigurationError("two private strategies are attached to one trainer; keep one.")
        if self.max_physical_batch_size and not pl_module.automatic_optimization:
            raise ConfigurationError(
                "max_physical_batch_size needs automatic optimization: in manual optimization training_step makes the "
                "update itself. Leave it out, or draw smaller lots."
            )

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Attach the engine and take over the backward pass."""
        self._engine = PerRecordEngine(pl_module, self.loss_reduction)
        guards.refuse_optimizers(trainer, self._engine.parameters, self._engine.names)
        self._module, self._verified = pl_module, False
        self._total, self._views = _flat_buffer(self._engine.parameters)
        pl_module.__dict__["backward"] = self._backward
        if pl_module.automatic_optimization:
            pl_module.__dict__["training_step"] = self._in_chunks(trainer, pl_module, pl_module.training_step)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Know the lots, fix the plan, open the ledger; everything can still be refused."""
        assert self._engine is not None
        self._loader = guards.known_lots(trainer)
        lots = self._loader.lots
        lots.position = self.releases  # lot t belongs to release t
        sampling = lots.sampling
        if self.delta >= 1 / sampling.population and trainer.is_global_zero:
            pl.utilities.rank_zero_warn(
                f"delta={self.delta} is not below 1/{sampling.population} (the number of records): such a delta allows "
                "to publish one record outright; choose a smaller one."
            )
        if self.noise_multiplier is None:
            self.noise_multiplier = self._calibrated(trainer, self._engine, sampling)
        self._plan = self.plan(self._engine, sampling, self.noise_multiplier)
        path = self.ledger_path or Path(trainer.log_dir or trainer.default_root_dir) / "ledger.jsonl"
        if trainer.is_global_zero:  # `log_dir` above asks all ranks
            self._writer = self._open_ledger(path, self._plan)
            known = self._writer.events, self._writer.replays, self._writer.phase
        else:
            known = Counter(), 0, 0
        self._spent, replays, lots.phase = trainer.strategy.broadcast(known)
        if self._writer is not None:
            self._spent = self._writer.events  # counted there
        if self.target_epsilon is not None:
            self._remaining = self._affordable(trainer, replays)
            if not self._remaining:
                raise BudgetExhausted(
                    f"target_epsilon={self.target_epsilon} allows no further step (spent: {self.epsilon():.4g}): "
                    "raise it, or the noise_multiplier."
                )

    def _calibrated(self, trainer: pl.Trainer, engine: PerRecordEngine, sampling: Sampling) -> float:
        steps = trainer.estimated_stepping_batches
        if steps == float("inf") or steps < 1:
            raise ConfigurationError(
                "target_epsilon without noise_multiplier needs an end: set max_steps or max_epochs."
            )

        def event(noise_multiplier: float) -> Event:
            return sampling, self.plan(engine, sampling, noise_multiplier).queries()

        assert self.target_epsilon is not None
        return calibrate_noise_multiplier(event, int(steps), self.target_epsilon, self.delta, self.accountant)

    def _affordable(self, trainer: pl.Trainer, replays: int) -> int:
        """Steps that may still be made; replays of recorded releases cost nothing."""
        assert self._plan is not None and self.target_epsilon is not None
        planned = trainer.estimated_stepping_batches
        most = _UNBOUNDED if planned == float("inf") else max(int(planned) - self.releases - replays, 1)
        event = (self._plan.sampling, self._plan.queries())
        new = remaining_releases(self._spent, event, self.target_epsilon, self.delta, self.accountant, most)
        return replays + new

    def _open_ledger(self, path: Path, plan: ReleasePlan) -> LedgerWriter:
        sampling = plan.sampling
        header = Header("example", sampling.neighbouring_relation, sampling.population, self.delta, self._replay(plan))
        resumed = self.releases > 0 or self.fingerprint is not None
        return LedgerWriter(path, header, start=self.releases, resume=resumed)

    def _replay(self, plan: ReleasePlan) -> str | None:
        if self.seed is None or self.fingerprint is None:
            return None
        assert self._engine is not None
        device = self._engine.parameters[0].device.type
        parts = [self.fingerprint, self.seed, device, self._engine.names, _digest(plan), torch.__version__]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Give the module back as it was."""
        pl_module.__dict__.pop("backward", None)
        pl_module.__dict__.pop("training_step", None)
        if self._engine is not None:
            self._engine.close()
            self._engine = None
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Give the module back also after an error."""
        self.teardown(trainer, pl_module, "fit")

    # ------------------------------------------------------------------------------------- one lot

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Open a lot."""
        assert self._engine is not None
        if isinstance(trainer.strategy, DDPStrategy):
            assert trainer.strategy.model is not None
            trainer.strategy.model.require_backward_grad_sync = False  # type: ignore[assignment]
        if trainer.train_dataloader is not self._loader:
            raise ConfigurationError(
                "the training loader was replaced in mid-run (reload_dataloaders_every_n_epochs?): its lots are not "
                "those that the ledger counts on; use one LotLoader throughout."
            )
        self._records = guards.count_records(batch)
        self._absorbed = self._released = False
        self._engine.discard()
        self._before = {} if self._verified else guards.tensors_of(pl_module)
        if self.seed is not None:  # dropout and the like: a function of (seed, release, rank), so that replays repeat
            generator = keyed_generator((self.seed, _MODEL_STREAM, self.releases, trainer.global_rank))
            torch.manual_seed(int(torch.randint(2**62, (), generator=generator)))

    def _in_chunks(self, trainer: pl.Trainer, pl_module: pl.LightningModule, training_step: Any) -> Any:
        """Split a lot that is larger than `max_physical_batch_size`; Lightning still sees one step.

        An empty lot asks nothing of the model, which need not be able to handle it; its release is noise. (Among
        several processes it does: logging may wait for all of them.)
        """

        @functools.wraps(training_step)
        def step(batch: Any, *args: Any, **kwargs: Any) -> Any:
            lot = self._records
            if not lot and trainer.world_size == 1:
                return torch.zeros((), device=pl_module.device, requires_grad=True)
            *pieces, last = guards.chunks_of(batch, lot, self.max_physical_batch_size, trainer)
            for piece in pieces:
                self._records = guards.count_records(piece)
                output = training_step(piece, *args, **kwargs)
                loss = output["loss"] if isinstance(output, dict) else output
                self._refuse_missing_loss(loss is not None)
                self._absorb(loss)
            self._records = guards.count_records(last)
            return training_step(last, *args, **kwargs)

        return step

    def _backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """In place of `LightningModule.backward`."""
        self._refuse_second_release()
        if self._absorbed and self.max_physical_batch_size is None:
            raise ConfigurationError(
                "backward was called twice for one lot, so that a record could count twice: add the losses up and call "
                "it once."
            )
        self._absorb(loss)

    def _absorb(self, loss: Tensor) -> None:
        """Clip the records of a (piece of a) lot and add them to the running sum."""
        assert self._engine is not None and self._plan is not None
        verify = not self._verified and self._records > 0
        gradients = self._engine.backward(loss, self._records, verify=verify)
        if verify:
            self._verified = self._engine.verified
            guards.refuse_changed_tensors(self._module, self._before)
        with torch.no_grad():
            sums = clip_and_sum(gradients, self._plan.groups)
            if not self._absorbed:
                self._total.zero_()
            for view, part in zip(self._views, sums, strict=True):
                view.add_(part)
        self._absorbed = True

    # ------------------------------------------------------------------------------------- one release

    @torch.no_grad()
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        """Release the sum of the lot: noise, a line in the ledger, the division, and only then `p.grad`."""
        assert self._engine is not None and self._plan is not None
        self._check_release()
        if not self._absorbed:
            self._total.zero_()
        if trainer.is_global_zero:
            phase = self._writer.phase if self._writer else 0
            key = (self._key, _NOISE_STREAM, _digest(self._plan), phase, self.releases)
            self._plan.privatize(self._total, keyed_generator(key, self._total.device))
        if trainer.world_size > 1:
            dist.all_reduce(self._total)
        event = self._plan.sampling, self._plan.queries()
        if self._writer is not None:  # on disk before anything uses the noised sum
            checksum = float(self._total.sum(dtype=torch.float64)).hex()
            self._writer.append(Release(self.releases, *event, checksum))
        else:
            self._spent[event] += 1
        self._plan.average(self._total)
        for parameter, view in zip(self._engine.parameters, self._views, strict=True):
            parameter.grad = view.to(parameter.dtype) if parameter.requires_grad else None
        self._released = True
        self.releases += 1
        if self._remaining is not None:
            self._remaining -= 1

    def _refuse_second_release(self) -> None:
        if self._released:
            raise ConfigurationError(
                "two optimizer steps were made on one lot, but the accounting holds for one: draw a new lot for each "
                "(optimizers that evaluate a closure several times, like LBFGS, are not supported)."
            )

    def _refuse_missing_loss(self, given: bool) -> None:
        if not given:
            raise ConfigurationError(
                "training_step gave no loss for a lot that is not empty: skipping lots by their contents is not "
                "private. Return the loss always."
            )

    def _check_release(self) -> None:
        self._refuse_second_release()
        self._refuse_missing_loss(self._absorbed or not self._records)
        if self._remaining is not None and self._remaining < 1:
            raise BudgetExhausted(f"target_epsilon={self.target_epsilon} is spent ({self.epsilon():.4g}).")

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Show the epsilon so far; stop before the step that would exceed the budget."""
        if not self._released:
            raise ConfigurationError(
                "no private update was made for this lot: call self.manual_backward(loss) and self.optimizers().step() "
                "exactly once for each lot, also an empty one (steps past Lightning's optimizer are not private)."
            )
        last = self._remaining is not None and self._remaining < 1
        if last:
            trainer.should_stop = True
        if last or self.releases % max(trainer.log_every_n_steps, 1) == 0:  # type: ignore[attr-defined]
            pl_module.log("privacy/epsilon", self.epsilon(), prog_bar=True, logger=False, batch_size=1)
            self._log_epsilon(trainer)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """The last epsilon beside the last accuracy."""
        self._log_epsilon(trainer)

    def _log_epsilon(self, trainer: pl.Trainer) -> None:
        for logger in trainer.loggers:  # at the number of releases, where Lightning counts one less
            logger.log_metrics({"privacy/epsilon": self.epsilon()}, step=self.releases)

    # ------------------------------------------------------------------------------------- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to go on with the same releases."""
        return {"releases": self.releases, "noise_multiplier": self.noise_multiplier}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue after the releases of the checkpoint."""
        self.releases = int(state_dict["releases"])
        if self.noise_multiplier is None:
            self.noise_multiplier = state_dict["noise_multiplier"]


def _digest(plan: ReleasePlan) -> int:
    """A number for what is released: the same unit noise scaled in two ways would reveal the sum."""
    return int(hashlib.sha256(repr(plan).encode()).hexdigest()[:32], 16)


def _flat_buffer(parameters: list[torch.nn.Parameter]) -> tuple[Tensor, list[Tensor]]:
    """One flat sum (float32 at least) and a view of it for each parameter, in the parameter's memory layout."""
    dtype = torch.float64 if any(p.dtype == torch.float64 for p in parameters) else torch.float32
    total = torch.zeros(sum(p.numel() for p in parameters), dtype=dtype, device=parameters[0].device)
    views, start = [], 0
    for p in parameters:
        dense = sum((n - 1) * step for n, step in zip(p.shape, p.stride(), strict=True)) + 1 == p.numel()
        piece = total[start : start + p.numel()]
        views.append(torch.as_strided(total, p.shape, p.stride(), start) if dense else piece.view(p.shape))
        start += p.numel()
    return total, views
