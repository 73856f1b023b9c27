"""The release: sums of a batch in, private gradients out; noise, ledger and budget in between.

Without Lightning and without a model. A source of records hands its per-record vectors to `accumulate`, batch by batch,
and takes the result of `release`.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from dpbench.errors import ConfigurationError
from dpbench.privacy import kernels, native
from dpbench.privacy.accounting.ledger import KEPT, Header, Release
from dpbench.privacy.accounting.stated_plan import StatedPlan
from dpbench.privacy.accounting.writer import records_a_run
from dpbench.privacy.budget import ENDLESS, Budget, TrainingLength
from dpbench.privacy.events import NOISE_END, Summands
from dpbench.privacy.gradients.parameter import ParameterGradients
from dpbench.privacy.kept_keys import FILE_NAME as KEYS_FILE
from dpbench.privacy.kept_keys import KeptKeys, read_keys, write_keys
from dpbench.privacy.mechanism.clipping import VectorGroup
from dpbench.privacy.mechanism.mechanism import Mechanism, Merge
from dpbench.privacy.mechanism.metrics import Value
from dpbench.privacy.mechanism.noise import checksum
from dpbench.privacy.mechanism.noise_process import MakeNoise, Noise, noise_of
from dpbench.privacy.mechanism.recipe import Recipe
from dpbench.privacy.mechanism.schedules import CONSTANT, UNSCHEDULED, Factors, Schedules, factors_of
from dpbench.privacy.mechanism.training_plan import TrainingPlan
from dpbench.privacy.processes import ALONE, Processes
from dpbench.privacy.randomness import RANDOM_NUMBERS, Stream, digest_of, fresh_key, noise_key, source_of
from dpbench.privacy.sampling import Sampling

_OTHER_SUM = (
    "release {number} differs from its record in {path}: something is random beyond the seed (augmentation, a "
    "GPU without deterministic=True), or the machine or its number of threads has changed. The run continues in a new "
    "phase of the ledger, with new noise; releases after its checkpoint are counted again."
)

Observer = Callable[[Mechanism, Sequence[str], Sequence[ParameterGradients], Tensor], None]
"""Called with (mechanism, parameter names, gradients of the records before discretization, squared norms by group)."""


HOOK_STATE = "canaries"
"""Key of a hook's state in a checkpoint."""


class ReleaseHook(Protocol):
    """Takes part in each release of a training: adds records to the sums, and looks at the released sums.

    Guarantee: that of the releases without it. It adds nothing but records, by `Mechanism.accumulate`, which clips them
    as it does all others; the sampler draws them (`PrivateBatchSampler.added`), and the population of the ledger counts
    them.
    """

    def insert(self, mechanism: Mechanism, release: int) -> None:
        """Add records to this process's sums of a batch, before the sums of all processes and the noise.

        Args:
            mechanism: The mechanism, with the sums.
            release: Number of the release.
        """

    def read(self, mechanism: Mechanism) -> None:
        """Look at the noised sums of all processes as they are released."""

    def state_dict(self) -> dict[str, Any]:
        """State of a checkpoint, which `ReleaseEngine.memory` holds in a resumed training (`HOOK_STATE`)."""

    def end(self) -> None:
        """Keep the observations, after the last release or an error; called once more, it changes nothing."""


class TrainableParameters(NamedTuple):
    """Parameters that releases update.

    Attributes:
        parameters: Trainable.
        names: Their names.
    """

    parameters: Sequence[torch.nn.Parameter]
    names: Sequence[str]

    @property
    def sizes(self) -> list[int]:
        """Number of coordinates of each parameter."""
        return [parameter.numel() for parameter in self.parameters]


