"""Who is held out: nobody else decides, the share is right, and old runs keep their split."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from dpbench.data import ImageDataModule
from dpbench.data.held_out import image_bytes, name_bytes, parted, parted_by_hash
from dpbench.data.images import InMemoryImages
from dpbench.data.sources import Images
from dpbench.errors import ConfigurationError, DataError


def images(records: int) -> Images:
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(256, (records, 4, 4, 1), dtype=torch.uint8, generator=generator)
    return Images(pixels, torch.randint(10, (records,), generator=generator))


def twins(records: int) -> Images:
    return Images(torch.zeros(records, 4, 4, 1, dtype=torch.uint8), torch.zeros(records, dtype=torch.int64))


def rows(part: Images) -> set[bytes]:
    return {row.tobytes() for row in part.pixels.numpy()}


def without(whole: Images, position: int) -> Images:
    rest = [one for one in range(len(whole.labels)) if one != position]
    return Images(whole.pixels[rest], whole.labels[rest])


def split_off(whole: Images, val_size: int) -> tuple[Images, Images]:
    """What `data.val_size` holds out of some images, and the others."""
    data = ImageDataModule("digits", val_size=val_size)
    chosen = data._hold_out(np.ones(len(whole.labels), np.int64), lambda: image_bytes(whole.pixels, whole.labels))
    held, train = (Images(whole.pixels[positions], whole.labels[positions]) for positions in chosen)
    return held, train


def test_an_image_less_moves_no_other() -> None:
    whole = images(2000)
    held, train = split_off(whole, 400)
    less_held, less_train = split_off(without(whole, 137), 400)
    gone = {whole.pixels[137].numpy().tobytes()}
    assert rows(held) - gone == rows(less_held)
    assert rows(train) - gone == rows(less_train)
    assert len(held.labels) + len(train.labels) == 2000


def test_the_share_is_that_which_was_asked_for() -> None:
    names = [name_bytes(number) for number in range(20_000)]
    held, rest = parted("hash", lambda: names, 20_000, 3000)
    assert abs(len(held) - 3000) < 4 * (3000 * 0.85) ** 0.5
    assert len(held) + len(rest) == 20_000 and not set(held) & set(rest)
    more = set(parted_by_hash(names, 0.2)[0].tolist())
    assert set(held.tolist()) <= more  # thresholds are nested


def test_who_it_is_depends_on_no_process_and_no_kind_of_name() -> None:
    """Neither on Python's own hashes, which are salted, nor on how a file gives a name."""
    known = [1, 11, 16, 19, 21, 22, 23, 24, 31, 39]
    for names in (range(40), map(str, range(40))):
        assert parted_by_hash(map(name_bytes, names), 0.3)[0].tolist() == known


def test_twins_go_the_same_way() -> None:
    whole = images(300)
    twice = Images(whole.pixels.repeat(2, 1, 1, 1), whole.labels.repeat(2))
    held, train = split_off(twice, 150)
    assert not rows(held) & rows(train)
    assert len(held.labels) == 2 * len(rows(held))


def test_the_split_of_before_is_an_option() -> None:
    """As committed results were made."""
    data = ImageDataModule("digits", image_size=8, val_size=300, split="permutation")
    assert len(data.train_set) == 1137 and isinstance(data.val_set, InMemoryImages) and len(data.val_set) == 300
    order = np.random.default_rng(0).permutation(1437)
    whole = ImageDataModule("digits", image_size=8).train_set
    assert torch.equal(data.val_set.pixels, whole.pixels[np.sort(order[:300])])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: split_off(images(20), 20), "data.val_size=20 leaves none of 20 records"),
        (lambda: split_off(twins(50), 1), "data.val_size=1 holds out no example of 50 records: raise"),
    ],
)
def test_clear_errors(make: Any, message: str) -> None:
    with pytest.raises((ConfigurationError, DataError), match=message):
        make()
