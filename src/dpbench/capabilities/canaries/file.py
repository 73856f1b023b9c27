"""The file in which an audited training leaves its canaries' observations."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dpbench.capabilities.canaries.scores import Scores, ScoreSums
from dpbench.files import write_json
from dpbench.privacy.accounting.seal import STATE_KEY, Seal

FILE_NAME = "audit.json"  # beside the ledger
STATE = "canaries"  # in a checkpoint: `releases.HOOK_STATE`, which brings torch
SCHEMA = 4
READABLE = (1, 2, 3, SCHEMA)  # files of schema 1 hold no residuals, and those before 3 no rounds


def write_scores(
    path: Path,
    scores: Scores,
    ledger: Seal,
    left_out: Mapping[str, int] | None = None,
) -> None:
    """Write scores, whole or not at all.

    Args:
        path: Path of the file.
        scores: Scores of all releases in the ledger.
        ledger: Seal by which a reader knows that the ledger next to the file is the one of the scores.
        left_out: Groups that showed nothing, see `Canaries`.
    """
    data = {
        "schema": SCHEMA,
        "ledger": ledger._asdict(),
        "scores": scores.model_dump(),
        "left_out": dict(left_out or {}),
    }
    write_json(path, data)


def keep_scores(checkpoint: Mapping[str, Any], path: Path) -> None:
    """Write the canaries' observations from a checkpoint, for a training that was killed after its last step.

    Args:
        checkpoint: Checkpoint of the last step.
        path: Path of the scores.
    """
    state = checkpoint["callbacks"].get(STATE_KEY) or {}
    memory = state.get(STATE)
    seal = Seal.read(state.get("ledger"))
    if memory and seal is not None:
        write_scores(path, ScoreSums.of(memory["sums"]).scores(), seal, memory.get("left_out"))
