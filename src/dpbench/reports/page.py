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
from dpbench.reports.figures import (
    PAGE_COLORS,
    PAGE_PANEL,
    Picture,
    free_place,
    head_of,
    mark_of,
    new_figure,
    page_picture,
    svg,
)
from dpbench.reports.groups import GroupTable, group_by
from dpbench.reports.markdown import markdown_cells
from dpbench.reports.plots import X_LABELS, Axis, audit_figure, curve_names, draw_panel, has_epsilon
from dpbench.reports.roc import page_legend, page_pictures
from dpbench.reports.run_rows import (
    CELLS,
    NOT_FINISHED,
    RunRow,
    cells_of,
    flat,
    keys_of_any,
    require_folder,
    row_of,
    with_curves,
)
from dpbench.reports.run_table import EPSILON, RunTable
from dpbench.runs.command import words_of
from dpbench.runs.folder import RunFolder, finished_runs_below, unfinished_runs_below
from dpbench.runs.ledgers import lost_ledger, read_run_ledger
from dpbench.runs.numbers import (
    ABSENT,
    epsilon_text,
    epsilons_text,
    membership_text,
    noise_text,
    range_text,
    uncovered_text,
)
from dpbench.runs.readers import Record, read_csv, read_json, read_metrics, steps_logged
from dpbench.runs.record import CONFIDENCE, privacy_of, read_result
from dpbench.templates import render

BOUND = "privacy/bound/"
_TITLES = {BOUND: "clipping bound", EPSILON: "ε spent (RDP)"}
_MOST_RUNS = 24  # whose settings, facts and audits are shown one by one
_MOST_QUERIES = 40
_MOST_PANELS = 12  # of bounds
_MOST_POINTS = 400  # of a curve
_SLOW_POINTS = 6  # each a second of the PLD accountant
_USUAL = Path("report.html")
_MARK = '<meta name="generator" content="dpbench report'
_RESTORE = "restore {path}, or make it again (dpbench reproduce)"
_NO_PRIVACY_YET: dict[str, Any] = {"epsilon": {}, "delta": None, "unit": None, "neighbouring_relation": None}
_OF_PAPERS = ("commit", "code_hash", "date", "cpu", "gpu", "threads", "kernels", "python", "torch", "dpbench")


@dataclass(frozen=True)
class PageRun:
    """A run on the page.

    Attributes:
        folder: Its own.
        record: As result.json holds it; of an unfinished run as much of it as is known.
        finished: Whether it has a result.
        lost: What is wrong where it was private and its ledger is gone.
    """

    folder: RunFolder
    record: dict[str, Any]
    finished: bool
    lost: str | None

    @property
    def privacy(self) -> dict[str, Any]:
        """What it guarantees."""
        privacy: dict[str, Any] = self.record["privacy"]
        return privacy

    @property
    def config(self) -> dict[str, Any]:
        """Its settings."""
        config: dict[str, Any] = self.record["config"]
        return config

    @property
    def private(self) -> bool:
        """Whether it claims an epsilon."""
        return self.privacy.get("delta") is not None

    @property
    def seeded(self) -> bool:
        """Whether its noise came from a seed."""
        strategy = self.config.get("strategy") or {}
        return self.private and not strategy.get("secure")

    @property
    def row(self) -> RunRow:
        """As a row of a table, with its curves."""
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
    def users(self) -> tuple[tuple[str, str], ...]:
        """What a run by users does with them; nothing where its unit is an example."""
        data = self.config.get("data") or {}
        unit = self.privacy.get("unit") or data.get("unit")
        if unit in (None, "example"):
            return ()
        rows = [("unit of privacy", str(unit))]
        if self.privacy.get("population") is not None:
            rows.append((f"{unit}s in training", f"{self.privacy['population']:,}"))
        size = self.privacy.get("expected_batch_size")
        if isinstance(size, int | float):
            rows.append((f"expected {unit}s per batch", f"{size:.6g}"))
        chosen = {key: data[key] for key in ("val_users", "options") if key in data}
        for key, value in flat({"data": chosen, "records": self.config.get("records")}).items():
            if value is not None and value != {}:
                rows.append((key.removesuffix("._target_"), str(value).removeprefix("dpbench.")))
        return tuple(rows)

    @property
    def command(self) -> str:
        """The words of the command that made it; empty where they are unknown."""
        return shlex.join(words_of(self.folder))


