"""What a table leaves in `results/`: runs.csv, and from it alone table.md, table.tex, the figure and README.md."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import pandas as pd
from scipy import stats

from dpbench.code import code_hash
from dpbench.errors import ConfigurationError
from dpbench.files import write_atomically
from dpbench.privacy.accounting.composition import ledger_epsilon
from dpbench.reports.markdown import markdown_rows
from dpbench.reports.nominal import at_population
from dpbench.reproduce.choices import RUNS, TRIAL, best_trials, of_best_trials, trials_of
from dpbench.reproduce.jobs import Job
from dpbench.reproduce.late import late_means
from dpbench.reproduce.logged import CURVES, Logged, write_logged
from dpbench.reproduce.measures import MEASURES
from dpbench.reproduce.pictures import draw_table
from dpbench.reproduce.tables import ONLY, Table, select_cell, short_name
from dpbench.runs.ledgers import read_run_ledger
from dpbench.runs.readers import read_csv

MONTAGE, STRIPS = "samples.png", "samples"
"""The picture of what generators make, and the folder with the images of each cell, of which it is put together."""
_DASH = "–"
_EPSILONS = {"epsilon_microbatch_rdp": "ε nominal (RDP)", "epsilon_rdp": "ε (RDP)", "epsilon_pld": "ε (PLD)"}
_AT_POPULATION = "epsilon_nominal_rdp"
_ALWAYS = "epsilon_rdp"  # shown; the others where there is one
_EXAMPLE = "example"
_LARGE = 1e5  # epsilon: shown as a power of ten
_RELATIONS = {"add_or_remove_one": "added or removed", "replace_one": "replaced"}


def finished_runs(table: Table, jobs: Sequence[Job]) -> pd.DataFrame:
    """One line for each finished run, with its provenance.

    Args:
        table: The definition.
        jobs: Its runs, finished or not.
    """
    lines = []
    for job in jobs:
        record = job.result()
        if record is None or record["config_hash"] != job.config_hash:
            continue
        privacy, hardware = record["privacy"], record["hardware"]
        lines.append(
            {
                "row": job.row,
                "column": job.column,
                **({TRIAL: job.trial} if table.trials != (ONLY,) else {}),
                "seed": job.seed,
                "metric": table.metric,
                "value": record["metrics"].get(table.metric),
                **{name: record["metrics"].get(name) for name in table.more},
                "epsilon_rdp": privacy["epsilon"].get("rdp"),
                "epsilon_pld": privacy["epsilon"].get("pld"),
                "epsilon_microbatch_rdp": privacy.get("epsilon_microbatch", {}).get("rdp"),
                **_at_population(table, job),
                "delta": privacy["delta"],
                "unit": privacy["unit"],
                "population": privacy.get("population"),
                "neighbouring_relation": privacy["neighbouring_relation"],
                "steps": record["steps"],
                "seconds": record["seconds"],
                "config_hash": record["config_hash"],
                "code_hash": record["code_hash"],
                "commit": record["commit"],
                "date": date.fromtimestamp(job.run.result.stat().st_mtime).isoformat(),
                "cpu": hardware["cpu"],
                "threads": hardware["threads"],
                "gpu": hardware["gpu"],
                "kernels": hardware.get("kernels"),
                **{name.replace("-", "_"): record["versions"].get(name) for name in ("python", "torch", "dpbench")},
                "words": " ".join(job.words),
            }
        )
    return pd.DataFrame(lines)


def _at_population(table: Table, job: Job) -> dict[str, float | None]:
    """What the run would have cost at the table's nominal population."""
    if table.nominal is None:
        return {}
    if not job.run.ledger.is_file():
        return {_AT_POPULATION: None}
    ledger = at_population(read_run_ledger(job.run.ledger), table.nominal.population, table.nominal.lot_size)
    return {_AT_POPULATION: ledger_epsilon(ledger, table.nominal.delta, "rdp")}


def conflicting_results(folder: Path, runs: pd.DataFrame, any_code: bool = False) -> str | None:
    """What a results folder holds that new runs would wipe out: runs of other code, or other runs; None: nothing.

    Args:
        folder: Of the table's results.
        runs: What is to be written there.
        any_code: Whether the runs there may be of other code, and are only looked for among the new ones.
    """
    if not (folder / RUNS).is_file():
        return None
    old = read_csv(folder / RUNS, [], "restore {path}, or move it away", ("*",))
    if missing := {"code_hash", "config_hash", "commit"} - set(old):
        return f"a {RUNS} without {', '.join(sorted(missing))}"
    if not any_code and not set(old["code_hash"]) <= {code_hash()}:
        return f"runs of other code ({', '.join(sorted(set(old['commit'].astype(str))))})"
    lost = len(set(old["config_hash"]) - set(runs["config_hash"]))
    return (
        f"{lost} run(s) that are not among these (of other settings or seeds, or from another --runs)" if lost else None
    )


