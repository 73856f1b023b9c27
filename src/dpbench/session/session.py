"""One private training from its first batch to its last: the order of a step, for every driver.

A Lightning Trainer (`callback.strategy`) and a plain loop (`callback.loop`) are two drivers. Both call

    check → attach → acquire → begin → (open → step → backward → release → close)* → end

and know nothing of the rules: a batch is opened once, released once, and the ledger is on disk before
its sum is used. Guards (`guards`) look at each of these moments.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dpbench.data.loader import PrivateDataLoader
from dpbench.data.separate_records import SeparateRecords
from dpbench.errors import ConfigurationError, OutOfMemory, UnsupportedModuleError
from dpbench.guards.engine_trial import EngineTrial
from dpbench.guards.guard import Guard
from dpbench.guards.lots import require_lot_loader
from dpbench.guards.optimizer_steps import private_optimizer
from dpbench.guards.public_networks import private_part
from dpbench.optimizers import NoiseAware, NoiseStds
from dpbench.privacy.accounting.composition import doubts_about
from dpbench.privacy.accounting.stated_plan import own_process
from dpbench.privacy.budget import ENDLESS, TrainingLength
from dpbench.privacy.events import effective_noise_multiplier
from dpbench.privacy.mechanism.adaptive import with_bounds
from dpbench.privacy.mechanism.clipping import VectorGroup
from dpbench.privacy.mechanism.mechanism import mean_norms
from dpbench.privacy.processes import Processes
from dpbench.privacy.randomness import Stream, keyed_generator, keyed_seed, seed_global_generators
from dpbench.privacy.record_axis.host import axis_of_step
from dpbench.privacy.releases import HOOK_STATE, ReleaseEngine, TrainableParameters
from dpbench.records.piece_sizes import is_out_of_memory
from dpbench.records.source import (
    SECOND_RELEASE,
    ChosenGradients,
    InPieces,
    RecordSource,
    require_hook,
)
from dpbench.records.training import Training, TrainingStep
from dpbench.records.watched_hooks import apart
from dpbench.session.audit import Audit
from dpbench.session.executor import SessionParts
from dpbench.session.executors import executor_of, keyed_by

_SEPARATE_BY_NOW = (
    "the records of this batch cannot be rows of one batch, unlike those of earlier batches, and several processes "
    "cannot switch during a run: set gradients='one_by_one'."
)
_OWN_NOISE = (
    "the noise is drawn by {process}, which is not dpbench's: nothing checks that its noise has the stated multiplier, "
    "on which epsilon depends (CONTRIBUTING.md: what every mechanism must show)."
)
_OF_TRAININGS = frozenset(["training", "part", "trained", "optimizer", "loader"])
# Verdicts of processes on the engine; the largest one counts.
_UNKNOWN = 0
_KNOWN = 1
_LIMITED = 2


class PrivateSession:
    """Batches in, private gradients in `p.grad` out, in the one order that is private.

    Args:
        releases: Makes the sums of a batch private.
        source: Turns batches into per-record gradients.
        guards: Guards, in the order in which they look.
        audit: Takes part in the releases, or None.
        delta: δ of the guarantee.
        executor: Name of the executor, see `executor_of`.

    Attributes:
        releases: Makes the sums of a batch private.
        source: Turns batches into per-record gradients.
        guards: Guards of the present training.
        training: The module and its driver; from `check` on, and before a ConfigurationError, as are the others.
        part: The module, or the part of it that sees private records; from `attach` to `end`.
        trained: Parameters to which gradients are released; from `attach` to `end`.
        optimizer: Updates them; from `attach` to `end`.
        loader: Draws the batches; from `acquire` on.
        is_admitted: True once a training was checked, and nothing of it refused.
        is_open: True while a batch is open that is not released yet.
        released: True once the present batch was released.
    """

    training: Training
    part: nn.Module
    trained: TrainableParameters
    optimizer: Optimizer
    loader: PrivateDataLoader

    def __init__(
        self,
        releases: ReleaseEngine,
        source: RecordSource,
        guards: Sequence[type[Guard]],
        audit: Audit | None,
        delta: float,
        executor: str,
    ) -> None:
        self.releases = releases
        self.source = source
        self.guards: list[Guard] = []
        # Asked once: protocols look for each of their members.
        self._chosen = source if isinstance(source, ChosenGradients) else None
        self.is_open = False
        self.released = False
        self._guard_types = guards
        self._audit = audit
        self._delta = delta
        self._executor_on = functools.partial(executor_of, executor)
        self._executor = self._executor_on(torch.device("cpu"))  # refuses an unknown name at once
        self._trainable: list[int] = []
        self._horizon = ENDLESS
        self._first_release = 0
        self._uses_lots = False
        self.is_admitted = False

    # ------------------------------------------------------------------------------------- trained parameters

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            require_hook(name not in _OF_TRAININGS)
            raise AttributeError(name)

    @property
    def is_attached(self) -> bool:
        """Return whether `attach` ran, and `end` did not."""
        return "trained" in vars(self)

    @property
    def has_lots(self) -> bool:
        """Return whether `acquire` ran for this training."""
        return "loader" in vars(self)

    # ------------------------------------------------------------------------------------- begin

    def check(self, training: Training) -> None:
        """Begin with a training that has nothing but its module and its driver, and refuse all that shows already.

        Raises:
            ConfigurationError: Names a setting and the remedy.
        """
        self._forget("trained", "loader")
        self.is_open = False
        self.released = False
        self.is_admitted = False
        self.training = training
        self.guards = [guard_type(self) for guard_type in self._guard_types]
        self._notify("on_check")
        self.source.check(training)
        self.is_admitted = True  # a training whose refusal was swallowed cannot be attached

    def attach(self) -> None:
        """Put the source of records in the place of the module's training step and backward pass.

        Raises:
            ConfigurationError: The optimizer moves other parameters than those that are released.
        """
        require_hook(self.is_admitted)
        training = self.training
        part = self.part = private_part(training)
        trained = self.source.attach(training, part, self.releases)
        name = "" if part is training.module else str(training.module.private_module)
        self.optimizer = private_optimizer(training.optimizers, trained.parameters, name)
        self.trained = trained
        own_step = training.own_step
        self._executor = self._executor_on(training.device)
        self._attach_executor()
        training.mount(self._step_of(own_step), self._wrapped_backward())
        self._notify("on_attach")
        self._trainable = self._trainable_now()

    def acquire(self, loader: object) -> PrivateDataLoader:
        """Take the batches of a loader, which no other training may draw meanwhile.

        Raises:
            ConfigurationError: Another training has them, or they draw something else than the source trains.
        """
        _ = self.trained
        lot_loader = require_lot_loader(loader)
        lot_loader.lots.acquire()
        self.loader = lot_loader
        self._uses_lots = True
        self._notify("on_begin")
        return lot_loader

    def begin(
        self,
        processes: Processes,
        key: int | None,
        ledger: Path,
        horizon: TrainingLength,
        metric_sizes: Mapping[str, int],
        key_of: Callable[[int], int] | None = None,
    ) -> None:
        """Fix the plan and open the ledger; everything can still be refused.

        Args:
            processes: All of this training.
            key: Key of a seeded run, a function of its seed, settings and data; None takes the operating system's
                entropy or, where a function of these cannot cover all, and there is `key_of`, a kept key.
            ledger: Its path.
            horizon: Planned and past steps.
            metric_sizes: Number of values of each metric that the module offers.
            key_of: Kept key → key of the run, a function of settings and data too.

        Raises:
            ConfigurationError: The plan has no solution, or there is a seed and no key.
            BudgetExhausted: The target allows no release.
            LedgerError: The ledger cannot be continued.
        """
        releases = self.releases
        source = self.source
        trained = self.trained
        lots = self.loader.lots
        # The sizes of all batches come first: the plan of the releases is made of them.
        lot_sizes = lots.plan(horizon.total_steps)
        # One key for all processes, before anything is drawn by it.
        own_key = None if key is None else keyed_by(key, self._executor)
        releases.join(processes, own_key, keeps_key=key_of is not None)
        # Noise that is correlated among steps wants batches that keep a record's participations apart.
        lots.bands = releases.unit_noise.bands
        rule = key_of or int
        lot_key = releases.keep_keys(
            ledger,
            are_lots_seeded=lots.seed is not None,
            key_of=lambda kept: keyed_by(rule(kept), self._executor),
        )
        # Records of an audit enlarge the population, so that they join before the sampling is read.
        releases.hook = None
        if self._audit is not None:
            releases.hook = self._audit.hook(releases, lots, trained)
        elif releases.memory.get(HOOK_STATE):
            raise ConfigurationError("the checkpoint is of a run with an audit: resume it with its original audit.")
        sampling = lots.sampling
        source.begin(self.loader)
        self._horizon = horizon
        self._first_release = releases.num_releases
        # Bounds that are found on noise need the source and the key.
        groups = self._first_groups(releases.memory)
        releases.begin(sampling, source.summands, trained, groups, metric_sizes, horizon, lot_sizes)
        if releases.recipe.private:
            release = releases.mechanism.training_plan.event(self._first_release)
            z = effective_noise_multiplier(release.queries)
            for doubt in doubts_about(self._delta, z, sampling.population, sampling.unit):
                self.training.warn(doubt)
        process = own_process(releases.mechanism.training_plan.noise.to_dict())
        if process is not None:
            self.training.warn(_OWN_NOISE.format(process=process))
        # Batch t belongs to release t; the key of the batches is known with the plan only.
        lots.start_at(releases.num_releases, releases.lot_key, lot_key)
        _follow_noise(self.optimizer, self._noise_of_gradients)
        # Last: the header that it writes says that the run has begun.
        releases.open_ledger(ledger, horizon, lots.source)
        lots.phase = releases.lot_phase

    def _noise_of_gradients(self) -> dict[Tensor, float]:
        """Standard deviation of the noise on the gradients that were released last, by parameter."""
        stds = self.releases.mechanism.gradient_stds
        return dict(zip(self.trained.parameters, stds, strict=True))

    def _first_groups(self, memory: Mapping[str, Any]) -> tuple[VectorGroup, ...]:
        """The partition of the parameters with the bounds of the first release, the same on all processes.

        Args:
            memory: Holds bounds that have adapted, perhaps.
        """
        releases = self.releases
        recipe = releases.recipe
        sizes = self.trained.sizes
        groups = recipe.groups(self.trained.names, sizes)
        bounds = memory.get("bounds")
        if recipe.bounds_from_noise is None or (bounds is not None and len(bounds[0]) == len(groups)):
            return groups
        piece = self.source.on_noise(keyed_generator((releases.key, Stream.NOISE_BATCH)))
        means = mean_norms(piece.gradients, piece.rows, piece.merge, recipe.transform, sizes, groups)
        bounds = [recipe.bounds_from_noise * mean for mean in means]
        return with_bounds(groups, releases.processes.broadcast(bounds))

    # ------------------------------------------------------------------------------------- other parameters

    def _trainable_now(self) -> list[int]:
        """Ids of the trainable parameters, and of those that the optimizer moves."""
        trainable = []
        parts = [self.part]
        for part in parts:  # in each batch, so that it takes a tenth of the time of `part.parameters()`
            parts += filter(None, part._modules.values())
            for parameter in part._parameters.values():
                if parameter is not None and parameter.requires_grad:
                    trainable.append(id(parameter))
        for group in self.optimizer.param_groups:
            trainable += map(id, group["params"])
        return trainable

    def _follow_trainable(self) -> None:
        """Train the parameters that are trainable by now: layers may be frozen, unfrozen and replaced between batches.

        Raises:
            ConfigurationError: The optimizer does not move some of them.
        """
        trainable = self._trainable_now()
        if trainable == self._trainable:
            return
        releases = self.releases
        training = self.training
        for parameter in self.trained.parameters:
            parameter.grad = None
        self.source.detach()
        if self._chosen is not None:
            self._chosen.is_chosen = False  # the engine may know other layers
        trained = self.trained = self.source.attach(training, self.part, releases)
        self.source.begin(self.loader)
        self._begin_anew()
        completed = self._horizon.completed_steps + releases.num_releases - self._first_release
        groups = self._first_groups(releases.mechanism.state_dict())
        releases.change_parameters(
            trained,
            groups,
            TrainingLength(self._horizon.total_steps, completed),
            self.loader.lots.source,
        )
        self._trainable = trainable

    def _attach_executor(self) -> None:
        self._executor.attach(SessionParts(self.training, self.releases, self.source, self.optimizer))

    def _begin_anew(self) -> None:
        """Notify executor and guards that the source computes differently from this batch on."""
        self._executor.detach()
        self._attach_executor()
        self._notify("on_change")

    def _choose_gradients(self, batch: Any) -> None:
        """Find out, on the first batch with records, whether the engine knows the network.

        Raises:
            UnsupportedModuleError: It would change the network's results, and no other method may be used.
        """
        source = self._chosen
        if source is None or source.engine is None:
            return
        if source.engine.at_once is not None:
            source.is_chosen = True
            return
        training = self.training
        if source.next_method != source.method:
            source.use("one_by_one", source.limit)
            self._begin_anew()
            return
        if source.is_chosen:
            if not isinstance(batch, SeparateRecords):
                return
            if training.world_size > 1:
                raise ConfigurationError(_SEPARATE_BY_NOW)
        trial = EngineTrial(training, source.engine)
        lot = source.lot()
        limit = trial.limit(batch, lot.record_of, lot.row_index)
        verdict = _UNKNOWN
        if limit is not None:
            verdict = _LIMITED
        elif source.engine.verified:  # not where no record of the batch has a finite gradient
            verdict = _KNOWN
        if training.world_size > 1:  # all processes, or none
            is_agreed = trial.is_agreed()
            verdict = training.largest(verdict) if is_agreed else _LIMITED
        source.is_chosen = verdict != _UNKNOWN
        if verdict != _LIMITED:
            return
        if source.gradients != "auto":
            if limit is not None and not limit.is_refused:  # else the step itself says so
                raise UnsupportedModuleError(f"the engine cannot be used: {limit.reason}. Try gradients='one_by_one'.")
            return
        reason = "another process cannot use it" if limit is None else limit.reason
        source.use("one_by_one", reason)
        self._begin_anew()

    # ------------------------------------------------------------------------------------- one batch

    def open(self, batch: Any, rank: int) -> None:
        """Begin a batch: its release, its records, and the random numbers of the model.

        Args:
            batch: The batch, as the module sees it.
            rank: Rank that selects the random numbers of the module.
        """
        self.refuse_skipped_lot()
        self.released = False
        self._follow_trainable()
        self._notify("on_open", batch)
        self.releases.open_lot()
        self.source.open_lot(batch)
        self._choose_gradients(batch)
        self.is_open = True
        # Dropout and the like: a function of (key, release, rank), so that replays repeat; without a seed, unknown.
        seed = keyed_seed(self.releases.key_of(Stream.MODEL, rank))
        seed_global_generators((seed,), self.training.device)

    def _step_of(self, own: TrainingStep) -> TrainingStep:
        """Wrap the training step, which has no other wrapper.

        It is a plain function, since the module holds it: a method would be copied, with the session, when the
        module is copied.
        """
        chosen = self._chosen
        watched = own if chosen is None else chosen.watched(own)
        source_step = self.source.step(self._executor.own_step(watched))
        inner = self._executor.step(source_step)

        @functools.wraps(own)
        def step(batch: Any, *arguments: Any, **options: Any) -> Any:
            if self.released:
                raise ConfigurationError(SECOND_RELEASE)  # a closure that is evaluated again
            require_hook(self.is_open)
            self._notify("on_step", batch, arguments, options)
            with self._out_of_memory_explained(), apart():
                output = inner(batch, *arguments, **options)
            self._notify("on_stepped")
            if chosen is not None:
                chosen.hide()
            return output

        return step

    def _wrapped_backward(self) -> Callable[..., None]:
        """Wrap the module's backward pass."""
        inner = self._executor.backward(self.source.backward)

        def backward(loss: Tensor, *arguments: Any, **options: Any) -> None:
            if self.released and self.part is not self.training.module:
                self._notify("on_public_loss", loss)
                loss.backward(*arguments, **options)  # type: ignore[no-untyped-call]
                return
            with self._out_of_memory_explained():
                inner(loss, *arguments, **options)
            if self.part is not self.training.module:
                self._look_at_step(True)

        return backward

    @contextmanager
    def _out_of_memory_explained(self) -> Iterator[None]:
        """Replace an out-of-memory error before the release by one line with the remedy.

        Raises:
            OutOfMemory: The memory is exhausted.
        """
        try:
            yield
        except Exception as error:
            if self.released or not is_out_of_memory(error):
                raise
            raise OutOfMemory(_out_of_memory(self.training, self.source)) from error

    def release(self) -> None:
        """Release the sums of the batch to `p.grad`.

        Raises:
            ConfigurationError: The batch was released already, or not all of it went through the module.
            BudgetExhausted: Nothing of the target is left.
        """
        if self.released:
            raise ConfigurationError(SECOND_RELEASE)
        self.releases.budget.refuse_overdraft()
        self.source.close_lot()
        self._look_at_step(False)
        self._notify("on_release")
        self.is_open = False
        parameters = self.trained.parameters
        gradients = self._executor.release()
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.to(parameter.dtype) if parameter.requires_grad else None
        self.released = True
        self._notify("on_released")

    def _look_at_step(self, looks: bool) -> None:
        """Have the record axis watch the step up to the release, if other networks follow the private one."""
        axis = axis_of_step()
        if axis is not None:
            axis.is_over = not looks

    def close(self) -> None:
        """End a batch after its update."""
        if self._chosen is not None:
            self._chosen.end_lot()
        self._notify("on_close")

    def _notify(self, moment: str, *arguments: Any) -> None:
        """Have all guards look, in their order; see `Guard` for the moments."""
        for guard in self.guards:
            getattr(guard, moment)(*arguments)

    def _forget(self, *names: str) -> None:
        for name in names:
            vars(self).pop(name, None)

    def refuse_skipped_lot(self) -> None:
        """Refuse another batch, or the end of an epoch, where the last batch was not released."""
        if self.is_open:
            raise ConfigurationError(
                "a batch was drawn but never released (on_train_batch_start returned -1?): whether a batch is trained "
                "on must not depend on its records, so each one is released, even an empty one. To stop early, set "
                "trainer.should_stop based on values that are not private."
            )

    # ------------------------------------------------------------------------------------- end

    def end(self) -> None:
        """Give module and batches back as they were, also after an error."""
        releases = self.releases
        for guard in reversed(self.guards):  # modes of torch end with the innermost
            guard.on_end()
        self.guards = []
        if "optimizer" in vars(self):
            _follow_noise(self.optimizer, None)
        self._forget("trained", "part", "optimizer")
        self.is_open = False
        if self._uses_lots:  # else they are another training's by now
            self.loader.lots.free()
            self._uses_lots = False
        releases.budget.close()
        is_over = releases.num_releases >= self._horizon.total_steps or releases.budget.exhausted
        keys = releases.forget_keys(is_over)
        if "training" in vars(self):
            self.training.restore()
            if keys is not None:
                self.training.warn(
                    f"the training ended before its last step, and can be resumed: {keys} holds the keys of its noise. "
                    "Delete it before anything of this run is published."
                )
        self._executor.detach()
        self.source.detach()
        if releases.hook is not None:
            releases.hook.end()  # last: a full disk keeps neither the ledger's lock nor the module


def _out_of_memory(training: Training, source: RecordSource) -> str:
    """Make the message for exhausted memory. It does not mention the size of the batch, which is private."""
    start = f"out of memory on {training.device} within a batch, of which nothing was released: "
    if not isinstance(source, InPieces) or not training.automatic_optimization:
        return start + "use a smaller batch (data.expected_batch_size) or a smaller network."
    rows = source.physical_batch_size
    if rows is None and isinstance(source, ChosenGradients) and source.method == "one_by_one":
        return start + "a single record does not fit, so use a smaller network or shorter records."
    if rows is None:
        return start + "set max_physical_batch_size to a number of rows that fit, or to auto on a GPU (now all go in)."
    if rows == 1:
        return start + "a single row does not fit, so use a smaller network, shorter records, or gradients=one_by_one."
    return start + f"set max_physical_batch_size={max(rows // 2, 1)} (now {rows}); sums differ by rounding at most."


def _follow_noise(optimizer: Optimizer, noise_stds: NoiseStds | None) -> None:
    """Have an optimizer that asks for the noise of its gradients know where to ask."""
    if isinstance(optimizer, NoiseAware):
        optimizer.follow_noise(noise_stds)
