"""Local training against the slow truth: a copy of the network, torch's SGD, and a subtraction, in float64."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dpbench.capabilities.users.local_training import Client
from dpbench.errors import ConfigurationError
from dpbench.records import LocalTraining
from dpbench.strategies import ClipOnly, FederatedAveraging
from tests.capabilities.users.worlds import SIZES, WIDTH, Toy, fit, linear, loader_of, make_users, naive_training
from tests.strategies.worlds import weights_of

DOUBLE = {"precision": "64-true"}
COUNT = sum(SIZES)


class Tied(nn.Module):
    """One matrix used twice, and once more under another name."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh())


class Unused(nn.Module):
    """A layer that is never called, and one that only some batches pass through."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.never, self.sometimes = nn.Linear(WIDTH, 2), nn.Linear(3, 3), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.used(x)
        return self.sometimes(hidden) if float(x.detach().sum()) > 0 else hidden


def frozen() -> nn.Module:
    net = linear()
    net[0].requires_grad_(False)
    return net


def conv() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 3, 2, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(27, 2)
    )


class LastOfLSTM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(1, 3, num_layers=2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x.unsqueeze(2))[0][:, -1]


def embedding(sparse: bool) -> nn.Module:
    return nn.Sequential(nn.Embedding(9, 3, sparse=sparse), nn.Flatten(), nn.Linear(3 * WIDTH, 1))


NETS: dict[str, Any] = {
    "linear": linear,
    "conv": conv,
    "lstm": LastOfLSTM,
    "embedding": lambda: embedding(False),
    "sparse": lambda: embedding(True),
    "tied": Tied,
    "frozen": frozen,
    "unused": Unused,
    "dropout": lambda: nn.Sequential(nn.Linear(WIDTH, 6), nn.Dropout(0.5), nn.Linear(6, 1)),
    "norm": lambda: nn.Sequential(nn.Linear(WIDTH, 6), nn.BatchNorm1d(6, track_running_stats=False), nn.Linear(6, 1)),
}
LOCALS = {
    "plain": LocalTraining(lr=0.1, batch_size=2),
    "fedsgd": LocalTraining(lr=1.0, batch_size=None),
    "epochs": LocalTraining(lr=0.1, batch_size=3, epochs=3),
    "steps": LocalTraining(lr=0.1, batch_size=2, epochs=4, max_steps=3),
    "examples": LocalTraining(lr=0.1, batch_size=2, epochs=2, max_examples=3),
    "prox": LocalTraining(lr=0.1, batch_size=2, epochs=3, prox_mu=0.7),
    "all": LocalTraining(lr=0.2, batch_size=2, epochs=3, max_steps=4, max_examples=5, prox_mu=0.3),
}


def module_of(name: str) -> Toy:
    torch.manual_seed(2)
    return Toy(NETS[name]())


def users_for(name: str, **options: Any) -> Any:
    if name in ("embedding", "sparse"):
        return make_users(
            inputs=torch.randint(9, (COUNT, WIDTH), generator=torch.Generator().manual_seed(3)), **options
        )
    if name == "norm":  # of two examples in each batch, since one alone has no variance
        return make_users(sizes=[2, 4, 6, 4, 2, 2, 4, 0, 2, 2], **options)
    return make_users(**options)


def compare(folder: Path, module: Toy, users: Any, local: LocalTraining, bound: float = 1.0, rounds: int = 3) -> None:
    loader = loader_of(users, 5)
    wanted = naive_training(module, loader, local, rounds, bound)
    before = copy.deepcopy(module)
    fit(folder, module, users, rounds, local, ClipOnly, loader, max_grad_norm=bound, trainer=DOUBLE)
    assert module.dtype == torch.float64
    assert (weights_of(before) - weights_of(module)).norm() > 1e-3
    for (name, p), q in zip(module.named_parameters(), wanted.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("name", NETS)
def test_networks_of_every_kind(tmp_path: Path, name: str) -> None:
    compare(tmp_path, module_of(name), users_for(name), LOCALS["epochs" if name != "norm" else "plain"])


@pytest.mark.parametrize("name", LOCALS)
@pytest.mark.parametrize("bound", [0.05, 100.0])
def test_options_of_every_kind(tmp_path: Path, name: str, bound: float) -> None:
    compare(tmp_path, module_of("linear"), make_users(), LOCALS[name], bound)


def as_dictionary(examples: Any) -> dict[str, Tensor]:
    return {"x": torch.stack([x for x, _ in examples]), "y": torch.stack([y for _, y in examples])}


def test_batches_that_are_dictionaries(tmp_path: Path) -> None:
    compare(tmp_path, module_of("linear"), make_users(collate_fn=as_dictionary), LOCALS["plain"])


def test_federated_averaging(tmp_path: Path) -> None:
    module, users, local = module_of("linear"), make_users(), LOCALS["epochs"]
    wanted = naive_training(module, loader_of(users), local, 3, bound=1e9)
    strategy = fit(tmp_path, module, users, 3, local, FederatedAveraging, trainer=DOUBLE)
    torch.testing.assert_close(weights_of(module), weights_of(wanted), rtol=1e-9, atol=1e-12)
    assert not (tmp_path / "ledger.jsonl").exists() and strategy.epsilon() == float("inf")


# ----------------------------------------------------------------------------------------- the steps


def test_every_example_once_in_an_epoch() -> None:
    steps = list(LocalTraining(batch_size=3, epochs=2).steps(7, torch.Generator().manual_seed(0)))
    assert [len(one) for one in steps] == [3, 3, 1, 3, 3, 1]
    first, second = torch.cat(steps[:3]), torch.cat(steps[3:])
    assert sorted(first.tolist()) == sorted(second.tolist()) == list(range(7))
    assert first.tolist() != second.tolist()


def test_a_cap_is_one_choice_for_all_epochs() -> None:
    steps = list(LocalTraining(batch_size=2, epochs=3, max_examples=4).steps(1000, torch.Generator().manual_seed(0)))
    assert len(steps) == 6 and len(set(torch.cat(steps).tolist())) == 4


@pytest.mark.parametrize("local", LOCALS.values(), ids=LOCALS)
@pytest.mark.parametrize("size", [0, 1, 2, 5, 23])
def test_work_is_what_the_steps_go_through(local: LocalTraining, size: int) -> None:
    seen = sum(len(one) for one in local.steps(size, torch.Generator().manual_seed(0)))
    assert seen == local.examples_of(size)


@pytest.mark.parametrize("options", [
    {"lr": 0}, {"lr": -1.0}, {"lr": float("nan")}, {"lr": float("inf")}, {"lr": "0.1"}, {"lr": True}, {"batch_size": 0},
    {"batch_size": 2.0}, {"epochs": 0}, {"epochs": None}, {"max_steps": 0}, {"prox_mu": -0.1}, {"max_examples": 0},
    {"lr": 1.0, "prox_mu": 1.5},
])  # fmt: skip
def test_settings_out_of_range(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(options))):
        LocalTraining(**options)


def test_numbers_of_numpy_become_pythons() -> None:
    local = LocalTraining(lr=np.float32(0.5), batch_size=np.int64(2), epochs=np.int32(3))  # type: ignore[arg-type]
    assert [type(value) for value in (local.lr, local.batch_size, local.epochs)] == [float, int, int]
    assert local == LocalTraining(lr=0.5, batch_size=2, epochs=3)


# ----------------------------------------------------------------------------------------- the weights


def test_the_servers_weights_come_back_after_an_error() -> None:
    net = linear()
    before, places = weights_of(net).clone(), [p.data_ptr() for p in net.parameters()]
    versions = [p._version for p in net.parameters()]
    client = Client(list(net.parameters()), LocalTraining(lr=1.0))

    def loss_of(batch: Any) -> Tensor:
        if batch == "bad":
            raise KeyboardInterrupt
        return net(torch.ones(2, WIDTH)).square().mean()

    with pytest.raises(KeyboardInterrupt), client.weights():
        client.update(loss_of, ["good", "good", "bad"])
    assert torch.equal(weights_of(net), before)
    assert places == [p.data_ptr() for p in net.parameters()] and versions == [p._version for p in net.parameters()]
    assert all(p.grad is None for p in net.parameters())


def test_nothing_is_left_of_the_user_before() -> None:
    net = linear()
    client = Client(list(net.parameters()), LocalTraining(lr=0.5))
    batches = torch.randn(3, 5, WIDTH)
    with client.weights():
        alone = client.update(lambda x: net(x).square().mean(), batches[:1])
        client.update(lambda x: net(x).square().mean(), batches[1:])
        again = client.update(lambda x: net(x).square().mean(), batches[:1])
        nothing = client.update(lambda x: net(x).square().mean(), [])
    assert all(torch.equal(a, b) for a, b in zip(alone, again, strict=True))
    assert not any(one.any() for one in nothing)
