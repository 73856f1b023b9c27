"""Local training against the slow truth: a copy of the network, torch's SGD, and a subtraction, in float64."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dpbench.errors import ConfigurationError
from dpbench.records import LocalTraining
from dpbench.strategies import ClipOnly, FederatedAveraging
from tests.capabilities.users.worlds import SIZES, WIDTH, Toy, fit, linear, loader_of, make_users, naive_training
from tests.strategies.worlds import weights_of

DOUBLE = {"precision": "64-true"}


class Tied(nn.Module):
    """One matrix under two names, a frozen layer, and one that only some batches pass through."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.second.weight = self.first.weight
        self.sometimes, self.frozen = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.frozen(self.second(self.first(x).tanh()))
        return self.sometimes(hidden) if float(x.detach().sum()) > 0 else hidden


NETS: dict[str, Any] = {
    "sparse": lambda: nn.Sequential(nn.Embedding(9, 3, sparse=True), nn.Flatten(), nn.Linear(3 * WIDTH, 1)),
    "tied": Tied,
    "dropout": lambda: nn.Sequential(nn.Linear(WIDTH, 6), nn.Dropout(0.5), nn.Linear(6, 1)),
}
LOCALS = {
    "fedsgd": LocalTraining(lr=1.0, batch_size=None),
    "epochs": LocalTraining(lr=0.1, batch_size=3, epochs=3),
    "all": LocalTraining(lr=0.2, batch_size=2, epochs=3, max_steps=4, max_examples=5, prox_mu=0.3),
}


def compare(
    folder: Path,
    module: Toy,
    users: Any,
    local: LocalTraining,
    bound: float = 1e9,
    rounds: int = 3,
    make: Any = ClipOnly,
) -> None:
    loader = loader_of(users, 5)
    wanted = naive_training(module, loader, local, 3, bound)
    before = copy.deepcopy(module)
    options = {"max_grad_norm": bound} if make is ClipOnly else {}
    fit(folder, module, users, 3, local, make, loader, trainer=DOUBLE, **options)
    assert (weights_of(before) - weights_of(module)).norm() > 1e-3
    for (name, p), q in zip(module.named_parameters(), wanted.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("name", NETS)
def test_networks_of_every_kind(tmp_path: Path, name: str) -> None:
    torch.manual_seed(2)
    inputs = torch.randint(9, (sum(SIZES), WIDTH)) if name == "sparse" else None
    compare(tmp_path, Toy(NETS[name]()), make_users(inputs=inputs), LOCALS["epochs"], 1.0)


@pytest.mark.parametrize(("name", "bound"), [("fedsgd", 100.0), ("all", 0.05)])
def test_options_of_every_kind(tmp_path: Path, name: str, bound: float) -> None:
    compare(tmp_path, Toy(linear()), make_users(), LOCALS[name], bound)


def as_dictionary(examples: Any) -> dict[str, Tensor]:
    return {"x": torch.stack([x for x, _ in examples]), "y": torch.stack([y for _, y in examples])}


def test_federated_averaging(tmp_path: Path) -> None:
    """Without bound or ledger; batches may be dictionaries."""
    compare(tmp_path, Toy(linear()), make_users(collate_fn=as_dictionary), LOCALS["epochs"], make=FederatedAveraging)
    assert not (tmp_path / "ledger.jsonl").exists()


# ----------------------------------------------------------------------------------------- the steps


def steps_of(local: LocalTraining, size: int) -> list[Tensor]:
    return list(local.steps(size, torch.Generator().manual_seed(0)))


def test_every_example_once_in_an_epoch() -> None:
    steps = steps_of(LocalTraining(batch_size=3, epochs=2), 7)
    assert [len(one) for one in steps] == [3, 3, 1, 3, 3, 1]
    first, second = torch.cat(steps[:3]).tolist(), torch.cat(steps[3:]).tolist()
    assert sorted(first) == sorted(second) == list(range(7)) and first != second


def test_a_cap_is_one_choice_for_all_epochs() -> None:
    steps = steps_of(LocalTraining(batch_size=2, epochs=3, max_examples=4), 1000)
    assert len(steps) == 6 and len(set(torch.cat(steps).tolist())) == 4


@pytest.mark.parametrize("name", LOCALS)
def test_work_is_what_the_steps_go_through(name: str) -> None:
    for size in (0, 1, 2, 5, 23):
        assert sum(map(len, steps_of(LOCALS[name], size))) == LOCALS[name].examples_of(size), size


@pytest.mark.parametrize("options", [{"lr": 0}, {"batch_size": 0}, {"epochs": None}, {"lr": 1.0, "prox_mu": 1.5}])
def test_settings_out_of_range(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(options))):
        LocalTraining(**options)
