"""Classes beside the folder of `--config-dir`: imported while a command names it, and never otherwise."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from dpbench.code import _source_hash, foreign_code
from dpbench.data import ImageDataModule
from dpbench.errors import ConfigurationError
from dpbench.harness.run import search_path
from dpbench.harness.run._misfit import misfit_of
from dpbench.harness.run.search_path import code_folder, imports_from
from dpbench.privacy.accounting.ledger import read_ledger
from tests.support.cli import TINY, dpbench

PACKAGE = Path(search_path.__file__).parents[2]
SOURCE = """\
from pathlib import Path

from dpbench.strategies import DPSGD

with Path(__file__).with_name("imported").open("a") as file:
    file.write("x")


class MyStrategy(DPSGD):
    pass
"""
TRAIN = ["train", "--config-dir", "mine/conf", *TINY, "strategy=own", "strategy.delta=1e-4", "trainer.max_steps=2"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run by a strategy beside its configuration."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "mine" / "conf" / "strategy").mkdir(parents=True)
    (folder / "mine" / "own_strategy.py").write_text(SOURCE)
    (folder / "mine" / "conf" / "strategy" / "own.yaml").write_text(
        "defaults: [/base/strategy@_here_, _self_]\n_target_: own_strategy.MyStrategy\nmax_grad_norm: 1.0\n"
    )
    dpbench(folder, *TRAIN, "hydra.run.dir=run")
    return folder


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a new process."""
    monkeypatch.delitem(sys.modules, "own_strategy", raising=False)
    monkeypatch.delitem(sys.modules, "own_factor", raising=False)
    _source_hash.cache_clear()


def test_nothing_is_imported_because_a_run_says_so(folder: Path) -> None:
    log = folder / "mine" / "imported"
    before = log.read_text()
    assert list(json.loads((folder / "run" / "result.json").read_text())["foreign_code"]) == ["own_strategy"]
    _, err = dpbench(folder, "resume", "run", "trainer.max_steps=3", status=1)
    assert "No module named 'own_strategy'" in err and err.count("\n") == 1
    assert "The run's own command had --config-dir mine/conf: repeat it, if that code is yours." in err
    dpbench(folder, "table", "run")  # this needs none of it
    assert log.read_text() == before and "own_strategy" not in sys.modules
    assert str(folder / "mine") not in sys.path


def test_an_edit_of_what_it_imports_is_seen(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a module beside it, which no `_target_` names."""
    shutil.copytree(folder / "mine", tmp_path / "mine")
    source = tmp_path / "mine" / "own_strategy.py"
    source.write_text(f"from own_factor import FACTOR\n{SOURCE}    factor = FACTOR\n")

    def edit(factor: int) -> None:
        (tmp_path / "mine" / "own_factor.py").write_text(f"FACTOR = {factor}\n")
        for name in ("own_strategy", "own_factor"):
            monkeypatch.delitem(sys.modules, name, raising=False)
        _source_hash.cache_clear()

    for factor in (1, 2):
        edit(factor)
        dpbench(tmp_path, *TRAIN, f"hydra.run.dir=runs/{factor}")
    runs = [tmp_path / "runs" / name for name in "12"]
    hashes = {json.loads((run / "result.json").read_text())["foreign_code"]["own_strategy"][:8] for run in runs}
    out, _ = dpbench(tmp_path, "table", "runs")
    assert len(hashes) == 2 and "code of own_strategy" in out and all(digits in out for digits in hashes)
    with pytest.warns(UserWarning, match="the code of own_strategy has changed since .*: .* train a new run"):
        dpbench(tmp_path, "resume", "runs/1", "trainer.max_steps=3", "--config-dir", "mine/conf")
    before, after = read_ledger(runs[0] / "ledger.jsonl").headers
    assert before.noise_source != after.noise_source


def test_what_counts_as_its_code(tmp_path: Path) -> None:
    """Modules in its folder that it imports, directly or not; nothing that it does not, and no installed package."""
    (tmp_path / "own_layers").mkdir()
    for name, source in {
        "own_nets": "import json, tqdm\ndef net():\n    from own_layers.flat import f\n",
        "own_layers/flat": "import own_last, own_nets\n",
        "own_last": "",
        "own_other": "",
        "tqdm": "",  # an installed one takes precedence
    }.items():
        (tmp_path / f"{name}.py").write_text(source)

    def code() -> dict[str, str]:
        _source_hash.cache_clear()
        with imports_from(tmp_path):
            return foreign_code({"model": {"_target_": "own_nets.Net"}})

    for name, counts in (("own_last", True), ("own_other", False), ("tqdm", False)):
        before = code()
        assert list(before) == ["own_nets"]
        (tmp_path / f"{name}.py").write_text("x = 1\n")
        assert (code() != before) is counts, name
    (tmp_path / "own_nets-1.dist-info").mkdir()  # where packages are installed, each is what its version says
    installed = code()
    (tmp_path / "own_last.py").write_text("x = 2\n")
    assert code() == installed


WRONG = """\
from dataclasses import replace

import torch
from torch import nn

from dpbench.privacy.mechanism.adaptive import MeanNormBounds
from dpbench.strategies import DPSGD, AdaptiveMeanClipping


class Silent(DPSGD):
    def design(self):
        super().design()


class Shrinking(DPSGD):
    def on_train_batch_start(self, *arguments):
        super().on_train_batch_start(*arguments)
        self.max_grad_norm *= 0.9


class Total(MeanNormBounds):
    def measure(self, squared_norms, groups):
        return squared_norms.sqrt().sum()


class Totals(AdaptiveMeanClipping):
    def design(self):
        recipe = super().design()
        return replace(recipe, adaptation=Total(**vars(recipe.adaptation)))


class Net(nn.Module):
    def __init__(self, input_shape: tuple[int, int, int], num_classes: int):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(100, num_classes))

    def forward(self, images):
        return self.layers(images)


