"""`dpbench report`: runs on one page, which needs nothing beside itself.

Here the facts are collected; what is said of them, and how it looks, stands in templates/report*.html.
"""

from __future__ import annotations

import base64
import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from dpbench import __version__
from dpbench.errors import ConfigurationError, DPBenchError, brief
from dpbench.files import from_here, write_atomically
from dpbench.reports.account_plot import epsilon_figure
from dpbench.reports.end_of_sweep import SweepCost, cost_of_sweep
from dpbench.reports.figures import Picture, free_place, head_of, mark_of, svg
from dpbench.reports.markdown import markdown_cells
from dpbench.reports.plots import BOUND, curve_names, curves_figure
from dpbench.reports.roc import roc_figure
from dpbench.reports.run_rows import (
    CELLS,
    NOT_FINISHED,
    RunRow,
    cells_of,
    flat,
    require_folder,
    row_of,
    with_curves,
)
from dpbench.reports.run_table import RunTable
from dpbench.runs import numbers
from dpbench.runs.command import words_of
from dpbench.runs.folder import RunFolder, finished_runs_below, unfinished_runs_below
from dpbench.runs.ledgers import lost_ledger, read_run_ledger
from dpbench.runs.readers import Record, read_csv, read_json, read_metrics, steps_logged
from dpbench.runs.record import CONFIDENCE, privacy_of, read_result
from dpbench.templates import render

_MOST_RUNS = 24  # whose settings, facts and audits are shown one by one
_MOST_PANELS = 12  # of bounds of several runs
_SLOW_POINTS = 6  # each a second of the PLD accountant
_USUAL = Path("report.html")
_MARK = '<meta name="generator" content="dpbench report'
_RESTORE = "restore {path}, or make it again (dpbench reproduce)"
_NO_PRIVACY_YET: dict[str, Any] = {"epsilon": {}, "delta": None, "unit": None, "neighbouring_relation": None}
_OF_PAPERS = [
    "unit", "delta", "neighbouring_relation", "population",
    "commit", "code_hash", "date", "cpu", "gpu", "threads", "kernels", "python", "torch", "dpbench",
]  # fmt: skip


@dataclass(frozen=True)
class PageRun:
    """A run on the page.

    Attributes:
        folder: The run's folder.
        record: The content of result.json; of an unfinished run as much of it as is known.
        finished: Whether the run has a result.
        lost: The damage, of a private run whose ledger is gone.
    """

    folder: RunFolder
    record: dict[str, Any]
    finished: bool
    lost: str | None

    @property
    def privacy(self) -> dict[str, Any]:
        """The run's guarantee, as in result.json."""
        privacy: dict[str, Any] = self.record["privacy"]
        return privacy

    @property
    def config(self) -> dict[str, Any]:
        """Its settings."""
        config: dict[str, Any] = self.record["config"]
        return config

    @property
    def private(self) -> bool:
        """True if the run claims an ε."""
        return self.privacy.get("delta") is not None

    @property
    def seeded(self) -> bool:
        """True if the run's noise came from a seed."""
        strategy = self.config.get("strategy") or {}
        return self.private and not strategy.get("secure")

    @property
    def row(self) -> RunRow:
        """The run as a row of a table, with its curves."""
        row = with_curves(row_of(self.folder, self.record))
        if self.finished:
            return row
        # The code is no other run's, so that it joins no mean.
        apart = f"{NOT_FINISHED}: {self.folder}"
        return replace(row, name=f"{row.name} ({NOT_FINISHED})", note=NOT_FINISHED, code=apart)

    @property
    def all_settings(self) -> list[tuple[str, str]]:
        """Dotted keys and values."""
        settings = []
        for key, value in flat(self.config).items():
            text = value if isinstance(value, str) else json.dumps(value, default=str)
            settings.append((key, text))
        return settings

    @property
    def command(self) -> str:
        """Arguments of the command that made the run; empty if they are unknown."""
        return shlex.join(words_of(self.folder))


