"""The file in which an audited training leaves what its canaries saw."""

from __future__ import annotations

from pathlib import Path

from dpbench.files import write_json
from dpbench.privacy.accounting.seal import Seal
from dpbench.privacy.auditing.scores import Scores

FILE_NAME = "audit.json"  # beside the ledger
SCHEMA = 1


def write_scores(path: Path, scores: Scores, ledger: Seal) -> None:
    """Write scores, whole or not at all.

    Args:
        path: Of the file.
        scores: Of all releases in the ledger.
        ledger: By which a reader knows that the ledger beside the file is the one that the scores belong to.
    """
    write_json(path, {"schema": SCHEMA, "ledger": ledger._asdict(), "scores": scores.to_json()})
