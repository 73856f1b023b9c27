"""An item that another one stands in for is refused, however the data set does it; honest data sets are not."""

from __future__ import annotations

import functools
import pickle
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset, get_worker_info

from dpbench.data import PrivateBatchSampler, PrivateDataLoader, fetching, make_sampling
from dpbench.data.fetching import WatchedDataset, watched
from dpbench.errors import ConfigurationError

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

    def read_or_none(self, position: int) -> tuple[Tensor, Tensor] | None:
        try:
            return self.read(position)
        except OSError:
            return None

    def __getitem__(self, position: int) -> Any:
        return self.read(position)


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


class AtRandom(Files):
    def __getitem__(self, position: int) -> Any:
        item = self.read_or_none(position)
        return self[random.randrange(len(self))] if item is None else item


class Safe(Dataset[Any]):
    """A wrapper of a data set that raises."""

    def __init__(self, inner: Any, other: int = 0) -> None:
        self.inner, self.other = inner, other

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, position: int) -> Any:
        try:
            return self.inner[position]
        except OSError:
            return self.inner[self.other]


class BatchedByItem(Files):
    def __getitems__(self, positions: Sequence[int]) -> list[Any]:
        return [self[0] if position in DAMAGED else self[position] for position in positions]


class Mosaic(Files):
    """Mixes itself."""

    def __getitem__(self, position: int) -> Any:
        x, y = X[position], Y[position]
        if random.random() < 0.5:
            x = x + 0.1 * self[(position + 7) % len(self)][0]
        return x, y


class Mixup(Dataset[Any]):
    """Mixes a data set inside of it."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, position: int) -> Any:
        (x, y), (other, _) = self.inner[position], self.inner[random.randrange(len(self.inner))]
        return 0.9 * x + 0.1 * other, y


class Inner(Files):
    def __getitem__(self, position: int) -> Any:
        return X[position], Y[position]


def read_all(dataset: Any, kind: str = "poisson", **options: Any) -> int:
    size = SIZE if kind == "full" else 8
    loader = PrivateDataLoader(dataset, PrivateBatchSampler(make_sampling(kind, len(dataset), size), 0), **options)
    return sum(1 for _ in range(20) for _ in loader)


class Cached(Files):
    @functools.lru_cache(None)  # noqa: B019
    def __getitem__(self, position: int) -> Any:
        return self[0] if position in DAMAGED else self.read(position)


class InADictionary(Dataset[Any]):
    def __init__(self) -> None:
        self.parts = {"a": First()}

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, position: int) -> Any:
        return self.parts["a"][position]


class Averaging(Dataset[Any]):
    def __init__(self) -> None:
        self.inner = TensorDataset(X, Y)

    def __len__(self) -> int:
        return SIZE - 2

    def __getitem__(self, position: int) -> Any:
        return self.inner[position : position + 3][0].mean(0)


STAND_INS: dict[str, Callable[[], Any]] = {
    "cached": Cached,
    "in a dictionary": InADictionary,
    "a slice": Averaging,
    "many": lambda: ConcatDataset([First() for _ in range(101)]),
    "in a lot": lambda: Subset(Mosaic(), range(SIZE)),
    "next": Next,
    "at random": AtRandom,
    "wrapper of a subset": lambda: Safe(Subset(Files(), range(SIZE)), 3),
    "batched by item": BatchedByItem,
}


@pytest.mark.parametrize("name", STAND_INS)
def test_an_item_in_the_place_of_another_is_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match="at other indices"):
        read_all(STAND_INS[name]())


def test_workers_see_it_too() -> None:
    with pytest.raises(ConfigurationError, match="at other indices"):
        read_all(First(), num_workers=1)


@pytest.mark.parametrize(
    "dataset",
    [
        Mixup(Inner()),
        Mixup(Subset(TensorDataset(X, Y), range(30))),
    ],
    ids=lambda dataset: type(dataset).__name__,
)
def test_items_that_are_mixed_inside_of_the_data_set(dataset: Any) -> None:
    with pytest.raises(ConfigurationError, match="at other indices"):
        read_all(dataset)


class OfItsOwnRows(Dataset[Any]):
    """Random frames of an item's own video with public noise, and colors of a palette by a matrix of indices."""

    def __init__(self) -> None:
        self.frames = torch.randn(4 * SIZE, 3)
        self.noises = torch.randn(2 * SIZE, 3)
        self.palette = torch.randn(SIZE + 1, 3)
        self.pictures = torch.randint(SIZE, (SIZE, 2, 2))

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, position: int) -> Any:
        frames = self.frames[4 * position + torch.randperm(4)[:2]]
        noise = self.noises[random.randrange(2 * SIZE)] + self.noises[random.randrange(2 * SIZE)]
        return frames.mean(0) + noise, self.palette[self.pictures[position]]


def test_other_rows_than_records_may_be_read() -> None:
    assert read_all(OfItsOwnRows()) > 0


def test_training_without_privacy_may_do_it() -> None:
    assert read_all(First(), "shuffled") == 100


class Placeholder(Files):
    """What cannot be read is a picture that is nobody's."""

    def __getitem__(self, position: int) -> Any:
        try:
            return self.read(position)
        except OSError:
            return torch.arange(6.0), torch.tensor(0)


class Twins(Files):
    """Ten people with the same record; a label that is optional, and some other attribute."""

    def __init__(self) -> None:
        self.names = dict.fromkeys(range(0, SIZE, 2), "name")

    def __getitem__(self, position: int) -> Any:
        try:
            name = self.names[position]
        except KeyError:
            name = "nobody"
        return X[position % 4], Y[position], name


