"""Evaluation within a run: the averaged weights that are tested, and how they score the records of a training.

Scores of single records are private data without noise. They are named `nonprivate/…`, are off unless asked for, and
must not be published with a model that is meant to be private; choices by them are refused (`guards.choices`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pytorch_lightning as pl
import torch
from numpy.typing import NDArray
from pytorch_lightning.callbacks import WeightAveraging
from pytorch_lightning.utilities import move_data_to_device
from torch import Tensor
from torch.utils.data import DataLoader
from torchmetrics import Metric

from dpbench.data.inserted import Inserted, InsertedTexts, Secret
from dpbench.errors import ConfigurationError
from dpbench.files import write_atomically
from dpbench.harness.runs.folder import RunFolder
from dpbench.harness.runs.ledgers import read_run_ledger
from dpbench.modules.next_token import NextToken, continued

Floats = NDArray[np.float64]


@contextmanager
def evaluating(module: pl.LightningModule, trainer: pl.Trainer | None = None) -> Iterator[Callable[[Any], Any]]:
    """Put a module into evaluation mode, and leave no trace of it in the training around it.

    Args:
        module: The module with the weights to evaluate.
        trainer: Gives precision and transfer of batches; None takes full precision and the module's device.

    Yields:
        A function that moves a batch to the module's device.
    """
    modes = {part: part.training for part in module.modules()}
    if trainer is None:
        to_device: Callable[[Any], Any] = partial(move_data_to_device, device=module.device)
        precision: Any = nullcontext()
    else:
        to_device = trainer.strategy.batch_to_device
        precision = trainer.precision_plugin.forward_context()
    # A DataLoader draws its seed from the global generator, which the training goes on using.
    forked = [module.device] if module.device.type == "cuda" else []
    with torch.random.fork_rng(forked), torch.no_grad(), precision:
        module.eval()
        try:
            yield to_device
        finally:
            for part, mode in modes.items():
                part.training = mode  # not train(mode), which would overrule the modes of the parts below


def score_records(
    module: pl.LightningModule,
    batches: Iterable[Any],
    score: Callable[[Any], Tensor],
    trainer: pl.Trainer | None = None,
) -> Floats:
    """Score each record of some batches by the weights of a module, as a test sees them.

    It is no step of the training: nothing is released, and nothing enters the ledger.

    Args:
        module: The module, in any mode; see `evaluating`.
        batches: Batches, such as those of a DataLoader.
        score: Function from a batch to a row for each of its records, (R,) or (R, k), such as `module.losses`.
        trainer: Trainer, see `evaluating`.

    Returns:
        (N,) or (N, k), in the order of the batches.
    """
    scores = []
    with evaluating(module, trainer) as to_device:
        for batch in batches:
            scores.append(score(to_device(batch)).cpu().double())
    return np.asarray(torch.cat(scores))


class MemberScores(NamedTuple):
    """Scores of training records and of others, as a membership attack sees them.

    Attributes:
        members: (M,) or (M, k).
        others: (N,) or (N, k), of records drawn like the members.
    """

    members: Floats
    others: Floats


def score_members(
    module: pl.LightningModule,
    members: Iterable[Any],
    others: Iterable[Any],
    score: Callable[[Any], Tensor],
    trainer: pl.Trainer | None = None,
) -> MemberScores:
    """Score members of the training data and others alike: see `score_records`.

    Args:
        module: The module that was trained on the members.
        members: Batches.
        others: Batches of records that it was not trained on.
        score: Function of a batch, see `score_records`.
        trainer: Trainer, see `evaluating`.
    """
    return MemberScores(
        score_records(module, members, score, trainer),
        score_records(module, others, score, trainer),
    )


def exposures(losses: Floats, references: Floats) -> Floats:
    """Exposure of records by their losses: log2 of the number of candidates minus log2 of the rank, in bits.

    The candidates are the record itself and the references; the record with the smallest loss has rank 1. A reference
    with the same loss ranks before the record, so that no exposure is overstated. Source: Carlini et al. 2018,
    section 4.3, with the candidates drawn at random instead of all that there are.

    Args:
        losses: Losses of the records, (N,).
        references: Losses of records drawn alike that were not trained on, (R,).

    Returns:
        (N,); from 0 to log2(R + 1).

    >>> exposures(np.array([0.1, 0.9, 0.4]), np.array([0.2, 0.4, 0.8])).round(3).tolist()
    [2.0, 0.0, 0.415]
    """
    # Of a model that diverged losses are no numbers: it remembers nothing, so such a record ranks last.
    losses = np.where(np.isnan(losses), np.inf, losses)
    references = np.where(np.isnan(references), -np.inf, references)
    rank = 1 + np.searchsorted(np.sort(references), losses, side="right")
    bits: Floats = np.log2(len(references) + 1) - np.log2(rank)
    return bits


def exposure_by_chance(references: int) -> float:
    """Mean exposure of a record that was not trained on: each rank is equally likely. Close to log2 e = 1.44 bits.

    Args:
        references: Their number R.

    >>> round(exposure_by_chance(4096), 3)
    1.441
    """
    candidates = references + 1
    return math.log2(candidates) - math.lgamma(candidates + 1) / candidates / math.log(2)


class Exposure(pl.Callback):
    """Measures, at the final test, how well a model remembers the records that the data module inserted.

    Logged are `nonprivate/exposure_mean`, `nonprivate/exposure_max`, and `nonprivate/exposure_by_chance`, the mean
    of records that were not learned. A run with a ledger also logs the ledger's bounds, in expectation over its
    noise: `privacy/exposure_allowed`, the largest mean, and `privacy/first_rank_allowed`, the largest probability that
    a record ranks before all references; see `reconstruction_bound`.

    Of texts with secrets a language model completes the beginnings. `nonprivate/extracted_greedy` counts secrets that
    its most likely tokens are, `nonprivate/extracted_sampled` those among some drawn continuations; the bounds are
    `privacy/extracted_greedy_allowed` and `privacy/extracted_sampled_allowed`.

    Args:
        folder: The run's folder, with its ledger, for a line about each record; None: no ledger, and no line.
    """

    def __init__(self, folder: RunFolder | None = None) -> None:
        super().__init__()
        self._folder = folder

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Refuse a module of which no loss of single records is known.

        Raises:
            ConfigurationError: It has no `losses`, or must complete texts and is no language model.
        """
        if not hasattr(pl_module, "losses"):
            raise ConfigurationError(
                "data.inserted requires a module with losses(batch), such as ImageClassifier or NextToken, not "
                f"{type(pl_module).__name__}: remove the data.inserted overrides."
            )
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        if isinstance(data.inserted, InsertedTexts) and not isinstance(pl_module, NextToken):
            raise ConfigurationError(
                "data.inserted of texts requires module=language_model or next_token, which completes them, not "
                f"{type(pl_module).__name__}: remove the data.inserted overrides."
            )

    def on_test_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Measure, with the final weights."""
        module: Any = pl_module
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        tables = []
        for inserted, references in data.inserted_and_references():
            losses = score_members(module, inserted, references, module.losses, trainer)
            columns = {
                "loss": losses.members,
                "references": len(losses.others),
                "exposure": exposures(losses.members, losses.others),
            }
            tables.append(pd.DataFrame(columns))
        table = pd.concat(tables, ignore_index=True)
        extracted: dict[Any, float] = {}
        if isinstance(data.inserted, InsertedTexts):
            counts = _extracted(module, data.secrets, data.inserted, trainer)
            table = table.join(counts)
            extracted = (counts > 0).sum().add_prefix("nonprivate/").astype(float).to_dict()
        references = int(table["references"].iloc[-1])
        module.log_dict(
            {
                "nonprivate/exposure_mean": float(table["exposure"].mean()),
                "nonprivate/exposure_max": float(table["exposure"].max()),
                "nonprivate/exposure_by_chance": exposure_by_chance(references),
                **extracted,
                **self._allowed(references + 1, data),
            }
        )
        if self._folder is not None and trainer.is_global_zero:
            write_atomically(self._folder.exposure, table.to_csv(index_label="record"))

    def _allowed(self, candidates: int, data: Any) -> dict[str, float]:
        """Bounds by the ledger; none where there is no ledger, its unit is not the data's, or it has no curve."""
        if self._folder is None or not self._folder.ledger.is_file():
            return {}
        from dpbench.privacy.accounting.tradeoff import membership_bound, reconstruction_bound  # dp_accounting

        inserted: Inserted = data.inserted
        try:
            ledger = read_run_ledger(self._folder.ledger)
            bound = membership_bound([ledger], copies=inserted.copies)
        except ConfigurationError:  # no accountant covers the sampling
            return {}
        if ledger.header.unit != data.unit:
            return {}
        copies = inserted.copies // bound.group
        allowed = reconstruction_bound(bound.curve, candidates, copies)
        bounds = {
            "privacy/exposure_allowed": allowed.exposure,
            "privacy/first_rank_allowed": allowed.probability,
        }
        if isinstance(inserted, InsertedTexts):
            # A guess is right with the prior probability where the secret was not trained on.
            guessed = 10.0**-inserted.digits * np.array([1, inserted.samples])
            most = inserted.records * bound.curve.max_true_positive_rate(np.minimum(guessed, 1), copies)
            bounds["privacy/extracted_greedy_allowed"] = float(most[0])
            bounds["privacy/extracted_sampled_allowed"] = float(most[1])
        return bounds


