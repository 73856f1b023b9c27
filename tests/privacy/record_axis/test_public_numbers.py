"""Public numbers that differ by a record's place mix; constants and draws do not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dpbench.privacy.record_axis.tags import Axis
from dpbench.privacy.record_axis.verdict import new_axis

R = 6


def first_half_is_one(x: Tensor) -> Tensor:
    mask = torch.zeros(len(x), 1)
    mask[: len(x) // 2] = 1.0
    return x * mask


def counted(x: Tensor) -> Tensor:
    return x * torch.arange(len(x))[:, None]


def sorted_draws(x: Tensor) -> Tensor:
    return x * torch.rand(len(x)).sort().values[:, None]


def draws_of_mean_zero(x: Tensor) -> Tensor:
    noise = torch.randn(len(x), 1)
    return x + (noise - noise.mean())


def a_mean_of_draws(x: Tensor) -> Tensor:
    return x * torch.randn(2 * len(x)).mean()


def an_order(x: Tensor) -> Tensor:
    return x * torch.randperm(len(x))[:, None]


def one_record_is_written(x: Tensor) -> Tensor:
    written = torch.zeros_like(x)
    written[0] = x[0]
    return written * 1.0


def weights_in_a_loop(x: Tensor) -> Tensor:
    return torch.stack([x[i] * float(i) for i in range(len(x))])


def constants_in_a_loop(x: Tensor) -> Tensor:
    return torch.stack([x[i] + torch.full((3,), float(i)) for i in range(len(x))])


def the_first_is_another(x: Tensor) -> Tensor:
    return torch.stack([x[0].exp(), *(x[i].sin() for i in range(1, len(x)))])


def the_first_is_zero(x: Tensor) -> Tensor:
    y = x.clone()
    y[0] = 0.0
    return y * 2


def a_diagonal_is_one(x: Tensor) -> Tensor:
    y = x.clone()
    y.diagonal().fill_(1.0)
    return y * 2


def numbers_by_place_are_written(x: Tensor) -> Tensor:
    y = x.clone()
    y[:, 1] = torch.arange(float(len(x)))
    return y * 2


def a_column_is_written(x: Tensor) -> Tensor:
    y = x.clone()
    y[:, 1] = 3.0
    y[:, 2] = torch.rand(len(x))
    return y * 2


def draws(x: Tensor) -> Tensor:
    return x + 0.1 * torch.randn_like(x) * torch.rand(len(x), 1).clamp(min=0.1)


def table_at_drawn_places(x: Tensor) -> Tensor:
    return x * torch.linspace(0, 1, 10)[torch.randint(10, (len(x),))][:, None]


def last_column_is_zero(x: Tensor) -> Tensor:
    mask = torch.ones_like(x)
    mask[:, 2] = 0.0
    return x * mask


def positions_of_columns(x: Tensor) -> Tensor:
    return x + torch.arange(3.0).expand(len(x), 3).contiguous()


def repeated_row(x: Tensor) -> Tensor:
    return x + torch.arange(3.0).repeat(len(x), 1)


def loop(x: Tensor) -> Tensor:
    return torch.stack([x[i].exp() + torch.rand(3) for i in range(len(x))])


def written_in_a_loop(x: Tensor) -> Tensor:
    written = torch.empty_like(x)
    for i in range(len(x)):
        written[i] = x[i].cumsum(0)
    return written * 2


MIXED = [
    first_half_is_one,
    counted,
    sorted_draws,
    draws_of_mean_zero,
    a_mean_of_draws,
    an_order,
    one_record_is_written,
    weights_in_a_loop,
    constants_in_a_loop,
    the_first_is_another,
    the_first_is_zero,
    loop,
    written_in_a_loop,
    a_diagonal_is_one,
    numbers_by_place_are_written,
]
SEPARABLE = [
    a_column_is_written,
    draws,
    table_at_drawn_places,
    last_column_is_zero,
    positions_of_columns,
    repeated_row,
]


def place_after(function: Callable[[Tensor], Tensor]) -> object:
    axis = new_axis(R)
    x = torch.randn(R, 3)
    axis.tag(x, Axis(0))
    with axis:
        y = function(x)
    return axis.place_of(y)


@pytest.mark.parametrize("function", MIXED, ids=lambda function: function.__name__)
def test_numbers_by_place_mix(function: Callable[[Tensor], Tensor]) -> None:
    assert not isinstance(place_after(function), Axis)


@pytest.mark.parametrize("function", SEPARABLE, ids=lambda function: function.__name__)
def test_exchangeable_numbers_do_not(function: Callable[[Tensor], Tensor]) -> None:
    assert place_after(function) == Axis(0)
