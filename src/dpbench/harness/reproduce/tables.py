"""Definitions of tables: the runs of a table, and a paper's figures in its cells (`conf/table/**.yaml`)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    StrictStr,
    ValidationError,
    model_validator,
)
from yaml import YAMLError

from dpbench.errors import ConfigurationError, brief, did_you_mean, shown
from dpbench.files import typed
from dpbench.harness.run.search_path import conf_dir, plugin_dirs
from dpbench.harness.runs.numbers import mean_text

if TYPE_CHECKING:
    import pandas as pd

_PERCENT = 100.0
_ENDING = ".yaml"
_MOST_SEEDS = 1000
_METRICS = ("test/", "evaluation/")
"""Prefixes of figures that a table may show although `MEASURES` does not know them: those of a plug-in's task, say."""


@dataclass(frozen=True)
class Measure:
    """A metric of the model after the last step.

    Attributes:
        title: Name on pages.
        axis: Name in pictures.
        percent: True for a share, shown in percent; else it is shown as it is.
        lower_is_better: True for an error.
        signed: True if it may be negative.
        needs: Key of a run's configuration without which it is not measured; "": none.
    """

    title: str
    axis: str
    percent: bool = True
    lower_is_better: bool = False
    signed: bool = False
    needs: str = ""

    @property
    def scale(self) -> float:
        """Factor by which a value is multiplied to be shown."""
        return _PERCENT if self.percent else 1.0

    @property
    def heading(self) -> str:
        """The title with its unit."""
        return f"{self.title} in percent" if self.percent else self.title

    @property
    def label(self) -> str:
        """Label of an axis."""
        notes = ["%"] * self.percent + ["lower is better"] * self.lower_is_better
        return f"{self.axis} ({', '.join(notes)})" if notes else self.axis

    def clipped(self, low: float, high: float) -> tuple[float, float]:
        """Limits of an axis, without values that cannot be."""
        most = _PERCENT if self.percent else math.inf
        return max(-most if self.signed else 0.0, float(low)), min(most, float(high))

    def best(self, values: pd.Series[Any]) -> Any:
        """The label of the best of some values."""
        return values.idxmin() if self.lower_is_better else values.idxmax()

    def text(self, mean: float | None, spread: float | None = None, digits: int = 2, sign: str = "") -> str:
        """Format a mean and its spread, both as shown, as a cell of a table; see `mean_text`."""
        return mean_text(mean, spread, percent=self.percent, sign=sign, digits=digits)


_ON_REAL = "accuracy on real images"
_RECORDS = "diagnostics.training_records"
_INSERTED = "data.inserted.records"
MEASURES = {
    "test/accuracy": Measure("Test accuracy", "test accuracy"),
    "val/accuracy": Measure("Validation accuracy", "validation accuracy"),
    "test/recall_at_5": Measure("Test recall@5", "test recall@5"),
    "val/recall_at_5": Measure("Validation recall@5", "validation recall@5"),
    "test/mean_squared_error": Measure("Test mean squared error", "test mean squared error", False, True),
    "val/mean_squared_error": Measure("Validation mean squared error", "validation mean squared error", False, True),
    "test/perplexity": Measure("Test perplexity", "test perplexity", False, True),
    "val/perplexity": Measure("Validation perplexity", "validation perplexity", False, True),
    "evaluation/accuracy_cnn": Measure("Accuracy on real images of a CNN that was trained on synthetic ones", _ON_REAL),
    "evaluation/accuracy_cnn_augmented": Measure(
        "Accuracy on real images of a CNN that was trained on synthetic ones with augmentation", _ON_REAL
    ),
    "evaluation/accuracy_logistic_regression": Measure(
        "Accuracy on real images of logistic regression on synthetic ones", _ON_REAL
    ),
    "nonprivate/train_accuracy": Measure(
        "Accuracy on training records", "accuracy on training records", needs=_RECORDS
    ),
    "nonprivate/exposure_mean": Measure(
        "Mean exposure of inserted records in bits", "mean exposure in bits", False, needs=_INSERTED
    ),
    "nonprivate/exposure_max": Measure(
        "Largest exposure of an inserted record in bits", "largest exposure in bits", False, needs=_INSERTED
    ),
    "privacy/exposure_allowed": Measure(
        "Largest mean exposure that the ledger allows in bits", "allowed mean exposure in bits", False, needs=_INSERTED
    ),
    "privacy/first_rank_allowed": Measure(
        "Largest probability of the first rank that the ledger allows", "allowed first ranks", needs=_INSERTED
    ),
    "nonprivate/extracted_greedy": Measure(
        "Secrets extracted by greedy decoding", "extracted greedily", False, needs=_INSERTED
    ),
    "nonprivate/extracted_sampled": Measure(
        "Secrets extracted by sampling", "extracted by sampling", False, needs=_INSERTED
    ),
    "privacy/extracted_greedy_allowed": Measure(
        "Most secrets by greedy decoding in expectation", "allowed greedily", False, needs=_INSERTED
    ),
    "privacy/extracted_sampled_allowed": Measure(
        "Most secrets by sampling in expectation", "allowed by sampling", False, needs=_INSERTED
    ),
    "nonprivate/accuracy_gap": Measure(
        "Training minus test accuracy", "training minus test accuracy", signed=True, needs=_RECORDS
    ),
}
"""By the name under which a run logs it."""


