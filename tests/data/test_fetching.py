"""An item that another one stands in for is refused, however the data set does it; honest data sets are not."""

from __future__ import annotations

import functools
import pickle
import random
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset, get_worker_info

from dpbench.data import PrivateBatchSampler, PrivateDataLoader, fetching, make_sampling
from dpbench.data.fetching import WatchedDataset, watched
from dpbench.errors import ConfigurationError
from tests.support.loaders import reserved

SIZE = 40
DAMAGED = (17, 23)
X = torch.randn(SIZE, 6, generator=torch.Generator().manual_seed(0))
Y = torch.arange(SIZE) % 3


class Files(Dataset[Any]):
    """Some of its items cannot be read."""

    def __len__(self) -> int:
        return SIZE

    def read(self, position: int) -> tuple[Tensor, Tensor]:
        if position in DAMAGED:
            raise OSError("image file is truncated")
        return X[position], Y[position]

    def __getitem__(self, position: int) -> Any:
        return self.read(position)


class Inner(Files):
    def read(self, position: int) -> tuple[Tensor, Tensor]:
        return X[position], Y[position]


class First(Files):
    def __getitem__(self, position: int) -> Any:
        try:
            return self.read(position)
        except OSError:
            return self[0]


class Next(Files):
    def __getitem__(self, position: int) -> Any:
        try:
            return self.read(position)
        except OSError:
            return self.__getitem__((position + 1) % len(self))


class BatchedByItem(Files):
    def __getitems__(self, positions: Sequence[int]) -> list[Any]:
        return [self[0] if position in DAMAGED else self[position] for position in positions]


class Cached(Files):
    @functools.lru_cache(None)  # noqa: B019
    def __getitem__(self, position: int) -> Any:
        return self[0] if position in DAMAGED else self.read(position)


class Mosaic(Inner):
    """Mixes itself."""

    def __getitem__(self, position: int) -> Any:
        x, y = self.read(position)
        if random.random() < 0.5:
            x = x + 0.1 * self[(position + 7) % len(self)][0]
        return x, y


class Repeats(Inner):
    """Turns to an item of the same lot, which it was asked for."""

    def __getitems__(self, positions: Sequence[int]) -> list[Any]:
        return [self[positions[0]] if position in DAMAGED else self[position] for position in positions]


class Around(Dataset[Any]):
    """As many items as another data set, or others, has; a function reads them."""

    def __init__(self, read: Callable[[Any, int], Any], inner: Any, size: int = SIZE) -> None:
        self.inner, self._read, self.size = inner, (read,), size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, position: int) -> Any:
        return self._read[0](self.inner, position)


def safe(inner: Any, position: int) -> Any:
    try:
        return inner[position]
    except OSError:
        return inner[3]


def mixed(inner: Any, position: int) -> Any:
    (x, y), (other, _) = inner[position], inner[random.randrange(len(inner))]
    return 0.9 * x + 0.1 * other, y


STAND_INS: dict[str, Callable[[], Any]] = {
    "next": Next,
    "cached": Cached,
    "batched by item": BatchedByItem,
    "many": lambda: ConcatDataset([First() for _ in range(101)]),
    "in a lot": lambda: Subset(Mosaic(), range(SIZE)),
    "in a dictionary": lambda: Around(lambda parts, position: parts["a"][position], {"a": First()}),
    "wrapper of a subset": lambda: Around(safe, Subset(Files(), range(SIZE))),
    "mixup": lambda: Around(mixed, Subset(TensorDataset(X, Y), range(30)), 30),
    "a slice": lambda: Around(lambda inner, i: inner[i : i + 3][0].mean(0), TensorDataset(X, Y), SIZE - 2),
}


def read_all(dataset: Any, kind: str = "poisson", epochs: int = 5, **options: Any) -> int:
    loader = PrivateDataLoader(dataset, PrivateBatchSampler(make_sampling(kind, len(dataset), 8), 0), **options)
    reserved(loader)
    return sum(1 for _ in range(epochs) for _ in loader)


@pytest.mark.parametrize("name", STAND_INS)
def test_an_item_in_the_place_of_another_is_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match="at other indices"):
        read_all(STAND_INS[name](), epochs=40 if name == "many" else 5)


