"""Every configuration file composes, and every target binds to its signature."""

from __future__ import annotations

import inspect
from itertools import zip_longest
from typing import Any

import pandas as pd
import pytest
from hydra.utils import get_object
from omegaconf import OmegaConf, open_dict

from dpbench.data import UserDataModule
from dpbench.harness.reproduce._results import with_choices
from dpbench.harness.reproduce.tables import read_table
from dpbench.harness.run.config import TARGETS
from dpbench.harness.run.search_path import conf_dir
from dpbench.options import options_of
from dpbench.strategies import PrivateStrategy
from tests.support.configs import GROUPS, STRATEGIES, composed

CHOICES = {group: [f"{group}={name}" for name in names] for group, names in GROUPS.items()}
ALONE = ("debug", "experiment", "hparams_search", "launcher", "module")
"""Groups whose files set keys of other groups, so that each is composed by itself."""
GIVEN = {  # what the harness passes beside the file
    "model": {"input_shape", "num_classes", "vocabulary_size", "num_features", "num_tags", "num_targets"},
    "data": {"seed"},
    "module": {"model", "optimizer", "num_classes", "vocabulary_size", "num_tags", "num_targets"},
    "strategy": {"seed", "ledger", "fingerprint", "records", "audit"},
    "optimizer": {"params"},
    "schedule": {"optimizer"},
    "trainer": {"logger", "callbacks", "default_root_dir"},
}


def bundles() -> list[str]:
    """Words that together name every file once: one of each group at a time."""
    together = zip_longest(*(choices for group, choices in CHOICES.items() if group not in ALONE), fillvalue="")
    return [*(choice for group in ALONE for choice in CHOICES[group]), *map(" ".join, together)]


@pytest.mark.parametrize("choices", bundles())
def test_composes_and_targets_bind(choices: str) -> None:
    """A strategy, and a data set by users, have each option of their class; a strategy also its default."""
    cfg = composed(*choices.split())
    for group, given in GIVEN.items():
        options: Any = OmegaConf.to_container(cfg[group], resolve=True)
        if not options["_target_"]:
            continue  # no schedule, or a module that makes its own model or optimizer
        target = get_object(options.pop("_target_"))
        options.pop("_partial_", None)
        if group == "strategy":
            options.pop("secure")
            given = given if issubclass(target, PrivateStrategy) else set()
        if target is UserDataModule or (group == "strategy" and given):
            assert options.keys() == options_in(target, group).keys()
        if group in ("model", "module"):
            given = given & options_of(target).keys()
        inspect.signature(target).bind(**dict.fromkeys(options), **dict.fromkeys(given - options.keys()))


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_strategy_has_the_defaults_of_its_class(name: str) -> None:
    cfg = OmegaConf.merge(
        *(OmegaConf.load(conf_dir() / file) for file in ("base/strategy.yaml", f"strategy/{name}.yaml"))
    )
    defaults = options_in(STRATEGIES[name], "strategy").items()
    differing = {option for option, default in defaults if OmegaConf.select(cfg, option) != default}
    assert differing == {"noise_multiplier"}  # in Python there is no default noise


def options_in(cls: type, group: str) -> dict[str, Any]:
    """Those that a user sets, with their defaults in Python."""
    options = options_of(cls)
    return {name: option.default for name, option in options.items() if name not in TARGETS[group].reserved}


@pytest.mark.parametrize("group", ["strategy", "data"])
def test_a_file_says_nothing_that_the_common_one_says(group: str) -> None:
    for name in GROUPS[group]:
        own = OmegaConf.load(conf_dir() / group / f"{name}.yaml")
        common = "strategy" if group == "strategy" else own.defaults[0].partition("@")[0].removeprefix("/base/")
        base = OmegaConf.load(conf_dir() / "base" / f"{common}.yaml")
        repeated = {key for key, value in own.items() if key in base and base[key] == value}
        assert not repeated - ({"secure"} if name == "none" else set()), (name, repeated)


def test_every_strategy_has_a_page() -> None:
    pages = {path.stem for path in (conf_dir().parent / "docs" / "strategies").glob("*.md")}
    assert set(GROUPS["strategy"]) - {"clip_only", "noise_only", "none"} <= pages
    assert {"references", "common"} <= pages


def test_experiments_win_over_defaults_and_words_over_experiments() -> None:
    assert composed("experiment=nasr/mnist_dpsgd").trainer.max_steps == 8000
    assert composed("experiment=nasr/mnist_dpsgd", "trainer.max_steps=5").trainer.max_steps == 5
    assert composed("experiment=nasr/mnist_dpsgd").hydra.runtime.choices.data == "mnist"


