"""What all private strategies share: the path from a lot's loss to `p.grad`, inside Lightning's loops.

    training_step → backward (per-record gradients → discretize → clip → sum)
                  → on_before_optimizer_step (ledger, noise, error correction, p.grad, new bounds)

A strategy chooses `groups` and `pieces`; everything here is the same for all of them.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from dpbench.data.lots import LotLoader
from dpbench.errors import ConfigurationError
from dpbench.privacy.clipping import VectorGroup
from dpbench.privacy.denoising import ErrorCorrection, Hypotheses, Scale
from dpbench.privacy.discretization import check_threshold
from dpbench.privacy.engine import LossReduction, PerRecordEngine
from dpbench.privacy.gradients import ParameterGradients
from dpbench.privacy.ledger import Header, Release
from dpbench.privacy.mechanism import Mechanism, Pieces
from dpbench.privacy.metrics import PrivateMetrics, Value, check_share
from dpbench.privacy.noise import fresh_key, keyed_generator
from dpbench.strategies import choices, guards, lot_pieces, runs
from dpbench.strategies.attached import TrainerOnly, attached, refuse_others, refuse_unreleased_training, trained
from dpbench.strategies.budget import Budget, check_counts, check_noise
from dpbench.strategies.coupling import CouplingProbe, Lot
from dpbench.strategies.non_private import NonPrivate
from dpbench.strategies.options import CheckedOptions, ledger_place
from dpbench.strategies.process_group import leave_group_at_exit
from dpbench.strategies.scope import Scope

_NOISE_STREAM, _MODEL_STREAM = 2, 3  # lots are keyed by streams 1 and 4, see data.lots
_EARLY = 50  # releases whose bounds are all logged: they move fast at first

Observer = Callable[[Mechanism, list[str], Sequence[ParameterGradients], Tensor], None]
"""Called with (mechanism, parameter names, per-record gradients before discretization, squared norms by group)."""


class PrivateStrategy(CheckedOptions, TrainerOnly, pl.Callback, ABC):
    """A Lightning callback that makes every update of the model a private release.

    Guarantee: (ε, δ)-differential privacy of all updates together, with an example as the unit, the neighbouring
    relation of the sampling, and ε as the ledger gives it. It covers the weights, not metrics named `nonprivate/…`.

    Args:
        noise_multiplier: z, noise in units of the sensitivity of the whole release, statistics included.
        target_epsilon: Budget. Alone, the noise multiplier is found for the planned number of steps; beside a
            noise_multiplier, training stops before the step that would exceed it.
        delta: δ of the guarantee; below 1 / number of records.
        accountant: Name of the accountant that calibrates and stops, see `privacy.accountants`.
        seed: Key of noise (and of the model's own randomness), for runs that can be repeated; whoever knows it
            can subtract the noise. Two different runs on the same data need different seeds: noise that two releases
            share protects neither. None takes the operating system's entropy: use that for models to be published.
        max_physical_batch_size: Lots are processed in pieces of at most so many records; the result is the same.
        microbatch_size: μ. Above 1 the gradients of the examples that were drawn into one microbatch are added up,
            divided by μ and clipped instead of each example's; an example can then move the sum by twice the bound.
        discretization_threshold: τ, discretizes each record's gradient to {−1, 0, +1} before clipping; None: not.
        correction_threshold: ν of the error correction of the released gradient; None: no correction.
        correction_hypotheses: Likelihood of the error correction, see `privacy.denoising.ErrorCorrection`.
        correction_scale: What ν is compared with: the noisy "sum" or "mean".
        priors: [p_down, p_stop, p_up] of the error correction; None takes equal ones.
        metrics: Private metrics: name → bound of one record's value, released as `private/<name>`; None: none.
        metrics_share: Share of the budget (of z⁻²) that they take.
        loss_reduction: How `training_step` combines records: "mean" or "sum".
        ledger: Path of the ledger; by default `ledger.jsonl` in the trainer's log folder.
        fingerprint: Names everything else that determines the run (data, model, code). With it, a run resumed after
            a crash repeats the releases after its checkpoint instead of spending new ones.

    Raises:
        ConfigurationError: A value is out of range, or neither noise_multiplier nor target_epsilon is given.
    """

    default_sampling = "poisson"
    private = True
    """False for the error-free references, which have no ledger and no epsilon."""

    def __init__(
        self,
        noise_multiplier: float | None = None,
        target_epsilon: float | None = None,
        delta: float = 1e-5,
        accountant: str = "rdp",
        seed: int | None = None,
        max_physical_batch_size: int | None = None,
        microbatch_size: int = 1,
        discretization_threshold: float | None = None,
        correction_threshold: float | None = None,
        correction_hypotheses: Hypotheses = "points",
        correction_scale: Scale = "sum",
        priors: list[float] | None = None,
        metrics: dict[str, float] | None = None,
        metrics_share: float = 0.05,
        loss_reduction: LossReduction = "mean",
        ledger: str | None = None,
        fingerprint: str | None = None,
    ) -> None:
        super().__init__()
        check_noise(noise_multiplier, target_epsilon)
        check_counts(max_physical_batch_size=max_physical_batch_size, microbatch_size=microbatch_size)
        if seed is not None and seed < 0:
            raise ConfigurationError(f"seed must not be negative, got {seed}.")
        check_threshold(discretization_threshold, "discretization_threshold")
        check_share(metrics_share)
        if correction_threshold is None and priors is not None:
            raise ConfigurationError("priors belong to the error correction: give a correction_threshold too.")
        self.noise_multiplier, self.target_epsilon, self.delta = noise_multiplier, target_epsilon, delta
        self.seed, self.fingerprint, self.loss_reduction = seed, fingerprint, loss_reduction
        self.max_physical_batch_size = max_physical_batch_size
        self.ledger_path = ledger_place(ledger)
        self.pieces = Pieces(
            discretization_threshold=discretization_threshold,
            denoiser=None
            if correction_threshold is None
            else ErrorCorrection(correction_threshold, correction_hypotheses, correction_scale, priors),
            metrics=None if metrics is None else PrivateMetrics(metrics, metrics_share),
            microbatch_size=microbatch_size,
        )
        self.observers: list[Observer] = []
        self.releases = 0
        self._key = 0 if seed is None else seed
        self._budget = Budget(target_epsilon, delta, accountant)
        self._memory: dict[str, Any] = {}  # of a checkpoint
        self._restored, self._given_noise = False, noise_multiplier
        self._admitted: bool | None = None
        self._loader: LotLoader | None = None
        self._engine: PerRecordEngine | None = None
        self._mechanism: Mechanism | None = None
        self._values: Mapping[str, Value] = {}
        self._records = self._row = 0
        self._verified = self._absorbed = self._released = False

    # ------------------------------------------------------------------------------------- for the strategies

    @abstractmethod
    def groups(self, engine: PerRecordEngine) -> tuple[VectorGroup, ...]:
        """A partition of the parameters, with the first bounds."""

    def initial_groups(self, trainer: pl.Trainer, engine: PerRecordEngine) -> tuple[VectorGroup, ...]:
        """The same where the first bounds need more than the model; must not touch private data."""
        return self.groups(engine)

    @property
    def mechanism(self) -> Mechanism:
        """What turns lots into releases; a ConfigurationError if nothing was trained in this process."""
        return trained(self._mechanism)

    def epsilon(self, accountant: str = "rdp") -> float:
        """Epsilon of everything released so far, at `delta`; infinite for a reference without privacy.

        Raises:
            ConfigurationError: Nothing was trained in this process.
        """
        _ = self.mechanism
        return self._budget.epsilon(accountant) if self.private else float("inf")

    # ------------------------------------------------------------------------------------- attach and detach

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Refuse settings under which the guarantee would not hold."""
        if stage != "fit":
            return
        leave_group_at_exit()
        self._restored, self._loader, self._engine, self._admitted = False, None, None, None
        refuse_others(trainer, self, (PrivateStrategy, NonPrivate))
        choices.refuse_choices(trainer)
        guards.refuse_trainer_settings(trainer, pl_module)
        size, metrics = self.max_physical_batch_size, self.pieces.metrics
        guards.refuse_in_manual_optimization(pl_module, max_physical_batch_size=size, metrics=metrics)
        self._admitted = True

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Attach the engine and take over the backward pass."""
        attached(self._admitted)
        self._scope, self._verified = Scope(pl_module, trainer.optimizers), False
        self._engine = PerRecordEngine(self._scope.part, self.loss_reduction)
        self._optimizer = self._scope.optimizer(self._engine.parameters)
        choices.refuse_choices(trainer)  # schedules too
        guards.refuse_optimizer(self._optimizer, self._engine.parameters, self._engine.names)
        self._scope.watch()
        pl_module.__dict__["backward"] = self._backward
        own, whole = pl_module.training_step, pl_module.automatic_optimization
        step = self._scope.forward(self._in_pieces(trainer, pl_module, own)) if whole else self._scope.in_lot(own)
        self._probe = CouplingProbe(trainer, pl_module, self._engine, self.loss_reduction)
        pl_module.__dict__["training_step"] = self._probe.before(own, step, self._lot)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Know the lots, fix the plan, open the ledger; everything can still be refused."""
        engine = attached(self._engine)
        self._loader = guards.known_lots(trainer)
        lots = self._loader.lots
        ledger = self._budget.place(trainer, self.ledger_path)
        if not self._restored and not runs.goes_on(pl_module, ledger, self._budget.path):
            self._begin(trainer)
        self._key = trainer.strategy.broadcast(fresh_key() if self.seed is None else self.seed)
        lots.start_at(self.releases)  # lot t belongs to release t
        self._scope.follow(self._loader)
        lots.microbatches, self._divisor = lot_pieces.grouping(self._loader, self.pieces.microbatch_size)
        guards.warn_of_delta(self.delta if self.private else 0.0, lots.sampling.population)
        if self.noise_multiplier is None:
            self.noise_multiplier = self._budget.calibrated(trainer, lots.sampling, self.pieces.microbatch_size)
        self._mechanism = Mechanism(
            self.pieces,
            lots.sampling,
            self.noise_multiplier,
            engine.parameters,
            self.initial_groups(trainer, engine),
            getattr(pl_module, "record_metrics", {}),
            self._memory,
        )
        guards.warn_of_split(self._mechanism.plan)
        engine.recording, self._records = False, 0  # until a lot is opened
        lots.phase = self._open_ledger(trainer, self._mechanism, ledger) if self.private else 0

    def _begin(self, trainer: pl.Trainer) -> None:
        """A run without a past, also where this strategy has trained another one before."""
        if trainer.global_step:
            guards.refuse_unknown_past(None, self.private)
        self.releases, self._memory = 0, {}
        self.noise_multiplier = self._given_noise

    def _open_ledger(self, trainer: pl.Trainer, mechanism: Mechanism, path: Path) -> int:
        sampling, names = mechanism.plan.sampling, attached(self._engine).names
        replay = runs.replay_key(self.fingerprint, self.seed, mechanism.total.device.type, names, mechanism.digest)
        known = "example", sampling.neighbouring_relation, sampling.population, self.delta, replay
        header = Header(*known, microbatch_size=self.pieces.microbatch_size)
        resumed = self.releases > 0 or self.fingerprint is not None
        return self._budget.open(trainer, path, header, self.releases, resumed, mechanism.plan)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Give the module back as it was."""
        runs.note_training(pl_module, self._budget.path, self.releases)
        pl_module.__dict__.pop("backward", None)
        pl_module.__dict__.pop("training_step", None)
        if self._engine is not None:
            self._engine.close()
            self._engine = None
            self._scope.close()
        self._budget.close()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Give the module back also after an error."""
        self.teardown(trainer, pl_module, "fit")

    # ------------------------------------------------------------------------------------- one lot

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Open a lot."""
        lot_pieces.leave_gradients_alone(trainer)
        loader, engine = guards.same_loader(trainer, self._loader), attached(self._engine)
        self._records = guards.count_records(batch)
        self._record_of = lot_pieces.records_of_rows(loader, self.releases, trainer, batch, self._records)
        self._row, self._values, self._absorbed, self._released = 0, {}, False, False
        engine.expect(self._records)
        self._scope.open_lot(batch)
        # Dropout and the like: a function of (seed, release, rank), so that replays repeat; without a seed, unknown.
        rank = 0 if getattr(pl_module, "same_randomness", False) else trainer.global_rank
        generator = keyed_generator((self._key, _MODEL_STREAM, self.releases, rank))
        guards.seed_device(int(torch.randint(2**62, (), generator=generator)), pl_module.device)

    def _lot(self) -> Lot:
        guards.refuse_second_release(self._released)  # a closure that is evaluated again
        attached(attached(self._engine).recording or None)  # by on_train_batch_start
        bound = min(group.max_grad_norm for group in self.mechanism.plan.groups)
        return Lot(self.releases, self._record_of, self._divisor is None, self.max_physical_batch_size, bound)

    def _in_pieces(self, trainer: pl.Trainer, pl_module: pl.LightningModule, training_step: Any) -> Any:
        """Split a lot that is larger than `max_physical_batch_size`; Lightning still sees one step.

        An empty lot asks nothing of the model, which need not be able to handle it; its release is noise. (Among
        several processes it does: logging may wait for all of them.)
        """

        @functools.wraps(training_step)
        def step(batch: Any, *args: Any, **kwargs: Any) -> Any:
            lot = self._records
            if not lot and trainer.world_size == 1:
                return torch.zeros((), device=pl_module.device, requires_grad=True)
            size = self.max_physical_batch_size
            *pieces, last = lot_pieces.cut(batch, lot, size, self._record_of, trainer)
            for piece in pieces:
                output = self._one_piece(training_step, piece, *args, **kwargs)
                loss = output["loss"] if isinstance(output, dict) else output
                guards.refuse_missing_loss(loss is not None)
                self._absorb(loss)
            return self._one_piece(training_step, last, *args, **kwargs)

        return step

    def _one_piece(self, training_step: Any, piece: Any, *args: Any, **kwargs: Any) -> Any:
        assert self._engine is not None
        self._records = self._engine.records = guards.count_records(piece)
        output = training_step(piece, *args, **kwargs)
        self._values = output.get("record_metrics", {}) if isinstance(output, dict) else {}
        return output

    def _backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """In place of `LightningModule.backward`."""
        if self._released and self._scope.prefix:  # another network learns from what was released
            self._scope.refuse_dependence(loss)
            loss.backward(*args, **kwargs)  # type: ignore[no-untyped-call]
            return
        guards.refuse_second_release(self._released)
        guards.refuse_second_backward(self._absorbed and self.max_physical_batch_size is None)
        self._absorb(loss)

    def _absorb(self, loss: Tensor) -> None:
        """Clip the records of a (piece of a) lot and add them to the running sums."""
        assert self._engine is not None
        records, mechanism = self._records, self.mechanism
        verify = not self._verified and records > 0
        device = mechanism.total.device
        with torch.no_grad(), torch.autocast(device.type, enabled=False):  # norms and sums in full precision
            gradients = self._engine.backward(loss, records, verify=verify)
            if verify:
                self._verified = self._engine.verified
            rows = slice(self._row, self._row + records)
            merge = lot_pieces.merge_of(self._record_of, rows, self._divisor, device)
            if not self._absorbed:
                mechanism.clear()
            exact, norms = mechanism.absorb(gradients, records, merge, self._values)
            for observer in self.observers:
                observer(mechanism, self._engine.names, exact, norms)
        self._row += records
        self._absorbed = True

    # ------------------------------------------------------------------------------------- one release

    @torch.no_grad()
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        """Release the sums of the lot: noise, a line in the ledger, the division, and only then `p.grad`."""
        assert self._engine is not None
        if optimizer is not self._optimizer:
            return
        guards.refuse_second_release(self._released)
        guards.refuse_missing_loss(self._absorbed or not self._records)
        self._budget.refuse_overdraft()
        self._scope.release_lot()
        mechanism = self.mechanism
        if not self._absorbed:
            mechanism.clear()
        if trainer.is_global_zero:
            key = (self._key, _NOISE_STREAM, mechanism.digest, attached(self._loader).lots.phase, self.releases)
            self._add_noise(mechanism, keyed_generator(key, mechanism.total.device))
        if trainer.world_size > 1:
            dist.all_reduce(mechanism.total)
        if self.private:  # on disk before anything uses the noised sum
            checksum = float(mechanism.total.sum(dtype=torch.float64)).hex()
            self._budget.record(Release(self.releases, mechanism.plan.sampling, mechanism.plan.queries, checksum))
        for parameter, gradient in zip(self._engine.parameters, mechanism.finish(), strict=True):
            parameter.grad = gradient.to(parameter.dtype) if parameter.requires_grad else None
        self._released, self._engine.recording = True, False
        self.releases += 1

    def _add_noise(self, mechanism: Mechanism, generator: torch.Generator) -> None:
        mechanism.add_noise(generator)  # a reference leaves it out

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Show the epsilon so far; stop before the step that would exceed the budget."""
        guards.refuse_missing_release(self._released)
        choices.refuse_choices(trainer)
        trainer.should_stop = trainer.should_stop or self._budget.exhausted
        last = trainer.should_stop or trainer.global_step == trainer.max_steps
        early = self.pieces.adaptation is not None and self.releases <= _EARLY
        if last or early or self.releases % max(trainer.log_every_n_steps, 1) == 0:  # type: ignore[attr-defined]
            if self.private:
                pl_module.log("privacy/epsilon", self._budget.epsilon_here(), prog_bar=True, logger=False, batch_size=1)
            self._log(trainer)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """No lot was left out."""
        attached(self._engine)
        self._scope.refuse_skipped_lot()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """The last epsilon beside the last accuracy."""
        refuse_unreleased_training(trainer, self.releases)
        self._log(trainer)

    def _log(self, trainer: pl.Trainer) -> None:
        """What is private: epsilon, adaptive bounds and released metrics."""
        values = {"privacy/epsilon": self._budget.epsilon_here()} if self.private else {}
        if self.pieces.adaptation is not None:
            values |= {f"privacy/bound/{group.name}": group.max_grad_norm for group in self.mechanism.plan.groups}
        values |= self.mechanism.take_metrics()
        for logger in trainer.loggers if values else ():
            logger.log_metrics(values, step=self.releases)  # Lightning counts one less

    # ------------------------------------------------------------------------------------- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to go on with the same releases."""
        state = {"private": self.private, "releases": self.releases, "noise_multiplier": self.noise_multiplier}
        own = {} if self._mechanism is None else self._mechanism.state_dict()
        return {**state, **own, **self._budget.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue after the releases of the checkpoint."""
        guards.refuse_unknown_past(state_dict.get("private", True), self.private)
        self.releases, self._restored = int(state_dict["releases"]), True
        self._budget.load_state_dict(state_dict)
        self._memory = state_dict
        if self.noise_multiplier is None:
            self.noise_multiplier = state_dict["noise_multiplier"]
