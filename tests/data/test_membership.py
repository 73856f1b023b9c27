"""Experiments on membership: each record is trained on by a coin of its own, and nothing else changes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from dpbench.data import ImageDataModule, PrivateBatchSampler, make_sampling
from dpbench.data.held_out import membership_coins
from dpbench.errors import ConfigurationError
from dpbench.harness.runs.provenance import config_hash, fingerprint

NAMES = [f"record {number}".encode() for number in range(4000)]


def test_coins_are_fair_and_those_of_seeds_are_independent() -> None:
    coins = np.stack([membership_coins(NAMES, seed) for seed in range(8)])
    deviation = 0.5 / np.sqrt(len(NAMES))
    assert np.abs(coins.mean(1) - 0.5).max() < 5 * deviation
    correlations = np.corrcoef(coins)[np.triu_indices(8, 1)]
    assert np.abs(correlations).max() < 10 * deviation


def test_no_record_decides_for_another() -> None:
    coins = membership_coins(NAMES, 3)
    assert (membership_coins(NAMES[1:], 3) == coins[1:]).all()
    assert (membership_coins(NAMES[::-1], 3) == coins[::-1]).all()


def test_copies_of_a_record_are_no_members_together() -> None:
    """Epsilon is of one record: with one coin, a record with a copy is told with twice its claim."""
    twice = membership_coins([*NAMES, *NAMES], 3)
    first, second = twice.reshape(2, -1)
    assert (first == membership_coins(NAMES, 3)).all()
    assert abs((first == second).mean() - 0.5) < 5 * 0.5 / np.sqrt(len(NAMES))
    many = membership_coins([NAMES[0]] * 4000, 3)
    assert abs(many.mean() - 0.5) < 5 * 0.5 / np.sqrt(4000)
    assert abs(np.corrcoef(many[:-1], many[1:])[0, 1]) < 5 / np.sqrt(4000)


def test_the_coins_of_a_seed_stay() -> None:
    assert np.flatnonzero(membership_coins(NAMES[:12], 0)).tolist() == [1, 2, 6, 7, 8, 10, 11]


def test_lots_are_those_of_everybody_without_the_others() -> None:
    sampling = make_sampling("shuffled", 200, 40)
    members = membership_coins(NAMES[:200], 1)
    everybody = PrivateBatchSampler(sampling, seed=5)
    half = PrivateBatchSampler(sampling, seed=5, members=members)
    assert half.sampling == everybody.sampling
    for step in range(10):
        lot = everybody.lot(step)
        assert half.lot(step).tolist() == lot[members[lot]].tolist()


def test_a_coin_adds_one_record_and_moves_no_other() -> None:
    """The neighbors of the experiment are those of the ledger: a record is there, or it is not."""
    sampling = make_sampling("poisson", 100, 50)
    members = membership_coins(NAMES[:100], 1)
    other = members.copy()
    other[17] = not members[17]
    one, two = (PrivateBatchSampler(sampling, seed=5, members=chosen) for chosen in (members, other))
    assert {17} == {record for step in range(20) for record in {*one.lot(step)} ^ {*two.lot(step)}}


def test_canaries_of_an_audit_stay_in_lots() -> None:
    lots = PrivateBatchSampler(make_sampling("poisson", 100, 50), seed=5, members=np.zeros(100, dtype=bool))
    lots.added = 30
    assert sum(len(lots.added_in(step)) for step in range(10)) > 0
    assert not any(len(lots.lot(step)) for step in range(10))


@pytest.mark.parametrize(
    ("members", "kind", "message"),
    [
        (np.ones(99, dtype=bool), "poisson", "a boolean for each of the 100 examples"),
        (np.ones(100, dtype=bool), "fixed_size", "data.sampling=poisson"),
    ],
)
def test_members_that_are_none(members: Any, kind: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        PrivateBatchSampler(make_sampling(kind, 100, 50), seed=5, members=members)


def test_a_data_module_trains_on_members_and_offers_all() -> None:
    data, everybody = (ImageDataModule("digits", membership=word, seed=2, val_size=200) for word in ("half", None))
    members = data.members
    assert everybody.members is None and members is not None
    assert data.sampling == everybody.sampling and data.train_dataloader().lots.members is members
    candidates, same, seen, few = (
        torch.cat([images for images, _ in loader])
        for loader in (
            data.candidate_dataloader(),
            everybody.candidate_dataloader(),
            data.seen_dataloader(10_000),
            data.seen_dataloader(7),
        )
    )
    assert torch.equal(candidates, same) and len(few) == 7
    assert torch.equal(seen, candidates[torch.from_numpy(members)])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seed": None}, "chooses members by the seed"),
        ({"inserted": {"records": 3}}, "remove one of the two"),
    ],
)
def test_experiments_that_are_none(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        ImageDataModule("digits", membership="half", **options).setup()


class WithoutMembers(ImageDataModule):
    def _load(self) -> Any:
        return super()._load()._replace(members=None)


def test_a_data_module_that_chooses_no_members_is_refused() -> None:
    """All records would be trained on, and the attack would take half of them for strangers."""
    WithoutMembers("digits").setup()
    with pytest.raises(ConfigurationError, match="_load returns no members"):
        WithoutMembers("digits", membership="half").setup()


def test_an_absent_option_names_the_runs_of_before() -> None:
    data = {"_target_": "dpbench.data.ImageDataModule", "name": "digits"}
    parts = (data, {**data, "membership": None}, {**data, "membership": "half"})
    for name_of in (config_hash, fingerprint):
        absent, null, half = (name_of({"data": part, "trainer": {}, "strategy": {}}) for part in parts)
        assert absent == null != half
