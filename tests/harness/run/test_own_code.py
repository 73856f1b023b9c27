"""Classes beside the folder of `--config-dir`: imported while a command names it, and never otherwise."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from dpbench.cli import main
from dpbench.code import _source_hash, foreign_code
from dpbench.data import ImageDataModule
from dpbench.errors import ConfigurationError
from dpbench.harness.run import search_path
from dpbench.harness.run._misfit import misfit_of
from dpbench.harness.run.search_path import code_folder, imports_from
from tests.support.cli import TINY, dpbench, dpbench_in_a_process

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


def test_it_is_imported_where_the_command_says_so(folder: Path) -> None:
    result = json.loads((folder / "run" / "result.json").read_text())
    assert list(result["foreign_code"]) == ["own_strategy"]
    assert str(folder / "mine") not in sys.path


def test_nothing_is_imported_because_a_run_says_so(folder: Path) -> None:
    log = folder / "mine" / "imported"
    before = log.read_text()
    _, err = dpbench(folder, "resume", "run", "trainer.max_steps=3", status=1)
    assert "No module named 'own_strategy'" in err and err.count("\n") == 1
    assert "The run's own command had --config-dir mine/conf: repeat it, if that code is yours." in err
    for words in (["table", "run"], ["account", "run"], ["report", "run"], ["compare", "run"]):
        dpbench(folder, *words)  # these need none of it
    assert log.read_text() == before and "own_strategy" not in sys.modules


def test_it_resumes_where_the_command_says_so(folder: Path) -> None:
    dpbench(folder, "resume", "run", "trainer.max_steps=3", "--config-dir", "mine/conf")
    assert json.loads((folder / "run" / "result.json").read_text())["steps"] == 3


def test_an_edit_of_what_it_imports_is_seen(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a module beside it, which no `_target_` names."""
    shutil.copytree(folder / "mine", tmp_path / "mine")
    source = tmp_path / "mine" / "own_strategy.py"
    source.write_text(f"from own_factor import FACTOR\n{SOURCE}    factor = FACTOR\n")
    hashes = []
    for factor in (1, 2):
        (tmp_path / "mine" / "own_factor.py").write_text(f"FACTOR = {factor}\n")
        for name in ("own_strategy", "own_factor"):
            monkeypatch.delitem(sys.modules, name, raising=False)
        _source_hash.cache_clear()
        dpbench(tmp_path, *TRAIN, f"hydra.run.dir=runs/{factor}")
        result = json.loads((tmp_path / "runs" / str(factor) / "result.json").read_text())
        hashes.append(result["foreign_code"]["own_strategy"][:8])
    assert hashes[0] != hashes[1]
    for command in ("table", "compare"):
        out, _ = dpbench(tmp_path, command, "runs")
        assert "code of own_strategy" in out and all(digits in out for digits in hashes)
    ledger = [json.loads(line) for line in (tmp_path / "runs/1/ledger.jsonl").read_text().splitlines()]
    with pytest.warns(UserWarning, match="the code of own_strategy has changed since .*: .* train a new run"):
        dpbench(tmp_path, "resume", "runs/1", "trainer.max_steps=3", "--config-dir", "mine/conf")
    phases = [json.loads(line) for line in (tmp_path / "runs/1/ledger.jsonl").read_text().splitlines()]
    headers = [line for line in phases if line["record"] == "header"]
    assert len(headers) == 2 and headers[0] == ledger[0] and headers[0]["noise_source"] != headers[1]["noise_source"]
    dpbench(tmp_path, "resume", "runs/1", "trainer.max_steps=4", "--config-dir", "mine/conf")  # by the same code


def test_what_counts_as_its_code(tmp_path: Path) -> None:
    """Modules in its folder that it imports, directly or not; nothing that it does not, and no installed package."""
    (tmp_path / "tqdm.py").touch()  # an installed one takes precedence
    (tmp_path / "own_nets.py").write_text("import json, tqdm\ndef net():\n    from own_layers.flat import f\n")
    (tmp_path / "own_layers").mkdir()
    (tmp_path / "own_layers" / "flat.py").write_text("import own_last, own_nets\n")
    for name in ("own_last", "own_other", "own_layers/wide"):
        (tmp_path / f"{name}.py").touch()
    config = {"model": {"_target_": "own_nets.Net"}}

    def code() -> dict[str, str]:
        _source_hash.cache_clear()
        with imports_from(tmp_path):
            return foreign_code(config)

    before = code()
    assert list(before) == ["own_nets"]
    for name, counts in {"own_last": True, "own_layers/wide": True, "own_other": False, "tqdm": False}.items():
        (tmp_path / f"{name}.py").write_text("x = 1\n")
        assert (code() != before) is counts, name
        (tmp_path / f"{name}.py").write_text("")
    assert code() == before
    (tmp_path / "own_nets-1.dist-info").mkdir()  # where packages are installed, each is what its version says
    installed = code()
    (tmp_path / "own_last.py").write_text("x = 1\n")
    assert code() == installed


