"""Which trainings with one seed may share noise, and which may not: the cases, one a line.

Two whose sums may differ must not: with one noise under both, the difference of two releases is that of private sums.
"""

from __future__ import annotations

import functools
import importlib
import shutil
import sys
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, SequentialLR
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from dpbench import DPSGD
from dpbench.callback import run_key
from dpbench.canonical import Canonical
from dpbench.capabilities.users.cohorts import Users
from dpbench.capabilities.users.dataset import UserDataset
from dpbench.capabilities.users.local_training import LocalTraining
from dpbench.code import _source_hash
from dpbench.data.lots import LotLoader
from dpbench.privacy.accounting.ledger import Ledger, read_ledger
from dpbench.privacy.kept_keys import read_keys
from dpbench.session.session import PrivateSession
from tests.support.gan import gan, images

SIZE = 40
SCALE = SimpleNamespace(value=1.0)


def records(**changes: Any) -> TensorDataset:
    x = torch.randn(SIZE, 4, generator=torch.Generator().manual_seed(1))
    y = (x[:, 0] > 0).long()
    if "byte" in changes:
        x.view(torch.uint8)[7, 3] ^= 1
    if "order" in changes:
        order = torch.arange(SIZE).roll(1)
        x, y = x[order], y[order]
    return TensorDataset(x.to(changes.get("dtype", torch.float32)), y)


class Module(pl.LightningModule):
    """A module of a user, with settings in many places."""

    scale = 1.0

    def __init__(self, optimizer: Any = None, schedule: Any = None, weights: int = 0, **settings: Any) -> None:
        super().__init__()
        torch.manual_seed(weights)
        self.net = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
        # Behind a name at which no key looks, so that what they make is seen for itself.
        self._compiler_ctx = (optimizer or functools.partial(torch.optim.SGD, lr=0.1), schedule)
        for name, value in settings.items():
            setattr(self, name, value)

    def training_step(self, batch: Any, batch_idx: int = 0) -> Tensor:
        loss = nn.functional.cross_entropy(self.net(batch[0].float()), batch[1])
        return loss * self.scale * SCALE.value

    def configure_optimizers(self) -> Any:
        make_optimizer, make_schedule = self._compiler_ctx
        optimizer = make_optimizer(self.parameters())
        return optimizer if make_schedule is None else ([optimizer], [make_schedule(optimizer)])


class Rho(torch.optim.SGD):
    def __init__(self, parameters: Any, rho: float) -> None:
        super().__init__(parameters, lr=0.1)
        self.rho = rho


class Callback(pl.Callback):
    def __init__(self, **settings: Any) -> None:
        vars(self).update(settings)


class Stored(Dataset[Any]):
    """A data set of a user, in memory."""

    def __init__(self, **contents: Any) -> None:
        self.pairs = list(zip(*records().tensors, strict=True))
        vars(self).update(contents)

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, i: int) -> Any:
        return self.pairs[i]


class Tagged(Tensor):
    """A tensor with a word."""


def collate(scale: float) -> Callable[[Any], Any]:
    return lambda batch: [part * scale for part in torch.utils.data.default_collate(batch)]


def sequence(steps: int) -> Callable[[Any], Any]:
    return lambda o: SequentialLR(o, [CosineAnnealingLR(o, 9), CosineAnnealingLR(o, steps)], [1])


def tagged(word: str) -> Tensor:
    tensor = torch.ones(2).as_subclass(Tagged)
    tensor.word = word  # type: ignore[attr-defined]
    return tensor


def teacher(value: float) -> nn.Module:
    layer = nn.Linear(1, 1)
    nn.init.constant_(layer.weight, value)
    nn.init.constant_(layer.bias, value)
    return layer


def frozen(layer: int) -> Module:
    module = Module()
    module.more = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    module.more[layer].requires_grad_(False)
    return module


def buffered(value: float) -> Module:
    module = Module()
    module.register_buffer("shift", torch.tensor(value), persistent=False)
    return module


def adversarial(loss: str) -> dict[str, Any]:
    return {"module": gan(loss=loss), "dataset": images()}


def users(lr: float) -> dict[str, Any]:
    data = UserDataset(records(), [i % 10 for i in range(SIZE)])
    return {"dataset": data, "strategy": {"records": Users(LocalTraining(lr=lr, max_steps=1))}}


class Begun(Exception):
    """Ends a training when its key is known."""


