"""What people see while they wait: a bar over the steps of a run, or over those of all runs of a sweep or a table."""

from __future__ import annotations

import logging
import os
import shutil
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import yaml
from tqdm import tqdm

from dpbench.privacy.mechanism.banded import BandedNoise
from dpbench.run.runtime import warn_in_one_line
from dpbench.runs.folder import RunFolder
from dpbench.runs.numbers import epsilon_text
from dpbench.runs.readers import steps_logged
from dpbench.runs.sweep import Sweep

_RUN_BAR = "{percentage:3.0f}% {bar:12} {n_fmt}/{total_fmt} [{elapsed}<{remaining}]{postfix}"
_SWEEP_BAR = "{desc} {bar:20} {percentage:3.0f}% [{elapsed}, left {remaining}]"
_REFRESH_RUN = 0.25  # seconds
_REFRESH_SWEEP = 1.0
_LOOKING = 50  # a look at all runs takes a fiftieth of the time at most: runs may train in this very process
_ENDED = ("done", "failed")
_FIGURES = {"val/accuracy": "val", "test/accuracy": "test"}
_CHATTER = (
    ".*does not have many workers.*",
    ".*GPU available but not used.*",
    ".*`srun` command is available.*",
    ".*treespec, LeafSpec.*",
    ".*smaller than the logging interval.*",
    ".*It is recommended to use `self.log.*",
)
"""Warnings of Lightning about itself."""


def quiet() -> None:
    """Leave out what Lightning says about itself, and print warnings as one line."""
    for name in ("pytorch_lightning", "lightning.pytorch", "lightning_fabric", "pytorch_lightning.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.getLogger("absl").setLevel(logging.ERROR)  # as `cli.main` does; workers of a sweep do not pass there
    for pattern in _CHATTER:
        warnings.filterwarnings("ignore", message=pattern)
    warn_in_one_line()


def _open_bar(bar_format: str, total: float | None = None, initial: int = 0, leave: bool = True) -> tqdm[Any]:
    width = max(shutil.get_terminal_size((100, 24)).columns, 80)
    return tqdm(total=total, initial=initial, ncols=width, bar_format=bar_format, leave=leave)


def bars(trainer: Mapping[str, Any], show: bool | None = None) -> list[RunProgress]:
    """The bar of a training, if it may have one.

    Args:
        trainer: Options of Lightning's trainer, which refuses a bar where `enable_progress_bar` is false.
        show: Whether anybody sees it; by default, if standard error is a terminal and this is no job of a queue.
    """
    if trainer.get("enable_progress_bar") is False:
        return []
    if show is None:
        show = sys.stderr.isatty() and "SLURM_JOB_ID" not in os.environ
    return [RunProgress(show)]


class RunProgress(pl.callbacks.ProgressBar):
    """A bar over all steps, instead of one for each short epoch: steps, time left, epsilon, loss, accuracy.

    Args:
        enabled: False where nobody watches (no terminal).
    """

    def __init__(self, enabled: bool = True) -> None:
        super().__init__()
        self._enabled = enabled
        self._bar: tqdm[Any] | None = None
        self._refreshed = 0.0

    def disable(self) -> None:
        """Called by Lightning on ranks other than 0."""
        self._enabled = False

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Be quiet in spawned processes too."""
        super().setup(trainer, pl_module, stage)
        quiet()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Open the bar."""
        if not self._enabled:
            return
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if getattr(callback, "private", False):
                tqdm.write(_noise_line(callback), file=sys.stderr)
                planned = trainer.estimated_stepping_batches - trainer.global_step
                if callback.remaining_steps is not None and callback.remaining_steps < planned:
                    tqdm.write(_budget_line(callback, trainer.global_step), file=sys.stderr)
        steps = trainer.estimated_stepping_batches
        self._bar = _open_bar(_RUN_BAR, None if steps == float("inf") else int(steps), trainer.global_step)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, *_: Any) -> None:
        """Advance, a few times a second, with the newest figures."""
        is_last = trainer.should_stop or trainer.global_step == trainer.max_steps
        if self._bar is None or (time.monotonic() - self._refreshed < _REFRESH_RUN and not is_last):
            return
        self._refreshed = time.monotonic()
        figures: dict[str, str] = {}
        metrics = trainer.progress_bar_metrics
        if "privacy/epsilon" in metrics:
            figures["epsilon"] = epsilon_text(metrics["privacy/epsilon"])
        if isinstance(outputs, dict) and "loss" in outputs:
            figures["loss"] = f"{float(outputs['loss']):.3f}"
        for metric, short in _FIGURES.items():
            if metric in metrics:
                figures[short] = f"{100 * metrics[metric]:.1f}%"
        self._bar.set_postfix(figures, refresh=False)
        self._bar.update(trainer.global_step - self._bar.n)
        self._bar.refresh()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Close the bar."""
        self._close()

    def on_test_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Open a bar for the final test."""
        if self._enabled:
            self._bar = _open_bar(_RUN_BAR, int(sum(trainer.num_test_batches)), leave=False)

    def on_test_batch_end(self, *_: Any) -> None:
        """Advance the bar of the test."""
        if self._bar is not None:
            self._bar.update()

    def on_test_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Close the bar."""
        self._close()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Leave the terminal in order."""
        self._close()

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
        self._bar = None


