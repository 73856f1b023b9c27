"""Bad input of `dpbench train`: one line and nothing left behind, whatever the mistake is."""

from __future__ import annotations

import io
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra.errors import MissingConfigException
from omegaconf import OmegaConf

from dpbench.cli import main
from dpbench.cli.arguments import Answer
from dpbench.errors import ConfigurationError
from dpbench.harness.run import _objective as objective
from dpbench.harness.run import command_line
from dpbench.harness.run.build import build_trainer, module_for, plain
from dpbench.harness.run.processes import processes_to_start
from tests.support.cli import FEW
from tests.support.configs import composed

OPTUNA = "-m hydra/sweeper=optuna hydra.sweeper.direction=maximize data.val_size=200"
CASES: dict[str, list[tuple[str, str]]] = {
    "numbers that are not finite": [
        ("optimizer.lr=nan", "optimizer.lr must be a positive number, not nan"),
        ("optimizer.lr=inf", "optimizer.lr must be a positive number, not inf"),
        ("+optimizer.momentum=nan", "optimizer.momentum must be a number, not nan"),
        ("schedule=cosine schedule.eta_min=nan", "schedule.eta_min must be a number, not nan"),
        ("ema_decay=inf", "ema_decay must be a number from 0 to below 1"),
        ("strategy.discretization_threshold=1e37", "must be a number from 0 to 1e+30 (or null), not 1e+37"),
        ("strategy.noise_multiplier=1e30", "noise_multiplier must be a positive number from 1e-12 to 1e+12, not 1e+30"),
        ("optimizer.lr=0", "optimizer.lr must be a positive number, not 0"),
        ("schedule=step schedule.gamma=-1", "schedule.gamma must be a number from 0 on, not -1"),
        ("+optimizer.weight_decay=[nan]", "optimizer.weight_decay must be a number, not [nan]"),
    ],
    "no whole numbers": [
        ("trainer.max_steps=1.5", "trainer.max_steps must be a positive whole number, or -1 for no limit, not 1.5"),
        ("trainer.max_steps=1e30", "trainer.max_steps must be a positive whole number"),
        ("seed=1.5", "seed must be a whole number from 0 on"),
        ("data.val_size=1.5", "data.val_size must be a whole number"),
        ("model.hidden=[1.5]", "model.hidden must be a whole number from 1 on or a list"),
        ("seed=99999999999999999999999", "seed must be a whole number from 0 on (below 2^32)"),
    ],
    "intervals": [
        ("run.checkpoint_every_n_steps=0", "run.checkpoint_every_n_steps must be a whole number from 1 on"),
        ("run.checkpoint_every_n_steps=-3", "run.checkpoint_every_n_steps must be a whole number from 1 on"),
        ("trainer.log_every_n_steps=-1", "trainer.log_every_n_steps must be a whole number from 1 on"),
        ("trainer.check_val_every_n_epoch=0", "trainer.check_val_every_n_epoch must be a whole number from 1 on"),
        ("diagnostics.every_n_steps=0", "diagnostics.every_n_steps must be a whole number from 1 on"),
        ("data.eval_batch_size=0", "data.eval_batch_size must be a whole number from 1 on"),
        ("data.image_size=0", "data.image_size must be a whole number of pixels from 1"),
        ("model.hidden=[0]", "a list in which each is a whole number from 1 on, not [0]"),
        ("trainer.max_steps=-1", "no stopping criterion"),
        ("+trainer.limit_train_batches=0", "trainer.limit_train_batches must be a number above 0"),
        ("~trainer.max_steps", "no stopping criterion"),
    ],
    "words": [
        ("run.name=", "run.name must be a name of at most 150 letters without slashes, not ''"),
        ("run.name=a/../b", "run.name must be a name of at most 150 letters without slashes"),
        ("run.group=", "run.group must be a name"),
        ("data.sampling=", "unknown sampling ''; known are poisson"),
        ("strategy.metrics={accuracy:null}", "a dictionary in which each value is a number or null, not {'accuracy'"),
        ("run.tags=abc", "run.tags must be a list in which each is a word"),
        ("run.tags=[1]", "run.tags must be a list in which each is a word"),
        ("logger=wandb logger.mode=foo", "logger.mode must be auto, online or offline, not 'foo'"),
        ("logger=wandb logger.project=", "logger.project must be a name"),
        ("hydra.run.dir=", "hydra.run.dir must be the path of a folder, not ''"),
        ("data.root=''", "data.root must be the path of a folder"),
        ("optimizer.lr=", "optimizer.lr must be a positive number, not ''"),
        ("optimizer.lr={a:1}", "optimizer.lr must be a positive number, not {'a': 1}"),
        ("seed=[0,1]", "seed must be a whole number"),
        (
            "trainable=head",
            "trainable must be last_layer, bias, lora:8 (or another rank), or several of them joined by",
        ),
        ("trainable=lora:0", "trainable must be last_layer, bias, lora:8"),
        ("engine.native=perhaps", "engine.native must be auto, on or off"),
        ("engine.kernels=perhaps", "engine.kernels (or DPBENCH_KERNELS) must be one of none"),
    ],
    "unknown keys": [
        ("+trainer.callbacks=[foo]", "trainer.callbacks cannot be set: dpbench sets it itself"),
        ("+strategy.target_delta=1e-5", "there is no key strategy.target_delta. Did you mean strategy.delta?"),
        ("+seeed=1", "there is no key seeed. Did you mean seed?"),
        ("+optimizer.momentun=1", "Did you mean optimizer.momentum?"),
        ("+module.monitored=val", "module.monitored cannot be set"),
        ("+model.num_classes=3", "model.num_classes cannot be set"),
        ("+data.seed=3", "data.seed cannot be set"),
    ],
    "what was taken away": [
        *((f"~{group}", f"{group} is missing") for group in ("optimizer", "schedule", "logger", "run")),
        ("~seed", "key 'seed' not found"),
        ("~data.name", "data.name is missing: it cannot be left out"),
        ("~run.tags", "run.tags is missing"),
        ("~model", "there is no key model"),
    ],
    "what is called": [
        ("model._target_=os.system", "must be Module or a subclass"),
        ("model._target_=dpbench.models.mlp.Nope", "module 'dpbench.models.mlp' has no attribute 'Nope'"),
        ("model._target_=foo.Bar", "No module named 'foo'"),
        ("model._target_=", "model._target_='' is not an importable class"),
        ("model._target_=null", "ImageClassifier needs one: choose another model than model=none"),
        ("optimizer._target_=torch.optim.Foo", "module 'torch.optim' has no attribute 'Foo'"),
        ("optimizer._target_=torch.nn.Linear", "must be Optimizer or a subclass"),
        ("strategy._target_=pytorch_lightning.Callback", "must be PrivateStrategy or NonPrivate or a subclass"),
        ("module._target_=pytorch_lightning.LightningModule", "there is no key module.recalls"),
        ("module._target_=torch.nn.Linear", "must be LightningModule or a subclass"),
        ("data._target_=pytorch_lightning.LightningDataModule", "there is no key data."),
        ("data._target_=torch.nn.Linear", "must be LightningDataModule or a subclass"),
        ("+callbacks.mine._target_=torch.nn.Linear", "must be Callback or a subclass"),
        ("+callbacks.mine={_target_:pytorch_lightning.callbacks.Timer,foo:1}", "there is no key callbacks.mine.foo"),
        ("callbacks=5", "callbacks takes one name, not 5"),
        ("+optimizer.foreach={_target_:os.getpid}", "optimizer.foreach must be true or false or null"),
        ("+optimizer.foreach._target_=os.getpid", "optimizer.foreach must be true or false or null"),
    ],
    "groups": [
        ("optimizer=null", "optimizer takes one name, not None. Known: adagrad"),
        ("trainer=5", "trainer takes one name, not 5"),
        ("data=[digits,mnist]", "data takes one name, not ['digits', 'mnist']"),
        ("run=5", "run is a group of settings (run.KEY=VALUE), not 5"),
        ("=5", "takes one name, not 5"),
        ("experiment=nasr/foo", "there is no experiment/nasr=foo. Known: audit, demo"),
    ],
    "processes": [
        ("trainer.devices=9999", "trainer.devices=9999 is more than this machine's"),
        ("trainer.devices=0", "trainer.devices must be a whole number from 1 on"),
        ("trainer.devices='0,1'", "trainer.devices must be a whole number from 1 on"),
        ("trainer.val_check_interval=5", "added by a plus: +trainer.val_check_interval=..."),
        ("+trainer.strategy=ddp", "take ddp_spawn (trainer=ddp_cpu"),
        ("+trainer.num_nodes=2", "trainer.num_nodes=2 needs a process on each node"),
    ],
    "sweeps": [
        ("-m seed=0,-1", "seed must be a whole number from 0 on (below 2^32), not -1"),
        ("seed=0,1", "To sweep over it, add --multirun"),
        ("seed=range(0,2)", "'seed=range(0,2)' requires --multirun"),
        ("-m seed=0,1 hydra.job.name=a,b", "Sweeping over Hydra's configuration is not supported"),
        ("launcher=joblib", "launcher=joblib is for sweeps, and this is one run, made here: add -m"),
        ("-m seed=range(0)", "the sweep has no job"),
        ("-m optimizer.lr=interval(0.1,1)", "is for a sweeper that chooses: add hydra/sweeper=optuna"),
        ("-m seed=0,1 hydra.sweep.dir=", "hydra.sweep.dir must be the path of a folder"),
        ("-m hydra.sweeper.params=5", "hydra.sweeper.params"),
        ("-m hydra/sweeper=foo", "there is no hydra/sweeper=foo. Known: basic, "),
        ("-m hydra/launcher=foo", "there is no hydra/launcher=foo. Known: basic, "),
    ],
    "sweeps that choose": [
        (f"{OPTUNA} optimizer.lr=interval(-1,0.5)", "optimizer.lr must be a positive number, not -1"),
        (f"{OPTUNA} hydra.sweeper.direction=up", "hydra.sweeper.direction must be minimize or maximize or a list"),
        (f"{OPTUNA} objective=[val/accuracy,val/loss]", "one for each objective (val/accuracy, val/loss)"),
        (f"{OPTUNA} hydra.sweeper.n_trials=many", "hydra.sweeper.n_trials must be a whole number from 1 on"),
        (f"{OPTUNA} hydra.sweeper.direction=minimize", "the sweeper would choose the least val/accuracy"),
        (f"{OPTUNA} hydra/sweeper/sampler=foo", "there is no hydra/sweeper/sampler=foo. Known: cmaes, grid"),
        (f"{OPTUNA} hydra.sweeper.params=5", "hydra.sweeper.params"),
        (f"{OPTUNA} seed=0,1 data.val_size=0", "only test data are there to measure it"),
    ],
    "words that Hydra cannot read": [
        ("run.name=a=b", "invalid override 'run.name=a=b'"),
        ("run.name=${seed", "invalid override 'run.name=${seed'"),
        ("hydra.run.dir=~/xx", "invalid override 'hydra.run.dir=~/xx'"),
        ("optimizer.lr=${optimizer.lr}", "optimizer.lr"),
        ("run.name=${nosuch.key}", "Interpolation key 'nosuch.key' not found"),
    ],
    "flags": [
        ("--foo", "unrecognized arguments: --foo"),
        ("--config-dir", "expected one argument"),
        ("--cfg foo", "invalid choice: 'foo'"),
        ("--config-dir=nowhere", "--config-dir nowhere is no folder"),
    ],
    "objectives": [
        ("objective=test/accuracy", "not on test data"),
        ("objective=nonprivate/train_loss", "not on test data or noiseless training data"),
        ("objective=val/accuracy", "needs records held out: set data.val_size"),
        ("objective=5", "objective must be the name of a metric"),
    ],
}