@pytest.fixture
def key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int | None]:
    """A function that begins a training and returns its key; None where a random one is needed."""
    keys: list[int | None] = []

    def begin(self: Any, processes: Any, key: int | None, *_: Any) -> None:
        keys.append(key)
        raise Begun

    monkeypatch.setattr(PrivateSession, "begin", begin)

    def key_of(
        module: pl.LightningModule | None = None,
        dataset: Any = None,
        strategy: dict[str, Any] | None = None,
        loader: dict[str, Any] | None = None,
        callbacks: Any = (),
        members: Any = None,
        **trainer: Any,
    ) -> int | None:
        place = str(tmp_path / "ledger.jsonl")
        private = DPSGD(**{"noise_multiplier": 1.0, "delta": 1e-3, "seed": 7, "ledger": place, **(strategy or {})})
        lots = LotLoader.poisson(records() if dataset is None else dataset, 4, **{"seed": 5, **(loader or {})})
        lots.lots.members = members
        with pytest.raises(Begun):
            fit(private, module or Module(), lots, tmp_path, callbacks, **trainer)
        return keys[-1]

    return key_of


def fit(private: DPSGD, module: pl.LightningModule, lots: Any, folder: Path, more: Any = (), **options: Any) -> None:
    start = options.pop("ckpt_path", None)
    settings = {
        "max_steps": 2,
        "accelerator": "cpu",
        "default_root_dir": folder,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "use_distributed_sampler": False,
        **options,
    }
    pl.Trainer(callbacks=[private, *more], **settings).fit(module, lots, ckpt_path=start, weights_only=False)


Case = Callable[[Any], dict[str, Any]]

