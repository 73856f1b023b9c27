"""One run: build, train, test, record."""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from dpbench.data import ImageDataModule
from dpbench.errors import BudgetExhausted, ConfigurationError, DPBenchError, Interrupted, WorkerDied
from dpbench.modules import GAN
from dpbench.privacy import native
from dpbench.results.files import remove_torn, write_atomically
from dpbench.results.ledgers import CHECKPOINT, RESULT, shown_noise
from dpbench.results.metrics_log import MetricsCSV
from dpbench.results.provenance import code_hash, commit
from dpbench.results.readers import read_checkpoint
from dpbench.results.record import EVALUATION, write_result
from dpbench.results.table import UNPROVEN
from dpbench.strategies import PrivateStrategy
from dpbench.strategies.guards import PRIVATE_PAST
from dpbench.training import build, wandb_log
from dpbench.training.allocator import keep_large_blocks
from dpbench.training.checkpoint import LastCheckpoint
from dpbench.training.checks import check_config
from dpbench.training.folder import read_config
from dpbench.training.objective import optimises, refuse_choice, value_of
from dpbench.training.progress import RunProgress, quiet, watched
from dpbench.training.run_folder import hydra_files, output_dir, run_folder, told_of_full_disk, write_hydra_files
from dpbench.training.samples import SAMPLES, SampleGrid
from dpbench.training.threads import warn_of_spinning

CONFIG = "config.yaml"


def train_job(cfg: DictConfig) -> float | None:
    """The task of `dpbench train`: one run in the folder that Hydra made.

    Args:
        cfg: The composed configuration.

    Returns:
        The objective, for sweepers; without one test accuracy, to sweepers that choose nothing.

    Raises:
        ConfigurationError: The sweeper would choose by test data.
    """
    hydra, config = HydraConfig.get(), build.plain(cfg)
    chosen = hydra.mode == RunMode.MULTIRUN and optimises(hydra)
    if chosen:
        refuse_choice(config)
    return value_of(train(config, output_dir(hydra), beside=hydra_files(cfg)), config, chosen)