class Patches(Net):
    def forward(self, images):
        torch._assert(images.shape[2] == 32, f"Wrong image height! Expected 32 but got {images.shape[2]}!")
"""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("strategy._target_=own_wrong.Silent", "Silent.design must return a Recipe .* not None: is a return missi"),
        ("strategy._target_=own_wrong.Shrinking", "vary it over the steps by max_grad_norm_schedule, or make"),
        (
            "strategy=adaptive_mean strategy._target_=own_wrong.Totals",
            r"Total.measure must return a tensor of shape \(2,\), a sum over the records for each group, not ",
        ),
        (
            "model=none model._target_=own_wrong.Net",
            r"the network and the batches do not fit: (addmm: )?mat1 and .* \(own_wrong.py, line 38, in forward\). "
            r"Make the layers fit what the data set provides: input_shape=\(1, 8, 8\), num_classes=10, or set data.im",
        ),
        (
            "model=none model._target_=own_wrong.Patches",
            r"do not fit: Wrong image height! Expected 32 but got 8! \(own_wrong.py, line 43, in forward\). Make the "
            r"layers fit what the data set provides: input_shape=\(1, 8, 8\), num_classes=10, or set data.image_size\.",
        ),
    ],
    ids=["silent", "shrinking", "totals", "net", "patches"],
)
def test_what_is_wrong_with_own_classes_is_said_in_one_line(
    words: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine" / "conf").mkdir(parents=True)
    (tmp_path / "mine" / "own_wrong.py").write_text(WRONG)
    monkeypatch.delitem(sys.modules, "own_wrong", raising=False)
    few = TINY if "model=" not in words else TINY[2:]
    _, err = dpbench(tmp_path, "train", "--config-dir", "mine/conf", *few, *words.split(), status=1)
    (line,) = [line for line in err.splitlines() if line.startswith("dpbench: error: ")]
    assert re.search(message, line), line
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("function", "file", "words", "is_misfit"),
    [
        ("forward", f"{PACKAGE}/modules/classifier.py", "size mismatch", True),
        ("forward", "own.py", "CUDA error: an illegal memory access was encountered", False),
        ("load", "own.py", "size mismatch", False),  # of a data set
        ("forward", f"{PACKAGE}/privacy/mechanism/clipping.py", "size mismatch", False),  # of our own arithmetic
    ],
)
def test_other_errors_keep_their_traceback(function: str, file: str, words: str, is_misfit: bool) -> None:
    names: dict[str, Any] = {}
    exec(compile(f"def {function}(): raise RuntimeError({words!r})", file, "exec"), names)
    with pytest.raises(RuntimeError) as caught:
        names[function]()
    caught.value.__traceback__ = caught.tb.tb_next  # without this file
    assert (misfit_of(caught.value, ImageDataModule("digits")) is not None) is is_misfit


def test_what_watches_a_networks_operators_is_not_its_place() -> None:
    """An assertion comes through the modes that follow shared parameters."""
    names: dict[str, Any] = {}
    watching = "def __torch_function__(): raise AssertionError('Wrong image height!')"
    exec(compile(watching, f"{PACKAGE}/privacy/gradients/_shared.py", "exec"), names)
    exec(compile("def forward(): __torch_function__()", "own.py", "exec"), names)
    with pytest.raises(AssertionError) as caught:
        names["forward"]()
    caught.value.__traceback__ = caught.tb.tb_next  # without this file
    assert "Wrong image height! (own.py, line 1, in forward)" in (
        misfit_of(caught.value, ImageDataModule("digits")) or ""
    )


def test_the_folder_that_holds_a_package(tmp_path: Path) -> None:
    conf = tmp_path / "nets" / "conf"
    conf.mkdir(parents=True)
    assert code_folder(conf) == conf.parent
    (conf.parent / "__init__.py").touch()
    assert code_folder(conf) == tmp_path
    with pytest.raises(ConfigurationError, match="nowhere is not a folder"):
        code_folder(tmp_path / "nowhere")


def test_it_takes_the_place_of_no_installed_package(tmp_path: Path) -> None:
    with imports_from(tmp_path), imports_from(tmp_path):
        assert sys.path[-1] == str(tmp_path) and sys.path.count(str(tmp_path)) == 1
    assert str(tmp_path) not in sys.path


def test_an_unfinished_run_is_continued_by_the_line_that_it_prints(folder: Path) -> None:
    (folder / "run" / "result.json").unlink()
    _, err = dpbench(folder, *TRAIN, "hydra.run.dir=run", status=1)
    assert f"`dpbench resume {folder}/run --config-dir {folder}/mine/conf`" in err