@dataclass(frozen=True)
class Paper:
    """A reproduced table.

    Attributes:
        folder: Folder of its results.
        runs: A line for each run.
        cells: Means over seeds.
    """

    folder: Path
    runs: pd.DataFrame
    cells: list[RunRow]

    @property
    def facts(self) -> list[tuple[str, str]]:
        """Guarantee and provenance of its runs: all values of each column."""
        facts = [("results", str(self.folder)), ("runs", str(len(self.runs)))]
        columns = self.runs.reindex(columns=_OF_PAPERS).dropna(axis=1, how="all")
        for name, values in columns.items():
            facts.append((str(name).replace("_", " "), ", ".join(values.dropna().astype(str).unique())))
        return facts

    @property
    def rows(self) -> list[list[str]]:
        """The table as its own page has it; nothing where there is no page."""
        page = self.folder / "table.md"
        return markdown_cells(page.read_text(encoding="utf-8", errors="replace")) if page.is_file() else []


@dataclass(frozen=True)
class Subject:
    """Contents of a page.

    Attributes:
        sources: Folders that were named.
        runs: Finished ones first.
        papers: Reproduced tables.
    """

    sources: tuple[Path, ...]
    runs: tuple[PageRun, ...]
    papers: tuple[Paper, ...]

    @cached_property
    def each(self) -> RunTable:
        """All runs, each by itself."""
        return RunTable(tuple(run.row for run in self.runs)).told_apart()

    @cached_property
    def groups(self) -> RunTable:
        """Means of runs over seeds, and cells of papers' tables."""
        cells = [cell for paper in self.papers for cell in paper.cells]
        return RunTable((*self.each.over_seeds().rows, *cells))

    @property
    def alone(self) -> PageRun | None:
        """The run, where it is the only one."""
        return self.runs[0] if len(self.runs) == 1 and not self.papers else None

    @cached_property
    def cost(self) -> SweepCost | None:
        """Joint cost of all runs of the page; None if there is one only."""
        if self.alone is not None or not self.runs:
            return None
        papers = {paper.folder for paper in self.papers}
        return cost_of_sweep([source for source in self.sources if source not in papers])

    @property
    def title(self) -> str:
        """A run's name; of several runs the names of their folders."""
        return str(self.alone.config["run"]["name"]) if self.alone is not None else _some(self.names)

    @property
    def subtitle(self) -> str:
        """A run's seed; of several runs the settings in which they differ."""
        if self.alone is not None:
            return f"seed {self.alone.record['seed']}"
        return " × ".join(key.removesuffix("._target_") for key in self.each.distinguishing())

    @property
    def names(self) -> list[str]:
        """Names of the folders that were named."""
        return [source.resolve().name for source in self.sources]


def write_report(
    sources: Sequence[Path],
    out: Path | None,
    accountants: Sequence[str],
    force: bool = False,
) -> tuple[Path, bool]:
    """Write the page of runs.

    Args:
        sources: Folders of runs, of sweeps, or of the results of tables.
        out: The file, which appears when it is complete; None: report.html, or where that shows other runs, the first
            free name like it.
        accountants: Accountants whose ε over the steps of a run is drawn.
        force: Permission to replace a file that is no such page.

    Returns:
        The file, and whether there was one.

    Raises:
        ConfigurationError: There is no run, a file of one is damaged, or something else is at `out`.
    """
    mark = mark_of(sources)
    place = out or free_place(_USUAL, mark)
    replaced = place.exists()
    if replaced and not force and _MARK.encode() not in head_of(place):
        raise ConfigurationError(f"{place} is not a dpbench report: choose another name, or replace it with --force.")
    text = render("report.html", version=__version__, mark=mark, **_facts(read_subject(sources), accountants))
    place.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(place, text.encode("utf-8", "replace").decode("utf-8"))  # half of a surrogate pair is no text
    return place, replaced


