"""The log of metrics: one line for each step at which something was logged."""

from __future__ import annotations

import re
from argparse import Namespace
from pathlib import Path
from typing import Any

import pandas as pd
from pytorch_lightning.loggers.logger import Logger
from pytorch_lightning.utilities import rank_zero_only

from dpbench.errors import ConfigurationError, brief
from dpbench.files import write_atomically
from dpbench.harness.runs.folder import RunFolder
from dpbench.harness.runs.readers import read_metrics

_MORE_IS_BETTER = {"accuracy", "recall", "precision", "f1", "auc", "auroc"}
_LESS_IS_BETTER = {"loss", "error", "mse", "perplexity"}


class MetricsCSV(Logger):
    """A Lightning logger that survives interruption: written atomically, continued on resume.

    Lightning's CSVLogger deletes the old file when a run is resumed.

    Args:
        folder: The run's folder.
    """

    def __init__(self, folder: RunFolder) -> None:
        super().__init__()
        self._folder = folder
        self._rows: dict[int, dict[str, float]] | None = None  # None: the file is not read yet

    @property
    def name(self) -> str:
        """Empty: the folder is the run's own."""
        return ""

    @property
    def version(self) -> str:
        """Empty: the folder is the run's own."""
        return ""

    @property
    def save_dir(self) -> str:
        """The run's folder."""
        return str(self._folder)

    @property
    def log_dir(self) -> str:
        """The run's folder, where the strategy puts the ledger by default."""
        return str(self._folder)

    @property
    def path(self) -> Path:
        """Path of the file."""
        return self._folder.metrics

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """Nothing: the configuration lies in `.hydra/`."""

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Add to the line of `step`, counted in optimizer steps that were made."""
        values = {key: float(value) for key, value in metrics.items() if key != "epoch"}
        if self._rows is None:
            self._rows = self._read()
        self._rows.setdefault(int(step or 0), {}).update(values)

    def _read(self) -> dict[int, dict[str, float]]:
        if not self.path.exists():
            return {}
        rows = {}
        try:
            # As text, of which `float` reads what was written to the last bit.
            frame = pd.read_csv(self.path, index_col="step", dtype=str)
            for step, (_, row) in zip(map(int, frame.index), frame.iterrows(), strict=True):
                rows[step] = {str(name): float(value) for name, value in row.dropna().items()}
        except (TypeError, ValueError) as error:  # pandas has the first where there is no column step
            raise ConfigurationError(
                f"{self.path} is damaged: move it away, and the run continues with curves from here ({brief(error)})."
            ) from error
        return rows

    def check(self) -> None:
        """Raise ConfigurationError if the existing file cannot be continued."""
        self._read()

    @rank_zero_only
    def save(self) -> None:
        """Write the whole file."""
        if self._rows:
            frame = pd.DataFrame.from_dict(self._rows, orient="index").sort_index()
            columns = sorted(frame.columns)
            write_atomically(self.path, frame[columns].to_csv(index_label="step"))

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Write at the end of a run, however it ends."""
        self.save()


def best_validation(path: Path) -> dict[str, float]:
    """Best value that was logged of each metric on validation data of which more, or less, is better.

    Args:
        path: Path of the log.
    """
    best = {}
    for column, values in read_metrics(path).items():
        name = str(column)
        direction = better_direction(name)
        if direction is not None and values.notna().any():
            best[name] = float(values.agg(direction))
    return best


def better_direction(name: str) -> str | None:
    """Return whether a metric on validation data is best at its "max" or "min"; None if its name does not say."""
    words = set(re.split(r"[/_@.]", name))
    if not name.startswith("val/"):
        return None
    if words & _MORE_IS_BETTER:
        return "max"
    return "min" if words & _LESS_IS_BETTER else None
