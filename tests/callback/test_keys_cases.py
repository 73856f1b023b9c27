"""Which trainings with one seed may share noise, and which may not: the cases, one a line.

Two whose sums may differ must not: with one noise under both, the difference of two releases is that of private sums.
"""

from __future__ import annotations

import importlib
import shutil
import sys
import types
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import LambdaCallback, StochasticWeightAveraging
from torch import Tensor, nn
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, SequentialLR
from torch.utils.data import ConcatDataset, Dataset, TensorDataset

from dpbench import DPSGD
from dpbench.callback import run_key
from dpbench.canonical import Canonical
from dpbench.capabilities.users.cohorts import Users
from dpbench.capabilities.users.dataset import UserDataset
from dpbench.capabilities.users.local_training import LocalTraining
from dpbench.code import _source_hash
from dpbench.data.loader import PrivateDataLoader
from dpbench.privacy.accounting.ledger import Ledger, read_ledger
from dpbench.privacy.kept_keys import read_keys
from dpbench.session.session import PrivateSession
from tests.strategies.worlds import crashed, fit, trainer_for, weights_of
from tests.support.gan import gan, images

SIZE = 40
SCALE = SimpleNamespace(value=1.0)
Key = Callable[..., int | None]


def records(byte: int = 0, dtype: torch.dtype = torch.float32) -> TensorDataset:
    x = torch.randn(SIZE, 4, generator=torch.Generator().manual_seed(1))
    y = (x[:, 0] > 0).long()
    x.view(torch.uint8)[7, 3] ^= byte
    return TensorDataset(x.to(dtype), y)


class Module(pl.LightningModule):
    """A module of a user, with settings in many places."""

    scale = 1.0

    def __init__(self, optimizer: Any = SGD, schedule: Any = None, weights: int = 0, **settings: Any) -> None:
        super().__init__()
        torch.manual_seed(weights)
        self.net = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
        # Behind a name at which no key looks, so that what they make is seen for itself.
        self._compiler_ctx = (optimizer, schedule)
        for name, value in settings.items():
            setattr(self, name, value)

    def training_step(self, batch: Any, batch_idx: int = 0) -> Tensor:
        loss = nn.functional.cross_entropy(self.net(batch[0].float()), batch[1])
        return loss * self.scale * SCALE.value

    def configure_optimizers(self) -> Any:
        make_optimizer, make_schedule = self._compiler_ctx
        optimizer = make_optimizer(self.parameters())
        return optimizer if make_schedule is None else ([optimizer], [make_schedule(optimizer)])


class Callback(pl.Callback):
    def __init__(self, **settings: Any) -> None:
        vars(self).update(settings)


class Stored(Dataset[Any]):
    """A data set of a user, in memory."""

    def __init__(self, **contents: Any) -> None:
        self.pairs = list(zip(*records().tensors, strict=True))
        vars(self).update(contents)

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, i: int) -> Any:
        return self.pairs[i]


class Tagged(Tensor):
    """A tensor with a word."""


def tagged(word: str) -> Tensor:
    tensor = torch.ones(2).as_subclass(Tagged)
    tensor.word = word  # type: ignore[attr-defined]
    return tensor


def sequence(steps: int) -> Callable[[Any], Any]:
    return lambda o: SequentialLR(o, [CosineAnnealingLR(o, 9), CosineAnnealingLR(o, steps)], [1])


def enclosed(value: float) -> Callable[..., Any]:
    return lambda *_: value


def teacher(value: float = 0.0) -> nn.Module:
    layer = nn.Linear(1, 1)
    for p in layer.parameters():
        nn.init.constant_(p, value)
    return layer


def users(lr: float) -> dict[str, Any]:
    data = UserDataset(records(), [i % 10 for i in range(SIZE)])
    return {"dataset": data, "private": {"records": Users(LocalTraining(lr=lr, max_steps=1))}}


def train(
    folder: Path,
    module: pl.LightningModule | None = None,
    dataset: Any = None,
    private: dict[str, Any] | None = None,
    loader: dict[str, Any] | None = None,
    members: Any = None,
    max_steps: int = 2,
    **trainer: Any,
) -> Ledger:
    """Train with a seed, and read the ledger."""
    ledger = folder / "ledger.jsonl"
    options = {"noise_multiplier": 1.0, "delta": 1e-3, "seed": 7, "ledger": str(ledger), **(private or {})}
    lots = PrivateDataLoader.poisson(dataset or records(), 4, **{"seed": 5, **(loader or {})})
    lots.lots.members = members
    fitted = trainer_for(folder, DPSGD(**options), max_steps, **trainer)
    fitted.fit(module or Module(), lots)
    return read_ledger(ledger)


