"""A paper's table: which runs it takes, and what the paper prints in each cell (`conf/table/<paper>/<table>.yaml`)."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from dpbench.errors import ConfigurationError, brief
from dpbench.reproduce.measures import MEASURES, Measure

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Candidates:
    """Cells of a tuning table of which the best one gives its words.

    Attributes:
        rows: Names; none leaves it to the other side of the cell.
        columns: Names; none leaves it to the other side of the cell.
    """

    rows: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()


@dataclass(frozen=True)
class Variant:
    """A row or a column of a table, or a trial of its cells: settings that runs share.

    Attributes:
        name: Used on the command line and in folders.
        label: Shown.
        words: What it adds after `dpbench train`.
        epsilon: What the paper claims for it, if anything.
        chosen: Of the table's `chosen_from`, which cells its own cells choose among.
    """

    name: str
    label: str
    words: tuple[str, ...] = ()
    epsilon: float | None = None
    chosen: Candidates = Candidates()


ONLY = Variant("", "")
"""The trial of a table that chooses nothing."""


@dataclass(frozen=True)
class Series:
    """A picture of something that runs log, against steps.

    Attributes:
        name: Of the picture's files.
        metrics: Prefix of the logged metrics, such as "privacy/bound/".
        label: Of the axis.
        scale: Of the axis: "log" (what is not positive is left out) or "linear" (from zero, unless one is negative).
    """

    name: str
    metrics: str
    label: str
    scale: str = "log"

    def __post_init__(self) -> None:
        if self.scale not in ("log", "linear"):
            raise ValueError(f"series {self.name}: scale must be log or linear, not {self.scale!r}")


@dataclass(frozen=True)
class Nominal:
    """A population for which a table says what its runs would have cost, with lots and noise grown alike.

    Attributes:
        population: Number of records (users, where the unit is one).
        lot_size: Expected number of them in a lot.
        delta: δ there.
    """

    population: int
    lot_size: float
    delta: float


@dataclass(frozen=True)
class Table:
    """Definition of a table: its rows, columns, seeds and pictures.

    Attributes:
        name: PAPER/TABLE.
        command: What to write after `dpbench reproduce`: the name, or the path of the definition.
        title: What is shown.
        source: Where the paper shows it.
        metric: Of the model after the last step. One of `MEASURES`.
        seeds: Each row and column is run with each of these.
        hours: Of the whole table on two cores, about.
        words: Of every run.
        rows: From top to bottom.
        columns: From left to right.
        paper: (row, column) → (mean, spread or None) as printed.
        difference: Pairs of columns (A, B) whose paired difference A − B is shown.
        notes: What differs from the paper, and why.
        series: Pictures of what the runs of the first seed log.
        histogram: Whether to draw their gradient histograms (with diagnostics=gradients).
        samples: Whether to show images that the generators make, those of one run for each cell.
        more: Further metrics, listed below the table as they are, or under a label of their own (None: as they are).
        trials: Each cell is run with each of these, and shows the best by its validation metric. One without a name
            where there is nothing to choose.
        chosen_from: A table of trials on validation data, in which cells look up words; "": none.
        choices: (row, column) → what was chosen there; see `dpbench.reproduce.choices`.
        later: Words of every run for options that came after the runs of its results, and keep what these computed;
            not among the words that the results name.
        last_evaluations: Over how many of the last evaluations of a run a mean stands below the table; 0: none does.
        nominal: Where a nominal epsilon of a larger population stands beside the true one, or None.
    """

    name: str
    command: str
    title: str
    source: str
    metric: str
    seeds: tuple[int, ...]
    hours: float
    words: tuple[str, ...]
    rows: tuple[Variant, ...]
    columns: tuple[Variant, ...]
    paper: Mapping[tuple[str, str], tuple[float, float | None]]
    difference: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()
    series: tuple[Series, ...] = ()
    histogram: bool = False
    samples: bool = False
    more: Mapping[str, str | None] = field(default_factory=dict)
    trials: tuple[Variant, ...] = (ONLY,)
    chosen_from: str = ""
    choices: Mapping[tuple[str, str], Variant] = field(default_factory=dict)
    nominal: Nominal | None = None
    last_evaluations: int = 0
    later: tuple[str, ...] = ()

    @property
    def measure(self) -> Measure:
        """What the metric is."""
        return MEASURES[self.metric]

    def words_of(self, row: Variant, column: Variant, trial: Variant = ONLY) -> tuple[str, ...]:
        """Words of a cell's runs, but for those of the run itself; later ones prevail."""
        chosen = self.choices.get((row.name, column.name), ONLY)
        return (*self.words, *chosen.words, *row.words, *column.words, *trial.words)

    @property
    def folder(self) -> str:
        """Name of the table's folders, without a slash."""
        return self.name.replace("/", "_")

    def selected(self, rows: Sequence[str], columns: Sequence[str], seeds: Sequence[int] | int | None) -> Table:
        """Select rows, columns and seeds of the table.

        Args:
            rows: Names; none for all.
            columns: Names; none for all.
            seeds: Which ones, or how many of the table's own (more than these go on counting), or None for these.

        Raises:
            ConfigurationError: There is no such row or column.
        """
        if isinstance(seeds, int):
            new = range(max(self.seeds) + 1, max(self.seeds) + 1 + seeds)
            seeds = (*self.seeds, *new)[:seeds]
        chosen_rows, chosen_columns = (
            _chosen(lines, names, f"{self.name} has no {kind}")
            for kind, lines, names in (("row", self.rows, rows), ("column", self.columns, columns))
        )
        return replace(self, rows=chosen_rows, columns=chosen_columns, seeds=tuple(seeds or self.seeds))


