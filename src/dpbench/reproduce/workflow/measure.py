"""What the runs of a workflow show: labels that are recalled, epsilons, and which noise is chosen."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from scipy import stats

from dpbench.files import write_json
from dpbench.privacy.canaries.labels import LabelScores
from dpbench.reports.audit import audit_by_labels, audit_run
from dpbench.reproduce.jobs import Job
from dpbench.reproduce.workflow.plan import Plan
from dpbench.run.label_scores import label_scores

POWER = 0.9
"""Share of the random labels that training without privacy has to recall: else the check could not see memorization."""
CONFIDENCE = 0.95
_SCORES = "label_scores.json"  # in the folder of a run on noise


@dataclass(frozen=True)
class Recall:
    """What a run on noise shows.

    Attributes:
        noise_multiplier: z; None without privacy.
        epsilon_rdp: ε by RDP; None without privacy, or where it is not computed.
        epsilon_pld: The same by privacy loss distributions.
        recalled: Share of the training labels that the final weights give.
        guessed: The same of fresh noise.
        limit: Upper confidence limit of the difference; see `upper_limit`.
        audited: Lower limit of ε by labels.
        verdict: Of that audit.
        seconds: Of the training.
        words: After `dpbench train`.
        code_hash: Of the source that ran it.
    """

    noise_multiplier: float | None
    epsilon_rdp: float | None
    epsilon_pld: float | None
    recalled: float
    guessed: float
    limit: float
    audited: float | None
    verdict: str | None
    seconds: float
    words: str
    code_hash: str

    def passes(self, margin: float) -> bool:
        """Whether the training labels are recalled less than `margin` better than fresh ones, with confidence."""
        return self.limit < margin

    @property
    def epsilon(self) -> float | None:
        """The tighter ε that there is."""
        return self.epsilon_rdp if self.epsilon_pld is None else self.epsilon_pld


def upper_limit(recalled: float, records: int, guessed: float, others: int, confidence: float = CONFIDENCE) -> float:
    """Upper one-sided limit of the difference of two shares of independent records (normal approximation).

    Args:
        recalled: Share of the training records.
        records: How many there are.
        guessed: Share of the others.
        others: How many there are.
        confidence: That the limit is none too low.

    >>> round(upper_limit(0.167, 2000, 0.10, 2000), 3)
    0.085
    """
    variance = recalled * (1 - recalled) / records + guessed * (1 - guessed) / others
    return recalled - guessed + float(stats.norm.ppf(confidence)) * math.sqrt(variance)


def recall_of(job: Job, noise_multiplier: float | None) -> Recall | None:
    """What a finished run on noise shows; None of one that is not finished.

    Raises:
        DPBenchError: Its files are damaged.
    """
    record = job.result()
    if record is None:
        return None
    scores = _scores_of(job)
    audit = None if noise_multiplier is None else audit_by_labels(job.run, scores, CONFIDENCE).result
    return Recall(
        noise_multiplier,
        record["privacy"]["epsilon"].get("rdp"),
        record["privacy"]["epsilon"].get("pld"),
        scores.recalled,
        scores.guessed,
        upper_limit(scores.recalled, len(scores.members), scores.guessed, len(scores.others)),
        None if audit is None else audit.audited,
        None if audit is None else str(audit.verdict),
        record["seconds"],
        " ".join(job.words),
        job.code_hash,
    )


def _scores_of(job: Job) -> LabelScores:
    """Scores by a run's final weights, kept in its folder, whose name holds the hash of what computes them."""
    with suppress(OSError, ValueError, TypeError):
        kept = json.loads((job.path / _SCORES).read_text(encoding="utf-8"))
        return LabelScores(np.array(kept.pop("members")), np.array(kept.pop("others")), **kept)
    scores = label_scores(job.run)
    write_json(job.path / _SCORES, {name: np.asarray(value).tolist() for name, value in vars(scores).items()})
    return scores


def choose(found: Sequence[Recall], margin: float) -> Recall | None:
    """The run of the least noise that passes, and all with more noise too; None if that of the most noise does not.

    Args:
        found: Private runs on noise, in any order.
        margin: See `Recall.passes`.
    """
    chosen = None
    for one in sorted(found, key=lambda one: -(one.noise_multiplier or 0.0)):
        if not one.passes(margin):
            break
        chosen = one
    return chosen


@dataclass(frozen=True)
class Trained:
    """A run on the data themselves, with the audit of another one like it.

    Attributes:
        strategy: Its name.
        noise_multiplier: z; None without privacy.
        accuracy: On test data.
        claimed: ε of its ledger by RDP, nominal where that does not cover the lots; None without privacy.
        sound: The tightest ε that covers its lots.
        audited: Lower limit of ε of a run with canaries.
        audited_sound: The sound ε of that run, which has more records.
        verdict: Of that audit.
        seconds: Of the training.
        words: After `dpbench train`.
        code_hash: Of the source that ran it.
    """

    strategy: str
    noise_multiplier: float | None
    accuracy: float | None
    claimed: float | None
    sound: float | None
    audited: float | None
    audited_sound: float | None
    verdict: str | None
    seconds: float
    words: str
    code_hash: str


def trained(job: Job, audited: Job | None, noise_multiplier: float | None) -> Trained | None:
    """A finished run on data, with what the run with canaries shows if that is finished; None if the first is not.

    Raises:
        DPBenchError: Files are damaged.
    """
    record = job.result()
    if record is None:
        return None
    audit = audit_run(audited.path, CONFIDENCE).result if audited is not None and audited.state() == "done" else None
    epsilon: dict[str, Any] = record["privacy"]["epsilon"]
    return Trained(
        job.row,
        noise_multiplier,
        record["metrics"].get("test/accuracy"),
        epsilon.get("rdp"),
        epsilon.get("pld") if epsilon.get("pld") is not None else epsilon.get("rdp"),
        None if audit is None else audit.audited,
        None if audit is None else audit.sound,
        None if audit is None else str(audit.verdict),
        record["seconds"],
        " ".join(job.words),
        job.code_hash,
    )


@dataclass
class Outcome:
    """What a workflow has found so far.

    Attributes:
        plan: What it trains.
        margin: See `Recall.passes`.
        power: The run without privacy on noise.
        noise: The private runs on noise, by increasing noise.
        chosen: Of these.
        data: The runs on the data.
    """

    plan: Plan
    margin: float
    power: Recall | None = None
    noise: list[Recall] = field(default_factory=list)
    chosen: Recall | None = None
    data: list[Trained] = field(default_factory=list)