def refuse_other_words(table: Table, runs: pd.DataFrame) -> None:
    """Raise ConfigurationError where runs do not hold what the definition shows now, by the words that it has now."""
    if lacking := {table.metric} - set(runs["metric"]) or set(table.more) - set(runs):
        raise ConfigurationError(
            f"{table.folder}/{RUNS} does not hold {', '.join(sorted(lacking))}, which {table.name} shows now: restore "
            f"the definition, or write it again (dpbench reproduce {table.command} --replace)."
        )
    words = {
        (row.name, column.name, trial.name): table.words_of(row, column, trial)
        for row in table.rows
        for column in table.columns
        for trial in table.trials
    }
    for run, trial in zip(runs.to_dict("records"), trials_of(runs), strict=True):
        cell = str(run["row"]), str(run["column"]), trial
        if cell not in words:
            raise ConfigurationError(
                f"{table.folder}/{RUNS} has runs of ({_named(cell)}), which {table.name} does not have."
            )
        if not str(run["words"]).startswith(" ".join((*words[cell], "seed="))):
            raise ConfigurationError(
                f"{table.folder}/{RUNS}: {_named(cell)} was run with other words than {table.name} has now: restore "
                f"the definition, or run it again (dpbench reproduce {table.command} --replace)."
            )


def _named(cell: Sequence[str]) -> str:
    return ", ".join(name for name in cell if name)


def summary(table: Table, runs: pd.DataFrame) -> pd.DataFrame:
    """A line for each cell: n, mean, standard deviation and 95 % interval (as shown), epsilon, the paper's figure."""
    lines = []
    for row in table.rows:
        for column in table.columns:
            own = select_cell(runs, row, column)
            values = table.measure.scale * own["value"].dropna() if len(own) else pd.Series(dtype=float)
            paper = table.paper.get((row.name, column.name))
            line: dict[str, Any] = {"row": row.name, "column": column.name, "n": len(values), **_spread(values)}
            for name in (*_EPSILONS, _AT_POPULATION):
                line[name] = own[name].max() if len(own) and name in own else float("nan")
            line["unit"] = next(iter(own["unit"].dropna()), None) if len(own) else None
            line["private"] = bool(len(own)) and bool(own["unit"].notna().any())
            line["seconds"] = own["seconds"].mean() if len(own) else float("nan")
            lines.append(line | {"paper": paper[0] if paper else None, "paper_spread": paper[1] if paper else None})
    return pd.DataFrame(lines)


def _spread(values: pd.Series[float]) -> dict[str, float]:
    """Mean, standard deviation, and half the 95 % interval of the mean (Student's t)."""
    n, nan = len(values), float("nan")
    deviation = float(values.std()) if n > 1 else nan
    half = deviation * float(stats.t.ppf(0.975, n - 1)) / n**0.5 if n > 1 else nan
    return {"mean": float(values.mean()) if n else nan, "sd": deviation, "half": half}


def differences(table: Table, runs: pd.DataFrame, pair: tuple[str, str]) -> dict[str, dict[str, float]]:
    """Row → paired difference of two columns, over the seeds that both have."""
    found: dict[str, dict[str, float]] = {}
    for row in table.rows if len(runs) else ():
        own = runs[runs["row"] == row.name].pivot_table(index="seed", columns="column", values="value")
        if set(pair) <= set(own.columns):
            gaps = table.measure.scale * (own[pair[0]] - own[pair[1]]).dropna()
            if len(gaps):
                found[row.name] = {"n": len(gaps), **_spread(gaps)}
    return found


def _epsilon(values: pd.DataFrame, name: str, mixed: bool) -> str:
    """Epsilons of a row's private cells: one figure, or one for each cell where they differ."""
    own = []
    for value, unit in values.loc[values["private"], [name, "unit"]].itertuples(index=False):
        shown = _DASH if value is None or pd.isna(value) else f"{value:.3f}" if value < _LARGE else f"{value:.2g}"
        own.append(f"{shown} ({unit})" if mixed else shown)
    return " / ".join(own if len(set(own)) > 1 else own[:1]) or _DASH


def _shown_epsilons(table: Table, lines: pd.DataFrame) -> dict[str, str]:
    """Column of the summary → heading: epsilons that some cell has, with the unit unless that is an example."""
    lines = lines[lines["private"]]
    units = sorted(set(lines["unit"].dropna()))
    unit = f", unit: {units[0]}" if len(units) == 1 and units != [_EXAMPLE] else ""
    any_at_all = lines[_ALWAYS].notna().any()
    shown = {
        name: label.replace(")", f"{unit})")
        for name, label in _EPSILONS.items()
        if lines[name].notna().any() or name == _ALWAYS or (name == "epsilon_pld" and not any_at_all)
    }
    if table.nominal is not None:
        shown[_AT_POPULATION] = f"ε nominal at {table.nominal.population:,} {(units or ['record'])[0]}s (RDP)"
    return shown