@dataclass(frozen=True)
class Paper:
    """A reproduced table.

    Attributes:
        folder: Of its results.
        runs: A line for each run.
        cells: Means over seeds.
    """

    folder: Path
    runs: pd.DataFrame
    cells: list[RunRow]

    @property
    def guarantee(self) -> list[str]:
        """What its runs guarantee, each by itself."""
        values = self._values("unit", "delta", "neighbouring_relation", "population")
        return [f"{name} {text}" for name, text in values]

    @property
    def provenance(self) -> list[tuple[str, str]]:
        """Where its figures come from."""
        return [("results", str(self.folder)), ("runs", str(len(self.runs))), *self._values(*_OF_PAPERS)]

    def _values(self, *columns: str) -> list[tuple[str, str]]:
        """Columns that have any value, with all of their values."""
        values = []
        for name in columns:
            if name in self.runs and self.runs[name].notna().any():
                several = self.runs[name].dropna().astype(str).unique()
                values.append((name.replace("_", " "), ", ".join(several)))
        return values

    @property
    def rows(self) -> list[list[str]]:
        """The table as its own page has it, else a comparison of its cells."""
        page = self.folder / "table.md"
        if not page.is_file():
            return RunTable(tuple(self.cells)).compared_rows()
        return markdown_cells(page.read_text(encoding="utf-8", errors="replace"))


