"""What a table leaves in `results/`: runs.csv, and from it alone table.md, table.tex, the figure and README.md."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import pandas as pd
from scipy import stats

from dpbench.errors import ConfigurationError
from dpbench.reports.markdown import markdown_rows
from dpbench.reproduce.jobs import Job
from dpbench.reproduce.logged import Logged, write_logged
from dpbench.reproduce.pictures import draw_table
from dpbench.reproduce.tables import METRIC_TITLES, Table, select_cell
from dpbench.runs.code import code_hash
from dpbench.runs.files import write_atomically
from dpbench.runs.readers import read_csv

RUNS = "runs.csv"
MONTAGE = "samples.png"
_DASH = "–"
_EPSILONS = {"epsilon_microbatch_rdp": "ε nominal (RDP)", "epsilon_rdp": "ε (RDP)", "epsilon_pld": "ε (PLD)"}
_NOMINAL = "epsilon_microbatch_rdp"
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
                "seed": job.seed,
                "metric": table.metric,
                "value": record["metrics"].get(table.metric),
                **{name: record["metrics"].get(name) for name in table.more},
                "epsilon_rdp": privacy["epsilon"].get("rdp"),
                "epsilon_pld": privacy["epsilon"].get("pld"),
                "epsilon_microbatch_rdp": privacy.get("epsilon_microbatch", {}).get("rdp"),
                "delta": privacy["delta"],
                "unit": privacy["unit"],
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


def conflicting_results(folder: Path, runs: pd.DataFrame) -> str | None:
    """What a results folder holds that new runs would wipe out: runs of other code, or other runs; None: nothing."""
    if not (folder / RUNS).is_file():
        return None
    old = read_csv(folder / RUNS, [], "restore {path}, or move it away", ("*",))
    if missing := {"code_hash", "config_hash", "commit"} - set(old):
        return f"a {RUNS} without {', '.join(sorted(missing))}"
    if not set(old["code_hash"]) <= {code_hash()}:
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
    words = {(row.name, column.name): (*row.words, *column.words) for row in table.rows for column in table.columns}
    for run in runs.to_dict("records"):
        cell = str(run["row"]), str(run["column"])
        if cell not in words:
            raise ConfigurationError(f"{table.folder}/{RUNS} has runs of {cell}, which {table.name} does not have.")
        if not str(run["words"]).startswith(" ".join((*words[cell], "seed="))):
            raise ConfigurationError(
                f"{table.folder}/{RUNS}: {', '.join(cell)} was run with other words than {table.name} has now: restore "
                f"the definition, or run it again (dpbench reproduce {table.command} --replace)."
            )


def summary(table: Table, runs: pd.DataFrame) -> pd.DataFrame:
    """A line for each cell: n, mean, standard deviation and 95 % interval (in percent), epsilon, the paper's figure."""
    lines = []
    for row in table.rows:
        for column in table.columns:
            own = select_cell(runs, row, column)
            values = 100 * own["value"].dropna() if len(own) else pd.Series(dtype=float)
            paper = table.paper.get((row.name, column.name))
            line: dict[str, Any] = {"row": row.name, "column": column.name, "n": len(values), **_spread(values)}
            for name in _EPSILONS:
                line[name] = own[name].max() if len(own) else float("nan")
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


def differences(table: Table, runs: pd.DataFrame) -> dict[str, dict[str, float]]:
    """Row → paired difference of the two columns that the table compares, over the seeds that both have."""
    if table.difference is None or not len(runs):
        return {}
    found = {}
    for row in table.rows:
        own = runs[runs["row"] == row.name].pivot_table(index="seed", columns="column", values="value")
        if set(table.difference) <= set(own.columns):
            gaps = 100 * (own[table.difference[0]] - own[table.difference[1]]).dropna()
            if len(gaps):
                found[row.name] = {"n": len(gaps), **_spread(gaps)}
    return found


def _figure(mean: float | None, spread: float | None, digits: int = 2) -> str:
    if mean is None or pd.isna(mean):
        return _DASH
    return f"{mean:.{digits}f}" + ("" if spread is None or pd.isna(spread) else f" ± {spread:.{digits}f}")


