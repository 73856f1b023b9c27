"""A cluster for the tests of this folder, and how they run dpbench."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cluster.slurm import Slurm, missing


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All of them are of `make test-cluster`, and of no other command."""
    for item in items:
        if item.path.parent.name == "cluster":
            item.add_marker(pytest.mark.cluster)
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """Two nodes of two cores each, and two partitions: jobs of `high` take the place of jobs of `low`."""
    if (absent := missing()) is not None:
        pytest.skip(absent)
    with Slurm(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster
