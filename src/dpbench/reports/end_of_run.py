"""What a run shows when it has come to its end: its pictures, and a short table in the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dpbench.privacy.accounting.accountants import ACCOUNTANTS
from dpbench.privacy.sampling import sampling_from_dict
from dpbench.reports.ledgers import shown_noise
from dpbench.reports.table import UNPROVEN
from dpbench.runs.folder import Run, RunFolder
from dpbench.runs.record import is_audited


class EndOfRun:
    """Hands what the reports make of a run to `training.run.train`, which knows nothing of reports."""

    def draw(self, run: Run) -> Path | None:
        """Draw learning curves and, where there were any, diagnostics; returns the picture of the curves."""
        from dpbench.reports.curves import plot_curves
        from dpbench.reports.diagnostics_plot import plot_diagnostics

        picture = plot_curves(run.folder, run.config["run"]["name"])
        plot_diagnostics(run.folder, run.config["run"]["name"])
        return picture

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


def summary(record: Mapping[str, Any], folder: RunFolder, opening: str) -> str:
    """The short table at the end of a run.

    Args:
        record: The content of result.json.
        folder: Of the run.
        opening: How to see the run in wandb.
    """
    privacy = record["privacy"]
    rows = _tested(record["metrics"])
    if privacy["delta"] is None:
        rows.append(("epsilon", "infinite (no privacy)"))
    else:
        for name, value in privacy["epsilon"].items():
            shown = _not_computed(privacy, name) if value is None else f"{value:.3f}"
            shown += f" ({UNPROVEN})" if "damage" in privacy else ""
            rows.append(
                (f"epsilon ({name.upper()})", f"{shown} at delta={privacy['delta']:g}, unit: {privacy['unit']}")
            )
        for name, value in privacy.get("epsilon_microbatch", {}).items():
            shown = "not computed" if value is None else f"{value:.3f}"
            rows.append((f"epsilon ({name.upper()})", f"{shown} nominal, for a fixed microbatch as the unit"))
    rows += [("noise", shown_noise(privacy))] if "noise_multiplier" in privacy else []
    rows += [("ledger", privacy["damage"])] if "damage" in privacy else []
    if is_audited(record):
        rows.append(("audit", f"dpbench audit {_from_here(folder.path)}; the model learned from canaries too"))
    rows += [
        ("steps", str(record["steps"])),
        ("seconds", f"{record['seconds']:.1f} (with tests {record['seconds_total']:.1f})"),
        ("run folder", _from_here(folder.path)),
        ("pictures", ", ".join(_from_here(path) for path in sorted(folder.path.glob("*.png")))),
        ("wandb", opening.replace(str(folder), _from_here(folder.path))),
    ]
    return "\n" + "\n".join(f"  {name:<15} {value}" for name, value in rows) + "\n"


def _not_computed(privacy: Mapping[str, Any], accountant: str) -> str:
    """Say why an accountant gives no figure, where that is its sampling."""
    sampling = privacy.get("sampling")
    if sampling is None or ACCOUNTANTS[accountant].covers(sampling_from_dict(sampling)):
        return f"not computed (dpbench account RUN --accountant {accountant} says why)"
    return f"not computed ({accountant} does not cover {sampling['kind']} lots)"


def _from_here(path: Path) -> str:
    """A path as a user in the present folder would type it."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)
