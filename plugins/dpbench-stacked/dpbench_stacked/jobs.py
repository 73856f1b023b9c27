"""Jobs of a sweep that differ in their seeds alone, trained in one process.

Each job stays an ordinary run, with a folder, a ledger, loggers and a result of its own, in a thread of its own
(`turns`); the executor computes their steps together.
"""

from __future__ import annotations

import logging
import os
import random
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn, configure_log, run_job, setup_globals
from hydra.types import HydraContext
from omegaconf import DictConfig, open_dict
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from dpbench.errors import ConfigurationError, Interrupted
from dpbench.harness.run._signals import SweepInterrupted, relayed_to_threads
from dpbench.harness.run.build import plain
from dpbench.harness.run.command_line import without_hydra
from dpbench.harness.run.config import uses_wandb
from dpbench.harness.runs.command import key_of
from dpbench_stacked.turns import Turns

_VARIABLES = ("PL_GLOBAL_SEED", "PL_SEED_WORKERS")
"""By which Lightning hands a seed on."""


def _stack_size(config: DictConfig) -> int:
    """Number of jobs that are trained in one process.

    Raises:
        ConfigurationError: The executor is another one, or runs of one process cannot have the logger.
    """
    kind, _, size = str(config.strategy.get("executor")).partition(":")
    if kind != "stack":
        raise ConfigurationError("launcher dpbench_stacked needs strategy.executor=stack:N, such as stack:4.")
    if uses_wandb(plain(without_hydra(config))):
        raise ConfigurationError(
            "launcher dpbench_stacked trains several runs in one process, which has one run of wandb: take logger=csv, "
            "tensorboard or none, or train the seeds one after the other."
        )
    return int(size)


def launch_stacked(
    config: DictConfig,
    context: HydraContext,
    task: Callable[[DictConfig], Any],
    job_overrides: Sequence[Sequence[str]],
    initial_job_idx: int,
) -> list[JobReturn]:
    """Run the jobs of a sweep, as Hydra's own launcher would, but those together that differ in their seeds alone.

    Args:
        config: Configuration of the sweep.
        context: Hydra context of the sweep.
        task: Function of each job's configuration.
        job_overrides: The words of each job (by the names that Hydra gives them, as the next).
        initial_job_idx: Number of the first job.

    Returns:
        The result of each job.

    Raises:
        ConfigurationError: See `_stack_size`.
    """
    size = _stack_size(config)
    setup_globals()
    outcomes: dict[int, Any] = {}
    for numbered in _stacks(job_overrides, initial_job_idx, size):
        tasks = []
        for number, words in numbered:
            tasks.append(partial(_run_job, config, context, task, number, words))
        with relayed_to_threads():
            ended = Turns(process_state).run(tasks)
        outcomes |= dict(zip([number for number, _ in numbered], ended, strict=True))
        configure_log(config.hydra.hydra_logging, config.hydra.verbose)
        _raise_any(ended)
    return [outcomes[number] for number in sorted(outcomes)]


def _raise_any(outcomes: Sequence[Any]) -> None:
    """Raise what ends a whole sweep, if jobs have raised it; of interruptions one, with the commands of all."""
    raised = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    if not raised:
        return
    interruptions = [outcome for outcome in raised if isinstance(outcome, SweepInterrupted)]
    if len(interruptions) < len(raised):
        raise next(outcome for outcome in raised if not isinstance(outcome, SweepInterrupted))
    first = interruptions[0].error
    commands = [interruption.error.command for interruption in interruptions]
    raise SweepInterrupted(Interrupted(first.number, " && ".join(commands), first.kept))


def _stacks(
    jobs: Sequence[Sequence[str]],
    first_number: int,
    size: int,
) -> list[list[tuple[int, Sequence[str]]]]:
    """Jobs with their numbers, those together that differ in their seeds alone, up to `size` at once."""
    alike: dict[tuple[str, ...], list[tuple[int, Sequence[str]]]] = {}
    for number, words in enumerate(jobs, first_number):
        others = tuple(word for word in words if key_of(word) != "seed")
        alike.setdefault(others, []).append((number, words))
    stacks = []
    for numbered in alike.values():
        stacks += [numbered[start : start + size] for start in range(0, len(numbered), size)]
    return stacks


def _run_job(
    config: DictConfig,
    context: HydraContext,
    task: Callable[[DictConfig], Any],
    number: int,
    words: Sequence[str],
) -> JobReturn:
    job = context.config_loader.load_sweep_config(config, list(words))
    with open_dict(job):
        job.hydra.job.id = number
        job.hydra.job.num = number
    return run_job(
        hydra_context=context,
        task_function=task,
        config=job,
        job_dir_key="hydra.sweep.dir",
        job_subdir_key="hydra.sweep.subdir",
    )


def process_state() -> Callable[[], None]:
    """Take what is one for all threads of a process, and belongs to a run; returns a function that restores it."""
    root = logging.getLogger()
    handlers = list(root.handlers)
    level = root.level
    hydra = HydraConfig.instance().cfg
    filters = warnings.filters
    rules = list(filters)
    show = warnings.showwarning
    # Guards watch all optimizers of the process, as long as their own training has the turn.
    hooks: list[tuple[Any, Any]] = []
    for registered in (_global_optimizer_pre_hooks, _global_optimizer_post_hooks):
        hooks.append((registered, dict(registered)))
    folder = os.getcwd()
    variables = {name: os.environ.get(name) for name in _VARIABLES}
    dtype = torch.get_default_dtype()  # which a Trainer in double precision sets for its steps
    finds_anomalies = torch.is_anomaly_enabled()
    of_python = random.getstate()
    of_numpy = np.random.get_state()
    of_torch = torch.get_rng_state()
    of_devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]

    def restore() -> None:
        root.handlers[:] = handlers
        root.setLevel(level)
        HydraConfig.instance().cfg = hydra
        filters[:] = rules  # type: ignore[index]
        warnings.filters = filters
        warnings.showwarning = show
        for registered, own in hooks:
            registered.clear()
            registered.update(own)
        os.chdir(folder)
        for name, value in variables.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        torch.set_default_dtype(dtype)
        torch.autograd.set_detect_anomaly(finds_anomalies)
        random.setstate(of_python)
        np.random.set_state(of_numpy)
        torch.set_rng_state(of_torch)
        if of_devices is not None:
            torch.cuda.set_rng_state_all(of_devices)

    return restore
