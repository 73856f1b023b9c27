"""Broken ways to train by user: each must fail the audit that the real one passes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dpbench.capabilities.users.dataset import UserDataset
from dpbench.capabilities.users.local_training import Client
from dpbench.data import lots
from dpbench.data.lots import LotLoader, Lots
from dpbench.errors import DPBenchError, UnsupportedModuleError
from dpbench.guards import lots as lot_guards
from dpbench.guards._module_writes import Writes
from dpbench.privacy.accounting.ledger import read_ledger
from dpbench.privacy.gradients.parameter import InstantiatedGradients
from dpbench.privacy.randomness import Stream
from dpbench.privacy.releases import ReleaseEngine
from dpbench.privacy.sampling import PoissonSampling
from dpbench.records import LocalTraining, Users
from dpbench.strategies import ClipOnly
from tests.capabilities.users.worlds import SIZES, WIDTH, Toy, fit, linear, make_users, naive_training
from tests.strategies.worlds import weights_of

LOCAL = LocalTraining(lr=0.2, batch_size=2, epochs=2)
BOUND, ROUNDS = 0.2, 4
DOUBLE = {"precision": "64-true"}
Patch = pytest.MonkeyPatch


def audit(folder: Path) -> list[str]:
    """Train by user, and compare weights, ledger and refusals with what they should be."""
    problems = []
    users = make_users()
    module, loader = Toy(linear()), LotLoader.poisson(users, 4, seed=0)
    drawn: Any = SimpleNamespace(dataset=users, lots=Lots(PoissonSampling(len(SIZES), 4 / len(SIZES), unit="user"), 0))
    wanted = naive_training(module, drawn, LOCAL, ROUNDS, BOUND)
    fit(folder / "a", module, users, ROUNDS, LOCAL, ClipOnly, loader, DOUBLE, max_grad_norm=BOUND)
    if not torch.allclose(weights_of(module), weights_of(wanted), rtol=1e-9, atol=1e-12):
        problems.append("the update is not the mean of the users' clipped updates")
    fit(folder / "b", Toy(linear()), steps=2, loader=LotLoader.poisson(users, 4, seed=0))
    book = read_ledger(folder / "b" / "ledger.jsonl")
    sampling = book.releases[0][1].sampling
    if (book.header.unit, sampling.unit) != ("user", "user"):
        problems.append("the ledger does not say that the unit is a user")
    if {book.header.population, sampling.population} != {len(SIZES)}:
        problems.append("the population is not the number of users")
    return problems or audit_of_buffers(folder)


def audit_of_buffers(folder: Path) -> list[str]:
    try:
        normed = nn.Sequential(nn.Linear(WIDTH, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
        fit(folder / "c", Toy(normed), make_users([2, 4, 6, 2]), 2, LOCAL, ClipOnly)
    except UnsupportedModuleError:
        return []
    return ["statistics of users stay in buffers"]


def test_the_real_one_passes(tmp_path: Path) -> None:
    assert audit(tmp_path) == []


# ----------------------------------------------------------------------------------------- mutants


def rows(update: list[Tensor], times: int = 1) -> list[Any]:
    return [InstantiatedGradients(lambda x=x: x.expand(times, *x.shape).contiguous()) for x in update]  # type: ignore[misc]


def replaced(patch: Patch, hand_in: Callable[[Users, list[list[Tensor]]], None]) -> None:
    """Another way to hand the cohort's updates in."""

    def train(self: Users, local_step: Any) -> None:
        hand_in(self, [self._update(user, local_step) for user in self._users])

    patch.setattr(Users, "_train", train)


def clips_the_average(patch: Patch) -> None:
    def hand_in(self: Users, updates: list[list[Tensor]]) -> None:
        means = [torch.stack(one).mean(0) for one in zip(*updates, strict=True)]
        for _ in updates:
            self._releases.accumulate(rows(means), 1)

    replaced(patch, hand_in)


def weighs_by_examples(patch: Patch) -> None:
    def hand_in(self: Users, updates: list[list[Tensor]]) -> None:
        for user, update in zip(self._users, updates, strict=True):
            count = SIZES[user]
            self._releases.accumulate(rows(update, count), count)

    replaced(patch, hand_in)


