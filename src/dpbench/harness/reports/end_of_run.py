"""Output of a run that has ended: its pictures, and a short table in the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dpbench.files import from_here, typed
from dpbench.harness.runs.folder import Run, RunFolder
from dpbench.harness.runs.ledgers import shared_with_neighbors
from dpbench.harness.runs.numbers import (
    epsilon_text,
    exposure_allowed_text,
    extraction_text,
    limit_text,
    membership_text,
    metric_text,
    noise_text,
    seconds_text,
)
from dpbench.harness.runs.record import doubt, is_audited, verdict_of
from dpbench.templates import render

_DEFAULT_NOISE = "noise_multiplier: ${unless:"  # of conf/base/strategy.yaml, where nothing has replaced it


class EndOfRun:
    """Gives the reports of a run to `run.train.train`, which knows nothing of reports."""

    def draw(self, run: Run) -> dict[str, Path]:
        """Draw learning curves and, where there were any, diagnostics; returns the picture of the curves, by name."""
        from dpbench.harness.reports.plots import plot_curves, plot_diagnostics

        picture = plot_curves(run.folder, run.config["run"]["name"])
        plot_diagnostics(run.folder, run.config["run"]["name"])
        return {} if picture is None else {"curves": picture}

    def summarize(self, run: Run, record: Mapping[str, Any], opening: str) -> None:
        """Print the summary."""
        print(summary(record, run.folder, opening))


def summary(record: Mapping[str, Any], folder: RunFolder, opening: str) -> str:
    """The short table at the end of a run.

    Args:
        record: The content of result.json.
        folder: Folder of the run.
        opening: How to see the run in wandb.
    """
    privacy = record["privacy"]
    metrics = record["metrics"]
    mark = doubt(privacy)
    text = render(
        "end_of_run.txt",
        record=record,
        privacy=privacy,
        tests=_tests(metrics),
        on_training_records=_on_training_records(metrics),
        exposure=[metrics.get(f"nonprivate/exposure_{name}") for name in ("mean", "max", "by_chance")],
        exposure_allowed=exposure_allowed_text(metrics),
        extraction=extraction_text(metrics, (record["config"].get("data") or {}).get("inserted") or {}),
        epsilons={name: _epsilon(name, value) for name, value in privacy["epsilon"].items()},
        membership=membership_text(privacy.get("membership")),
        mark=f" ({mark})" if mark else "",
        steps=_steps(record),
        noise=noise_text(privacy) if "noise_multiplier" in privacy else "",
        chosen=_noise_is_chosen(record["config"], folder),
        held_out=_held_out(record["config"].get("data") or {}),
        shared_noise=shared_with_neighbors(folder),
        audit=_audit(privacy) if is_audited(record["config"]) else {},
        place=from_here(folder.path),
        typed_place=typed(folder.path),
        pictures=[from_here(path) for path in sorted(folder.path.glob("*.png"))],
        opening=opening.replace(str(folder), from_here(folder.path)),
        metric=metric_text,
        number=epsilon_text,
        seconds=seconds_text,
    )
    return f"\n{text}"


def _audit(privacy: Mapping[str, Any]) -> dict[str, str]:
    """Results of a run's audit: its lower bound on epsilon, and its verdict."""
    audit = privacy.get("audit") or {"why_not": "nothing was released, or no audit is installed"}
    verdict = f"{verdict_of({'audit': audit})}"
    if audit.get("verdict") is None:
        return {"verdict": verdict}
    limit = "nothing"
    if audit["shown"] is not None:
        limit = f"{limit_text(audit['audited'][audit['shown']])} ({audit['shown'].replace('_', ' ')})"
    if audit["accused_by"]:
        verdict += f" ({'; '.join(audit['accused_by'])})"
    return {"audited": f"{limit} at {100 * audit['confidence']:g} % confidence", "verdict": verdict}


def _tests(metrics: Mapping[str, float]) -> dict[str, float]:
    """The accuracy on test data, or the other metrics measured on them."""
    if "test/accuracy" in metrics:
        return {"test/accuracy": metrics["test/accuracy"]}
    return {name: value for name, value in metrics.items() if name.startswith("test/")}


def _on_training_records(metrics: Mapping[str, float]) -> list[tuple[str, float, str]]:
    """Metrics on training records, if asked for, and their gap to the test."""
    prefix = "nonprivate/train_"
    rows = []
    for name, value in metrics.items():
        if name.startswith(prefix) and name != "nonprivate/train_loss":
            gap = metrics[f"nonprivate/{name.removeprefix(prefix)}_gap"]
            rows.append((name, value, f"{100 * gap:+.2f} points" if "accuracy" in name else f"{gap:+.4g}"))
    return rows


def _epsilon(accountant: str, value: float | None) -> str:
    """A figure, or the command that explains why there is none."""
    if value is None:
        return f"not computed (dpbench account RUN --accountant {accountant} says why)"
    return epsilon_text(value)


def _steps(record: Mapping[str, Any]) -> str:
    """Number of steps, with the planned number if a budget or time limit ended the run."""
    planned = (record["config"].get("trainer") or {}).get("max_steps") or 0
    return f"{record['steps']} of {planned}" if planned > record["steps"] else str(record["steps"])


def _noise_is_chosen(config: Mapping[str, Any], folder: RunFolder) -> bool:
    """Return whether an epsilon or a noise multiplier was asked for, as Hydra's file of the run tells."""
    if (config.get("strategy") or {}).get("target_epsilon") is not None:
        return True
    path = folder.hydra / "config.yaml"
    return not (path.is_file() and _DEFAULT_NOISE in path.read_text(encoding="utf-8"))


def _held_out(data: Mapping[str, Any]) -> str:
    """Number of training records that were to be held out; empty if none."""
    parts = []
    if data.get("val_size"):
        parts.append(f"{data['val_size']} records")
    if data.get("val_users"):
        parts.append(f"{data['val_users']} users")
    options = data.get("options") or {}
    if options.get("held_out") and not options.get("test_path"):
        # A table with users holds users out, also where their examples are the records.
        held_out = "users" if data.get("unit") == "user" or "user" in options else "records"
        parts.append(f"a share of {options['held_out']:g} of the {held_out}, for the test")
    return " and ".join(parts) if "split" in data else ""
