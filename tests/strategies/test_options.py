"""Options of strategies: wrong types get one line, right ones are shown where they differ."""

from __future__ import annotations

import copy
import inspect
import math
import pickle
from collections.abc import Callable, Sequence
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import numpy as np
import pytest
import torch

from dpbench.errors import ConfigurationError
from dpbench.options import checked_value, options_of
from dpbench.strategies import DPSGD, AdaptiveQuantileClipping, VectorGroups
from tests.support.configs import STRATEGIES

WRONG = ["1", "", float("nan"), True, [1.0], {}, {"a": "b"}, object(), torch.tensor(1.0), 1.5, None, b"x"]


def fits(hint: Any, value: Any) -> bool:
    """Whether a value may be given, as a reader of the annotation would say."""
    if hint is Any:
        return True
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return fits(inner[0], value)
    if origin is Literal:
        return value in inner if isinstance(value, str) else False
    if origin is list:
        return isinstance(value, list) and all(fits(inner[0], one) for one in value)
    if origin is dict:
        return isinstance(value, dict) and all(fits(inner[1], one) for one in value.values())
    if origin in (Sequence, Callable):
        return isinstance(value, origin)
    if inner:
        return any(fits(one, value) for one in inner)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint)


def kind_of(hint: Any) -> str:
    """The type of an annotation: without ranges and notes, and with one word for every choice of words."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return kind_of(inner[0])
    if origin is Literal:
        return "Literal"
    kinds = map(kind_of, () if origin is Callable else inner)
    if origin in (Union, UnionType):
        return " or ".join(sorted({part for kind in kinds for part in kind.split(" or ")}))
    name = str(getattr(origin or hint, "__name__", hint))
    return f"{name} of {', '.join(kinds)}" if inner else name


OPTIONS = [(cls, name, option.annotation) for cls in STRATEGIES.values() for name, option in options_of(cls).items()]
KINDS = {kind_of(hint): (cls, name, hint) for cls, name, hint in OPTIONS}
"""Type of an annotation → one option that has it."""


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_wrong_types_get_one_line(kind: str) -> None:
    cls, name, hint = KINDS[kind]
    wrong = [value for value in WRONG if not fits(hint, value)]
    assert len(wrong) >= 4
    for value in wrong:
        with pytest.raises(ConfigurationError, match=name) as caught:
            cls(**{"noise_multiplier": 1.0, **{name: value}})
        assert "\n" not in str(caught.value)


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
    strategy = DPSGD(np.float32(0.5), noise_multiplier=np.float64(2), seed=np.int64(3), microbatch_size=np.int32(2))  # type: ignore[arg-type]
    assert (type(strategy.max_grad_norm), strategy.max_grad_norm) == (float, 0.5)
    assert (type(strategy.seed), strategy.seed) == (int, 3)
    assert type(strategy.microbatch_size) is int


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"noise_multiplyer": 1.0}, "DPSGD has no option 'noise_multiplyer'. Did you mean noise_multiplier"),
        ({"qqq": 1.0}, "DPSGD has no option 'qqq'. Known: accountant, after, "),
        ({"noise_multiplier": "1"}, "noise_multiplier must be a positive number .* or null, not '1'"),
        ({"clipping": "soft"}, "clipping must be flat, per_layer, per_parameter or by_dimension, not 'soft'"),
        ({"clipping": 3}, "clipping must be flat, per_layer, per_parameter or by_dimension, not 3"),
        ({"loss_reduction": "max"}, "loss_reduction must be mean or sum, not 'max'"),
        ({"metrics": {"loss": "x"}}, "metrics must be a dictionary in which each value is a number or null"),
    ],
)
def test_messages(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        DPSGD(**options)


def test_they_say_what_they_are() -> None:
    assert repr(DPSGD(noise_multiplier=1.1)) == "DPSGD(noise_multiplier=1.1)"
    assert repr(DPSGD(1.0, delta=1e-5, target_epsilon=3)) == "DPSGD(target_epsilon=3)"
    named = AdaptiveQuantileClipping(0.7, noise_multiplier=1.0, clipping="per_layer")
    assert repr(named) == "AdaptiveQuantileClipping(quantile=0.7, noise_multiplier=1.0, clipping='per_layer')"
    assert repr(pickle.loads(pickle.dumps(named))) == repr(copy.deepcopy(named)) == repr(named)


def test_signatures_stay() -> None:
    assert list(inspect.signature(VectorGroups).parameters)[:3] == ["groups", "split", "max_grad_norm"]


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
    with pytest.raises(ConfigurationError, match="half must be a number"):
        Half("3", noise_multiplier=1.0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DPSGD(noise_multiplier=10**400), "noise_multiplier must be a positive number"),
        (
            lambda: DPSGD(noise_multiplier=10**5000),
            "noise_multiplier must be a positive number .* or null, not a number without",
        ),
        (lambda: DPSGD(1.0, noise_multiplier=1.0, max_grad_norm=10**400), "max_grad_norm"),
        (lambda: DPSGD(*[1.0] * 60), r"DPSGD takes at most \d+ positional values \(.*\), not 60: write name=value"),
        (lambda: DPSGD(noise_multiplier=1.0, audit=True), "audit must be an audit or null, not True"),
        (lambda: DPSGD(noise_multiplier=1.0, ledger=""), "ledger must be the name of a file or null, not ''"),
    ],
)
def test_values_beyond_all_bounds(make: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make()
