"""One run: build, train, test, record."""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import pytorch_lightning as pl
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from lightning_fabric.utilities.exceptions import MisconfigurationException
from omegaconf import DictConfig
from pytorch_lightning.utilities.model_helpers import is_overridden

from dpbench.callback.strategy import keep_scores
from dpbench.code import code_hash
from dpbench.errors import BudgetExhausted, ConfigurationError, DPBenchError, Interrupted, WorkerDied, brief
from dpbench.files import remove_torn
from dpbench.guards.earlier_fits import PRIVATE_PAST
from dpbench.privacy import native
from dpbench.run import build, logs
from dpbench.run.allocator import keep_large_blocks
from dpbench.run.checkpoint import LastCheckpoint, deadline_of
from dpbench.run.config import check_config
from dpbench.run.earlier_stage import weights_before, with_earlier_stage
from dpbench.run.extension import Reopened, require_extendable
from dpbench.run.hydra_folder import folder_key, has_workers, hydra_files, output_dir, write_hydra_files
from dpbench.run.logs import EvaluationRow, Origin, build_loggers, log_end, origin_of
from dpbench.run.objective import optimizes, refuse_choice, value_of
from dpbench.run.processes import (
    from_first_process,
    is_first,
    leave_to_first,
    losses_explained,
    require_shared_folder,
    together,
    with_launched_processes,
)
from dpbench.run.progress import RunProgress, bars, quiet
from dpbench.run.requeue import note_job, resuming, started_again
from dpbench.run.saved_config import read_config, require_resumable, write_config
from dpbench.run.threads import warn_of_spinning
from dpbench.runs.claim import full_disk_explained, held
from dpbench.runs.folder import Run, RunFolder
from dpbench.runs.metrics_log import MetricsCSV, best_validation
from dpbench.runs.provenance import commit
from dpbench.runs.readers import read_checkpoint
from dpbench.runs.record import read_result, write_result
from dpbench.strategies import PrivateStrategy


class Reporter(Protocol):
    """Shows a run that has come to its end. It is handed in, so that nothing of it is part of what a run computes."""

    def draw(self, run: Run) -> Mapping[str, Path]:
        """Draw pictures into the folder, before the result is written; returns those that wandb shows, by name."""

    def audit(self, run: Run) -> Mapping[str, Any] | None:
        """What a run's canaries tell of its epsilon, for its result; None where it had none."""

    def summarize(self, run: Run, record: Mapping[str, Any], opening: str) -> None:
        """Show the result.

        Args:
            run: The run.
            record: The content of result.json.
            opening: How to see the run in wandb.
        """


def train_job(cfg: DictConfig, reporter: Reporter | None = None, trust: bool = False) -> float | None:
    """The task of `dpbench train`: one run in the folder that Hydra made.

    Args:
        cfg: The composed configuration.
        reporter: Shows the run in the end.
        trust: Whether the checkpoint of a run that is resumed may hold objects, see `read_checkpoint`.

    Returns:
        The objective, for sweepers; None without one.

    Raises:
        ConfigurationError: The sweeper would choose by test data.
    """
    hydra, config = HydraConfig.get(), build.plain(cfg)
    chosen = hydra.mode == RunMode.MULTIRUN and optimizes(hydra)
    if chosen:
        refuse_choice(config)
    show = False if hydra.mode == RunMode.MULTIRUN and has_workers(hydra) else None  # the sweep has a bar of its own
    own, beside = origin_of(hydra), hydra_files(cfg)
    record = train(
        config,
        output_dir(hydra),
        show=show,
        beside=beside,
        reporter=reporter,
        origin=own,
        trust=trust,
    )
    return value_of(record, config, chosen) if record else None