def _noise_line(strategy: Any) -> str:
    """One line on the noise that a private strategy adds, which may have been solved for a target epsilon."""
    plan = strategy.mechanism.plan
    size = plan.sampling.expected_batch_size
    population = plan.sampling.population
    goal = f" for epsilon {strategy.target_epsilon:g}" if strategy.target_epsilon is not None else ""
    batch = f"expected batch size {size:g} of {population:,} records (sampling rate {size / population:.3g})"
    noise = strategy.mechanism.training_plan.noise
    correlation = ""
    if isinstance(noise, BandedNoise):
        megabytes = noise.memory(sum(plan.sizes)) / 1e6
        correlation = f", correlated over {noise.bands} steps (whose noise takes {megabytes:,.1f} MB)"
    return f"noise multiplier {plan.noise_multiplier:.5g}{goal}{correlation}, {batch}"


def _budget_line(strategy: Any, completed: int) -> str:
    """One line on a training that its budget ends before its planned steps."""
    last = completed + strategy.remaining_steps
    return (
        f"target_epsilon={strategy.target_epsilon:g} is spent after step {last:,}, where training ends; with "
        "strategy.noise_multiplier=null the noise is computed for all planned steps"
    )


@dataclass(frozen=True)
class Progress:
    """How far some runs are at a moment.

    Attributes:
        states: Of each run, by its name; a line is printed when it becomes "done" or "failed".
        counts: The same in short.
        made: Steps that all of them have made.
        steps: That all of them will make.
        alone: Whether no run draws a bar of its own in this terminal.
    """

    states: Mapping[str, str]
    counts: str
    made: int
    steps: int
    alone: bool = True


@contextmanager
def watching(look: Callable[[], Progress | None]) -> Iterator[None]:
    """Show in a thread how far the runs are that are made meanwhile.

    Args:
        look: How far they are now; None: nothing yet.
    """
    display = _Display(look, sys.stderr.isatty())
    display.show()  # what was there before is not printed
    stop = threading.Event()

    def watch() -> None:
        pause = _REFRESH_SWEEP
        while not stop.wait(pause):
            start = time.perf_counter()
            display.show()
            pause = max(_REFRESH_SWEEP, _LOOKING * (time.perf_counter() - start))

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        display.show()
        display.close()


class _Display:
    """A bar over the steps of all runs; without a terminal a line for each run that ends."""

    def __init__(self, look: Callable[[], Progress | None], terminal: bool) -> None:
        self._look = look
        self._terminal = terminal
        self._start_time = 0.0
        self._start_step: int | None = None
        self._states: Mapping[str, str] | None = None  # at the last look
        self._bar: tqdm[Any] | None = None

    def show(self) -> None:
        progress = self._look()
        if self._states is None:  # a run that ends before a second look, when the first found nothing yet, is printed
            self._states = progress.states if progress is not None else {}
        if progress is None:
            return
        if self._start_step is None:
            self._start_time = time.monotonic()
            self._start_step = progress.made
        if self._terminal and progress.alone:
            self._draw(progress)
        else:
            self._print(progress)
        self._states = progress.states

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()

    def _draw(self, progress: Progress) -> None:
        if self._bar is None:
            self._bar = _open_bar(_SWEEP_BAR, initial=progress.made)
        self._bar.total = progress.steps
        self._bar.set_description_str(progress.counts, refresh=False)
        self._bar.update(progress.made - self._bar.n)
        self._bar.refresh()

    def _print(self, progress: Progress) -> None:
        assert self._states is not None
        for name, state in progress.states.items():
            if state in _ENDED and state != self._states.get(name):
                # By tqdm, because it leaves a bar that a run draws in one piece.
                line = f"{progress.counts}: {name} is {state}{self._time_left(progress)}"
                tqdm.write(line, file=sys.stderr)

    def _time_left(self, progress: Progress) -> str:
        assert self._start_step is not None
        seconds = time.monotonic() - self._start_time
        steps = progress.made - self._start_step
        if steps <= 0 or progress.steps <= progress.made or seconds < _REFRESH_SWEEP:
            return ""
        remaining = seconds * (progress.steps - progress.made) / steps
        return f", left {timedelta(seconds=round(remaining))}"


class SweepProgress:
    """How far the runs of `dpbench train -m` are, by what they have written below the sweep's folder.

    Args:
        sweep: With the words of its jobs.
    """

    def __init__(self, sweep: Sweep) -> None:
        self._sweep = sweep
        self._planned: dict[Path, int] = {}

    def __call__(self) -> Progress:
        """How far they are now."""
        states: dict[str, str] = {}
        steps_made = 0
        planned = []
        folders = {lock.parent for lock in self._sweep.folder.rglob(RunFolder.lock)} - self._sweep.before
        for path in sorted(folders):
            run = RunFolder(path)
            if not run.begun:
                continue
            states[str(run)] = "done" if run.finished else "begun"
            steps = self._steps_of(run)
            planned.append(steps)
            steps_made += steps if run.finished else min(steps_logged(run.metrics), steps)
        jobs = len(self._sweep.jobs)
        usual = sum(planned) / len(planned) if planned else 1  # of those that have not begun
        total = sum(planned) + usual * max(0, jobs - len(planned))
        counts = Counter(states.values())
        summary = f"{counts['done']}/{jobs} done, {counts['begun']} begun"
        return Progress(states, summary, steps_made, round(total), self._sweep.apart)

    def _steps_of(self, run: RunFolder) -> int:
        """Steps of a run, by its configuration; 1 where epochs or a time end it."""
        if run.path not in self._planned:
            with suppress(OSError, yaml.YAMLError, KeyError, TypeError):
                steps = yaml.safe_load(run.config.read_text(encoding="utf-8"))["trainer"]["max_steps"]
                self._planned[run.path] = steps if isinstance(steps, int) and steps > 0 else 1
        return self._planned.get(run.path, 1)
