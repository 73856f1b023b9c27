"""A `collate_fn` that makes a row of several records is refused; one that only augments, pads or splits is not."""

from __future__ import annotations

import random
from collections import UserDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset, TensorDataset, default_collate

from dpbench.data.lots import LotLoader, Lots, make_sampling
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


def mixup_sometimes(records: list[Any]) -> Any:
    x, y = default_collate(records)
    partner = torch.from_numpy(np.random.permutation(len(x)))
    return torch.where(torch.rand(len(x), 1, 1) < 0.5, x, x[partner]), y


def cutmix(records: list[Any]) -> Any:
    x, y = default_collate(records)
    return torch.cat([x[:, :, :2], x.flip(0)[:, :, 2:]], 2), y


def standardized(records: list[Any]) -> Any:
    x, y = default_collate(records)
    return (x - x.mean(0)) / x.std(0), y


def mixed_texts(records: list[Any]) -> Any:
    tokens = pad_sequence([record["tokens"] for record in records], batch_first=True)
    return {"tokens": tokens + tokens.roll(1, 0), "label": torch.tensor([record["label"] for record in records])}


def plain(records: list[Any]) -> Any:
    return default_collate(records)


def augmented(records: list[Any]) -> Any:
    x, y = default_collate(records)
    noise = torch.randn(x.shape) + float(np.random.rand()) + random.random()
    return torch.where(torch.rand(len(x), 1, 1) < 0.5, x, x.flip(-1)) + noise, y


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


def sorted_by_length(records: list[Any]) -> Any:
    """As packed sequences want them."""
    return padded(sorted(records, key=lambda record: -len(record["tokens"])))


def shuffled(records: list[Any]) -> Any:
    return default_collate([records[i] for i in torch.randperm(len(records))])


def nested(records: list[Any]) -> Any:
    """Standardized, in a dictionary that torch's trees do not know."""
    x, y = standardized(records)
    return {"inner": UserDict(x=x), "y": y}


def loader(dataset: Dataset[Any], collate: Callable[[list[Any]], Any], **options: Any) -> LotLoader:
    return LotLoader(dataset, Lots(make_sampling("poisson", 60, 20), 0), collate, **options)


def lots_of(one: LotLoader) -> list[Any]:
    """Without a trainer."""
    return list(one)


@pytest.mark.parametrize(
    ("collate", "workers"),
    [
        (mixup, 0),
        pytest.param(mixup, 1, marks=pytest.mark.slow),
        (mixup_sometimes, 0),
        (cutmix, 0),
        (standardized, 0),
        (nested, 0),
    ],
)
def test_records_that_are_mixed_before_the_step(collate: Callable[[list[Any]], Any], workers: int) -> None:
    with pytest.raises(ConfigurationError, match="builds rows of a record from other records"):
        lots_of(loader(PICTURES, collate, num_workers=workers))


def with_numbers(records: list[Any]) -> Any:
    return {**default_collate(records), "lengths": [len(record["text"]) for record in records]}


def with_mixed_numbers(records: list[Any]) -> Any:
    lengths = [len(record["text"]) for record in records]
    return {**with_numbers(records), "shares": [length / sum(lengths) for length in lengths]}


def test_lists_with_an_entry_for_each_record() -> None:
    texts = [{"x": torch.rand(3), "text": "a" * (number % 7)} for number in range(60)]
    assert len(lots_of(loader(texts, with_numbers))) > 1
    with pytest.raises(ConfigurationError, match="builds rows of a record from other records"):
        lots_of(loader(texts, with_mixed_numbers))


def test_mixed_texts() -> None:
    with pytest.raises(ConfigurationError, match="builds rows of a record from other records"):
        lots_of(loader(Texts(), mixed_texts))


@pytest.mark.parametrize("collate", [plain, augmented, augmented_beyond_the_seeds, shuffled])
def test_healthy_collations_of_pictures(collate: Callable[[list[Any]], Any]) -> None:
    assert len(lots_of(loader(PICTURES, collate))) == 3


def test_healthy_collations_of_texts() -> None:
    assert len(lots_of(loader(Texts(), padded))) == 3
    assert len(lots_of(loader(Texts(), sorted_by_length))) == 3
    assert len(lots_of(loader(Texts(), windows, record_of_row="owner"))) == 3


@pytest.mark.parametrize(("dataset", "collate"), [(Texts(), sorted_by_length), (PICTURES, shuffled)])
def test_the_order_of_records_is_kept_where_it_says_which_microbatch_they_are_in(
    dataset: Dataset[Any], collate: Callable[[list[Any]], Any]
) -> None:
    one = loader(dataset, collate)
    one.prepare_collation(True)
    with pytest.raises(ConfigurationError, match="reorders the records.*enforce_sorted=False"):
        lots_of(one)
    for data, healthy in ((PICTURES, plain), (PICTURES, augmented), (Texts(), padded)):
        one = loader(data, healthy)
        one.prepare_collation(True)
        assert len(lots_of(one)) == 3


def test_a_collate_fn_that_was_replaced_is_not_checked() -> None:
    one = loader(PICTURES, plain)
    one.collate_fn = mixup
    with pytest.raises(ConfigurationError, match="collate_fn of the LotLoader was replaced"):
        one.prepare_collation(False)