OTHERS: dict[str, tuple[Case, Any, Any]] = {
    "a byte of a record": (lambda c: {"dataset": records(**c)}, {}, {"byte": 1}),
    "the type of the records": (lambda c: {"dataset": records(**c)}, {}, {"dtype": torch.float64}),
    "the order of the records": (lambda c: {"dataset": records(**c)}, {}, {"order": 1}),
    "a part of the records": (lambda n: {"dataset": Subset(records(), range(n, n + 30))}, 0, 1),
    "records put together": (lambda n: {"dataset": ConcatDataset([records(), records(byte=1)][::n])}, 1, -1),
    "an attribute of a data set": (lambda c: {"dataset": Stored(shift=c)}, 0.0, 1.0),
    "an array of objects": (lambda c: {"dataset": Stored(words=np.array(["a", c], object))}, "b", "c"),
    "what a mask hides": (lambda c: {"dataset": Stored(x=np.ma.array([1, 2], mask=[0, c]))}, 0, 1),
    "a word at a tensor": (lambda c: {"dataset": Stored(x=tagged(c))}, "a", "b"),
    "values of a sparse tensor": (lambda c: {"dataset": Stored(x=torch.tensor([0, c]).to_sparse())}, 1, 2),
    "a generator of random numbers": (lambda c: {"module": Module(rng=np.random.default_rng(c))}, 0, 1),
    "a name beside records in memory": (lambda c: {"loader": {"data_id": c}}, "a", "b"),
    "records beside one name": (lambda c: {"dataset": records(**c), "loader": {"data_id": "a"}}, {}, {"byte": 1}),
    "records without a name": (lambda c: {"loader": {"data_id": c}}, None, "a"),
    "who takes part": (lambda c: {"members": np.arange(SIZE) < c}, 30, 31),
    "local training of users": (users, 0.1, 0.2),
    "the seed": (lambda c: {"strategy": {"seed": c}}, 7, 8),
    "a bound": (lambda c: {"strategy": {"max_grad_norm": c}}, 1.0, 0.5),
    "a step after clipping": (lambda c: {"strategy": {"correction_threshold": c}}, None, 1.0),
    "private statistics": (lambda c: {"strategy": {"metrics_share": c}}, 0.05, 0.1),
    "weights": (lambda c: {"module": Module(weights=c)}, 0, 1),
    "frozen layers": (lambda c: {"module": frozen(c)}, 0, 2),
    "an attribute": (lambda c: {"module": Module(smoothing=c)}, 0.0, 0.1),
    "a private attribute": (lambda c: {"module": Module(_smoothing=c)}, 0.0, 0.1),
    "a private option of our own module": (adversarial, "standard", "wasserstein"),
    "an object": (lambda c: {"module": Module(own=SimpleNamespace(value=c))}, 0.0, 0.1),
    "a network that is no part": (lambda c: {"module": Module(teachers=[teacher(c)])}, 0.0, 0.1),
    "public records in a module": (lambda c: {"module": Module(public=records(**c))}, {}, {"byte": 1}),
    "a lambda": (lambda c: {"module": Module(own=c)}, lambda x: x + 1, lambda x: x - 1),
    "a module of functions": (lambda c: {"module": Module(own=c)}, functools, shutil),
    "an option of a layer": (lambda c: {"module": Module(dropout=nn.Dropout(c))}, 0.1, 0.2),
    "a buffer that is not saved": (lambda c: {"module": buffered(c)}, 0.0, 1.0),
    "an optimizer": (lambda c: {"module": Module(c)}, torch.optim.SGD, torch.optim.Adam),
    "an option of an optimizer": (lambda c: {"module": Module(functools.partial(torch.optim.SGD, lr=c))}, 0.1, 0.2),
    "an attribute of an optimizer": (lambda c: {"module": Module(functools.partial(Rho, rho=c))}, 0.1, 0.2),
    "a schedule": (lambda c: {"module": Module(schedule=c)}, None, lambda o: CosineAnnealingLR(o, 5)),
    "an option of a schedule": (lambda c: {"module": Module(schedule=lambda o: CosineAnnealingLR(o, c))}, 5, 6),
    "a schedule within a schedule": (lambda c: {"module": Module(schedule=sequence(c))}, 5, 6),
    "a function of a schedule": (lambda c: {"module": Module(schedule=lambda o: LambdaLR(o, lambda n: c))}, 1.0, 0.5),
    "a callback that decides": (lambda c: {"callbacks": c}, [], [Callback()]),
    "its option": (lambda c: {"callbacks": [Callback(factor=c)]}, 0.5, 0.25),
    "its network": (lambda c: {"callbacks": [Callback(teacher=teacher(c))]}, 0.0, 0.1),
    "averaged weights": (lambda c: {"callbacks": [pl.callbacks.StochasticWeightAveraging(c, 1)]}, 0.1, 0.2),
    "a value in a closure of the collation": (lambda c: {"loader": {"collate_fn": collate(c)}}, 1.0, 2.0),
    "an argument of the collation": (lambda c: {"loader": {"collate_fn": functools.partial(scaled, c)}}, 1.0, 2.0),
    "precision": (lambda c: {"precision": c}, "32-true", "bf16-mixed"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*precision", "ignore:You defined a `validation_step`")
@pytest.mark.parametrize("case", OTHERS)
def test_they_may_not_share_noise(case: str, key: Callable[..., int | None]) -> None:
    make, one, other = OTHERS[case]
    first, second, again = key(**make(one)), key(**make(other)), key(**make(one))
    assert None not in (first, second)
    assert first == again != second


def scaled(factor: float, batch: Any) -> Any:
    return collate(factor)(batch)


SAME: dict[str, Case] = {
    "the same command": lambda _: {},
    "a name of a place": lambda p: {"module": Module(folder=str(p), root=p)},
    "its logger": lambda p: {"module": Module(own_logger=pl.loggers.CSVLogger(p))},
    "a default in words": lambda _: {"strategy": {"max_grad_norm": 1.0}},
    "pieces": lambda _: {"strategy": {"max_physical_batch_size": 5}},
    "a budget": lambda _: {"strategy": {"target_epsilon": 50.0}},
    "longer": lambda _: {"max_steps": 3},
    "a callback that looks on": lambda _: {"callbacks": [Callback(observes_only=True)]},
    "Lightning's": lambda _: {"callbacks": [pl.callbacks.LambdaCallback()]},
}


@pytest.mark.parametrize("case", SAME)
def test_they_share_noise(case: str, tmp_path: Path, key: Callable[..., int | None]) -> None:
    assert key() == key(**SAME[case](tmp_path)) is not None


# ------------------------------------------------------------------------------- what the source does not say


@pytest.mark.parametrize("place", ["class", "global"])
def test_what_was_set_later(place: str, key: Callable[..., int | None], monkeypatch: pytest.MonkeyPatch) -> None:
    first = key()
    owner, name = {"class": (Module, "scale"), "global": (SCALE, "value")}[place]
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, 2.0)
        assert key() != first
    assert key() == first


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
CELL = {"share": 1.0, "smoothing": 0.0, "helper": "x + 1", "factor": 2, "word": "a", "shift": 0.5}
EDITS = {"share": 2.0, "smoothing": 0.1, "helper": "x - 1", "factor": 3, "word": "b", "shift": 0.25}


@pytest.mark.parametrize("edit", EDITS)
def test_an_edited_cell_of_a_notebook(
    edit: str, key: Callable[..., int | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its classes and functions have no source file."""

    def net(**cell: Any) -> Any:
        main = types.ModuleType("__main__")
        monkeypatch.setitem(sys.modules, "__main__", main)
        vars(main)["base"] = Module
        exec(compile(NOTEBOOK.format(**{**CELL, **cell}), "<cell>", "exec"), vars(main))
        return main.Net()

    first = key(net())
    assert first == key(net()) is not None
    assert first != key(net(**{edit: EDITS[edit]}))


def test_edited_source(tmp_path: Path, key: Callable[..., int | None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a module that a class is of, and of one beside it that it imports."""
    monkeypatch.syspath_prepend(tmp_path)
    keys = []
    for name, text in (("own_beside", "A = 1\n"), ("own_beside", "A = 2\n"), ("own_source", "# edited\n")):
        (tmp_path / "own_beside.py").touch()
        base = "from tests.callback.test_keys_cases import Module"
        (tmp_path / "own_source.py").write_text(f"from own_beside import *\n{base}\nclass Net(Module): pass\n")
        with open(tmp_path / f"{name}.py", "w" if name == "own_beside" else "a") as file:
            file.write(text)
        for module in ("own_source", "own_beside"):
            monkeypatch.delitem(sys.modules, module, raising=False)
        _source_hash.cache_clear()
        keys.append(key(importlib.import_module("own_source").Net()))
    assert len(set(keys)) == 3


def test_versions(key: Callable[..., int | None], monkeypatch: pytest.MonkeyPatch) -> None:
    """An option that is new in one, even at its default, is in another key by this."""
    first = key()
    monkeypatch.setattr(run_key, "versions", lambda: {"dpbench": "0"})
    assert key() != first


def test_circles_and_equal_objects() -> None:
    def ring(length: int) -> list[Any]:
        first: list[Any] = [1]
        first.append([first] * length)
        return first

    one, two = "".join(["a", "b"]), "".join(["a", "b"])
    assert Canonical().digest([one, one]) == Canonical().digest([one, two])
    assert Canonical().digest(ring(1)) == Canonical().digest(ring(1)) != Canonical().digest(ring(2))


# ------------------------------------------------------------------------------- what has no bytes


class Lazy(Dataset[Any]):
    """Reads its records from a file when it is asked for them."""

    def __init__(self, folder: Path, name: Any) -> None:
        self.folder, self.name = folder, name

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, i: int) -> Any:
        return tuple(part[i] for part in torch.load(self.folder / self.name, weights_only=True))


class Reader(Stored):
    """Its items are in memory, by code that no audit sees."""


class Unknown(Stored):
    def __getitem__(self, i: int) -> Any:
        with open(FOLDER[0] / "records.pt", "rb") as file:
            return tuple(part[i] for part in torch.load(file, weights_only=True))


FOLDER: list[Path] = []
OPEN: list[Any] = []


@pytest.fixture
def file(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "files" / "records.pt"
    path.parent.mkdir()
    torch.save(records().tensors, path)
    FOLDER[:] = [path.parent]
    yield path
    while OPEN:
        OPEN.pop().close()


def opened(path: Path) -> Any:
    OPEN.append(open(path, "rb"))  # noqa: SIM115
    return OPEN[-1]


UNHASHABLE: dict[str, Callable[[Path], dict[str, Any]]] = {
    "a file by folder and name": lambda f: {"dataset": Lazy(f.parent, f.name)},
    "a file by its path": lambda f: {"dataset": Lazy(Path(), str(f))},
    "a file that only the code names": lambda f: {"dataset": Unknown()},
    "names of files, read by who knows what": lambda f: {"dataset": Reader(names=[(str(f), 0)])},
    "a folder, read by who knows what": lambda f: {"dataset": Reader(folder=str(f.parent))},
    "an open file": lambda f: {"dataset": Reader(file=opened(f))},
    "a lock": lambda f: {"dataset": Reader(lock=threading.Lock())},
    "an open file in a module": lambda f: {"module": Module(file=opened(f))},
    "a generator in a callback": lambda f: {"callbacks": [Callback(numbers=(n for n in range(3)))]},
    "a lock in a collation": lambda f: {"loader": {"collate_fn": functools.partial(under, threading.Lock())}},
}


def under(lock: Any, batch: Any) -> Any:
    return torch.utils.data.default_collate(batch)


@pytest.mark.parametrize("case", UNHASHABLE)
def test_they_need_a_random_key(case: str, file: Path, key: Callable[..., int | None]) -> None:
    """Unless it is the records that have no bytes, and these have a name."""
    options = UNHASHABLE[case](file)
    assert key(**options) is None
    loader = {**options.pop("loader", {}), "data_id": "clinic 1"}
    assert (key(**options, loader=loader) is None) is ("dataset" not in options)


def test_a_name_stands_for_files_and_for_nothing_else(file: Path, key: Callable[..., int | None]) -> None:
    def named(name: str, **contents: Any) -> int | None:
        return key(dataset=Reader(file=str(file), **contents), loader={"data_id": name})

    assert named("a", x=1) == named("a", x=1)
    assert len({named("a", x=1), named("b", x=1), named("a", x=2)}) == 3


def source(folder: Path) -> str | None:
    return read_ledger(folder / "ledger.jsonl").header.noise_source


class Save(pl.Callback):
    """Interrupts after a step, with a checkpoint of the step before."""

    observes_only = True

    def __init__(self, at: int) -> None:
        self.at = at

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self.at:
            trainer.save_checkpoint(Path(trainer.default_root_dir) / "mid.ckpt")
        if trainer.global_step == self.at + 1:
            trainer.should_stop = True


def trained(folder: Path, data: Any, resume: bool = False, steps: int = 6, stop: int = 3) -> tuple[Tensor, Ledger]:
    """The weights and the ledger of a training that is interrupted, or resumed, without a fingerprint."""
    module = Module()
    private = DPSGD(noise_multiplier=1.0, delta=1e-3, seed=7, ledger=str(folder / "ledger.jsonl"))
    start = folder / "mid.ckpt" if resume else None
    more = [] if resume else [Save(stop)]
    fit(private, module, LotLoader.poisson(data, 4, seed=5), folder, more, max_steps=steps, ckpt_path=start)
    weights = nn.utils.parameters_to_vector(module.parameters()).detach()
    return weights, read_ledger(folder / "ledger.jsonl")


@pytest.mark.filterwarnings("ignore:the training ended before its last step")
def test_a_random_key_is_kept_for_a_resume_and_ends_with_the_training(file: Path, tmp_path: Path) -> None:
    data = Lazy(file.parent, file.name)
    kept = tmp_path / "one" / "noise_keys.json"
    _, before = trained(tmp_path / "one", data)
    assert kept.stat().st_mode & 0o777 == 0o600 and read_keys(kept) is not None
    assert str(before.header.noise_source).startswith("kept:")
    shutil.copytree(tmp_path / "one", tmp_path / "copy")
    one, after = trained(tmp_path / "one", data, resume=True)
    assert len(after.headers) == 1 and len(after.releases) == 6 and after.header == before.header
    assert not kept.exists()
    copy, _ = trained(tmp_path / "copy", data, resume=True)
    assert torch.equal(one, copy)
    _, again = trained(tmp_path / "other", data)
    assert again.header.noise_source != before.header.noise_source
    assert again.header.lot_source != before.header.lot_source


@pytest.mark.filterwarnings("ignore:the training ended before its last step")
@pytest.mark.filterwarnings("ignore:release .* differs")
def test_in_a_resumed_training_other_files_or_a_lost_key_get_other_noise(file: Path, tmp_path: Path) -> None:
    data = Lazy(file.parent, file.name)
    trained(tmp_path / "one", data)
    for name in ("edited", "lost"):
        shutil.copytree(tmp_path / "one", tmp_path / name)
    (tmp_path / "lost" / "noise_keys.json").unlink()
    _, lost = trained(tmp_path / "lost", data, resume=True)
    assert len(lost.headers) == 2 and lost.header.noise_source is None
    torch.save(records(order=1).tensors, file)
    _, edited = trained(tmp_path / "edited", data, resume=True)
    # The release behind the checkpoint is another sum: it is released in a new phase, with new noise.
    assert len(edited.headers) > 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:It is recommended to use `self.log")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("kind", ["in memory", "in a file"])
def test_processes_agree(kind: str, file: Path, tmp_path: Path) -> None:
    """On one key: that of one process, or the first one's random key."""
    sources = []
    for devices in (1, 2):
        folder = tmp_path / str(devices)
        data = records() if kind == "in memory" else Lazy(file.parent, file.name)
        private = DPSGD(noise_multiplier=1.0, delta=1e-3, seed=7, ledger=str(folder / "ledger.jsonl"))
        trainer = {"devices": devices, "strategy": "ddp_fork" if devices > 1 else "auto"}
        fit(private, Module(), LotLoader.poisson(data, 12, seed=5), folder, **trainer)
        sources.append(source(folder))
        assert len(read_ledger(folder / "ledger.jsonl").releases) == 2
    assert (sources[0] == sources[1]) is (kind == "in memory")
