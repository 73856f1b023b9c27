"""Options of strategies: wrong types get one line, right ones are shown where they differ."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest

from dpbench.errors import ConfigurationError
from dpbench.options import checked_value, options_of
from dpbench.strategies import DPSGD, AdaptiveQuantileClipping
from tests.support.configs import STRATEGIES


@pytest.mark.parametrize("name", sorted(STRATEGIES))
def test_each_option_of_each_strategy_is_checked(name: str) -> None:
    cls: Any = STRATEGIES[name]
    for option in options_of(cls):
        with pytest.raises(ConfigurationError, match=f"^{option} must be .*, not b'x'"):
            cls(**{"noise_multiplier": 1.0, **{option: b"x"}})


def test_a_list_is_a_tuple_and_a_tuple_a_list() -> None:
    assert checked_value(list[float] | None, (1.5, 2), "xs") == [1.5, 2]
    assert checked_value(tuple[float, ...], [1.5, 2], "xs") == (1.5, 2)


def test_numbers_of_numpy_become_pythons() -> None:
    strategy = DPSGD(np.float32(0.5), noise_multiplier=np.float64(2), seed=np.int64(3))  # type: ignore[arg-type]
    assert (type(strategy.max_grad_norm), strategy.max_grad_norm) == (float, 0.5)
    assert (type(strategy.seed), strategy.seed) == (int, 3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"noise_multiplyer": 1.0}, "DPSGD has no option 'noise_multiplyer'. Did you mean noise_multiplier"),
        ({"qqq": 1.0}, "DPSGD has no option 'qqq'. Known: accountant, after, "),
        ({"noise_multiplier": "1"}, "noise_multiplier must be a positive number .* or null, not '1'"),
        ({"noise_multiplier": 10**5000}, "noise_multiplier must be .* or null, not a number of more"),
        ({"clipping": 3}, "clipping must be flat, per_layer, per_parameter or by_dimension, not 3"),
        ({"seed": -1}, "seed must be a whole number of at least 0 or null, not -1"),
        ({"metrics": {"loss": "x"}}, "metrics must be a dictionary in which each value is a number or null"),
        ({"audit": True}, "audit must be an audit or null, not True"),
        ({"ledger": ""}, "ledger must be the name of a file or null, not ''"),
    ],
    ids=["misspelled", "unknown", "float", "large", "choice", "negative", "dictionary", "object", "file"],
)
def test_messages(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message) as caught:
        DPSGD(**options)
    assert "\n" not in str(caught.value)


def test_values_by_position() -> None:
    with pytest.raises(ConfigurationError, match="max_grad_norm"):
        DPSGD(1.0, noise_multiplier=1.0, max_grad_norm=2.0)
    with pytest.raises(ConfigurationError, match=r"at most \d+ positional values \(.*\), not 60: write name=value"):
        DPSGD(*[1.0] * 60)


def test_they_say_what_they_are() -> None:
    assert repr(DPSGD(1.0, delta=1e-5, target_epsilon=3)) == "DPSGD(target_epsilon=3)"
    named = AdaptiveQuantileClipping(0.7, noise_multiplier=1.0, clipping="per_layer")
    assert repr(named) == "AdaptiveQuantileClipping(quantile=0.7, noise_multiplier=1.0, clipping='per_layer')"
    assert repr(pickle.loads(pickle.dumps(named))) == repr(copy.deepcopy(named)) == repr(named)


class Half(DPSGD):
    """A user's own strategy, with an option of its own."""

    def __init__(self, half: float, *, words: list[str] | None = None, **options: Any) -> None:
        super().__init__(max_grad_norm=half / 2, **options)


def test_a_users_own_strategy() -> None:
    half = Half(3.0, noise_multiplier=1.0, words=["a"])
    assert half.max_grad_norm == 1.5
    assert repr(half) == "Half(half=3.0, noise_multiplier=1.0, words=['a'])"
    with pytest.raises(ConfigurationError, match="words must be a list in which each is a word or null"):
        Half(3.0, noise_multiplier=1.0, words=[1])  # type: ignore[list-item]