def _epsilon(values: pd.DataFrame, name: str) -> str:
    """Epsilons of a row's private cells: one figure, or one for each cell where they differ."""
    own = [_figure(value, None, 3) for value in values.loc[values["private"], name]]
    return " / ".join(own if len(set(own)) > 1 else own[:1]) or _DASH


def cells(table: Table, runs: pd.DataFrame) -> list[list[str]]:
    """The table as text, headings first: for each column ours (mean ± standard deviation, n) and the paper's."""
    lines, gaps = summary(table, runs), differences(table, runs)
    claimed = any(row.epsilon is not None for row in table.rows)
    head = [""]
    for column in table.columns:
        head += [f"{column.label}, ours", "n"]
        head += [f"{column.label}, paper"] if any(c == column.name for _, c in table.paper) else []
    head += ["paired difference"] if table.difference else []
    shown = {name: label for name, label in _EPSILONS.items() if name != _NOMINAL or lines[name].notna().any()}
    head += (["ε claimed"] if claimed else []) + list(shown.values())
    out = [head]
    for row in table.rows:
        own = lines[lines["row"] == row.name]
        line = [row.label]
        for column in table.columns:
            cell = own[own["column"] == column.name].iloc[0]
            line += [_figure(cell["mean"], cell["sd"]), str(cell["n"])]
            if any(c == column.name for _, c in table.paper):
                line.append(_figure(cell["paper"], cell["paper_spread"], 1))
        if table.difference:
            gap = gaps.get(row.name)
            line.append(_DASH if gap is None else f"{gap['mean']:+.2f}" + _half(gap["half"]))
        line += [_DASH if row.epsilon is None else f"{row.epsilon:g}"] if claimed else []
        out.append([*line, *(_epsilon(own, name) for name in shown)])
    return out


def _half(half: float) -> str:
    return "" if pd.isna(half) else f" [± {half:.2f}]"


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
    lines = [["", "", *(name.rpartition("/")[2].replace("_", " ") for name in table.more)]]
    for row in table.rows:
        for column in table.columns:
            own = select_cell(runs, row, column)
            means = [pd.to_numeric(own[name], errors="coerce").mean() for name in table.more]
            lines.append([row.label, column.label, *(_DASH if pd.isna(mean) else f"{mean:.3g}" for mean in means)])
    return markdown_rows(lines)


def _meaning(runs: pd.DataFrame) -> str:
    relations = sorted({_RELATIONS.get(str(name), str(name)) for name in runs["neighbouring_relation"].dropna()})
    text = "–: was not run, is not private, or is not covered by that accountant."
    if not relations:
        return text
    if runs["epsilon_microbatch_rdp"].notna().any():
        text = f"For the nominal ε a record is a fixed microbatch, as papers have it. {text}"
    delta = ", ".join(f"{value:g}" for value in sorted(set(runs["delta"].dropna())))
    return f"ε is for δ = {delta} and one example {' or '.join(relations)}, recomputed from the ledgers. {text}"


def _readme(table: Table, runs: pd.DataFrame, pictures: Sequence[str]) -> Iterator[str]:
    yield from (f"# {table.title}", "", f"{table.source}. Made by `dpbench reproduce {table.command}`.", "")
    yield from (markdown(table, runs), "")
    yield f"{METRIC_TITLES[table.metric]} in percent after the last step: mean ± standard deviation over n seeds" + (
        "; paired difference: mean over shared seeds with half its 95 % interval." if table.difference else "."
    )
    yield _meaning(runs)
    if table.more:
        yield from ("", "Means of other figures:", "", _more(table, runs))
    yield from ("", "![figure](figure.png)", "")
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
    draw_table(table, runs, summary(table, runs), folder)
    pictures = write_logged(table, logged, folder)
    pictures += [MONTAGE] if (folder / MONTAGE).is_file() else []
    write_atomically(folder / "README.md", "\n".join(_readme(table, runs, pictures)).rstrip() + "\n")
