"""Bad input of `dpbench`: one line and nothing left behind, whatever the mistake is."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hydra.errors import MissingConfigException
from omegaconf import OmegaConf

from dpbench.cli import main
from dpbench.errors import ConfigurationError
from dpbench.harness.run import _objective as objective
from dpbench.harness.run import command_line
from dpbench.harness.run.build import build_trainer, module_for, plain
from dpbench.harness.run.processes import processes_to_start
from tests.support.cli import FEW
from tests.support.configs import composed

OPTUNA = "-m hydra/sweeper=optuna hydra.sweeper.direction=maximize data.val_size=200"
REFUSED = """
# numbers
optimizer.lr=nan -> optimizer.lr must be a positive number, not nan
strategy.noise_multiplier=much -> (strategy=none trains without privacy) or null, not 'much'
schedule=step schedule.gamma=-1 -> schedule.gamma must be a number of at least 0, not -1
+optimizer.weight_decay=[nan] -> optimizer.weight_decay must be a number, not [nan]
trainer.max_steps=1.5 -> trainer.max_steps must be a positive whole number, or -1 for no limit, not 1.5
trainer.max_steps=-1 -> no stopping criterion
model.hidden=[0] -> a list in which each is a whole number of at least 1, not [0]
seed=99999999999999999999999 -> seed must be a whole number of at least 0 (below 2^32)
run.checkpoint_every_n_steps=0 -> run.checkpoint_every_n_steps must be a whole number of at least 1
data.expected_batch_size=0 -> expected_batch_size must lie between
strategy.microbatch_size=7 -> microbatch_size=7 does not fit batches of 64 records
schedule=cosine schedule.T_max=abc -> schedule.T_max must be a whole number
schedule=cosine trainer.max_steps=-1 trainer.max_epochs=1 -> T_max must be at least 1
# words
run.name=a/../b -> run.name must be a name of at most 150 letters without slashes
data.sampling=shuffled -> no accountant covers 'shuffled_epochs'
data=cifar10 data.root=nowhere data.download=false -> nowhere/cifar-10-batches-py
logger=wandb logger.project= -> logger.project must be a name
hydra.run.dir= -> hydra.run.dir must be the path of a folder, not ''
trainable=lora:0 -> trainable must be last_layer, bias, norm, lora:8 (or another rank), a parameter's name
engine.kernels=perhaps -> engine.kernels (or DPBENCH_KERNELS) must be one of none
# keys
max_steps=1 -> there is no key max_steps. Did you mean trainer.max_steps?
strategy.epochs=3 -> (on the command line trainer.max_steps)
strategy.truncated_batch_size=9 -> (on the command line data.sampling=truncated_poisson)
trainable=head -> a parameter's name, a pattern (*head*)
optimizer.lrr=1 -> Did you mean optimizer.lr? Known: lr.
+trainer.callbacks=[foo] -> trainer.callbacks cannot be set: dpbench sets it itself
+model.num_classes=3 -> model.num_classes cannot be set
+data.seed=3 -> data.seed cannot be set
~model -> there is no key model
# what is called
model._target_=os.system -> must be Module or a subclass
model._target_=foo.Bar -> No module named 'foo'
+callbacks.mine={_target_:pytorch_lightning.callbacks.Timer,foo:1} -> there is no key callbacks.mine.foo
+optimizer.foreach._target_=os.getpid -> optimizer.foreach must be true or false or null
# groups
data=mnst -> there is no data=mnst. Did you mean data=mnist?
strategy=smooth -> For a file of your own add --config-dir FOLDER.
run=5 -> run is a group of settings (run.KEY=VALUE), not 5
=5 -> takes one name, not 5
# processes
trainer.devices=9999 -> trainer.devices=9999 is more than this machine's
trainer.val_check_interval=5 -> added by a plus: +trainer.val_check_interval=...
+trainer.strategy=ddp -> take ddp_spawn (trainer=ddp_cpu
+trainer.accumulate_grad_batches=2 logger=csv -> accumulate_grad_batches=2 rescales the loss
+trainer.num_nodes=2 -> trainer.num_nodes=2 needs a process on each node: start the command by torchrun or
# sweeps
seed=0,1 -> To sweep over it, add --multirun
seed=range(0,2) -> 'seed=range(0,2)' requires --multirun
-m seed=0,1 hydra.job.name=a,b -> Sweeping over Hydra's configuration is not supported
launcher=joblib -> launcher=joblib is for sweeps, and this is a single run: add -m
-m seed=range(0) -> the sweep has no job
-m optimizer.lr=interval(0.1,1) -> requires an optimizing sweeper: add hydra/sweeper=optuna
OPTUNA hydra.sweeper.direction=up -> hydra.sweeper.direction must be minimize or maximize or a list
OPTUNA objective=[val/accuracy,val/loss] -> a direction for each objective (val/accuracy, val/loss)
OPTUNA hydra.sweeper.params=5 -> hydra.sweeper.params
OPTUNA seed=0,1 data.val_size=0 -> these runs have only test data: hold out records
objective=test/accuracy -> not on test data
objective=val/accuracy -> needs records held out: set data.val_size
# what Hydra and argparse cannot read
foo -> invalid override 'foo'
optimizer.lr=${optimizer.lr} -> optimizer.lr
run.name=${nosuch.key} -> Interpolation key 'nosuch.key' not found
--foo -> unrecognized arguments: --foo
--cfg foo -> invalid choice: 'foo'
# parts that do not go together
experiment=digits_gan module=classifier -> there is no key module.discriminator_steps
experiment=digits_gan model=mlp -> add model=mlp_gan or conv_gan
experiment=digits_gan trainable=bias -> trainable: a GAN trains both of its networks
experiment=digits_gan schedule=cosine -> leave schedule=constant
experiment=digits_gan module.generator_optimizer.lr=-1 -> generator_optimizer.lr must be a positive number
optimizer=none -> ImageClassifier needs one: choose another optimizer than optimizer=none
"""
"""Words of `dpbench train`, and what its line says."""


def cases(table: str) -> list[Any]:
    """Lines of a table, as parameters that are named by their words."""
    pairs = [line.split(" -> ") for line in table.strip().splitlines() if not line.startswith("#")]
    return [pytest.param(words, message, id=words) for words, message in pairs]


def one_line(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    status: Any = None
    try:
        status = main(words)
    except SystemExit as stop:
        status = stop.code
    err = capsys.readouterr().err
    assert status in (1, 2) and err.startswith("dpbench: error: ") and err.count("\n") == 1, err
    return err


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(("words", "message"), cases(REFUSED))
def test_one_line_and_nothing_left(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    if "OPTUNA" in words:
        pytest.importorskip("optuna", minversion="5")
    few = FEW if "experiment" not in words and "model=" not in words else FEW[3:]
    assert message in one_line(["train", *few, *words.replace("OPTUNA", OPTUNA).split()], capsys)
    assert not [*Path().glob("outputs"), *Path().glob("multirun/*/*")]


def test_configuration_of_ones_own(capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine/optimizer").mkdir(parents=True)
    Path("mine/optimizer/mine.yaml").write_text("defaults: [sgd]\nlr: [\n")
    Path("mine/optimizer/good.yaml").write_text("_target_: torch.optim.SGD\n_partial_: true\nlr: 0.1\n")
    for word, message in {
        "optimizer=mine": 'optimizer/mine.yaml", line 3',
        "optimizer=good optimizer.momentum=1": "Another option of torch.optim.SGD is added by a plus: +optimizer.mom",
    }.items():
        assert message in one_line(["train", "--config-dir=mine", *FEW, *word.split()], capsys)


def test_a_mode_that_wandb_does_not_know(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("WANDB_MODE", "banana")
    message = "$WANDB_MODE must be online, offline, disabled or shared, not 'banana'"
    assert message in one_line(["train", *FEW, "logger=wandb"], capsys)


@pytest.mark.parametrize(("name", "what"), [("result.json", "{}")])
def test_a_folder_with_files_of_ones_own(name: str, what: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path(name).write_text(what)
    assert f"holds a {name} that is damaged, or not of dpbench" in one_line(["train", *FEW, "hydra.run.dir=."], capsys)
    assert {path.name for path in Path().iterdir()} - {".lock"} == {name}


@pytest.mark.parametrize("words", [["-m", "seed=0,1"], ["seed=0"]])
def test_an_error_of_the_system_is_one_line(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fails = mock.Mock(side_effect=IsADirectoryError(21, "Is a directory", "metrics.csv"))
    monkeypatch.setattr("dpbench.harness.run.train.train_job", fails)
    assert "Is a directory" in one_line(["train", *FEW, *words], capsys)


OTHER_COMMANDS = """
reproduce list foo -> list takes no further arguments
reproduce pyvacy/mnist --status trainer=foo -> there is no trainer=foo. Known: cpu
reproduce pyvacy/mnist --status --replace -> --status writes nothing that --replace could overwrite
reproduce nowhere.yaml -> nowhere.yaml is missing: name a definition
resume FILE -> test_input.py is a file: name the folder of a run
trian -> Did you mean train?
account x --delta abc -> --delta
table x --csv --json -> not allowed with
workflow --noise-multipliers 0,1 -> --noise-multipliers
account x --plot FILE/x.png -> --plot
compare x --plot . -> --plot
"""


@pytest.mark.parametrize(("words", "message"), cases(OTHER_COMMANDS))
def test_other_commands(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in one_line(shlex.split(words.replace("FILE", __file__)), capsys)


@pytest.mark.parametrize(
    ("model", "said", "message"),
    [
        ("mnist_cnn", {"vocabulary_size": 3}, r"model.input_shape is missing: .* The data set provides vocabulary_"),
        ("char_lstm", {"length": 3}, r"model.vocabulary_size is missing: .* The data set provides length=3: choose"),
        ("mnist_cnn", {"input_shape": (8,), "num_classes": 3}, r"input_shape must be a list of 3.*not \(8,\)\."),
    ],
)
def test_a_model_that_does_not_fit_is_told(model: str, said: dict[str, Any], message: str) -> None:
    cfg = OmegaConf.masked_copy(composed(f"model={model}"), ["model", "module", "optimizer", "schedule"])
    with pytest.raises(ConfigurationError, match=message):
        module_for(plain(cfg), said)


@pytest.mark.parametrize(
    ("of_hydra", "choice"),
    [("submitit_local", "submitit"), ("dpbench_ray", "ray")],
)
def test_a_launcher_that_is_missing_is_told_with_its_installation(of_hydra: str, choice: str) -> None:
    told = command_line.explain(MissingConfigException("", f"hydra/launcher/{of_hydra}", []))
    assert told.startswith(f"launcher={choice} is not installed: pip install ")
    assert told.endswith('[submitit]".' if choice == "submitit" else "(in a checkout of dpbench).")


def test_how_many_processes_are_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)

    def started(accelerator: str = "cpu", **options: Any) -> int:
        return processes_to_start({"accelerator": accelerator, **options})

    assert (started(), started(devices=2), started(devices="auto")) == (1, 2, 1)
    assert [started("gpu", devices=devices) for devices in ("auto", -1, [1, 2])] == [3, 3, 2]
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert started(devices=2) == 1  # somebody has started them


def test_a_trainer_alone_starts_no_process() -> None:
    """Lightning's own choice would start `dpbench train` again as a script, which it is not."""
    config = {"trainer": {"_target_": "pytorch_lightning.Trainer", "accelerator": "cpu", "devices": 2}}
    trainer = build_trainer(config, alone=True, logger=False, enable_checkpointing=False)
    assert trainer.world_size == 1


def test_a_gpu_that_is_missing_is_told_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    config = {"trainer": {"_target_": "pytorch_lightning.Trainer", "accelerator": "gpu"}}
    with pytest.raises(ConfigurationError, match="gpu backend found! Choose trainer=cpu"):
        build_trainer(config, alone=True, logger=False)


CLASSIFIER: dict[str, Any] = {"module": {"_target_": "dpbench.modules.ImageClassifier"}}


def test_a_sweeper_chooses_on_what_was_held_out() -> None:
    record = {"metrics": {"val/accuracy": 0.5, "test/accuracy": 0.75, "private/loss": 2.0, "val/loss": None}}
    held_out = {"data": {"val_size": 200}, **CLASSIFIER}
    assert objective.values_of(record, held_out) == [0.5]
    both = {**held_out, "objective": ["private/loss", "val/accuracy"]}
    assert objective.values_of(record, both) == [2, 0.5]
    objective.refuse_choice(both, ["minimize", "maximize"])
    with pytest.raises(ConfigurationError, match=r"would minimize val/accuracy: set hydra.sweeper.direction"):
        objective.refuse_choice(both, ["minimize", "minimize"])
    for name, message in {"val/loss": "is not finite", "val/f1": "was not measured; .*val/accuracy"}.items():
        with pytest.raises(ConfigurationError, match=f"objective={name} {message}"):
            objective.values_of(record, {**held_out, "objective": name})
    users = {"_target_": "dpbench.data.UserDataModule"}
    assert objective.objectives_of({"data": {**users, "val_users": 9}, **CLASSIFIER}) == ["val/accuracy"]
    for data, module in (
        ({"val_size": 0}, "ImageClassifier"),
        ({"val_size": 9}, "GAN"),
        ({**users, "val_users": 0}, "ImageClassifier"),  # has a validation loader, which shows test examples
    ):
        config = {"data": data, "module": {"_target_": f"dpbench.modules.{module}"}}
        assert objective.objectives_of(config) == []
        with pytest.raises(ConfigurationError, match="these runs have only test data"):
            objective.refuse_choice(config, ["maximize"])