def cells(table: Table, runs: pd.DataFrame) -> list[list[str]]:
    """The table as text, headings first: for each column ours (mean ± standard deviation, n) and the paper's."""
    runs = of_best_trials(table, runs)
    lines, text = summary(table, runs), table.measure.text
    gaps = [differences(table, runs, pair) for pair in table.difference]
    claimed = any(row.epsilon is not None for row in table.rows)
    shown, mixed = _shown_epsilons(table, lines), lines["unit"].nunique() > 1
    head = [""]
    for column in table.columns:
        head += [f"{column.label}, ours", "n"]
        head += [f"{column.label}, paper"] if any(c == column.name for _, c in table.paper) else []
    head += _headings(table) + (["ε claimed"] if claimed else []) + list(shown.values())
    out = [head]
    for row in table.rows:
        own = lines[lines["row"] == row.name]
        line = [row.label]
        for column in table.columns:
            cell = own[own["column"] == column.name].iloc[0]
            line += [text(cell["mean"], cell["sd"]), str(cell["n"])]
            if any(c == column.name for _, c in table.paper):
                line.append(text(cell["paper"], cell["paper_spread"], 1))
        for found in gaps:
            gap = found.get(row.name, {"mean": float("nan"), "half": float("nan")})
            half = "" if pd.isna(gap["half"]) else f" [± {text(gap['half'])}]"
            line.append(text(gap["mean"], sign="+") + half)
        line += [_DASH if row.epsilon is None else f"{row.epsilon:g}"] if claimed else []
        out.append([*line, *(_epsilon(own, name, mixed) for name in shown)])
    return out


def _headings(table: Table) -> list[str]:
    """Of the paired differences; where there are several, each with its columns."""
    labels = {column.name: column.label for column in table.columns}
    if len(table.difference) == 1:
        return ["paired difference"]
    return [f"{labels.get(first, first)} − {labels.get(second, second)}" for first, second in table.difference]


def markdown(table: Table, runs: pd.DataFrame) -> str:
    """Format the table in Markdown."""
    return markdown_rows(cells(table, runs))


_GREEK = {"σ": "sigma", "ε": "varepsilon", "α": "alpha", "γ": "gamma", "μ": "mu", "ν": "nu", "τ": "tau"}
_LATEX = {
    **{sign: rf"$\{name}$" for sign, name in {**_GREEK, "±": "pm", "≤": "le", "×": "times"}.items()},
    **{sign: rf"\{sign}" for sign in "%_&#"},
    "–": "--",
    "−": "$-$",
}


def latex(table: Table, runs: pd.DataFrame) -> str:
    """Format the table in LaTeX (booktabs)."""

    def line(parts: Sequence[str]) -> str:
        return " & ".join("".join(_LATEX.get(sign, sign) for sign in part) for part in parts) + r" \\"

    head, *body = cells(table, runs)
    columns = "l" + "r" * (len(head) - 1)
    return "\n".join(
        [rf"\begin{{tabular}}{{{columns}}}", r"\toprule", line(head), r"\midrule", *map(line, body), r"\bottomrule",
         r"\end{tabular}", ""]
    )  # fmt: skip


def _more(table: Table, runs: pd.DataFrame) -> str:
    names = [label or name.rpartition("/")[2].replace("_", " ") for name, label in table.more.items()]
    lines = [["", "", *names]]
    for row in table.rows:
        for column in table.columns:
            own = select_cell(runs, row, column)
            found = [_further(own, name, label) for name, label in table.more.items()]
            lines.append([row.label, column.label, *found])
    return markdown_rows(lines)


def _further(own: pd.DataFrame, name: str, label: str | None) -> str:
    """Another figure of a cell: its mean, and under a label of its own as the table shows such figures."""
    values = pd.to_numeric(own[name], errors="coerce").dropna()
    if label is not None and name in MEASURES:
        measure = MEASURES[name]
        spread = _spread(measure.scale * values)
        return measure.text(spread["mean"], spread["sd"])
    return f"{values.mean():.3g}" if len(values) else _DASH


