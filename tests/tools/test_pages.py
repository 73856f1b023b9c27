"""Pages that are made from the code are what the code makes."""

from __future__ import annotations

import pytest

from tools import pages


@pytest.mark.filterwarnings("ignore")  # of layers that are tried
@pytest.mark.parametrize(
    "name",
    [
        "map",
        "guards",
        "layers",
        "audits",
        "zoo",
        pytest.param("combinations", marks=pytest.mark.long),  # trains 1,872 combinations
    ],
)
def test_a_committed_page_is_up_to_date(name: str) -> None:
    assert pages.committed(name) == pages.up_to_date(name), f"run `make {name}`"
