"""What `from dpbench import ...` offers, and when it imports."""

from __future__ import annotations

import subprocess
import sys

import pytest

import dpbench
from dpbench import strategies


def test_all_strategies_are_there() -> None:
    assert set(strategies.__all__) <= set(dpbench.__all__) <= set(dir(dpbench))
    for name in dpbench.__all__:
        assert getattr(dpbench, name) is not None
    assert dpbench.AdaptiveQuantileClipping is strategies.AdaptiveQuantileClipping
    with pytest.raises(AttributeError, match="no attribute 'DPSDG'"):
        _ = dpbench.DPSDG


def test_the_old_name_of_the_loader_warns() -> None:
    with pytest.warns(FutureWarning, match="LotLoader is now PrivateDataLoader"):
        assert dpbench.LotLoader is dpbench.PrivateDataLoader
    words = [sys.executable, "-c", "from dpbench import LotLoader"]
    assert subprocess.run(words, capture_output=True, text=True).stderr.count("is now") == 1


def test_the_package_alone_imports_no_torch() -> None:
    code = "import sys, dpbench; dir(dpbench); print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"


@pytest.mark.parametrize("name", [name for name in strategies.__all__ if name not in ("NonPrivate", "PrivateStrategy")])
def test_a_strategy_says_what_it_is(name: str) -> None:
    cls = getattr(dpbench, name)
    options = {} if name == "FederatedAveraging" else {"noise_multiplier": 1.5}
    text = repr(cls(**options))
    assert text.startswith(f"{name}(") and text.endswith(")") and all(f"{k}={v}" in text for k, v in options.items())
