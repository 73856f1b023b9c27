"""One record, one row; or several rows that are clipped together."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset, default_collate

from dpbench.data.loader import PrivateDataLoader
from dpbench.data.sampler import PrivateBatchSampler, make_sampling
from dpbench.errors import ConfigurationError, UnsupportedModuleError
from tests.strategies.worlds import Classifier, clipped_sum, fit, pictures, update, weights_of

QUIET = 1e-9


def lots_of(size: int, expected: float = 12) -> PrivateBatchSampler:
    return PrivateBatchSampler(make_sampling("poisson", size, expected), 0)


def two_views(images: Tensor, labels: Tensor) -> Any:
    return torch.cat([images, images.flip(-1)]), labels.repeat(2)


def drops_one(*records: Tensor) -> Any:
    return tuple(x[1:] for x in records)


@pytest.mark.parametrize(("collate", "manual", "size"), [(two_views, True, 1), (drops_one, False, 4)])
def test_rows_that_are_not_the_lots(tmp_path: Path, collate: Callable[..., Any], manual: bool, size: int) -> None:
    """A record with two rows would be clipped twice, and move the sum by twice the bound."""
    loader = PrivateDataLoader(pictures(), lots_of(60), lambda records: collate(*default_collate(records)))
    with pytest.raises(ConfigurationError, match=r"rows but \d+ records: each row is clipped separately"):
        fit(tmp_path, Classifier(manual), loader=loader, microbatch_size=size, gradients="engine")


# ------------------------------------------------------------------------------------------------- several rows


def texts(scale: float = 1.0) -> TensorDataset:
    """Record i has i % 4 windows; some none."""
    generator = torch.Generator().manual_seed(5)
    x = scale * torch.randn(40, 6, generator=generator)
    return TensorDataset(x, torch.randint(3, (40,), generator=generator), torch.arange(40) % 4)


def windows(records: Any) -> dict[str, Tensor]:
    rows = [(x.roll(shift), y, i) for i, (x, y, n) in enumerate(records) for shift in range(int(n))]
    x, y, of = zip(*rows, strict=True) if rows else ((torch.zeros(6),), (0,), (0,))
    columns = {"x": torch.stack(x), "y": torch.tensor(y), "overflow_to_sample_mapping": torch.tensor(of)}
    return {name: column[: len(rows)] for name, column in columns.items()}


def views(records: Any) -> dict[str, Tensor]:
    """Two of each record."""
    return windows([(x, y, 2) for x, y, _ in records])


class Reads(pl.LightningModule):
    record_metrics = {"loss": 1}  # noqa: RUF012

    def __init__(self, manual: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        self.automatic_optimization = not manual

    def losses(self, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(self.net(batch["x"]), batch["y"], reduction="none")

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        losses = self.losses(batch)
        if not self.automatic_optimization:
            return update(self, losses.mean())
        return {"loss": losses.mean(), "record_metrics": {"loss": losses.detach()}}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5)


def reading(
    collate: Any = windows, data: Any = None, expected: float = 12, of: Any = "overflow_to_sample_mapping"
) -> PrivateDataLoader:
    return PrivateDataLoader(data or texts(), lots_of(40, expected), collate, record_of_row=of)


def by_hand(collate: Any, steps: int, bound: float) -> Tensor:
    """In float64, record by record with ordinary autograd."""
    module = Reads().double()
    parameters = list(module.parameters())
    optimizer = module.configure_optimizers()
    for step in range(steps):
        records = [collate([texts()[position]]) for position in lots_of(40).lot(step).tolist()]
        batches = [{**batch, "x": batch["x"].double()} for batch in records if len(batch["x"])]
        for p, total in zip(
            parameters, clipped_sum((module.losses(b).mean() for b in batches), parameters, bound), strict=True
        ):
            p.grad = total / 12
        optimizer.step()
    return weights_of(module)


@pytest.mark.parametrize(
    ("collate", "manual", "size"),
    [(windows, False, 1), (views, False, 5), (windows, True, None)],
)
def test_rows_of_a_record_are_clipped_together(tmp_path: Path, collate: Any, manual: bool, size: int | None) -> None:
    module = Reads(manual)
    options = {"max_grad_norm": 0.4, "noise_multiplier": QUIET, "max_physical_batch_size": size}
    fit(tmp_path, module, 4, loader=reading(collate), **options)
    torch.testing.assert_close(weights_of(module).double(), by_hand(collate, 4, 0.4), rtol=1e-5, atol=1e-6)


def test_a_record_with_several_rows_moves_the_sum_by_its_bound(tmp_path: Path) -> None:
    """Leave one record out: the released sum of the first lot moves by at most the bound."""
    data = texts(1e4)
    three = next(position for position in lots_of(40).lot(0).tolist() if position % 4 == 3)
    sums = []
    for without in (False, True):
        if without:
            data.tensors[2][three] = 0
        module = Reads()
        before = weights_of(module)
        fit(tmp_path / str(without), module, 1, loader=reading(data=data), noise_multiplier=QUIET)
        sums.append((before - weights_of(module)) / 0.5 * 12)
    assert float((sums[0] - sums[1]).norm()) == pytest.approx(1.0, rel=1e-3)


def test_metrics_are_those_of_records(tmp_path: Path) -> None:
    """A record with three windows counts once, with their mean."""
    strategy = fit(tmp_path, Reads(), 1, loader=reading(), noise_multiplier=QUIET, metrics={"loss": 1.2})
    batches = [windows([texts()[i]]) for i in lots_of(40).lot(0).tolist()]
    means = [float(Reads().losses(batch).detach().mean().clamp(max=1.2)) for batch in batches if len(batch["x"])]
    assert strategy.mechanism.metrics["private/loss"] == pytest.approx(sum(means) / 12, rel=1e-5)


def test_lots_without_rows(tmp_path: Path) -> None:
    assert fit(tmp_path, Reads(), 8, loader=reading(expected=1.1)).releases == 8


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (None, "record_of_row='other' is not an entry of the batch"),
        (lambda of: of[:-1], "one whole number for each of the"),
        (lambda of: of > 1, "one whole number .* not bool"),
        (lambda of: of.flip(0), "record_of_row does not match the records"),
        (lambda of: of - 1, "record_of_row does not match the records"),
        (lambda of: of + 1000, "record_of_row does not match the records"),
    ],
    ids=["no entry", "few", "type", "order", "negative", "large"],
)
def test_what_is_no_index_of_records_is_refused(tmp_path: Path, change: Any, words: str) -> None:
    of = "other" if change is None else lambda batch: change(batch["overflow_to_sample_mapping"])
    with pytest.raises(ConfigurationError, match=words):
        fit(tmp_path, Reads(), loader=reading(of=of))


def test_rows_or_microbatches(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="microbatch_size=4 cannot be combined with record_of_row"):
        fit(tmp_path, Reads(), loader=reading(), microbatch_size=4)
    assert not (tmp_path / "ledger.jsonl").exists()


class Pairs(Reads):
    """The two views of a record are compared with each other, or with those of its neighbor."""

    shift = 0

    def losses(self, batch: dict[str, Tensor]) -> Tensor:
        z = self.net(batch["x"]).unflatten(0, (-1, 2))
        other = z.flip(1).roll(self.shift, 0)
        assert batch["overflow_to_sample_mapping"].tolist() == [i // 2 for i in range(2 * len(z))]  # also in probes
        return (z - other).square().sum(2).flatten()


def test_rows_of_a_record_may_depend_on_one_another(tmp_path: Path) -> None:
    fit(tmp_path / "own", Pairs(), loader=reading(views))
    module = Pairs()
    module.shift = 1
    with pytest.raises(UnsupportedModuleError, match="records are combined"):
        fit(tmp_path / "others", module, loader=reading(views), gradients="engine")
