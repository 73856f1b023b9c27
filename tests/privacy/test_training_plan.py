"""The plan of a training: it names the run as before, and states in JSON what each release costs."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dpbench.errors import ConfigurationError, DPBenchError, LedgerError
from dpbench.privacy.accounting.composition import epsilon
from dpbench.privacy.accounting.stated_plan import StatedPlan
from dpbench.privacy.events import Event, Summands, effective_noise_multiplier
from dpbench.privacy.gradients.discretization import Discretization
from dpbench.privacy.mechanism._description import describe
from dpbench.privacy.mechanism.adaptive import MeanNormBounds, QuantileBounds
from dpbench.privacy.mechanism.clipping import clip_factors, normalizing
from dpbench.privacy.mechanism.denoising import ErrorCorrection
from dpbench.privacy.mechanism.groups import flat_groups
from dpbench.privacy.mechanism.mechanism import Mechanism
from dpbench.privacy.mechanism.noise_process import Gaussian, Noise, Scheduled
from dpbench.privacy.mechanism.recipe import Recipe
from dpbench.privacy.mechanism.schedules import Factors
from dpbench.privacy.mechanism.training_plan import TrainingPlan
from dpbench.privacy.sampling import FixedSizeSampling, PoissonSampling, TruncatedPoissonSampling
from tests.privacy.mechanisms import CASES, FLAT, LAYERS, Case

STEPS = 8
FALLING = Factors((1.0, 1.0, 0.5, 0.25))
GROWING = Factors((1.0, 1.5, 1.5, 2.0))

# Those of `Mechanism` before there was a training plan: part of the key of the noise of every seeded run.
DIGESTS = {
    "dpsgd": "2897411a08c0a6a9938ff4383b6d15fc",
    "per_layer": "f2e0db17a57e42eaee36a3cd593efaba",
    "per_parameter": "6285ff9ff4343b1f6a80307fba615efc",
    "by_dimension": "9aeee539843efb8a0699fe0999fddf78",
    "unequal": "5eb09a1eb4250bb1975fb7aeff51639c",
    "joint": "c5a68b579a4bee26e31ab3651408c43d",
    "automatic": "2897411a08c0a6a9938ff4383b6d15fc",
    "automatic_layers": "f2e0db17a57e42eaee36a3cd593efaba",
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


@pytest.mark.parametrize("name", PLANS)
def test_the_digest_is_that_of_before(name: str) -> None:
    assert f"{PLANS[name].digest:032x}" == DIGESTS[name]


def test_bounds_of_a_checkpoint_name_the_run() -> None:
    """The first ones, as before; the present ones are those of the next release."""
    mechanism = CASES["quantile_layers"].build(memory={"bounds": ((0.1, 0.2), (0.3, 0.4))}, step=5)
    assert f"{mechanism.training_plan.digest:032x}" == "6e8cea0676b9972e8bc4a7f2e9b33422"
    assert mechanism.bounds == ((0.1, 0.2), (0.3, 0.4))
    assert [group.max_grad_norm for group in mechanism.plan.groups] == [0.3, 0.4]


def through_json(plan: TrainingPlan) -> StatedPlan:
    text = json.dumps(plan.to_dict(), allow_nan=False)
    stated = StatedPlan.from_dict(json.loads(text))
    assert stated.to_dict() == json.loads(text)
    assert stated == StatedPlan.from_dict(plan.to_dict())
    return stated


@pytest.mark.parametrize("name", [*PLANS, *MORE])
def test_the_stated_plan_has_the_event_of_each_step(name: str) -> None:
    """The planned one, and that of the queries themselves, with first bounds and with others."""
    plan = {**PLANS, **MORE}[name]
    stated = through_json(plan)
    for step in range(STEPS):
        planned, read = plan.event(step), stated.event(step)
        assert read.sampling == planned.sampling == plan.release(step).sampling
        assert read.queries[0].noise_std == pytest.approx(planned.queries[0].noise_std, rel=2e-10)
        bounds = [3.7 * (place + 1) * group.max_grad_norm for place, group in enumerate(plan.groups)]
        for release in (plan.release(step), plan.release(step, bounds)):
            z = effective_noise_multiplier(release.queries)
            assert z == pytest.approx(stated.effective_multiplier(step), rel=1e-12)


@pytest.mark.parametrize("name", ["metrics that move", "everything", "fixed sizes that move", "scheduled bounds"])
def test_epsilon_of_a_prefix_by_the_header_alone(name: str) -> None:
    """Against an accountant that gets the queries of each release."""
    plan = {**PLANS, **MORE}[name]
    stated = through_json(plan)
    whole = 0.0
    for prefix in (1, 3, STEPS):
        releases = [plan.release(step) for step in range(prefix)]
        by_queries = Counter(Event(one.sampling, one.queries) for one in releases)
        value = epsilon(stated.events(prefix), 1e-5)
        assert value == pytest.approx(epsilon(by_queries, 1e-5), rel=1e-8)
        assert value > whole
        whole = value


def test_the_plan_is_one_of_its_parameters() -> None:
    with pytest.raises(ValueError, match="is for parameters with"):
        Mechanism(CASES["dpsgd"].plan(), [nn.Parameter(torch.zeros(3))])


def test_constant() -> None:
    moving = {name for name, plan in {**PLANS, **MORE}.items() if not plan.constant}
    assert moving == {name for name in {**PLANS, **MORE} if "scheduled" in name or "move" in name}


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
    name = f"tests.privacy.test_training_plan.{type(noise).__name__}"
    assert stated.to_dict()["noise"] == {"process": name, "described": False}
    with pytest.raises(LedgerError, match=r"not one of dpbench's: what a release costs stands in its line"):
        stated.event(0)


@dataclass(frozen=True)
class Own:
    threshold: float = 1.0
    limit: float = math.inf

    def __call__(self, gradients: Any, rows: int, sizes: Sequence[int]) -> Any:
        return gradients


class Stateful:
    def method(self, squared_norms: Tensor, bound: float) -> Tensor:
        return squared_norms


def test_descriptions() -> None:
    here = "tests.privacy.test_training_plan"
    assert describe(clip_factors) == {"name": "dpbench.clip_factors"}
    assert describe(normalizing(0.5)) == {"name": "dpbench.normalize_weights", "options": {"stability": 0.5}}
    assert describe(partial(flat_groups, max_grad_norm=2.0))["options"] == {"max_grad_norm": 2.0}
    assert describe(Own(2.0)) == {"name": f"{here}.Own", "options": {"threshold": 2.0}}
    assert describe(Own(limit=-math.inf))["options"] == {"limit": "-inf"}
    assert describe(Stateful()) == {"name": f"{here}.Stateful", "described": False}
    assert describe(Stateful().method) == {"name": f"{here}.Stateful.method", "described": False}
    assert describe(lambda x: x)["described"] is False
    assert describe(partial(clip_factors, 1, 2, 3)) == {"name": "dpbench.clip_factors", "described": False}
    assert describe({"b": {2, 1}, "a": (1, None, True)}) == {"b": ["1", "2"], "a": [1, None, True]}
    recipe = Recipe(
        clip_factors=Stateful().method,
        transform=Discretization(0.5),
        adaptation=MeanNormBounds(),
        denoiser=ErrorCorrection(0.1, priors=(0.2, 0.3, 0.5)),
    )
    described = describe(recipe)
    assert described["options"]["denoiser"]["options"]["priors"] == [0.2, 0.3, 0.5]
    assert json.loads(json.dumps(described, allow_nan=False)) == described


def test_a_recipe_is_told_and_compared_by_nobody() -> None:
    """It changes no cost, and whoever upgrades may call its functions otherwise."""
    plan = Case(FLAT, Recipe(adaptation=QuantileBounds())).plan()
    one = through_json(plan)
    other = one.model_copy(update={"recipe": {"name": "other"}})
    assert one == other and one.recipe["options"]["adaptation"]["name"] == "dpbench.QuantileBounds"


def test_a_plan_without_solution_is_refused() -> None:
    plan = Case(FLAT, Recipe(adaptation=QuantileBounds(count_noise_std=0.1))).plan()
    with pytest.raises(ConfigurationError, match="Theorem 1 has no solution"):
        plan.release(0)
    with pytest.raises(ConfigurationError, match="must hold"):
        Case(FLAT, sampling=FixedSizeSampling(240, 12)).plan(size_factors=Factors((1.0, 30.0))).release(1)


# ------------------------------------------------------------------------------- what is no plan

GOOD = CASES["metrics"].plan(Scheduled(1.3, FALLING), size_factors=GROWING).to_dict()
NUMBERS: list[Any] = [math.nan, math.inf, -1.0, 0.0, 0, 1e300, 1e-300, 10**400, True, "1", None, [1], {}]
COUNTS: list[Any] = [0, -1, 1.5, True, "1", None, [1], math.nan]
WRONG: list[tuple[tuple[Any, ...], list[Any]]] = [
    (("noise", "noise_multiplier"), NUMBERS),
    (("noise", "factors"), [None, 1, {}, [1], [[1.0]], [[1.0, 2, 3]], "ab", [None], [[[]]]]),
    (("noise", "factors", 0, 0), NUMBERS),
    (("noise", "factors", 0, 1), COUNTS),
    (("noise", "process"), ["banded", None, 3, ["gaussian"], {}, True, "gaussian"]),
    (("noise",), [None, [], 1, "gaussian", {}, {"process": "gaussian"}, {"process": "x.Y", "described": True}]),
    (("size_factors", 0, 0), NUMBERS),
    (("size_factors", 0, 1), COUNTS),
    (("size_factors",), [None, {}, [[1.0]], "x"]),
    (("bound_factors",), [None, {}, [[1.0]], [[math.nan, 1]]]),
    (("sampling",), [None, [], 3, {"kind": "poisson"}, "poisson"]),
    (("sampling", "sample_rate"), [math.nan, -0.5, 2.0, "0.1", None, [0.1], {}]),
    (("sampling", "population"), ["240", None, 0, -4]),
    (("sampling", "unit"), [3, None, ["x"]]),
    (("summands",), [None, {}, [], {"unit": "", "per_summand": 1}]),
    (("summands", "per_summand"), COUNTS),
    (("summands", "unit"), [None, 3, []]),
    (("summands", "total_weight"), [one for one in NUMBERS if one is not None]),
    (("groups",), [None, {}, "x", [3], [[]], [None], [{}], [{"name": "all"}]]),
    (("groups", 0, "max_grad_norm"), NUMBERS),
    (("groups", 0, "name"), [None, 3, [], "earlier/all"]),
    (("groups", 0, "coordinates"), [-1, 1.5, True, None, "3"]),
    (("statistics", 0, "noise_std"), NUMBERS),
    (("statistics", 0, "bound"), NUMBERS),
    (("statistics", 0, "size"), COUNTS),
    (("statistics",), [None, {}, [3]]),
    (("allocation",), [None, 3, "some", []]),
    (("digest",), [None, 3, "", "0" * 31, "G" * 32, "0" * 33]),
    (("recipe",), [None, 3, []]),
]


def changed(data: Any, place: tuple[Any, ...], value: Any) -> Any:
    """A deep copy with another value in one place."""
    copy = json.loads(json.dumps(data))
    inner = copy
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    return copy


@pytest.mark.parametrize(("place", "values"), WRONG, ids=[".".join(map(str, place)) for place, _ in WRONG])
def test_what_is_no_plan(place: tuple[Any, ...], values: list[Any]) -> None:
    for value in values:
        with pytest.raises((DPBenchError, TypeError, OverflowError)) as caught:
            StatedPlan.from_dict(changed(GOOD, place, value))
        assert "\n" not in str(caught.value)


def test_a_plan_with_other_fields_is_none() -> None:
    for data in ({**GOOD, "participations": 3}, {k: v for k, v in GOOD.items() if k != "noise"}, None, [], 3, "plan"):
        with pytest.raises(LedgerError, match=r"valid dictionary|Field required|Extra inputs"):
            StatedPlan.from_dict(data)