@pytest.mark.parametrize(
    ("words", "message"),
    [case for cases in CASES.values() for case in cases],
    ids=lambda text: text[-99:],  # pytest numbers what is longer, and numbers change
)
def test_one_line_and_nothing_left(
    words: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if OPTUNA in words:
        pytest.importorskip("optuna", minversion="5")
    monkeypatch.chdir(tmp_path)
    assert main(["train", *FEW, *words.split()]) in (1, 2)
    err = capsys.readouterr().err
    assert err.startswith("dpbench: error: ")
    assert err.count("\n") == 1
    assert message in err
    assert not [*tmp_path.glob("outputs/*/*"), *tmp_path.glob("multirun/*/*")]


@pytest.mark.parametrize(
    ("model", "said", "message"),
    [
        (
            "mnist_cnn",
            ["vocabulary_size"],
            "model.input_shape is missing: it cannot be left out. The data set provides vocabulary_size=3",
        ),
        (
            "char_lstm",
            ["length"],
            "model.vocabulary_size is missing: .* The data set provides length=3: choose",
        ),
    ],
)
def test_a_model_that_does_not_fit_is_told(model: str, said: list[str], message: str) -> None:
    cfg = OmegaConf.masked_copy(composed(f"model={model}"), ["model", "module", "optimizer", "schedule"])
    with pytest.raises(ConfigurationError, match=message):
        module_for(plain(cfg), dict.fromkeys(said, 3))


def test_a_network_for_images_takes_no_table() -> None:
    cfg = OmegaConf.masked_copy(composed("model=mnist_cnn"), ["model", "module", "optimizer", "schedule"])
    with pytest.raises(ConfigurationError, match=r"model.input_shape must be a list of 3.*not \(8,\)\."):
        module_for(plain(cfg), {"input_shape": (8,), "num_classes": 3})


PARTS = ["logger=none", "hydra/job_logging=none", "hydra/hydra_logging=none"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "experiment=digits_gan module=classifier",
            "there is no key module.discriminator_steps",
        ),
        ("model=conv_gan optimizer=adam", "the model is a generator and a discriminator: add module=gan"),
        ("experiment=digits_gan model=mlp", "add model=mlp_gan or conv_gan"),
        ("experiment=digits_gan trainable=bias", "trainable: a GAN trains all of its two networks"),
        ("experiment=digits_gan data.scale=standard", "leave data.scale=symmetric"),
        ("experiment=digits_gan schedule=cosine", "leave schedule=constant"),
        (
            "experiment=digits_gan module.generator_optimizer._target_=torch.nn.Linear",
            "must be Optimizer or LRScheduler",
        ),
        ("experiment=digits_gan module.generator_optimizer.lr=-1", "generator_optimizer.lr must be a positive number"),
        ("+strategy.quantile=0.5", "there is no key strategy.quantile"),
        ("model=none", "ImageClassifier needs one: choose another model than model=none"),
        ("optimizer=none", "ImageClassifier needs one: choose another optimizer than optimizer=none"),
    ],
)
def test_parts_that_do_not_go_together(
    words: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", *PARTS, *words.split()]) == 1
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1
    assert not [*tmp_path.glob("outputs/*/*")]


MINE = {
    "optimizer/mine.yaml": "defaults: [sgd]\nlr: [\n",
    "optimizer/good.yaml": "_target_: torch.optim.SGD\n_partial_: true\nlr: 0.1\n",
}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("optimizer=mine", 'optimizer/mine.yaml", line 3'),
        ("optimizer=good model.hiden=[4]", "there is no key model.hiden. Did you mean model.hidden?"),
        ("optimizer=good optimizer.ls=1", "there is no key optimizer.ls"),
    ],
)
def test_configuration_of_ones_own(
    words: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in MINE.items():
        (tmp_path / "mine" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "mine" / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    test_one_line_and_nothing_left(f"--config-dir=mine {words}", message, tmp_path, monkeypatch, capsys)


def test_a_mode_that_wandb_does_not_know(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_MODE", "banana")
    message = "$WANDB_MODE must be online, offline, disabled or shared, not 'banana'"
    test_one_line_and_nothing_left("logger=wandb", message, tmp_path, monkeypatch, capsys)


@pytest.mark.parametrize(("name", "what"), [("config.yaml", "mine: 1"), ("result.json", "{}")])
def test_a_folder_with_files_of_ones_own(
    name: str, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / name).write_text(what)
    message = f"holds a {name} that is of no run of dpbench"
    test_one_line_and_nothing_left("hydra.run.dir=own", message, tmp_path, monkeypatch, capsys)
    assert [path.name for path in (tmp_path / "own").iterdir() if path.name != ".lock"] == [name]


@pytest.mark.parametrize("words", ["-m seed=0,1 hydra.sweep.dir=s", "hydra.run.dir=s"])
def test_an_error_of_the_system_is_one_line(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(config: Any, reporter: Any, **_: Any) -> None:
        raise IsADirectoryError(21, "Is a directory", "metrics.csv")

    monkeypatch.setattr("dpbench.harness.run.train.train_job", fails)
    test_one_line_and_nothing_left(words, "Is a directory", tmp_path, monkeypatch, capsys)


@pytest.mark.parametrize("threshold", ["-1", "0"])
def test_priors_need_a_threshold(threshold: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["priors", *FEW, "strategy=discretized", f"strategy.correction_threshold={threshold}"]) == 1
    err = capsys.readouterr().err
    assert "correction_threshold must be" in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("calibrate --epsilon 3 --delta 1e-5 --sample-rate .01 --steps 10 --microbatch-size 0", "at least 1, not 0"),
        ("reproduce list foo", "list takes no further words"),
        ("reproduce pyvacy/mnist --status trainer=foo", "there is no trainer=foo. Known: cpu"),
        ("reproduce pyvacy/mnist --status --replace", "--status writes nothing that --replace could overwrite"),
        ("reproduce nowhere.yaml", "nowhere.yaml is not there: name a definition"),
        pytest.param(f"resume {__file__}", "test_input.py is a file: name the folder of a run", id="resume a file"),
        pytest.param(f"train hydra.run.dir={__file__}", "test_input.py: a file is in the way", id="train in a file"),
        ("reproduce gradient_compression/table1 --status launcher=foo", "there is no launcher=foo. Known: "),
    ],
)
def test_other_commands(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == 1
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1


def test_letters_that_a_terminal_cannot_print(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(raw, encoding="ascii"))
    monkeypatch.setattr("dpbench.cli.results._table", lambda options: Answer("σ = 1"))
    assert main(["table", "x"]) == 0
    sys.stdout.flush()
    assert raw.getvalue() == b"? = 1\n"


HUGE = f"calibrate --epsilon 3 --delta 1e-5 --steps 10 --batch-size 5 --population {10**400}"
FILES = [f"reproduce claims {option} {Path(__file__)}{end}" for option in ("--out", "--runs") for end in ("", "/x")]
FILES += [f"{words} --plot {Path(__file__)}/x.png" for words in ("account x", "compare x")]
USAGE = [
    HUGE,
    *FILES,
    "trian",
    "xyzzy",
    "resume",
    "account",
    "account x --delta abc",
    "table --csv -q",
    "table x --csv --json",
    "workflow --noise-multipliers 0,1",
    "workflow --noise-multipliers a",
    "account x --plot a.pdf",
]


EMPTY = ["table ''", "compare ''", "sample '' --num-samples 3 --out x", "resume ''"]


@pytest.mark.parametrize("words", [*USAGE, *EMPTY, "compare x --plot ."])
def test_wrong_usage_is_one_line(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(shlex.split(words))
    err = capsys.readouterr().err
    assert stop.value.code == 2
    assert err.startswith("dpbench: error: ")
    assert err.count("\n") == 1
    assert "KEY=VALUE" not in err  # which may be left out


def test_a_command_that_is_nearly_right(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["trian"])
    assert "Did you mean train?" in capsys.readouterr().err


def test_flags_may_stand_between_overrides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", "data=mnist", "--cfg", "job", "seed=5"]) == 0
    assert "seed: 5" in capsys.readouterr().out


def test_a_run_of_a_sweep_that_fails_is_told_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What only the data can tell; the other runs are made."""
    monkeypatch.chdir(tmp_path)
    words = [
        "-m",
        *FEW,
        "data.val_size=5000,100",
        "hydra.sweep.dir=sweep",
        "hydra.sweep.subdir='${hydra.job.num}'",
    ]
    assert main(["train", *words]) == 1
    (error,) = capsys.readouterr().err.splitlines()
    assert error.startswith("dpbench: error: data.val_size=5000 leaves nothing")
    assert (tmp_path / "sweep" / "1" / "result.json").is_file()


@pytest.mark.parametrize(
    ("of_hydra", "choice", "end"),
    [
        ("submitit_slurm", "submitit", '[submitit]".'),
        ("submitit_local", "submitit", '[submitit]".'),
        ("dpbench_ray", "ray", "(in a checkout of dpbench)."),
    ],
)
def test_a_launcher_that_is_missing_is_told_with_its_installation(of_hydra: str, choice: str, end: str) -> None:
    told = command_line.explain(MissingConfigException("", f"hydra/launcher/{of_hydra}", []))
    assert told.startswith(f"launcher={choice} is not installed: pip install ") and told.endswith(end)


@pytest.mark.parametrize(
    ("options", "count"),
    [
        ({}, 1),
        ({"devices": 2}, 2),
        ({"devices": "auto"}, 1),
        ({"devices": "auto", "accelerator": "gpu"}, 3),
        ({"devices": -1, "accelerator": "gpu"}, 3),
        ({"devices": [1, 2], "accelerator": "gpu"}, 2),
    ],
)
def test_how_many_processes_are_started(options: dict[str, Any], count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert processes_to_start({"accelerator": "cpu", **options}) == count
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert processes_to_start({"accelerator": "cpu", **options}) == 1  # somebody has started them


def test_a_trainer_alone_starts_no_process() -> None:
    """Lightning's own choice would start `dpbench train` again as a script, which it is not."""
    config = {"trainer": {"_target_": "pytorch_lightning.Trainer", "accelerator": "cpu", "devices": 2}}
    trainer = build_trainer(config, alone=True, logger=False, enable_checkpointing=False)
    assert trainer.world_size == 1


CLASSIFIER: dict[str, Any] = {"module": {"_target_": "dpbench.modules.ImageClassifier"}}


def test_a_sweeper_chooses_on_what_was_held_out() -> None:
    record = {"metrics": {"val/accuracy": 0.5, "test/accuracy": 0.75, "private/loss": 2.0, "val/loss": None}}
    held_out = {"data": {"val_size": 200}, **CLASSIFIER}
    assert objective.values_of(record, held_out) == [0.5]
    both = {**held_out, "objective": ["private/loss", "val/accuracy"]}
    assert objective.values_of(record, both) == [2, 0.5]
    without = {"data": {"val_size": 0}, **CLASSIFIER}
    assert objective.values_of(record, without) == []  # and not test accuracy
    for config in (without, {"data": {"val_size": 9}, "module": {"_target_": "dpbench.modules.GAN"}}):
        with pytest.raises(ConfigurationError, match="only test data are there"):
            objective.refuse_choice(config, ["maximize"])
    with pytest.raises(ConfigurationError, match=r"would choose the least val/accuracy: hydra.sweeper.direction"):
        objective.refuse_choice(both, ["minimize", "minimize"])
    objective.refuse_choice(both, ["minimize", "maximize"])
    with pytest.raises(ConfigurationError, match="objective=val/loss is not finite"):
        objective.values_of(record, {**held_out, "objective": "val/loss"})
    with pytest.raises(ConfigurationError, match="objective=val/f1 was not measured; .*val/accuracy"):
        objective.values_of(record, {**held_out, "objective": "val/f1"})


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [("val_size", 0, []), ("val_users", 0, []), ("val_users", 9, ["val/accuracy"])],
)
def test_an_objective_needs_records_or_users_that_are_held_out(option: str, value: int, expected: list[str]) -> None:
    """Data by users have a validation loader also where nobody is held out: it shows test examples."""
    target = "dpbench.data.UserDataModule" if option == "val_users" else "dpbench.data.ImageDataModule"
    config = {"data": {"_target_": target, option: value}, **CLASSIFIER}
    assert objective.objectives_of(config) == expected
    if not expected:
        with pytest.raises(ConfigurationError, match="only test data are there"):
            objective.refuse_choice(config, ["maximize"])