class Filtered(Inner):
    """A subset of its own base class, by a list of positions."""

    def __init__(self) -> None:
        self.keep = list(range(SIZE - 1, 9, -1))

    def __len__(self) -> int:
        return len(self.keep)

    def __getitem__(self, position: int) -> Any:
        return super().__getitem__(self.keep[position])


class Named(Inner):
    """Called as its base is, and asks it by name."""

    def __getitem__(self, position: int) -> Any:
        return super().__getitem__(position=(position + 1) % SIZE)


Named.__getitem__.__qualname__ = "Inner.__getitem__"


class Frames(Dataset[Any]):
    """Is asked for a place in a video, which is one index."""

    def __getitem__(self, place: tuple[int, int]) -> Tensor:
        return X[place[0]] * place[1]


class Video(Dataset[Any]):
    def __init__(self) -> None:
        self.frames = Frames()

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, position: int) -> Any:
        return self.frames[position, 1] + self.frames[position, 2]


class Pieces(Dataset[Any]):
    """Four pieces of each item of another data set, some of them alike."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, position: int) -> Any:
        return self.inner[position // 4][0][position % 2 : 3 + position % 2]


class Retry(Files):
    """The same item, at the second attempt."""

    def __init__(self) -> None:
        self.attempts = 0

    def __getitem__(self, position: int) -> Any:
        for attempt in range(3):
            try:
                return self.over_a_bad_network(position, attempt)
            except TimeoutError:
                continue
        raise OSError

    def over_a_bad_network(self, position: int, attempt: int) -> Any:
        if position % 2 and not attempt:
            raise TimeoutError
        return X[position], Y[position]


class Negative(Files):
    def __getitem__(self, position: int) -> Any:
        return self[position - len(self)] if position >= 0 else (X[position], Y[position])


class Mapped(Files):
    """As those of Hugging Face: many by one."""

    def __getitem__(self, position: Any) -> Any:
        return {"x": X[position], "y": Y[position]}

    def __getitems__(self, positions: list[int]) -> list[Any]:
        batch = self.__getitem__(positions)
        return [{"x": x, "y": y} for x, y in zip(batch["x"], batch["y"], strict=True)]


class ByItem(Inner):
    def __getitems__(self, positions: list[int]) -> list[Any]:
        return [self[position] for position in reversed(positions)][::-1]


class Stream(Files):
    """Reads by iterators, which end by exceptions."""

    def pieces(self, position: int) -> Iterator[Tensor]:
        yield from X[position].split(2)

    def __getitem__(self, position: int) -> Any:
        pieces, parts = self.pieces(position), []
        while True:
            try:
                parts.append(next(pieces))
            except StopIteration:
                return torch.cat(parts), Y[position]


class InWorkers(Files):
    """Opens a file in each worker."""

    handle: str = ""

    def __getitem__(self, position: int) -> Any:
        info = get_worker_info()
        assert info is None or (isinstance(info.dataset, InWorkers) and self.handle == "open")
        return X[position], Y[position]


class Shuffled(Files):
    """Reads its tensors by a table of positions, two rows that are always the same, and at random what is no record."""

    def __init__(self) -> None:
        self.x = X
        self.position_of = torch.randperm(SIZE)
        self.noise = torch.randn(9, 6)

    def __getitem__(self, position: int) -> Any:
        place = self.position_of[position]
        image = self.x[place].expand(2 * SIZE, 6)
        rows = [image[random.randrange(len(image))] for _ in range(2)]
        noise = self.noise[random.randrange(9)] + self.noise[random.randrange(9)]
        return rows[0] + rows[1] + self.x[(place + 1) % SIZE] + noise, Y[position]


def open_handle(_: int) -> None:
    info = get_worker_info()
    assert info is not None
    info.dataset.handle = "open"  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "dataset",
    [
        Placeholder(),
        Twins(),
        Filtered(),
        Named(),
        Video(),
        Pieces(Inner()),
        Retry(),
        Negative(),
        Mapped(),
        ByItem(),
        Stream(),
        Shuffled(),
        Subset(ConcatDataset([Inner(), Filtered()]), range(3, 60)),
        TensorDataset(X[:1].expand(SIZE, -1), Y),
    ],
    ids=lambda dataset: type(dataset).__name__,
)
def test_honest_data_sets_are_read_as_they_are(dataset: Any) -> None:
    assert read_all(dataset) > 50


def test_a_data_set_stays_what_it_is_in_workers() -> None:
    assert read_all(InWorkers(), num_workers=1, worker_init_fn=open_handle) > 50
    dataset = watched(Inner())
    assert type(dataset) is WatchedDataset and isinstance(dataset, Inner)
    assert type(pickle.loads(pickle.dumps(dataset))) is WatchedDataset
    assert PrivateDataLoader.poisson(Inner(), 8).dataset.__class__ is Inner
    assert type(PrivateDataLoader.poisson(Inner(), 8).dataset) is Inner


class Repeats(Inner):
    """Turns to an item of the same lot, which it was asked for."""

    def __getitems__(self, positions: Sequence[int]) -> list[Any]:
        return [self[positions[0]] if position in DAMAGED else self[position] for position in positions]


class TwoViews(Inner):
    def __getitems__(self, positions: Sequence[int]) -> list[Any]:
        return [(self[position][0], self[position][1]) for position in positions]


def test_a_lot_filled_up_with_an_item_of_its_own() -> None:
    with pytest.raises(ConfigurationError, match="at other indices"):
        read_all(Repeats())
    assert read_all(TwoViews()) > 50


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
    held = threading.Event()
    done = threading.Event()

    def hold() -> None:
        with fetching._Patching.lock:
            held.set()
            done.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(60)
    try:
        assert sum(1 for _ in PrivateDataLoader.poisson(Inner(), 8, num_workers=1, timeout=60)) == 5
    finally:
        done.set()
        thread.join()
