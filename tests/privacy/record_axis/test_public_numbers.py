"""Public numbers that differ by a record's place mix; constants and draws do not."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from dpbench.privacy.record_axis.host import watched
from dpbench.privacy.record_axis.tags import Axis
from dpbench.privacy.record_axis.verdict import new_axis

R = 6

Function = Callable[[Tensor], Tensor]

MIXED: dict[str, Function] = {
    # constants
    "weights_by_place": lambda x: x * torch.linspace(0, 1, R)[:, None],
    "a_triangle": lambda x: x.repeat(1, 2) * torch.ones(R, R).tril(),
    # draws
    "sorted_draws": lambda x: x * torch.rand(R).sort().values[:, None],
    "a_mean_of_draws": lambda x: x * torch.randn(2 * R).mean(),
    "an_order": lambda x: x * torch.randperm(R)[:, None],
    "antithetic_draws": lambda x: x * torch.cat([half := torch.randn(R // 2, 3), -half]),
    "symmetric_draws": lambda x: x.repeat(1, 2) * ((noise := torch.randn(R, R)) + noise.t()),
    "draws_less_the_first": lambda x: x + ((noise := torch.randn(R, 3)) - noise[0]),
    "draws_less_a_filled_mean": lambda x: x + torch.rand(R, 3) - torch.zeros(R, 3).fill_(torch.rand(R, 3).mean()),
    "overlapping_draws": lambda x: x + torch.randn(R * 3).as_strided((R, 3), (2, 1)),
    "draws_by_chances_of_a_place": lambda x: x * torch.zeros(R).bernoulli_(torch.linspace(0, 1, R))[:, None],
    # records one by one
    "a_loop": lambda x: torch.stack([row.exp() + torch.rand(3) for row in x]),
}
SEPARABLE: dict[str, Function] = {
    "draws": lambda x: x + 0.1 * torch.randn_like(x) * torch.rand(R, 1).clamp(min=0.1),
    "a_table_at_drawn_places": lambda x: x * torch.linspace(0, 1, 10)[torch.randint(10, (R,))][:, None],
    "entries_that_are_chosen_by_their_values": lambda x: x.index_put((x > 0,), torch.tensor(-1.0)),
    "a_repeated_row": lambda x: x + torch.arange(3.0).repeat(R, 1),
}


def mixed(function: Function) -> Function:
    MIXED[function.__name__] = function
    return function


def separable(function: Function) -> Function:
    SEPARABLE[function.__name__] = function
    return function


@mixed
def a_constant_written_by_numpy(x: Tensor) -> Tensor:
    weight = torch.zeros(R, 1)
    weight.numpy()[:, 0] = np.arange(R)
    return x * weight


@mixed
def a_constant_written_by_foreach(x: Tensor) -> Tensor:
    weight = torch.zeros(R, 1)
    torch._foreach_add_(list(weight.unbind()), [float(i) for i in range(R)])
    return x * weight


@mixed
def a_constant_written_by_storage(x: Tensor) -> Tensor:
    weight = torch.ones(R, 1)
    weight.untyped_storage()[3] = 0
    return x * weight


@mixed
def draws_of_which_one_is_overwritten(x: Tensor) -> Tensor:
    noise = torch.rand(R, 1)
    noise[0] = 0.0
    return x * noise


@mixed
def one_record_is_written(x: Tensor) -> Tensor:
    written = torch.zeros_like(x)
    written[0] = x[0]
    return written * 1.0


@separable
def columns_are_written(x: Tensor) -> Tensor:
    y = x.clone()
    y[:, 1] = 3.0
    y[:, 2] = torch.rand(R)
    return y * 2


def place_after(function: Function) -> object:
    axis = new_axis(R)
    x = torch.randn(R, 3)
    axis.tag(x, Axis(0))
    with watched(axis), axis:
        y = function(x)
    return axis.place_of(y)


@pytest.mark.parametrize("name", MIXED)
def test_numbers_by_place_mix(name: str) -> None:
    assert not isinstance(place_after(MIXED[name]), Axis)


@pytest.mark.parametrize("name", SEPARABLE)
def test_exchangeable_numbers_do_not(name: str) -> None:
    assert place_after(SEPARABLE[name]) == Axis(0)