@pytest.mark.parametrize(
    ("experiment", "table", "row", "words"),
    [
        ("recipes/cifar10", "recipes_cifar10", "linear", ("model=mlp", "model.hidden=[]", "optimizer.lr=10")),
        ("recipes/mnist", "recipes_mnist_scattering", "linear_1", ("strategy.target_epsilon=1", "optimizer.lr=2")),
    ],
)
def test_recipes_are_what_their_tables_measured(experiment: str, table: str, row: str, words: tuple[str, ...]) -> None:
    runs = pd.read_csv(conf_dir().parent / "results" / table / "runs.csv")
    measured = _settings(*str(runs.loc[runs["row"] == row, "words"].iloc[0]).split())
    assert _settings(f"experiment={experiment}", *words) == measured


@pytest.mark.long
@pytest.mark.parametrize(
    ("table", "recipe", "own"),
    [
        ("recipes/frozen", ("experiment=recipes/cifar10", "model=mlp", "model.hidden=[]", "optimizer.lr=10"), {}),
        ("recipes/frozen_mnist", ("experiment=recipes/mnist",), {"epsilon_1": ("optimizer.lr=2",)}),
    ],
)
def test_frozen_recipes_are_unchanged(table: str, recipe: tuple[str, ...], own: dict[str, tuple[str, ...]]) -> None:
    frozen = with_choices(read_table(table), conf_dir().parent / "results")
    for row, column in frozen.cells:
        if row.name == "mnist_writers":
            continue  # its records are others: compared below
        epsilon = column.name.removeprefix("epsilon_")
        words = [f"data={row.name}", f"strategy.target_epsilon={epsilon}", "strategy.accountant=rdp"]
        expected = _settings(*recipe, *own.get(column.name, ()), *words)
        here = _settings(*frozen.words_of(row, column))
        if table == "recipes/frozen":
            # 60 epochs of as many records as there are, to the next step; sides that the features divide.
            steps = here["trainer"]["max_steps"]
            assert abs(steps - 60 * _RECORDS[row.name] / 8192) < 1
            expected["trainer"]["max_steps"] = expected["schedule"]["total_iters"] = steps
            if row.name.endswith("mnist"):
                expected["data"]["image_size"] = 32
        assert here == expected, (row.name, column.name)


_RECORDS = {"cifar10": 50_000, "cifar100": 50_000, "svhn": 73_257, "fashion_mnist": 60_000, "mnist": 60_000}


def test_the_frozen_recipe_by_writer_has_the_same_rate_steps_and_optimizer() -> None:
    frozen = with_choices(read_table("recipes/frozen"), conf_dir().parent / "results")
    lines = {row.name: row for row in frozen.rows}
    names = ("cifar10", "mnist_writers")
    images, writers = (_settings(*frozen.words_of(lines[name], frozen.columns[0])) for name in names)
    del images["strategy"]["max_physical_batch_size"]  # of speed alone, and not for users
    del writers["strategy"]["max_physical_batch_size"]
    for group in ("strategy", "optimizer", "schedule", "ema_decay", "trainer", "model"):
        assert images[group] == writers[group], group
    assert images["data"]["features"] == writers["data"]["options"]["features"]
    rates = images["data"]["expected_batch_size"] / 50_000, writers["data"]["expected_batch_size"] / 539
    assert round(rates[0], 3) == round(rates[1], 3)
    assert (writers["records"]["local"]["batch_size"], writers["records"]["local"]["lr"]) == (None, 1)


def _settings(*words: str) -> dict[str, Any]:
    """What decides on the figures of a run, besides its seed."""
    cfg = composed(*words, "seed=0", "logger=none")
    with open_dict(cfg):
        del cfg.hydra, cfg.run
    found = OmegaConf.to_container(cfg, resolve=True)
    assert isinstance(found, dict)
    return {str(key): value for key, value in found.items()}


@pytest.mark.parametrize(
    ("words", "noise_multiplier"),
    [
        ([], 1.1),
        (["strategy.target_epsilon=3"], None),  # computed for it
        (["strategy.target_epsilon=3", "strategy.noise_multiplier=1.1"], 1.1),  # ends there
        (["strategy.target_epsilon=3", "strategy=adaptive_quantile"], None),
        (["strategy.noise_multiplier=2"], 2),
    ],
)
def test_a_target_alone_computes_the_noise(words: list[str], noise_multiplier: float | None) -> None:
    assert composed(*words).strategy.noise_multiplier == noise_multiplier