class Begun(Exception):
    """Ends a training when its key is known."""


@pytest.fixture
def key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Key:
    """A function that begins a training and returns its key; None where a random one is needed."""
    keys: list[int | None] = []

    def begin(self: Any, processes: Any, key: int | None, *_: Any) -> None:
        keys.append(key)
        raise Begun

    def key_of(**training: Any) -> int | None:
        with pytest.raises(Begun):
            train(tmp_path, **training)
        return keys[-1]

    monkeypatch.setattr(PrivateSession, "begin", begin)
    return key_of


PARTS: dict[str, Callable[..., dict[str, Any]]] = {
    "trainer": dict,
    "strategy": lambda **s: {"private": s},
    "loader": lambda **s: {"loader": s},
    "module": lambda **s: {"module": Module(**s)},
    "records": lambda **s: {"dataset": records(**s)},
    "data set": lambda **s: {"dataset": Stored(**s)},
    "callback": lambda **s: {"more": [Callback(**s)]},
    "users": users,
    "gan": lambda **s: {"module": gan(**s), "dataset": images()},
}


def training(setting: str, value: Any) -> dict[str, Any]:
    """A training with a part that has one setting more: options of `train`."""
    part, _, name = setting.rpartition(".")
    return PARTS[part](**{name: value})


def others() -> dict[str, tuple[str, Any, Any]]:
    """Settings, and two values of each that may not share noise; new objects in each call."""
    x, edited = records(), records(byte=1)
    return {
        "a byte of a record": ("records.byte", 0, 1),
        "the type of the records": ("records.dtype", torch.float32, torch.float64),
        "records put together": ("trainer.dataset", ConcatDataset([x, edited]), ConcatDataset([edited, x])),
        "an attribute of a data set": ("data set.shift", 0.0, 1.0),
        "what a mask hides": ("data set.x", np.ma.array([1, 2], mask=[0, 0]), np.ma.array([1, 2], mask=[0, 1])),
        "a word at a tensor": ("data set.x", tagged("a"), tagged("b")),
        "values of a sparse tensor": ("data set.x", torch.tensor([0, 1]).to_sparse(), torch.tensor([0, 2]).to_sparse()),
        "a generator of random numbers": ("module.rng", np.random.default_rng(0), np.random.default_rng(1)),
        "a name beside records in memory": ("loader.data_id", "a", "b"),
        "who takes part": ("trainer.members", np.arange(SIZE) < 30, np.arange(SIZE) < 31),
        "local training of users": ("users.lr", 0.1, 0.2),
        "the seed": ("strategy.seed", 7, 8),
        "a bound": ("strategy.max_grad_norm", 1.0, 0.5),
        "a step after clipping": ("strategy.correction_threshold", None, 1.0),
        "weights": ("module.weights", 0, 1),
        "a private attribute": ("module._smoothing", 0.0, 0.1),
        "a private option of our own module": ("gan.loss", "standard", "wasserstein"),
        "a network that is no part": ("module.teachers", [teacher(0.0)], [teacher(0.1)]),
        "public records in a module": ("module.public", x, edited),
        "a lambda": ("module.own", lambda x: x + 1, lambda x: x - 1),
        "a module of functions": ("module.own", importlib, shutil),
        "an option of a layer": ("module.dropout", nn.Dropout(0.1), nn.Dropout(0.2)),
        "a buffer that is not saved": (
            "module.shift",
            nn.Buffer(torch.zeros(1), persistent=False),
            nn.Buffer(torch.ones(1), persistent=False),
        ),
        "an optimizer": ("module.optimizer", SGD, Adam),
        "an option of an optimizer": ("module.optimizer", partial(SGD, lr=0.1), partial(SGD, lr=0.2)),
        "a schedule": ("module.schedule", None, partial(CosineAnnealingLR, T_max=5)),
        "a schedule within a schedule": ("module.schedule", sequence(5), sequence(6)),
        "a function of a schedule": (
            "module.schedule",
            partial(LambdaLR, lr_lambda=enclosed(1.0)),
            partial(LambdaLR, lr_lambda=enclosed(0.5)),
        ),
        "a callback that decides": ("trainer.more", [], [Callback()]),
        "its option": ("callback.factor", 0.5, 0.25),
        "averaged weights": (
            "trainer.more",
            [StochasticWeightAveraging(0.1, 1)],
            [StochasticWeightAveraging(0.2, 1)],
        ),
        "a value in a closure of the collation": ("loader.collate_fn", enclosed(1.0), enclosed(2.0)),
        "precision": ("trainer.precision", "32-true", "bf16-mixed"),
    }


