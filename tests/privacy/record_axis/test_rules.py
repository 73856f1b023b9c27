"""No rule claims more than what holds: PyTorch's own samples of all operators, each dimension taken for the records."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import cache, partial
from random import Random
from typing import Any

import pytest
import torch

from dpbench.privacy.record_axis import mode
from dpbench.privacy.record_axis.operators import RULES
from tests.privacy.record_axis.fuzz import Tally, check, choices, fuzz

_EXEMPT = {
    "empty_like": "its output is not written",
    "new_empty": "its output is not written",
    "new_empty_strided": "its output is not written",
    "nn.functional.rrelu": "as many numbers are drawn as elements are negative, each for its element",
    "tensor_split": "the table holds the function from before it is watched; see test_host.py",
}
_PARTS = 8
_SAMPLES = 10
_SAMPLES_OF_GRADIENTS = 4
_CHOICES = 8


@cache
def samples_of_operators() -> Sequence[Any]:
    """PyTorch's own. Their module forbids settings of backends from then on, so the permission is put back."""
    permission = "__allow_nonbracketed_mutation_flag"
    settings = torch.backends.flags_frozen.__globals__
    is_allowed = settings[permission]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db
    settings[permission] = is_allowed
    return op_db


def violations(part: int, samples: int, backward: bool) -> Tally:
    tally = Tally()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        entries = [entry for entry in samples_of_operators() if entry.name not in _EXEMPT]
        for entry in entries[part::_PARTS]:
            fuzz(entry, tally, samples, _CHOICES, backward=backward)
    return tally


@pytest.mark.slow
@pytest.mark.parametrize("samples", [2, pytest.param(_SAMPLES, marks=pytest.mark.long)])
@pytest.mark.parametrize("part", range(_PARTS))
def test_outputs(part: int, samples: int) -> None:
    tally = violations(part, samples, backward=False)
    assert not tally.violations, tally.violations[:3]
    assert tally.checked > 100 * samples
    assert len(tally.claimed) > 30


@pytest.mark.slow
@pytest.mark.parametrize("samples", [1, pytest.param(_SAMPLES_OF_GRADIENTS, marks=pytest.mark.long)])
@pytest.mark.parametrize("part", range(_PARTS))
def test_gradients(part: int, samples: int) -> None:
    tally = violations(part, samples, backward=True)
    assert not tally.violations, tally.violations[:3]
    assert tally.checked > 50 * samples
    assert len(tally.claimed) > 15


def picked(index: tuple[Any, ...], leaves: Sequence[Any]) -> Any:
    return leaves[0][index]


def overwritten(index: tuple[Any, ...], leaves: Sequence[Any]) -> Any:
    return leaves[0].index_put([None if isinstance(one, slice) else one for one in index], leaves[1])


def test_masks_that_are_one_for_all_records() -> None:
    """Masks over other dimensions than the records', or over theirs, beside other indices or not."""
    tally = Tally()
    rng = Random(0)
    torch.manual_seed(0)
    x = torch.randn(4, 3, 4, 2, dtype=torch.float64)
    for _ in range(20):
        start = rng.randrange(x.dim())
        width = rng.randint(1, x.dim() - start)
        mask = torch.rand(x.shape[start : start + width]) < rng.choice([0.4, 1.0])
        places = torch.randint(2, (int(mask.sum()),))
        before = [rng.choice([slice(None), places[:1], places]) for _ in range(start)]
        index = (*before, mask, *[slice(None)] * (x.dim() - start - width))
        value = torch.randn_like(x[index])
        for choice in choices([x, value], rng, 6):
            check("masks", partial(picked, index), [x, value], choice, tally)
            check("masks", partial(overwritten, index), [x, value], choice, tally)
    assert not tally.violations, tally.violations[:3]
    assert tally.checked > 100 and tally.claimed


def test_a_wrong_rule_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The softmax of another dimension: that of records along which it goes is claimed to be theirs."""
    entry = next(entry for entry in samples_of_operators() if entry.name == "softmax")

    monkeypatch.setattr(mode.RecordAxis, "_operators", {})
    monkeypatch.setitem(RULES, "_softmax", RULES["pointwise"])
    tally = Tally()
    fuzz(entry, tally, samples=8, most=8)
    assert tally.violations
