"""Where a large lot is cut."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dpbench.strategies.lot_pieces import cut, cuts


@given(st.lists(st.integers(0, 9), max_size=40), st.integers(1, 12))
def test_microbatches_stay_whole(drawn: list[int], size: int) -> None:
    own = np.array(sorted(drawn), dtype=np.int64)
    ends = cuts(len(own), size, own)
    assert ends[-1] == len(own)
    pieces = np.split(own, ends[:-1])
    for piece in pieces:
        assert len(piece) <= size or len(set(piece)) == 1
    assert sum(len(set(piece)) for piece in pieces) == len(set(drawn))


@pytest.mark.parametrize(("records", "ends"), [(0, [0]), (3, [3]), (4, [4]), (9, [4, 8, 9])])
def test_examples_are_cut_anywhere(records: int, ends: list[int]) -> None:
    assert cuts(records, 4, None) == ends


def test_a_whole_lot_needs_no_trainer() -> None:
    """No message between processes and no wait for the device where nothing is cut."""
    batch = (torch.zeros(5, 2), torch.zeros(5))
    assert cut(batch, 5, None, None, None) == [batch]  # type: ignore[arg-type]