def _chosen(lines: tuple[Variant, ...], names: Sequence[str], what: str) -> tuple[Variant, ...]:
    known = [line.name for line in lines]
    for name in names:
        if name not in known:
            raise ConfigurationError(f"{what} {name!r}; known: {', '.join(known)}.")
    return tuple(line for line in lines if not names or line.name in names)


def select_cell(frame: pd.DataFrame, row: Variant, column: Variant) -> pd.DataFrame:
    """Lines of a frame with columns row and column (names) that belong to a cell."""
    return frame[(frame["row"] == row.name) & (frame["column"] == column.name)] if len(frame) else frame


_ENDING = ".yaml"
OTHERS = ("claims", "adaptive_quantile/figure2")
"""What `dpbench reproduce` makes without runs, see `listing.COMPUTED_TABLES`."""


def table_names(conf: Path) -> list[str]:
    """Every table of the project, as PAPER/TABLE."""
    folder = conf / "table"
    return sorted(path.relative_to(folder).with_suffix("").as_posix() for path in folder.rglob("*.yaml"))


def short_name(name: str) -> str:
    """PAPER/TABLE, also of the path of a definition: its folder and its name without the ending."""
    path = Path(name)
    return f"{path.parent.name}/{path.stem}".lstrip("/") if name.endswith(_ENDING) else name