@dataclass(frozen=True)
class Subject:
    """All that a page shows.

    Attributes:
        sources: As they were named.
        runs: Finished ones first.
        papers: Reproduced tables.
    """

    sources: tuple[Path, ...]
    runs: tuple[PageRun, ...]
    papers: tuple[Paper, ...]

    @cached_property
    def each(self) -> RunTable:
        """Every run by itself."""
        return RunTable(tuple(run.row for run in self.runs)).told_apart()

    @cached_property
    def groups(self) -> RunTable:
        """What is compared: means over seeds of runs, and cells of papers' tables."""
        cells = [cell for paper in self.papers for cell in paper.cells]
        return RunTable((*self.each.over_seeds().rows, *cells))

    @property
    def alone(self) -> PageRun | None:
        """The run, where it is the only one."""
        return self.runs[0] if len(self.runs) == 1 and not self.papers else None

    @cached_property
    def cost(self) -> SweepCost | None:
        """What all runs of the page cost together; None of a single one."""
        if self.alone is not None or not self.runs:
            return None
        papers = {paper.folder for paper in self.papers}
        return cost_of_sweep([source for source in self.sources if source not in papers])

    @property
    def title(self) -> str:
        """A run's name; of several runs their data, and what was swept."""
        if self.alone is not None:
            return str(self.alone.config["run"]["name"])
        data = []
        for run in self.runs:
            name = (run.config.get("data") or {}).get("name")
            data.append(str(name or run.config["run"]["name"]))
        swept = [key.removesuffix("._target_") for key in self.each.distinguishing()]
        if not data or not swept:
            return _some(self.names)
        return f"{_some(list(dict.fromkeys(data)))}: {' × '.join(swept)}"

    @property
    def subtitle(self) -> str:
        """Of what kind a run is; of several runs where they lie, and how many they are."""
        run = self.alone
        parts = []
        if run is None:
            parts.append(_some(self.names))
            if self.runs:
                parts.append(f"{len(self.runs)} runs")
            for paper in self.papers:
                parts.append(f"{len(paper.runs)} runs of a reproduced table")
            return " · ".join(parts)
        for part in ("data", "model", "strategy"):
            options = run.config.get(part)
            if isinstance(options, dict):
                name = options.get("name") or options.get("_target_") or ""
                parts.append(str(name).rpartition(".")[2])
        parts.append(f"seed {run.record['seed']}")
        return " · ".join(filter(None, parts))

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
        accountants: Whose ε over the steps of a run is drawn.
        force: Replace a file that is no such page.

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
    facts = _facts(read_subject(sources), accountants)
    text = render("report.html", version=__version__, mark=mark, **facts)
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
    """Of a run under way, interrupted or failed: its partial result, or what its other files tell."""
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
    """What the template names.

    Args:
        subject: What was read.
        accountants: Whose ε over the steps of a run is drawn.
    """
    alone = subject.alone
    groups = subject.groups
    rows = groups.rows
    labels = groups.labels()
    logged = curve_names(subject.each.rows)
    held_out = any(name.startswith("val/") for run in subject.runs for name in run.record["metrics"])
    curve_pictures = []
    for place, name in enumerate(curve_names(rows)):
        curve_pictures.append(_picture(f"curve{place}", rows, name))
    bound_pictures, bound_legend, bounds_left_out = _bounds(rows, labels)
    differing = [["", *labels]]
    for key in groups.differing(stated=True):
        differing.append([key, *(str(row.settings.get(key, ABSENT)) for row in rows)])
    results = []
    if alone is not None:
        results = [(name, text) for name, text in subject.each.figures() if text != ABSENT]
    spent = pd.Series([row.metrics.get("privacy/epsilon_rdp") for row in rows], dtype=float)
    spent_range = ""
    if spent.notna().any():
        ends = dict.fromkeys([epsilon_text(spent.min()), epsilon_text(spent.max())])
        spent_range = " to ".join(ends)
    return {
        "title": subject.title,
        "subtitle": subject.subtitle,
        "runs": subject.runs,
        "papers": subject.papers,
        "alone": alone,
        "cost": subject.cost,
        "cost_of_choosing": [] if subject.cost is None else subject.cost.lines(held_out),
        "any_nonprivate_curve": any(name.startswith("nonprivate/") for name in logged),
        "any_mean": any(row.n > 1 and not row.curves.empty for row in rows),
        "compared": rows,
        "spent_range": spent_range,
        "results_of_run": results,
        "results_of_groups": _groups_of(subject),
        "legend": _legend(labels),
        "curve_pictures": curve_pictures,
        "spent_picture": _spent_picture(alone, accountants),
        "bound_pictures": bound_pictures,
        "bound_legend": bound_legend,
        "bounds_left_out": bounds_left_out,
        "ledger_sums": _ledger_sums(alone),
        "most_queries": _MOST_QUERIES,
        "audits": _audits(subject),
        "attack": _attack(subject),
        "sample_images": _sample_images(subject),
        "users_of_runs": list(dict.fromkeys(run.users for run in subject.runs)),
        "diagnostics_image": _data_uri(alone.folder.diagnostics) if alone is not None else "",
        "differing_settings": differing,
        "most_runs": _MOST_RUNS,
        "epsilon_of": epsilon_text,
        "epsilons_of": epsilons_text,
        "range_of": range_text,
        "noise_of": noise_text,
        "uncovered_of": uncovered_text,
        "membership_of": membership_text,
        "some": _some,
    }


def _groups_of(subject: Subject) -> GroupTable | None:
    """Means of finished runs by the settings that distinguish them; None of one run."""
    finished = [row for row in subject.each.rows if row.note != NOT_FINISHED]
    if subject.alone is not None or not finished:
        return None
    table = RunTable(tuple(finished))
    keys = [key.removesuffix("._target_") for key in table.distinguishing() if key != "seed"]
    return group_by(table, [key for key in keys if table.knows(key)])


def _spent_picture(run: PageRun | None, accountants: Sequence[str]) -> list[Picture]:
    if run is None or not run.private or not run.folder.ledger.is_file():
        return []
    ledger = read_run_ledger(run.folder.ledger)
    try:
        figure = epsilon_figure({"run": ledger}, run.privacy["delta"], accountants, slow_points=_SLOW_POINTS)
    except (ConfigurationError, IndexError, ValueError):  # no release yet, or lots that none of them covers
        return []
    return [page_picture("ε by accountant, over steps and over orders", figure, "spent")]


def _ledger_sums(run: PageRun | None) -> list[list[str]]:
    """What the ledger of a run says of each of its sums, the headings first; nothing of several runs."""
    if run is None or not run.private or not run.folder.ledger.is_file():
        return []
    releases = read_run_ledger(run.folder.ledger).releases
    if not releases:
        return []
    last = {query.name: query for query in releases[-1][1].queries}
    rows = [["sum", "sensitivity, first release", "last release", "noise (sd), last release"]]
    for query in releases[0][1].queries:
        end = last.get(query.name, query)
        rows.append([query.name, f"{query.sensitivity:.5g}", f"{end.sensitivity:.5g}", f"{end.noise_std:.5g}"])
    return rows


