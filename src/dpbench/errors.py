"""User-correctable errors, one line each with cause and remedy, and parts of their lines."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

_NAMES_HERE = {
    "target_delta": "delta",
    "epsilon": "target_epsilon",
    "eps": "target_epsilon",
    "target_eps": "target_epsilon",
    "sigma": "noise_multiplier",
    "noise": "noise_multiplier",
    "noise_scale": "noise_multiplier",
    "l2_norm_clip": "max_grad_norm",
    "clip_norm": "max_grad_norm",
    "clipping_norm": "max_grad_norm",
    "clipping_threshold": "max_grad_norm",
    "max_per_sample_grad_norm": "max_grad_norm",
    "num_microbatches": "microbatch_size",
    "max_batch_size": "max_physical_batch_size",
    "grad_sample_mode": "gradients",
    "random_seed": "seed",
    "batch_size": "expected_batch_size",
    "learning_rate": "lr",
}
"""Options of Opacus, TensorFlow Privacy and the papers → their names here."""
_LENGTH = "Set the length in the Trainer: max_steps or max_epochs (on the command line trainer.max_steps)."
_LOADER = (
    "The loader draws the batches: PrivateDataLoader.poisson(dataset, expected_batch_size=...) (on the command line "
    "data.expected_batch_size)."
)
_TRUNCATED = (
    "The sampling cuts batches: dpbench.privacy.sampling.TruncatedPoissonSampling, at its max_batch_size (on the "
    "command line data.sampling=truncated_poisson)."
)
_ENTROPY = "Without a seed, noise comes from the operating system's entropy (on the command line strategy.secure=true)."
_INSTEAD = {
    "epochs": _LENGTH,
    "max_epochs": _LENGTH,
    "steps": _LENGTH,
    "max_steps": _LENGTH,
    "num_steps": _LENGTH,
    "poisson_sampling": _LOADER,
    "sample_rate": _LOADER,
    "batch_size": _LOADER,
    "expected_batch_size": _LOADER,
    "truncated_batch_size": _TRUNCATED,
    "secure_mode": _ENTROPY,
    "secure_rng": _ENTROPY,
    "noise_generator": _ENTROPY,
}
"""Options of other libraries that do not exist here, with their replacement."""


class DPBenchError(Exception):
    """Base of all errors that the command line prints as a single line, without a traceback."""


class ConfigurationError(DPBenchError, ValueError):
    """A setting is wrong or contradicts another."""


class ClassNotFound(ConfigurationError):
    """A class that a configuration names cannot be imported."""


class UnsupportedModuleError(DPBenchError, ValueError):
    """A layer mixes records, or its per-record gradients cannot be computed exactly."""


class CarriedRecordsError(UnsupportedModuleError):
    """A loss depends on records of earlier batches."""


class OutOfMemory(DPBenchError, RuntimeError):
    """A piece of a batch did not fit into the memory of its device; nothing of the batch was released."""


class DataError(DPBenchError):
    """Training data is missing or damaged."""


class LedgerError(DPBenchError):
    """A privacy ledger is missing, damaged, or contradicts the run that wants to write to it."""


class UnknownNoise(DPBenchError):
    """A ledger names a noise process that nothing installed knows: it cannot be read, and is not damaged."""


class DiskFull(DPBenchError):
    """A file of a run did not fit on a disk; the run can be continued."""


TIME_LIMIT_REACHED = 1
"""Stands for a signal: the time limit of a run is reached (1 is SIGHUP, by which runs are not stopped)."""
TIME_LIMIT_STATUS = 75
"""Exit status then: EX_TEMPFAIL of sysexits.h, "try again later"."""


class Interrupted(DPBenchError):
    """A signal, or the end of its time, stopped the training after everything was saved.

    Args:
        number: The signal, or `TIME_LIMIT_REACHED`.
        command: How to go on.
        kept: State from which to go on.

    Attributes:
        status: Exit status of a command that ends so: that of a shell for a signal, 75 for the end of the time.
    """

    def __init__(self, number: int, command: str, kept: str = "Checkpoint, ledger and partial result are kept") -> None:
        why = "time limit reached" if number == TIME_LIMIT_REACHED else "interrupted"
        super().__init__(f"{why}. {kept}; continue with: {command}")
        self.number, self.command, self.kept = number, command, kept
        self.status = TIME_LIMIT_STATUS if number == TIME_LIMIT_REACHED else 128 + number

    @property
    def is_time_limit(self) -> bool:
        """Return whether it is the time limit of one run, after which others of a sweep go on."""
        return self.number == TIME_LIMIT_REACHED

    def __reduce__(self) -> tuple[type[Interrupted], tuple[int, str, str]]:
        return type(self), (self.number, self.command, self.kept)


class BudgetExhausted(DPBenchError):
    """A release would exceed the target epsilon; it was not made."""


class Diverged(DPBenchError):
    """Released values are no longer finite, so that no more budget is spent on them."""


class WorkerDied(DPBenchError):
    """One of several processes of a training ended without an error of its own: it was killed, or aborted.

    Args:
        rank: Rank of that process.
        world: Number of processes.
        how: Such as "SIGKILL".
        command: How to go on, if it is known.
    """

    def __init__(self, rank: int, world: int, how: str, command: str | None = None) -> None:
        hint = f". What was released is in the ledger; continue with: {command}" if command else ""
        super().__init__(f"process {rank} of {world} (from 0) died in the training ({how}){hint}")
        self.rank, self.world, self.how = rank, world, how

    def __reduce__(self) -> tuple[type[WorkerDied], tuple[int, int, str]]:
        return type(self), (self.rank, self.world, self.how)


class PeerLost(DPBenchError):
    """Another process of a training is gone, which torchrun or srun had started.

    Args:
        rank: Rank of this process.
        world: Number of processes.
        command: How to go on, if there is something to go on with.
    """

    def __init__(self, rank: int, world: int, command: str | None) -> None:
        hint = f" What was released is in the ledger; start them again with: {command}" if command else ""
        super().__init__(f"another process of this training has ended (this is {rank} of {world}, from 0).{hint}")
        self.rank, self.world, self.command = rank, world, command

    def __reduce__(self) -> tuple[type[PeerLost], tuple[int, int, str | None]]:
        return type(self), (self.rank, self.world, self.command)


class ReportedByAnotherRank(DPBenchError):
    """Another process of the training states the error."""


def brief(error: BaseException) -> str:
    """First line of an exception's message, or its type's name if it has none; for YAML, place and problem."""
    if (mark := getattr(error, "problem_mark", None)) is not None:
        return f"line {mark.line + 1}: {getattr(error, 'problem', None)}"
    lines = (line.strip() for line in str(error).splitlines())
    return next((line for line in lines if line), type(error).__name__)


def shown(value: Any) -> str:
    """Show a value in one line of bearable length."""
    try:
        text = repr(value)
    except ValueError:
        # Python prints no whole number of more than 4,300 digits.
        return "a number of more than 4,300 digits"
    text = " ".join(text.split())
    return text if len(text) <= 60 else f"{text[:57]}..."


def did_you_mean(name: str, known: Iterable[str], prefix: str = "") -> str:
    """Suggest a known name for an unknown one, in a sentence with a space before it; empty if none is near.

    Args:
        name: The unknown name.
        known: Known names.
        prefix: Prefix of the known names in the sentence.
    """
    names = list(known)
    name_here = _NAMES_HERE.get(name)
    if name_here in names:
        return f" Did you mean {prefix}{name_here}?"
    if name in _INSTEAD:
        return f" {_INSTEAD[name]}"
    close = difflib.get_close_matches(name, names, 1)
    return f" Did you mean {prefix}{close[0]}?" if close else ""
