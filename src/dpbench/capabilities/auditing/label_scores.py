"""Scores of the random labels that a run on noise was trained on, by its final weights."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from dpbench.capabilities.auditing.labels import LabelScores
from dpbench.data.images import ImageDataModule
from dpbench.data.inserted import Inserted, inserted_of
from dpbench.data.sources import NOISE
from dpbench.errors import ConfigurationError
from dpbench.harness.run.evaluation import score_members
from dpbench.harness.run.saved_config import read_config
from dpbench.harness.run.saved_module import final_checkpoint, load_module, require_module
from dpbench.harness.runs.folder import RunFolder
from dpbench.harness.runs.record import is_audited
from dpbench.modules.image_classifier import ImageClassifier


def is_on_noise(run: RunFolder) -> bool:
    """Tell whether a run was trained on images of noise, and on nothing else: then each of them is a canary."""
    # Most runs are not: the text tells so at once, and nothing else of them is read.
    if NOISE not in run.config.read_text(encoding="utf-8", errors="replace"):
        return False
    config = read_config(run)
    return config["data"].get("name") == NOISE and not is_audited(config)


def label_scores(run: RunFolder, trust: bool = False) -> LabelScores:
    """Score the label of each training record, and of the test records, by a finished run's final weights.

    Args:
        run: Trained on `data=random_noise`.
        trust: True if the checkpoint may hold objects; see `read_checkpoint`.

    Raises:
        DPBenchError: The run is no classifier, or its files are damaged, or are not trusted.
    """
    config = read_config(run)
    refusal = "is not a classifier, and has no labels to audit: train with module=classifier."
    require_module(run, config, ImageClassifier, refusal)
    checkpoint = final_checkpoint(run, trust)
    # Copies of one record are no independent canaries: records that were inserted are left out.
    options = {name: value for name, value in config["data"].items() if name not in ("_target_", "inserted")}
    data = ImageDataModule(**options, seed=config["seed"])  # of which members are those that were trained on
    module = load_module(run, checkpoint, data.model_options()).module

    def score(batch: tuple[Tensor, Tensor]) -> Tensor:
        images, labels = batch
        logits = module(images).double()
        is_right = logits.argmax(1) == labels
        return torch.stack([margins(logits, labels), is_right], dim=1)

    scores = score_members(module, data.seen_dataloader(len(data.train_set)), data.test_dataloader(), score)
    if not all(np.isfinite(rows).all() for rows in scores):
        raise ConfigurationError(f"{run} has diverged: its outputs are not finite, so its labels cannot be audited.")
    inserted = inserted_of(config["data"].get("inserted"), Inserted)
    return LabelScores(
        members=scores.members[:, 0],
        others=scores.others[:, 0],
        recalled=float(scores.members[:, 1].mean()),
        guessed=float(scores.others[:, 1].mean()),
        left_out=inserted.records * inserted.copies,
    )


def margins(logits: Tensor, labels: Tensor) -> Tensor:
    """By how much the logit of a label exceeds the log-sum-exp of all others: the log-odds of that label.

    Args:
        logits: (N, classes).
        labels: (N,).

    Returns:
        (N,).
    """
    logit = logits.gather(1, labels[:, None])
    others = logits.scatter(1, labels[:, None], -torch.inf)
    return logit[:, 0] - others.logsumexp(1)
