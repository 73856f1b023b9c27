"""The strategies of the page on plug-ins train as they stand there."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.strategies.worlds import Classifier, loader_of, pictures, trainer_for

PAGE = (Path(__file__).parents[2] / "docs" / "plugins.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.S)


@pytest.fixture
def strategies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module with what the page defines in Python."""
    (tmp_path / "strategies_of_the_page.py").write_text("\n".join(BLOCKS), encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "strategies_of_the_page", raising=False)
    return importlib.import_module("strategies_of_the_page")


@pytest.mark.parametrize("name", ["RadiusDPSGD", "SmoothDPSGD"])
def test_a_strategy_of_the_page_trains(name: str, strategies: Any, tmp_path: Path) -> None:
    make = getattr(strategies, name)
    strategy = make(noise_multiplier=1.0, delta=1e-3, seed=0, ledger=str(tmp_path / "ledger.jsonl"))
    trainer_for(tmp_path, strategy, 3).fit(Classifier(), loader_of(pictures()))
    assert strategy.releases == 3 and strategy.epsilon() > 0


def test_the_rule_of_the_page_is_smooth_normalization(strategies: Any) -> None:
    factors = strategies.smooth_factors(torch.tensor([0.0, 1.0, 10_000.0]), 0.5)
    torch.testing.assert_close(factors, torch.tensor([50.0, 0.5 / 1.01, 0.5 / 100.01]))
