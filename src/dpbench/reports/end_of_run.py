"""What a run shows when it has come to its end: its pictures, and a short table in the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dpbench.errors import DPBenchError
from dpbench.files import from_here, typed
from dpbench.privacy.accounting.accountants import ACCOUNTANTS
from dpbench.privacy.sampling import sampling_from_dict
from dpbench.runs.folder import Run, RunFolder
from dpbench.runs.numbers import noise_text
from dpbench.runs.record import CONFIDENCE, doubt, is_audited
from dpbench.runs.shared_noise import shared_with_neighbors


class EndOfRun:
    """Hands what the reports make of a run to `run.train.train`, which knows nothing of reports."""

    def draw(self, run: Run) -> dict[str, Path]:
        """Draw learning curves and, where there were any, diagnostics; returns the picture of the curves, by name."""
        from dpbench.reports.plots import plot_curves, plot_diagnostics, shows_private_records

        picture = plot_curves(run.folder, run.config["run"]["name"])
        plot_diagnostics(run.folder, run.config["run"]["name"])
        if picture is None:
            return {}
        return {f"{'nonprivate/' if shows_private_records(run.folder) else ''}curves": picture}

    def audit(self, run: Run) -> Mapping[str, Any] | None:
        """What the run's canaries tell of its epsilon; None where it had none, or released nothing."""
        if not (is_audited({"config": run.config}) and run.folder.audit.is_file()):
            return None
        from dpbench.reports.audit import audit_run

        try:
            return audit_run(run.folder.path, CONFIDENCE).result.summary()
        except DPBenchError as error:  # the model is trained: its result is not lost for that
            return {"why_not": str(error)}

    def summarize(self, run: Run, record: Mapping[str, Any], opening: str) -> None:
        """Print the summary."""
        print(summary(record, run.folder, opening))


def _tested(metrics: Mapping[str, float]) -> list[tuple[str, str]]:
    """The accuracy on test data, or whatever else was measured on them."""
    names = ["test/accuracy"] if "test/accuracy" in metrics else [name for name in metrics if name.startswith("test/")]
    return [
        (
            name.replace("/", " ").replace("_", " "),
            f"{100 * metrics[name]:.2f} %" if "accuracy" in name else f"{metrics[name]:.4g}",
        )
        for name in names
    ]


def _not_private(metrics: Mapping[str, float]) -> list[tuple[str, str]]:
    """What was measured of the records that were trained on, where somebody asked for it."""
    found = [name for name in metrics if name.startswith("nonprivate/train_") and name != "nonprivate/train_loss"]
    rows = []
    for name in found:
        percent, gap = "accuracy" in name, metrics[f"nonprivate/{name.removeprefix('nonprivate/train_')}_gap"]
        value = f"{100 * metrics[name]:.2f} %" if percent else f"{metrics[name]:.4g}"
        above = f"{100 * gap:+.2f} points" if percent else f"{gap:+.4g}"
        rows.append((name.partition("/")[2].replace("_", " "), f"{value}, {above} against test (not private)"))
    if "nonprivate/exposure_mean" in metrics:
        mean, most, chance = (metrics[f"nonprivate/exposure_{name}"] for name in ("mean", "max", "by_chance"))
        rows.append(
            ("exposure", f"mean {mean:.2f}, max {most:.2f} bits; by chance {chance:.2f} in the mean (not private)")
        )
    return rows


def summary(record: Mapping[str, Any], folder: RunFolder, opening: str) -> str:
    """The short table at the end of a run.

    Args:
        record: The content of result.json.
        folder: Of the run.
        opening: How to see the run in wandb.
    """
    privacy = record["privacy"]
    rows = _tested(record["metrics"]) + _not_private(record["metrics"])
    if privacy["delta"] is None:
        rows.append(("epsilon", "infinite (no privacy)"))
    else:
        for name, value in privacy["epsilon"].items():
            shown = _not_computed(privacy, name) if value is None else f"{value:.3f}"
            shown += f" ({doubt(privacy)})" if doubt(privacy) else ""
            rows.append(
                (f"epsilon ({name.upper()})", f"{shown} at delta={privacy['delta']:g}, unit: {privacy['unit']}")
            )
        for name, value in privacy.get("epsilon_microbatch", {}).items():
            shown = "not computed" if value is None else f"{value:.3f}"
            rows.append((f"epsilon ({name.upper()})", f"{shown} nominal, for a fixed microbatch as the unit"))
    rows += [("noise", noise_text(privacy))] if "noise_multiplier" in privacy else []
    rows += _held_out(record["config"].get("data") or {}) + _times(record)
    rows += [("ledger", privacy["damage"])] if "damage" in privacy else []
    rows += [("shared noise", line) for line in shared_with_neighbors(folder)]
    if is_audited(record):
        from dpbench.reports.audit import outline

        rows += outline(privacy)
        rows.append(("audit", f"dpbench audit {typed(folder.path)}; the model was trained with canaries too"))
    rows += [
        ("steps", str(record["steps"])),
        ("seconds", f"{record['seconds']:.1f} (with tests {record['seconds_total']:.1f})"),
        ("run folder", from_here(folder.path)),
        ("report", f"dpbench report {typed(folder.path)}"),
        ("pictures", ", ".join(from_here(path) for path in sorted(folder.path.glob("*.png")))),
        ("wandb", opening.replace(str(folder), from_here(folder.path))),
    ]
    return "\n" + "\n".join(f"  {name:<15} {value}" for name, value in rows) + "\n"


def _held_out(data: Mapping[str, Any]) -> list[tuple[str, str]]:
    """How many records of the training data were asked to be held out, and what chose them."""
    asked = [f"{data[name]} {name.partition('_')[2]}" for name in ("val_size", "val_users") if data.get(name)]
    options = data.get("options") or {}
    if options.get("held_out") and not options.get("test_path"):
        asked.append(f"a share of {options['held_out']:g} of the users, for the test")
    if not asked or "split" not in data:
        return []
    numbers = " and ".join(asked).replace("size", "records")
    if data["split"] == "hash":
        return [("held out", f"{numbers}, in expectation: each by a hash of itself")]
    return [("held out", f"{numbers}, by a permutation of all: epsilon is for the training set, not for the file")]


def _times(record: Mapping[str, Any]) -> list[tuple[str, str]]:
    """That times tell of large users, where nothing bounds the work of one."""
    local = (record["config"].get("records") or {}).get("local") or {}
    bounded = any(local.get(name) is not None for name in ("max_examples", "max_steps"))
    if record["privacy"]["delta"] is None or not local or bounded:
        return []
    return [("times", "not private: they tell of very large users (records.local.max_examples bounds a user's)")]


def _not_computed(privacy: Mapping[str, Any], accountant: str) -> str:
    """Say why an accountant gives no figure, where that is its sampling."""
    sampling = privacy.get("sampling")
    if sampling is None or ACCOUNTANTS[accountant].covers(sampling_from_dict(sampling)):
        return f"not computed (dpbench account RUN --accountant {accountant} says why)"
    return f"not computed ({accountant} does not cover {sampling['kind']} lots)"
