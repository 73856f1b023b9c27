"""Rows of a batch are made of one record each, whatever the `collate_fn` does with several."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils._pytree import tree_leaves
from torch.utils.data import Dataset, TensorDataset, default_collate

from dpbench.data.loader import PrivateDataLoader
from dpbench.data.sampler import PrivateBatchSampler, make_sampling
from dpbench.data.separate_records import SeparateRecords
from dpbench.data.trees import know_as_tree
from dpbench.errors import ConfigurationError
from tests.support.loaders import reserved

PICTURES = TensorDataset(torch.randn(60, 3, 4, generator=torch.Generator().manual_seed(0)), torch.arange(60) % 5)


class Texts(Dataset[Any]):
    """Of different lengths."""

    def __len__(self) -> int:
        return 60

    def __getitem__(self, position: int) -> dict[str, Any]:
        return {"tokens": torch.arange(1, 3 + position % 7), "label": position % 3, "text": f"record {position}"}


def mixup(records: list[Any]) -> Any:
    x, y = default_collate(records)
    return 0.5 * x + 0.5 * x.roll(1, 0), y


def cutmix(records: list[Any]) -> Any:
    x, y = default_collate(records)
    return torch.cat([x[:, :, :2], x.flip(0)[:, :, 2:]], 2), y


def mixed_texts(records: list[Any]) -> Any:
    tokens = pad_sequence([record["tokens"] for record in records], batch_first=True)
    return {"tokens": tokens + tokens.roll(1, 0), "label": torch.tensor([record["label"] for record in records])}


def augmented_beyond_the_seeds(records: list[Any]) -> Any:
    x, y = default_collate(records)
    return x + torch.from_numpy(np.random.default_rng().random(x.shape)).float(), y


def windows(records: list[Any]) -> Any:
    """One to three rows of a record."""
    rows = [torch.full((2,), float(part)) for record in records for part in record["tokens"][:3].tolist()]
    owner = [number for number, record in enumerate(records) for _ in record["tokens"][:3]]
    return {"rows": torch.stack(rows), "owner": torch.tensor(owner)}


def shuffled(records: list[Any]) -> Any:
    return default_collate([records[i] for i in torch.randperm(len(records))])


def nested(records: list[Any]) -> Any:
    """Standardized, in a dictionary that torch's trees do not know."""
    x, y = default_collate(records)
    return {"inner": UserDict(x=x - x.mean(0)), "y": y}


def loader(dataset: Dataset[Any], collate: Callable[[list[Any]], Any], **options: Any) -> PrivateDataLoader:
    sampler = PrivateBatchSampler(make_sampling("poisson", 60, 20), 0)
    return reserved(PrivateDataLoader(dataset, sampler, collate, **options))


def leaves_of(batch: Any) -> list[Tensor]:
    know_as_tree(batch)
    return [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]


def filled_with_neighbor(records: list[Any]) -> Any:
    kept: list[Any] = []
    for record in records:
        kept.append(record if int(record[1]) or not kept else kept[-1])
    return default_collate(kept)


@pytest.mark.parametrize("collate", [mixup, cutmix, nested, filled_with_neighbor])
def test_a_row_is_what_its_record_makes_alone(collate: Callable[[list[Any]], Any]) -> None:
    one = loader(PICTURES, collate)
    for step, batch in enumerate(one):
        for row, position in enumerate(one.lots.lot(step).tolist()):
            alone = leaves_of(collate([PICTURES[position]]))
            for ours, own in zip(leaves_of(batch), alone, strict=True):
                assert torch.equal(ours[row].nan_to_num(), own[0].nan_to_num())


@pytest.mark.parametrize("collate", [augmented_beyond_the_seeds, shuffled])
def test_random_collations_keep_the_order(collate: Callable[[list[Any]], Any]) -> None:
    one = loader(PICTURES, collate)
    for step, (_, y) in enumerate(one):
        assert torch.equal(y, PICTURES.tensors[1][one.lots.lot(step)])


def padded_left(records: list[Any]) -> Any:
    tokens = [record["tokens"].flip(0) for record in records]
    return {"tokens": pad_sequence(tokens, batch_first=True, padding_value=-9).flip(1)}


def padded(records: list[Any]) -> Any:
    """As tokenizers do; takes the records apart."""
    tokens = [record.pop("tokens") for record in records]
    return {
        "tokens": pad_sequence(tokens, batch_first=True, padding_value=7),
        "mask": pad_sequence([torch.ones(len(one)).bool() for one in tokens], batch_first=True),
        "text": [record.pop("text") for record in records],
    }


def test_texts_are_padded_as_the_collate_fn_does() -> None:
    one = loader(Texts(), padded)
    for step, batch in enumerate(one):
        expected = padded([Texts()[position] for position in one.lots.lot(step).tolist()])
        assert list(batch) == list(expected)
        assert all(map(torch.equal, leaves_of(batch), leaves_of(expected)))
        assert batch["text"] == expected["text"]