def read_subject(sources: Sequence[Path]) -> Subject:
    """Read all that some places hold.

    Args:
        sources: Folders of runs, of sweeps, or of the results of tables.

    Raises:
        ConfigurationError: One is not there, holds nothing of ours, or a file is damaged.
    """
    runs: dict[Path, PageRun] = {}
    papers = []
    for source in sources:
        require_folder(source)
        if (source / CELLS).is_file():
            lines = read_csv(source / CELLS, ["seed", "value"], _RESTORE, ("*",))
            papers.append(Paper(source, lines, cells_of(source)))
            continue
        finished = finished_runs_below([source])
        unfinished = unfinished_runs_below(source)
        if not finished and not unfinished and RunFolder(source).begun:
            unfinished = [RunFolder(source)]
        if not finished and not unfinished:
            raise ConfigurationError(
                f"{source} holds no run of dpbench ({RunFolder.result}, {RunFolder.config}) and no table ({CELLS})."
            )
        for folder in [*finished, *unfinished]:
            record = read_result(folder) if folder.finished else _partial_record(folder)
            runs[folder.path.resolve()] = PageRun(folder, record, folder.finished, lost_ledger(folder))
    finished_first = sorted(runs.values(), key=lambda run: not run.finished)
    return Subject(tuple(sources), tuple(finished_first), tuple(papers))


def _partial_record(folder: RunFolder) -> dict[str, Any]:
    """Read a run under way, interrupted or failed: its partial result, or its other files."""
    if folder.partial_result.is_file():
        record = read_json(folder.partial_result, Record, "delete {path}, it is not needed")
    else:
        config = _settings_of(folder)
        logged = read_metrics(folder.metrics).dropna(axis=1, how="all")
        metrics = {str(name): float(values.dropna().iloc[-1]) for name, values in logged.items()}
        record = {"metrics": metrics, "config": config, "seed": config.get("seed"), "seconds": None, "steps": 0}
    record["steps"] = max(record["steps"], steps_logged(folder.metrics))
    record["privacy"] = privacy_of(folder.ledger) if folder.ledger.is_file() else dict(_NO_PRIVACY_YET)
    return record