# Strict, because pydantic would take true for 1 and "3" for 3.
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Seed = Annotated[int, Field(strict=True, ge=0)]


class _Definition(BaseModel):
    # Numbers are welcome where a text is shown: `label: 0.1` needs no quotes.
    model_config = ConfigDict(frozen=True, extra="forbid", coerce_numbers_to_str=True)


class Candidates(_Definition):
    """Cells of a tuning table of which the best one gives its words.

    Attributes:
        rows: Names; none leaves it to the other side of the cell.
        columns: Names; none leaves it to the other side of the cell.
    """

    rows: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()


class Variant(_Definition):
    """A row or a column of a table, or a trial of its cells: settings that runs share.

    Attributes:
        name: Used on the command line and in folders: its key in the definition.
        label: Shown label; None: the name.
        words: Words that it adds after `dpbench train`.
        epsilon: Claim of the paper, if any.
        chosen: Cells of the table's `chosen_from` among which its own cells choose.
    """

    name: str = ""
    label: str = ""
    words: tuple[StrictStr, ...] = ()
    epsilon: Annotated[Number, Field(ge=0)] | None = None
    chosen: Candidates = Candidates()


ONLY = Variant()
"""The trial of a table that chooses nothing."""


def _with_names(variants: Any) -> Any:
    """Read `NAME: {label: ..., words: ...}` as variants with names."""
    if not isinstance(variants, dict):
        raise ValueError("it must be a mapping (KEY: VALUE)")
    return [{"name": name, "label": name, **(variant or {})} for name, variant in variants.items()]


Lines = Annotated[tuple[Variant, ...], BeforeValidator(_with_names), Field(min_length=1)]


class Series(_Definition):
    """A picture of something that runs log, against steps.

    Attributes:
        name: Name of the picture's files.
        metrics: Prefix of the logged metrics, such as "privacy/bound/".
        label: Label of the axis.
        scale: Scale of the axis: "log" (positive values only) or "linear" (from zero, unless one is negative).
    """

    name: str
    metrics: str
    label: str
    scale: Literal["log", "linear"] = "log"


class Nominal(_Definition):
    """A population for which a table states the nominal cost of its runs, with batch size and noise scaled alike.

    Attributes:
        population: Number of records (users, where the unit is one).
        batch_size: Expected number of records in a batch.
        delta: Nominal δ.
    """

    population: Annotated[int, Field(strict=True, ge=1)]
    batch_size: Annotated[Number, Field(gt=0)]
    delta: Annotated[Number, Field(gt=0, lt=1)]


def _as_seeds(seeds: Any) -> Any:
    if isinstance(seeds, list):
        return seeds
    if type(seeds) is not int or not 1 <= seeds <= _MOST_SEEDS:  # True is an int, too
        raise ValueError(f"seeds must be a list, or how many there are (1 to {_MOST_SEEDS:,}), not {shown(seeds)}")
    return range(seeds)


def _as_pairs(pairs: Any) -> Any:
    is_one_pair = isinstance(pairs, list) and pairs and isinstance(pairs[0], str)
    return [pairs] if is_one_pair else pairs


