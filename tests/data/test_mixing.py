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

from dpbench.data.collation import Collation
from dpbench.data.lots import PrivateBatchSampler, PrivateDataLoader, make_sampling
from dpbench.data.separate_records import SeparateRecords
from dpbench.data.trees import know_as_tree
from dpbench.errors import ConfigurationError

PICTURES = TensorDataset(torch.randn(60, 3, 4, generator=torch.Generator().manual_seed(0)), torch.arange(60) % 5)


class Texts(Dataset[Any]):
    """Of different lengths."""

    def __len__(self) -> int:
        return 60

    def __getitem__(self, position: int) -> dict[str, Any]:
        return {"tokens": torch.arange(1, 3 + position % 7), "label": position % 3, "text": f"record {position}"}


def mixup(records: list[Any]) -> Any:
    x, y = default_collate(records)
    share = torch.distributions.Beta(1.0, 1.0).sample()
    return share * x + (1 - share) * x.roll(1, 0), y


def cutmix(records: list[Any]) -> Any:
    x, y = default_collate(records)
    return torch.cat([x[:, :, :2], x.flip(0)[:, :, 2:]], 2), y


def standardized(records: list[Any]) -> Any:
    x, y = default_collate(records)
    return (x - x.mean(0)) / (1 + x.std(0, correction=0)), y


def mixed_texts(records: list[Any]) -> Any:
    tokens = pad_sequence([record["tokens"] for record in records], batch_first=True)
    return {"tokens": tokens + tokens.roll(1, 0), "label": torch.tensor([record["label"] for record in records])}


def plain(records: list[Any]) -> Any:
    return default_collate(records)


def augmented_beyond_the_seeds(records: list[Any]) -> Any:
    x, y = default_collate(records)
    return x + torch.from_numpy(np.random.default_rng().random(x.shape)).float(), y


def padded(records: list[Any]) -> Any:
    """As tokenizers do; takes the records apart."""
    tokens = pad_sequence([record.pop("tokens") for record in records], batch_first=True)
    return {"tokens": tokens, "text": [record.pop("text") for record in records]}


def windows(records: list[Any]) -> Any:
    """One to three rows of a record."""
    rows = [torch.full((2,), float(part)) for record in records for part in record["tokens"][:3].tolist()]
    owner = [number for number, record in enumerate(records) for _ in record["tokens"][:3]]
    return {"rows": torch.stack(rows), "owner": torch.tensor(owner)}


def shuffled(records: list[Any]) -> Any:
    return default_collate([records[i] for i in torch.randperm(len(records))])


def nested(records: list[Any]) -> Any:
    """Standardized, in a dictionary that torch's trees do not know."""
    x, y = standardized(records)
    return {"inner": UserDict(x=x), "y": y}


def loader(dataset: Dataset[Any], collate: Callable[[list[Any]], Any], **options: Any) -> PrivateDataLoader:
    return PrivateDataLoader(dataset, PrivateBatchSampler(make_sampling("poisson", 60, 20), 0), collate, **options)


def lots_of(one: PrivateDataLoader) -> list[Any]:
    """Without a trainer."""
    return list(one)


def leaves_of(batch: Any) -> list[Tensor]:
    know_as_tree(batch)
    return [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]


def filled_with_neighbor(records: list[Any]) -> Any:
    kept: list[Any] = []
    for record in records:
        kept.append(record if int(record[1]) or not kept else kept[-1])
    return default_collate(kept)


@pytest.mark.parametrize("collate", [cutmix, nested, filled_with_neighbor])
def test_a_row_is_what_its_record_makes_alone(collate: Callable[[list[Any]], Any]) -> None:
    one = loader(PICTURES, collate)
    for step, batch in enumerate(lots_of(one)):
        for row, position in enumerate(one.lots.lot(step).tolist()):
            alone = leaves_of(collate([PICTURES[position]]))
            for ours, own in zip(leaves_of(batch), alone, strict=True):
                assert torch.equal(ours[row].nan_to_num(), own[0].nan_to_num())


def test_a_partner_is_the_record_itself() -> None:
    one = loader(PICTURES, mixup)
    for step, (x, _) in enumerate(lots_of(one)):
        torch.testing.assert_close(x, PICTURES.tensors[0][one.lots.lot(step)])


@pytest.mark.parametrize("collate", [augmented_beyond_the_seeds, shuffled])
def test_random_collations_keep_the_order(collate: Callable[[list[Any]], Any]) -> None:
    one = loader(PICTURES, collate)
    for step, (_, y) in enumerate(lots_of(one)):
        assert torch.equal(y, PICTURES.tensors[1][one.lots.lot(step)])


