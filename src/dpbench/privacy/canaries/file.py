"""The file in which an audited training leaves what its canaries saw."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from dpbench.files import write_json
from dpbench.privacy.accounting.seal import Seal
from dpbench.privacy.canaries.scores import Scores

FILE_NAME = "audit.json"  # beside the ledger
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
        path: Of the file.
        scores: Of all releases in the ledger.
        ledger: By which a reader knows that the ledger beside the file is the one that the scores belong to.
        left_out: Groups that showed nothing, see `Canaries`.
    """
    data = {
        "schema": SCHEMA,
        "ledger": ledger._asdict(),
        "scores": scores.model_dump(),
        "left_out": dict(left_out or {}),
    }
    write_json(path, data)