def _meaning(table: Table, runs: pd.DataFrame) -> str:
    relations = sorted({_RELATIONS.get(str(name), str(name)) for name in runs["neighbouring_relation"].dropna()})
    text = "–: was not run, is not private, or is not covered by that accountant."
    if not relations:
        return text
    if runs["epsilon_microbatch_rdp"].notna().any():
        text = f"For the nominal ε a record is a fixed microbatch, as papers have it. {text}"
    if table.nominal is not None:
        text = (
            f"The nominal ε is no guarantee: it is what lots of {table.nominal.lot_size:,.0f} of "
            f"{table.nominal.population:,} would cost for δ = {table.nominal.delta:g}, with noise grown as the lots. "
            f"{text}"
        )
    delta = ", ".join(f"{value:g}" for value in sorted(set(runs["delta"].dropna())))
    units = " or ".join(_protected(runs, unit) for unit in sorted(set(runs["unit"].dropna().astype(str))))
    return f"ε is for δ = {delta} and {units} {' or '.join(relations)}, recomputed from the ledgers. {text}"


def _protected(runs: pd.DataFrame, unit: str) -> str:
    """What ε protects: "one example", or "one user (unit: user), of 539, with all examples"."""
    if unit == _EXAMPLE:
        return "one example"
    own = runs[runs["unit"] == unit]
    sizes = sorted({int(size) for size in own["population"].dropna()}) if "population" in own else []
    of = f" of {' or '.join(f'{size:,}' for size in sizes)}" if sizes else ""
    return f"one {unit}{of} (unit: {unit}), with all examples,"


def _chosen(table: Table, runs: pd.DataFrame) -> Iterator[str]:
    """What was chosen for each cell, and how."""
    found = {cell: one.label for cell, one in table.choices.items()}
    if found:
        name = short_name(table.chosen_from)
        where = f"[{name}](../{name.replace('/', '_')}/README.md)"
        yield from (f"Chosen in {where}, on validation data and other seeds:", "")
    elif best := best_trials(table, runs):
        every = len(table.trials)
        found = {cell: one.label + ("" if n == every else f" (of {n})") for cell, (one, n) in best.items()}
        labels = "; ".join(trial.label for trial in table.trials)
        yield from (f"Each cell shows the best of {every} trials ({labels}) by this metric:", "")
    else:
        return
    head = ["", *(column.label for column in table.columns)]
    body = [[row.label, *(found.get((row.name, column.name), _DASH) for column in table.columns)] for row in table.rows]
    yield from (markdown_rows([head, *body], len(head)), "", "What choosing costs is not in the ε shown.", "")


def _readme(table: Table, runs: pd.DataFrame, pictures: Sequence[str], logged: Logged) -> Iterator[str]:
    yield from (f"# {table.title}", "", f"{table.source}. Made by `dpbench reproduce {table.command}`.", "")
    yield from (markdown(table, runs), "")
    best = of_best_trials(table, runs)
    better = " (lower is better)" if table.measure.lower_is_better else ""
    yield f"{table.measure.heading} after the last step{better}: mean ± standard deviation over n seeds" + (
        "; paired difference: mean over shared seeds with half its 95 % interval." if table.difference else "."
    )
    yield _meaning(table, best)
    if table.more:
        yield from ("", "Means of other figures:", "", _more(table, best))
    if table.last_evaluations and CURVES in logged:
        yield from late_means(table, logged[CURVES])
    yield from ("", *_chosen(table, runs))
    yield from ("![figure](figure.png)", "")
    for picture in pictures:
        yield from (f"![{Path(picture).stem}]({picture})", "")
    for what in ("commit", "cpu", "gpu", "torch"):
        values = ", ".join(sorted({str(value) for value in runs[what].dropna()}))
        yield from (f"- {what}: {values}",) if values else ()
    hours = runs["seconds"].sum() / 3600
    threads = ", ".join(sorted({str(number) for number in runs["threads"]}))
    yield f"- training: {hours:.2f} hours in all; threads of a run: {threads}"
    yield from ("", "What differs from the paper, and why:" if table.notes else "", "")
    yield from (f"- {note.strip()}" for note in table.notes)


def write_outputs(table: Table, runs: pd.DataFrame, logged: Logged, folder: Path) -> None:
    """Write everything into a results folder.

    Args:
        table: The whole definition.
        runs: Finished runs, as in runs.csv.
        logged: What they logged on the way, by the name of its file.
        folder: Made if need be.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / RUNS, runs.to_csv(index=False))
    write_atomically(folder / "table.md", markdown(table, runs) + "\n")
    write_atomically(folder / "table.tex", latex(table, runs))
    best = of_best_trials(table, runs)
    draw_table(table, best, summary(table, best), folder)
    pictures = write_logged(table, logged, folder)
    pictures += [MONTAGE] if (folder / MONTAGE).is_file() else []
    write_atomically(folder / "README.md", "\n".join(_readme(table, runs, pictures, logged)).rstrip() + "\n")
