"""Tuning within one ε on five data sets, beside a grid: results/tune.

`python -m tools.results.tuned speeches` writes the data set of speeches, `... tunings EPSILON` runs what is missing,
and `... page` writes the results, with those of `dpbench reproduce tune/grid`.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd

from dpbench.capabilities.tune.stated import Setting
from dpbench.capabilities.tune.trials import stated_in
from dpbench.capabilities.users.shakespeare import read_book, speeches_of_roles
from dpbench.data.sources import data_root
from dpbench.files import write_atomically
from dpbench.harness.reproduce.tables import Variant, read_table
from dpbench.harness.runs.folder import RunFolder
from dpbench.harness.runs.provenance import commit
from dpbench.harness.runs.record import read_result
from dpbench.privacy.accounting.calibration import calibrate_scale
from dpbench.privacy.accounting.composition import epsilon
from dpbench.privacy.accounting.ledger import read_ledger
from dpbench.privacy.events import Event
from dpbench.templates import render

GRID = read_table("tune/grid")
SETTINGS = [column.name for column in GRID.columns if column.name.startswith("norm_")]
BUDGETS = (1.0, 3.0, 8.0)
METHODS = {
    "default": ("default", "#888888"),
    "untuned": ("normalized, Adam", "#508850"),
    "tuned": ("dpbench tune", "#3060a8"),
    "best": ("best of the grid, which costs more", "#e08020"),
}
REPEATS = 5
DELTAS = {"mnist_writers": 1e-3, "shakespeare_roles": 5e-4}
RUNS = Path("runs")
SPEECHES = RUNS / "speeches.jsonl"
RESULTS = Path("results") / "tune"
_HISTORY = re.compile("HENRY|RICHARD|KING JOHN")
_TRAGEDY = re.compile("TRAGEDY|CYMBELINE|TIMON|TROILUS")  # of the First Folio


def write_speeches() -> None:
    """Write each speech with its kind of play: 0 comedy, 1 history, 2 tragedy."""
    lines = []
    for role, texts in speeches_of_roles(read_book(data_root(None))).items():
        play = role.split(": ")[0]
        label = 1 if _HISTORY.search(play) else 2 if _TRAGEDY.search(play) else 0
        lines += [json.dumps({"text": text, "label": label}) for text in texts]
    SPEECHES.parent.mkdir(exist_ok=True)
    write_atomically(SPEECHES, "\n".join(lines) + "\n")


def run_tunings(budget: float) -> None:
    """Run the tunings of all data sets for an ε, or go on with them."""
    for number in range(REPEATS):
        for row in GRID.rows:
            folder = _folder(row, number)
            if row.epsilon != budget or (folder / "tuning.json").exists():
                continue
            command = [sys.executable, "-m", "dpbench", "tune", row.words[0], "--out", str(folder)]
            subprocess.run([*command, "--epsilon", f"{budget}", "--delta", f"{_delta(row)}"], check=True)
            _record(row, number, folder)


def _folder(row: Variant, number: int) -> Path:
    return RUNS / "tune" / f"{row.name}-{number}"


def _delta(row: Variant) -> float:
    return DELTAS.get(row.name.rpartition("_")[0], 1e-5)


def _record(row: Variant, number: int, folder: Path) -> None:
    """Add a tuning to results/tune/runs.csv."""
    record: dict[str, Any] = read_result(RunFolder(folder))
    facts = json.loads((folder / "tuning.json").read_text(encoding="utf-8"))
    events = read_ledger(folder / "ledger.jsonl").events
    line = {
        "row": row.name,
        "number": number,
        "chosen": " ".join(facts["chosen"] or ()),
        "score": facts["score"],
        "accuracy": record["metrics"].get("test/accuracy"),
        "epsilon_rdp": epsilon(events, _delta(row), "rdp"),
        "epsilon_pld": epsilon(events, _delta(row), "pld"),
        "epsilon_grid": _epsilon_of_grid(folder, row),
        "delta": _delta(row),
        "commit": commit(),
    }
    file = RESULTS / "runs.csv"
    file.parent.mkdir(exist_ok=True)
    frame = pd.concat([pd.read_csv(file) if file.exists() else None, pd.DataFrame([line])])
    write_atomically(file, frame.to_csv(index=False))


def _epsilon_of_grid(folder: Path, row: Variant) -> float:
    """Cost of all runs of the grid, of which each has the whole ε for itself."""
    (part,) = stated_in(folder / "ledger.jsonl").settings[0].releases
    assert row.epsilon is not None

    def one(noise_multiplier: float) -> Counter[Event]:
        return Counter(Setting((), (part._replace(noise_multiplier=noise_multiplier),)).events)

    trained = one(calibrate_scale(one, row.epsilon, _delta(row), "pld"))
    return epsilon(Counter({event: count * len(SETTINGS) for event, count in trained.items()}), _delta(row), "pld")


def write_page() -> None:
    """Write the table and the picture of results/tune."""
    tuned = pd.read_csv(RESULTS / "runs.csv")
    grid = pd.read_csv(RESULTS.with_name(GRID.folder) / "runs.csv")
    labels = {column.name: column.label for column in GRID.columns}
    rows: list[dict[str, Any]] = []
    for row in GRID.rows:
        own = tuned[tuned.row == row.name]
        cells = 100 * grid[grid.row == row.name].set_index("column").value
        if len(own) < REPEATS or not set(labels) <= set(cells.index):
            continue
        best = max(SETTINGS, key=lambda name: cells[name].mean())
        rows.append(
            {
                "name": row.name,
                "label": row.label,
                "default": cells["default"],
                "untuned": cells["untuned"],
                "tuned": 100 * own.accuracy,
                "best": cells[best],
                "best_label": labels[best],
                "epsilon_grid": own.epsilon_grid.iloc[0],
                "epsilon_pld": own.epsilon_pld.max(),
                "difference": 100 * own.accuracy.mean() - cells[best].mean(),
            }
        )
    page = render(Path(__file__).with_name("tuned.md.jinja"), rows=rows, repeats=REPEATS, commits=set(tuned.commit))
    write_atomically(RESULTS / "README.md", page)
    _draw(rows)


def _draw(rows: Sequence[Mapping[str, Any]]) -> None:
    """Draw the accuracy of all methods, a panel for each ε."""
    figure, axes = plt.subplots(1, 3, figsize=(10, 3.6), sharey=True, layout="constrained", squeeze=False)
    for panel, budget in zip(axes[0], BUDGETS, strict=True):
        own = [row for row in rows if row["name"].endswith(f"_{budget:g}")]
        for place, row in enumerate(own):
            for (method, (label, color)), shift in zip(METHODS.items(), (-0.24, -0.08, 0.08, 0.24), strict=True):
                values = row[method]
                panel.plot([place + shift] * len(values), values, ".", color=color, alpha=0.4)
                panel.plot(
                    place + shift, values.mean(), "_", color=color, markersize=10, label=None if place else label
                )
        panel.set_xticks(range(len(own)), [row["label"].split(",")[0].replace(" of ", "\nof ") for row in own])
        panel.tick_params(axis="x", labelsize=7)
        panel.set_title(f"total ε = {budget:g}, but for the grid", fontsize=9)
    axes[0, 0].set_ylabel("test accuracy, %")
    axes[0, 0].legend(frameon=False, fontsize=8)
    figure.savefig(RESULTS / "figure.png", dpi=150)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["speeches"]:
            write_speeches()
        case ["tunings", budget]:
            run_tunings(float(budget))
        case ["page"]:
            write_page()
        case _:
            sys.exit(__doc__)
