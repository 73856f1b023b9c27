"""The runs of the workflow: from the options of one private training to tables of runs on noise and on its data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dpbench.data.images import ImageDataModule
from dpbench.data.sources import NOISE, source_names
from dpbench.errors import ConfigurationError
from dpbench.harness.reproduce.tables import Table
from dpbench.harness.run.build import plain
from dpbench.harness.run.command_line import without_hydra
from dpbench.harness.run.config import class_of
from dpbench.harness.run.jobs import check_run
from dpbench.harness.runs.command import key_of
from dpbench.modules.image_classifier import ImageClassifier
from dpbench.options import options_of
from dpbench.privacy.accounting.calibration import TrainingSetting, solved
from dpbench.strategies import AdaptiveMeanClipping, PrivateStrategy

NO_PRIVACY = "none"
"""Row of the run without privacy, on noise and on data."""
AUDITED = "audited"
"""Column of the runs on data that have canaries."""

_EPSILONS = (32.0, 0.5)  # of the least and of the most noise that is tried
_TRIED = 7
_FRESH = (2_000, 10_000)  # fresh images of noise, at least and at most
_PAPER = ("strategy.alpha=1.0", "strategy.beta=2.0")  # defaults of section 3
_CANARIES = (20, 2_000)  # at least and at most
_RECORDS_A_CANARY = 5
_OF_THE_WORKFLOW = (
    "run.",
    "logger",
    "hydra.",
    "audit",
    "experiment",
    "objective",
    "diagnostics",
    "data.inserted",
    "strategy.noise_multiplier",
    "strategy.target_epsilon",
)
_OF_THE_DATA = (
    "data.root",
    "data.download",
    "data.val_size",
    "data.train_size",
    "data.test_size",
    "data.expected_batch",
)


@dataclass(frozen=True)
class Plan:
    """A private training with noise that is to be chosen.

    Attributes:
        words: Options of `dpbench train`, as given, without the seed.
        data: Name of the data set.
        model: Name of the network.
        strategy: Name of the strategy with the calibrated noise.
        records: Number of training records.
        lot: Expected number of records in a batch.
        steps: Number of steps.
        seed: Seed of all runs.
        noise: Noise multipliers to try, increasing.
    """

    words: tuple[str, ...]
    data: str
    model: str
    strategy: str
    records: int
    lot: float
    steps: int
    seed: int
    noise: tuple[float, ...]

    def on_noise(self) -> Table:
        """Runs on noise of the data's size and shape: one without privacy, one for each noise multiplier."""
        common, own = self._words()
        words = [f"data={NOISE}"]
        words += [word for word in common if key_of(word) != "data" and not key_of(word).startswith(_OF_THE_DATA)]
        words += [
            f"data.like={self.data}",
            f"data.train_size={self.records}",
            f"data.test_size={np.clip(self.records, *_FRESH)}",
            f"data.expected_batch_size={self.lot:g}",
            "++trainer.limit_val_batches=0",
        ]
        rows = {NO_PRIVACY: ["strategy=none"]}
        for z in self.noise:
            rows[f"z_{z:g}"] = [f"strategy={self.strategy}", *own, f"strategy.noise_multiplier={z:g}"]
        return self._table(words, rows, {"noise": []})

    def on_data(self, z: float) -> Table:
        """Runs on the data: without privacy, with constant and with adaptive bounds; each also with canaries."""
        common, own = self._words()
        adaptive = options_of(AdaptiveMeanClipping)  # which chooses its bounds itself
        usable = [word for word in own if key_of(word).split(".")[1] in adaptive]
        private = {"adaptive_mean": [*_PAPER, *usable], self.strategy: own}
        rows = {NO_PRIVACY: ["strategy=none"]}
        for name in (self.strategy, "adaptive_mean"):
            rows[name] = [f"strategy={name}", *private[name], f"strategy.noise_multiplier={z:g}"]
        canaries = np.clip(self.records // _RECORDS_A_CANARY, *_CANARIES)
        audit = ["audit=gradient_canaries", f"audit.canaries={canaries}"]
        return self._table(common, rows, {"plain": [], AUDITED: audit})

    def _words(self) -> tuple[list[str], list[str]]:
        """Words of all runs, and those that set options of the strategy."""
        common, own = [], []
        for word in self.words:
            if key_of(word).startswith("strategy."):
                own.append(word)
            elif key_of(word) != "strategy":
                common.append(word)
        return common, own

    def _table(
        self,
        words: Sequence[str],
        rows: Mapping[str, Sequence[str]],
        columns: Mapping[str, Sequence[str]],
    ) -> Table:
        name = f"workflow/{self.data}_{self.model}"
        definition = {
            "name": name,
            "command": name,
            "title": name,
            "source": "three_tools_2018, section 3",
            "seeds": [self.seed],
            "hours": 0.0,
            "words": words,
            "rows": {row: {"words": own} for row, own in rows.items()},
            "columns": {column: {"words": own} for column, own in columns.items()},
        }
        return Table.model_validate(definition)


def make_plan(words: Sequence[str], noise: Sequence[float] | None = None) -> Plan:
    """Read the options of a private training, and look at the size of its data.

    Args:
        words: Options of `dpbench train`, without the noise, which the workflow chooses.
        noise: Noise multipliers to try; None: seven of equal ratio, for ε from 32 to 0.5.

    Raises:
        ConfigurationError: The options do not compose, or are of a training that this workflow does not know.
        DataError: The data are absent or damaged.
    """
    for word in words:
        if key_of(word).startswith(_OF_THE_WORKFLOW):
            raise ConfigurationError(
                f"{word}: the workflow sets {key_of(word)} of its runs itself (noise: --noise-multipliers). Remove it."
            )
    composed = check_run([*words, "run.name=x", "run.group=x", "logger=none"])  # refuses what any training refuses
    choices = composed.hydra.runtime.choices
    config: dict[str, Any] = plain(without_hydra(composed))
    _refuse_kind(config)
    options = {name: value for name, value in config["data"].items() if not name.startswith("_")}
    data = ImageDataModule(**options)
    _ = data.sampling  # refuses batches that are larger than the data
    records = len(data.train_set)
    lot = float(options["expected_batch_size"])
    steps = config["trainer"]["max_steps"]
    return Plan(
        words=tuple(word for word in words if key_of(word) != "seed"),
        data=str(data.name),
        model=str(choices["model"]),
        strategy=str(choices["strategy"]),
        records=records,
        lot=lot,
        steps=steps,
        seed=config["seed"],
        noise=tuple(noise or _noise_multipliers(lot / records, steps, float(config["strategy"]["delta"]))),
    )


def _refuse_kind(config: Mapping[str, Any]) -> None:
    """Refuse trainings without noise of their size and shape, or without random labels to recall."""
    data = config["data"]
    data_sets = [name for name in source_names() if name != NOISE]
    has_noise = data.get("name") in data_sets and class_of(data, "data") is ImageDataModule
    is_classifier = issubclass(class_of(config["module"], "module"), ImageClassifier)
    if not has_noise or not is_classifier or config["records"].get("_target_"):
        raise ConfigurationError(
            "the workflow trains on images with random labels: set records=examples, module=classifier and data to one "
            f"of {', '.join(data_sets)}."
        )
    if not issubclass(class_of(config["strategy"], "strategy"), PrivateStrategy):
        raise ConfigurationError("the workflow calibrates the noise of a private strategy: remove strategy=none.")
    if config["trainer"]["max_steps"] < 1:
        raise ConfigurationError("the workflow needs the number of steps: set trainer.max_steps=1000, say.")


def _noise_multipliers(sample_rate: float, steps: int, delta: float) -> list[float]:
    """Noise multipliers of equal ratio, for ε from 32 to 0.5 of one Gaussian query by RDP."""
    ends: list[float] = []
    for epsilon in _EPSILONS:
        setting = TrainingSetting(sample_rate=sample_rate, steps=steps, epsilon=epsilon, delta=delta)
        z = solved(setting, "rdp").noise_multiplier
        assert z is not None
        ends.append(z)
    return [float(f"{z:.3g}") for z in np.geomspace(ends[0], ends[1], _TRIED)]
