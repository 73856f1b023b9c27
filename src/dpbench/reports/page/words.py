"""What a run guarantees, and what not, in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dpbench.reports.ledgers import shown_noise, shown_uncovered
from dpbench.reports.page.subject import OneRun

_RELATIONS = {
    "add_or_remove_one": "two data sets are neighbors if one has one {unit} more than the other (add or remove one)",
    "replace_one": "two data sets are neighbors if they differ in one {unit}, of which both have as many (replace one)",
}
NOT_COVERED = (
    "Choices that were made by looking at results on the same data: other runs, a sweep, settings tried before. Every "
    "run spends its own ε; dpbench account tells what all of them cost together.",
    "What was done to the data before training: selection, cleaning, normalization constants, vocabularies.",
    "Validation and test records: what is measured on them, the curves on this page included, tells of them.",
    "Floating point: the guarantee is that of the ideal Gaussian mechanism.",
)
NONPRIVATE = (
    "Everything called nonprivate/…: it was computed on training records without noise, such as the training loss. A "
    "page that shows it is no private release."
)
SEEDED = (
    "Seeded noise: this run's noise came from a seed (strategy.secure=false). Whoever knows the seed, the code and the "
    "settings can subtract it. For a model that will be published train with strategy.secure=true."
)


def epsilon_words(epsilon: Mapping[str, float | None]) -> str:
    """ε by each accountant that gives one."""
    known = [f"{shown(value)} ({name.upper()})" for name, value in epsilon.items() if value is not None]
    return ", ".join(known) or "none: no accountant gives a finite figure"


def shown(epsilon: float) -> str:
    """An ε with three digits behind the point, or in scientific notation where it means nothing."""
    return f"{epsilon:.3f}" if epsilon < 1000 else f"{epsilon:.3g}"


def guarantee(run: OneRun) -> list[str]:
    """Sentences on what a run guarantees."""
    privacy = run.privacy
    if run.lost is not None:
        return [f"Nothing can be told: {run.lost}. Restore the ledger."]
    if not run.private:
        if not run.finished and not run.record["metrics"]:
            return ["Nothing has been released yet."]
        return ["None. This run trained without privacy: its ε is infinite, and its model may repeat training records."]
    unit, population = privacy["unit"], privacy["population"]
    relation = _RELATIONS.get(privacy["neighbouring_relation"], privacy["neighbouring_relation"]).format(unit=unit)
    so_far = "" if run.finished else " so far"
    lines = [
        f"Everything that this training has released{so_far} is (ε, δ)-differentially private with ε = "
        f"{epsilon_words(privacy['epsilon'])} at δ = {privacy['delta']:g}. That holds for all of its weights, at every "
        "step, and for whatever is computed from them.",
        f"The unit of privacy is one {unit}, of {population:,} that could be drawn; {relation}.",
    ]
    if privacy.get("noise_multiplier") is not None:
        kind = str((privacy.get("sampling") or {}).get("kind", "")).replace("_", " ")
        lines.append(f"{privacy['releases']:,} releases: {shown_noise(privacy)}, {kind} sampling.")
    uncovered = shown_uncovered(privacy)
    if uncovered is not None:
        lines.append(f"Uncovered δ: {uncovered}.")
    size = privacy.get("microbatch_size", 1)
    if size > 1:
        nominal = epsilon_words(privacy.get("epsilon_microbatch", {}))
        lines.append(f"Records are clipped in microbatches of {size}. For a fixed microbatch as the unit: {nominal}.")
    return lines


def not_covered(runs: Sequence[OneRun], curves: Sequence[str]) -> list[str]:
    """What no ε of these runs covers."""
    private = [run for run in runs if run.private]
    if not private:
        return []
    lines = list(NOT_COVERED)
    if any(name.startswith("nonprivate/") for name in curves):
        lines.insert(0, NONPRIVATE)
    if any(not is_secure(run) for run in private):
        lines.append(SEEDED)
    return lines


def is_secure(run: OneRun) -> bool:
    """Whether a run's settings take its noise from the operating system."""
    return bool((run.config.get("strategy") or {}).get("secure"))


def doubts(run: OneRun) -> list[str]:
    """What a reader has to know before anything else."""
    privacy, found = run.privacy, []
    if not run.finished:
        found.append(f"This run has not ended: {run.folder.command('resume')} goes on. Figures are those of now.")
    if run.lost is not None:
        found.append(f"{run.lost}: no ε can be told.")
    elif "damage" in privacy:
        found.append(f"The ledger is not intact, so that no ε here is proven: {privacy['damage']}.")
    verdict = (privacy.get("audit") or {}).get("verdict")
    if verdict is not None and verdict != "CONSISTENT":
        found.append(f"The audit speaks against this run: {verdict}.")
    return found


def by_users(run: OneRun) -> list[tuple[str, str]]:
    """What a run by users does with them; nothing where its unit is an example."""
    privacy, config = run.privacy, run.config
    unit = privacy.get("unit") or (config.get("data") or {}).get("unit")
    if unit in (None, "example"):
        return []
    rows = [("unit of privacy", str(unit))]
    if privacy.get("population") is not None:
        rows.append((f"{unit}s in training", f"{privacy['population']:,}"))
    if isinstance(privacy.get("expected_batch_size"), int | float):
        rows.append((f"{unit}s in a lot, expected", f"{privacy['expected_batch_size']:.6g}"))
    rows += _flat("data", config.get("data"), ("val_users", "options"))
    return rows + _flat("records", config.get("records"), ())


def _flat(name: str, options: Any, only: tuple[str, ...]) -> list[tuple[str, str]]:
    """Settings as rows; of some keys only, where some are named."""
    if not isinstance(options, Mapping):
        return [] if options is None else [(name, str(options).removeprefix("dpbench."))]
    rows = []
    for key, value in options.items():
        if not only or key in only:
            rows += _flat(name if key == "_target_" else f"{name}.{key}", value, ())
    return rows