WRONG = """\
from dataclasses import replace

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
"""
_NET = "the network and the batches do not fit: mat1 and mat2 shapes cannot be multiplied ("
_FIT = "Make the layers fit what the data set provides: input_shape=(1, 8, 8), num_classes=10."


@pytest.mark.parametrize(
    ("words", "messages"),
    [
        (
            ["strategy._target_=own_wrong.Silent"],
            ["Silent.design must return a Recipe ", "not None: is a return missi"],
        ),
        (["strategy._target_=own_wrong.Shrinking"], ["let it move over the steps by max_grad_norm_schedule, or make"]),
        (
            ["strategy=adaptive_mean", "strategy._target_=own_wrong.Totals"],
            ["Total.measure must return a tensor of shape (2,), a sum over the records for each group, not "],
        ),
        (["model=none", "model._target_=own_wrong.Net"], [_NET, "(own_wrong.py, line 37, in forward). ", _FIT]),
        (["model=none", "model._target_=own_wrong.Net", "strategy=none"], [_NET, "line 37, in forward). ", _FIT]),
    ],
)
def test_what_is_wrong_with_own_classes_is_said_in_one_line(
    words: list[str],
    messages: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "mine" / "conf" / "model").mkdir(parents=True)
    (tmp_path / "mine" / "conf" / "model" / "any.yaml").touch()
    (tmp_path / "mine" / "own_wrong.py").write_text(WRONG)
    monkeypatch.delitem(sys.modules, "own_wrong", raising=False)
    base = ["train", "--config-dir", "mine/conf", "data.image_size=8", "logger=none", "trainer.max_steps=2"]
    model = [] if "model=none" in words else ["model=mlp", "model.hidden=[16]"]
    _, err = dpbench(tmp_path, *base, *model, *words, status=1)
    (line,) = [line for line in err.splitlines() if line.startswith("dpbench: error: ")]
    assert all(message in line for message in messages), line
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("function", "file", "words", "is_misfit"),
    [
        ("forward", "own.py", "size mismatch", True),
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


def test_an_unfinished_run_is_continued_by_the_line_that_it_prints(folder: Path) -> None:
    _, err = dpbench(folder, *TRAIN, "hydra.run.dir=run", status=1)
    assert "run holds a finished run" in err
    (folder / "run" / "result.json").unlink()
    _, err = dpbench(folder, *TRAIN, "hydra.run.dir=run", status=1)
    assert f"`dpbench resume {folder}/run --config-dir {folder}/mine/conf`" in err


def test_a_folder_that_is_none(folder: Path) -> None:
    for words in (["train", "--config-dir=nowhere"], ["resume", "run", "--config-dir=nowhere"]):
        _, err = dpbench(folder, *words, status=1)
        assert "--config-dir nowhere is no folder." in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("strategy=owm", "there is no strategy=owm. Did you mean strategy=own?"),
        ("strategy.max_grad_nrm=1", "there is no key strategy.max_grad_nrm. Did you mean strategy.max_grad_norm?"),
        ("strategy.clipping=flat", "there is no key strategy.clipping."),  # an option of the default strategy alone
    ],
)
def test_messages_know_its_choices(
    word: str,
    message: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(folder)
    assert main([*TRAIN, word]) == 1
    assert message in capsys.readouterr().err


def test_the_folder_that_holds_a_package(tmp_path: Path) -> None:
    conf = tmp_path / "paper" / "nets" / "conf"
    conf.mkdir(parents=True)
    assert code_folder(conf) == tmp_path / "paper" / "nets"
    for package in (conf.parent, conf.parent.parent):
        (package / "__init__.py").touch()
    assert code_folder(conf) == tmp_path
    with pytest.raises(ConfigurationError, match="nowhere is no folder"):
        code_folder(tmp_path / "nowhere")


def test_it_takes_the_place_of_no_installed_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tqdm.py").write_text("raise AssertionError")
    monkeypatch.delitem(sys.modules, "tqdm", raising=False)
    with imports_from(tmp_path), imports_from(tmp_path):
        import tqdm

        assert sys.path[-1] == str(tmp_path) and sys.path.count(str(tmp_path)) == 1
    assert tqdm.__file__ != str(tmp_path / "tqdm.py") and str(tmp_path) not in sys.path


@pytest.mark.long
def test_jobs_of_a_sweep_in_other_processes(folder: Path) -> None:
    words = ["-m", "launcher=submitit_local", "seed=0,1", "hydra.sweep.dir=sweep"]
    dpbench_in_a_process(folder, *TRAIN, *words)
    assert len(list((folder / "sweep").glob("*/result.json"))) == 2