def train(
    config: dict[str, Any],
    folder: Path,
    observers: Sequence[pl.Callback] = (),
    show: bool | None = None,
    beside: Mapping[str, str] | None = None,
    reporter: Reporter | None = None,
    origin: Origin | None = None,
    trust: bool = False,
) -> dict[str, Any]:
    """Train, test and record, in a folder that no other process trains in meanwhile.

    Args:
        config: Resolved configuration, see `conf/config.yaml`.
        folder: The run's folder; ledger, metrics, checkpoint and result go there.
        observers: More callbacks, after all others, that change nothing of the training.
        show: Whether to draw a progress bar; None where somebody is there to see it.
        beside: Content of files for `.hydra`: how the configuration came about.
        reporter: Shows the run in the end, when nothing is left to compute.
        origin: Command and sweep of which the run is, by which loggers call it.
        trust: Whether the checkpoint of a run that is resumed may hold objects, see `read_checkpoint`.

    Returns:
        The content of result.json (or of partial_result.json after a Ctrl-C); of several processes that torchrun or
        srun has started, all but the first return nothing.

    Raises:
        DPBenchError: Whatever a user can mend.
        Interrupted: After a Ctrl-C or another signal, or at the end of its time, when everything is saved.
    """
    own = RunFolder(folder)
    with ExitStack() as stack:
        stack.enter_context(losses_explained(lambda: own.command("resume") if own.trained else None))
        config = with_launched_processes(config)
        from_first_process(lambda: stack.enter_context(held(own)))
        require_shared_folder(own.path)
        stack.enter_context(full_disk_explained(own))
        if from_first_process(lambda: started_again(own, config)):
            if own.finished:
                return read_result(own) if is_first() else {}
            config = resuming(config)
        return _train(config, own, observers, show, beside or {}, reporter, origin or Origin(), trust)


def _train(
    config: dict[str, Any],
    folder: RunFolder,
    observers: Sequence[pl.Callback],
    show: bool | None,
    beside: Mapping[str, str],
    reporter: Reporter | None,
    origin: Origin,
    trust: bool,
) -> dict[str, Any]:
    start, begun = time.perf_counter(), time.monotonic()
    with together():
        check_config(config)
        config = with_earlier_stage(config)
        strategy = build.build_strategy(config, folder)
    deadline = deadline_of(config["run"].get("max_time"), begun)
    code_hash(), commit()  # what runs now; the files may have changed when the record is written
    quiet()
    _select_engine(config)
    private = isinstance(strategy, PrivateStrategy) and strategy.private
    run = Run(folder, config, private, trust or not config["run"]["resume"])
    checkpoint = from_first_process(lambda: _prepare(run))
    if not config["run"]["resume"] and is_first():
        write_hydra_files(folder, beside)
    data = build.build_data(config, strategy)
    pl.seed_everything(config["seed"], verbose=False)
    weights = None if checkpoint is not None else weights_before(config, trust)
    module = build.build_module(config, data, weights)
    for observer in observers:
        observer.observes_only = True  # type: ignore[attr-defined]
    last = LastCheckpoint(folder, config["run"]["checkpoint_every_n_steps"], deadline)
    failed, loggers = True, []
    try:
        loggers = build_loggers(run, origin)
        callbacks = [
            *build.build_averaging(config),  # first: it copies the module before the strategy hooks into it
            strategy,
            *build.build_diagnostics(config, folder),
            *bars(config["trainer"], show),
            *build.build_callbacks(config),
            *([EvaluationRow(loggers[1:])] if loggers[1:] else []),
            *([Reopened(run)] if folder.finished else []),
            last,
            *observers,
        ]
        trainer = build.build_trainer(config, logger=loggers, callbacks=callbacks, default_root_dir=str(folder))
        if config["run"]["resume"]:
            from_first_process(lambda: remove_torn(folder.path))
            last.read_metrics()
        with last.on_signals():
            _fit(trainer, module, data, checkpoint, last, run.trust)
        record = _finish(trainer, module, data, run, last, start, reporter)
        failed = False
        return record
    except MisconfigurationException as error:  # Lightning's, of settings that do not fit the data
        raise ConfigurationError(f"trainer: {brief(error)}") from error
    finally:
        if config["logger"].get("wandb") and is_first():
            logs.finish_wandb(run, loggers, failed)


def _select_engine(config: dict[str, Any]) -> None:
    if config["engine"]["keep_memory"]:
        keep_large_blocks()
    native.select(config["engine"]["native"])
    warn_of_spinning(torch.get_num_threads())


