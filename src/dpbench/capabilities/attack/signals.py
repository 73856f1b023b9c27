"""Signals of an attacker: one number for a record in a trained model, larger for records that look like members.

Signals of single records are private data without noise: they, and the pages made of them, are an experiment, and no
private release.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpbench.canonical import digest_of
from dpbench.capabilities.attack.membership import log_odds
from dpbench.capabilities.auditing.label_scores import margins
from dpbench.data.module import PrivateDataModule
from dpbench.errors import ConfigurationError
from dpbench.harness.run.build import instantiate
from dpbench.harness.run.config import class_of
from dpbench.harness.run.evaluation import score_records
from dpbench.harness.run.samples import nearest, sample_images
from dpbench.harness.run.saved_module import final_checkpoint, load_module
from dpbench.harness.runs.folder import RunFolder
from dpbench.modules.gan import GAN
from dpbench.modules.image_classifier import ImageClassifier
from dpbench.modules.next_token import NextToken

Floats = NDArray[np.float64]

SIGNALS = ("loss", "samples")
"""Words of `--signal`.

loss: log-odds of the true label or next token; of a GAN the discriminator's logit; else minus the loss.
samples: minus the distance to the nearest of 5,000 images of a GAN: for those who see only synthetic data (Chen et al.
    2020, GAN-Leaks; against other runs it is calibrated by LiRA).
"""
_OF_PROBABILITIES = (ImageClassifier, NextToken)  # the exponential of minus a cross-entropy is one
_SAMPLES = 5000  # images of a generator


def has_probabilities(config: Mapping[str, Any]) -> bool:
    """Return whether the loss signal of a run is the log-odds of a probability.

    Args:
        config: Configuration of the run.
    """
    return issubclass(class_of(config["module"], "module"), _OF_PROBABILITIES)


def candidates_of(config: Mapping[str, Any]) -> PrivateDataModule[Any]:
    """Load the data of some runs: the records among which they had their members, and others that none was trained on.

    Args:
        config: Configuration of one of them.

    Returns:
        The data, with a seed that no run has.

    Raises:
        ConfigurationError: The data are of a class that has no such experiment, or there are fewer than two candidates.
    """
    cls = class_of(config["data"], "data")
    if not issubclass(cls, PrivateDataModule):
        raise ConfigurationError(f"data: {cls.__name__} does not define members: use ImageDataModule, for example.")
    options = {**config["data"], "seed": 0, "membership": "half", "sampling": "shuffled"}  # no lot is drawn
    data: PrivateDataModule[Any] = instantiate(cls, options, "data")
    data.prepare_data()
    data.setup("fit")
    if len(data.train_set) < 2:
        raise ConfigurationError("an attack needs at least two training records: raise data.train_size.")
    return data


def members_of(run: RunFolder, record: Mapping[str, Any], candidates: PrivateDataModule[Any]) -> NDArray[np.bool_]:
    """Mask of the candidates that a run was trained on, (N,).

    Args:
        run: Folder, for the error.
        record: Content of the run's result.json.
        candidates: Its data.

    Raises:
        ConfigurationError: By the data as they are now, others would be members than the run was trained on.
    """
    members = candidates.members_of_seed(record["seed"])
    recorded = record.get("members")
    if recorded is not None and recorded != digest_of(members)[:16]:
        raise ConfigurationError(
            f"{run} had other members than its data and seed give now: the data have changed since it was trained. "
            "Restore them, or train again in another folder (--out)."
        )
    return members


def signals_of(
    run: RunFolder,
    candidates: PrivateDataModule[Any],
    signal: str,
    trust: bool = False,
) -> tuple[Floats, Floats]:
    """Score all candidates, and all test records, by a run's final weights.

    Args:
        run: Folder of a finished run.
        candidates: Its data.
        signal: One of `SIGNALS`.
        trust: True if the checkpoint may hold objects; see `read_checkpoint`.

    Returns:
        (N,) of the candidates; the mean over the rows of a user. (Z,) of the test rows.

    Raises:
        ConfigurationError: The module has no losses of single records, the signal is of images, the run has diverged or
            has more steps than its result.
    """
    checkpoint = final_checkpoint(run, trust)
    data = candidates
    options = data.model_options() if hasattr(data, "model_options") else {}
    module = load_module(run, checkpoint, options).module
    score = _score_of(module, signal)
    of_rows = score_records(module, data.candidate_dataloader(), score)
    records = data.record_of_row
    rows_of_record = np.bincount(records)
    of_records = np.bincount(records, of_rows) / np.maximum(rows_of_record, 1)
    of_test = score_records(module, data.test_dataloader(), score)
    if not np.isfinite(of_records).all() or not np.isfinite(of_test).all():
        raise ConfigurationError(
            f"{run} has diverged: its {signal} signals are not finite. Attack the runs without it."
        )
    return of_records, of_test


def _score_of(module: Any, signal: str) -> Callable[[Any], Tensor]:
    if signal == "samples":
        return _near_samples(module)
    if isinstance(module, GAN):  # the attacker has the discriminator, as LOGAN's (Hayes et al. 2019)
        return lambda batch: module.realness(batch).double()
    if not hasattr(module, "losses"):
        raise ConfigurationError(
            f"--signal loss requires a module with losses(batch), such as ImageClassifier: {type(module).__name__} has "
            "none. Add it, or attack runs of another module."
        )
    if isinstance(module, ImageClassifier):
        # Not by the loss, which is 0 for records of which the network is sure.
        return lambda batch: margins(module(batch[0]).double(), batch[1])
    if isinstance(module, _OF_PROBABILITIES):
        return lambda batch: torch.from_numpy(log_odds(module.losses(batch).cpu().numpy()))
    return lambda batch: -module.losses(batch)


def _near_samples(module: Any) -> Callable[[Any], Tensor]:
    """Minus the distance of each image to the nearest that the generator draws, (N,)."""
    if not isinstance(module, GAN):
        raise ConfigurationError("signal=samples requires a GAN: attack one, or use --signal loss.")
    drawn, _ = sample_images(module, _SAMPLES, seed=0)
    samples = drawn.float() / 255
    # A GAN's data are scaled to [−1, 1], and its samples to [0, 1].
    return lambda batch: -nearest((batch[0].cpu() + 1) / 2, samples)[0]
