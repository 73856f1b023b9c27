"""The sections of a page, from what its runs left."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pandas as pd

from dpbench.errors import ConfigurationError, DPBenchError
from dpbench.reports.account_plot import epsilon_figure
from dpbench.reports.compare import compared_rows, curve_names, metric_rows
from dpbench.reports.compared import EPSILON, labels, stated_differences, telling_settings
from dpbench.reports.end_of_sweep import cost_of_choosing
from dpbench.reports.groups import group
from dpbench.reports.page import pictures
from dpbench.reports.page.blocks import Block, Facts, Fold, Grid, Page, Pictures, Preformatted, Section, Words
from dpbench.reports.page.provenance import provenance, settings
from dpbench.reports.page.subject import OneRun, Subject, Table
from dpbench.reports.page.words import by_users, doubts, epsilon_words, guarantee, not_covered, shown
from dpbench.runs.folder import RunFolder
from dpbench.runs.ledgers import read_run_ledger

_MOST_RUNS = 24  # whose settings and audits are shown one by one
_MOST_QUERIES = 40
_FEW = 3
_SLOW_POINTS = 6  # each a second of the PLD accountant


def page_of(subject: Subject, accountants: Sequence[str]) -> Page:
    """The page of some runs.

    Args:
        subject: What was read.
        accountants: Whose ε over the steps of a run is drawn.
    """
    alone = subject.alone
    found = [
        Section("guarantee", "What is guaranteed", _guarantee(subject)),
        Section("results", "Results", _results(subject)),
        Section("curves", "Curves", _curves(subject)),
        Section("epsilon", "Privacy spent", _epsilon(subject, accountants)),
        Section("bounds", "Clipping bounds", _bounds(subject)),
        Section("audit", "Audit", _audit(subject)),
        Section("samples", "Samples", _samples(subject)),
        Section("users", "By user", _users(subject)),
        Section("diagnostics", "Diagnostics", _diagnostics(alone) if alone is not None else []),
        Section("settings", "Settings", _settings(subject)),
        Section("provenance", "Provenance", provenance(subject)),
    ]
    told = [line for run in subject.runs for line in (doubts(run) if alone else [_of(run, d) for d in doubts(run)])]
    title, subtitle = _titles(subject)
    sections = [section for section in found if section.blocks]
    axes = any(
        picture.by_epsilon
        for section in sections
        for block in section.blocks
        if isinstance(block, Pictures)
        for picture in block.shown
    )
    return Page(title, subtitle, told, _tiles(subject), sections, axes)


def _of(run: OneRun, words: str) -> str:
    return f"{run.folder.path.name}: {words}"


def _titles(subject: Subject) -> tuple[str, str]:
    """The name of what the page is about, and of what kind it is."""
    run = subject.alone
    if run is not None:
        chosen = [run.config.get(part) for part in ("data", "model", "strategy")]
        kinds = [str(one.get("name") or one.get("_target_") or "") for one in chosen if isinstance(one, dict)]
        kinds = [kind.rpartition(".")[2] for kind in kinds if kind]
        return str(run.config["run"]["name"]), " · ".join([*kinds, f"seed {run.record['seed']}"])
    names = _some([source.resolve().name for source in subject.sources])
    parts = [f"{len(subject.runs)} runs"] if subject.runs else []
    parts += [f"{len(table.runs)} runs of a reproduced table" for table in subject.tables]
    return names, " · ".join(parts)


def _tiles(subject: Subject) -> list[tuple[str, str, str]]:
    run = subject.alone
    if run is None:
        settled = [one for one in subject.groups if one.n > 1]
        finished = sum(one.finished for one in subject.runs) + sum(len(table.runs) for table in subject.tables)
        tiles = [("runs", str(finished), "finished")]
        tiles += [("compared", str(len(subject.groups)), "means over seeds" if settled else "")]
        figures = [one.metrics.get("privacy/epsilon_rdp") for one in subject.groups]
        known = [epsilon for epsilon in figures if epsilon is not None and not math.isnan(epsilon)]
        if known:
            ends = list(dict.fromkeys([shown(min(known)), shown(max(known))]))
            tiles.append(("ε (RDP) of a run", " to ".join(ends), "the more runs, the more in total"))
        return tiles
    measured = metric_rows([one for one in subject.each if one.metrics])
    tiles = [(row[0], row[1], "") for row in measured if row[0].startswith("test/") and row[1] != "–"][:3]
    privacy = run.privacy
    if run.private:
        at = f"δ = {privacy['delta']:g}, unit: {privacy['unit']}"
        tiles += [(f"ε ({name.upper()})", shown(e), at) for name, e in privacy["epsilon"].items() if e is not None]
    elif run.finished:
        tiles.append(("ε", "∞", "trained without privacy"))
    return [*tiles, ("steps", f"{run.record['steps']:,}", "" if run.finished else "so far")]


def _guarantee(subject: Subject) -> list[Block]:
    """In words; where runs differ, of each kind."""
    kinds: dict[tuple[str, ...], list[str]] = {}
    for run in subject.runs:
        kinds.setdefault(tuple(guarantee(run)), []).append(run.folder.path.name)
    blocks: list[Block] = []
    if len(kinds) == 1:
        blocks = [Words(lines) for lines in kinds]
    else:
        blocks = [Fold(_some(names), [Words(lines)], open=len(kinds) <= _FEW) for lines, names in kinds.items()]
    blocks += [Words(_of_table(table)) for table in subject.tables]
    left_out = not_covered(subject.runs, curve_names(subject.each))
    return blocks + ([Words(["What no ε here covers:"]), Words(left_out, listed=True)] if left_out else [])


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _of_table(table: Table) -> list[str]:
    """What the runs of a table guarantee, each by itself."""
    facts = []
    for name in ("unit", "delta", "neighbouring_relation", "population"):
        values = pd.Series(table.runs.get(name), dtype=object).dropna().astype(str).unique()
        facts += [f"{name.replace('_', ' ')} {', '.join(values)}"] if len(values) else []
    if not facts:
        return ["The runs of this table trained without privacy, or its file does not tell."]
    return [f"Each ε is that of one run by itself: {'; '.join(facts)}. Together they cost more."]


def _results(subject: Subject) -> list[Block]:
    if subject.alone is not None:
        figures = [(row[0], row[1]) for row in metric_rows(subject.each) if row[0] != EPSILON and row[1] != "–"]
        return [Facts(figures)] if figures else []
    blocks: list[Block] = []
    records = {run.folder: run.record for run in subject.runs if run.finished}
    if records:
        keys: list[str] = []
        for key in telling_settings([one for one in subject.each if not (one.code or "").startswith("not finished")]):
            with suppress(ConfigurationError):  # no setting, such as the unit
                keys += group(records, [key.removesuffix("._target_")]).keys if key != "seed" else []
        groups = group(records, keys)
        blocks += [Grid(groups.rows, max(1, len(groups.keys))), Words(groups.notes)]
    for table in subject.tables:
        page = table.folder / "table.md"
        rows = _markdown_rows(page) if page.is_file() else compared_rows(table.cells)
        blocks.append(Grid(rows))
    return blocks


def _markdown_rows(page: Path) -> list[list[str]]:
    """Cells of the first table of a page."""
    rows: list[list[str]] = []
    for line in page.read_text(encoding="utf-8", errors="replace").splitlines():
        if line.startswith("|"):
            cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
            rows += [] if all(set(cell) <= set(":- ") and cell for cell in cells) else [cells]
        elif rows:
            break
    return rows


def _curves(subject: Subject) -> list[Block]:
    drawn = pictures.curves(subject.groups, labels(subject.groups))
    if drawn is None:
        return [Words(["No run has logged any."])] if subject.runs else []
    blocks: list[Block] = [drawn]
    if any(one.n > 1 and not one.curves.empty for one in subject.groups):
        blocks.append(Words(["Mean over seeds, with a band of one standard deviation."]))
    return blocks


def _epsilon(subject: Subject, accountants: Sequence[str]) -> list[Block]:
    run = subject.alone
    if run is None:
        held_out = any(name.startswith("val/") for one in subject.runs for name in one.record["metrics"])
        folders = subject.sources if subject.runs else ()
        return [Words(lines) for folder in folders if (lines := cost_of_choosing(folder, held_out))]
    if not run.private:
        return []
    blocks: list[Block] = []
    if run.folder.ledger.is_file():
        ledger = read_run_ledger(run.folder.ledger)
        try:
            figure = epsilon_figure({"run": ledger}, run.privacy["delta"], accountants, slow_points=_SLOW_POINTS)
            blocks.append(pictures.drawing("ε by accountant, over steps and over orders", figure, "spent"))
        except (ConfigurationError, IndexError, ValueError):  # no release yet, or lots that none of them covers
            blocks.append(
                Words(["There is nothing to draw: no accountant covers these lots, or nothing was released."])
            )
    return [*blocks, Words([f"In the end: ε = {epsilon_words(run.privacy['epsilon'])}."])]


def _bounds(subject: Subject) -> list[Block]:
    drawn, left = pictures.bounds(subject.groups, labels(subject.groups))
    blocks: list[Block] = [drawn] if drawn is not None else []
    blocks += [Words([f"And {left} more groups."])] if left else []
    run = subject.alone
    if run is None or not (run.private and run.folder.ledger.is_file()):
        return blocks
    releases = [release.queries for _, release in read_run_ledger(run.folder.ledger).releases]
    if not releases:
        return blocks
    first, last = releases[0], releases[-1]
    rows = [["sum", "sensitivity, first release", "last release", "noise (sd), last release"]]
    ended = {query.name: query for query in last}
    for query in first[:_MOST_QUERIES]:
        end = ended.get(query.name, query)
        rows.append([query.name, *(f"{value:.5g}" for value in (query.sensitivity, end.sensitivity, end.noise_std))])
    more = [Words([f"And {len(first) - _MOST_QUERIES} more sums."])] if len(first) > _MOST_QUERIES else []
    return [*blocks, Fold("What the ledger says of each sum", [Grid(rows), *more], open=len(first) <= _FEW)]


def _audit(subject: Subject) -> list[Block]:
    audited = [run for run in subject.runs if run.privacy.get("audit") is not None]
    if not audited:
        return []
    from dpbench.reports.audit import audit_run, outline  # brings a second of imports

    if subject.alone is None:
        shown = audited[:_MOST_RUNS]
        return [Fold(run.folder.path.name, [Facts(list(outline(run.privacy)))]) for run in shown]
    from dpbench.reports.audit_plot import audit_figure

    (run,) = audited
    facts = Facts(list(outline(run.privacy)))
    try:
        report = audit_run(run.folder.path, run.privacy["audit"].get("confidence") or 0.95)
    except DPBenchError as error:
        return [facts, Words([str(error)])]
    figure = audit_figure(report)
    words = "scores of canaries, and their ROC curve under the one that the ledger allows"
    details = Fold("All bounds and checks", [Preformatted(report.text)])
    facts = Facts([*facts.rows, ("accuracy", "that of a model that learned from canaries too")])
    return [facts, pictures.drawing(words, figure, "audit"), details]


def _samples(subject: Subject) -> list[Block]:
    blocks: list[Block] = []
    for run in subject.runs[:_MOST_RUNS]:
        if run.folder.samples.is_file():
            name = "" if subject.alone else f" ({run.folder.path.name})"
            blocks.append(
                pictures.image(run.folder.samples, f"what the generator made in the end, a row a class{name}")
            )
    for table in subject.tables:
        if (table.folder / RunFolder.samples).is_file():
            blocks.append(pictures.image(table.folder / RunFolder.samples, "what generators made"))
    if blocks:
        blocks.append(Words(["Samples are post-processing of what was released: they cost nothing more."]))
    return blocks


def _users(subject: Subject) -> list[Block]:
    kinds = dict.fromkeys(tuple(by_users(run)) for run in subject.runs)
    return [Facts(rows) for rows in kinds if rows]


def _diagnostics(run: OneRun) -> list[Block]:
    path = run.folder.diagnostics
    note = "computed on training records without noise: not private"
    return [pictures.image(path, note)] if path.is_file() else []


def _settings(subject: Subject) -> list[Block]:
    blocks: list[Block] = []
    if subject.alone is None:
        differing = stated_differences(subject.groups)
        rows = [["", *labels(subject.groups)]]
        rows += [[key, *(str(run.settings.get(key, "–")) for run in subject.groups)] for key in differing]
        blocks.append(Grid(rows, text=0) if len(rows) > 1 else Words(["These runs differ by their seed only."]))
    for run in subject.runs[:_MOST_RUNS]:
        title = "All settings" if subject.alone else f"All settings of {run.folder.path.name}"
        blocks.append(Fold(title, [Grid(settings(run), text=2)]))
    return blocks
