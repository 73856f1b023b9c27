"""Progress of a run, and of all runs of a sweep or a table."""

from __future__ import annotations

import logging
import math
import os
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
from pytorch_lightning.callbacks import TQDMProgressBar
from tqdm import tqdm

from dpbench.run.runtime import warn_in_one_line
from dpbench.runs.folder import RunFolder
from dpbench.runs.readers import steps_logged
from dpbench.runs.sweep import Sweep

_SWEEP_BAR = "{desc} {bar:20} {percentage:3.0f}% [{elapsed}, left {remaining}]"
_REFRESH_RUN = 0.25  # seconds
_REFRESH_SWEEP = 1.0
_LOOKING = 50  # a look at all runs takes a fiftieth of the time at most: runs may train in this very process
_ENDED = ("done", "failed")
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


def bars(trainer: Mapping[str, Any], show: bool | None = None) -> list[RunProgress]:
    """The bar of a training, if it may have one.

    Args:
        trainer: Options of Lightning's trainer, which refuses a bar where `enable_progress_bar` is false.
        show: Whether to draw it; by default, if standard output is a terminal and this is no job of a queue.
    """
    if trainer.get("enable_progress_bar") is False:
        return []
    if show is None:
        show = sys.stdout.isatty() and "SLURM_JOB_ID" not in os.environ
    return [RunProgress(show)]


