"""Ledger and budget of one run: ε spent, and ε left."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from dpbench.errors import BudgetExhausted, ConfigurationError, LedgerError
from dpbench.files import write_atomically
from dpbench.privacy.accounting.calibration import affordable_releases, calibrate_scale
from dpbench.privacy.accounting.composition import check_delta, epsilon, find_accountant
from dpbench.privacy.accounting.ledger import Header, Release, counted_event, read_ledger
from dpbench.privacy.accounting.seal import Seal, difference, seal_of
from dpbench.privacy.accounting.stated_plan import own_process
from dpbench.privacy.accounting.writer import LedgerWriter
from dpbench.privacy.events import Event, Queries, SumQuery, equivalent_queries
from dpbench.privacy.mechanism.training_plan import TrainingPlan
from dpbench.privacy.processes import ALONE, Processes
from dpbench.privacy.sampling import Sampling

# Noise multipliers and targets: below, they are taken for zero; above, their squares leave the floating-point numbers.
_SMALLEST = 1e-12
_LARGEST = 1e12
_REMAINDER = 1e-4
"""Share of a target that a calibrated training may leave: PLD solves to a tenth of that."""
_GROWTH = 1.25  # of the releases between two points at which a slow accountant is asked
_UNBOUNDED = 10**7  # releases that a run without an end is checked for


class TrainingLength(NamedTuple):
    """Planned and past length of a training, in steps.

    Attributes:
        total_steps: Steps in all; infinite for a run without an end.
        completed_steps: Those that this trainer has behind it.
    """

    total_steps: float = float("inf")
    completed_steps: int = 0


ENDLESS = TrainingLength()


class Budget:
    """Writes the ledger before each release, and stops before the release that would exceed the target.

    Args:
        target_epsilon: ε that may be spent, or None for no limit.
        delta: δ.
        accountant: A name in `privacy.accounting.accountants.ACCOUNTANTS` that gives a bound; calibrates and stops.
        after: Ledger of an earlier training, copied to the start of this ledger; None: no earlier training.

    Attributes:
        after: The given ledger.
        spent: How often each release was made, those of equal cost together.
        repeated: Those of them that this run has yet to repeat, because it resumes from an earlier checkpoint.
        joint: Queries that were answered on the batches of this run before, by number; see `LedgerWriter`.
        lot_phase: Phase of the ledger with the batches that are drawn.
        path: Path of the ledger, once it was opened.
        remaining: Releases that may still be made, or None for no limit.

    Raises:
        ConfigurationError: A value is out of range.
    """

    def __init__(
        self,
        target_epsilon: float | None,
        delta: float,
        accountant: str,
        after: Path | None = None,
    ) -> None:
        check_delta(delta)
        if not find_accountant(accountant).guarantee:
            raise ConfigurationError(
                f"the {accountant} accountant is an approximation, no bound: a budget needs another one (rdp or pld)."
            )
        self.target_epsilon = target_epsilon
        self.delta = delta
        self.accountant = accountant
        self.after = after
        self._earlier: Counter[Event] = Counter()  # releases of the training before
        self.spent: Counter[Event] = Counter()
        self.repeated: Counter[Event] = Counter()
        self.joint: dict[int, Queries] = {}
        self.lot_phase = 0
        self.remaining: int | None = None
        self.path: Path | None = None
        self._writer: LedgerWriter | None = None
        self._opened = False
        self._processes = ALONE
        self._plan: TrainingPlan | None = None
        self._own_process: str | None = None  # of noise that is not dpbench's
        self._seal: Seal | None = None  # of a checkpoint, or of the ledger when it was closed

    @property
    def _target(self) -> tuple[float, float, str]:
        """(ε, δ, accountant) of a budget that has a limit."""
        assert self.target_epsilon is not None
        return self.target_epsilon, self.delta, self.accountant

    def epsilon(self, accountant: str | None = None) -> float:
        """Epsilon of everything spent so far; without a name by the budget's accountant."""
        return epsilon(self.spent, self.delta, accountant or self.accountant)

    def epsilon_here(self, accountant: str | None = None) -> float:
        """Epsilon up to the newest release of this run: without those that are on disk and it has yet to repeat."""
        return epsilon(self.spent - self.repeated, self.delta, accountant or self.accountant)

    def is_worth_logging(self, number: int, before: int) -> bool:
        """Return whether epsilon is logged after a release: with a slow accountant, after each further quarter of them.

        Args:
            number: The release, from 1 on.
            before: The release of the point before, if there was one.
        """
        if before < 1 or not find_accountant(self.accountant).is_slow:
            return True
        return math.floor(math.log(before, _GROWTH)) < math.floor(math.log(number, _GROWTH))

    def state_dict(self) -> dict[str, Any]:
        """Seal by which a resumed run, and a reader, know the ledger again; nothing on ranks other than 0."""
        return {"ledger": None if self.seal is None else self.seal._asdict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Expect the ledger of a checkpoint."""
        self._seal = Seal.read(state.get("ledger"))

    def read_earlier(self, processes: Processes) -> None:
        """Read, on rank 0 for all, the releases of the training before.

        Raises:
            LedgerError: Its ledger cannot be read.
        """
        if self.after is None:
            return
        events: Counter[Event] = Counter()
        if processes.rank == 0:
            ledger = read_ledger(self.after)
            if ledger.damage is not None:
                raise LedgerError(f"cannot go on after {self.after}: {ledger.damage}.")
            events = ledger.events
        self._earlier = processes.broadcast(events)

    def calibrated(self, plan: TrainingPlan, horizon: TrainingLength) -> float:
        """Solve for the noise that uses up the rest of the target in the planned steps: a multiple of the plan's.

        Args:
            plan: Plan of the training, with noise multiplier 1 if the multiplier is to be solved for.
            horizon: Number of steps.

        Raises:
            ConfigurationError: The run has no end, or no noise reaches the target.
            BudgetExhausted: The training before has spent it.
        """
        spent = epsilon(self._earlier, self.delta, self.accountant) if self._earlier else 0.0
        # A calibrated training leaves only a rounding error of its budget: a second one would be pure noise.
        if self.target_epsilon is not None and spent >= self.target_epsilon * (1 - _REMAINDER):
            raise BudgetExhausted(
                f"target_epsilon={self.target_epsilon} covers both trainings, and {self.after} has already spent "
                f"{spent:.4g}: raise it."
            )
        if horizon.total_steps == float("inf") or horizon.total_steps < 1:
            raise ConfigurationError(
                "target_epsilon without noise_multiplier needs a training of known length: set max_steps or max_epochs."
            )
        steps = int(horizon.total_steps)
        changes = plan.summands.changes(plan.sampling)
        # Steps that differ in nothing are counted together: their cost is computed once.
        counts: Counter[tuple[Sampling, float]] = Counter()
        if plan.constant:
            counts[plan.sampling_of(0), plan.noise.multiplier(0)] = steps
        else:
            for step in range(steps):
                counts[plan.sampling_of(step), plan.noise.multiplier(step)] += 1

        def with_noise(noise_multiplier: float) -> Counter[Event]:
            events = Counter(self._earlier)
            for (sampling, factor), count in counts.items():
                query = SumQuery("all", changes, factor * noise_multiplier)
                events[Event(sampling, (query,))] += count
            return events

        # Costs are counted to ten digits, rounded to the costly side: a margin, so that the last planned step fits.
        return calibrate_scale(with_noise, *self._target) * (1 + 1e-8)

    def open(
        self,
        path: Path,
        header: Header,
        start: int,
        resumed: bool,
        processes: Processes = ALONE,
        place: tuple[int, int] | None = None,
    ) -> int:
        """Open the ledger on rank 0, and tell all ranks its content.

        Args:
            path: Path of the ledger.
            header: Header of this run.
            start: Releases of the restored checkpoint.
            resumed: True to continue an existing ledger.
            processes: All of this training.
            place: (phase, phase of the batches that it draws) of the checkpoint; None if unknown.

        Returns:
            The phase of the ledger.
        """
        self.path = path
        self._processes = processes
        if processes.rank == 0:
            if self.after is not None and not start:
                self._begin_with_earlier(path)
                resumed = True
            self._writer = LedgerWriter(
                path,
                header,
                start=start,
                resume=resumed,
                known=self._seal if start else None,
                place=place,
            )
        self._opened = True
        return self._share()

    def _begin_with_earlier(self, path: Path) -> None:
        """Copy the ledger of the training before, unless this one begins with it already.

        Raises:
            LedgerError: A ledger lies there that begins otherwise, or nothing can be written.
        """
        assert self.after is not None
        if path.is_file() and path.stat().st_size:
            if difference(path, seal_of(self.after), witness=str(self.after)) is None:
                return
            if read_ledger(path).releases:
                raise LedgerError(
                    f"{path} does not continue {self.after} (after=...): choose another file (ledger=..., or another "
                    "folder)."
                )
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, self.after.read_text(encoding="utf-8"))
        except OSError as error:
            raise LedgerError(f"cannot begin {path} with {self.after}: {error.strerror}.") from None

    def _share(self) -> int:
        """Tell all processes the content of rank 0's ledger, and return its phase."""
        writer = self._writer
        contents: tuple[Any, ...] = (Counter(), Counter(), {}, 0, 0)
        if writer is not None:
            contents = (writer.events, writer.repeated, writer.joint, writer.lot_phase, writer.phase)
        self.spent, self.repeated, self.joint, self.lot_phase, phase = self._processes.broadcast(contents)
        if writer is not None:
            # What the writer counts from now on is counted here, too.
            self.spent = writer.events
            self.repeated = writer.repeated
        return int(phase)

    def differs(self, release: Release) -> bool:
        """Return whether a replay differs from its record; the same on all processes."""
        differs = self._writer is not None and self._writer.differs(release)
        return bool(self._processes.broadcast(differs))

    def leave_replay(self, number: int) -> int:
        """Go on in a new phase from a release that came out otherwise than it is recorded.

        Args:
            number: Number of that release.

        Returns:
            The phase of the ledger.

        Raises:
            BudgetExhausted: The target does not allow it in addition to the recorded releases.
        """
        replays = self.repeated.total()
        if self._writer is not None:
            self._writer.leave_replay()
        phase = self._share()
        if self.target_epsilon is not None and self.remaining is not None:
            self.remaining = self._allowed(number, max(self.remaining, replays, 1))
            self.refuse_overdraft()
        return phase

    def _allowed(self, number: int, most: int) -> int:
        """How many releases the target allows from one on: first those on batches that were used before, then others.

        Args:
            number: Number of the first one.
            most: Largest number to count to.
        """
        assert self._plan is not None
        plan = self._plan
        joint = []
        for step in sorted(self.joint):
            if step >= number:
                event = plan.event(step)
                queries = equivalent_queries((*event.queries, *self.joint[step]))
                joint.append(Event(event.sampling, queries))
        first = number + len(joint)
        listed = joint
        if not plan.constant:
            listed = joint + [plan.event(step) for step in range(first, first + most)]

        def ahead(count: int) -> Counter[Event]:
            events = Counter(listed[:count])
            if count > len(listed):
                events[plan.event(first)] += count - len(listed)
            return events

        return affordable_releases(self.spent, ahead, len(joint) + most, *self._target)

    def limit(self, plan: TrainingPlan, start: int, horizon: TrainingLength) -> None:
        """Find how many releases the target allows.

        Args:
            plan: Plan of the training.
            start: Releases of the restored checkpoint.
            horizon: Length of this training.

        Raises:
            BudgetExhausted: The target allows no further release.
        """
        self._plan = plan
        self._own_process = own_process(plan.noise.to_dict())
        if self.target_epsilon is None:
            return
        replays = self.repeated.total()
        most = _UNBOUNDED
        if horizon.total_steps != float("inf"):
            # A checkpoint may hold releases of an earlier trainer, which are no part of this one's horizon.
            past = min(start, horizon.completed_steps)
            most = max(int(horizon.total_steps) - past - replays, 1)
        if not plan.constant and most == _UNBOUNDED:
            raise ConfigurationError(
                "target_epsilon with schedules of noise or batch size needs a training of known length: set max_steps "
                "or max_epochs."
            )
        # Replays of recorded releases cost nothing.
        self.remaining = replays + self._allowed(start + replays, most)
        if not self.remaining:
            spent = self.epsilon()
            remedy = "raise it"
            if spent == 0:  # otherwise the noise may have been calibrated, and its share is used up
                remedy += ", raise noise_multiplier, or set noise_multiplier=null to have it calibrated"
            raise BudgetExhausted(
                f"target_epsilon={self.target_epsilon} allows no further step (spent: {spent:.4g}): {remedy}."
            )

    def refuse_overdraft(self) -> None:
        """Raise BudgetExhausted if nothing remains."""
        if self.exhausted:
            raise BudgetExhausted(f"target_epsilon={self.target_epsilon} is spent ({self.epsilon():.4g}).")

    @property
    def seal(self) -> Seal | None:
        """Seal of the ledger up to the newest release, or that of a checkpoint; None on ranks other than 0."""
        if self._writer is not None:
            return self._writer.seal
        return self._seal

    @property
    def exhausted(self) -> bool:
        """Return whether no further release is allowed."""
        return self.remaining is not None and self.remaining < 1

    def record(self, release: Release) -> None:
        """Put a release on disk; must return before anything uses the noised sum.

        Raises:
            ConfigurationError: The ledger is not open.
            BudgetExhausted: Noise of one's own costs more than it was planned to, and than the target allows.
        """
        if not self._opened:
            raise ConfigurationError("the ledger is not open: call open_ledger before the first release.")
        event = counted_event(release)
        self._refuse_less_noise(event)
        if self._writer is not None:
            self._writer.append(release)
        elif self.repeated[event]:
            self.repeated[event] -= 1
        else:
            self.spent[event] += 1
        if self.remaining is not None:
            self.remaining -= 1

    def _refuse_less_noise(self, event: Event) -> None:
        """Refuse a release that costs more than is left, where the noise is not dpbench's: it may have moved since."""
        if self.remaining is None or self.repeated[event]:
            return
        process = self._own_process
        if process is None:
            return
        if not affordable_releases(self.spent, lambda count: Counter({event: count}), 1, *self._target):
            raise BudgetExhausted(
                f"{process} draws less noise than it had planned, and target_epsilon={self.target_epsilon} does not "
                f"allow it (spent: {self.epsilon():.4g}): make its multiplier a function of the step."
            )

    def close(self) -> None:
        """Close the ledger."""
        self._opened = False
        writer = self._writer
        if writer is None:
            return
        self._writer = None
        try:
            writer.close()
        finally:
            self._seal = writer.seal


def check_noise(noise_multiplier: float | None, target_epsilon: float | None) -> None:
    """Raise ConfigurationError unless noise, budget or both are given, as positive numbers."""
    if noise_multiplier is None and target_epsilon is None:
        raise ConfigurationError("set noise_multiplier, target_epsilon, or both (training then stops at the target).")
    _check_positive("noise_multiplier", noise_multiplier, "; use strategy=none to train without privacy")
    _check_positive("target_epsilon", target_epsilon)


def _check_positive(name: str, value: float | None, hint: str = "") -> None:
    if value is not None and not _SMALLEST <= value <= _LARGEST:
        raise ConfigurationError(
            f"{name} must be a positive number from {_SMALLEST:g} to {_LARGEST:g}, not {value}{hint}."
        )
