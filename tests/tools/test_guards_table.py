"""The table of guards in docs/guards.md is of the guards that trainings use."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from dpbench import guards
from dpbench.guards import LIGHTNING, Guard
from dpbench.guards.guard import LightningGuard
from tools import guards_table


def test_every_guard_is_in_a_list() -> None:
    """One that is written and forgotten would look at nothing."""
    written = set()
    for path in Path(guards.__file__).parent.glob("*.py"):
        module = __import__(f"dpbench.guards.{path.stem}", fromlist=["_"])
        written |= {one for _, one in inspect.getmembers(module, inspect.isclass) if issubclass(one, Guard)}
    assert written - {Guard, LightningGuard} == {*LIGHTNING}


@pytest.mark.parametrize("guard", guards_table.every_guard())
def test_a_guard_has_a_name_of_its_own_and_looks_at_something(guard: type[Guard]) -> None:
    others = [other for other in guards_table.every_guard() if other is not guard]
    assert guard.name not in [other.name for other in others]
    assert guard.prevents and guards_table.looks_at(guard)
