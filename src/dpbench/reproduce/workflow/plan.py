"""What the workflow trains: from the words of one private training to runs on noise of its size and on its data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from dpbench.data.images import ImageDataModule
from dpbench.data.sources import NOISE, SOURCES
from dpbench.errors import ConfigurationError
from dpbench.modules.image_classifier import ImageClassifier
from dpbench.privacy.accounting.calibration import calibrate_noise_multiplier
from dpbench.privacy.events import Event, SumQuery
from dpbench.privacy.sampling import PoissonSampling
from dpbench.reproduce.tables import Table, Variant
from dpbench.run.build import plain
from dpbench.run.command_line import without_hydra
from dpbench.run.config import class_of
from dpbench.run.jobs import check_run
from dpbench.runs.command import key_of
from dpbench.strategies import PrivateStrategy

NO_PRIVACY = "none"
"""Row of the run without privacy, on noise and on data."""
PLAIN, AUDITED = "plain", "audited"
"""Columns of the runs on data: as they are, and with canaries."""
_SOURCE = "three_tools_2018, section 3"
_GRID = (32.0, 0.5, 7)  # epsilons of the least and the most noise, and how many are tried
_FEW, _MANY = 2_000, 10_000  # fresh images of noise, at least and at most
_PAPER = ("strategy.alpha=1.0", "strategy.beta=2.0")  # defaults of section 3
_CANARIES = 2_000, 5  # at most, and at most one to so many records
_OF_THE_RUN = ("run.", "logger", "hydra.", "audit", "seed", "experiment", "objective", "diagnostics", "data.inserted")


@dataclass(frozen=True)
class Plan:
    """A private training whose noise is to be chosen.

    Attributes:
        words: After `dpbench train`, as given.
        data: Name of the data set.
        model: Name of the network.
        strategy: Name of the strategy, whose noise is calibrated.
        records: How many there are to train on.
        lot: Expected number of records in a lot.
        lot_given: Whether the words name it.
        steps: How many.
        delta: δ.
        seed: Of all runs.
        noise: Noise multipliers to try, increasing.
        dropped: Words that adaptive clipping does not know.
    """

    words: tuple[str, ...]
    data: str
    model: str
    strategy: str
    records: int
    lot: float
    lot_given: bool
    steps: int
    delta: float
    seed: int
    noise: tuple[float, ...] = ()
    dropped: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Of its tables and folders."""
        return f"workflow/{self.data}_{self.model}"

    @property
    def _common(self) -> tuple[str, ...]:
        return tuple(word for word in self.words if key_of(word).partition(".")[0] not in ("strategy", "seed"))

    @property
    def _of_strategy(self) -> tuple[str, ...]:
        return tuple(word for word in self.words if key_of(word).startswith("strategy."))

    def on_noise(self) -> Table:
        """Runs on noise of the data's size and shape: one without privacy, one for each noise multiplier."""
        kept = [word for word in self._common if not key_of(word).startswith(_OF_THE_DATA) and key_of(word) != "data"]
        fresh = min(max(self.records, _FEW), _MANY)
        words = [f"data={NOISE}", *kept, f"data.like={self.data}", f"data.train_size={self.records}"]
        words += [f"data.test_size={fresh}", f"data.expected_batch_size={self.lot:g}", "++trainer.limit_val_batches=0"]
        rows = [Variant(NO_PRIVACY, "no privacy", ("strategy=none",))]
        for z in self.noise:
            own = (f"strategy={self.strategy}", *self._of_strategy, f"strategy.noise_multiplier={z:g}")
            rows.append(Variant(f"z_{z:g}", f"z = {z:g}", own))
        return self._table("Random labels of noise", words, rows, [Variant("noise", "noise")])

    def on_data(self, z: float) -> Table:
        """Runs on the data themselves: without privacy, with constant and with adaptive bounds."""
        constant = (f"strategy={self.strategy}", *self._of_strategy)
        known = tuple(word for word in self._of_strategy if word not in self.dropped)
        private = {self.strategy: constant}
        private.setdefault("adaptive_mean", ("strategy=adaptive_mean", *_PAPER, *known))
        noise = (f"strategy.noise_multiplier={z:g}",)
        rows = [Variant(NO_PRIVACY, "no privacy", ("strategy=none",))]
        rows += [Variant(name, name, (*words, *noise)) for name, words in private.items()]
        canaries = max(20, min(_CANARIES[0], self.records // _CANARIES[1]))
        audit = ("audit=gradient_canaries", f"audit.canaries={canaries}")
        columns = [Variant(PLAIN, "as trained"), Variant(AUDITED, "with canaries", audit)]
        return self._table("Private data", self._common, rows, columns)

    def _table(self, title: str, words: Sequence[str], rows: Sequence[Variant], columns: Sequence[Variant]) -> Table:
        return Table(
            self.name, self.name, title, _SOURCE, "test/accuracy", (self.seed,), 0.0, tuple(words), tuple(rows),
            tuple(columns), {},
        )  # fmt: skip


_OF_THE_DATA = (
    "data.root",
    "data.download",
    "data.val_size",
    "data.train_size",
    "data.test_size",
    "data.expected_batch",
)


def make_plan(words: Sequence[str], noise: Sequence[float] | None = None) -> Plan:
    """Read the words of a private training, and look at the size of its data.

    Args:
        words: As after `dpbench train`; without the noise, which is what the workflow chooses.
        noise: Noise multipliers to try; None: seven of equal ratio, for ε from 32 to 0.5.

    Raises:
        ConfigurationError: They do not compose, or are of a training that this workflow does not know.
        DataError: The data are absent or damaged.
    """
    for word in words:
        _refuse_word(word)
    seed = next((_key_value(word) for word in words if key_of(word) == "seed"), "0")
    config, model, strategy = _composed([*words, f"seed={seed}"])
    _refuse_kind(config)
    options = {name: value for name, value in config["data"].items() if not name.startswith("_")}
    data = ImageDataModule(**options)
    _ = data.sampling  # refuses lots that are larger than the data
    records, lot, steps = len(data.train_set), float(options["expected_batch_size"]), config["trainer"]["max_steps"]
    delta = float(config["strategy"]["delta"])
    given = any(key_of(word) == "data.expected_batch_size" for word in words)
    kept = tuple(word for word in words if key_of(word) != "seed")
    plan = Plan(kept, str(data.name), model, strategy, records, lot, given, steps, delta, int(seed))
    dropped = _unknown_to_adaptive([word for word in kept if key_of(word).startswith("strategy.")])
    return replace(plan, noise=tuple(noise or _grid(plan, data)), dropped=dropped)


def _key_value(word: str) -> str:
    value = word.partition("=")[2]
    if not value.isdecimal():
        raise ConfigurationError(f"{word} must be one whole number: the workflow makes its runs with one seed.")
    return value


def _refuse_word(word: str) -> None:
    key = key_of(word)
    if "=" not in word or word.startswith("-"):
        raise ConfigurationError(f"{word!r} is no setting: write KEY=VALUE or GROUP=NAME, as for dpbench train.")
    if key in ("strategy.noise_multiplier", "strategy.target_epsilon"):
        raise ConfigurationError(
            f"{word}: the noise is what the workflow chooses; --noise-multipliers says which are tried. Leave it out."
        )
    if key != "seed" and key.startswith(_OF_THE_RUN):
        raise ConfigurationError(f"{word}: the workflow sets {key} of its runs itself. Leave it out.")


def _composed(words: Sequence[str]) -> tuple[dict[str, Any], str, str]:
    """The configuration, and the names of model and strategy."""
    cfg = check_run([*words, "run.name=x", "run.group=x", "logger=none"])  # what is refused of any training
    choices = cfg.hydra.runtime.choices
    return plain(without_hydra(cfg)), str(choices["model"]), str(choices["strategy"])


def _refuse_kind(config: dict[str, Any]) -> None:
    """Refuse what has no noise of its kind, or no memory of labels."""
    data = config["data"]
    name = data.get("name")
    known = [one for one in SOURCES if one != NOISE]
    if (
        (config.get("records") or {}).get("_target_")
        or "users" in str(data.get("_target_", "")).lower()
        or (name not in known or not issubclass(class_of(data, "data"), ImageDataModule))
    ):
        what = "users are the records" if (config.get("records") or {}).get("_target_") else f"data={name} is none"
        raise ConfigurationError(
            f"the workflow trains on noise of the size and shape of an image data set with a label for each example "
            f"({', '.join(known)}), and {what}: choose one of these, with records=examples."
        )
    if not issubclass(class_of(config["module"], "module"), ImageClassifier):
        raise ConfigurationError("the workflow asks whether random labels are learned: it needs module=classifier.")
    if not issubclass(class_of(config["strategy"], "strategy"), PrivateStrategy):
        raise ConfigurationError(
            "the workflow calibrates the noise of a private strategy, and trains without one beside it: leave out "
            "strategy=none."
        )
    if config["trainer"]["max_steps"] < 1:
        raise ConfigurationError("noise and data are trained on for as many steps: set trainer.max_steps=1000, say.")


def _unknown_to_adaptive(words: Sequence[str]) -> tuple[str, ...]:
    """Words for a strategy that adaptive clipping has no option for."""
    config, _, _ = _composed(["strategy=adaptive_mean"])
    return tuple(word for word in words if key_of(word).split(".")[1] not in config["strategy"])


def _grid(plan: Plan, data: ImageDataModule) -> list[float]:
    """Noise multipliers of equal ratio, for ε from 32 to 0.5 of one Gaussian query by RDP."""
    lots = PoissonSampling(plan.records, min(1.0, plan.lot / plan.records))

    def release(z: float) -> Event:
        return Event(lots, (SumQuery("all", 1.0, z),))

    least, most, number = _GRID
    ends = [calibrate_noise_multiplier(release, plan.steps, epsilon, plan.delta) for epsilon in (least, most)]
    return [float(f"{z:.3g}") for z in np.geomspace(ends[0], ends[1], number)]


def folder_of(plan: Plan, out: Path) -> Path:
    """Where its results go."""
    return out / plan.name.replace("/", "_")
