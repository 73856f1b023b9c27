"""Where a large lot is cut."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytorch_lightning as pl
import torch
from hypothesis import given
from hypothesis import strategies as st

from dpbench.records.physical_batches import cut, cuts
from tests.strategies.worlds import trainer_for


@given(st.lists(st.integers(0, 9), max_size=40), st.integers(1, 12))
def test_microbatches_stay_whole(drawn: list[int], size: int) -> None:
    own = np.array(sorted(drawn), dtype=np.int64)
    ends = cuts(len(own), size, own)
    assert ends[-1] == len(own)
    pieces = np.split(own, ends[:-1])
    for piece in pieces:
        assert len(piece) <= size or len(set(piece)) == 1
    assert sum(len(set(piece)) for piece in pieces) == len(set(drawn))


def test_texts_are_cut_with_their_records(tmp_path: Path) -> None:
    trainer = trainer_for(tmp_path, pl.Callback(), 1)
    names = [f"{i}" for i in range(5)]
    batch = {"x": torch.arange(5.0), "names": names, "more": [torch.arange(5), tuple(names)], "rate": torch.tensor(2.0)}
    pieces = cut(batch, 5, 2, None, trainer)
    assert [piece["names"] for piece in pieces] == [names[:2], names[2:4], names[4:]]
    for piece in pieces:
        assert piece["more"][1] == tuple(piece["names"]) and piece["rate"] == 2
        assert piece["x"].tolist() == piece["more"][0].tolist() == [float(name) for name in piece["names"]]
