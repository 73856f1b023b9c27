"""Old public names work for one more release, with a warning that says the new one."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest

from dpbench.privacy.budget import Budget
from dpbench.privacy.mechanism.clipping import unclipped_factors
from dpbench.privacy.mechanism.recipe import Recipe
from dpbench.privacy.releases import ReleaseEngine

NAMES = [
    ("dpbench.privacy.releases", "Releases", "ReleaseEngine"),
    ("dpbench.privacy.releases", "Trained", "TrainableParameters"),
    ("dpbench.privacy.budget", "Horizon", "TrainingLength"),
    ("dpbench.privacy.mechanism.clipping", "clip_weights", "clip_factors"),
    ("dpbench.privacy.mechanism.clipping", "unclipped_weights", "unclipped_factors"),
    ("dpbench.privacy.mechanism.clipping", "group_norms", "group_squared_norms"),
    ("dpbench.privacy.mechanism.clipping", "WeightFunction", "ClipFactors"),
    ("dpbench.runs.claim", "held", "locked"),
    ("dpbench.reports.run_rows", "unfinished_below", "dpbench.runs.folder.unfinished_runs_below"),
]


@pytest.mark.parametrize(("module", "old", "new"), NAMES)
def test_names_of_modules(module: str, old: str, new: str) -> None:
    new_module, _, new_name = new.rpartition(".")
    current = getattr(import_module(new_module or module), new_name)
    with pytest.warns(FutureWarning, match=f"{old} is called {new} now"):
        assert getattr(import_module(module), old) is current


@pytest.mark.parametrize("module", sorted({module for module, _, _ in NAMES}))
def test_other_names_are_missing_as_ever(module: str) -> None:
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = import_module(module).nothing


@pytest.mark.parametrize(("old", "new"), [("made", "num_releases"), ("take_part", "join"), ("forget", "reset")])
def test_names_of_releases(old: str, new: str) -> None:
    releases: Any = ReleaseEngine(Recipe(), Budget(None, 1e-5, "rdp"), 1.0)
    with pytest.warns(FutureWarning, match=f"ReleaseEngine.{old} is called {new} now"):
        assert getattr(releases, old) == getattr(releases, new)


def test_a_recipe_of_an_older_strategy() -> None:
    with pytest.warns(FutureWarning, match="weights_of.* is called clip_factors now"):
        recipe = Recipe(weights_of=unclipped_factors, private=False)
    assert recipe.clip_factors is unclipped_factors
    with pytest.warns(FutureWarning), pytest.raises(ValueError, match="without clipping is not private"):
        Recipe(weights_of=unclipped_factors)
