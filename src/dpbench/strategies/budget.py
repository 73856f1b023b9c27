"""Ledger and budget of one training run: what was spent, and what may still be."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytorch_lightning as pl

from dpbench.errors import BudgetExhausted, ConfigurationError
from dpbench.privacy.accounting import check_delta, epsilon, find_accountant
from dpbench.privacy.calibration import calibrate_noise_multiplier, remaining_releases
from dpbench.privacy.ledger import Event, Header, Release, counted_event
from dpbench.privacy.ledger_writer import LedgerWriter
from dpbench.privacy.plan import ReleasePlan, SumQuery, equivalent_queries, record_changes
from dpbench.privacy.sampling import Sampling
from dpbench.privacy.seal import Seal

_LEAST = 1e-12  # noise multiplier and ε below are taken for zero
_UNBOUNDED = 10**7  # releases that a run without an end is checked for


class Budget:
    """Writes the ledger before each release, and stops before the release that would exceed the target.

    Args:
        target_epsilon: ε that may be spent, or None for no limit.
        delta: δ.
        accountant: A name in `privacy.accountants.ACCOUNTANTS` that gives a bound; calibrates and stops.

    Attributes:
        spent: How often each release was made, those of equal cost together.
        repeated: Those of them that this run has yet to repeat, because it resumes from an earlier checkpoint.
        path: Of the ledger, once it was opened.
        remaining: Releases that may still be made, or None for no limit.

    Raises:
        ConfigurationError: A value is out of range.
    """

    def __init__(self, target_epsilon: float | None, delta: float, accountant: str) -> None:
        check_delta(delta)
        if not find_accountant(accountant).guarantee:
            raise ConfigurationError(
                f"the {accountant} accountant is an approximation, no bound: a budget needs another one (rdp or pld)."
            )
        self.target_epsilon, self.delta, self.accountant = target_epsilon, delta, accountant
        self.spent: Counter[Event] = Counter()
        self.repeated: Counter[Event] = Counter()
        self.remaining: int | None = None
        self.path: Path | None = None
        self._writer: LedgerWriter | None = None
        self._seal: Seal | None = None  # of a checkpoint, or of the ledger when it was closed

    def epsilon(self, accountant: str = "rdp") -> float:
        """Epsilon of everything spent so far."""
        return epsilon(self.spent, self.delta, accountant)

    def epsilon_here(self, accountant: str = "rdp") -> float:
        """Epsilon up to the newest release of this run: without those that are on disk and it has yet to repeat."""
        return epsilon(self.spent - self.repeated, self.delta, accountant)

    def state_dict(self) -> dict[str, Any]:
        """By what a resumed run, and a reader, know the ledger again; on ranks other than 0 nothing."""
        seal = self._seal if self._writer is None else self._writer.seal
        return {"ledger": None if seal is None else seal._asdict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Expect the ledger of a checkpoint."""
        self._seal = Seal.read(state.get("ledger"))

    def calibrated(self, trainer: pl.Trainer, sampling: Sampling, microbatch_size: int) -> float:
        """The noise multiplier that uses the target up in the planned number of steps.

        Args:
            trainer: Knows the number of steps.
            sampling: Of each release.
            microbatch_size: μ.

        Raises:
            ConfigurationError: The run has no end, or no noise reaches the target.
        """
        steps = trainer.estimated_stepping_batches
        if steps == float("inf") or steps < 1:
            raise ConfigurationError(
                "target_epsilon without noise_multiplier needs an end: set max_steps or max_epochs."
            )
        changes = record_changes(sampling, microbatch_size)

        def with_noise(noise_multiplier: float) -> Event:
            return sampling, (SumQuery("all", changes, noise_multiplier),)

        assert self.target_epsilon is not None
        z = calibrate_noise_multiplier(with_noise, int(steps), self.target_epsilon, self.delta, self.accountant)
        return z * (1 + 1e-8)  # costs are counted to ten digits

    def place(self, trainer: pl.Trainer, path: Path | None) -> Path:
        """Where the ledger goes: a path that was given, else the trainer's log folder; asks all ranks."""
        return path or Path(trainer.log_dir or trainer.default_root_dir) / "ledger.jsonl"

    def open(
        self, trainer: pl.Trainer, path: Path, header: Header, start: int, resumed: bool, plan: ReleasePlan
    ) -> int:
        """Open the ledger on rank 0, tell all ranks what it holds, and find how many releases the target allows.

        Args:
            trainer: Broadcasts.
            path: Of the ledger.
            header: Of this run.
            start: Releases of the restored checkpoint.
            resumed: Whether an existing ledger may be continued.
            plan: Of the next release; all others cost as much.

        Returns:
            The phase of the ledger.

        Raises:
            BudgetExhausted: The target allows no further release.
        """
        known: tuple[Counter[Event], Counter[Event], int] = Counter(), Counter(), 0
        self.path = path
        if trainer.is_global_zero:
            self._writer = LedgerWriter(path, header, start=start, resume=resumed, known=self._seal if start else None)
            known = self._writer.events, self._writer.repeated, self._writer.phase
        self.spent, self.repeated, phase = trainer.strategy.broadcast(known)
        if self._writer is not None:
            self.spent, self.repeated = self._writer.events, self._writer.repeated  # counted there
        replays = self.repeated.total()
        if self.target_epsilon is not None:
            self._limit(trainer, self.target_epsilon, (plan.sampling, equivalent_queries(plan.queries)), start, replays)
        return phase

    def _limit(self, trainer: pl.Trainer, target: float, event: Event, made: int, replays: int) -> None:
        planned, made = trainer.estimated_stepping_batches, min(made, trainer.global_step)  # by this trainer
        most = _UNBOUNDED if planned == float("inf") else max(int(planned) - made - replays, 1)
        new = remaining_releases(self.spent, event, target, self.delta, self.accountant, most)
        self.remaining = replays + new  # replays of recorded releases cost nothing
        if not self.remaining:
            raise BudgetExhausted(
                f"target_epsilon={self.target_epsilon} allows no further step (spent: {self.epsilon():.4g}): "
                "raise it, or the noise_multiplier."
            )

    def refuse_overdraft(self) -> None:
        """Raise BudgetExhausted if nothing remains."""
        if self.remaining is not None and self.remaining < 1:
            raise BudgetExhausted(f"target_epsilon={self.target_epsilon} is spent ({self.epsilon():.4g}).")

    @property
    def exhausted(self) -> bool:
        """Whether no further release is allowed."""
        return self.remaining is not None and self.remaining < 1

    def record(self, release: Release) -> None:
        """Put a release on disk; must return before anything uses the noised sum."""
        event = counted_event(release)
        if self._writer is not None:
            self._writer.append(release)
        elif self.repeated[event]:
            self.repeated[event] -= 1
        else:
            self.spent[event] += 1
        if self.remaining is not None:
            self.remaining -= 1

    def close(self) -> None:
        """Close the ledger."""
        if self._writer is not None:
            self._seal = self._writer.seal
            self._writer.close()
            self._writer = None


def check_noise(noise_multiplier: float | None, target_epsilon: float | None) -> None:
    """Raise ConfigurationError unless noise, budget or both are given, as positive numbers."""
    if noise_multiplier is None and target_epsilon is None:
        raise ConfigurationError("give a noise_multiplier, a target_epsilon, or both (then training stops there).")
    for name, value in (("noise_multiplier", noise_multiplier), ("target_epsilon", target_epsilon)):
        if value is not None and not _LEAST <= value < float("inf"):
            hint = "; use strategy=none to train without privacy" if name == "noise_multiplier" else ""
            raise ConfigurationError(f"{name} must be a positive number, not {value}{hint}.")


def check_counts(**counts: int | None) -> None:
    """Raise ConfigurationError unless these numbers are at least 1, where they are given."""
    for name, value in counts.items():
        if value is not None and value < 1:
            raise ConfigurationError(f"{name} must be a whole number from 1 on, not {value}.")
