"""Broken ways to train by user: each must fail the comparisons that the real one passes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dpbench.capabilities.users.dataset import UserDataset
from dpbench.data import loader as lots
from dpbench.errors import DPBenchError
from dpbench.guards import lots as lot_guards
from dpbench.privacy.accounting.ledger import read_ledger
from dpbench.privacy.gradients.parameter import InstantiatedGradients
from dpbench.privacy.randomness import Stream
from dpbench.privacy.releases import ReleaseEngine
from dpbench.records import LocalTraining, Users
from tests.capabilities.users.test_local_training import compare
from tests.capabilities.users.worlds import SIZES, Toy, fit, linear, make_users

Patch = pytest.MonkeyPatch


def problems(folder: Path) -> str:
    """Train by user, and compare weights and ledger with what they should be."""
    try:
        compare(folder / "a", Toy(linear()), make_users(), LocalTraining(lr=0.2, batch_size=2, epochs=2), 0.2)
        fit(folder / "b", Toy(linear()), steps=2)
        book = read_ledger(folder / "b" / "ledger.jsonl")
        for stated in (book.header, book.releases[0][1].sampling):
            assert (stated.unit, stated.population) == ("user", len(SIZES))
    except (AssertionError, DPBenchError) as error:  # some are noticed at run time
        return str(error)
    return ""


def test_the_real_one_passes(tmp_path: Path) -> None:
    assert problems(tmp_path) == ""


def handed_in(hand_in: Callable[[Users, list[list[Tensor]]], None]) -> Callable[[Patch], None]:
    """Another way to hand the cohort's updates in."""

    def train(self: Users, local_step: Any) -> None:
        hand_in(self, [self._update(user, local_step) for user in self._users])

    return lambda patch: patch.setattr(Users, "_train", train)


def rows(update: list[Tensor], times: int = 1) -> list[Any]:
    return [InstantiatedGradients(lambda x=x: x.expand(times, *x.shape).contiguous()) for x in update]  # type: ignore[misc]


def clip_the_average(self: Users, updates: list[list[Tensor]]) -> None:
    means = [torch.stack(one).mean(0) for one in zip(*updates, strict=True)]
    for _ in updates:
        self._releases.accumulate(rows(means), 1)


def weigh_by_examples(self: Users, updates: list[list[Tensor]]) -> None:
    for user, update in zip(self._users, updates, strict=True):
        self._releases.accumulate(rows(update, SIZES[user]), SIZES[user])


def one_key_for_all_users(patch: Patch) -> None:
    own = ReleaseEngine.key_of

    def key_of(self: ReleaseEngine, stream: Stream, *parts: int) -> tuple[int, ...]:
        return own(self, stream, *((0,) if stream is Stream.LOCAL_TRAINING else parts))

    patch.setattr(ReleaseEngine, "key_of", key_of)


def population_of_examples(patch: Patch) -> None:
    own = UserDataset.rows
    patch.setattr(UserDataset, "rows", lambda self, user: own(self, user % len(self)))
    for module in (lots, lot_guards):
        patch.setattr(module, "count_of", lambda dataset: int(dataset.sizes.sum()))


MUTANTS = {
    "the average is clipped": handed_in(clip_the_average),
    "users weigh by their examples": handed_in(weigh_by_examples),
    "all users have one key": one_key_for_all_users,
    "the population is of examples": population_of_examples,
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_caught(name: str, tmp_path: Path, monkeypatch: Patch) -> None:
    MUTANTS[name](monkeypatch)
    assert problems(tmp_path)