def _settings_of(folder: RunFolder) -> dict[str, Any]:
    try:
        config = yaml.safe_load(folder.config.read_text(encoding="utf-8"))
        if not isinstance(config["run"]["name"], str):
            raise ValueError("run.name is no word")
    except (yaml.YAMLError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise ConfigurationError(
            f"{folder.config} is damaged: {brief(error)} (restore it; a resume needs it)."
        ) from error
    return dict(config)


def _facts(subject: Subject, accountants: Sequence[str]) -> dict[str, Any]:
    """Everything that the template names.

    Args:
        subject: The runs.
        accountants: Accountants whose ε over the steps of a run is drawn.
    """
    alone = subject.alone
    groups = subject.groups
    held_out = any(name.startswith("val/") for run in subject.runs for name in run.record["metrics"])
    results = []
    if alone is not None:
        results = [(name, text) for name, text in subject.each.figures() if text != numbers.ABSENT]
    bounds = curve_names(groups.rows, BOUND)
    return {
        "title": subject.title,
        "subtitle": subject.subtitle,
        "runs": subject.runs,
        "papers": subject.papers,
        "alone": alone,
        "cost": subject.cost,
        "cost_of_choosing": [] if subject.cost is None else subject.cost.lines(held_out),
        "any_nonprivate_curve": any(name.startswith("nonprivate/") for name in curve_names(subject.each.rows)),
        "any_mean": any(row.n > 1 and not row.curves.empty for row in groups.rows),
        "compared": groups.rows,
        "results_of_run": results,
        "curves": _curves("Curves", groups, curve_names(groups.rows)),
        "spent_picture": _spent_picture(alone, accountants),
        "bounds": _curves("Clipping bounds", groups, bounds[:_MOST_PANELS] if alone is None else bounds),
        "bounds_left_out": max(len(bounds) - _MOST_PANELS, 0) if alone is None else 0,
        "audit": _audit(alone),
        "attack": _attack(subject),
        "sample_images": _sample_images(subject),
        "diagnostics_image": _data_uri(alone.folder.diagnostics) if alone is not None else "",
        "side_by_side": groups.compared_rows(),
        "most_runs": _MOST_RUNS,
        "numbers": numbers,
        "some": _some,
    }


def _curves(title: str, table: RunTable, names: Sequence[str]) -> Picture | None:
    """Curves over steps and, where that can be, over ε; None where no run has any."""
    figure = curves_figure(table, names)
    if figure is None:
        return None
    name = title.lower().replace(" ", "-")
    by_epsilon = curves_figure(table, names, "epsilon")
    return Picture(title, svg(figure, name), "" if by_epsilon is None else svg(by_epsilon, f"{name}-epsilon"))


def _spent_picture(run: PageRun | None, accountants: Sequence[str]) -> Picture | None:
    if run is None or not run.private or not run.folder.ledger.is_file():
        return None
    ledger = read_run_ledger(run.folder.ledger)
    try:
        figure = epsilon_figure({"run": ledger}, run.privacy["delta"], accountants, slow_points=_SLOW_POINTS)
    except (ConfigurationError, IndexError, ValueError):  # no release yet, or lots that none of them covers
        return None
    return Picture("ε by accountant, over steps", svg(figure, "spent"))


def _audit(run: PageRun | None) -> dict[str, Any] | None:
    """The audit of a single run; None where it had no canaries."""
    if run is None or run.privacy.get("audit") is None:
        return None
    from dpbench.reports.audit import audit_figure, audit_run, outline  # brings a second of imports

    rows = list(outline(run.privacy))
    try:
        report = audit_run(run.folder.path, run.privacy["audit"].get("confidence") or CONFIDENCE)
    except DPBenchError as error:
        return {"rows": rows, "picture": None, "text": str(error)}
    title = "scores of canaries, and their ROC curve under the one that the ledger allows"
    return {"rows": rows, "picture": Picture(title, svg(audit_figure(report), "audit")), "text": report.text}


def _attack(subject: Subject) -> dict[str, Any] | str | None:
    """Results of `dpbench attack` on these runs, or why they cannot be read; None if there are none."""
    seeds = {}
    for run in subject.runs:
        if (run.config.get("data") or {}).get("membership") is not None:
            seeds[run.folder.path] = run.record["seed"]
    if not seeds:
        return None
    from dpbench.reports import attacked  # brings a second of imports

    try:
        attacks = attacked.attacks_on(seeds, subject.sources)
    except ConfigurationError as error:
        return str(error)
    if not attacks:
        return None
    summaries = [summary for _, summary in attacks]
    curves = roc_figure(attacked.roc_panels(summaries))
    return {
        "rows": attacked.attack_rows(summaries, only_strongest=subject.alone is None),
        "curves": Picture("Attacked and allowed", svg(curves, "attack")),
        "folders": list(dict.fromkeys(from_here(folder) for folder, _ in attacks)),
        "refuted": [summary.title for summary in summaries if summary.refuted],
    }


def _sample_images(subject: Subject) -> list[tuple[str, str]]:
    """Images of generators, with what they are."""
    images = []
    for run in subject.runs[:_MOST_RUNS]:
        name = "" if subject.alone else f" ({run.folder.path.name})"
        images.append((_data_uri(run.folder.samples), f"what the generator made in the end, a row a class{name}"))
    for paper in subject.papers:
        images.append((_data_uri(paper.folder / RunFolder.samples), "what generators made"))
    return [image for image in images if image[0]]


def _data_uri(path: Path) -> str:
    """A PNG for the page itself; empty where there is none."""
    return f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}" if path.is_file() else ""


def _some(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    text = ", ".join(names[:3])
    return text if len(names) <= 3 else f"{text} and {len(names) - 3} more"