@pytest.mark.filterwarnings("ignore:.*precision", "ignore:You defined a `validation_step`")
@pytest.mark.parametrize("case", others())
def test_they_may_not_share_noise(case: str, key: Key) -> None:
    setting, one, other = others()[case]
    again = others()[case][1]
    keys = [key(**training(setting, value)) for value in (one, other, again)]
    assert None not in keys
    assert keys[0] == keys[2] != keys[1]


def test_they_share_noise(tmp_path: Path, key: Key) -> None:
    first = key()
    same = {
        "the same command": ("trainer.max_steps", 2),
        "a place": ("module.root", tmp_path),
        "its logger": ("module.own_logger", pl.loggers.CSVLogger(tmp_path)),
        "a default in words": ("strategy.max_grad_norm", 1.0),
        "pieces": ("strategy.max_physical_batch_size", 5),
        "a budget": ("strategy.target_epsilon", 50.0),
        "longer": ("trainer.max_steps", 3),
        "workers": ("loader.num_workers", 2),
        "a callback that looks on": ("callback.observes_only", True),
        "Lightning's": ("trainer.more", [LambdaCallback()]),
    }
    for case, setting in same.items():
        assert first == key(**training(*setting)) is not None, case


# ------------------------------------------------------------------------------- what the source does not say


@pytest.mark.parametrize(("owner", "name"), [(Module, "scale"), (SCALE, "value")], ids=["class", "global"])
def test_what_was_set_later(owner: Any, name: str, key: Key, monkeypatch: pytest.MonkeyPatch) -> None:
    first = key()
    monkeypatch.setattr(owner, name, 2.0)
    assert key() != first


NOTEBOOK = """
import functools
import torch
from torch.nn import functional as F

SHARE = {share}
loss_function = torch.nn.CrossEntropyLoss(label_smoothing={smoothing})

def helper(x):
    return {helper}

class Net(base):
    criterion = loss_function

    @functools.cached_property
    def factor(self):
        return {factor}

    @property
    def word(self):
        return {word!r}

    @staticmethod
    def shifted(x):
        return x + {shift}

    def training_step(self, batch, batch_idx=0):
        inner = lambda: SHARE
        return loss_function(self.net(helper(self.shifted(batch[0]))), batch[1]) * inner() * self.factor
"""
CELL = {"share": "1.0", "smoothing": "0.0", "helper": "x + 1", "factor": "2", "word": "a", "shift": "0.5"}
EDITS = {"share": "2.0", "smoothing": "0.1", "helper": "x - 1", "factor": "3", "word": "b", "shift": "0.25"}