def _prepare(run: Run) -> Path | None:
    """Claim the folder, or find the checkpoint of the run to resume; nothing is ever mixed up.

    Args:
        run: Its configuration is kept in the folder: what `dpbench resume` continues.

    Returns:
        The checkpoint to start from, if any.

    Raises:
        ConfigurationError: The folder cannot be written, or holds another run.
    """
    config, folder = run.config, run.folder
    if config["run"]["resume"]:
        require_resumable(folder, longer=True)
    if folder.result.exists() or folder.config.exists():
        _refuse_other_files(folder)
    if folder.result.exists() and not config["run"]["resume"]:
        raise ConfigurationError(f"{folder} holds a finished run: choose another folder ({folder_key()}).")
    if config["run"]["resume"] and not run.private and folder.ledger.exists():
        raise ConfigurationError(f"{folder} holds a private run: {PRIVATE_PAST}")
    if config["run"]["resume"]:
        return _resumed(run)
    for name, path in (("ledger", folder.ledger), ("checkpoint", folder.checkpoint)):
        if path.exists() and not folder.config.exists():
            raise ConfigurationError(
                f"{folder} holds the {name} of another run: choose another folder ({folder_key()})."
            )
    try:
        folder.checkpoints.mkdir(parents=True, exist_ok=True)
        if folder.config.exists():
            raise FileExistsError
        # The folder is locked; a process that is killed while it writes must not leave half of what resumes the run.
        note_job(folder)  # first: a job that is killed between the two begins anew when it is started again
        write_config(run)
    except FileExistsError:
        raise ConfigurationError(
            f"{folder} holds an unfinished run: continue it with `{folder.command('resume')}`, or choose another "
            "folder."
        ) from None
    except OSError as error:
        raise ConfigurationError(f"the run folder {folder} cannot be written: {error.strerror}.") from None
    return None


def _resumed(run: Run) -> Path | None:
    config, folder, checkpoint = run.config, run.folder, run.folder.checkpoint
    MetricsCSV(folder).check()  # a damaged file is named now, not when the training is under way
    if checkpoint.exists():
        done, asked = (
            int(read_checkpoint(checkpoint, True, run.trust)["global_step"]),
            config["trainer"].get("max_steps", -1),
        )
        if -1 < asked < done:
            raise ConfigurationError(
                f"trainer.max_steps={asked} is less than the {done} steps that {folder} has made: ask for more, or "
                "leave it out."
            )
    if folder.finished:
        require_extendable(run)
    else:
        folder.evaluation.unlink(missing_ok=True)  # of a checkpoint on the way
    return checkpoint if checkpoint.exists() else None


def _refuse_other_files(folder: RunFolder) -> None:
    try:
        read_config(folder)
    except ConfigurationError:
        name = folder.result.name if folder.result.exists() else folder.config.name
        raise ConfigurationError(
            f"{folder} holds a {name} that is of no run of dpbench (or damaged): choose another folder "
            f"({folder_key()})."
        ) from None


def _fit(
    trainer: pl.Trainer,
    module: pl.LightningModule,
    data: pl.LightningDataModule,
    start: Path | None,
    last: LastCheckpoint,
    trust: bool,
) -> None:
    try:
        trainer.fit(module, datamodule=data, ckpt_path=start, weights_only=not trust)
    except WorkerDied as error:
        folder = last.folder
        if not folder.checkpoint.exists() or not last.ended_here(read_checkpoint(folder.checkpoint, trust=trust)):
            begun = folder.checkpoint.exists() or folder.ledger.exists()
            command = folder.command("resume") if begun else None
            raise WorkerDied(error.rank, error.world, error.how, command) from error
        warnings.warn(
            f"{error}, after the last checkpoint and the last line of the ledger: nothing is lost.", stacklevel=1
        )
    except SystemExit as error:  # Lightning's, in silence, after a second Ctrl-C
        if not last.interrupted:
            raise
        there = (
            "The last checkpoint and the ledger are kept" if last.folder.checkpoint.exists() else "The ledger is kept"
        )
        raise Interrupted(last.interrupted, last.folder.command("resume"), there) from error
    except BudgetExhausted:
        if start is None or last.folder.finished:  # else: the interrupted run had just spent its budget
            raise
    except (TypeError, ValueError, RuntimeError) as error:
        if isinstance(error, DPBenchError) or start is None:
            raise
        text = " ".join(str(error).split())
        if any(word in text.lower() for word in ("checkpoint", "state_dict", "state dict")):
            raise ConfigurationError(
                f"cannot resume from {start}: it is not of the model and optimizer that the configuration describes. "
                "Restore the run's own checkpoint, or leave out words that change them "
                f"({text if len(text) <= 300 else text[:297] + '...'})."
            ) from error
        raise


