"""docs/layers.md: up to date, and it forgets no layer of torch."""

from __future__ import annotations

import inspect
import warnings
from pathlib import Path

import pytest
from torch import nn

from tools import layer_table

PAGE = Path(__file__).parents[2] / "docs" / "layers.md"


@pytest.mark.filterwarnings("ignore")
def test_the_page_is_what_the_layers_say() -> None:
    """`make layers` writes it."""
    outcomes = [layer_table.attempt(case) for case in layer_table.cases()]
    assert PAGE.read_text(encoding="utf-8") == layer_table.page(outcomes) + "\n"


def test_no_layer_of_torch_is_forgotten() -> None:
    """Those that own parameters when they are made of small numbers."""
    named = {case.name.split(",")[0] for case in layer_table.cases()}
    for name, kind in inspect.getmembers(nn, inspect.isclass):
        if not issubclass(kind, nn.Module) or name.startswith("Lazy") or name in named:
            continue
        for arguments in ((), (4,), (4, 2), (4, 2, 2), (4, 8, [2, 4])):
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    made = kind(*arguments)
            except (TypeError, ValueError, AssertionError):
                continue
            own = any(True for _ in made.parameters(recurse=False))
            assert not own, f"{name} has parameters and is not in the table"
