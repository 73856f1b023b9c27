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

from dpbench.data.lots import LotLoader, Lots, make_sampling
from dpbench.errors import ConfigurationError, UnsupportedModuleError
from dpbench.strategies import DPSGD, AdaptiveQuantileClipping, DiscretizedDPSGD
from tests.strategies.worlds import Classifier, pictures, trainer_for, update, weights_of

QUIET = 1e-9


def fit(folder: Path, module: pl.LightningModule, loader: LotLoader, steps: int = 4, **options: Any) -> DPSGD:
    strategy = DPSGD(**{"noise_multiplier": 1.0, "seed": 0, "delta": 1e-3, **options})
    trainer_for(folder, strategy, steps).fit(module, loader)
    return strategy


def two_views(records: Any) -> Any:
    images, labels = records
    return torch.cat([images, images.flip(-1)]), labels.repeat(2)


def drops_one(records: Any) -> Any:
    return tuple(x[1:] for x in records)


@pytest.mark.parametrize("size", [1, 4], ids=["records", "microbatches"])
@pytest.mark.parametrize("manual", [False, True], ids=["automatic", "manual"])
@pytest.mark.parametrize("collate", [two_views, drops_one])
def test_rows_that_are_not_the_lots(tmp_path: Path, collate: Callable[[Any], Any], manual: bool, size: int) -> None:
    """A record with two rows would be clipped twice, and move the sum by twice the bound."""
    lots = Lots(make_sampling("poisson", 60, 12), 0)
    loader = LotLoader(pictures(), lots, lambda records: collate(tuple(default_collate(records))))
    words = r"rows but \d+ records: each row is clipped separately"
    with pytest.raises(ConfigurationError, match=words):
        fit(tmp_path, Classifier(manual), loader, 20, microbatch_size=size, gradients="engine")


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


# ------------------------------------------------------------------------------------------------- several rows


def texts(size: int = 40, scale: float = 1.0) -> TensorDataset:
    """Record i has i % 4 windows; some none."""
    generator = torch.Generator().manual_seed(5)
    x = scale * torch.randn(size, 6, generator=generator)
    return TensorDataset(x, torch.randint(3, (size,), generator=generator), torch.arange(size) % 4)


def windows(records: Any) -> dict[str, Tensor]:
    rows = [(x.roll(shift), y, i) for i, (x, y, n) in enumerate(records) for shift in range(int(n))]
    x = torch.stack([row[0] for row in rows]) if rows else torch.zeros(0, 6)
    y = torch.stack([row[1] for row in rows]) if rows else torch.zeros(0, dtype=torch.long)
    return {"x": x, "y": y, "overflow_to_sample_mapping": torch.tensor([row[2] for row in rows], dtype=torch.long)}


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


def reading(data: Any = None, collate: Any = windows, expected: float = 12, of: Any = None) -> LotLoader:
    lots = Lots(make_sampling("poisson", len(data or texts()), expected), 0)
    return LotLoader(data or texts(), lots, collate, record_of_row=of or "overflow_to_sample_mapping")


def by_hand(collate: Any, steps: int, bound: float) -> Tensor:
    """In float64, record by record with ordinary autograd."""
    module, data = Reads().double(), texts()
    lots = Lots(make_sampling("poisson", len(data), 12), 0)
    optimizer = module.configure_optimizers()
    for step in range(steps):
        total = [torch.zeros_like(p) for p in module.parameters()]
        for position in lots.lot(step).tolist():
            batch = collate([data[position]])
            if not len(batch["x"]):
                continue
            loss = module.losses({**batch, "x": batch["x"].double()}).mean()
            gradient = torch.autograd.grad(loss, list(module.parameters()))
            norm = float(torch.cat([g.flatten() for g in gradient]).norm())
            for t, g in zip(total, gradient, strict=True):
                t += g * min(1.0, bound / norm)
        for p, t in zip(module.parameters(), total, strict=True):
            p.grad = t / 12
        optimizer.step()
    return weights_of(module)


