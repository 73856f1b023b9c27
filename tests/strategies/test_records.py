"""One record, one row; or several rows that are clipped together."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch

from dpbench.data.lots import LotLoader, Lots, make_sampling
from dpbench.errors import ConfigurationError
from dpbench.strategies import DPSGD
from tests.strategies.worlds import Classifier, pictures, trainer_for


def fit(folder: Path, module: pl.LightningModule, loader: LotLoader, steps: int = 4, **options: Any) -> DPSGD:
    strategy = DPSGD(**{"noise_multiplier": 1.0, "seed": 0, "delta": 1e-3, **options})
    trainer_for(folder, strategy, steps).fit(module, loader)
    return strategy


def two_views(records: Any) -> Any:
    images, labels = records
    return torch.cat([images, images.flip(-1)]), labels.repeat(2)


def drops_one(records: Any) -> Any:
    return tuple(x[1:] for x in records)


def adds_one_to_some(records: Any) -> Any:
    """To lots of 13 and more."""
    return records if len(records[0]) < 13 else tuple(torch.cat([x, x[:1]]) for x in records)


@pytest.mark.parametrize("size", [1, 4], ids=["records", "microbatches"])
@pytest.mark.parametrize("manual", [False, True], ids=["automatic", "manual"])
@pytest.mark.parametrize("collate", [two_views, drops_one, adds_one_to_some])
def test_rows_that_are_not_the_lots(tmp_path: Path, collate: Callable[[Any], Any], manual: bool, size: int) -> None:
    """A record with two rows would be clipped twice, and move the sum by twice the bound."""
    loader = LotLoader(pictures(), Lots(make_sampling("poisson", 60, 12), 0))
    own = loader.collate_fn
    loader.collate_fn = lambda records: collate(own(records))
    with pytest.raises(ConfigurationError, match=r"rows, its lot has \d+ records: each row is clipped on its own"):
        fit(tmp_path, Classifier(manual), loader, 20, microbatch_size=size)


def test_a_lot_is_drawn_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """To be loaded; and it is there again when its rows are counted."""
    drawn: list[int] = []
    lot = Lots.lot

    def counted(self: Lots, step: int) -> Any:
        drawn.append(step)
        return lot(self, step)

    monkeypatch.setattr(Lots, "lot", counted)
    fit(tmp_path, Classifier(), LotLoader(pictures(), Lots(make_sampling("poisson", 60, 12), 0)))
    assert drawn == list(range(len(drawn))) and len(drawn) in (4, 5)
    lots = Lots(make_sampling("poisson", 60, 12), 0)
    for step in range(200):
        assert lots.share(step, 1, 2)[0].tolist() == lot(lots, step)[1::2].tolist()
    first = lots.share(199, 1, 2)[0]
    lots.phase = 1
    assert first.tolist() != lots.share(199, 1, 2)[0].tolist()
    assert len(lots._shares) <= 64
