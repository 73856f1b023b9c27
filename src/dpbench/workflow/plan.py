"""What the workflow trains: from the words of one private training to runs on noise of its size and on its data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dpbench.data.images import ImageDataModule
from dpbench.data.sources import NOISE, source_names
from dpbench.errors import ConfigurationError
from dpbench.modules.image_classifier import ImageClassifier
from dpbench.privacy.accounting.calibration import calibrate_noise_multiplier
from dpbench.privacy.events import Event, SumQuery
from dpbench.privacy.sampling import PoissonSampling
from dpbench.reproduce.tables import Table
from dpbench.run.build import plain
from dpbench.run.command_line import without_hydra
from dpbench.run.config import class_of
from dpbench.run.jobs import check_run
from dpbench.runs.command import key_of
from dpbench.strategies import PrivateStrategy

NO_PRIVACY = "none"
"""Row of the run without privacy, on noise and on data."""
PLAIN = "plain"
"""Column of the runs on data as they are."""
AUDITED = "audited"
"""Column of the same with canaries."""

_EPSILONS = (32.0, 0.5)  # of the least and of the most noise that is tried
_TRIED = 7
_FRESH = (2_000, 10_000)  # fresh images of noise, at least and at most
_PAPER = ("strategy.alpha=1.0", "strategy.beta=2.0")  # defaults of section 3
_MOST_CANARIES = 2_000
_RECORDS_A_CANARY = 5
_OF_THE_RUN = ("run.", "logger", "hydra.", "audit", "seed", "experiment", "objective", "diagnostics", "data.inserted")
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
    def _common_words(self) -> list[str]:
        return [word for word in self.words if key_of(word).partition(".")[0] not in ("strategy", "seed")]

    @property
    def _strategy_words(self) -> list[str]:
        return [word for word in self.words if key_of(word).startswith("strategy.")]

    def on_noise(self) -> Table:
        """Runs on noise of the data's size and shape: one without privacy, one for each noise multiplier."""
        words = [f"data={NOISE}"]
        for word in self._common_words:
            if key_of(word) != "data" and not key_of(word).startswith(_OF_THE_DATA):
                words.append(word)
        least, most = _FRESH
        words += [
            f"data.like={self.data}",
            f"data.train_size={self.records}",
            f"data.test_size={min(max(self.records, least), most)}",
            f"data.expected_batch_size={self.lot:g}",
            "++trainer.limit_val_batches=0",
        ]
        rows: dict[str, Any] = {NO_PRIVACY: {"label": "no privacy", "words": ["strategy=none"]}}
        for z in self.noise:
            row_words = [f"strategy={self.strategy}", *self._strategy_words, f"strategy.noise_multiplier={z:g}"]
            rows[f"z_{z:g}"] = {"label": f"z = {z:g}", "words": row_words}
        return self._table("Random labels of noise", words, rows, {"noise": None})

    def on_data(self, z: float) -> Table:
        """Runs on the data themselves: without privacy, with constant and with adaptive bounds."""
        usable = [word for word in self._strategy_words if word not in self.dropped]
        private = {self.strategy: [f"strategy={self.strategy}", *self._strategy_words]}
        private.setdefault("adaptive_mean", ["strategy=adaptive_mean", *_PAPER, *usable])
        rows: dict[str, Any] = {NO_PRIVACY: {"label": "no privacy", "words": ["strategy=none"]}}
        for name, words in private.items():
            rows[name] = {"words": [*words, f"strategy.noise_multiplier={z:g}"]}
        canaries = max(20, min(_MOST_CANARIES, self.records // _RECORDS_A_CANARY))
        audit = ["audit=gradient_canaries", f"audit.canaries={canaries}"]
        columns = {PLAIN: {"label": "as trained"}, AUDITED: {"label": "with canaries", "words": audit}}
        return self._table("Private data", self._common_words, rows, columns)

    def _table(self, title: str, words: Sequence[str], rows: Mapping[str, Any], columns: Mapping[str, Any]) -> Table:
        return Table.model_validate(
            {
                "name": self.name,
                "command": self.name,
                "title": title,
                "source": "three_tools_2018, section 3",
                "seeds": [self.seed],
                "hours": 0.0,
                "words": words,
                "rows": rows,
                "columns": columns,
            }
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
    seed = 0
    own_words = []
    for word in words:
        _refuse_word(word)
        if key_of(word) == "seed":
            seed = _seed(word)
        else:
            own_words.append(word)
    config, model, strategy = _composed([*own_words, f"seed={seed}"])
    _refuse_kind(config)
    options = {name: value for name, value in config["data"].items() if not name.startswith("_")}
    data = ImageDataModule(**options)
    _ = data.sampling  # refuses lots that are larger than the data
    plan = Plan(
        words=tuple(own_words),
        data=str(data.name),
        model=model,
        strategy=strategy,
        records=len(data.train_set),
        lot=float(options["expected_batch_size"]),
        lot_given=any(key_of(word) == "data.expected_batch_size" for word in words),
        steps=config["trainer"]["max_steps"],
        delta=float(config["strategy"]["delta"]),
        seed=seed,
    )
    # Adaptive clipping chooses its bounds itself: words such as strategy.max_grad_norm mean nothing to it.
    adaptive, _, _ = _composed(["strategy=adaptive_mean"])
    options_of_adaptive = adaptive["strategy"]
    dropped = [word for word in plan._strategy_words if key_of(word).split(".")[1] not in options_of_adaptive]
    return replace(plan, noise=tuple(noise or _multipliers(plan)), dropped=tuple(dropped))


def _seed(word: str) -> int:
    value = word.partition("=")[2]
    if not value.isdecimal():
        raise ConfigurationError(f"{word} must be one whole number: the workflow makes its runs with one seed.")
    return int(value)


def _refuse_word(word: str) -> None:
    key = key_of(word)
    if "=" not in word or word.startswith("-"):
        raise ConfigurationError(f"invalid override {word!r}: expected KEY=VALUE or GROUP=NAME, as for dpbench train.")
    if key in ("strategy.noise_multiplier", "strategy.target_epsilon"):
        raise ConfigurationError(
            f"{word}: the noise is what the workflow chooses; --noise-multipliers sets those to try. Remove it."
        )
    if key != "seed" and key.startswith(_OF_THE_RUN):
        raise ConfigurationError(f"{word}: the workflow sets {key} of its runs itself. Remove it.")


def _composed(words: Sequence[str]) -> tuple[dict[str, Any], str, str]:
    """The configuration, and the names of model and strategy."""
    cfg = check_run([*words, "run.name=x", "run.group=x", "logger=none"])  # what is refused of any training
    choices = cfg.hydra.runtime.choices
    return plain(without_hydra(cfg)), str(choices["model"]), str(choices["strategy"])


def _refuse_kind(config: Mapping[str, Any]) -> None:
    """Refuse what has no noise of its kind, or no memory of labels."""
    data = config["data"]
    data_sets = [name for name in source_names() if name != NOISE]
    of_users = bool((config.get("records") or {}).get("_target_"))
    is_image_data = (
        data.get("name") in data_sets
        and "users" not in str(data.get("_target_", "")).lower()
        and issubclass(class_of(data, "data"), ImageDataModule)
    )
    if of_users or not is_image_data:
        kind = "users are the records" if of_users else f"data={data.get('name')} is none"
        raise ConfigurationError(
            f"the workflow trains on noise of the size and shape of an image data set with a label for each example "
            f"({', '.join(data_sets)}), and {kind}: choose one of these, with records=examples."
        )
    if not issubclass(class_of(config["module"], "module"), ImageClassifier):
        raise ConfigurationError("the workflow asks whether random labels are learned: it needs module=classifier.")
    if not issubclass(class_of(config["strategy"], "strategy"), PrivateStrategy):
        raise ConfigurationError(
            "the workflow calibrates the noise of a private strategy, and trains without one as well: remove "
            "strategy=none."
        )
    if config["trainer"]["max_steps"] < 1:
        raise ConfigurationError("noise and data are trained on for as many steps: set trainer.max_steps=1000, say.")


def _multipliers(plan: Plan) -> list[float]:
    """Noise multipliers of equal ratio, for ε from 32 to 0.5 of one Gaussian query by RDP."""
    lots = PoissonSampling(plan.records, min(1.0, plan.lot / plan.records))

    def release(z: float) -> Event:
        return Event(lots, (SumQuery("all", 1.0, z),))

    ends = [calibrate_noise_multiplier(release, plan.steps, epsilon, plan.delta) for epsilon in _EPSILONS]
    return [float(f"{z:.3g}") for z in np.geomspace(ends[0], ends[1], _TRIED)]