def _as_labels(more: Any) -> Any:
    return dict.fromkeys(more) if isinstance(more, list) else more


Figure = Annotated[list[Number], Field(min_length=1, max_length=2)]


class Table(_Definition):
    """Definition of a table: its rows, columns, seeds and pictures.

    Attributes:
        name: PAPER/TABLE.
        command: Word after `dpbench reproduce`: the name, or the path of the definition.
        title: Title of the table.
        source: Place in the paper.
        metric: Metric of the model after the last step. One of `MEASURES`, or a value that begins with test/ or
            evaluation/.
        seeds: Seeds of the runs of each cell.
        hours: Approximate hours of the whole table on two cores.
        words: Words of every run.
        rows: Rows from top to bottom.
        columns: Columns from left to right.
        paper: Row → column → [mean] or [mean, spread] as printed.
        difference: Pairs of columns (A, B) with a paired difference A − B to be shown.
        notes: Differences from the paper, with reasons.
        series: Pictures of logged values of the runs of the first seed.
        histogram: True to draw their gradient histograms (with diagnostics=gradients).
        samples: True to show images of the generators, those of one run for each cell.
        more: Further metrics, listed below the table as they are, or under a label of their own (None: as they are).
        trials: Trials of each cell, which shows the best by its validation metric. One without a name if there is
            nothing to choose.
        chosen_from: A table of trials on validation data, in which cells look up words; "": none.
        nominal: Larger population with a nominal epsilon next to the true one, or None.
        last_evaluations: Number of a run's last evaluations with a mean below the table; 0: none.
        later: Words of every run for options that came after the runs of its results, and keep their computation;
            not among the words that the results name.
        choices: (row, column) → choice; no part of a definition, see
            `dpbench.harness.reproduce._results`.
    """

    name: str
    command: str
    title: str
    source: str
    metric: str = "test/accuracy"
    seeds: Annotated[tuple[Seed, ...], BeforeValidator(_as_seeds), Field(min_length=1)]
    hours: Annotated[Number, Field(ge=0)]
    words: tuple[StrictStr, ...] = ()
    rows: Lines
    columns: Lines
    paper: dict[str, dict[str, Figure]] = {}
    difference: Annotated[tuple[tuple[str, str], ...], BeforeValidator(_as_pairs)] = ()
    notes: tuple[StrictStr, ...] = ()
    series: tuple[Series, ...] = ()
    histogram: StrictBool = False
    samples: StrictBool = False
    more: Annotated[dict[str, str | None], BeforeValidator(_as_labels)] = {}
    trials: Lines = (ONLY,)
    chosen_from: str = ""
    nominal: Nominal | None = None
    last_evaluations: Annotated[int, Field(strict=True, ge=0)] = 0
    later: tuple[StrictStr, ...] = ()
    choices: dict[tuple[str, str], Variant] = {}

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> Table:
        rows = {row.name for row in self.rows}
        columns = {column.name for column in self.columns}
        chooses = any(self.chooses(row, column) for row, column in self.cells)
        is_open_metric = self.metric.startswith(_METRICS) and self.metric not in _METRICS
        if not (self.metric in MEASURES or is_open_metric):
            raise ValueError(
                f"metric must be one of {', '.join(MEASURES)}, or another value of test/ or evaluation/, "
                f"not {self.metric!r}"
            )
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"seeds contains a seed twice: {', '.join(map(str, self.seeds))}")
        for row, figures in self.paper.items():
            for column in figures:
                if row not in rows or column not in columns:
                    raise ValueError(f"paper has a figure for {row}, {column}, which is not a cell")
        for name in itertools.chain(*self.difference):
            if name not in columns:
                raise ValueError(
                    f"difference must name two columns, or be a list of such pairs, and {name!r} is not a column; "
                    f"known: {', '.join(column.name for column in self.columns)}"
                )
        if self.has_trials and not self.metric.startswith("val/"):
            raise ValueError(
                f"the best of trials is chosen by a metric of validation data (val/...), not {self.metric}"
            )
        if bool(self.chosen_from) != chooses:
            raise ValueError("chosen_from and chosen (of rows or columns) require each other: give both")
        return self

    @property
    def measure(self) -> Measure:
        """Description of the metric; one without is shown as it is, under its name."""
        return MEASURES.get(self.metric) or Measure(
            self.metric,
            self.metric,
            percent=False,
            signed=True,
        )

    @property
    def has_trials(self) -> bool:
        """Return whether its cells choose among trials."""
        return self.trials != (ONLY,)

    @property
    def folder(self) -> str:
        """Name of the table's folders, without a slash."""
        return self.name.replace("/", "_")

    def words_by_cell(self) -> dict[tuple[str, ...], str]:
        """Names of row, column and trial → words of the runs there."""
        words = {}
        for parts in itertools.product(self.rows, self.columns, self.trials):
            words[tuple(part.name for part in parts)] = " ".join(self.words_of(*parts))
        return words

    @property
    def cells(self) -> list[tuple[Variant, Variant]]:
        """Row and column of each cell, row by row."""
        return list(itertools.product(self.rows, self.columns))

    def label_of(self, row: Variant, column: Variant, separator: str = "; ") -> str:
        """Label of a cell in pictures; with a single column, that of its row."""
        return row.label if len(self.columns) == 1 else f"{row.label}{separator}{column.label}"

    def printed(self, row: str, column: str) -> tuple[float | None, float | None]:
        """Mean and spread that the paper prints in a cell; None if it does not."""
        figures = self.paper.get(row, {}).get(column, [])
        mean, spread, *_ = [*figures, None, None]
        return mean, spread

    @staticmethod
    def chooses(row: Variant, column: Variant) -> bool:
        """Return whether a cell chooses its words among cells of the table's `chosen_from`."""
        return (row.chosen, column.chosen) != (Candidates(), Candidates())

    def words_of(self, row: Variant, column: Variant, trial: Variant = ONLY) -> tuple[str, ...]:
        """Words of a cell's runs, but for those of the run itself; later ones prevail."""
        chosen = self.choices.get((row.name, column.name), ONLY)
        return (*self.words, *chosen.words, *row.words, *column.words, *trial.words)

    def selected(self, rows: Sequence[str], columns: Sequence[str], seeds: Sequence[int] | int | None) -> Table:
        """Select rows, columns and seeds of the table.

        Args:
            rows: Names; none for all.
            columns: Names; none for all.
            seeds: The seeds, or the number of the table's own (more than these go on counting), or None for these.

        Raises:
            ConfigurationError: There is no such row or column.
        """
        if isinstance(seeds, int):
            following = range(max(self.seeds) + 1, max(self.seeds) + 1 + seeds)
            seeds = (*self.seeds, *following)[:seeds]
        parts = {
            "rows": select_lines(self.rows, rows, f"{self.name} has no row"),
            "columns": select_lines(self.columns, columns, f"{self.name} has no column"),
            "seeds": tuple(seeds or self.seeds),
        }
        return self.model_copy(update=parts)