@pytest.mark.parametrize("size", [None, 1, 5], ids=["whole", "rows", "pieces"])
@pytest.mark.parametrize("manual", [False, True], ids=["automatic", "manual"])
@pytest.mark.parametrize("collate", [windows, views])
def test_rows_of_a_record_are_clipped_together(tmp_path: Path, collate: Any, manual: bool, size: int | None) -> None:
    if manual and size:
        return
    module, options = Reads(manual), {"max_grad_norm": 0.4, "noise_multiplier": QUIET}
    fit(tmp_path, module, reading(collate=collate), 4, max_physical_batch_size=size, **options)
    torch.testing.assert_close(weights_of(module).double(), by_hand(collate, 4, 0.4), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("make", [DPSGD, DiscretizedDPSGD, AdaptiveQuantileClipping])
@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_a_record_with_several_rows_moves_the_sum_by_its_bound(tmp_path: Path, make: Any, scale: float) -> None:
    """Leave one record out: the released sum of the first lot moves by at most the sensitivity."""
    sums = []
    data = texts(scale=scale)
    lot = Lots(make_sampling("poisson", 40, 12), 0).lot(0)
    three = next(position for position in lot.tolist() if position % 4 == 3)
    for left_out in (False, True):
        module = Reads()

        def collate(records: Any, without: bool = left_out) -> Any:
            gone = data.tensors[0][three]
            return windows([(x, y, 0 if without and torch.equal(x, gone) else n) for x, y, n in records])

        released: list[Tensor] = []

        class Keeps(pl.Callback):
            def on_before_optimizer_step(self, trainer: Any, module: Any, _: Any) -> None:
                released.append(torch.cat([p.grad.flatten() for p in module.parameters()]) * 12)  # noqa: B023

        strategy = make(noise_multiplier=QUIET if make is not AdaptiveQuantileClipping else 1e-4, seed=0, delta=1e-3)
        trainer_for(tmp_path / str(left_out), strategy, 1, more=[Keeps()]).fit(module, reading(data, collate))
        sums.append(released[0])
    bound = sum(group.max_grad_norm**2 for group in strategy.mechanism.training_plan.groups) ** 0.5
    moved = float((sums[0] - sums[1]).norm())
    assert 1e-3 * bound < moved <= bound * (1 + 1e-3)


def test_metrics_are_those_of_records(tmp_path: Path) -> None:
    """A record with three windows counts once, with their mean."""
    strategy = fit(tmp_path, Reads(), reading(), 1, noise_multiplier=QUIET, metrics={"loss": 1.2})
    data, module, lots = texts(), Reads(), Lots(make_sampling("poisson", 40, 12), 0)
    batches = [windows([data[i]]) for i in lots.lot(0).tolist()]
    means = [float(module.losses(batch).detach().mean().clamp(max=1.2)) for batch in batches if len(batch["x"])]
    assert strategy.mechanism.metrics["private/loss"] == pytest.approx(sum(means) / 12, rel=1e-5)


def test_lots_without_rows(tmp_path: Path) -> None:
    strategy = fit(tmp_path, Reads(), reading(expected=1.1), 20)
    assert strategy.releases == 20


def index_of(rows: Callable[[Tensor], Any]) -> Callable[[dict[str, Tensor]], Any]:
    return lambda batch: rows(batch["overflow_to_sample_mapping"])


@pytest.mark.parametrize(
    ("of", "words"),
    [
        ("other", "record_of_row='other' is no entry of the batch"),
        (index_of(lambda of: of[:-1]), "one whole number for each of the"),
        (index_of(lambda of: of[:, None]), "one whole number for each of the"),
        (index_of(lambda of: of.float()), "one whole number .* not float32"),
        (index_of(lambda of: of > 1), "one whole number .* not bool"),
        (index_of(lambda of: ["a"] * len(of)), "one whole number"),
        (index_of(lambda of: None), "one whole number"),
        (index_of(lambda of: of.flip(0)), "record_of_row names other records"),
        (index_of(lambda of: of - 1), "record_of_row names other records"),
        (index_of(lambda of: of + 1000), "record_of_row names other records"),
    ],
)
def test_what_is_no_index_of_records_is_refused(tmp_path: Path, of: Any, words: str) -> None:
    loader = reading(of=of)
    with pytest.raises(ConfigurationError, match=words):
        fit(tmp_path, Reads(), loader)


def test_rows_or_microbatches(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="microbatch_size=4 does not go with record_of_row"):
        fit(tmp_path, Reads(), reading(), microbatch_size=4)
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
    fit(tmp_path / "own", Pairs(), reading(collate=views), 8)
    module = Pairs()
    module.shift = 1
    with pytest.raises(UnsupportedModuleError, match="records are combined"):
        fit(tmp_path / "others", module, reading(collate=views), 8, gradients="engine")


@pytest.mark.slow
@pytest.mark.own_key
def test_rows_of_two_processes(tmp_path: Path) -> None:
    one, two = Reads(), Reads()
    strategy = DPSGD(noise_multiplier=1.0, seed=0, delta=1e-3)
    trainer_for(tmp_path / "1", strategy, 4).fit(one, reading())
    strategy = DPSGD(noise_multiplier=1.0, seed=0, delta=1e-3)
    trainer_for(tmp_path / "2", strategy, 4, devices=2, strategy="ddp_fork").fit(two, reading())
    torch.testing.assert_close(weights_of(two), weights_of(one), rtol=1e-4, atol=1e-5)