def counts_a_user_twice(patch: Patch) -> None:
    def hand_in(self: Users, updates: list[list[Tensor]]) -> None:
        for update in [*updates, *updates[:1]]:
            self._releases.accumulate(rows(update), 1)

    replaced(patch, hand_in)


def divides_by_who_came(patch: Patch) -> None:
    def hand_in(self: Users, updates: list[list[Tensor]]) -> None:
        for update in updates:
            self._releases.accumulate(rows(update), 1)
        self._releases.mechanism.total.mul_(self._lots.sampling.expected_batch_size / max(len(updates), 1))

    replaced(patch, hand_in)


def keyed_by_rank(patch: Patch) -> None:
    own = ReleaseEngine.key_of

    def key_of(self: ReleaseEngine, stream: Stream, *parts: int) -> tuple[int, ...]:
        return own(self, stream, *((0,) if stream is Stream.LOCAL_TRAINING else parts))

    patch.setattr(ReleaseEngine, "key_of", key_of)


def same_in_every_round(patch: Patch) -> None:
    own = ReleaseEngine.key_of

    def key_of(self: ReleaseEngine, stream: Stream, *parts: int) -> tuple[int, ...]:
        before = self.num_releases
        self.num_releases = 0 if stream is Stream.LOCAL_TRAINING else before
        try:
            return own(self, stream, *parts)
        finally:
            self.num_releases = before

    patch.setattr(ReleaseEngine, "key_of", key_of)


def unit_left_example(patch: Patch) -> None:
    patch.setattr(UserDataset, "unit", "example")


def unit_left_example_unchecked(patch: Patch) -> None:
    patch.setattr(UserDataset, "unit", "example")
    patch.setattr(Users, "unit", None)


def population_of_examples(patch: Patch) -> None:
    def count(dataset: Any) -> int:
        return int(dataset.sizes.sum())

    own = UserDataset.rows
    patch.setattr(UserDataset, "rows", lambda self, user: own(self, user % len(self)))
    patch.setattr(lots, "count_of", count)
    patch.setattr(lot_guards, "count_of", count)


def client_not_reset(patch: Patch) -> None:
    own, seen = torch._foreach_copy_, set[int]()

    def copy(into: Any, source: Any) -> None:
        if id(into) not in seen:
            own(into, source)
        seen.add(id(into))

    patch.setattr(torch, "_foreach_copy_", copy)


def momentum_in_the_client(patch: Patch) -> None:
    own, velocity = torch._foreach_add_, dict[int, Tensor]()

    def add(weights: Any, gradients: Any, alpha: float = 1.0) -> None:
        for w, g in zip(weights, gradients, strict=True):
            velocity[id(w)] = 0.5 * velocity.get(id(w), torch.zeros_like(g)) + g
        own(weights, [velocity[id(w)] for w in weights], alpha=alpha)

    patch.setattr(torch, "_foreach_add_", add)


def wrong_sign(patch: Patch) -> None:
    own = torch._foreach_sub
    patch.setattr(torch, "_foreach_sub", lambda a, b: own(b, a))


def clients_weights_stay(patch: Patch) -> None:
    @contextmanager
    def weights(self: Client) -> Any:
        self._server = [p.data.clone() for p in self._parameters]
        for p, own in zip(self._parameters, self._client, strict=True):
            p.data = own
        yield

    patch.setattr(Client, "weights", weights)


def buffers_of_clients_stay(patch: Patch) -> None:
    patch.setattr(Writes, "refuse_before_release", lambda self: None)
    patch.setattr(Writes, "refuse_before_update", lambda self: None)
    patch.setattr(Writes, "end_lot", lambda self: None)


MUTANTS = [
    clips_the_average,
    weighs_by_examples,
    counts_a_user_twice,
    divides_by_who_came,
    keyed_by_rank,
    same_in_every_round,
    unit_left_example,
    unit_left_example_unchecked,
    population_of_examples,
    client_not_reset,
    momentum_in_the_client,
    wrong_sign,
    clients_weights_stay,
    buffers_of_clients_stay,
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda f: f.__name__)
def test_mutants_are_caught(mutant: Callable[[Patch], None], tmp_path: Path, monkeypatch: Patch) -> None:
    mutant(monkeypatch)
    try:
        problems = audit(tmp_path)
    except DPBenchError as error:  # noticed at run time already
        problems = [str(error)]
    assert problems
