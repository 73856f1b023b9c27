"""result.json: the record of a finished run for tables and comparisons."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dpbench.code import code_hash, foreign_code, versions
from dpbench.errors import ConfigurationError
from dpbench.files import write_json
from dpbench.harness.runs.folder import Run, RunFolder
from dpbench.harness.runs.ledgers import doubt_about, lost_ledger, noise_of, read_run_ledger
from dpbench.harness.runs.provenance import commit, config_hash, hardware
from dpbench.harness.runs.readers import Evaluation, Record, read_json
from dpbench.privacy.accounting.ledger import Ledger
from dpbench.privacy.accounting.seal import seal_of

REPORTED = ("rdp", "pld")  # accountants whose epsilon every run reports
UNPROVEN = "ledger not intact"  # beside an epsilon that nobody should rely on
ACCUSATIONS = ("VIOLATED", "NOT AS DECLARED")  # of the verdicts of an audit
CONFIDENCE = 0.95  # of the audit that a run keeps, and tables show
MEASURED = ("val/", "test/")  # names of what was measured on data that are not the training data


def read_result(folder: RunFolder) -> dict[str, Any]:
    """Record of a finished run, with the evaluation of a GAN's images among its metrics (evaluation/...).

    `judged_on` is there with it. Metrics of checkpoints on the way are left out. `privacy` holds `damage` if the
    ledger was not intact in the end, has changed since, or is gone. Its `audit` holds nothing but `damage` if the
    ledger, or the observations, are not the audited ones.

    Raises:
        ConfigurationError: A file is damaged.
    """
    again = "delete {path}, and `%s` makes it again"
    record = read_json(folder.result, Record, again % folder.command("resume"))
    if record["privacy"].get("delta") is not None:
        damage = doubt_about(folder) if folder.ledger.is_file() else lost_ledger(folder)
        damage = record["privacy"].get("damage") or damage
        if damage is not None:
            record["privacy"]["damage"] = damage
    if record["privacy"].get("audit") is not None:
        changed = record["privacy"].get("damage") or _other_scores(folder, record["privacy"]["audit"])
        if changed is not None:
            record["privacy"]["audit"] = {"damage": changed}
    if folder.evaluation.exists():
        evaluation = read_json(folder.evaluation, Evaluation, again % folder.command("evaluate"))
        if evaluation["steps"] == record["steps"]:
            for name, value in evaluation.items():
                if isinstance(value, float):
                    record["metrics"][f"evaluation/{name}"] = value
            record["judged_on"] = evaluation["judged_on"]
    return record


def is_audited(config: Mapping[str, Any]) -> bool:
    """Return whether an audit adds canaries to the batches of a configuration's runs, which changes their accuracy."""
    return bool((config.get("audit") or {}).get("_target_"))


def inserted_copies(config: Mapping[str, Any]) -> int:
    """Count the made-up records of `data.inserted` among the training records of a configuration's runs."""
    inserted = (config.get("data") or {}).get("inserted") or {}  # an older run has none
    return int(inserted.get("records", 0)) * int(inserted.get("copies", 1))


def without_accuracy(record: Mapping[str, Any]) -> dict[str, float | None]:
    """Final figures of a run, without accuracies if its model was trained on canaries."""
    metrics: dict[str, float | None] = dict(record["metrics"])
    if is_audited(record["config"]):
        for name in record["metrics"]:
            if name.startswith((*MEASURED, "evaluation/")):
                metrics.pop(name)
    return metrics


def audited_epsilon(privacy: Mapping[str, Any]) -> float:
    """The lower limit of epsilon that an audit keeps as the run's; not a number where there is none.

    Args:
        privacy: Entry of the run's record.
    """
    audit = privacy.get("audit") or {}
    limits = audit.get("audited", {})
    name = audit.get("shown")
    if name not in limits:
        return math.nan
    return math.inf if limits[name] is None else float(limits[name])


def verdict_of(privacy: Mapping[str, Any]) -> str | None:
    """Verdict on a run, or the reason why there is none; None if it was not audited."""
    audit = privacy.get("audit")
    if audit is None:
        return None
    return str(audit.get("verdict") or audit.get("damage") or f"none: {audit.get('why_not', '')}")


def doubt(privacy: Mapping[str, Any]) -> str | None:
    """Doubt shown with every epsilon of a run, in a word; None if there is none."""
    if "damage" in privacy:
        return UNPROVEN
    return accusation((privacy.get("audit") or {}).get("verdict"))