class ReleaseEngine:
    """The releases of one training, one after the other.

    Guarantee: (ε, δ)-differential privacy of all of them together, with the unit and the neighboring relation of the
    sampling, and ε as the ledger gives it. Each is on disk before anything uses its sum.

    Args:
        recipe: Treatment of the records.
        budget: Budget of the training.
        noise_multiplier: z of each release, or None: the one that uses the budget up.
        seed: Key of the noise, for runs that can be repeated; None takes the operating system's entropy.
        fingerprint: Names a run that may be started again in its own ledger without a checkpoint.
        schedules: Schedules of noise and bounds.
        make_noise: Makes the noise process.

    Attributes:
        num_releases: Number of releases so far.
        noise_multiplier: Given, or found once a training has begun.
        phase: Phase of the ledger: how often the run was taken up again with other settings.
        observers: Called with every piece of a batch: private data, for diagnostics.
        watchers: Called with the mechanism and this process's sums before noise; for references without privacy only.
        hook: Takes part in the releases of an audited training; else None.
        first_weights: Hash of the weights that a seeded run began with; part of its key.
    """

    def __init__(
        self,
        recipe: Recipe,
        budget: Budget,
        noise_multiplier: float | None,
        seed: int | None = None,
        fingerprint: str | None = None,
        schedules: Schedules = UNSCHEDULED,
        make_noise: MakeNoise = noise_of,
    ) -> None:
        self.recipe = recipe
        self.budget = budget
        self.seed = seed
        self.fingerprint = fingerprint
        self._schedules = schedules
        self._make_noise = make_noise
        self._keys_file: Path | None = None
        self._is_seeded = False
        self._are_all_seeded = False
        self.num_releases = 0
        self.phase = 0
        self.noise_multiplier = noise_multiplier
        self._given_noise = noise_multiplier
        self.observers: list[Observer] = []
        self.watchers: list[Callable[[Mechanism], object]] = []
        self.memory: dict[str, Any] = {}  # of a checkpoint
        self.hook: ReleaseHook | None = None
        self.first_weights: str | None = None
        self.key = fresh_key()
        self.processes = ALONE
        self._mechanism: Mechanism | None = None
        self._names: Sequence[str] = ()
        self._lot_key: int | None = None  # of batches that were drawn under another plan first
        self._open = False
        self._empty = False

    @property
    def mechanism(self) -> Mechanism:
        """The mechanism that turns batches into releases.

        Raises:
            ConfigurationError: No training has begun in this process.
        """
        if self._mechanism is None:
            raise ConfigurationError(
                "nothing has been trained yet: call trainer.fit first. (If other processes trained, read their ledger: "
                "`dpbench account FOLDER`.)"
            )
        return self._mechanism

    def epsilon(self, accountant: str | None = None) -> float:
        """Epsilon of everything released so far; infinite for a reference without privacy."""
        _ = self.mechanism
        return self.budget.epsilon(accountant) if self.recipe.private else float("inf")

    def reset(self) -> None:
        """Begin a run without a past."""
        self.num_releases = 0
        self.memory = {}
        self.noise_multiplier = self._given_noise
        self.first_weights = None

    def join(self, processes: Processes, key: int | None = None, keeps_key: bool = False) -> None:
        """Agree with the other processes on the key of the noise.

        Args:
            processes: All of this training.
            key: The key of the run; None takes the operating system's entropy.
            keeps_key: True if `keep_keys` adds a random key to a seed that has none.

        Raises:
            ConfigurationError: There is a seed and no key.
        """
        if key is None and self.seed is not None and not keeps_key:
            raise ConfigurationError(
                f"seed={self.seed} needs a key: with the seed alone, runs on different data would share their noise. "
                "Pass a key that covers data and settings (dpbench.callback.run_key), or leave out the seed."
            )
        self.processes = processes
        self.key, self._is_seeded = processes.broadcast((fresh_key() if key is None else key, key is not None))

    @property
    def _has_known_key(self) -> bool:
        """Return whether its noise can be drawn again, with the seed or the file of `keep_keys`."""
        return self._is_seeded or self._keys_file is not None

    @property
    def may_draw_again(self) -> bool:
        """Return whether its noise may be drawn again: with a seed, or with keys that `keep_keys` keeps."""
        return self.seed is not None or not self.unit_noise.independent

    @property
    def lot_key(self) -> int | None:
        """Key that sets the batches of this run apart from those of others with their seed; None without a seed."""
        if self.seed is None:
            return None
        if self._lot_key is not None:
            return self._lot_key
        key = (self.key, self.mechanism.training_plan.digest)
        return int.from_bytes(digest_of(key)[:16], "big")

    @property
    def unit_noise(self) -> Noise:
        """The noise at a multiplier of 1, before schedules: how its steps depend on one another."""
        return self._make_noise(1.0, CONSTANT)

    def keep_keys(
        self,
        ledger: Path,
        are_lots_seeded: bool,
        key_of: Callable[[int], int] = int,
    ) -> int | None:
        """Keep the keys that no seed says in a file, where noise and groups have to be drawn again to be resumed.

        Args:
            ledger: Ledger; the file lies in its folder until `forget_keys`.
            are_lots_seeded: True if the batches have a seed of their own.
            key_of: Kept key of the noise → key of the run.

        Returns:
            Key of the batches; None if a seed gives it, or it need not be known.

        Raises:
            ConfigurationError: The file cannot be read or written.
        """
        self._keys_file = None
        self._are_all_seeded = self._is_seeded and are_lots_seeded
        lacks_key = self.seed is not None and not self._is_seeded
        if self._are_all_seeded or not self.recipe.private or (self.unit_noise.independent and not lacks_key):
            return None
        path = ledger.with_name(KEYS_FILE)
        keys = None
        if self.processes.rank == 0:
            # Started again without a checkpoint, it repeats the releases of the ledger.
            if self.num_releases or (self.fingerprint is not None and records_a_run(ledger)):
                keys = read_keys(path)
            elif not records_a_run(ledger):
                keys = KeptKeys(noise=fresh_key(), lots=fresh_key())
                write_keys(path, keys)
        kept: KeptKeys | None = self.processes.broadcast(keys)
        if kept is None:
            return None
        self._keys_file = path
        if not self._is_seeded:
            self.key = self.processes.broadcast(key_of(kept.noise))
        return kept.lots

    def forget_keys(self, is_over: bool) -> Path | None:
        """Delete the file of `keep_keys` if the training has ended, or nothing was released.

        Args:
            is_over: True if the training has made all of its steps.

        Returns:
            The file, where it stays.
        """
        path = self._keys_file
        self._keys_file = None
        if path is None or self.processes.rank:
            return None
        if is_over or not self.num_releases:
            path.unlink(missing_ok=True)
            return None
        return path

    def begin(
        self,
        sampling: Sampling,
        summands: Summands,
        trained: TrainableParameters,
        groups: tuple[VectorGroup, ...],
        metric_sizes: Mapping[str, int],
        horizon: TrainingLength = ENDLESS,
        size_factors: Factors = CONSTANT,
    ) -> None:
        """Fix the plan of the first release; `join` comes before.

        Args:
            sampling: How batches are drawn.
            summands: Units over which the sums go.
            trained: Parameters that are updated.
            groups: Partition of them with the first bounds.
            metric_sizes: Number of values of each metric that the module offers.
            horizon: Number of steps, for which the noise is found where it was not given.
            size_factors: Factors of the expected batch size, by step.

        Raises:
            ConfigurationError: The plan has no solution, or no noise reaches the target.
        """
        if self.recipe.private and sampling.record_changes < 1:
            raise ConfigurationError(f"no accountant covers {sampling.kind!r} sampling: use poisson or fixed_size.")
        if horizon.total_steps > sampling.most_steps:
            raise ConfigurationError(
                f"max_participations allows only {sampling.most_steps:.0f} steps: set "
                "trainer.max_steps to at most that, or raise max_participations."
            )
        self.unit_noise.begin(sampling, horizon.total_steps)
        noise_factors = factors_of("noise_schedule", self._schedules.noise_multiplier, horizon.total_steps)
        bound_factors = factors_of("max_grad_norm_schedule", self._schedules.max_grad_norm, horizon.total_steps)
        plan = TrainingPlan(
            recipe=self.recipe,
            sampling=sampling,
            noise=self._make_noise(1.0, noise_factors),
            groups=groups,
            sizes=tuple(trained.sizes),
            metric_sizes=dict(metric_sizes),
            summands=summands,
            bound_factors=bound_factors,
            size_factors=size_factors,
        )
        self.budget.read_earlier(self.processes)
        if self.noise_multiplier is None:
            self.noise_multiplier = self.budget.calibrated(plan, horizon)
        # At a multiplier of 1 first, since the solver needs the plan to compute the cost of other multipliers.
        plan = replace(plan, noise=self._make_noise(self.noise_multiplier, noise_factors))
        if plan.sampling.cycle > 1 and (size_factors or not plan.noise.constant):
            raise ConfigurationError(
                f"{sampling.kind} batches need the same noise and batch size in each step, since they are accounted "
                "for by rounds: leave out noise_schedule and expected_batch_size_schedule."
            )
        self._names = trained.names
        # Of a run whose parameters changed on the way: its batches stay those of the plan that it began with.
        self._lot_key = self.memory.get("lot_key")
        self._mechanism = Mechanism(plan, trained.parameters, self.memory, self.num_releases)
        if self._mechanism.total.device.type == "cpu" and self.processes.rank == 0:
            native.warn_if_missing()
        kernels.signature(self._mechanism.total.device)  # refuses kernels that cannot compute, before the first step

    def change_parameters(
        self,
        trained: TrainableParameters,
        groups: tuple[VectorGroup, ...],
        horizon: TrainingLength,
        lot_source: str | None,
    ) -> None:
        """Go on with other trainable parameters: in a new phase of the ledger, on the batches as they are drawn.

        Args:
            trained: Trainable parameters from the coming release on.
            groups: Partition of them; bounds that have adapted take the place of those of as many groups.
            horizon: Length of the training, with the steps that it has behind it.
            lot_source: See `Header`.

        Raises:
            ConfigurationError: The noise of a step depends on that of others, or an audit is of other parameters.
        """
        before = self.mechanism
        if not before.training_plan.noise.independent:
            raise ConfigurationError(
                "the trainable parameters have changed, but correlated noise needs the same ones in each step: freeze "
                "and unfreeze before training."
            )
        if self.hook is not None:
            raise ConfigurationError(
                "the trainable parameters have changed, but an audit needs the same ones in each step: set audit=none, "
                "or freeze and unfreeze before training."
            )
        # The batches stay as they are drawn, though the plan, by which their key was made, is another one from here on.
        self._lot_key = self.lot_key
        plan = replace(before.training_plan, groups=groups, sizes=tuple(trained.sizes))
        is_same_plan = plan.digest == before.training_plan.digest and list(trained.names) == list(self._names)
        self._names = trained.names
        self._mechanism = Mechanism(plan, trained.parameters, before.state_dict(), self.num_releases)
        path = self.budget.path
        if path is None or not self.recipe.private:
            return
        phase = self.phase if is_same_plan else self.phase + 1
        place = (phase, self.lot_phase)
        self.budget.close()
        self.open_ledger(path, horizon, lot_source, place)

    def open_ledger(
        self,
        path: Path,
        horizon: TrainingLength = ENDLESS,
        lot_source: str | None = None,
        place: tuple[int, int] | None = None,
    ) -> None:
        """Write or continue the ledger; nothing without privacy.

        Args:
            path: Path of the ledger.
            horizon: Length of the training, for which a target is checked.
            lot_source: See `Header`.
            place: (phase, phase of the batches that it draws) of this run; None: those of the checkpoint.

        Raises:
            BudgetExhausted: The target allows no further release.
            LedgerError: The file cannot be continued.
        """
        self.phase = 0
        if not self.recipe.private:
            return
        plan = self.mechanism.training_plan
        noise_source = None
        if self._has_known_key:
            noise_source = self._origin + source_of((self.key, plan.digest, self.processes.apart))
        header = Header(
            unit=plan.sampling.unit,
            neighboring_relation=plan.sampling.neighboring_relation,
            population=plan.sampling.population,
            delta=self.budget.delta,
            replay=self._replay_key(),
            microbatch_size=plan.summands.per_summand,
            noise_source=noise_source,
            lot_source=lot_source,
            noise_end=NOISE_END,
            plan=StatedPlan.from_dict(plan.to_dict()),
        )
        resumed = self.num_releases > 0 or self.fingerprint is not None
        goes_on = place is not None  # on the batches that this process draws
        if place is None and self.num_releases:
            place = self.memory.get("place")
        self.phase = self.budget.open(path, header, self.num_releases, resumed, self.processes, place)
        if not goes_on:
            self._refuse_new_round(plan, 0 if place is None else place[0])
        self.budget.limit(plan, self.num_releases, horizon)

    def _refuse_new_round(self, plan: TrainingPlan, phase: int) -> None:
        """Refuse to resume a training within a round of batches or noise that cannot be drawn again.

        Args:
            plan: Plan of the training.
            phase: Phase of the ledger, at the checkpoint.
        """
        if self.num_releases == 0:
            return
        has_keys = self._keys_file is not None
        # With a seed for the noise alone, records are in other groups from here on.
        has_seeds = self._are_all_seeded if plan.sampling.cycle > 1 else self._is_seeded
        if self.phase == phase and (has_keys or has_seeds):
            return
        if not (plan.noise.independent and self.memory.get("independent", True)):
            raise ConfigurationError(
                "correlated noise can only be continued with the seed and settings of the run (without a seed: with "
                f"the {KEYS_FILE} next to its ledger): resume it unchanged, or start a new run."
            )
        if self.num_releases % plan.sampling.cycle:
            raise ConfigurationError(
                f"the checkpoint has {self.num_releases} releases, but {plan.sampling.kind} batches can be resumed "
                f"only at a multiple of {plan.sampling.cycle}: resume from such a checkpoint. (With a seed for both "
                "the loader and the strategy, every checkpoint works.)"
            )

    def _replay_key(self) -> str | None:
        """Key by which a release is repeated after a crash: a hash of all that decides it, rounding included.

        None without a seed, unless its keys are kept: then nothing can be repeated.
        """
        if not self._has_known_key:
            return None
        mechanism = self.mechanism
        device = mechanism.total.device
        rounding = (torch.__version__, kernels.signature(device), RANDOM_NUMBERS)
        facts = [
            self.fingerprint,
            self.key,
            device.type,
            list(self._names),
            mechanism.training_plan.digest,
            *rounding,
        ]
        return self._origin + hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]

    @property
    def _origin(self) -> str:
        """Begins the words of the ledger that come from the key of the noise."""
        return "" if self._is_seeded else KEPT

    @property
    def lot_phase(self) -> int:
        """Phase of the ledger with the batches that are drawn."""
        return self.budget.lot_phase if self.recipe.private else 0

    def key_of(self, stream: Stream, *parts: int) -> tuple[int, ...]:
        """Key of random numbers of the coming release, for one use of them each."""
        return self.key, stream, self.num_releases, *parts

    def open_lot(self) -> None:
        """Begin a batch, without a record so far; it is good for one release."""
        self._open = True
        self._empty = True

    def _require_lot(self) -> None:
        if not self._open:
            raise ConfigurationError(
                "no batch is open: call open_lot() before the records of each batch, and release each batch once."
            )

    def accumulate(
        self,
        gradients: Sequence[ParameterGradients],
        rows: int,
        merge: Merge | None = None,
        values: Mapping[str, Value] | None = None,
    ) -> None:
        """Clip a piece of the batch and add it to the sums; see `Mechanism.accumulate`."""
        mechanism = self.mechanism
        self._require_lot()
        with torch.no_grad(), torch.autocast(mechanism.total.device.type, enabled=False):  # in full precision
            if self._empty:
                mechanism.clear()
                self._empty = False
            exact, norms = mechanism.accumulate(gradients, rows, merge, values)
            for observer in self.observers:
                observer(mechanism, self._names, exact, norms)

    @contextmanager
    def sums_apart(
        self,
        total: Tensor,
        all_finite: Tensor,
        present: Tensor | None = None,
    ) -> Iterator[None]:
        """Within, accumulated vectors are no part of the open batch: their sums are made in `total`.

        Args:
            total: Flat, like the mechanism's; overwritten.
            all_finite: Cleared where a record is not finite; then the sums are of no use.
            present: Mask of the batch's rows that are records, the others being padding; see `clip_and_sum`.
        """
        self._require_lot()
        was_empty = self._empty
        self._empty = False
        try:
            with self.mechanism.sums_apart(total, all_finite, present):
                yield
        finally:
            self._empty = was_empty

    @torch.no_grad()
    def add_sums(self, total: Tensor, records: tuple[int, int]) -> None:
        """Add sums of records of the open batch that were made apart; observers see nothing of them.

        Args:
            total: Flat.
            records: See `Mechanism.records_of_lot`.
        """
        mechanism = self.mechanism
        self._require_lot()
        if self._empty:
            mechanism.clear()
            self._empty = False
        mechanism.add_sums(total, records)

    @torch.no_grad()
    def release(self) -> list[Tensor]:
        """Make the sums of the batch private: noise, a line in the ledger, and only then the division.

        Returns:
            The private gradient of each parameter, in its shape.

        Raises:
            BudgetExhausted: Nothing of the target is left.
            ConfigurationError: No batch was opened since the last release, or the ledger was not.
        """
        mechanism = self.mechanism
        self.budget.refuse_overdraft()
        self._require_lot()
        self._open = False
        if self._empty:
            mechanism.clear()
        for watch in self.watchers:
            if self.recipe.private:
                raise ConfigurationError("exact sums of private records may not be watched.")
            watch(mechanism)
        if self.hook is not None:
            self.hook.insert(mechanism, self.num_releases)
        if self.processes.world > 1:
            self.processes.add_up(mechanism.total)
        exact = mechanism.total.clone() if self.budget.repeated.total() else None  # until the replay is seen to be one
        self._add_noise()
        if exact is not None and self.budget.differs(self._released()):
            if self.processes.rank == 0:
                warnings.warn(_OTHER_SUM.format(number=self.num_releases, path=self.budget.path), stacklevel=2)
            self._refuse_second_sum(mechanism.training_plan)
            mechanism.total.copy_(exact)
            self.phase = self.budget.leave_replay(self.num_releases)
            self._add_noise()
        if self.hook is not None:
            self.hook.read(mechanism)
        if self.recipe.private:  # on disk before anything uses the noised sum
            self.budget.record(self._released())
        self.num_releases += 1
        return mechanism.post_process()

    def _refuse_second_sum(self, plan: TrainingPlan) -> None:
        """Refuse to release a batch again, with new noise, where batches or noise depend on one another."""
        if plan.sampling.cycle > 1 or not plan.noise.independent:
            raise ConfigurationError(
                f"release {self.num_releases} differs from its record in {self.budget.path}, and with correlated "
                "batches or noise it cannot be repeated: resume under the original conditions (machine, threads, "
                "deterministic=True), or start a new run."
            )

    def _add_noise(self) -> None:
        """Add the noise of this phase to the sum of all processes: later additions would not be on its grid."""
        if not self.recipe.noise:
            return
        mechanism = self.mechanism
        digest = mechanism.training_plan.digest
        if self.processes.rank == 0:

            def key_of_step(step: int) -> tuple[int, ...]:
                return noise_key(self.key, digest, self.phase, step, self.processes.apart)

            mechanism.add_noise(key_of_step)
        self.processes.share(mechanism.total)

    def _released(self) -> Release:
        """The release as the ledger records it, with earlier releases on its batch."""
        mechanism = self.mechanism
        queries = mechanism.queries
        if self.num_releases in self.budget.joint:
            queries = (*queries, *self.budget.joint[self.num_releases])
        return Release(
            number=self.num_releases,
            sampling=mechanism.plan.sampling,
            queries=queries,
            checksum=checksum(mechanism.total),
        )

    def state_dict(self) -> dict[str, Any]:
        """State of a checkpoint, from which a resumed run makes the same releases."""
        state: dict[str, Any] = {
            "private": self.recipe.private,
            "releases": self.num_releases,
            "noise_multiplier": self.noise_multiplier,
        }
        if self._mechanism is not None:
            state |= self._mechanism.state_dict()
        if self.hook is not None:
            state[HOOK_STATE] = self.hook.state_dict()
        state["place"] = (self.phase, self.lot_phase)
        state["first_weights"] = self.first_weights
        state["lot_key"] = self._lot_key
        state["independent"] = self.unit_noise.independent
        return {**state, **self.budget.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the releases of a checkpoint."""
        self.num_releases = int(state["releases"])
        self.memory = state
        self.first_weights = state.get("first_weights")
        self.budget.load_state_dict(state)
        self.noise_multiplier = self.noise_multiplier or state["noise_multiplier"]