def train(
    config: dict[str, Any],
    folder: Path,
    observers: Sequence[pl.Callback] = (),
    show: bool | None = None,
    beside: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Train, test and record, in a folder that no other process trains in meanwhile.

    Args:
        config: Resolved configuration, see `conf/config.yaml`.
        folder: The run's folder; ledger, metrics, checkpoint, picture and result go there.
        observers: More callbacks, after all others.
        show: Whether to draw a progress bar; None where somebody is there to see it.
        beside: Content of files for `.hydra`: how the configuration came about.

    Returns:
        The content of result.json (or of partial_result.json after a Ctrl-C).

    Raises:
        DPBenchError: Whatever a user can mend.
        Interrupted: After a Ctrl-C or SIGTERM, when everything is saved.
    """
    with run_folder(folder), told_of_full_disk(folder):
        return _train(config, folder, observers, show, beside or {})


def _train(
    config: dict[str, Any],
    folder: Path,
    observers: Sequence[pl.Callback],
    show: bool | None,
    beside: Mapping[str, str],
) -> dict[str, Any]:
    start = time.perf_counter()
    check_config(config)
    code_hash(), commit()  # what runs now; the files may have changed when the record is written
    quiet()
    _select_engine(config)
    strategy = build.build_strategy(config, folder)
    private = isinstance(strategy, PrivateStrategy) and strategy.private
    checkpoint = _prepare(config, folder, private)
    if not config["run"]["resume"]:
        write_hydra_files(folder, beside)
    data = build.build_data(config, strategy)
    pl.seed_everything(config["seed"], verbose=False)
    module = build.build_module(config, data)
    last = LastCheckpoint(folder / CHECKPOINT, config["run"]["checkpoint_every_n_steps"])
    failed = True
    try:
        loggers: list[Any] = [MetricsCSV(folder)]
        if config["logger"]["wandb"]:
            loggers.append(wandb_log.wandb_logger(config, folder))
        callbacks = [
            *build.build_averaging(config),  # first: it copies the module before the strategy hooks into it
            strategy,
            *build.build_diagnostics(config, folder),
            RunProgress(watched() if show is None else show),
            *([SampleGrid(folder)] if isinstance(module, GAN) else []),
            last,
        ]
        trainer = build.build_trainer(
            config,
            logger=loggers,
            callbacks=[*callbacks, *observers],
            default_root_dir=str(folder),
        )
        if config["run"]["resume"]:
            remove_torn(folder)
            last.read_metrics()
        with last.on_signals():
            _fit(trainer, module, data, checkpoint, last)
        record = _finish(trainer, module, data, config, folder, last, start, private)
        failed = False
        return record
    finally:
        if config["logger"]["wandb"]:
            wandb_log.finish_wandb(failed)


def _select_engine(config: dict[str, Any]) -> None:
    engine = {"native": "auto", "keep_memory": True, **config.get("engine", {})}  # older runs know no engine
    if engine["keep_memory"]:
        keep_large_blocks()
    native.select(engine["native"])
    warn_of_spinning(torch.get_num_threads())


def _prepare(config: dict[str, Any], folder: Path, private: bool = True) -> Path | None:
    """Claim the folder, or find the checkpoint of the run to resume; nothing is ever mixed up.

    Args:
        config: Resolved configuration, kept as config.yaml: what `dpbench resume` continues.
        folder: The run's folder.
        private: Whether the strategy is private.

    Returns:
        The checkpoint to start from, if any.

    Raises:
        ConfigurationError: The folder cannot be written, or holds another run.
    """
    if (folder / RESULT).exists() and config["run"]["resume"]:
        raise ConfigurationError(f"{folder} holds a finished run, and there is nothing to resume: train a new one.")
    if (folder / RESULT).exists() or (folder / CONFIG).exists():
        _refuse_other_files(folder)
    if (folder / RESULT).exists():
        raise ConfigurationError(f"{folder} holds a finished run: choose another folder (hydra.run.dir).")
    checkpoint = folder / CHECKPOINT
    if config["run"]["resume"] and not private and (folder / "ledger.jsonl").exists():
        raise ConfigurationError(f"{folder} holds a private run: {PRIVATE_PAST}")
    if config["run"]["resume"]:
        MetricsCSV(folder).check()  # a damaged file is named now, not when the training is under way
        if checkpoint.exists():
            done, asked = int(read_checkpoint(checkpoint, True)["global_step"]), config["trainer"].get("max_steps", -1)
            if -1 < asked < done:
                raise ConfigurationError(
                    f"trainer.max_steps={asked} is less than the {done} steps that {folder} has made: ask for more, or "
                    "leave it out."
                )
        (folder / EVALUATION).unlink(missing_ok=True)  # of a checkpoint on the way
        return checkpoint if checkpoint.exists() else None
    if (folder / "ledger.jsonl").exists() and not (folder / CONFIG).exists():
        raise ConfigurationError(f"{folder} holds the ledger of another run: choose another folder (hydra.run.dir).")
    try:
        checkpoint.parent.mkdir(parents=True, exist_ok=True)
        if (folder / CONFIG).exists():
            raise FileExistsError
        # The folder is locked; a process that is killed while it writes must not leave half of what resumes the run.
        write_atomically(folder / CONFIG, OmegaConf.to_yaml(OmegaConf.create(config)))
    except FileExistsError:
        raise ConfigurationError(
            f"{folder} holds an unfinished run: continue it with `dpbench resume {folder}`, or choose another folder."
        ) from None
    except OSError as error:
        raise ConfigurationError(f"the run folder {folder} cannot be written: {error.strerror}.") from None
    return None


def _refuse_other_files(folder: Path) -> None:
    try:
        read_config(folder)
    except ConfigurationError:
        name = RESULT if (folder / RESULT).exists() else CONFIG
        raise ConfigurationError(
            f"{folder} holds a {name} that is of no run of dpbench (or damaged): choose another folder (hydra.run.dir)."
        ) from None


def _fit(
    trainer: pl.Trainer,
    module: pl.LightningModule,
    data: pl.LightningDataModule,
    start: Path | None,
    last: LastCheckpoint,
) -> None:
    try:
        trainer.fit(module, datamodule=data, ckpt_path=start, weights_only=False)
    except WorkerDied as error:
        if not last.path.exists() or not last.ended_here(read_checkpoint(last.path)):
            begun = last.path.exists() or (last.path.parents[1] / "ledger.jsonl").exists()
            command = f"dpbench resume {trainer.default_root_dir}" if begun else None
            raise WorkerDied(error.rank, error.world, error.how, command) from error
        warnings.warn(
            f"{error}, after the last checkpoint and the last line of the ledger: nothing is lost.", stacklevel=1
        )
    except BudgetExhausted:
        if start is None:  # else: the interrupted run had just spent its budget
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


def _evaluator(trainer: pl.Trainer, config: dict[str, Any], kept: dict[str, Any]) -> pl.Trainer:
    """A trainer for the final evaluation, at the step of the checkpoint; it starts no further processes."""
    progress = kept["loops"]["fit_loop"]
    if trainer.world_size > 1:
        alone = {**config["trainer"], "devices": 1, "num_nodes": 1, "strategy": "auto"}
        shown = [callback for callback in trainer.callbacks if isinstance(callback, RunProgress | SampleGrid)]  # type: ignore[attr-defined]
        options = {"logger": trainer.loggers, "callbacks": shown, "default_root_dir": trainer.default_root_dir}
        trainer = build.build_trainer({**config, "trainer": alone}, **options)
        trainer.fit_loop.load_state_dict(progress)
    # By which metrics are logged; Lightning restores it when it trains, and here there may be nothing left to train.
    trainer.fit_loop.epoch_loop._batches_that_stepped = progress["epoch_loop.batch_progress"]["total"]["ready"]
    return trainer


def _finish(
    trainer: pl.Trainer,
    module: pl.LightningModule,
    data: ImageDataModule,
    config: dict[str, Any],
    folder: Path,
    last: LastCheckpoint,
    start: float,
    private: bool,
) -> dict[str, Any]:
    from dpbench.results.curves import plot_curves
    from dpbench.results.diagnostics import plot_diagnostics

    kept = read_checkpoint(last.path)
    steps = int(kept["global_step"])  # with spawned processes only there
    seconds = last.seconds_before + time.perf_counter() - start
    last.read_metrics()  # the same, wherever the training was interrupted
    metrics = last.metrics
    if last.interrupted:
        write_result(folder, config, metrics, steps, seconds, seconds, False, private)
        raise Interrupted(last.interrupted, f"dpbench resume {folder}")
    module.load_state_dict(kept["state_dict"])  # the average, also where a resumed run had no budget left
    trainer = _evaluator(trainer, config, kept)
    if data.val_set is not None:  # the last validation may be many steps ago, or was before an interruption
        trainer.validate(module, datamodule=data, verbose=False)
        metrics |= {key: float(value) for key, value in trainer.callback_metrics.items()}
    trainer.test(module, datamodule=data, verbose=False)
    metrics |= {key: float(value) for key, value in trainer.callback_metrics.items()}
    picture = plot_curves(folder, config["run"]["name"])
    plot_diagnostics(folder, config["run"]["name"])
    seconds_total = last.seconds_before + time.perf_counter() - start
    record = write_result(folder, config, metrics, steps, seconds, seconds_total, private=private)
    if config["logger"]["wandb"]:
        wandb_log.mirror_result(record, picture)
    print(summary(record, folder, wandb_log.how_to_open(folder) if config["logger"]["wandb"] else "not logged"))
    return record


def summary(record: dict[str, Any], folder: Path, opening: str) -> str:
    """The short table at the end of a run."""
    privacy = record["privacy"]
    accuracy = record["metrics"].get("test/accuracy")
    rows = [] if accuracy is None else [("test accuracy", f"{100 * accuracy:.2f} %")]
    if privacy["delta"] is None:
        rows.append(("epsilon", "infinite (no privacy)"))
    else:
        for name, value in privacy["epsilon"].items():
            shown = "not computed" if value is None else f"{value:.3f}"
            shown += f" ({UNPROVEN})" if "damage" in privacy else ""
            rows.append(
                (f"epsilon ({name.upper()})", f"{shown} at delta={privacy['delta']:g}, unit: {privacy['unit']}")
            )
        for name, value in privacy.get("epsilon_microbatch", {}).items():
            shown = "not computed" if value is None else f"{value:.3f}"
            rows.append((f"epsilon ({name.upper()})", f"{shown} nominal, for a fixed microbatch as the unit"))
    rows += [("noise", shown_noise(privacy))] if "noise_multiplier" in privacy else []
    rows += [("ledger", privacy["damage"])] if "damage" in privacy else []
    rows += [
        ("steps", str(record["steps"])),
        ("seconds", f"{record['seconds']:.1f} (with tests {record['seconds_total']:.1f})"),
        ("run folder", str(folder)),
        ("picture", str(folder / (SAMPLES if (folder / SAMPLES).exists() else "curves.png"))),
        ("wandb", opening),
    ]
    return "\n" + "\n".join(f"  {name:<15} {value}" for name, value in rows) + "\n"
