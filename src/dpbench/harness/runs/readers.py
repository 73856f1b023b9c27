"""Files of a run, read back: whole and of the right shape, or one line that names the file and the remedy."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from pickle import UnpicklingError
from typing import Annotated, Any

import pandas as pd
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from dpbench.errors import ConfigurationError, brief
from dpbench.harness.runs.folder import RunFolder

AGAIN = "delete {path} to make it again"
_DRAWABLE = 1e100
_TAIL = 65536  # bytes, more than one line
_FromZero = Annotated[float, Field(ge=0)]


class _Open(BaseModel):
    """Some keys are needed, others may be there."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)


class _Audit(_Open):
    confidence: Annotated[float, Field(gt=0, lt=1)] | None = None
    claimed: _FromZero | None = None
    sound: _FromZero | None = None
    audited: dict[str, _FromZero | None] = {}
    shown: str | None = None
    verdict: str | None = None


class _Privacy(_Open):
    epsilon: dict[str, _FromZero | None]
    audit: _Audit | None = None
    delta: Annotated[float, Field(gt=0, lt=1)] | None = None
    unit: str | None = None


class _Run(_Open):
    name: str


class _Config(_Open):
    run: _Run


class Record(_Open):
    """Content of every result.json, of any version."""

    metrics: dict[str, float | None]
    privacy: _Privacy
    config: _Config
    seed: int
    seconds: _FromZero
    steps: Annotated[int, Field(ge=0)]
    foreign_code: dict[str, str] = {}


class Evaluation(_Open):
    """Content of every evaluation.json."""

    steps: int
    judged_on: str


class _Loops(_Open):
    fit_loop: dict[str, Any]


class _Checkpoint(_Open):
    state_dict: dict[str, Any]
    global_step: int
    callbacks: dict[str, Any]
    loops: _Loops


class _Resumable(_Checkpoint):
    optimizer_states: Annotated[list[Any], Field(min_length=1)]


Metrics = dict[str, float | None]


def read_json(path: Path, shape: Any, remedy: str = AGAIN) -> dict[str, Any]:
    """The content of a JSON file.

    Args:
        path: The file.
        shape: Required content: a pydantic model, or an annotation.
        remedy: Advice for the error; `{path}` stands for the file.

    Raises:
        ConfigurationError: It is no JSON, or holds something else.
        OSError: It cannot be read.
    """
    try:
        data: dict[str, Any] = json.loads(path.read_bytes().decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise _damaged(path, brief(error), remedy) from error
    _require(shape, data, path, remedy)
    return data


def read_csv(path: Path, columns: Collection[str], remedy: str = AGAIN, words: Collection[str] = ()) -> pd.DataFrame:
    """The content of a CSV file.

    Args:
        path: The file.
        columns: Required columns, numeric unless among `words`.
        remedy: Advice for the error; `{path}` stands for the file.
        words: Columns that need not be numeric; "*" for all others too.

    Raises:
        ConfigurationError: It is no such table.
        OSError: It cannot be read.
    """
    try:
        table = pd.read_csv(path, encoding="utf-8", dtype=dict.fromkeys(words, object))
    except ValueError as error:  # pandas' and Unicode's errors are of this kind
        raise _damaged(path, brief(error), remedy) from error
    if missing := [name for name in columns if name not in table]:
        raise _damaged(path, f"it has no column {missing[0]}", remedy)
    checked = columns if "*" in words else table.columns
    for name in checked:
        if name not in words and not pd.api.types.is_numeric_dtype(table[name]):
            raise _damaged(path, f"its column {name} is not numeric", remedy)
    return table


def read_metrics(path: Path) -> pd.DataFrame:
    """metrics.csv, with the step as its index; an empty table if there is none.

    Numbers that no picture can show, infinite ones among them, are NaN.

    Raises:
        ConfigurationError: It is damaged.
    """
    if not path.exists():
        return pd.DataFrame()
    table = read_csv(path, ["step"], "move {path} away: the run's curves are lost, its result is not")
    table = table.set_index("step")
    return table.where(table.abs() < _DRAWABLE)


def read_checkpoint(path: Path, resumed: bool = False, trust: bool = False) -> dict[str, Any]:
    """A checkpoint that Lightning wrote, on the CPU.

    Args:
        path: The file.
        resumed: True to resume a training from it, which needs more of its content.
        trust: True to unpickle objects of any class, which runs any code that the file names. Otherwise only tensors
            and plain data are read, which is all that checkpoints of dpbench's own classes hold.

    Raises:
        ConfigurationError: It cannot be read, is something else, or holds objects and is not trusted.
    """
    import torch

    again = RunFolder(path.parents[1]).command("resume")
    remedy = f"restore a copy of {{path}}, or delete it, and `{again}` starts from the first step"
    try:
        state: Any = torch.load(path, map_location="cpu", weights_only=not trust, mmap=True)
    except Exception as error:  # whatever a damaged archive makes of unpickling
        if isinstance(error, UnpicklingError) and not trust:
            _refuse_objects(path)
        raise _damaged(path, brief(error), remedy, "cannot be read") from error
    _require(_Resumable if resumed else _Checkpoint, state, path, remedy, "is not a checkpoint")
    return dict(state)


def _refuse_objects(path: Path) -> None:
    """Raise ConfigurationError for a checkpoint that names more than tensors and plain data; nothing is imported."""
    from torch.serialization import get_unsafe_globals_in_checkpoint

    try:
        names = sorted(get_unsafe_globals_in_checkpoint(path))
    except Exception:  # of a damaged file, which names nothing
        return
    if names:
        raise ConfigurationError(
            f"{path} contains objects ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''}), and unpickling them "
            "can execute arbitrary code: only tensors and plain data are read. Add --trust if the run is your own, "
            "never for a run of another person."
        )


def _require(shape: Any, data: Any, path: Path, remedy: str, what: str = "is damaged") -> None:
    """Raise ConfigurationError where some content has another shape."""
    try:
        TypeAdapter(shape).validate_python(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"])) or "the whole"
        raise _damaged(path, f"{place}: {first['msg'].lower()}", remedy, what) from error


def _damaged(path: Path, why: str, remedy: str, what: str = "is damaged") -> ConfigurationError:
    why = " ".join(why.split())
    remedy = remedy.format(path=path)
    return ConfigurationError(f"{path} {what}: {remedy} ({why if len(why) <= 120 else why[:117] + '...'}).")