def test_texts_that_are_padded_on_the_left_are_batches_of_their_own() -> None:
    """Else they would have other positions where a longer one is beside them."""
    one = loader(Texts(), padded_left)
    with pytest.raises(ConfigurationError, match="pads with more than one number at the end.*padding_side='right'"):
        list(one)
    one.prepare_collation(may_separate=True)
    for step, lot in enumerate(one):
        assert isinstance(lot, SeparateRecords)
        for position, batch in zip(one.lots.lot(step).tolist(), lot, strict=True):
            assert torch.equal(batch["tokens"], Texts()[position]["tokens"][None])


def padded_with_the_mean(records: list[Any]) -> Any:
    tokens = [record["tokens"].float() for record in records]
    return {"tokens": pad_sequence(tokens, batch_first=True, padding_value=float(torch.cat(tokens).mean()))}


class Lists(Dataset[Any]):
    """Texts as tokenizers give them, some without a word."""

    def __len__(self) -> int:
        return 60

    def __getitem__(self, position: int) -> dict[str, Any]:
        return {"tokens": [5] * (position % 5)}


def last_token_on_the_right(records: list[Any]) -> Any:
    longest = max(len(record["tokens"]) for record in records)
    rows = [record["tokens"] + (record["tokens"][-1:] or [0]) * (longest - len(record["tokens"])) for record in records]
    return {"tokens": torch.tensor(rows)}


@pytest.mark.parametrize(
    ("texts", "collate"),
    [(Lists(), last_token_on_the_right), (Texts(), padded_with_the_mean)],
)
def test_other_padding_is_not_taken_for_one_number_at_the_end(
    texts: Dataset[Any],
    collate: Callable[[list[Any]], Any],
) -> None:
    """Made-up numbers are no padding, and what follows from them is none."""
    one = loader(texts, collate)
    one.prepare_collation(may_separate=True)
    kinds = {type(lot) for lot in one}
    assert kinds == {SeparateRecords}


def test_mixed_texts_are_not_padded() -> None:
    """The padding of mixed rows would tell of other records."""
    one = loader(Texts(), mixed_texts)
    with pytest.raises(ConfigurationError, match="cannot build each row of a batch from one record"):
        list(one)
    one.prepare_collation(may_separate=True)
    for step, lot in enumerate(one):
        assert isinstance(lot, SeparateRecords)
        for position, batch in zip(one.lots.lot(step).tolist(), lot, strict=True):
            assert torch.equal(batch["tokens"], 2 * Texts()[position]["tokens"][None])


def with_size(records: list[Any]) -> Any:
    return {"x": default_collate(records)[0], "size": len(records)}


def with_classes(records: list[Any]) -> Any:
    return {"x": default_collate(records)[0], "classes": 5, "scale": torch.tensor(2.0)}


def test_numbers_of_a_whole_batch_make_no_rows() -> None:
    one = loader(PICTURES, with_size)
    one.prepare_collation(may_separate=True)
    assert all(isinstance(lot, SeparateRecords) for lot in one)
    for batch in loader(PICTURES, with_classes):
        assert batch["classes"] == 5 and batch["scale"] == 2 and len(batch["x"]) > 1


def test_a_collate_fn_that_was_replaced_is_refused() -> None:
    one = loader(PICTURES, default_collate)
    one.collate_fn = mixup
    with pytest.raises(ConfigurationError, match="collate_fn of the PrivateDataLoader was replaced"):
        one.prepare_collation()


class Damaged(Dataset[Any]):
    """Some records are None."""

    def __len__(self) -> int:
        return 60

    def __getitem__(self, position: int) -> Any:
        return None if position in (3, 17, 41) else PICTURES[position]


def filled(records: list[Any]) -> Any:
    return default_collate([record for record in records if record is not None])


def test_a_record_that_is_none_has_no_row() -> None:
    with pytest.raises(
        ConfigurationError, match="fails on a list of one record, .* Remove records that cannot be read"
    ):
        list(loader(Damaged(), filled))


def four_of_each(records: list[Any]) -> dict[str, Tensor]:
    """As docs/module.md shows it: equal rows, of one record."""
    x = torch.stack([image for image, _ in records]).repeat_interleave(4, 0)
    return {"x": x, "record": torch.arange(len(records)).repeat_interleave(4)}


def windows_of_the_one_before(records: list[Any]) -> Any:
    """Has the rows of the record before count for a record whose label is 0."""
    before = [records[max(number - 1, 0)] if not record["label"] else record for number, record in enumerate(records)]
    return windows(before)


@pytest.mark.parametrize("collate", [windows, windows_of_the_one_before])
def test_rows_of_a_record_are_made_of_it(collate: Callable[[list[Any]], Any]) -> None:
    one = loader(Texts(), collate, record_of_row=lambda batch: batch["owner"])
    for step, batch in enumerate(one):
        expected = windows([Texts()[position] for position in one.lots.lot(step).tolist()])
        assert all(torch.equal(batch[name], expected[name]) for name in expected)


def test_an_index_that_names_others() -> None:
    with pytest.raises(ConfigurationError, match="record_of_row does not match the records"):
        list(loader(PICTURES, four_of_each, record_of_row=lambda batch: batch["record"] + 0))