def test_an_edited_cell_of_a_notebook(key: Key, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its classes and functions have no source file."""

    def key_of(**edits: str) -> int | None:
        main: Any = types.ModuleType("__main__")
        monkeypatch.setitem(sys.modules, "__main__", main)
        main.base = Module
        exec(compile(NOTEBOOK.format(**{**CELL, **edits}), "<cell>", "exec"), vars(main))
        return key(module=main.Net())

    first = key_of()
    assert first == key_of() is not None
    for name, edit in EDITS.items():
        assert first != key_of(**{name: edit}), name


def test_edited_source(tmp_path: Path, key: Key, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a module that a class is of, and of one beside it that it imports."""
    monkeypatch.syspath_prepend(tmp_path)
    own = "from own_beside import *\nfrom tests.callback.test_keys_cases import Module\nclass Net(Module): pass\n"
    keys = set()
    for beside, source in (("A = 1\n", own), ("A = 2\n", own), ("A = 2\n", f"{own}# edited\n")):
        (tmp_path / "own_beside.py").write_text(beside)
        (tmp_path / "own_source.py").write_text(source)
        for module in ("own_source", "own_beside"):
            monkeypatch.delitem(sys.modules, module, raising=False)
        _source_hash.cache_clear()
        keys.add(key(module=importlib.import_module("own_source").Net()))
    assert len(keys) == 3


def test_versions(key: Key, monkeypatch: pytest.MonkeyPatch) -> None:
    """An option that is new in one, even at its default, is in another key by this."""
    first = key()
    monkeypatch.setattr(run_key, "versions", lambda: {"dpbench": "0"})
    assert key() != first


def test_circles() -> None:
    def ring(length: int) -> bytes:
        first: list[Any] = [1]
        first.append([first] * length)
        return Canonical().digest(first)

    assert ring(1) == ring(1) != ring(2)


# ------------------------------------------------------------------------------- what has no bytes


class Lazy(Stored):
    """Reads its records from a file when it is asked for them."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, name

    def __getitem__(self, i: int) -> Any:
        return tuple(part[i] for part in torch.load(self.folder / self.name, weights_only=True))


class Unknown(Stored):
    def __getitem__(self, i: int) -> Any:
        with open("records.pt", "rb"):
            return super().__getitem__(i)


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "files" / "records.pt"
    path.parent.mkdir()
    monkeypatch.chdir(path.parent)
    torch.save(records().tensors, path)
    return path


def test_they_need_a_random_key(file: Path, key: Key) -> None:
    """Unless it is the records that have no bytes, and these have a name."""
    with open(file, "rb") as opened:
        unhashable = {
            "a file by folder and name": ("trainer.dataset", Lazy(file.parent, file.name)),
            "a file that only the code names": ("trainer.dataset", Unknown()),
            "a folder, read by who knows what": ("data set.folder", str(file.parent)),
            "an open file": ("data set.file", opened),
            "an open file in a module": ("module.file", opened),
            "a generator in a callback": ("callback.numbers", (n for n in [1])),
        }
        for case, setting in unhashable.items():
            options = training(*setting)
            assert key(**options) is None, case
            options["loader"] = {**options.get("loader", {}), "data_id": "clinic 1"}
            assert (key(**options) is None) is ("dataset" not in options), case


def test_a_name_stands_for_files_and_for_nothing_else(file: Path, key: Key) -> None:
    def named(name: str, x: int = 1) -> int | None:
        return key(dataset=Stored(file=str(file), x=x), loader={"data_id": name})

    assert named("a") == named("a")
    assert len({named("a"), named("b"), named("a", x=2)}) == 3


def lots_of(data: Any) -> PrivateDataLoader:
    return PrivateDataLoader.poisson(data, 4, seed=5)


def resumed(folder: Path, data: Any) -> tuple[Tensor, Ledger]:
    """The weights and the ledger of a crashed training that is resumed."""
    module = Module()
    fit(folder, module, 6, loader=lots_of(data), start=folder / "mid.ckpt")
    return weights_of(module), read_ledger(folder / "ledger.jsonl")


@pytest.mark.filterwarnings("ignore:the training ended before its last step")
def test_a_random_key_is_kept_for_a_resume_and_ends_with_the_training(file: Path, tmp_path: Path) -> None:
    data = Lazy(file.parent, file.name)
    crashed(tmp_path / "one", Module(), 6, 2, loader=lots_of(data))
    kept = tmp_path / "one" / "noise_keys.json"
    assert kept.stat().st_mode & 0o777 == 0o600 and read_keys(kept) is not None
    before = read_ledger(tmp_path / "one" / "ledger.jsonl")
    assert str(before.header.noise_source).startswith("kept:")
    shutil.copytree(tmp_path / "one", tmp_path / "copy")
    one, after = resumed(tmp_path / "one", data)
    assert after.headers == before.headers and len(after.releases) == 6
    assert not kept.exists()
    assert torch.equal(one, resumed(tmp_path / "copy", data)[0])
    again = train(tmp_path / "other", dataset=data)
    assert again.header.noise_source != before.header.noise_source
    assert again.header.lot_source != before.header.lot_source


@pytest.mark.filterwarnings("ignore:the training ended before its last step", "ignore:release .* differs")
def test_in_a_resumed_training_other_files_or_a_lost_key_get_other_noise(file: Path, tmp_path: Path) -> None:
    data = Lazy(file.parent, file.name)
    crashed(tmp_path / "edited", Module(), 6, 2, loader=lots_of(data))
    shutil.copytree(tmp_path / "edited", tmp_path / "lost")
    (tmp_path / "lost" / "noise_keys.json").unlink()
    _, lost = resumed(tmp_path / "lost", data)
    assert len(lost.headers) == 2 and lost.header.noise_source is None
    torch.save([part.roll(1, 0) for part in records().tensors], file)
    _, edited = resumed(tmp_path / "edited", data)
    # The release behind the checkpoint is another sum: it is released in a new phase, with new noise.
    assert len(edited.headers) > 1


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:It is recommended to use `self.log", "ignore::DeprecationWarning", "ignore::FutureWarning"
)
@pytest.mark.parametrize("kind", ["in memory", "in a file"])
def test_processes_agree(kind: str, file: Path, tmp_path: Path) -> None:
    """On one key: that of one process, or the first one's random key."""
    data = records() if kind == "in memory" else Lazy(file.parent, file.name)
    one = train(tmp_path / "one", dataset=data)
    two = train(tmp_path / "two", dataset=data, devices=2, strategy="ddp_fork")
    assert (one.header.noise_source == two.header.noise_source) is (kind == "in memory")
    assert len(one.releases) == len(two.releases) == 2
