"""Data sets as people have them: parts and sums of others, Hugging Face's protocol, dictionaries, strings, streams."""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import (
    ConcatDataset,
    Dataset,
    IterableDataset,
    StackDataset,
    Subset,
    TensorDataset,
    default_collate,
    random_split,
)

from dpbench.data.images import InMemoryImages
from dpbench.data.loader import PrivateDataLoader
from dpbench.data.records import Collated
from dpbench.data.sampler import PrivateBatchSampler
from dpbench.errors import ConfigurationError
from dpbench.privacy.sampling import PoissonSampling, ShuffledEpochs
from dpbench.strategies import DPSGD
from tests.strategies.worlds import trainer_for
from tests.support.loaders import reserved

SIZE = 24


class Plain(Dataset[Any]):
    """A number and its square, as a user writes a data set."""

    def __init__(self, size: int = SIZE) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, i: int) -> Any:
        return torch.tensor([float(i)]), i * i


class HuggingFace:
    """The protocol of `datasets.Dataset`: a dictionary for each record, lists of them for several."""

    def __init__(self) -> None:
        self.columns = {"x": [float(i) for i in range(SIZE)], "text": [f"record {i}" for i in range(SIZE)]}

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, key: Any) -> dict[str, Any]:
        if isinstance(key, int):
            return {name: column[key] for name, column in self.columns.items()}
        return {name: [column[i] for i in key] for name, column in self.columns.items()}

    def __getitems__(self, keys: list[int]) -> list[dict[str, Any]]:
        batch = self[keys]
        return [{name: column[i] for name, column in batch.items()} for i in range(len(batch["x"]))]


class Nested(Plain):
    """Dictionaries with strings and tuples in them."""

    def __getitem__(self, i: int) -> Any:
        return {"x": torch.tensor([float(i)]), "more": (str(i), {"y": i}), "both": [i, f"{i}"]}


def images(size: int = SIZE) -> InMemoryImages:
    return InMemoryImages(
        torch.arange(float(size))[:, None, None, None].expand(-1, 4, 4, 1).clone(), torch.arange(size)
    )


DATASETS = {
    "concatenated": lambda: ConcatDataset([Plain(10), Plain(SIZE - 10)]),
    "stacked": lambda: StackDataset(a=Plain(), b=images()),
    "hugging face": HuggingFace,
    "dictionaries": Nested,
    "part of images": lambda: Subset(images(40), list(range(40 - SIZE, 40))),
}


@pytest.mark.parametrize("name", DATASETS)
def test_lots_are_collated_as_torch_does(name: str) -> None:
    data: Any = DATASETS[name]()
    size = len(data)
    loader = PrivateDataLoader(data, PrivateBatchSampler(PoissonSampling(size, 1.5 / size), seed=1))
    lots = [loader.lots.lot(step) for step in range(len(loader))]
    batches = list(reserved(loader))
    assert len(batches) == len(lots)
    assert {0, 1, 2} <= {len(lot) for lot in lots}
    for lot, batch in zip(lots, batches, strict=True):
        if len(lot):
            expected = tree_leaves(default_collate([data[int(i)] for i in lot]))
            for ours, wanted in zip(tree_leaves(batch), expected, strict=True):
                assert torch.equal(ours, wanted) if isinstance(ours, Tensor) else ours == wanted
        else:
            assert not any(leaf.numel() if isinstance(leaf, Tensor) else leaf for leaf in tree_leaves(batch))


def test_a_part_of_images_is_still_indexed_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(InMemoryImages, "__getitem__", lambda *_: pytest.fail("image by image"))
    for data in (images(), random_split(images(40), [SIZE, 40 - SIZE])[0]):
        assert all(
            len(x) for x, _ in reserved(PrivateDataLoader(data, PrivateBatchSampler(PoissonSampling(SIZE, 0.9), 0)))
        )


@pytest.mark.parametrize("batch", [{"x": [1.0, 2.0]}, torch.zeros(2, 3)])
def test_a_whole_batch_must_say_that_it_is_one(batch: Any) -> None:
    """torch would stack its columns as if they were samples."""
    data = Plain()
    data.__getitems__ = lambda positions: batch  # type: ignore[attr-defined]
    with pytest.raises(ConfigurationError, match=r"list of samples. Return that, or dpbench.data.records.Collated"):
        next(iter(reserved(PrivateDataLoader.poisson(data, 4))))
    data.__getitems__ = lambda positions: Collated(batch)  # type: ignore[attr-defined]
    assert next(iter(reserved(PrivateDataLoader.poisson(data, 4)))) is batch


@pytest.mark.parametrize(
    ("data", "twice"),
    [
        (Subset(Plain(), [0, -1, SIZE - 1]), 1),
        (ConcatDataset([DATASET := Plain(), DATASET]), SIZE),
        (Subset(ConcatDataset([DATASET, Plain(3), Subset(DATASET, range(5))]), [0, 25, 27, 28]), 1),
    ],
)
def test_records_that_are_there_twice_are_refused(data: Any, twice: int) -> None:
    with pytest.raises(ConfigurationError, match=f"{twice} of the {len(data)} training records are repeated"):
        PrivateDataLoader.poisson(data, 2)
    PrivateDataLoader(
        data, PrivateBatchSampler(ShuffledEpochs(len(data), 2), 0)
    )  # without privacy, oversample as you like


def test_streams_have_no_positions() -> None:
    class Stream(IterableDataset[Any]):
        def __len__(self) -> int:
            return 5

        def __iter__(self) -> Any:
            return iter(range(5))

    for data in (Stream(), [1, 2].__iter__(), {1, 2}):
        with pytest.raises(ConfigurationError, match="is not a map-style data set"):
            PrivateDataLoader.poisson(data, 2)


class Encoding(UserDict):  # type: ignore[type-arg]
    """As Hugging Face's BatchEncoding, which torch's trees do not look into."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["data"][name]
        except KeyError:
            raise AttributeError(name) from None


@dataclass
class Pictures:
    x: Tensor
    y: Tensor


class OwnBatches(pl.LightningModule):
    """Takes the batch as the collate_fn made it."""

    def __init__(self, kind: type) -> None:
        super().__init__()
        self.net, self.kind = torch.nn.Linear(3, 2), kind

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        assert type(batch) is self.kind
        return torch.nn.functional.cross_entropy(self.net(batch.x), batch.y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


@pytest.mark.parametrize(("kind", "pieces"), [(Encoding, None), (Pictures, 2)])
def test_batches_of_another_kind(tmp_path: Path, kind: type, pieces: int | None) -> None:
    """Lots are small, so that some are empty."""

    def collate(records: list[Any]) -> Any:
        x, y = default_collate(records)
        return Encoding(x=x, y=y) if kind is Encoding else Pictures(x, y)

    data = TensorDataset(torch.randn(40, 3), torch.arange(40) % 2)
    strategy = DPSGD(noise_multiplier=1.0, seed=0, delta=1e-3, max_physical_batch_size=pieces)
    loader = PrivateDataLoader(data, PrivateBatchSampler(PoissonSampling(40, 1 / 40), 0), collate)
    trainer_for(tmp_path, strategy, 8).fit(OwnBatches(kind), loader)
    assert strategy.releases == 8