def padded_left(records: list[Any]) -> Any:
    tokens = [record["tokens"].flip(0) for record in records]
    return {
        "tokens": pad_sequence(tokens, batch_first=True, padding_value=-9).flip(1),
        "mask": pad_sequence([torch.ones(len(one)).bool() for one in tokens], batch_first=True).flip(1),
    }


def padded_right(records: list[Any]) -> Any:
    tokens = [record["tokens"] for record in records]
    return {
        "tokens": pad_sequence(tokens, batch_first=True, padding_value=7),
        "mask": pad_sequence([torch.ones(len(one)).bool() for one in tokens], batch_first=True),
    }


@pytest.mark.parametrize("collate", [padded, padded_right])
def test_texts_are_padded_as_the_collate_fn_does(collate: Callable[[list[Any]], Any]) -> None:
    one = loader(Texts(), collate)
    for step, batch in enumerate(lots_of(one)):
        expected = collate([Texts()[position] for position in one.lots.lot(step).tolist()])
        assert list(batch) == list(expected)
        assert all(map(torch.equal, leaves_of(batch), leaves_of(expected)))
        assert batch.get("text") == expected.get("text")


def test_texts_that_are_padded_on_the_left_are_batches_of_their_own() -> None:
    """Else they would have other positions where a longer one is beside them."""
    one = loader(Texts(), padded_left)
    with pytest.raises(
        ConfigurationError, match="pads otherwise than with one number at the end.*padding_side='right'"
    ):
        lots_of(one)
    one.prepare_collation(may_separate=True)
    for step, lot in enumerate(lots_of(one)):
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


def zeros_on_the_left(records: list[Any]) -> Any:
    longest = max(len(record["tokens"]) for record in records)
    rows = [[0] * (longest - len(record["tokens"])) + record["tokens"] for record in records]
    return {"tokens": torch.tensor(rows)}


def last_token_on_the_right(records: list[Any]) -> Any:
    longest = max(len(record["tokens"]) for record in records)
    rows = [record["tokens"] + (record["tokens"][-1:] or [0]) * (longest - len(record["tokens"])) for record in records]
    return {"tokens": torch.tensor(rows)}


@pytest.mark.parametrize(
    ("texts", "collate"),
    [(Lists(), zeros_on_the_left), (Lists(), last_token_on_the_right), (Texts(), padded_with_the_mean)],
)
def test_other_padding_is_not_taken_for_one_number_at_the_end(
    texts: Dataset[Any],
    collate: Callable[[list[Any]], Any],
) -> None:
    """Made-up numbers are no padding, and what follows from them is none."""
    one = loader(texts, collate)
    one.prepare_collation(may_separate=True)
    kinds = {type(lot) for lot in lots_of(one)}
    assert kinds == {SeparateRecords}


def larger_pictures(records: list[Any]) -> Any:
    """Of several heights and widths, padded at the lower right."""
    sizes = torch.tensor([x.shape for x, _ in records])
    batch = torch.full((len(records), *sizes.amax(0).tolist()), 0.5)
    for row, (x, _) in enumerate(records):
        batch[row, : x.shape[0], : x.shape[1]] = x
    return batch


class Sizes(Dataset[Any]):
    """Pictures of two sizes."""

    def __len__(self) -> int:
        return 60

    def __getitem__(self, position: int) -> tuple[Tensor, int]:
        return torch.full((3 + position % 2, 7 - position % 2), float(position)), position % 2


def test_pictures_of_two_sizes() -> None:
    one = loader(Sizes(), larger_pictures)
    for step, batch in enumerate(lots_of(one)):
        records = [Sizes()[position] for position in one.lots.lot(step).tolist()]
        assert torch.equal(batch, larger_pictures(records))


def test_mixed_texts_are_not_padded() -> None:
    """The padding of mixed rows would tell of other records."""
    one = loader(Texts(), mixed_texts)
    with pytest.raises(ConfigurationError, match="cannot be made of one record each"):
        lots_of(one)
    one.prepare_collation(may_separate=True)
    for step, lot in enumerate(lots_of(one)):
        assert isinstance(lot, SeparateRecords)
        for position, batch in zip(one.lots.lot(step).tolist(), lot, strict=True):
            assert torch.equal(batch["tokens"], 2 * Texts()[position]["tokens"][None])


def with_size(records: list[Any]) -> Any:
    return {"x": default_collate(records)[0], "size": len(records)}


