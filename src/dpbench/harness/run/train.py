"""One run: build, train, test, record."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Protocol

import pytorch_lightning as pl
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from lightning_fabric.utilities.exceptions import MisconfigurationException
from omegaconf import DictConfig
from pytorch_lightning.loggers import Logger
from pytorch_lightning.utilities.model_helpers import is_overridden

from dpbench.callback.lines import show_lines
from dpbench.canonical import digest_of
from dpbench.code import code_hash
from dpbench.data.module import PrivateDataModule
from dpbench.errors import BudgetExhausted, ConfigurationError, Diverged, DPBenchError, Interrupted, brief
from dpbench.files import remove_torn, write_atomically
from dpbench.harness.run import build, logs
from dpbench.harness.run._checkpoint import LastCheckpoint, deadline_of
from dpbench.harness.run._earlier_stage import weights_before, with_earlier_stage
from dpbench.harness.run._misfit import misfit_of
from dpbench.harness.run._objective import values_of
from dpbench.harness.run._resume import Reopened, is_started_again, prepare_folder, resuming
from dpbench.harness.run._signals import interrupted_at_once
from dpbench.harness.run.config import check_config, other_loggers, uses_wandb
from dpbench.harness.run.evaluation import moving_average
from dpbench.harness.run.hydra_folder import has_workers, hydra_files, optimizes, output_dir, write_hydra_files
from dpbench.harness.run.logs import EvaluationRow, Origin, build_loggers, log_end, origin_of, services
from dpbench.harness.run.processes import (
    from_first_process,
    is_first,
    leave_to_first,
    losses_explained,
    processes_to_start,
    require_shared_folder,
    run_in_processes,
    together,
    with_launched_processes,
)
from dpbench.harness.run.progress import RunProgress, bars, quiet
from dpbench.harness.run.runtime import keep_large_blocks
from dpbench.harness.runs.claim import full_disk_explained, locked
from dpbench.harness.runs.folder import Run, RunFolder
from dpbench.harness.runs.metrics_log import best_validation
from dpbench.harness.runs.provenance import commit
from dpbench.harness.runs.readers import read_checkpoint
from dpbench.harness.runs.record import is_audited, read_result, write_result
from dpbench.privacy import kernels, native
from dpbench.strategies import PrivateStrategy

_AUDITS = "dpbench.audits"
"""Group of entry points: functions from the folder and the last checkpoint of an audited run to what is kept of it."""


class Reporter(Protocol):
    """Shows a run that has ended. It is passed in, so that it is no part of the code that computes a run."""

    def draw(self, run: Run) -> Mapping[str, Path]:
        """Draw pictures into the folder, before the result is written; returns those that wandb shows, by name."""

    def summarize(self, run: Run, record: Mapping[str, Any], opening: str) -> None:
        """Show the result.

        Args:
            run: The run.
            record: The content of result.json.
            opening: Command or address to see the run in wandb.
        """


@dataclass(frozen=True)
class _Job:
    """Arguments of `train` other than the configuration, pickled on their way to other processes.

    Attributes:
        folder: The run's folder.
        observers: More callbacks, after all others.
        show: True to draw a progress bar; None: if standard output is a terminal.
        hydra_files: Content of files for `.hydra`.
        reporter: Shows the run in the end.
        origin: Command and sweep of the run.
        trust: True if the checkpoint of a run that is resumed may hold objects.
        loaded: A data module whose data sets the run shares; None: it loads its own.
    """

    folder: RunFolder
    observers: Sequence[pl.Callback]
    show: bool | None
    hydra_files: Mapping[str, str]
    reporter: Reporter | None
    origin: Origin
    trust: bool
    loaded: PrivateDataModule[Any] | None


def train_job(cfg: DictConfig, reporter: Reporter | None = None, trust: bool = False) -> list[float] | None:
    """The task of `dpbench train`: one run in the folder that Hydra made.

    Args:
        cfg: The composed configuration.
        reporter: Shows the run in the end.
        trust: True if the checkpoint of a run that is resumed may hold objects; see `read_checkpoint`.

    Returns:
        The objectives, for a sweeper that chooses by them; else None.

    Raises:
        ConfigurationError: An objective was not measured.
    """
    hydra = HydraConfig.get()
    config = build.plain(cfg)
    is_swept = hydra.mode == RunMode.MULTIRUN
    record = train(
        config,
        output_dir(hydra),
        show=False if is_swept and has_workers(hydra) else None,  # the sweep has a bar of its own
        beside=hydra_files(cfg),
        reporter=reporter,
        origin=origin_of(hydra),
        trust=trust,
    )
    return values_of(record, config) if is_swept and optimizes(hydra) else None


def train(
    config: dict[str, Any],
    folder: Path,
    observers: Sequence[pl.Callback] = (),
    show: bool | None = None,
    beside: Mapping[str, str] | None = None,
    reporter: Reporter | None = None,
    origin: Origin | None = None,
    trust: bool = False,
    loaded: PrivateDataModule[Any] | None = None,
) -> dict[str, Any]:
    """Train, test and record, in a folder that no other process trains in meanwhile.

    Where the configuration asks for several processes of this machine, this one starts them and waits.

    Args:
        config: Resolved configuration, see `conf/config.yaml`.
        folder: The run's folder; ledger, metrics, checkpoint and result go there.
        observers: More callbacks, after all others, that change nothing of the training. Each of several processes has
            copies of them.
        show: True to draw a progress bar; None: if standard output is a terminal.
        beside: Content of files for `.hydra`: the origin of the configuration.
        reporter: Shows the run in the end, when nothing is left to compute.
        origin: Command and sweep of the run, from which loggers take its names.
        trust: True if the checkpoint of a run that is resumed may hold objects; see `read_checkpoint`.
        loaded: A data module whose data sets the run shares (`PrivateDataModule.with_batches_of`); None: it loads its
            own.

    Returns:
        The content of result.json; {} in all but the first of several processes that torchrun or srun has started.

    Raises:
        DPBenchError: A user-correctable error.
        Interrupted: After a Ctrl-C or another signal, or at the end of its time, when everything is saved.
    """
    job = _Job(
        folder=RunFolder(folder),
        observers=observers,
        show=show,
        hydra_files=beside or {},
        reporter=reporter,
        origin=origin or Origin(),
        trust=trust,
        loaded=loaded,
    )
    run = partial(_train_in_locked_folder, config, job)
    processes = processes_to_start(config["trainer"])
    if processes > 1:
        check_config(config)  # what is refused is refused before any of them starts
        return run_in_processes(run, processes, config["trainer"].get("strategy"), job.folder)
    return run()


def _train_in_locked_folder(config: dict[str, Any], job: _Job) -> dict[str, Any]:
    """Lock the folder, in this process or together with its peers, and train; a finished run is only read."""
    folder = job.folder
    with ExitStack() as stack:
        stack.enter_context(losses_explained(lambda: folder.command("resume") if folder.trained else None))
        config = with_launched_processes(config)
        # The first process locks for all: they write to one folder.
        from_first_process(lambda: stack.enter_context(locked(folder, other_loggers(config))))
        require_shared_folder(folder.path)
        stack.enter_context(full_disk_explained(folder))
        if from_first_process(lambda: is_started_again(folder, config)):
            if folder.finished:
                return read_result(folder) if is_first() else {}
            config = resuming(config)
        return _train_and_record(config, job)


def _train_and_record(config: dict[str, Any], job: _Job) -> dict[str, Any]:
    """Make the objects of the configuration, train, and write the record."""
    folder = job.folder
    # Two clocks: deadlines are measured on `time.monotonic`, seconds of the record by the finer one.
    start = time.perf_counter()
    deadline_start = time.monotonic()
    with together():
        check_config(config)
        config = with_earlier_stage(config)
        strategy = build.build_strategy(config, folder)
    deadline = deadline_of(config["run"].get("max_time"), deadline_start)
    # Kept from here on: the files may have changed when the record is written.
    code_hash()
    commit()
    quiet()
    show_lines()
    _select_engine(config)
    private = isinstance(strategy, PrivateStrategy) and strategy.private
    run = Run(folder, config, private, job.trust or not config["run"]["resume"])
    checkpoint = from_first_process(lambda: prepare_folder(run))
    if not config["run"]["resume"] and is_first():
        write_hydra_files(folder, job.hydra_files)
    # Data before the module, which takes its sizes from them; the seed between the two, so that the first weights do
    # not depend on what loading the data drew.
    data = build.build_data(config, strategy, job.loaded)
    pl.seed_everything(config["seed"], verbose=False)
    weights = None if checkpoint is not None else weights_before(config, job.trust)
    module = build.build_module(config, data, weights)
    last = LastCheckpoint(folder, config["run"]["checkpoint_every_n_steps"], deadline)
    failed = True
    loggers: list[Logger] = []
    try:
        loggers = build_loggers(run, job.origin)
        callbacks = _callbacks(run, job, strategy, loggers, last)
        trainer = build.build_trainer(config, logger=loggers, callbacks=callbacks, default_root_dir=str(folder))
        if config["run"]["resume"]:
            from_first_process(lambda: remove_torn(folder.path))
            last.read_metrics()
        with last.on_signals():
            _fit(trainer, module, data, checkpoint, last, run.trust)
        record = _finish(trainer, module, data, run, last, start, job.reporter)
        failed = False
        return record
    except Diverged as error:
        if is_first():
            write_atomically(folder.diverged, f"{error}\n")
        raise
    except MisconfigurationException as error:  # Lightning's, of settings that do not fit the data
        raise ConfigurationError(f"trainer: {brief(error)}") from error
    finally:
        if uses_wandb(config) and is_first():
            logs.finish_wandb(run, failed)


def _callbacks(
    run: Run,
    job: _Job,
    strategy: pl.Callback,
    loggers: Sequence[Logger],
    last: LastCheckpoint,
) -> list[pl.Callback]:
    """All callbacks of the trainer; Lightning calls them in this order."""
    config = run.config
    for observer in job.observers:
        observer.observes_only = True  # type: ignore[attr-defined]
    callbacks: list[pl.Callback] = []
    if config.get("ema_decay") is not None:
        callbacks.append(moving_average(config["ema_decay"]))  # before the strategy hooks into the module
    callbacks += [
        strategy,
        *build.build_diagnostics(config, run.folder),
        *bars(config["trainer"], job.show),
        *build.build_callbacks(config),
    ]
    if services(loggers):
        callbacks.append(EvaluationRow(services(loggers)))
    if run.folder.finished:
        callbacks.append(Reopened(run))
    return [*callbacks, last, *job.observers]


def _select_engine(config: dict[str, Any]) -> None:
    # A configuration that was made by hand, for `train`, may leave the group out.
    engine = {"native": "auto", "kernels": "none", "keep_memory": True, **config.get("engine", {})}
    if engine["keep_memory"]:
        keep_large_blocks()
    native.select(engine["native"])
    kernels.select(engine["kernels"])


def _fit(
    trainer: pl.Trainer,
    module: pl.LightningModule,
    data: pl.LightningDataModule,
    checkpoint: Path | None,
    last: LastCheckpoint,
    trust: bool,
) -> None:
    folder = last.folder
    try:
        trainer.fit(module, datamodule=data, ckpt_path=checkpoint, weights_only=not trust)
    except SystemExit as error:  # Lightning's, in silence, after a second Ctrl-C
        if not last.interrupted:
            raise
        raise interrupted_at_once(last.interrupted, folder) from error
    except BudgetExhausted:
        if checkpoint is None or folder.finished:  # else: the interrupted run had just spent its budget
            raise
    except (AssertionError, IndexError, TypeError, ValueError, RuntimeError) as error:
        if isinstance(error, AssertionError) and trainer.global_step > 0:
            raise  # the network has taken batches of this shape
        # PyTorch has no type for a checkpoint of another network, and a worker's error comes with its words only.
        text = " ".join(str(error).split())
        of_checkpoint = any(word in text.lower() for word in ("checkpoint", "state_dict", "state dict"))
        misfit = misfit_of(error, data)
        if misfit is not None:
            raise ConfigurationError(misfit) from error
        if isinstance(error, DPBenchError) or checkpoint is None or not of_checkpoint:
            raise
        raise ConfigurationError(
            f"cannot resume from {checkpoint}: it does not match the model and optimizer of the configuration. "
            "Restore the run's own checkpoint, or remove the overrides that change them "
            f"({textwrap.shorten(text, 300, placeholder='...')})."
        ) from error


def _finish(
    trainer: pl.Trainer,
    module: pl.LightningModule,
    data: pl.LightningDataModule,
    run: Run,
    last: LastCheckpoint,
    start: float,
    reporter: Reporter | None,
) -> dict[str, Any]:
    """Evaluate the last checkpoint in the first process, and write the record."""
    folder = run.folder
    checkpoint = read_checkpoint(folder.checkpoint, trust=run.trust)
    steps = int(checkpoint["global_step"])
    seconds = last.seconds_before + time.perf_counter() - start
    last.read_metrics()  # the same, wherever the training was interrupted
    metrics = last.metrics
    if last.stopped_by:
        if is_first():
            write_result(run, metrics, steps, seconds, seconds, finished=False)
        raise Interrupted(last.stopped_by, folder.command("resume"))
    if not leave_to_first():
        return {}
    module.load_state_dict(checkpoint["state_dict"])  # the average, also where a resumed run had no budget left
    trainer = _evaluator(trainer, run, checkpoint)
    held_out = getattr(data, "monitored", "val") == "val" and is_overridden("val_dataloader", data)
    if held_out and is_overridden("validation_step", module):
        # The last validation may be many steps ago, or in another process.
        trainer.validate(module, datamodule=data, verbose=False)
        _add_metrics(metrics, trainer)
    if is_overridden("test_step", module) and is_overridden("test_dataloader", data):
        trainer.test(module, datamodule=data, verbose=False)
        _add_metrics(metrics, trainer)
    pictures = reporter.draw(run) if reporter is not None else {}
    audit = _audit(run, checkpoint)
    seconds_total = last.seconds_before + time.perf_counter() - start
    members = getattr(data, "members", None)
    record = write_result(
        run,
        metrics,
        steps,
        seconds,
        seconds_total,
        audit=audit,
        members=None if members is None else digest_of(members)[:16],
    )
    log_end(services(trainer.loggers), record, checkpoint)
    opening = "not logged"
    if uses_wandb(run.config):
        logs.mirror_result(record, pictures, best_validation(folder.metrics))
        opening = logs.how_to_open(folder)
    if reporter is not None:
        reporter.summarize(run, record, opening)
    return record


def _evaluator(trainer: pl.Trainer, run: Run, checkpoint: dict[str, Any]) -> pl.Trainer:
    """A trainer for the final evaluation, at the step of the checkpoint; it starts no further processes."""
    config = run.config
    progress = checkpoint["loops"]["fit_loop"]
    if trainer.world_size > 1:
        callbacks: list[pl.Callback] = []
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, RunProgress):
                callbacks.append(callback)
        callbacks += [*build.build_watchers(config, run.folder), *build.build_callbacks(config)]
        trainer = build.build_trainer(
            config,
            alone=True,
            logger=trainer.loggers,
            callbacks=callbacks,
            default_root_dir=trainer.default_root_dir,
        )
        trainer.fit_loop.load_state_dict(progress)
    # By which metrics are logged; Lightning restores it when it trains, and here there may be nothing left to train.
    trainer.fit_loop.epoch_loop._batches_that_stepped = progress["epoch_loop.batch_progress"]["total"]["ready"]
    return trainer


def _audit(run: Run, checkpoint: dict[str, Any]) -> Any:
    """Audit a run at its last checkpoint, for its result; None where it has no audit, or released nothing."""
    if is_audited(run.config):
        for entry in entry_points(group=_AUDITS):
            return entry.load()(run.folder, checkpoint)
    return None


def _add_metrics(metrics: dict[str, float], trainer: pl.Trainer) -> None:
    for key, value in trainer.callback_metrics.items():
        metrics[key] = float(value)
