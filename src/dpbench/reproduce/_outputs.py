"""What a table leaves in `results/`: runs.csv, and from it alone table.md, table.tex, the figure and README.md."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from scipy import stats

from dpbench.files import write_atomically
from dpbench.reports.markdown import markdown_rows
from dpbench.reproduce._pictures import draw_logged, draw_table
from dpbench.reproduce._results import (
    CURVES,
    MONTAGE,
    NOMINAL,
    RUNS,
    Logged,
    best_trials,
    logged_names,
    of_best_trials,
)
from dpbench.reproduce.tables import MEASURES, Table, select_cell, short_name
from dpbench.runs.numbers import ABSENT, epsilon_text
from dpbench.templates import render

_EPSILONS = {"epsilon_microbatch_rdp": "ε nominal (RDP)", "epsilon_rdp": "ε (RDP)", "epsilon_pld": "ε (PLD)"}
_ALWAYS = "epsilon_rdp"  # shown; the others where there is one
_EXAMPLE = "example"
_RELATIONS = {"add_or_remove_one": "added or removed", "replace_one": "replaced"}
_FIGURES = [*_EPSILONS, NOMINAL, "seconds", "value"]


def summary(table: Table, runs: pd.DataFrame) -> pd.DataFrame:
    """Describe each cell in a line.

    Args:
        table: The definition.
        runs: Finished runs, as in runs.csv.

    Returns:
        A frame with row, column, n, mean, sd and half (of the 95 % interval), as they are shown; the largest of each
        epsilon, their unit, whether the cell is private, mean seconds, and the paper's figures (paper, paper_spread).
    """
    # Older runs.csv lack columns that came later, and no run at all has no columns.
    runs = runs.reindex(columns=["row", "column", "unit", *_FIGURES])
    runs = runs.astype(dict.fromkeys(_FIGURES, float))
    cells = runs.assign(value=table.measure.scale * runs["value"]).groupby(["row", "column"])
    lines = pd.MultiIndex.from_product(
        [[row.name for row in table.rows], [column.name for column in table.columns]], names=["row", "column"]
    )
    frame = _spread(cells["value"]).reindex(lines)
    frame["n"] = frame["n"].fillna(0).astype(int)
    # The largest: runs of a cell may have ended at different steps.
    frame[[*_EPSILONS, NOMINAL]] = cells[[*_EPSILONS, NOMINAL]].max()
    frame["unit"] = cells["unit"].first()
    frame["private"] = frame["unit"].notna()
    frame["seconds"] = cells["seconds"].mean()
    printed = [table.printed(row, column) for row, column in lines]
    frame[["paper", "paper_spread"]] = pd.DataFrame(printed, frame.index, dtype=float)
    return frame.reset_index()


def _spread(groups: Any) -> pd.DataFrame:
    """Number, mean, standard deviation, and half the 95 % interval of the mean (Student's t) of each group."""
    frame: pd.DataFrame = groups.agg(n="count", mean="mean", sd="std")
    frame["half"] = frame["sd"] * stats.t.ppf(0.975, frame["n"] - 1) / frame["n"] ** 0.5
    return frame


def differences(table: Table, runs: pd.DataFrame, pair: tuple[str, str]) -> pd.DataFrame:
    """Compare two columns over the seeds that both have.

    Returns:
        A frame with n, mean, sd and half of the paired difference for each row (the index) that has one.
    """
    if runs.empty:
        return pd.DataFrame()
    first, second = pair
    values = runs.pivot_table(index=["row", "seed"], columns="column", values="value").reindex(columns=list(pair))
    gaps = table.measure.scale * (values[first] - values[second]).dropna()
    return _spread(gaps.groupby("row"))


def _private_epsilons(cells: pd.DataFrame, name: str, with_unit: bool) -> str:
    """Epsilons of a row's private cells: one figure, or one for each cell where they differ."""
    texts = []
    for epsilon, unit in cells.loc[cells["private"], [name, "unit"]].itertuples(index=False):
        text = epsilon_text(epsilon)
        texts.append(f"{text} ({unit})" if with_unit else text)
    if len(set(texts)) == 1:
        return texts[0]
    return " / ".join(texts) or ABSENT


def _epsilon_headings(table: Table, lines: pd.DataFrame) -> dict[str, str]:
    """Column of the summary → heading: epsilons that some cell has, with the unit unless that is an example."""
    lines = lines[lines["private"]]
    units = sorted(set(lines["unit"]))
    unit = f", unit: {units[0]}" if len(units) == 1 and units != [_EXAMPLE] else ""
    has = lines[list(_EPSILONS)].notna().any()
    # Where RDP covers nothing, a column of dashes says that PLD does not either.
    has["epsilon_pld"] |= not has[_ALWAYS]
    has[_ALWAYS] = True
    headings = {name: label.replace(")", f"{unit})") for name, label in _EPSILONS.items() if has[name]}
    if table.nominal is not None:
        headings[NOMINAL] = f"ε nominal at {table.nominal.population:,} {(units or ['record'])[0]}s (RDP)"
    return headings


def cells(table: Table, runs: pd.DataFrame) -> list[list[str]]:
    """Lay the table out as text, headings first: for each column ours (mean ± standard deviation, n) and theirs."""
    runs = of_best_trials(table, runs)
    text = table.measure.text
    lines = summary(table, runs)
    by_cell = lines.set_index(["row", "column"])
    printed = lines.dropna(subset="paper")["column"].unique()
    epsilons = _epsilon_headings(table, lines)
    with_unit = lines["unit"].nunique() > 1
    claims = any(row.epsilon is not None for row in table.rows)
    gaps = [differences(table, runs, pair) for pair in table.difference]

    head = [""]
    for column in table.columns:
        head += [f"{column.label}, ours", "n"]
        if column.name in printed:
            head.append(f"{column.label}, paper")
    head += ["paired difference"] if len(gaps) == 1 else _difference_headings(table)
    head += ["ε claimed"] if claims else []
    head += epsilons.values()
    body = []
    for row in table.rows:
        line = [row.label]
        for column in table.columns:
            cell: Any = by_cell.loc[(row.name, column.name)]
            line += [text(cell["mean"], cell["sd"]), str(cell["n"])]
            if column.name in printed:
                line.append(text(cell["paper"], cell["paper_spread"], digits=1))
        for gap in gaps:
            line.append(_difference(table, gap, row.name, "half"))
        if claims:
            line.append(ABSENT if row.epsilon is None else f"{row.epsilon:g}")
        part = lines[lines["row"] == row.name]
        line += [_private_epsilons(part, name, with_unit) for name in epsilons]
        body.append(line)
    return [head, *body]


def _difference_headings(table: Table) -> list[str]:
    labels = {column.name: column.label for column in table.columns}
    return [f"{labels.get(first, first)} − {labels.get(second, second)}" for first, second in table.difference]


def _difference(table: Table, gaps: pd.DataFrame, row: str, spread: str) -> str:
    """The difference of a row, with half its interval ("half"), or with its standard deviation ("sd")."""
    if row not in gaps.index:
        return ABSENT
    gap: Any = gaps.loc[row]
    if spread == "sd":
        return table.measure.text(gap["mean"], gap["sd"], sign="+")
    half = "" if pd.isna(gap["half"]) else f" [± {table.measure.text(gap['half'])}]"
    return table.measure.text(gap["mean"], sign="+") + half


def markdown(table: Table, runs: pd.DataFrame) -> str:
    """Format the table in Markdown."""
    return markdown_rows(cells(table, runs))


_LATEX = str.maketrans(
    {
        **{sign: rf"\{sign}" for sign in "%_&#"},
        "σ": r"$\sigma$",
        "ε": r"$\varepsilon$",
        "α": r"$\alpha$",
        "γ": r"$\gamma$",
        "μ": r"$\mu$",
        "ν": r"$\nu$",
        "τ": r"$\tau$",
        "±": r"$\pm$",
        "≤": r"$\le$",
        "×": r"$\times$",
        "–": "--",
        "−": "$-$",
    }
)


def latex(table: Table, runs: pd.DataFrame) -> str:
    """Format the table in LaTeX (booktabs)."""
    head, *body = [[text.translate(_LATEX) for text in line] for line in cells(table, runs)]
    return render("table.tex", head=head, body=body)


def _other_figures(table: Table, cell: pd.DataFrame) -> list[str]:
    """Means of what stands under `more`, of the runs of a cell."""
    texts = []
    for name, label in table.more.items():
        values = pd.to_numeric(cell[name], errors="coerce")
        if label is not None and name in MEASURES:
            # Under a label of its own a figure is shown as a table shows it.
            measure = MEASURES[name]
            texts.append(measure.text(measure.scale * values.mean(), measure.scale * values.std()))
        else:
            texts.append(ABSENT if values.isna().all() else f"{values.mean():.3g}")
    return texts


def late_runs(table: Table, curves: pd.DataFrame) -> pd.DataFrame:
    """Mean over the last evaluations of each run: columns row, column, seed and value.

    Args:
        table: The definition, which says over how many.
        curves: What the runs logged: columns row, column, seed, step, value.
    """
    run = ["row", "column", "seed"]
    curves = curves.sort_values([*run, "step"])
    steps = curves.groupby(run)[["step", "value"]].diff()
    # The test after step S is of the same weights as the validation that is logged at S − 1.
    is_repeated = (steps["step"] == 1) & (steps["value"] == 0)
    last = curves[~is_repeated].groupby(run).tail(table.last_evaluations)
    return last.groupby(run)["value"].mean().reset_index()


def _late_means(table: Table, curves: pd.DataFrame) -> str:
    """The table again, of means over the last evaluations, where accuracy swings from one to the next."""
    runs = late_runs(table, curves)
    means = summary(table, runs).set_index(["row", "column"])
    gaps = [differences(table, runs, pair) for pair in table.difference]
    head = [""]
    for column in table.columns:
        head += [column.label, "n"]
    lines = [head + _difference_headings(table)]
    for row in table.rows:
        line = [row.label]
        for column in table.columns:
            cell: Any = means.loc[(row.name, column.name)]
            line += [table.measure.text(cell["mean"], cell["sd"]), str(cell["n"])]
        line += [_difference(table, gap, row.name, "sd") for gap in gaps]
        lines.append(line)
    return markdown_rows(lines)


def _choices(table: Table, runs: pd.DataFrame) -> tuple[str, dict[tuple[str, str], str]]:
    """How the settings of each cell were chosen (empty where nothing was), and which."""
    if table.choices:
        name = short_name(table.chosen_from)
        how = f"Chosen in [{name}](../{name.replace('/', '_')}/README.md), on validation data and other seeds"
        return how, {cell: variant.label for cell, variant in table.choices.items()}
    labels = {}
    for cell, (trial, number) in best_trials(table, runs).items():
        labels[cell] = trial.label if number == len(table.trials) else f"{trial.label} (of {number})"
    if not labels:
        return "", {}
    trials = "; ".join(trial.label for trial in table.trials)
    return f"Each cell shows the best of {len(table.trials)} trials ({trials}) by this metric", labels


def _listed(values: pd.Series[Any], form: str = "", separator: str = ", ") -> str:
    """The values that there are, each once, in their order."""
    return separator.join(format(value, form) for value in sorted(values.dropna().unique()))


def _units(runs: pd.DataFrame) -> str:
    """What ε protects: "one example", or "one user of 539 (unit: user), with all examples,"."""
    texts = []
    for unit, part in runs.dropna(subset="unit").groupby("unit"):
        if unit == _EXAMPLE:
            texts.append("one example")
            continue
        populations = _listed(part["population"].astype(float), ",.0f", " or ") if "population" in part else ""
        texts.append(f"one {unit}{' of ' * bool(populations)}{populations} (unit: {unit}), with all examples,")
    return " or ".join(texts)


def _page(table: Table, runs: pd.DataFrame, pictures: Sequence[Path], logged: Logged) -> str:
    best = of_best_trials(table, runs)
    how, choices = _choices(table, runs)
    return render(
        "table.md",
        table=table,
        cells=markdown(table, runs),
        relations=_listed(best["neighbouring_relation"].replace(_RELATIONS), separator=" or "),
        deltas=_listed(best["delta"].astype(float), "g"),
        units=_units(best),
        by_microbatch=best["epsilon_microbatch_rdp"].notna().any(),
        other_figures=lambda row, column: _other_figures(table, select_cell(best, row, column)),
        late=_late_means(table, logged[CURVES]) if table.last_evaluations and CURVES in logged else "",
        chosen_how=how,
        choices=choices,
        pictures=pictures,
        provenance={name: _listed(runs[name].astype(object)) for name in ("commit", "cpu", "gpu", "torch")},
        hours=runs["seconds"].sum() / 3600,
        threads=_listed(runs["threads"].astype(str)),
    )


def write_outputs(table: Table, runs: pd.DataFrame, logged: Logged, folder: Path) -> None:
    """Write everything into a results folder; pictures of what is no longer there are removed.

    Args:
        table: The whole definition.
        runs: Finished runs, as in runs.csv.
        logged: What they logged on the way, by the name of its file.
        folder: Made if need be.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # First: everything else can be written again from it.
    write_atomically(folder / RUNS, runs.to_csv(index=False))
    write_atomically(folder / "table.md", markdown(table, runs) + "\n")
    write_atomically(folder / "table.tex", latex(table, runs))
    best = of_best_trials(table, runs)
    draw_table(table, best, summary(table, best), folder)
    pictures = write_logged(table, logged, folder)
    if (folder / MONTAGE).is_file():
        pictures.append(folder / MONTAGE)
    write_atomically(folder / "README.md", _page(table, runs, pictures, logged))


def write_logged(table: Table, logged: Logged, folder: Path) -> list[Path]:
    """Write a CSV and a PNG for each; what is no longer there is removed.

    Returns:
        The pictures.
    """
    pictures = []
    for name in logged_names(table):
        data = folder / f"{name}.csv"
        picture = folder / f"{name}.png"
        if name in logged and len(logged[name]):
            write_atomically(data, logged[name].to_csv(index=False, float_format="%.6g"))
            draw_logged(table, name, logged[name], picture)
            pictures.append(picture)
        else:
            data.unlink(missing_ok=True)
            picture.unlink(missing_ok=True)
    return pictures
