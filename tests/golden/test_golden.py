"""Golden runs: what they cover, that they come to the committed values, and that a change of the source is seen."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from dpbench import strategies
from dpbench.privacy.sampling import schemes
from tools.golden import compare
from tools.golden.ledgers import LEDGERS, facts_of
from tools.golden.numbers import numbers, verdict
from tools.golden.scenarios import (
    AXES,
    STRATEGIES,
    Scenario,
    is_valid,
    pairs_of,
    scenarios,
    valid_rows,
    with_twins,
)
from tools.golden.values import values_of, wrong_twins, wrong_values, wrong_weights
from tools.golden.worlds import SAMPLINGS
from tools.trainers import quiet

ROOT = Path(__file__).parents[2]
FLAT = Scenario("dpsgd", "poisson", "examples", "dense", "automatic", "1", "straight", "torch")


@pytest.fixture(autouse=True)
def _tier_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DPBENCH_NATIVE", "auto")  # which golden runs set


def test_every_pair_that_goes_together_is_trained() -> None:
    """A new value fails here until each pair is in a run: enter names into `runs.json`, and write their values."""
    possible = set().union(*map(pairs_of, valid_rows(AXES, is_valid)))
    trained = set().union(*(pairs_of(tuple(one.name.split("/"))) for one in scenarios()))
    assert not possible - trained, f"not trained: {sorted(possible - trained)[:5]}"
    assert not trained - possible
    assert 60 <= len(scenarios()) <= 100


def test_every_strategy_and_scheme_has_golden_runs() -> None:
    """A new one fails here until it has them: add it to `tools/golden/scenarios.py`, and runs with it."""
    made = {getattr(make, "func", make) for make in STRATEGIES.values()}
    assert made == {getattr(strategies, name) for name in strategies.__all__} - {strategies.PrivateStrategy}
    configured = [yaml.safe_load(path.read_text())["_target_"] for path in (ROOT / "conf/strategy").glob("*.yaml")]
    assert {name.rpartition(".")[2] for name in configured} <= {one.__name__ for one in made}
    drawn = {type(make(40, "example")) for make in SAMPLINGS.values()}
    assert drawn == {
        scheme for scheme in schemes() if scheme.record_changes and scheme.__module__.startswith("dpbench")
    }


# ------------------------------------------------------------------------------------- numbers of a key


def test_a_key_gives_the_committed_numbers() -> None:
    quiet()
    now, committed = numbers(), compare.read("numbers.json")
    assert verdict(now, committed) is None
    assert all(len(set(map(str, committed[name]))) > 2 for name in committed if name.startswith("noise"))


def test_changed_numbers_ask_for_random_numbers_to_be_raised() -> None:
    committed = compare.read("numbers.json")
    now = copy.deepcopy(committed)
    now["noise of the small key by torch"][1][2] += 1e-4
    said = str(verdict(now, committed))
    assert "noise of the small key by torch" in said and "raise RANDOM_NUMBERS" in said
    now["RANDOM_NUMBERS"] += 1
    assert "is older" in str(verdict(now, committed))


# ------------------------------------------------------------------------------------- ledgers of this schema


TIERS = {
    "plan_scheduled": pytest.mark.long,  # a minute
    **dict.fromkeys(("truncated_poisson", "adaptive_mean", "adaptive_quantile", "full", "per_layer"), pytest.mark.slow),
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=TIERS.get(name, ())) for name in LEDGERS])
def test_a_committed_ledger_costs_the_same_for_ever(name: str) -> None:
    path = compare.FOLDER / "ledgers" / f"{name}.jsonl"
    then, now = compare.read("ledgers/facts.json")[name], facts_of(path)
    assert {accountant: now["epsilon"][accountant] for accountant in then["epsilon"]} == then["epsilon"]
    assert {**now, "epsilon": {}} == {**then, "epsilon": {}}


# ------------------------------------------------------------------------------------- what differs is said


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Any]:
    """A resumed run and its twin, as a process of its own trains them."""
    return compare.train(
        with_twins([Scenario("dpsgd", "poisson", "examples", "dense", "automatic", "1", "sigkill", "torch")])
    )


@pytest.mark.long
def test_other_epsilons_events_and_weights_are_said(outcomes: dict[str, Any]) -> None:
    killed, straight = with_twins([Scenario.named(next(iter(outcomes)))])
    chosen = [killed, straight]
    assert outcomes[killed.name]["resumed"] and not outcomes[straight.name]["resumed"]
    committed = {name: values_of(outcome) for name, outcome in outcomes.items()}
    assert not [*wrong_values(chosen, outcomes, committed), *wrong_twins(chosen, outcomes)]
    assert not list(wrong_weights(chosen, outcomes, outcomes))

    other = copy.deepcopy(committed)
    other[killed.name]["epsilon"]["pld"] *= 1 + 1e-7
    other[straight.name]["events"][0]["count"] = 19
    said = list(wrong_values(chosen, outcomes, other))
    assert [line.partition(" is ")[0] for line in said] == [f"{killed.name}: epsilon", f"{straight.name}: events"]

    broken = copy.deepcopy(outcomes)
    broken[killed.name]["weights"][0] += 1e-7
    broken[killed.name]["ledger"] += broken[killed.name]["ledger"].splitlines()[-1] + "\n"
    assert len(list(wrong_twins(chosen, broken))) == 2
    moved = copy.deepcopy(outcomes)
    moved[straight.name]["steps"][12] = "0" * 16
    assert list(wrong_weights(chosen, outcomes, moved)) == [
        f"{straight.name}: other weights than before from step 12 on"
    ]


MUTANTS = {
    "a comment": ("privacy/randomness.py", "import hashlib", "import hashlib  # changes no number", False),
    "another stream of noise": ("privacy/randomness.py", "NOISE = 2", "NOISE = 12", True),
    "another stream of lots": ("privacy/randomness.py", "LOTS = 1", "LOTS = 11", True),
    "another divisor": ("privacy/mechanism/mechanism.py", "div_(plan.denominator)", "div_(plan.denominator + 1)", True),
}


@pytest.mark.long
@pytest.mark.parametrize("name", ["a comment", "another stream of noise", "another stream of lots", "another divisor"])
def test_a_change_of_the_source_is_seen(name: str, outcomes: dict[str, Any], tmp_path: Path) -> None:
    file, old, new, differs = MUTANTS[name]
    for folder in ("src", "conf", "tools"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    path = tmp_path / "src/dpbench" / file
    text = path.read_text(encoding="utf-8")
    assert text.count(old) == 1
    path.write_text(text.replace(old, new), encoding="utf-8")
    straight = Scenario.named(next(reversed(outcomes)))
    before = compare.train([straight], tmp_path)
    assert bool(list(wrong_weights([straight], outcomes, before))) == differs


def test_the_base_is_a_commit_with_the_random_numbers_of_today() -> None:
    if not compare.has_history():
        pytest.skip("needs the history of a git checkout")
    then = json.loads(compare.git("show", f"{compare.base()}:tests/golden/numbers.json"))
    assert then["RANDOM_NUMBERS"] == compare.read("numbers.json")["RANDOM_NUMBERS"]


def test_a_base_without_golden_runs_is_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "has_history", lambda: True)
    (line,) = compare.other_weights([], {}, "0" * 40, print)
    assert "is no revision with golden runs" in line and "python -m tools.golden base" in line


@pytest.mark.slow
def test_golden_runs() -> None:
    """All of them, against the committed values and one another; ledgers are read above."""
    assert list(compare.problems(is_whole=False)) == []


@pytest.mark.long
def test_golden_runs_have_the_weights_of_the_base() -> None:
    assert list(compare.problems()) == []