def _evaluator(trainer: pl.Trainer, run: Run, kept: dict[str, Any]) -> pl.Trainer:
    """A trainer for the final evaluation, at the step of the checkpoint; it starts no further processes."""
    config, progress = run.config, kept["loops"]["fit_loop"]
    if trainer.world_size > 1:
        alone = {**config["trainer"], "devices": 1, "num_nodes": 1, "strategy": "auto"}
        bars = [callback for callback in trainer.callbacks if isinstance(callback, RunProgress)]  # type: ignore[attr-defined]
        callbacks = [*bars, *build.build_watchers(config, run.folder), *build.build_callbacks(config)]
        options = {"logger": trainer.loggers, "callbacks": callbacks, "default_root_dir": trainer.default_root_dir}
        trainer = build.build_trainer({**config, "trainer": alone}, alone=True, **options)
        trainer.fit_loop.load_state_dict(progress)
    # By which metrics are logged; Lightning restores it when it trains, and here there may be nothing left to train.
    trainer.fit_loop.epoch_loop._batches_that_stepped = progress["epoch_loop.batch_progress"]["total"]["ready"]
    return trainer


def _finish(
    trainer: pl.Trainer,
    module: pl.LightningModule,
    data: pl.LightningDataModule,
    run: Run,
    last: LastCheckpoint,
    start: float,
    reporter: Reporter | None,
) -> dict[str, Any]:
    config, folder = run.config, run.folder
    kept = read_checkpoint(folder.checkpoint, trust=run.trust)
    steps = int(kept["global_step"])  # with spawned processes only there
    seconds = last.seconds_before + time.perf_counter() - start
    last.read_metrics()  # the same, wherever the training was interrupted
    metrics = last.metrics
    if stopped := last.stopped_by(kept):
        if is_first():
            write_result(run, metrics, steps, seconds, seconds, finished=False)
        raise Interrupted(stopped, folder.command("resume"))
    if not leave_to_first():
        return {}
    module.load_state_dict(kept["state_dict"])  # the average, also where a resumed run had no budget left
    trainer = _evaluator(trainer, run, kept)
    held_out = getattr(data, "monitored", "val") == "val" and is_overridden("val_dataloader", data)
    if held_out and is_overridden(
        "validation_step", module
    ):  # the last one may be many steps ago, or in another process
        trainer.validate(module, datamodule=data, verbose=False)
        metrics |= {key: float(value) for key, value in trainer.callback_metrics.items()}
    if is_overridden("test_step", module) and is_overridden("test_dataloader", data):
        trainer.test(module, datamodule=data, verbose=False)
        metrics |= {key: float(value) for key, value in trainer.callback_metrics.items()}
    pictures = reporter.draw(run) if reporter is not None else {}
    keep_scores(kept, folder.audit)
    audit = reporter.audit(run) if reporter is not None else None
    seconds_total = last.seconds_before + time.perf_counter() - start
    record = write_result(run, metrics, steps, seconds, seconds_total, audit=audit)
    log_end(trainer.loggers[1:], record, kept)
    if in_wandb := config["logger"].get("wandb"):
        logs.mirror_result(trainer.loggers, record, pictures, best_validation(folder.metrics))
    if reporter is not None:
        opening = logs.how_to_open(folder) if in_wandb else "not logged"
        reporter.summarize(run, record, opening)
    return record