def accusation(verdict: object) -> str | None:
    """The verdict of an audit, where it speaks against the run."""
    return str(verdict) if verdict in ACCUSATIONS else None


def _other_scores(folder: RunFolder, audit: Mapping[str, Any]) -> str | None:
    """Say that the observations of the audit have changed; None also if they were not kept."""
    if not folder.audit.is_file() or audit.get("scores") == _hash(folder.audit):
        return None
    return f"{folder.audit.name} is not what was audited: it was edited, or is of another run"


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def privacy_of(ledger: Path, private: bool = True) -> dict[str, Any]:
    """State what a ledger guarantees: epsilon by each accountant, δ, unit, neighboring relation, sampling.

    With `damage`, where there is any: no epsilon of such a ledger is proven.
    `membership` has the bound of the releases on membership tests, if there are any and an accountant covers them.
    With microbatches there is `epsilon_microbatch`, too: nominal, for a fixed microbatch (the papers' figure).

    Args:
        ledger: Path; no file means a run without privacy (every epsilon is None: infinite).
        private: True if the run had a private strategy at all.
    """
    if not private or not ledger.exists():
        return {"epsilon": dict.fromkeys(REPORTED), "delta": None, "unit": None, "neighbouring_relation": None}
    from dpbench.privacy.accounting.composition import ledger_epsilon, microbatch_epsilon  # brings dp_accounting
    from dpbench.privacy.accounting.tradeoff import membership_bound

    book = read_run_ledger(ledger)
    header = book.header
    privacy: dict[str, Any] = {"epsilon": _epsilons(book, ledger_epsilon)}
    if header.microbatch_size > 1:
        privacy["epsilon_microbatch"] = _epsilons(book, microbatch_epsilon)
    privacy |= {
        "delta": header.delta,
        "unit": header.unit,
        "neighbouring_relation": header.neighboring_relation,
        "population": header.population,
        "microbatch_size": header.microbatch_size,
        "releases": len(book.releases),
    }
    if book.releases:
        privacy |= noise_of(book)
        try:
            privacy["membership"] = membership_bound([book]).facts()
        except ConfigurationError:  # no accountant covers the sampling
            privacy["membership"] = None
    privacy["ledger"] = seal_of(ledger)._asdict()
    if book.wrong is not None:
        privacy["damage"] = book.wrong
    privacy["sampling"] = book.releases[-1][1].sampling.to_dict() if book.releases else None
    return privacy


def _epsilons(book: Ledger, epsilon_of: Callable[[Ledger, float, str], float]) -> dict[str, float | None]:
    epsilons: dict[str, float | None] = {}
    for name in REPORTED:
        try:
            value = epsilon_of(book, book.header.delta, name)
        except ConfigurationError:  # this accountant does not cover the sampling
            value = math.inf
        epsilons[name] = value if math.isfinite(value) else None
    return epsilons


def write_result(
    run: Run,
    metrics: dict[str, float],
    steps: int,
    seconds: float,
    seconds_total: float,
    finished: bool = True,
    audit: Mapping[str, Any] | None = None,
    members: str | None = None,
) -> dict[str, Any]:
    """Write the run's record, last of all and atomically.

    Args:
        run: Folder of the run.
        metrics: Final metrics; non-finite ones become None.
        steps: Optimizer steps made.
        seconds: Wall time of the training, all sessions together.
        seconds_total: The same with the final test.
        finished: False writes the record of a run that can be resumed, under another name.
        audit: Result of its audit, if there was one; kept with the hash of its observations.
        members: Hash of the members, in an experiment on membership.

    Returns:
        The record.
    """
    privacy = privacy_of(run.folder.ledger, run.private)
    if audit is not None:
        privacy["audit"] = {**audit, "scores": _hash(run.folder.audit)}
    record = {
        "metrics": {key: value if math.isfinite(value) else None for key, value in metrics.items()},
        "privacy": privacy,
        "seconds": round(seconds, 3),
        "seconds_total": round(seconds_total, 3),
        "steps": steps,
        "seed": run.config["seed"],
        "config_hash": config_hash(run.config),
        "code_hash": code_hash(),
        "commit": commit(),
        "versions": versions(),
        "foreign_code": foreign_code(run.config),
        "hardware": hardware(),
        "config": run.config,
    }
    if members is not None:
        record["members"] = members
    write_json(run.folder.result if finished else run.folder.partial_result, record)
    if finished:
        run.folder.partial_result.unlink(missing_ok=True)
    return record
