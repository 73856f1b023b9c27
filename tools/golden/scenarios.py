"""Which golden runs there are: every pair of values of two axes that goes together, in about sixty trainings."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from dpbench import strategies
from dpbench.records import LocalTraining, Users
from tools.golden.worlds import NETWORKS, SAMPLINGS

DELTA = 1e-3
STEPS = 20
SEED = 36
FINGERPRINT = "golden"
COMMITTED = Path(__file__).parents[2] / "tests" / "golden" / "runs.json"

STRATEGIES: dict[str, Callable[..., Any]] = {
    "dpsgd": partial(strategies.DPSGD, noise_multiplier=1.0),
    "dpsgd_per_layer": partial(strategies.DPSGD, noise_multiplier=0.8, clipping="per_layer", allocation="dimension"),
    "dpsgd_target": partial(strategies.DPSGD, target_epsilon=8.0, max_grad_norm=0.5),
    "dpsgd_metrics": partial(strategies.DPSGD, noise_multiplier=1.0, metrics={"accuracy": 1.0, "loss": 3.0}),
    "dpsgd_banded": partial(strategies.DPSGD, noise_multiplier=1.0, noise="banded", bands=4),
    "automatic": partial(strategies.AutomaticClipping, noise_multiplier=1.0),
    "adaptive_quantile": partial(
        strategies.AdaptiveQuantileClipping, noise_multiplier=1.0, count_noise_std=4.0, clipping="per_layer"
    ),
    "adaptive_mean": partial(
        strategies.AdaptiveMeanClipping, noise_multiplier=0.5, norm_noise_multiplier=2.0, initial_max_grad_norm=0.5
    ),
    "adaptive_mean_from_noise": partial(
        strategies.AdaptiveMeanClipping, noise_multiplier=0.5, norm_noise_multiplier=2.0
    ),
    "discretized": partial(
        strategies.DiscretizedDPSGD, noise_multiplier=1.0, discretization_threshold=1e-2, correction_threshold=1.0
    ),
    "vector_groups": partial(strategies.VectorGroups, noise_multiplier=1.0, allocation="dimension"),
    "vector_groups_joint": partial(
        strategies.VectorGroups,
        noise_multiplier=1.0,
        split="joint",
        groups={"body": "model.body*", "output": "model.output*"},
        scales={"body": 2.0, "output": 1.0},
    ),
    "clip_only": partial(strategies.ClipOnly, noise_multiplier=1.0),
    "noise_only": partial(strategies.NoiseOnly, noise_multiplier=1.0),
    "federated_averaging": strategies.FederatedAveraging,
    "none": strategies.NonPrivate,
}
WITHOUT_LEDGER = ("clip_only", "noise_only", "federated_averaging", "none")
RECORDS: dict[str, Callable[[], dict[str, Any]]] = {
    "examples": dict,
    "pieces": lambda: {"max_physical_batch_size": 5},
    "microbatches": lambda: {"microbatch_size": 3},
    "users": lambda: {"records": Users(LocalTraining(lr=0.1, batch_size=3, epochs=2, max_steps=4))},
}
AXES = {
    "strategy": tuple(STRATEGIES),
    "sampling": tuple(SAMPLINGS),
    "records": tuple(RECORDS),
    "network": tuple(NETWORKS),
    "way": ("automatic", "manual", "loop"),
    "processes": ("1", "2"),
    "end": ("straight", "exception", "sigkill"),
    "tier": ("kernels", "torch"),
}


@dataclass(frozen=True)
class Scenario:
    """One golden run.

    Attributes:
        strategy: One of `STRATEGIES`.
        sampling: How lots are drawn.
        records: What a record is, and whether its lot is processed in pieces.
        network: What is trained.
        way: Automatic or manual optimization in a Trainer, or a `PrivateLoop`.
        processes: "1", or "2" by torchrun.
        end: "straight", or how the run dies after a checkpoint before it is resumed.
        tier: Whether noise and gradients come from our kernels, or from PyTorch.
    """

    strategy: str
    sampling: str
    records: str
    network: str
    way: str
    processes: str
    end: str
    tier: str

    @property
    def name(self) -> str:
        """All values, such as "dpsgd/poisson/examples/dense/loop/1/straight/torch"."""
        return "/".join(getattr(self, field.name) for field in fields(self))

    @classmethod
    def named(cls, name: str) -> Scenario:
        """Inverse of `name`."""
        return cls(*name.split("/"))

    @property
    def twin(self) -> Scenario | None:
        """The run that must come to the same: the one that does not die, or is made by one process; None: neither."""
        if self.end != "straight":
            return replace(self, end="straight")
        return replace(self, processes="1") if self.processes != "1" else None

    @property
    def private(self) -> bool:
        """Whether there is a ledger."""
        return self.strategy not in WITHOUT_LEDGER

    def make_strategy(self, ledger: Path, root: int | None = SEED, **options: Any) -> Any:
        """The strategy.

        Args:
            ledger: Its place.
            root: Key of the run: of noise, and of the model's random numbers. None: the operating system's entropy.
            **options: Others than the scenario's.
        """
        if self.strategy == "none":
            return STRATEGIES["none"]()
        of_records = RECORDS[self.records]()
        common = {"delta": DELTA, "ledger": str(ledger), "fingerprint": FINGERPRINT}
        return STRATEGIES[self.strategy](**{**common, "seed": root, **of_records, **options})


@contextmanager
def fixed_keys() -> Iterator[None]:
    """Have the seed of a run, a number that only these runs have, be its root key, whatever else the run is made of."""
    with (
        patch("dpbench.callback.run_key.run_key", lambda secret, _: secret),
        patch("dpbench.privacy.releases.ReleaseEngine.lot_key", None),
    ):
        yield


def is_valid(
    strategy: str, sampling: str, records: str, network: str, way: str, processes: str, end: str, tier: str
) -> bool:
    """Whether a combination trains; what is refused is in tests/refusals."""
    users = records == "users"
    if (strategy == "dpsgd_banded") != (sampling in ("cyclic_poisson", "min_separation")):
        return False  # other lots hold a record in any step, and these are for this noise
    if strategy == "dpsgd_banded" and records == "microbatches":
        return False  # an example would move the releases by more than the bound
    if way != "automatic" and (users or strategy in ("dpsgd_metrics", "adaptive_mean_from_noise")):
        return False
    if way == "manual" and records == "pieces":
        return False
    if way == "loop" and (processes != "1" or end != "straight" or strategy == "none"):
        return False
    if records == "microbatches" and sampling in ("sparse_poisson", "truncated_poisson"):
        return False  # their mean size is no multiple of a microbatch's
    if strategy.startswith("adaptive_mean") and sampling == "sparse_poisson":
        return False  # the noise of a mean over one record is larger than any bound
    if end == "sigkill" and processes == "2":
        return False  # torchrun would end both; tests/endurance kills those
    if strategy == "none" and (records != "examples" or processes != "1" or end != "straight"):
        return False
    return strategy != "federated_averaging" or users


@cache
def scenarios() -> tuple[Scenario, ...]:
    """All golden runs: those with an entry in tests/golden/runs.json, which may be empty until it is written."""
    return tuple(map(Scenario.named, json.loads(COMMITTED.read_text(encoding="utf-8"))))


def with_twins(chosen: Iterable[Scenario]) -> list[Scenario]:
    """Scenarios, and what each must come to the same as."""
    by_name: dict[str, Scenario] = {}
    for scenario in chosen:
        last: Scenario | None = scenario
        while last is not None:
            by_name.setdefault(last.name, last)
            last = last.twin
    return list(by_name.values())


# ------------------------------------------------------------------------------------- pairwise coverage

Row = tuple[str, ...]
Pair = tuple[int, str, int, str]
"""(axis, value, axis, value)"""


def valid_rows(axes: Mapping[str, Sequence[str]], is_valid: Callable[..., bool]) -> list[Row]:
    """All rows, one value for each axis, that may stand in the table.

    Args:
        axes: Name → values.
        is_valid: Called with one value for each axis, by its name.
    """
    rows = itertools.product(*axes.values())
    return [row for row in rows if is_valid(**dict(zip(axes, row, strict=True)))]


def pairs_of(row: Row) -> set[Pair]:
    """The pairs of values that a row covers."""
    numbered = list(enumerate(row))
    return {(*one, *other) for one, other in itertools.combinations(numbered, 2)}
