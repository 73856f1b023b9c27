"""The file that a cell of a table chooses in a group of the configuration."""

from __future__ import annotations

from functools import cache

import yaml

from dpbench.harness.reproduce.tables import Table, Variant
from dpbench.harness.run.search_path import conf_dir


def group_choice(group: str, table: Table, row: Variant, column: Variant) -> str:
    """The choice of a cell in a group of the configuration; "" where it leaves the default."""
    words = {}
    for word in table.words_of(row, column):
        key, _, value = word.partition("=")
        words[key] = value
    return words.get(group) or _choice_of_experiment(group, words.get("experiment", ""))


@cache
def _choice_of_experiment(group: str, name: str) -> str:
    """The choice of an experiment's file in a group; "" where it leaves the default."""
    path = conf_dir() / "experiment" / f"{name}.yaml"
    if not path.is_file():
        return ""
    experiment = yaml.safe_load(path.read_text(encoding="utf-8"))
    for choice in experiment["defaults"]:
        if f"override /{group}" in choice:
            return str(choice[f"override /{group}"])
    return ""