def select_lines(lines: tuple[Variant, ...], names: Sequence[str], refusal: str) -> tuple[Variant, ...]:
    """Rows or columns of some names, in their own order; all of them where none is named.

    Args:
        lines: Rows or columns.
        names: Names that are asked for.
        refusal: Beginning of the message, before the unknown name.

    Raises:
        ConfigurationError: There is no line of a name.
    """
    line_names = [line.name for line in lines]
    for name in names:
        if name not in line_names:
            raise ConfigurationError(f"{refusal} {name!r}; known: {', '.join(line_names)}.")
    return tuple(line for line in lines if not names or line.name in names)


def select_cell(frame: pd.DataFrame, row: Variant, column: Variant) -> pd.DataFrame:
    """Lines of a frame with columns row and column (names) that belong to a cell."""
    if frame.empty:
        return frame
    return frame[(frame["row"] == row.name) & (frame["column"] == column.name)]


def computed_tables() -> dict[str, EntryPoint]:
    """Tables that are computed without training, by name: functions that write into a folder and return a summary.

    They are not loaded: a listing need not import accountants and PyTorch.
    """
    return {entry.name: entry for entry in entry_points(group="dpbench.computed_tables")}


def table_names() -> list[str]:
    """Every table of the project, as PAPER/TABLE."""
    return sorted(name for name, path in _definitions(None).items() if path.is_relative_to(conf_dir()))


