"""Names by which scripts and configurations know the classes of the capability, wherever its folder lies."""

from __future__ import annotations

import pytest

import dpbench
from dpbench import data, records
from dpbench.capabilities.users.cohorts import Users
from dpbench.capabilities.users.dataset import UserDataset
from dpbench.capabilities.users.local_training import LocalTraining
from dpbench.capabilities.users.module import UserDataModule
from dpbench.code import COMPUTING
from dpbench.records.step_state import is_opaque


def test_packages_have_the_names_of_before() -> None:
    assert (dpbench.UserDataset, data.UserDataModule, records.LocalTraining) == (
        UserDataset,
        UserDataModule,
        LocalTraining,
    )
    assert dpbench.Users is records.Users is Users
    with pytest.raises(AttributeError, match="module 'dpbench' has no attribute 'Nobody'"):
        _ = dpbench.Nobody


def test_a_source_of_records_is_code_whose_state_stays() -> None:
    assert is_opaque(Users(LocalTraining(lr=0.1))) and "capabilities/users" in COMPUTING