def _audits(subject: Subject) -> list[dict[str, Any]]:
    """What is shown of the audits of runs; of a single run all of it."""
    audits = []
    for run in subject.runs[:_MOST_RUNS]:
        if run.privacy.get("audit") is None:
            continue
        from dpbench.reports.audit import audit_run, outline  # brings a second of imports

        facts: dict[str, Any] = {"name": run.folder.path.name, "rows": list(outline(run.privacy)), "picture": None}
        if subject.alone is not None:
            try:
                report = audit_run(run.folder.path, run.privacy["audit"].get("confidence") or CONFIDENCE)
                title = "scores of canaries, and their ROC curve under the one that the ledger allows"
                facts["picture"] = page_picture(title, audit_figure(report), "audit")
                facts["text"] = report.text
            except DPBenchError as error:
                facts["text"] = str(error)
        audits.append(facts)
    return audits


def _attack(subject: Subject) -> dict[str, Any] | None:
    """What `dpbench attack` measured on these runs, among others of their settings; None where it left nothing."""
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
        return {"words": [str(error)]}
    if not attacks:
        return None
    summaries = [summary for _, summary in attacks]
    panels = attacked.roc_panels(summaries)
    return {
        "words": [summary.sentences for summary in summaries] if subject.alone is not None else [],
        "rows": attacked.overview_rows(summaries),
        "pictures": page_pictures(panels, "attack"),
        "legend": page_legend(panels),
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


# Drawings, in the colors of the page


def _bounds(rows: Sequence[RunRow], labels: Sequence[str]) -> tuple[list[Picture], list[tuple[int, int, str]], int]:
    """Clipping bounds: of one run all groups in a panel, of several runs a panel for each group.

    Returns:
        Drawings, their legend, and how many groups are in none of them.
    """
    columns = keys_of_any(map(str, row.curves) for row in rows)
    groups = [name for name in columns if name.startswith(BOUND)]
    if not groups:
        return [], [], 0
    if len(rows) > 1:
        pictures = []
        for place, name in enumerate(groups[:_MOST_PANELS]):
            pictures.append(_picture(f"bound{place}", rows, name))
        return pictures, _legend(labels), len(groups) - len(pictures)
    curves = rows[0].curves
    each = []
    for name in groups:  # a row for each, so that a panel for several runs shows them
        unlike = [group for group in groups if group != name]
        curve = curves.drop(columns=unlike).rename(columns={name: BOUND})
        each.append(replace(rows[0], curves=curve))
    return [_picture("bounds", each, BOUND)], _legend([name.removeprefix(BOUND) for name in groups]), 0


def _legend(labels: Sequence[str]) -> list[tuple[int, int, str]]:
    """Color, dashes and name of each line; nothing for a single one."""
    if len(labels) < 2:
        return []
    return [(number % 10, number // 10 % 4, label) for number, label in enumerate(labels)]


def _picture(place: str, rows: Sequence[RunRow], name: str) -> Picture:
    return Picture(
        title=_TITLES.get(name, name.removeprefix("privacy/")),
        svg=_panel(f"{place}s", rows, name, "step"),
        by_epsilon=_panel(f"{place}e", rows, name, "epsilon") if has_epsilon(rows, name) else "",
        note="not private" if name.startswith("nonprivate/") else "",
    )


def _panel(place: str, rows: Sequence[RunRow], name: str, axis: Axis) -> str:
    figure = new_figure(*PAGE_PANEL)
    axes = figure.subplots()
    draw_panel(axes, rows, name, axis, _MOST_POINTS)
    axes.set_xlabel(X_LABELS[axis])
    axes.spines[["top", "right"]].set_visible(False)
    if name.startswith(BOUND):
        axes.set_yscale("log")
    return svg(figure, place, PAGE_COLORS)


# Words


def _some(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    text = ", ".join(names[:3])
    return text if len(names) <= 3 else f"{text} and {len(names) - 3} more"
