"""Experiments on membership: each record is trained on by a coin of its own, and nothing else changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from dpbench.data import ImageDataModule, Lots, UserDataModule, make_sampling
from dpbench.data.held_out import image_bytes, membership_coins
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
    pairs = np.corrcoef(many[:-1], many[1:])[0, 1]
    assert abs(pairs) < 5 / np.sqrt(4000)


def test_equal_images_have_coins_of_their_own() -> None:
    pixels = torch.zeros(400, 3, 3, dtype=torch.uint8)
    coins = membership_coins(image_bytes(pixels, torch.zeros(400, dtype=torch.int64)), 1)
    assert 150 < coins.sum() < 250


def test_the_coins_of_a_seed_stay() -> None:
    assert np.flatnonzero(membership_coins(NAMES[:12], 0)).tolist() == [1, 2, 6, 7, 8, 10, 11]


@pytest.mark.parametrize("kind", ["poisson", "shuffled"])
def test_lots_are_those_of_everybody_without_the_others(kind: str) -> None:
    sampling = make_sampling(kind, 200, 40)
    members = membership_coins(NAMES[:200], 1)
    everybody = Lots(sampling, seed=5)
    half = Lots(sampling, seed=5, members=members)
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
    for step in range(20):
        one = set(Lots(sampling, seed=5, members=members).lot(step).tolist())
        two = set(Lots(sampling, seed=5, members=other).lot(step).tolist())
        assert one ^ two <= {17}


def test_canaries_of_an_audit_stay_in_lots() -> None:
    lots = Lots(make_sampling("poisson", 100, 50), seed=5, members=np.zeros(100, dtype=bool))
    lots.added = 30
    assert sum(len(lots.added_in(step)) for step in range(10)) > 0
    assert not any(len(lots.lot(step)) for step in range(10))


@pytest.mark.parametrize(
    ("members", "kind", "message"),
    [
        (np.ones(99, dtype=bool), "poisson", "a boolean for each of the 100 examples"),
        (np.ones(100), "poisson", "not float64 of shape"),
        (np.ones(100, dtype=bool), "fixed_size", "data.sampling=poisson"),
    ],
)
def test_members_that_are_none(members: Any, kind: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Lots(make_sampling(kind, 100, 50), seed=5, members=members)


def test_a_data_module_trains_on_members_and_offers_all() -> None:
    data = ImageDataModule("digits", membership="half", seed=2, val_size=200)
    everybody = ImageDataModule("digits", seed=2, val_size=200)
    assert everybody.members is None
    members = data.members
    assert members is not None
    assert members.shape == (len(everybody.train_set),)
    assert data.sampling == everybody.sampling
    candidates = torch.cat([images for images, _ in data.candidate_dataloader()])
    assert torch.equal(candidates, torch.cat([images for images, _ in everybody.candidate_dataloader()]))
    seen = torch.cat([images for images, _ in data.seen_dataloader(10_000)])
    assert torch.equal(seen, candidates[torch.from_numpy(members)])
    assert len(torch.cat([images for images, _ in data.seen_dataloader(7)])) == 7
    loader = data.train_dataloader()
    assert loader.lots.members is members


def test_copies_of_a_record_have_coins_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    pd.DataFrame({"age": np.zeros(400), "label": np.ones(400, dtype=int)}).to_csv(path, index=False)
    options = {"path": str(path), "features": [["age"], "label"], "test_path": str(path)}
    data = UserDataModule("table", membership="half", seed=1, options=options, unit="example", expected_batch_size=5)
    members = data.members
    assert members is not None
    assert 100 < members.sum() < 300


def user_table(folder: Path) -> dict[str, Any]:
    users = np.repeat(np.arange(30), np.arange(30) % 4 + 1)
    table = pd.DataFrame({"who": users, "age": np.arange(len(users)) / 100, "label": users % 2})
    table = table.sample(frac=1, random_state=0)
    path = folder / "table.csv"
    table.to_csv(path, index=False)
    return {"path": str(path), "user": "who", "held_out": 0.2, "features": [["age"], "label"]}


def test_users_are_members_with_all_their_rows(tmp_path: Path) -> None:
    data = UserDataModule("user_table", membership="half", seed=1, options=user_table(tmp_path), expected_batch_size=5)
    members = data.members
    assert members is not None
    assert members.shape == (len(data.users),)
    assert 0 < members.sum() < len(members)
    ages = torch.cat([batch[0].flatten() for batch in data.candidate_dataloader()])
    assert len(ages) == len(data.record_of_row) == data.users.sizes.sum()
    for user in range(len(data.users)):
        own = data.users.batch(user, range(data.users.sizes[user]))
        assert sorted(ages[data.record_of_row == user].tolist()) == sorted(own[0].flatten().tolist())


def test_rows_without_users_are_members_one_by_one(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    pd.DataFrame({"age": np.arange(50) / 50, "label": np.arange(50) % 2}).to_csv(path, index=False)
    options = {"path": str(path), "features": [["age"], "label"]}
    data = UserDataModule("table", membership="half", seed=1, options=options, unit="example", expected_batch_size=5)
    members = data.members
    assert members is not None
    assert members.shape == (len(data.train_set),)
    again = UserDataModule("table", membership="half", seed=2, options=options, unit="example", expected_batch_size=5)
    assert (again.members != members).any()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seed": None}, "takes its coins from the seed"),
        ({"inserted": {"records": 3}}, "remove one of the two"),
    ],
)
def test_experiments_that_are_none(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        ImageDataModule("digits", membership="half", **options).setup()


def test_examples_of_users_are_no_members_of_their_own(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="data.unit=user"):
        UserDataModule("user_table", membership="half", unit="example", options=user_table(tmp_path))


class WithoutMembers(ImageDataModule):
    def _load(self) -> Any:
        return super()._load()._replace(members=None)


def test_a_data_module_that_chooses_no_members_is_refused() -> None:
    """All records would be trained on, and the attack would take half of them for strangers."""
    WithoutMembers("digits").setup()
    with pytest.raises(ConfigurationError, match="_load gives no members"):
        WithoutMembers("digits", membership="half").setup()


def test_an_absent_option_names_the_runs_of_before() -> None:
    config: dict[str, Any] = {
        "data": {"_target_": "dpbench.data.ImageDataModule", "name": "digits"},
        "trainer": {},
        "strategy": {},
    }
    with_null = {**config, "data": {**config["data"], "membership": None}}
    with_half = {**config, "data": {**config["data"], "membership": "half"}}
    assert config_hash(config) == config_hash(with_null) != config_hash(with_half)
    assert fingerprint(config) == fingerprint(with_null) != fingerprint(with_half)
