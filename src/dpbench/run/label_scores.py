"""What the final weights of a run on noise tell of the random labels that it was trained on."""

from __future__ import annotations

from textwrap import shorten
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dpbench.data.images import ImageDataModule, InMemoryImages
from dpbench.data.inserted import inserted_of
from dpbench.data.sources import NOISE
from dpbench.errors import ConfigurationError
from dpbench.modules.image_classifier import ImageClassifier
from dpbench.privacy.canaries.labels import LabelScores
from dpbench.privacy.canaries.scores import Floats
from dpbench.run.build import module_for
from dpbench.run.config import class_of
from dpbench.run.saved_config import read_config
from dpbench.runs.folder import RunFolder
from dpbench.runs.readers import read_checkpoint
from dpbench.runs.record import read_result

_PIECE = 1000  # images looked at together


def is_on_noise(run: RunFolder) -> bool:
    """Whether a run was trained on images of noise, and on nothing else: then each of them is a canary."""
    if not run.begun or NOISE not in run.config.read_text(encoding="utf-8", errors="replace"):
        return False  # of a run that is none of these, only what its audit needs is read
    config = read_config(run)
    return config["data"].get("name") == NOISE and not (config.get("audit") or {}).get("_target_")


def label_scores(run: RunFolder, trust: bool = False) -> LabelScores:
    """Score the label of each training record, and of the test records, by a finished run's final weights.

    Args:
        run: Trained on `data=random_noise`.
        trust: Whether the checkpoint may hold objects, see `read_checkpoint`.

    Raises:
        DPBenchError: The run has not ended, is no classifier, or its files are damaged, or are not trusted.
    """
    config = read_config(run)
    if not run.finished:
        raise ConfigurationError(f"{run} has not ended: labels are read from final weights; `{run.command('resume')}`.")
    steps, state = read_result(run)["steps"], read_checkpoint(run.checkpoint, trust=trust)
    if state["global_step"] != steps:
        raise ConfigurationError(
            f"{run} went on from {steps} to {state['global_step']} steps and was interrupted: "
            f"`{run.command('resume')}`."
        )
    if not issubclass(class_of(config["module"], "module"), ImageClassifier):
        raise ConfigurationError(f"{run} is no classifier, and only those learn labels: train one, module=classifier.")
    options = {name: value for name, value in config["data"].items() if name not in ("_target_", "inserted")}
    data = ImageDataModule(**options)
    module = _trained(run, module_for(config, data.model_options(), data.monitored), state)
    members, recalled = _margins(module, data.train_set)
    others, guessed = _margins(module, data.test_set)
    if not (np.isfinite(members).all() and np.isfinite(others).all()):
        raise ConfigurationError(f"{run} has diverged: its outputs are not finite, and tell nothing of labels.")
    inserted = inserted_of(config["data"].get("inserted"))  # copies of one record are no independent canaries
    return LabelScores(members, others, recalled, guessed, inserted.records * inserted.copies)


def _trained(run: RunFolder, module: nn.Module, state: dict[str, Any]) -> nn.Module:
    try:
        module.load_state_dict(state["state_dict"])
    except RuntimeError as error:
        raise ConfigurationError(
            f"{run.checkpoint} is of another architecture than {run.config} says: "
            f"{shorten(str(error), 300, placeholder=' …')}"
        ) from error
    return module.eval()


@torch.no_grad()
def _margins(module: nn.Module, images: InMemoryImages) -> tuple[Floats, float]:
    """Margins of all labels, and the share of those that have the largest logit."""
    found, right = [], 0
    for start in range(0, len(images), _PIECE):
        pixels, labels = images.__getitems__(range(start, min(start + _PIECE, len(images)))).batch
        logits = module(pixels).double()
        found.append(margins(logits, labels))
        right += int((logits.argmax(1) == labels).sum())
    return torch.cat(found).numpy(), right / len(images)


def margins(logits: Tensor, labels: Tensor) -> Tensor:
    """By how much the logit of a label exceeds the log-sum-exp of all others: the log-odds of that label.

    Args:
        logits: (N, classes).
        labels: (N,).

    Returns:
        (N,).
    """
    own = logits.gather(1, labels[:, None])
    rest = logits.scatter(1, labels[:, None], -torch.inf)
    return own[:, 0] - rest.logsumexp(1)