class RunProgress(TQDMProgressBar):
    """Lightning's bar with epsilon, loss, accuracies and the time left of the whole training.

    Args:
        enabled: Whether the bar is drawn.
    """

    def __init__(self, enabled: bool = True) -> None:
        super().__init__()
        self._enabled = enabled
        self._refreshed = 0.0
        self._start_time = 0.0
        self._start_step = 0
        self._outputs: Any = None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Be quiet in spawned processes too."""
        super().setup(trainer, pl_module, stage)
        quiet()

    def on_train_start(self, trainer: pl.Trainer, *_: Any) -> None:
        """Print the noise of a private training, and open the bar."""
        super().on_train_start(trainer)
        self._start_time = time.monotonic()
        self._start_step = trainer.global_step
        if not self._enabled:
            return
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if getattr(callback, "private", False):
                tqdm.write(_noise_line(callback), file=sys.stderr)
                planned = trainer.estimated_stepping_batches - trainer.global_step
                if callback.remaining_steps is not None and callback.remaining_steps < planned:
                    tqdm.write(_budget_line(callback, trainer.global_step), file=sys.stderr)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Advance, a few times a second: figures on a GPU are waited for."""
        is_last = trainer.should_stop or trainer.global_step == trainer.max_steps
        if time.monotonic() - self._refreshed < _REFRESH_RUN and not is_last:
            return
        self._refreshed = time.monotonic()
        self._outputs = outputs
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    def on_exception(self, *_: Any) -> None:
        """Leave the terminal in order."""
        if self._train_progress_bar is not None:
            self._train_progress_bar.close()

    def get_metrics(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> dict[str, Any]:
        """Whatever is logged for the bar, such as epsilon and accuracies, with the loss and the time left."""
        figures: dict[str, Any] = super().get_metrics(trainer, pl_module)
        figures.pop("v_num", None)
        if isinstance(self._outputs, dict) and "loss" in self._outputs:
            figures["loss"] = float(self._outputs["loss"])
        made = trainer.global_step - self._start_step
        planned = trainer.estimated_stepping_batches
        if made and planned != math.inf:
            seconds = (time.monotonic() - self._start_time) * (planned - trainer.global_step) / made
            figures["left"] = str(timedelta(seconds=round(seconds)))
        return figures


def _noise_line(strategy: Any) -> str:
    """One line on the noise that a private strategy adds, which may have been solved for a target epsilon."""
    plan = strategy.mechanism.plan
    size = plan.sampling.expected_batch_size
    population = plan.sampling.population
    goal = f" for epsilon {strategy.target_epsilon:g}" if strategy.target_epsilon is not None else ""
    batch = f"expected batch size {size:g} of {population:,} records (sampling rate {size / population:.3g})"
    return f"noise multiplier {plan.noise_multiplier:.5g}{goal}, {batch}"


def _budget_line(strategy: Any, completed: int) -> str:
    """One line on a training that its budget ends before its planned steps."""
    last = completed + strategy.remaining_steps
    return (
        f"target_epsilon={strategy.target_epsilon:g} is spent after step {last:,}, where training ends; with "
        "strategy.noise_multiplier=null the noise is computed for all planned steps"
    )


@dataclass(frozen=True)
class Progress:
    """Progress of some runs at a moment.

    Attributes:
        states: State of each run, by its name; a line is printed when it becomes "done" or "failed".
        counts: The same in short.
        made: Part of the work that is done, in steps or in runs.
        steps: All of the work.
        alone: Whether no run draws a bar of its own in this terminal.
    """

    states: Mapping[str, str]
    counts: str
    made: float
    steps: int
    alone: bool = True


@contextmanager
def watching(look: Callable[[], Progress | None]) -> Iterator[None]:
    """Show in a thread how far the runs are that are made meanwhile.

    Args:
        look: Function that gives the progress now; None before anything has begun.
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
    """A bar over the steps of all runs; without a terminal a line for each run that ends.

    Args:
        look: Progress now; None before anything has begun.
        terminal: Whether to draw a bar.
    """

    def __init__(self, look: Callable[[], Progress | None], terminal: bool) -> None:
        self._look = look
        self._terminal = terminal
        self._states: Mapping[str, str] | None = None  # at the last look
        self._bar: tqdm[Any] | None = None

    def show(self) -> None:
        progress = self._look()
        if self._states is None:  # a run that ends before a second look, when the first found nothing yet, is printed
            self._states = progress.states if progress is not None else {}
        if progress is None:
            return
        if self._terminal and progress.alone:
            self._draw(progress)
        else:
            self._print(progress, self._states)
        self._states = progress.states

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()

    def _draw(self, progress: Progress) -> None:
        if self._bar is None:
            self._bar = tqdm(initial=progress.made, bar_format=_SWEEP_BAR, dynamic_ncols=True)
        self._bar.total = progress.steps
        self._bar.set_description_str(progress.counts, refresh=False)
        self._bar.update(progress.made - self._bar.n)
        self._bar.refresh()

    def _print(self, progress: Progress, before: Mapping[str, str]) -> None:
        for name, state in progress.states.items():
            if state in _ENDED and state != before.get(name):
                # By tqdm, because it leaves a bar that a run draws in one piece.
                tqdm.write(f"{progress.counts}: {name} is {state}", file=sys.stderr)


class SweepProgress:
    """Progress of the runs of `dpbench train -m`, by the files below the sweep's folder.

    Args:
        sweep: The sweep, with the words of its jobs.
    """

    def __init__(self, sweep: Sweep) -> None:
        self._sweep = sweep
        self._planned: dict[Path, float] = {}

    def __call__(self) -> Progress:
        """Progress now: each run counts as one, and one that is under way by the share of its steps."""
        states: dict[str, str] = {}
        made = 0.0
        folders = {lock.parent for lock in self._sweep.folder.rglob(RunFolder.lock)} - self._sweep.before
        for path in sorted(folders):
            run = RunFolder(path)
            if run.begun:
                states[str(run)] = "done" if run.finished else "begun"
                made += 1 if run.finished else min(1.0, steps_logged(run.metrics) / self._steps_of(run))
        jobs = len(self._sweep.jobs)
        counts = Counter(states.values())
        return Progress(states, f"{counts['done']}/{jobs} done, {counts['begun']} begun", made, jobs, self._sweep.apart)

    def _steps_of(self, run: RunFolder) -> float:
        """Steps of a run, by its configuration; infinite where epochs or a time end it."""
        if run.path not in self._planned:
            with suppress(OSError, yaml.YAMLError, KeyError, TypeError):
                steps = yaml.safe_load(run.config.read_text(encoding="utf-8"))["trainer"]["max_steps"]
                self._planned[run.path] = steps if isinstance(steps, int) and steps > 0 else math.inf
        return self._planned.get(run.path, math.inf)
