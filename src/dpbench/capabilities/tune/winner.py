"""What a tuning publishes: the winner's weights and settings, as a run of its own, with the tuning's ledger."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from dpbench.capabilities.tune.stated import BestOfTrials
from dpbench.capabilities.tune.trials import Winner
from dpbench.files import replacing, write_atomically, write_json
from dpbench.harness.run.saved_module import final_checkpoint
from dpbench.harness.runs.folder import Run, RunFolder
from dpbench.harness.runs.record import read_result, write_result
from dpbench.privacy.accounting.seal import STATE_KEY, seal_of

TUNING = "tuning.json"
_KEPT = ("state_dict", "hyper_parameters", "pytorch-lightning_version", "global_step", "epoch")
_TEST = "test/"


def publish(folder: Path, request: Mapping[str, Any], best: BestOfTrials, winner: Winner | None) -> dict[str, Any]:
    """Write the result of a tuning: a fixed one if there is no winner.

    Of the winner, nothing is kept that tells of the other trials or of the time that all took, nor anything that was
    measured on private records without noise: weights, configuration, test metrics and the score with its noise.

    Args:
        folder: Folder of the tuning.
        request: All that determined the settings.
        best: Statement of its ledger.
        winner: The trial with the best score.

    Returns:
        The content of tuning.json.
    """
    target = RunFolder(folder)
    facts: dict[str, Any] = {"request": dict(request), "chosen": None, "score": None}
    if winner is not None:
        trained = RunFolder(winner.folder)
        record = read_result(trained)
        checkpoint = final_checkpoint(trained)
        state = {"private": True, "releases": 1, "ledger": seal_of(target.ledger)._asdict()}
        kept = {name: checkpoint[name] for name in _KEPT if name in checkpoint}
        loops = {"fit_loop": checkpoint["loops"]["fit_loop"]}
        target.checkpoints.mkdir(exist_ok=True)
        with replacing(target.checkpoint) as file:
            torch.save({**kept, "callbacks": {STATE_KEY: state}, "loops": loops}, file)
        write_atomically(target.config, trained.config.read_text(encoding="utf-8"))
        metrics = {name: value for name, value in record["metrics"].items() if name.startswith(_TEST)}
        bound = request["score_bound"]
        metrics[f"private/{best.score}"] = winner.score if bound is None else bound * (1 - winner.score)
        write_result(Run(target, record["config"]), metrics, record["steps"], 0.0, 0.0)
        facts |= {"chosen": list(winner.trial.words), "score": winner.score}
    write_json(folder / TUNING, facts)
    return facts


def hide_times(folder: Path) -> None:
    """Give all files the time of the ledger, which was written before the first trial."""
    began = RunFolder(folder).ledger.stat().st_mtime
    for place in [*folder.rglob("*"), folder]:
        os.utime(place, (began, began))