def with_longest(records: list[Any]) -> Any:
    return {"x": default_collate(records)[0], "longest": max(int(y) for _, y in records)}


def with_classes(records: list[Any]) -> Any:
    return {"x": default_collate(records)[0], "classes": 5, "scale": torch.tensor(2.0)}


def test_numbers_of_a_whole_batch_make_no_rows() -> None:
    for collate in (with_size, with_longest):
        one = loader(PICTURES, collate)
        one.prepare_collation(may_separate=True)
        assert all(isinstance(lot, SeparateRecords) for lot in lots_of(one))
    for batch in lots_of(loader(PICTURES, with_classes)):
        assert batch["classes"] == 5 and batch["scale"] == 2 and len(batch["x"]) > 1


def test_a_collate_fn_that_was_replaced_is_refused() -> None:
    one = loader(PICTURES, plain)
    one.collate_fn = mixup
    with pytest.raises(ConfigurationError, match="collate_fn of the PrivateDataLoader was replaced"):
        one.prepare_collation()


def test_training_without_privacy_may_mix() -> None:
    lots = PrivateBatchSampler(make_sampling("shuffled", 60, 20), 0)
    assert len(lots_of(PrivateDataLoader(PICTURES, lots, mixup))) == 3


class Damaged(Dataset[Any]):
    """Some records are None."""

    def __len__(self) -> int:
        return 60

    def __getitem__(self, position: int) -> Any:
        return None if position in (3, 17, 41) else PICTURES[position]


def filled(records: list[Any]) -> Any:
    return default_collate([record for record in records if record is not None])


def test_a_record_that_is_none_has_no_row() -> None:
    with pytest.raises(ConfigurationError, match="fails on a list of one: .* Remove records that cannot be read"):
        lots_of(loader(Damaged(), filled))


def four_of_each(records: list[Any]) -> dict[str, Tensor]:
    """As docs/module.md shows it: equal rows, of one record."""
    x = torch.stack([image for image, _ in records]).repeat_interleave(4, 0)
    return {"x": x, "record": torch.arange(len(records)).repeat_interleave(4)}


def filled_by_the_record_before(records: list[Any]) -> dict[str, Tensor]:
    """Two rows of each record; a record whose label is 0 has those of the one before it, which count for it."""
    rows = []
    for number, (image, label) in enumerate(records):
        source = records[number - 1][0] if int(label) == 0 and number else image
        rows += [(source, number), (source, number)]
    return {
        "x": torch.stack([image for image, _ in rows]),
        "record": torch.tensor([number for _, number in rows]),
    }


@pytest.mark.parametrize(
    ("collate", "index"),
    [(four_of_each, "record"), (filled_by_the_record_before, lambda batch: batch["record"])],
)
def test_rows_of_a_record_are_made_of_it(collate: Callable[[list[Any]], Any], index: Any) -> None:
    one = loader(PICTURES, collate, record_of_row=index)
    for step, batch in enumerate(lots_of(one)):
        own = PICTURES.tensors[0][one.lots.lot(step)]
        assert torch.equal(batch["x"], own[batch["record"]])
        assert torch.equal(batch["record"], torch.arange(len(own)).repeat_interleave(len(batch["x"]) // len(own)))


def test_windows_of_texts() -> None:
    one = loader(Texts(), windows, record_of_row="owner")
    for step, batch in enumerate(lots_of(one)):
        expected = windows([Texts()[position] for position in one.lots.lot(step).tolist()])
        assert all(torch.equal(batch[name], expected[name]) for name in expected)


def test_an_index_that_names_others() -> None:
    with pytest.raises(ConfigurationError, match="record_of_row names other records"):
        lots_of(loader(PICTURES, four_of_each, record_of_row=lambda batch: batch["record"] + 0))


def test_what_rows_are() -> None:
    def makes_rows(make: Callable[[int], Any]) -> bool:
        return Collation(PICTURES, lambda records: make(len(records)))._makes_rows(PICTURES[0])

    image = torch.zeros(3, 4, 4)
    assert makes_rows(lambda count: {"x": torch.zeros(count, 2), "text": ["a"] * count})
    assert makes_rows(lambda count: (torch.zeros(count, 2), torch.zeros(())))
    assert not makes_rows(lambda count: [image] * count)
    assert not makes_rows(lambda count: [image[:1]] * count)
    assert not makes_rows(lambda count: {"x": torch.zeros(count, 2), "weights": torch.zeros(2)})
    assert not makes_rows(lambda count: {"x": torch.zeros(count, 2), "array": np.zeros(count)})
    assert not makes_rows(lambda count: [1] * count)