def _extracted(
    module: pl.LightningModule,
    secrets: Iterable[Secret],
    options: InsertedTexts,
    trainer: pl.Trainer,
) -> pd.DataFrame:
    """Numbers of right continuations of each secret's text: of the most likely one, and of those that are drawn."""
    generator = torch.Generator().manual_seed(options.seed)
    greedy = []
    sampled = []
    with evaluating(module, trainer):
        for secret in secrets:
            text = secret.text.long()
            drawn = text.repeat(options.samples, 1)
            greedy.append(_matches(continued(module, text, secret.places), text))
            sampled.append(_matches(continued(module, drawn, secret.places, generator), text))
    return pd.DataFrame({"extracted_greedy": greedy, "extracted_sampled": sampled})


def _matches(texts: Tensor, wanted: Tensor) -> int:
    return int((texts == wanted).all(1).sum())


class TrainingRecords(pl.Callback):
    """Measures the metric of a module on training records, and its gap to the metric on other records.

    At each validation and at the final test, with the weights that are measured there (their moving average, if there
    is one): `nonprivate/train_<metric>`, and `nonprivate/<metric>_gap`, which is that minus the metric of the
    validation or test data. Training is the same, to the last bit, as without it. Several processes measure the same
    records, each for itself.

    Args:
        most: Largest number of training records to measure, the first ones.
    """

    def __init__(self, most: int = 10_000) -> None:
        super().__init__()
        self._most = most
        self._loader: DataLoader[Any] | None = None
        self._value = 0.0

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Take the records from the data module.

        Raises:
            ConfigurationError: The data or the module lack what the measurement needs.
        """
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        if not hasattr(data, "seen_dataloader"):
            raise ConfigurationError(
                f"diagnostics.training_records requires {type(data).__name__}.seen_dataloader(most), a DataLoader of "
                "the first training records: add it, or remove the setting."
            )
        if not hasattr(pl_module, "measure"):
            raise ConfigurationError(
                "diagnostics.training_records requires a module with measure(metric, batch), such as a "
                f"dpbench.modules.supervised.Supervised, not {type(pl_module).__name__}: remove the setting."
            )
        self._loader = data.seen_dataloader(self._most)

    def on_validation_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Measure while the weights are in place: the moving average leaves before the end of the epoch."""
        self._measure(trainer, pl_module)

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Log the measurements, now that the metric of the other records is known."""
        self._log(pl_module, "val")

    def on_test_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Measure the final weights."""
        self._measure(trainer, pl_module)

    def on_test_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Log the measurements."""
        self._log(pl_module, "test")

    def _measure(self, trainer: pl.Trainer, module: Any) -> None:
        assert self._loader is not None
        metric: Metric = getattr(module, f"test_{_metric_name(module)}").clone()
        metric.reset()
        metric.sync_on_compute = False  # every process has all of the records
        with evaluating(module, trainer) as to_device:
            for batch in self._loader:
                module.measure(metric, to_device(batch))
        self._value = float(metric.compute())

    def _log(self, module: Any, data: str) -> None:
        name = _metric_name(module)
        metric: Metric = getattr(module, f"{data}_{name}")
        gap = self._value - float(metric.compute())
        module.log_dict({f"nonprivate/train_{name}": self._value, f"nonprivate/{name}_gap": gap}, sync_dist=True)


def _metric_name(module: Any) -> str:
    """The metric of a module, such as accuracy; its copies are the attributes `val_accuracy` and `test_accuracy`."""
    return str(module.objective.partition("/")[2])


class _AveragedAtTheEnd(WeightAveraging):
    """Takes the average over after the last checkpoint, and also where a resumed run has nothing left to train."""

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Move the average to the module's device: it was made before the module came there."""
        assert self._average_model is not None
        self._average_model.to(pl_module.device)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Do nothing yet: a checkpoint of the end would lose the weights that were trained."""

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Put the average into the module, for tests and publication."""
        super().on_train_end(trainer, pl_module)


def moving_average(decay: float) -> WeightAveraging:
    """Exponential moving average of the weights after every step (De et al. 2022, section 3.4).

    It is computed from released weights alone, so it costs no privacy, and its noise is smaller. After t steps the
    decay is min(decay, (1 + t) / (10 + t)), so that the first weights are soon forgotten. Lightning's callback
    validates, tests and publishes the average, and a checkpoint holds both: `state_dict` is the average.

    Args:
        decay: Weight of the old average, from 0 to below 1.

    Raises:
        ConfigurationError: It is outside of this range.
    """
    if not 0 <= decay < 1:
        raise ConfigurationError(f"ema_decay must be from 0 to below 1 (or null), not {decay}.")

    def average(old: Tensor, new: Tensor, steps: Tensor | int) -> Tensor:
        if not old.is_floating_point():  # counters
            return new
        t = float(steps)
        return old.lerp(new, 1 - min(decay, (1 + t) / (10 + t)))

    return _AveragedAtTheEnd(avg_fn=average)