def test_a_lot_filled_up_with_an_item_of_its_own() -> None:
    with pytest.raises(ConfigurationError, match="at other indices"):
        read_all(Repeats())


def test_workers_see_it_too() -> None:
    with pytest.raises(ConfigurationError, match="at other indices"):
        read_all(First(), num_workers=1)


def test_training_without_privacy_may_do_it() -> None:
    assert read_all(First(), "shuffled") == 25


# ------------------------------------------------------------------------------------------------- honest


class TwoViews(Inner):
    def __getitems__(self, positions: Sequence[int]) -> list[Any]:
        return [(self[position][0], self[position][1]) for position in positions]


class Filtered(Inner):
    """A subset of its own base class, by a list of positions."""

    keep = range(SIZE - 1, 9, -1)

    def __len__(self) -> int:
        return len(self.keep)

    def __getitem__(self, position: int) -> Any:
        return super().__getitem__(self.keep[position])


class Frames(Dataset[Any]):
    """Is asked for a place in a video, which is one index."""

    def __getitem__(self, place: tuple[int, int]) -> Tensor:
        return X[place[0]] * place[1]


class Negative(Inner):
    def __getitem__(self, position: int) -> Any:
        return self[position - len(self)] if position >= 0 else self.read(position)


class ByItem(Inner):
    def __getitems__(self, positions: list[int]) -> list[Any]:
        return [self[position] for position in reversed(positions)][::-1]


class OfItsOwnRows(Inner):
    """Random frames of an item's own video with public noise, and colors of a palette by a matrix of indices."""

    def __init__(self) -> None:
        self.frames = torch.randn(4 * SIZE, 3)
        self.noises = torch.randn(2 * SIZE, 3)
        self.palette = torch.randn(SIZE + 1, 3)
        self.pictures = torch.randint(SIZE, (SIZE, 2, 2))

    def __getitem__(self, position: int) -> Any:
        frames = self.frames[4 * position + torch.randperm(4)[:2]]
        return frames.mean(0) + self.noises[random.randrange(2 * SIZE)], self.palette[self.pictures[position]]


@pytest.mark.parametrize(
    "dataset",
    [
        Filtered(),
        Negative(),
        ByItem(),
        TwoViews(),
        OfItsOwnRows(),
        Around(lambda frames, position: frames[position, 1] + frames[position, 2], Frames()),
        Around(lambda inner, position: inner[position // 4][0][position % 2 : 3 + position % 2], Inner()),
        Subset(ConcatDataset([Inner(), Filtered()]), range(3, 60)),
        TensorDataset(X[:1].expand(SIZE, -1), Y),
    ],
    ids=["filtered", "negative", "by item", "views", "own rows", "video", "pieces", "concatenated", "twins"],
)
def test_honest_data_sets_are_read_as_they_are(dataset: Any) -> None:
    assert read_all(dataset) >= 20


class InWorkers(Inner):
    """Opens a file in each worker."""

    handle: str = ""

    def __getitem__(self, position: int) -> Any:
        info = get_worker_info()
        assert info is not None and isinstance(info.dataset, InWorkers) and self.handle == "open"
        return X[position], Y[position]


def open_handle(_: int) -> None:
    info = get_worker_info()
    assert info is not None
    info.dataset.handle = "open"  # type: ignore[attr-defined]


def test_a_data_set_stays_what_it_is_in_workers() -> None:
    assert read_all(InWorkers(), epochs=1, num_workers=1, worker_init_fn=open_handle) == 5
    dataset = watched(Inner())
    assert type(dataset) is WatchedDataset and isinstance(dataset, Inner)
    assert type(pickle.loads(pickle.dumps(dataset))) is WatchedDataset
    assert type(PrivateDataLoader.poisson(Inner(), 8).dataset) is Inner


def test_two_threads_leave_classes_as_they_were() -> None:
    getter = Inner.__getitem__
    errors: list[Exception] = []

    def reading() -> None:
        try:
            read_all(Inner())
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=reading) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and Inner.__getitem__ is getter


def test_a_worker_that_is_forked_while_another_thread_reads() -> None:
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with fetching._Patching.lock:
            held.set()
            done.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(60)
    try:
        assert sum(1 for _ in reserved(PrivateDataLoader.poisson(Inner(), 8, num_workers=1, timeout=60))) == 5
    finally:
        done.set()
        thread.join()