def _definitions(config_dir: Path | None) -> dict[str, Path]:
    """Map the name of each definition to its file.

    Those of a further folder take precedence over the project's, and these over those of installed packages, as in
    Hydra's search path.
    """
    paths = {}
    for folder in (*plugin_dirs(), conf_dir(), config_dir or conf_dir()):
        for path in (folder / "table").rglob(f"*{_ENDING}"):
            paths[path.relative_to(folder / "table").with_suffix("").as_posix()] = path
    return paths


def short_name(name: str) -> str:
    """PAPER/TABLE, also of the path of a definition: its folder and its name without the ending."""
    path = Path(name)
    return f"{path.parent.name}/{path.stem}".lstrip("/") if name.endswith(_ENDING) else name


def read_table(name: str, config_dir: Path | None = None) -> Table:
    """Read a table by its name (of the project, or of an installed package), or by the path of a definition (.yaml).

    Args:
        name: Name or path.
        config_dir: A further folder of configuration, which its command names.

    Raises:
        ConfigurationError: There is none, or it is not a definition.
    """
    path = Path(name) if name.endswith(_ENDING) else _known_definition(name, config_dir)
    if not path.is_file():
        raise ConfigurationError(f"{name} {'is a folder' if path.is_dir() else 'is missing'}: name a definition.")
    return _read(path, name, name if config_dir is None else f"{name} --config-dir {typed(config_dir)}")


def _read(path: Path, name: str, command: str) -> Table:
    try:
        # OmegaConf's YAML, in which 1e-5 is a number, as in all other configuration.
        data: Any = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
        table = Table(**data, name=short_name(name), command=command, choices={})
        _refuse_audits(table)
    except ValidationError as error:
        problems = []
        for problem in error.errors(include_url=False):
            key = ".".join(map(str, problem["loc"]))
            message = problem["msg"].removeprefix("Value error, ")
            problems.append(f"{key}: {message}" if key else message)
        raise ConfigurationError(f"{path} defines no table: {'; '.join(problems)}.") from error
    except (TypeError, ValueError, OmegaConfBaseException, YAMLError) as error:
        raise ConfigurationError(f"{path} defines no table: {brief(error)}.") from error
    return table


def _refuse_audits(table: Table) -> None:
    parts: list[Table | Variant] = [table, *table.rows, *table.columns, *table.trials]
    for part in parts:
        for word in part.words:
            if word.lstrip("+").startswith("audit=") and word != "audit=none":
                raise ValueError(
                    f"{word}: models trained with canaries are not allowed in tables; audit a separate run"
                )


def _known_definition(name: str, config_dir: Path | None) -> Path:
    definitions = _definitions(config_dir)
    if name in definitions:
        return definitions[name]
    names = sorted([*computed_tables(), *definitions])
    raise ConfigurationError(f"there is no table {name!r}.{did_you_mean(name, names)} Known: {', '.join(names)}.")


def listed_tables(config_dir: Path | None = None) -> list[dict[str, Any]]:
    """Name, title, hours on two cores, rows and columns of each table; None for those computed without training.

    Args:
        config_dir: A further folder of configuration.

    Raises:
        ConfigurationError: A file is no definition.
    """
    listed: list[dict[str, Any]] = []
    for name in computed_tables():
        listed.append({"name": name, "title": "computed without training", "hours": None, "rows": [], "columns": []})
    for name, path in sorted(_definitions(config_dir).items()):
        table = _read(path, name, name)
        parts = {"rows": [row.name for row in table.rows], "columns": [column.name for column in table.columns]}
        listed.append({"name": name, "title": table.title, "hours": table.hours, **parts})
    return listed


def listing(listed: Sequence[Mapping[str, Any]]) -> str:
    """Format names, titles and hours of tables.

    Args:
        listed: The tables, from `listed_tables`.
    """
    width = max(len(table["name"]) for table in listed)
    lines = []
    for table in listed:
        hours = "" if table["hours"] is None else f" (about {table['hours']:g} h on two cores)"
        lines.append(f"{table['name']:<{width}}  {table['title']}{hours}")
        for part in ("rows", "columns"):
            if len(table.get(part, [])) > 1:
                lines.append(f"  {part}={','.join(table[part])}")
    return "\n".join(lines)