def read_table(name: str, conf: Path) -> Table:
    """A table by its name, or by the path of a definition of your own (ending in .yaml).

    Raises:
        ConfigurationError: There is none, or it is not a definition.
    """
    path = Path(name) if name.endswith(_ENDING) else conf / "table" / f"{name}{_ENDING}"
    if not path.is_file() and name.endswith(_ENDING):
        raise ConfigurationError(f"{name} {'is a folder' if path.is_dir() else 'is not there'}: name a definition.")
    if not path.is_file():
        names = sorted([*OTHERS, *table_names(conf)])
        near = difflib.get_close_matches(name, names, 1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise ConfigurationError(f"there is no table {name!r}.{hint} Known: {', '.join(names)}.")
    try:
        data = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
        if not isinstance(data, dict):
            raise TypeError("it is no mapping")
        return _table(short_name(name), name, {str(key): value for key, value in data.items()})
    except (KeyError, TypeError, ValueError, AttributeError, OmegaConfBaseException, YAMLError) as error:
        missing = f"{error} is missing" if isinstance(error, KeyError) else brief(error)
        raise ConfigurationError(f"{path} defines no table: {missing}.") from error


_FIELDS = {
    "title", "source", "metric", "seeds", "hours", "words", "rows", "columns", "paper", "difference", "notes",
    "series", "histogram", "samples", "more", "trials", "chosen_from", "nominal", "last_evaluations", "later",
}  # fmt: skip
_SHAPES: dict[str, tuple[str, tuple[type, ...]]] = {
    **dict.fromkeys(("rows", "columns", "paper", "trials"), ("names, each with what belongs to it", (dict,))),
    **dict.fromkeys(("notes", "series"), ("a list", (list,))),
    "seeds": ("a number of them, or a list", (int, list)),
    "hours": ("a number", (int, float)),
    "last_evaluations": ("a number of them", (int,)),
}


def _table(name: str, command: str, data: dict[str, Any]) -> Table:
    if unknown := set(data) - _FIELDS:
        raise ValueError(f"unknown fields {', '.join(sorted(unknown))}")
    for key, (wanted, kinds) in _SHAPES.items():
        if key in data and not isinstance(data[key], kinds):
            raise ValueError(f"{key} must be {wanted}, not {data[key]!r}")
    rows, columns = (_lines(data[key]) for key in ("rows", "columns"))
    seeds = data["seeds"]
    table = Table(
        name,
        command,
        str(data["title"]),
        str(data["source"]),
        str(data.get("metric", "test/accuracy")),
        tuple(range(seeds)) if isinstance(seeds, int) else tuple(map(int, seeds)),
        float(data["hours"]),
        _words(data),
        rows,
        columns,
        {
            (str(row), str(column)): _figure(figure, f"paper, {row}, {column}")
            for row, cells in data.get("paper", {}).items()
            for column, figure in cells.items()
        },
        _pairs(data.get("difference", ())),
        tuple(map(_note, data.get("notes", ()))),
        tuple(map(_series, data.get("series", ()))),
        bool(data.get("histogram", False)),
        bool(data.get("samples", False)),
        _more(data.get("more", ())),
        _lines(data["trials"]) if "trials" in data else (ONLY,),
        str(data.get("chosen_from", "")),
        nominal=_nominal(data.get("nominal")),
        last_evaluations=int(data.get("last_evaluations", 0)),
        later=_words({"words": data.get("later", ())}),
    )
    _check(table)
    return table


def _pairs(given: Any) -> tuple[tuple[str, str], ...]:
    """One pair of columns, or a list of pairs."""
    pairs = [given] if given and all(isinstance(name, str) for name in given) else given
    if not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        raise ValueError("difference must name two columns, or be a list of such pairs")
    return tuple((str(first), str(second)) for first, second in pairs)


def _note(given: Any) -> str:
    if not isinstance(given, str):
        raise ValueError(f"notes must be texts, not {given!r}: put one with a colon in quotes, or behind >-")
    return given


def _series(given: Any) -> Series:
    known = {field.name for field in fields(Series)}
    if not isinstance(given, dict) or not known - {"scale"} <= set(given) <= known:
        raise ValueError(f"series must each have {', '.join(sorted(known))} (scale may be left out), not {given!r}")
    return Series(**{key: str(value) for key, value in given.items()})


def _more(given: Any) -> dict[str, str | None]:
    return {str(name): str(label) for name, label in given.items()} if isinstance(given, dict) else dict.fromkeys(given)


def _nominal(given: Any) -> Nominal | None:
    if given is None:
        return None
    if not isinstance(given, dict) or set(given) != {"population", "batch_size", "delta"}:
        raise ValueError(f"nominal must be {{population: 1000000, batch_size: 5000, delta: 2.5e-7}}, not {given!r}")
    return Nominal(int(given["population"]), float(given["batch_size"]), float(given["delta"]))


def _words(data: dict[Any, Any]) -> tuple[str, ...]:
    words = data.get("words", ())
    if isinstance(words, str) or not all(isinstance(word, str) for word in words):
        raise ValueError(f"words must be a list such as [data=mnist, seed=1], not {words!r}")
    if audits := [word for word in words if word.lstrip("+").startswith("audit=") and word != "audit=none"]:
        raise ValueError(f"{audits[0]}: a model trained with canaries is in no table; audit a run of its own")
    return tuple(words)


def _figure(given: Any, where: str) -> tuple[float, float | None]:
    if not isinstance(given, list) or len(given) not in (1, 2) or not all(isinstance(x, int | float) for x in given):
        raise ValueError(f"{where} must be [mean] or [mean, spread], not {given!r}")
    return float(given[0]), float(given[1]) if len(given) > 1 else None


def _lines(data: dict[Any, Any]) -> tuple[Variant, ...]:
    lines = []
    for name, given in data.items():
        one = given or {}
        if unknown := set(one) - {"label", "words", "epsilon", "chosen"}:
            raise ValueError(
                f"{name} has unknown fields {', '.join(map(str, unknown))} (a label with a comma in quotes?)"
            )
        epsilon = one.get("epsilon")
        if epsilon is not None and not isinstance(epsilon, int | float):
            raise ValueError(f"epsilon of {name} must be a number, not {epsilon!r}")
        lines.append(Variant(str(name), str(one.get("label", name)), _words(one), epsilon, _candidates(one, str(name))))
    return tuple(lines)


def _candidates(one: dict[Any, Any], name: str) -> Candidates:
    given = one.get("chosen", {})
    if not isinstance(given, dict) or set(given) - {"rows", "columns"}:
        raise ValueError(f"chosen of {name} must be {{rows: [...]}} or {{columns: [...]}}, not {given!r}")
    return Candidates(*(tuple(map(str, given.get(side, ()))) for side in ("rows", "columns")))


def _check(table: Table) -> None:
    rows, columns = {line.name for line in table.rows}, {line.name for line in table.columns}
    if table.last_evaluations < 0 or (table.last_evaluations and table.trials != (ONLY,)):
        raise ValueError("last_evaluations must be a number of them from 0 on, of a table without trials")
    if table.metric not in MEASURES:
        raise ValueError(f"metric must be one of {', '.join(MEASURES)}")
    if not table.seeds or not rows or not columns:
        raise ValueError("rows, columns and seeds must not be empty")
    for row, column in table.paper:
        if row not in rows or column not in columns:
            raise ValueError(f"paper has a figure for {row}, {column}, which is no cell")
    if not {name for pair in table.difference for name in pair} <= columns:
        raise ValueError("difference must name two columns, or be a list of such pairs")
    if table.trials != (ONLY,) and not table.metric.startswith("val/"):
        raise ValueError(f"the best of trials is chosen by a metric of validation data (val/...), not {table.metric}")
    if bool(table.chosen_from) != any(line.chosen != Candidates() for line in (*table.rows, *table.columns)):
        raise ValueError("chosen_from names the table in which rows or columns look up what was chosen: give both")