def test_lots_are_the_same_with_and_without_the_check() -> None:
    """Nothing is drawn from the generators that the collate_fn uses."""

    def batches(checked: bool) -> list[Tensor]:
        torch.manual_seed(0), np.random.seed(0), random.seed(0)
        one = loader(PICTURES, augmented)
        if not checked:
            one.collate_fn._rows = None  # type: ignore[attr-defined]
        return [batch[0] for batch in lots_of(one)]

    assert all(torch.equal(a, b) for a, b in zip(batches(True), batches(False), strict=True))


def test_training_without_privacy_may_mix() -> None:
    lots = Lots(make_sampling("shuffled", 60, 20), 0)
    assert len(lots_of(LotLoader(PICTURES, lots, mixup))) == 3


USABLE = [position for position in range(60) if position not in (3, 17, 41)]


class Damaged(Dataset[Any]):
    """Some records are None, or marked by their label."""

    def __init__(self, mark: bool = False) -> None:
        self.mark = mark

    def __len__(self) -> int:
        return 60

    def __getitem__(self, position: int) -> Any:
        x, y = PICTURES[position]
        if position in USABLE:
            return x, y
        return (torch.zeros_like(x), torch.tensor(-1)) if self.mark else None


def usable(records: list[Any]) -> list[Any]:
    return [record for record in records if record is not None and int(record[1]) >= 0]


def filled_with_first(records: list[Any]) -> Any:
    good = usable(records)
    return default_collate(good + [good[0]] * (len(records) - len(good)))


def filled_with_last(records: list[Any]) -> Any:
    good = usable(records)
    return default_collate(good + [good[-1]] * (len(records) - len(good)))


def filled_at_random(records: list[Any]) -> Any:
    good = usable(records)
    return default_collate(good + random.choices(good, k=len(records) - len(good)))


def filled_in_place(records: list[Any]) -> Any:
    good = usable(records)
    return default_collate([record if record is not None and int(record[1]) >= 0 else good[0] for record in records])


def filled_with_neighbor(records: list[Any]) -> Any:
    kept: list[Any] = []
    for record in records:
        kept.append(record if record is not None and int(record[1]) >= 0 else (kept or usable(records))[-1])
    return default_collate(kept)


def filled_and_sorted(records: list[Any]) -> Any:
    x, y = filled_with_first(records)
    order = x.sum((1, 2)).argsort()
    return {"x": x[order], "y": y[order]}


@pytest.mark.parametrize(
    "collate",
    [
        filled_with_first,
        filled_with_last,
        filled_at_random,
        filled_in_place,
        filled_with_neighbor,
        filled_and_sorted,
    ],
)
@pytest.mark.parametrize("mark", [False, True])
def test_unusable_records_that_are_filled_up_with_others(collate: Callable[[list[Any]], Any], mark: bool) -> None:
    one = loader(Damaged(mark), collate)
    with pytest.raises(
        ConfigurationError, match="returns None for an item|from other records|puts a record into a batch again"
    ):
        [lots_of(one) for _ in range(10)]


class Twins(Dataset[Any]):
    """Ten records are the same, honestly."""

    def __len__(self) -> int:
        return 60

    def __getitem__(self, position: int) -> Any:
        return PICTURES[0] if position < 10 else PICTURES[position]


@pytest.mark.parametrize("collate", [plain, augmented, shuffled])
def test_honest_twins_pass(collate: Callable[[list[Any]], Any]) -> None:
    one = loader(Twins(), collate)
    assert sum(len(lots_of(one)) for _ in range(10)) == 30


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


def filled_by_views_of_the_first(records: list[Any]) -> dict[str, Tensor]:
    """Each picture and its mirror image; where a label is 0, those of the first record, as often as it has rows."""
    rows = []
    for number, (image, label) in enumerate(records):
        source = records[0][0] if int(label) == 0 else image
        rows += [(source, number), (source.flip(-1), number)]
    return {
        "x": torch.stack([image for image, _ in rows]),
        "record": torch.tensor([number for _, number in rows]),
    }


@pytest.mark.parametrize("collate", [filled_by_the_record_before, filled_by_views_of_the_first])
def test_rows_of_a_record_that_count_for_another_are_refused(
    collate: Callable[[list[Any]], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In each batch, whether or not its records are collated again among others."""
    monkeypatch.setattr("dpbench.data.collation.is_checked", lambda number: False)
    one = loader(PICTURES, collate, record_of_row="record")
    with pytest.raises(ConfigurationError, match="puts a record into a batch again"):
        [lots_of(one) for _ in range(10)]


def test_equal_rows_of_one_record_are_no_other_records() -> None:
    one = loader(PICTURES, four_of_each, record_of_row="record")
    assert sum(len(lots_of(one)) for _ in range(10)) == 30


def three_channels(records: list[Any]) -> Any:
    return torch.stack([torch.cat([image, image, image]) for image, _ in records])


def dense(records: list[Any]) -> Any:
    return torch.stack([image.to_dense() for image in records])


class Sparse(Dataset[Any]):
    def __len__(self) -> int:
        return 60

    def __getitem__(self, position: int) -> Any:
        return (torch.eye(4) * (position + 1)).to_sparse()


def test_a_record_may_be_joined_with_itself_and_be_sparse() -> None:
    for data, collate in ((PICTURES, three_channels), (Sparse(), dense)):
        assert sum(len(lots_of(loader(data, collate))) for _ in range(3)) == 9
