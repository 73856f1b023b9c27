"""The plan of a training: it names the run as before, and states in JSON what each release costs."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dpbench.errors import DPBenchError, LedgerError
from dpbench.privacy.accounting.composition import epsilon
from dpbench.privacy.accounting.stated_plan import StatedPlan
from dpbench.privacy.events import Event, Summands, effective_noise_multiplier
from dpbench.privacy.mechanism._description import describe
from dpbench.privacy.mechanism.clipping import clip_factors, normalizing
from dpbench.privacy.mechanism.mechanism import Mechanism
from dpbench.privacy.mechanism.noise_process import Gaussian, Noise, Scheduled
from dpbench.privacy.mechanism.schedules import Factors
from dpbench.privacy.mechanism.training_plan import TrainingPlan
from dpbench.privacy.sampling import PoissonSampling, TruncatedPoissonSampling
from tests.privacy.mechanisms import CASES, FLAT, LAYERS, Case

STEPS = 8
FALLING = Factors((1.0, 1.0, 0.5, 0.25))
GROWING = Factors((1.0, 1.5, 1.5, 2.0))

# Those of `Mechanism` before there was a training plan: part of the key of the noise of every seeded run.
DIGESTS = {
    "dpsgd": "2897411a08c0a6a9938ff4383b6d15fc",
    "per_layer": "f2e0db17a57e42eaee36a3cd593efaba",
    "by_dimension": "9aeee539843efb8a0699fe0999fddf78",
    "unequal": "5eb09a1eb4250bb1975fb7aeff51639c",
    "joint": "c5a68b579a4bee26e31ab3651408c43d",
    "automatic": "2897411a08c0a6a9938ff4383b6d15fc",
    "discretized": "2897411a08c0a6a9938ff4383b6d15fc",
    "rescaled": "95a9857e6676526795008a2d6921d78d",
    "kept": "2897411a08c0a6a9938ff4383b6d15fc",
    "quantile": "878ad009dc47f764f49c5c50ccc22636",
    "quantile_layers": "ab8b0ccef107ae592344f07bb593e659",
    "mean": "eaad65e2f5ae3da60dbb467c2eabf5cb",
    "metrics": "1228d1aa4307afd1883062a4adc26f2f",
    "microbatches": "341c597cded73b0c6f37905d3b906bf8",
    "fixed_size": "30beeac01219404eef25e78b9cb98332",
    "fixed_size_microbatches": "1db4972605e7e72e44b837c4da9fd923",
    "everything": "a33b86a7caf52bb31fec65d1a27088a8",
    "scheduled bounds": "b67d502ae19cfe46138c275a65f01505",
    "scheduled sizes": "d33ee665b018f8a2c76a98707758be24",
    "scheduled noise": "696bd203f05ca073929d2c231199b33f",
    "scheduled everything": "a586798c561f9052f8061b9a0a506bb9",
}
_FACTORS = Factors((1.0, 0.5, 0.25))
_HALVED = Factors((1.0, 0.5))

PLANS: dict[str, TrainingPlan] = {name: case.plan() for name, case in CASES.items()}
PLANS |= {
    "scheduled bounds": CASES["per_layer"].plan(bound_factors=_FACTORS),
    "scheduled sizes": CASES["per_layer"].plan(size_factors=_FACTORS),
    "scheduled noise": CASES["dpsgd"].plan(Scheduled(0.9, _FACTORS)),
    "scheduled everything": CASES["everything"].plan(Scheduled(0.9, _FACTORS), size_factors=_HALVED),
}
MORE: dict[str, TrainingPlan] = {
    "metrics that move": CASES["metrics"].plan(Scheduled(1.3, FALLING), size_factors=GROWING),
    "mean norms that move": CASES["mean"].plan(Scheduled(1.3, FALLING), size_factors=GROWING),
    "microbatches that move": CASES["microbatches"].plan(Scheduled(1.3, FALLING), bound_factors=GROWING),
    "fixed sizes that move": CASES["fixed_size"].plan(size_factors=GROWING),
    "truncated": Case(FLAT, sampling=TruncatedPoissonSampling(240, 0.05, 16)).plan(),
    "by user": Case(LAYERS, sampling=PoissonSampling(240, 0.05, unit="user")).plan(),
    "weights": Case(FLAT, summands=Summands(total_weight=90.0)).plan(),
}


ALL = {**PLANS, **MORE}


def test_digests_are_those_of_before() -> None:
    assert {name: f"{plan.digest:032x}" for name, plan in PLANS.items()} == DIGESTS


def test_bounds_of_a_checkpoint_name_the_run() -> None:
    """The first ones, as before; the present ones are those of the next release."""
    mechanism = CASES["quantile_layers"].build(memory={"bounds": ((0.1, 0.2), (0.3, 0.4))}, step=5)
    assert f"{mechanism.training_plan.digest:032x}" == "6e8cea0676b9972e8bc4a7f2e9b33422"
    assert mechanism.bounds == ((0.1, 0.2), (0.3, 0.4))
    assert [group.max_grad_norm for group in mechanism.plan.groups] == [0.3, 0.4]


def through_json(plan: TrainingPlan) -> StatedPlan:
    data = json.loads(json.dumps(plan.to_dict(), allow_nan=False))
    stated = StatedPlan.from_dict(data)
    assert stated.to_dict() == data
    return stated


@pytest.mark.parametrize("name", ALL)
def test_the_stated_plan_has_the_event_of_each_step(name: str) -> None:
    """The planned one, and that of the queries themselves, with first bounds and with others."""
    plan = ALL[name]
    stated = through_json(plan)
    for step in range(STEPS):
        planned, read = plan.event(step), stated.event(step)
        assert read.sampling == planned.sampling == plan.release(step).sampling
        assert read.queries[0].noise_std == pytest.approx(planned.queries[0].noise_std, rel=2e-10)
        bounds = [3.7 * (place + 1) * group.max_grad_norm for place, group in enumerate(plan.groups)]
        for release in (plan.release(step), plan.release(step, bounds)):
            z = effective_noise_multiplier(release.queries)
            assert z == pytest.approx(stated.effective_multiplier(step), rel=1e-12)


@pytest.mark.parametrize("name", ["everything", "metrics that move"])
def test_epsilon_by_the_header_alone(name: str) -> None:
    """Against an accountant that gets the queries of each release."""
    plan = ALL[name]
    releases = [plan.release(step) for step in range(STEPS)]
    by_queries = Counter(Event(one.sampling, one.queries) for one in releases)
    assert epsilon(through_json(plan).events(STEPS), 1e-5) == pytest.approx(epsilon(by_queries, 1e-5), rel=1e-8)


def test_the_plan_is_one_of_its_parameters() -> None:
    with pytest.raises(ValueError, match="is for parameters with"):
        Mechanism(CASES["dpsgd"].plan(), [nn.Parameter(torch.zeros(3))])


# ------------------------------------------------------------------------------- what cannot be described


class Shrinking(Noise):
    """Noise of a user's own."""

    def multiplier(self, step: int) -> float:
        return 1.0 / (step + 1)


