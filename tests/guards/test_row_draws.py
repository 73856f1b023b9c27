"""Random numbers follow the rows: a row of a part, or of another order, has those that it has in the whole lot."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from dpbench.guards.host_draws import FreshGenerators, following_host
from dpbench.guards.row_draws import FollowingDraws, RowDraws

WHOLE, PART = np.arange(10), np.array([7, 2, 9, 4])
OTHER_ORDER = np.array([3, 8, 0, 5, 9, 1, 7, 2, 6, 4])
X = torch.randn(10, 4, 6, generator=torch.Generator().manual_seed(2))
LSTM = nn.LSTM(6, 5, 2, dropout=0.5, batch_first=True)
ATTENTION = nn.MultiheadAttention(6, 2, dropout=0.3, batch_first=True)
ENCODER = nn.TransformerEncoderLayer(6, 2, 12, batch_first=True)
LAST = nn.Conv2d(4, 4, 1).to(memory_format=torch.channels_last)

Draw = Callable[[Tensor], Tensor]
TORCH: dict[str, Draw] = {
    "rand": lambda i: torch.rand(len(i)),
    "randn": lambda i: torch.randn(len(i), 3),
    "randint": lambda i: torch.randint(1000, (len(i),)),
    "randint from": lambda i: torch.randint(5, 1000, (len(i), 2)),
    "normal": lambda i: torch.normal(1.0, 2.0, (len(i), 3)),
    "normal of tensors": lambda i: torch.normal(X[i], torch.ones(len(i), 4, 6)),
    "randn_like": lambda i: torch.randn_like(X[i]),
    "rand_like": lambda i: torch.rand_like(X[i]),
    "randint_like": lambda i: torch.randint_like(X[i], 50),
    "uniform_": lambda i: torch.empty(len(i), 7).uniform_(),
    "normal_": lambda i: torch.empty(len(i), 7).normal_(),
    "exponential_": lambda i: torch.empty(len(i), 7).exponential_(),
    "random_": lambda i: torch.empty(len(i), dtype=torch.long).random_(0, 1000),
    "cauchy_": lambda i: torch.empty(len(i)).cauchy_(),
    "bernoulli_": lambda i: torch.empty(len(i), 9).bernoulli_(0.3),
    "bernoulli_ of tensors": lambda i: X[i].bernoulli_(X[i].sigmoid()),
    "bernoulli": lambda i: torch.bernoulli(X[i].sigmoid()),
    "multinomial": lambda i: torch.multinomial(X[i, 0].sigmoid(), 2),
    "multinomial with replacement": lambda i: torch.multinomial(X[i, 0].sigmoid(), 9, replacement=True),
    "multinomial of one distribution": lambda i: torch.multinomial(torch.ones(50), len(i), replacement=True),
    "poisson": lambda i: torch.poisson(X[i].exp() * 5),
    "binomial": lambda i: torch.binomial(torch.full((len(i), 3), 9.0), torch.full((len(i), 3), 0.4)),
    "beta": lambda i: torch.distributions.Beta(X[i, 0].exp(), X[i, 1].exp()).sample(),
    "gamma": lambda i: torch.distributions.Gamma(X[i, 0].exp(), 1.0).sample(),
    "categorical": lambda i: torch.distributions.Categorical(logits=X[i]).sample(),
    "gumbel": lambda i: F.gumbel_softmax(X[i]),
    "rrelu": lambda i: F.rrelu(X[i], training=True),
    "dropout": lambda i: F.dropout(X[i], 0.5),
    "dropout2d": lambda i: F.dropout2d(X[i][..., None], 0.5),
    "alpha_dropout": lambda i: F.alpha_dropout(X[i], 0.3, training=True),
    "feature_alpha_dropout": lambda i: F.feature_alpha_dropout(X[i], 0.3, training=True),
    "LSTM": lambda i: LSTM(X[i])[0],
    "attention": lambda i: ATTENTION(X[i], X[i], X[i])[0],
    "encoder": lambda i: ENCODER(X[i]),
    "scaled_dot_product_attention": lambda i: F.scaled_dot_product_attention(X[i], X[i], X[i], dropout_p=0.4),
    "channels last": lambda i: F.dropout(LAST(X[i][..., None].contiguous(memory_format=torch.channels_last)), 0.5),
    "own generator": lambda i: torch.randn(len(i), 2, generator=OWN),
    "after others": lambda i: torch.rand(len(i)) + 0 * torch.randn(3).sum() + F.dropout(torch.ones(len(i)), 0.5),
}
OWN = torch.Generator().manual_seed(3)
RNG, STATE = np.random.default_rng(4), np.random.RandomState(5)
NUMPY: dict[str, Callable[[NDArray[Any]], Any]] = {
    "rand": lambda i: np.random.rand(len(i), 2),
    "normal": lambda i: np.random.normal(0, 2, (len(i), 3)),
    "normal by name": lambda i: np.random.normal(size=len(i), scale=2.0),
    "randint": lambda i: np.random.randint(0, 99, size=len(i)),
    "two calls": lambda i: np.random.rand(len(i)) + np.random.rand(len(i)),
    "scalars between": lambda i: np.random.rand() + np.random.rand(len(i)),
    "generator": lambda i: HOLDER["rng"].normal(size=(len(i), 3)),
    "integers": lambda i: HOLDER["rng"].integers(100, size=len(i)) + HOLDER["rng"].random(len(i)),
    "state": lambda i: HOLDER["state"].randn(len(i), 2),
    "arrays": lambda i: np.random.normal(LEVEL[i], 0.1) + HOLDER["rng"].binomial(9, LEVEL[i]),
    "arrays and a size": lambda i: HOLDER["rng"].uniform(LEVEL[i, :1], 2.0, size=(len(i), 3)),
    "fresh": lambda i: np.random.default_rng().uniform(-1, 1, (len(i), 2)),
}
LEVEL = np.random.default_rng(6).random((10, 3))
HOLDER: dict[str, Any] = {"rng": RNG, "state": STATE}

SEVERAL_ENTRIES = {"attention", "categorical", "multinomial of one distribution"}  # or a large argument


def follow(draw: Callable[[Any], Any], places: NDArray[np.int64], draws: RowDraws, whole: bool, shared: bool) -> Any:
    torch.manual_seed(0)
    OWN.manual_seed(3)
    np.random.seed(0)
    random.seed(0)
    RNG.bit_generator.state = np.random.default_rng(4).bit_generator.state
    STATE.seed(5)
    draws.begin(places, whole, shared)
    holders = [(HOLDER, "rng"), (HOLDER, "state")]
    with FreshGenerators().repeated(draws), following_host(draws, holders, []), FollowingDraws(draws):
        numbers = draw(torch.from_numpy(places))
    draws.finish()
    return torch.as_tensor(numbers)


@pytest.mark.parametrize("name", [*TORCH, *(f"numpy {name}" for name in NUMPY)])
def test_rows_keep_their_numbers(name: str) -> None:
    draw = NUMPY[name.removeprefix("numpy ")] if name.startswith("numpy") else TORCH[name]
    draws = RowDraws(10)
    whole = follow(draw, WHOLE, draws, True, False)
    after = torch.get_rng_state(), OWN.get_state(), RNG.bit_generator.state
    for places in (PART, OTHER_ORDER):
        numbers = follow(draw, places, draws, False, False)
        torch.testing.assert_close(numbers, whole[torch.from_numpy(places)], rtol=1e-4, atol=1e-5)
        assert torch.equal(torch.get_rng_state(), after[0]) and torch.equal(OWN.get_state(), after[1])
        assert RNG.bit_generator.state == after[2]
        assert not draws.irregular or name in SEVERAL_ENTRIES
    assert len(whole.unique()) > 1
    assert np.random.rand.__self__ is np.random.mtrand._rand
    assert HOLDER["rng"] is RNG and HOLDER["state"] is STATE


@pytest.mark.parametrize("name", ["randn", "dropout", "bernoulli", "after others", "poisson"])
def test_draws_are_those_of_their_distribution(name: str) -> None:
    """Two calls differ, and a mean of many is what it is without following."""
    draws, many = RowDraws(10), []

    def repeated(i: Tensor) -> Tensor:
        return torch.stack([TORCH[name](i) for _ in range(300)])

    many = [follow(repeated, WHOLE, draws, True, False), repeated(torch.arange(10))]
    assert len({float(x.double().sum()) for x in many[0]}) > 30
    scale = float(many[1].double().std()) / (many[1].numel() / 2) ** 0.5
    assert abs(float(many[0].double().mean() - many[1].double().mean())) < 6 * scale


LOOPS: dict[str, Callable[[Any], Any]] = {
    "half": lambda i: torch.randn(len(i) // 2, 2).repeat(2, 1),
    "a loop": lambda i: torch.stack([torch.rand(2) for _ in i]),
    "a loop of random": lambda i: torch.tensor(
        [random.random() + random.uniform(0, 2) + random.gauss(0, 1) for _ in i]
    ),
    "a loop of integers": lambda i: torch.tensor([random.randint(0, 9) + random.choice([1, 2, 3]) for _ in i]),
    "a loop of numpy": lambda i: np.stack([np.random.normal(size=3) * np.random.rand() for _ in i]),
    "a loop of generators": lambda i: np.stack([HOLDER["rng"].normal(size=3) for _ in i]),
    "a loop until it fits": lambda i: torch.stack([until_it_fits() for _ in i]),
}


def until_it_fits() -> Tensor:
    number = torch.rand(())
    while number < 0.5:
        number = torch.rand(())
    return number * 0


@pytest.mark.parametrize("name", LOOPS)
def test_draws_without_a_counterpart_are_noticed_and_may_be_shared(name: str) -> None:
    """All rows have the same numbers then."""
    draws = RowDraws(10)
    follow(LOOPS[name], WHOLE, draws, True, False)
    python = random.getstate()
    follow(LOOPS[name], PART, draws, False, False)
    assert draws.irregular or random.getstate() != python
    functions = random.random, random.getrandbits, random.gauss
    whole = follow(LOOPS[name], WHOLE, draws, False, True)
    part = follow(LOOPS[name], PART, draws, False, True)
    torch.testing.assert_close(part, whole[: len(PART)])
    torch.testing.assert_close(whole, whole[:1].expand_as(whole))
    assert (random.random, random.getrandbits, random.gauss) == functions
    assert not {"random", "getrandbits", "gauss"} & set(random._inst.__dict__)


def test_functions_that_draw_no_rows_have_the_same_numbers() -> None:
    """A matrix of noise for weights, even if it has as many rows as the lot."""
    draws = RowDraws(10)
    whole = follow(lambda i: torch.randn(10, 4), WHOLE, draws, True, False)
    assert torch.equal(follow(lambda i: torch.randn(10, 4), PART, draws, False, False), whole)
    assert torch.equal(follow(lambda i: torch.randn(10, 4), OTHER_ORDER, draws, False, False), whole)