class Doubled(Gaussian):
    """Not what it inherits."""

    def multiplier(self, step: int) -> float:
        return 2 * self.noise_multiplier


@pytest.mark.parametrize("noise", [Shrinking(), Doubled(1.0)])
def test_noise_of_a_users_own_is_named_and_not_compared(noise: Noise) -> None:
    stated = through_json(CASES["dpsgd"].plan(noise))
    assert stated.to_dict()["noise"] == {"process": f"{__name__}.{type(noise).__name__}", "described": False}
    with pytest.raises(LedgerError, match=r"not one of dpbench's: each release states its cost"):
        stated.event(0)


@dataclass(frozen=True)
class Own:
    threshold: float = 1.0
    limit: float = math.inf

    def method(self, squared_norms: Tensor, bound: float) -> Tensor:
        return squared_norms


def test_descriptions() -> None:
    own = f"{__name__}.Own"
    for value, description in (
        (clip_factors, {"name": "dpbench.clip_factors"}),
        (normalizing(0.5), {"name": "dpbench.normalize_weights", "options": {"stability": 0.5}}),
        (Own(2.0, -math.inf), {"name": own, "options": {"threshold": 2.0, "limit": "-inf"}}),
        (Own().method, {"name": f"{own}.method", "described": False}),
        (partial(clip_factors, 1, 2, 3), {"name": "dpbench.clip_factors", "described": False}),
        ({"b": {2, 1}, "a": (1, None, True)}, {"b": ["1", "2"], "a": [1, None, True]}),
    ):
        assert describe(value) == description
    assert describe(lambda x: x)["described"] is False


def test_a_recipe_is_told_and_compared_by_nobody() -> None:
    """It changes no cost, and whoever upgrades may call its functions otherwise."""
    one = through_json(ALL["everything"])
    assert one == one.model_copy(update={"recipe": {"name": "other"}})
    assert one.recipe["options"]["adaptation"]["name"] == "dpbench.QuantileBounds"


# ------------------------------------------------------------------------------- what is no plan

GOOD = ALL["metrics that move"].to_dict()
WRONG = {
    "noise.noise_multiplier": [math.nan, math.inf, 0.0, 1e300, 1e-300, 10**400, True, "1", None],
    "noise.factors": [None, [[1.0]], "ab", [[0.0, 1]], [[1.0, 0]]],
    "noise.process": ["banded", None, "gaussian"],
    "noise": [None, {}, {"process": "gaussian"}, {"process": "x.Y", "described": True}],
    "size_factors": [None, [[-1.0, 1]]],
    "bound_factors": [None, [[math.nan, 1]]],
    "sampling": [None, [], {"kind": "poisson"}, {"kind": "magic"}],
    "sampling.sample_rate": [math.nan, -0.5, 2.0, "0.1"],
    "sampling.population": ["240", 0],
    "sampling.unit": [3],
    "summands": [None, {"unit": "", "per_summand": 1}],
    "summands.per_summand": [0, 1.5, True, "1", None],
    "summands.unit": [None],
    "summands.total_weight": [0.0],
    "groups": [None, [3], [{"name": "all"}]],
    "groups.0.max_grad_norm": [0.0],
    "groups.0.name": [3, "earlier/all"],
    "groups.0.coordinates": [-1],
    "statistics.0.noise_std": [0.0],
    "statistics.0.bound": [0.0],
    "statistics.0.size": [0],
    "allocation": [None, "some"],
    "digest": [None, "0" * 31, "G" * 32],
    "recipe": [None],
    "participations": [3],
}


def changed(data: Any, place: str, value: Any) -> Any:
    """A deep copy with another value in one place, such as "groups.0.name"."""
    copy = json.loads(json.dumps(data))
    inner = copy
    *keys, last = place.split(".")
    for key in keys:
        inner = inner[int(key) if key.isdigit() else key]
    inner[last] = value
    return copy


@pytest.mark.parametrize("place", WRONG)
def test_what_is_no_plan(place: str) -> None:
    for value in WRONG[place]:
        with pytest.raises((DPBenchError, TypeError, OverflowError)) as caught:
            StatedPlan.from_dict(changed(GOOD, place, value))
        assert "\n" not in str(caught.value)
