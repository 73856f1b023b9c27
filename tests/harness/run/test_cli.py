"""The real command line, in processes of its own, on the digits."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch

from dpbench.cli import main
from dpbench.errors import ConfigurationError
from dpbench.harness.run._resume import prepare_folder
from dpbench.harness.run.saved_config import SCHEMA, write_config
from dpbench.harness.runs.folder import Run, RunFolder
from dpbench.privacy.accounting.ledger import read_ledger
from tests.support.cli import PRIVATE, TINY, dpbench, dpbench_in_a_process, signalled, train, weights


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A private run of 60 steps, with wandb offline."""
    folder = tmp_path_factory.mktemp("finished")
    return train(folder, "run", *PRIVATE, "trainer.max_steps=60", "logger=wandb", "trainer.log_every_n_steps=10")


def test_run_folder(finished: Path) -> None:
    names = {path.name for path in finished.iterdir()}
    assert {".hydra", "metrics.csv", "ledger.jsonl", "checkpoints", "curves.png", "wandb", "result.json"} <= names
    assert (finished / "curves.png").read_bytes()[:4] == b"\x89PNG"
    assert list(finished.glob("wandb/offline-run-*"))
    assert not [name for name in names if name.startswith(".curves") or name.startswith(".result")]


def test_result(finished: Path) -> None:
    result = json.loads((finished / "result.json").read_text())
    assert result["steps"] == 60
    assert result["seed"] == 0
    assert 0.1 < result["metrics"]["test/accuracy"] <= 1
    assert all(key.startswith(("test/", "val/", "nonprivate/", "privacy/")) for key in result["metrics"])
    privacy = result["privacy"]
    assert 0 < privacy["epsilon"]["pld"] < privacy["epsilon"]["rdp"]
    assert (privacy["delta"], privacy["unit"]) == (1e-4, "example")
    assert privacy["neighbouring_relation"] == "add_or_remove_one"
    assert privacy["population"] == 1437
    assert len(result["config_hash"]) == 16
    assert torch.__version__.startswith(result["versions"]["torch"])
    assert result["hardware"]["cores"] >= 1
    assert result["config"]["model"]["hidden"] == [16]
    assert {"commit", "seconds"} <= set(result)


def test_metrics(finished: Path) -> None:
    table = pd.read_csv(finished / "metrics.csv")
    assert table["privacy/epsilon"].dropna().is_monotonic_increasing
    result = json.loads((finished / "result.json").read_text())
    assert table["privacy/epsilon"].dropna().iloc[-1] == pytest.approx(result["privacy"]["epsilon"]["rdp"])
    assert "nonprivate/train_loss" in table
    assert table["test/accuracy"].notna().sum() >= 3


def test_account(finished: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def account(*words: str) -> str:
        assert main(["account", *words]) == 0
        return capsys.readouterr().out

    monkeypatch.chdir(finished)
    result = json.loads((finished / "result.json").read_text())["privacy"]
    for accountant in ("rdp", "pld"):
        facts = json.loads(account(".", "--accountant", accountant, "--json"))
        assert facts["epsilon"] == pytest.approx(result["epsilon"][accountant])
        assert (facts["steps"], facts["delta"], facts["accountant"]) == (60, 1e-4, accountant)
        assert (facts["unit"], facts["neighbouring_relation"]) == ("example", "add_or_remove_one")
    assert json.loads(account("ledger.jsonl", "--delta", "1e-6", "--json"))["epsilon"] > result["epsilon"]["rdp"]
    assert "epsilon" in account(".")


@pytest.mark.slow
def test_account_of_damaged_ledgers(finished: Path, tmp_path: Path) -> None:
    lines = (finished / "ledger.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "cut.jsonl").write_text("".join(lines[:31]) + lines[31][:20])
    out, err = dpbench(tmp_path, "account", "cut.jsonl", "--json", status=3)
    assert json.loads(out)["steps"] == 30
    assert json.loads(out)["complete"] is False
    assert "line 32 is cut off" in err
    (tmp_path / "bad.jsonl").write_text("".join(lines[:11]) + "#\n" + "".join(lines[12:]))
    out, err = dpbench(tmp_path, "account", "bad.jsonl", "--json", status=3)
    assert json.loads(out)["steps"] == 59
    assert json.loads(out)["complete"] is False
    assert "line 12 is damaged" in err
    text, _ = dpbench(tmp_path, "account", "bad.jsonl", status=3)
    assert " unproven" in text
    for name, message in (("absent", "No such file"), ("cut.jsonl", "unknown accountant")):
        _, err = dpbench(tmp_path, "account", name, "--accountant", "magic" if name != "absent" else "rdp", status=1)
        assert err.count("\n") == 1
        assert message in err


@pytest.mark.slow
def test_the_baseline_goes_the_same_way(tmp_path: Path) -> None:
    run = train(tmp_path, "run", "strategy=none", "trainer.max_steps=150", "optimizer.lr=0.5")
    result = json.loads((run / "result.json").read_text())
    assert result["privacy"]["epsilon"] == {"rdp": None, "pld": None}
    assert result["metrics"]["test/accuracy"] > 0.7
    assert not (run / "ledger.jsonl").exists()
    _, err = dpbench(tmp_path, "account", "run", status=1)
    assert "trained without privacy" in err


@pytest.mark.slow
def test_validation_split_is_not_trained_on(tmp_path: Path) -> None:
    run = train(tmp_path, "run", *PRIVATE, "trainer.max_steps=40", "data.val_size=437", "data.split=permutation")
    result = json.loads((run / "result.json").read_text())
    assert result["privacy"]["population"] == 1000
    assert "val/accuracy" in result["metrics"]
    assert pd.read_csv(run / "metrics.csv")["test/accuracy"].notna().sum() == 1


STEPS = 250
LONG = [*PRIVATE, f"trainer.max_steps={STEPS}", "run.checkpoint_every_n_steps=37", "+optimizer.momentum=0.9"]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("whole"), "run", *LONG)


def same_result(run: Path, other: Path) -> None:
    assert torch.equal(weights(run), weights(other))
    assert (run / "ledger.jsonl").read_bytes() == (other / "ledger.jsonl").read_bytes()
    mine, theirs = (json.loads((folder / "result.json").read_text()) for folder in (run, other))
    assert mine["metrics"]["test/accuracy"] == theirs["metrics"]["test/accuracy"]
    assert mine["privacy"] == theirs["privacy"]
    assert mine["config_hash"] == theirs["config_hash"]
    left, right = (pd.read_csv(folder / "metrics.csv")["test/accuracy"].dropna().tolist() for folder in (run, other))
    assert set(right) <= set(left)  # an interrupted run also measures where it stops


@pytest.mark.slow
def test_killed_and_resumed_is_bit_identical(tmp_path: Path, uninterrupted: Path) -> None:
    run = tmp_path / "run"
    signalled(tmp_path, signal.SIGKILL, 200, "hydra.run.dir=run", *LONG)
    assert not (run / "result.json").exists()
    before = len(read_ledger(run / "ledger.jsonl").releases)
    assert before == 200
    step = torch.load(run / "checkpoints/last.ckpt", weights_only=False)["global_step"]
    assert step < before  # some releases have to be replayed
    dpbench(tmp_path, "resume", "run")
    same_result(run, uninterrupted)


@pytest.mark.slow
def test_killed_before_any_checkpoint(tmp_path: Path, uninterrupted: Path) -> None:
    run = tmp_path / "run"
    words = [*LONG[:-2], f"run.checkpoint_every_n_steps={STEPS - 1}", LONG[-1]]
    signalled(tmp_path, signal.SIGKILL, 20, "hydra.run.dir=run", *words)
    assert not (run / "checkpoints/last.ckpt").exists()
    dpbench(tmp_path, "resume", "run")
    assert torch.equal(weights(run), weights(uninterrupted))
    assert (run / "ledger.jsonl").read_bytes() == (uninterrupted / "ledger.jsonl").read_bytes()


@pytest.mark.slow
def test_ctrl_c_saves_everything_and_says_how_to_go_on(tmp_path: Path, uninterrupted: Path) -> None:
    run = tmp_path / "run"
    status, err = signalled(tmp_path, signal.SIGINT, 100, "hydra.run.dir=run", *LONG)
    assert status == 130
    assert "dpbench resume" in err
    partial = json.loads((run / "partial_result.json").read_text())
    assert partial["steps"] == len(read_ledger(run / "ledger.jsonl").releases) < STEPS
    assert partial["privacy"]["epsilon"]["rdp"] > 0
    assert (run / "checkpoints/last.ckpt").exists()
    _, err = dpbench(tmp_path, "train", *TINY, "hydra.run.dir=run", *LONG, status=1)
    assert "holds an unfinished run: continue it with `dpbench resume" in err
    dpbench(tmp_path, "resume", "run")
    same_result(run, uninterrupted)
    assert not (run / "partial_result.json").exists()
    _, err = dpbench(tmp_path, "resume", "run", status=1)
    assert "holds a finished run" in err


@pytest.mark.usefixtures("here")
def test_commands_about_a_folder_with_a_blank_can_be_pasted(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("train", *TINY, *PRIVATE, "trainer.max_steps=2", "+trainer.enable_progress_bar=false")
    assert main([*words, "hydra.run.dir=my run", "logger=wandb"]) == 0
    out = capsys.readouterr().out
    assert "dpbench report 'my run'" in out and "wandb sync 'my run/wandb/offline-run-" in out
    Path("my run/result.json").unlink()
    assert main([*words, "hydra.run.dir=my run"]) == 1
    assert "continue it with `dpbench resume '" in capsys.readouterr().err


@pytest.mark.slow
def test_two_ctrl_c_stop_at_once_and_say_how_to_go_on(tmp_path: Path, uninterrupted: Path) -> None:
    run = tmp_path / "run"
    status, err = signalled(tmp_path, signal.SIGINT, 120, "hydra.run.dir=run", *LONG, times=2)
    assert status == 130 and "Traceback" not in err
    assert "interrupted. The last checkpoint and the ledger are kept; continue with: dpbench resume " in err
    assert not (run / "partial_result.json").exists()
    dpbench(tmp_path, "resume", "run")
    same_result(run, uninterrupted)


@pytest.mark.slow
def test_resume_with_other_settings_counts_everything(tmp_path: Path) -> None:
    run = tmp_path / "run"
    signalled(tmp_path, signal.SIGKILL, 60, "hydra.run.dir=run", *LONG)
    before = len(read_ledger(run / "ledger.jsonl").releases)
    saved = torch.load(run / "checkpoints/last.ckpt", weights_only=False)["global_step"]
    dpbench(tmp_path, "resume", "run", "optimizer.lr=0.01", "trainer.max_steps=200")
    book = read_ledger(run / "ledger.jsonl")
    assert len(book.headers) == 2
    assert len(book.releases) == before + 200 - saved
    assert json.loads((run / "result.json").read_text())["privacy"]["releases"] == len(book.releases)


@pytest.mark.long
def test_target_epsilon_and_two_processes(tmp_path: Path) -> None:
    words = [
        "strategy.noise_multiplier=null",
        "strategy.target_epsilon=4",
        "strategy.delta=1e-4",
        "trainer.max_steps=60",
    ]
    one = train(tmp_path, "one", *words)
    dpbench_in_a_process(tmp_path, "train", *TINY, "hydra.run.dir=two", *words, "trainer=ddp_cpu")
    two = tmp_path / "two"
    torch.testing.assert_close(weights(two), weights(one), rtol=1e-3, atol=1e-4)
    results = [json.loads((run / "result.json").read_text()) for run in (one, two)]
    assert 3.99 < results[0]["privacy"]["epsilon"]["rdp"] <= 4
    for result in results:
        del result["privacy"]["ledger"]  # sums of several processes round otherwise, and with them their checksums
    assert results[0]["privacy"] == results[1]["privacy"]
    assert results[1]["steps"] == 60
    curves = [pd.read_csv(run / "metrics.csv", index_col="step") for run in (one, two)]
    assert curves[0]["test/accuracy"].dropna().index.equals(curves[1]["test/accuracy"].dropna().index)
    assert curves[1]["privacy/epsilon"].dropna().index.equals(curves[0]["privacy/epsilon"].dropna().index)
    assert set(results[0]["metrics"]) == set(results[1]["metrics"])


@pytest.mark.slow
def test_budget_beside_noise_stops(tmp_path: Path) -> None:
    run = train(tmp_path, "run", *PRIVATE, "strategy.target_epsilon=3", "trainer.max_steps=5000")
    result = json.loads((run / "result.json").read_text())
    assert 0 < result["steps"] < 5000
    assert result["privacy"]["epsilon"]["rdp"] <= 3


@pytest.mark.slow
def test_runs_of_a_sweep_share_a_seed_but_no_noise(tmp_path: Path) -> None:
    """With the noise of another learning rate, the difference of two releases would be a difference of private sums."""
    words = [*PRIVATE, "trainer.max_steps=1", "strategy.noise_multiplier=1000"]
    runs = [train(tmp_path, f"r{i}", *words, f"optimizer.lr={lr}") for i, lr in enumerate((0.1, 0.2))]
    one, two = (weights(run) for run in runs)
    start = 2 * one - two  # w0 - lr·g with equal g would put w0 here
    assert float(start.abs().max()) > 1  # but w0 lies within (-0.2, 0.2)
    budget = [
        "strategy.noise_multiplier=null",
        "strategy.delta=1e-4",
        "strategy.target_epsilon=0.01",
        "optimizer.lr=100",
    ]
    ends = [
        train(tmp_path, f"e{n}", *budget, f"trainer.max_steps={n}", "run.checkpoint_every_n_steps=1") for n in (1, 2)
    ]
    noises = [weights(end) for end in ends]  # far more noise than gradient; step 2 adds its own
    correlation = torch.corrcoef(torch.stack(noises))[0, 1]
    assert abs(float(correlation)) < 0.3


@pytest.mark.slow
def test_secure_runs_differ(tmp_path: Path) -> None:
    words = [*PRIVATE, "strategy.secure=true", "trainer.max_steps=10"]
    runs = [train(tmp_path, name, *words) for name in ("a", "b")]
    assert not torch.equal(weights(runs[0]), weights(runs[1]))


@pytest.mark.slow
def test_sweep(tmp_path: Path) -> None:
    words = [*TINY, *PRIVATE, "trainer.max_steps=10", "hydra.sweep.dir=sweep", "launcher=joblib", "seed=0,1"]
    dpbench_in_a_process(tmp_path, "train", "-m", *words)
    results = [json.loads(path.read_text()) for path in sorted((tmp_path / "sweep").glob("*/result.json"))]
    assert sorted(result["seed"] for result in results) == [0, 1]
    assert results[0]["config_hash"] != results[1]["config_hash"]


REFUSED: list[tuple[list[str], str]] = [
    (["data=mnst"], "there is no data=mnst. Did you mean data=mnist?"),
    (["strategy=dpsdg"], "Did you mean strategy=dpsgd?"),
    (["strategy.noise_multiplyer=1"], "Did you mean strategy.noise_multiplier?"),
    (["strategy.noise_multiplier=much"], "(strategy=none trains without privacy) or null, not 'much'"),
    (["strategy.noise_multiplier=0"], "noise_multiplier must be a positive number"),
    (["max_steps=1"], "there is no key max_steps. Did you mean trainer.max_steps?"),
    (["epsilon=3"], "there is no key epsilon. Known: "),
    (["strategy.target_delta=1e-5"], "there is no key strategy.target_delta. Did you mean strategy.delta?"),
    (["strategy.epochs=3"], "(on the command line trainer.max_steps)"),
    (["trainer.max_steps = 1"], "invalid override 'trainer.max_steps = 1'"),
    (["optimizer.lrr=1"], "Did you mean optimizer.lr? Known: lr."),
    (["strateg.target_epsilon=3"], "there is no key strateg. Did you mean strategy?"),
    (["trainer.max_steps=abc"], "trainer.max_steps must be a positive whole number, or -1 for no limit, not 'abc'"),
    (["data.sampling=shuffled"], "no accountant covers 'shuffled_epochs'"),
    (["data=cifar10", "data.root=nowhere", "data.download=false"], "nowhere/cifar-10-batches-py"),
    (["model=mnist_cnn"], "mnist_cnn needs images of at least 14×14 pixels"),
    (["+trainer.gradient_clip_val=1"], "gradient_clip_val"),
    (["hydra.run.dir=/dev/null/run"], "/dev/null"),
    (["data.expected_batch_size=0"], "expected_batch_size must lie between"),
    (["trainer.precision=16-mixed"], "precision=16-mixed scales the loss"),
    (["seed=-1"], "seed must be a whole number"),
    (["seed=abc"], "seed must be a whole number"),
    (["trainer.max_steps=0"], "must be a positive whole number"),
    (["optimizer.lr=abc"], "optimizer.lr must be a positive number, not 'abc'"),
    (["foo"], "invalid override 'foo'"),
    (
        [
            "data.sampling=fixed_size",
            "strategy.accountant=pld",
            "strategy.noise_multiplier=null",
            "strategy.target_epsilon=3",
        ],
        "pld accountant does not cover 'fixed_size'",
    ),
    (["strategy=vector_groups", "strategy.groups=foo"], "strategy.groups must be a dictionary in which"),
    (["strategy=vector_groups", "strategy.groups={a: 3}"], "strategy.groups must be a dictionary in which"),
    (["strategy=vector_groups", "strategy.groups={a: model.1.*}"], "no group takes model.3.weight, model.3.bias"),
    (
        ["strategy=vector_groups", "strategy.split=joint", "strategy.scales=5"],
        "scales must be a dictionary in which each value is a number or null, not 5",
    ),
    (["strategy.metrics=[accuracy]"], "metrics must be a dictionary in which each value is a number or null, not ["),
    (
        ["strategy.metrics={accuracy: x}"],
        "metrics must be a dictionary in which each value is a number or null, not {",
    ),
    (["strategy.metrics={f1: 1}"], "offers no metric f1; it offers accuracy, loss, class_counts"),
    (["strategy=adaptive_quantile", "strategy.quantile=1.5"], "quantile must lie strictly between 0 and 1"),
    (["strategy=discretized", "strategy.discretization_threshold=-1"], "discretization_threshold must be"),
    (["strategy=discretized", "strategy.priors=[0.5,0.5,0.5]"], "three probabilities"),
    (["strategy=adaptive_quantile", "strategy.count_noise_std=0.1"], "Theorem 1 has no solution"),
    (["strategy.microbatch_size=7"], "microbatch_size=7 does not fit batches of 64 records"),
    (["schedule=cosine", "schedule.T_max=abc"], "schedule.T_max must be a whole number"),
    (["schedule=cosine", "trainer.max_steps=-1", "trainer.max_epochs=1"], "T_max must be at least 1"),
]


@pytest.mark.parametrize("case", range(len(REFUSED)), ids=lambda i: REFUSED[i][0][0])
def test_bad_input_is_one_clear_line(
    case: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words, message = REFUSED[case]
    monkeypatch.chdir(tmp_path)
    small = [word for word in TINY if not word.startswith("model") or "model" not in words[0]]
    assert main(["train", *small, *PRIVATE, *words]) == 1
    err = capsys.readouterr().err
    lines = [line for line in err.splitlines() if line.strip()]
    assert len(lines) == 1, err
    assert lines[0].startswith("dpbench: error: ")
    assert message in lines[0]
    assert not list(tmp_path.glob("outputs/*/*"))  # nothing is left behind


@pytest.mark.slow
def test_refused_in_a_process_of_its_own(tmp_path: Path) -> None:
    _, err = dpbench_in_a_process(tmp_path, "train", *TINY, "strategy.noise_multiplier=0", status=1)
    assert err.count("\n") == 1
    assert err.startswith("dpbench: error: noise_multiplier must be a positive number")


@pytest.mark.slow
def test_wrong_usage(tmp_path: Path) -> None:
    _, err = dpbench_in_a_process(tmp_path, "trian", status=2)
    assert err == "dpbench: error: there is no command trian. Did you mean train? See dpbench --help.\n"
    _, err = dpbench(tmp_path, "resume", "nowhere", status=1)
    assert "nowhere holds no run of dpbench" in err


@pytest.mark.slow
def test_help_is_quick_and_shows_examples(tmp_path: Path) -> None:
    out, _ = dpbench_in_a_process(tmp_path, "--help")
    assert "dpbench train data=mnist" in out
    late = "{'torch', 'hydra', 'wandb', 'pandas'}"
    code = f"import sys, dpbench.cli as c; c.parser(); assert not {late} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
    out, _ = dpbench(tmp_path, "train", "--help")
    assert "densenet40" in out


@pytest.mark.slow
def test_cfg_job_prints_the_configuration(tmp_path: Path) -> None:
    out, _ = dpbench(tmp_path, "train", "data=mnist", "--cfg", "job", "--resolve")
    assert "noise_multiplier: 1.1" in out
    assert not list(tmp_path.iterdir())


def test_unwritable_folder_and_two_runs_at_once(tmp_path: Path) -> None:
    config = {"run": {"resume": False}, "data": {}, "strategy": {}}
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match="cannot be written: Not a directory"):
        prepare_folder(Run(RunFolder(tmp_path / "file" / "run"), config))
    assert prepare_folder(Run(RunFolder(tmp_path / "run"), config)) is None
    with pytest.raises(ConfigurationError, match="unfinished run"):
        prepare_folder(Run(RunFolder(tmp_path / "run"), config))
    (tmp_path / "left").mkdir()
    (tmp_path / "left" / "ledger.jsonl").touch()
    with pytest.raises(ConfigurationError, match="holds the ledger of another run"):
        prepare_folder(Run(RunFolder(tmp_path / "left"), config, private=False))


def test_an_evaluation_on_the_way_is_not_of_the_end(tmp_path: Path) -> None:
    config = {"run": {"resume": True, "schema": SCHEMA}, "data": {}, "strategy": {}}
    run = Run(RunFolder(tmp_path), config)
    write_config(run)
    run.folder.evaluation.touch()
    prepare_folder(run)
    assert not run.folder.evaluation.exists()


@pytest.mark.slow
def test_a_refused_run_changes_nothing(tmp_path: Path, finished: Path) -> None:
    files = [path for path in finished.rglob("*") if path.is_file() and not {".hydra", "wandb"} & {*path.parts}]
    before = {path: path.read_bytes() for path in files}
    _, err = dpbench(tmp_path, "train", *TINY, f"hydra.run.dir={finished}", "seed=7", status=1)
    assert "holds a finished run" in err
    assert all(path.read_bytes() == content for path, content in before.items() if path.name != "train.log")
    dpbench(tmp_path, "train", "strategy.noise_multiplier=0", "hydra.run.dir=new/run", status=1)
    assert not (tmp_path / "new" / "run").exists()


@pytest.mark.slow
def test_sigterm_saves_and_says_so(tmp_path: Path) -> None:
    status, err = signalled(tmp_path, signal.SIGTERM, 60, "hydra.run.dir=run", *LONG)
    assert status == 143
    assert "dpbench resume" in err
    assert (tmp_path / "run/partial_result.json").exists()
    assert (tmp_path / "run/checkpoints/last.ckpt").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.slow
def test_a_signal_ends_the_whole_sweep(tmp_path: Path, number: signal.Signals) -> None:
    sweep = ["-m", *LONG[:-1], "seed=1,2", "hydra.sweep.dir=sweep", "run.name=x"]
    status, err = signalled(tmp_path, number, 60, *sweep)
    assert status == 128 + number, err
    assert "dpbench resume" in err
    assert not list((tmp_path / "sweep").glob("1-x*"))


@pytest.mark.slow
def test_ctrl_c_with_two_processes(tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = ["hydra.run.dir=run", *LONG, "trainer=ddp_cpu"]
    status, err = signalled(tmp_path, signal.SIGINT, 60, *words)
    assert status == 130, err
    partial = json.loads((run / "partial_result.json").read_text())
    assert partial["steps"] == len(read_ledger(run / "ledger.jsonl").releases) < STEPS


@pytest.mark.slow
def test_no_process_outlives_a_parent_that_is_killed(tmp_path: Path) -> None:
    """It would train on, and write to the ledger of the run that somebody resumes."""
    words = [*PRIVATE, "trainer.max_steps=60", "trainer.devices=2", "+trainer.strategy=ddp_fork"]
    status, _ = signalled(tmp_path, signal.SIGKILL, 20, "hydra.run.dir=run", *words)  # returns when all have ended
    assert status == -signal.SIGKILL
    assert len(read_ledger(tmp_path / "run/ledger.jsonl").releases) == 20
    dpbench(tmp_path, "resume", "run")
    assert json.loads((tmp_path / "run/result.json").read_text())["privacy"]["releases"] == 60


@pytest.mark.slow
def test_what_is_held_out_is_looked_at_after_the_last_step(tmp_path: Path) -> None:
    """Whatever the interval of validations, and wherever a run was interrupted."""
    run = train(tmp_path, "run", *PRIVATE, "trainer.max_steps=5", "data.val_size=200")
    result = json.loads((run / "result.json").read_text())
    logged = pd.read_csv(run / "metrics.csv", index_col="step")["val/accuracy"].dropna()
    assert logged.to_dict() == {5: pytest.approx(result["metrics"]["val/accuracy"])}
    (run / "result.json").unlink()
    dpbench(tmp_path, "resume", "run")
    again = json.loads((run / "result.json").read_text())
    assert again["metrics"] == result["metrics"]


@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed", "64-true"])
@pytest.mark.slow
def test_precisions(tmp_path: Path, precision: str) -> None:
    run = train(tmp_path, "run", *PRIVATE, "trainer.max_steps=20", f"trainer.precision={precision}")
    assert json.loads((run / "result.json").read_text())["steps"] == 20


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["adaptive_quantile", "discretized", "clip_only"])
def test_strategies_schedules_and_diagnostics_by_a_word(tmp_path: Path, strategy: str) -> None:
    words = [f"strategy={strategy}", "strategy.noise_multiplier=1.0", "schedule=cosine", "diagnostics=gradients"]
    run = train(tmp_path, "run", *words, "trainer.max_steps=25", "trainer.log_every_n_steps=5")
    table = pd.read_csv(run / "metrics.csv")
    assert any(column.startswith("nonprivate/grad_norm/") for column in table)
    assert ("privacy/bound/all" in table) == (strategy == "adaptive_quantile")
    assert (run / "nonprivate_diagnostics.png").exists()
    record = json.loads((run / "result.json").read_text())
    assert (record["privacy"]["delta"] is None) == (strategy == "clip_only")
    assert (run / "ledger.jsonl").exists() == (strategy != "clip_only")
    out, _ = dpbench(tmp_path, "table", "run")
    assert f"| {record['steps']} |" in out and "test accuracy (%)" in out


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ['strategy.groups={hidden: "model.1.*", output: ["model.3.weight", "model.3.bias"]}'],
        [
            'strategy.groups={hidden: "model.1.*", output: "model.3.*"}',
            "strategy.max_grad_norms={hidden: 0.5, output: 1}",
        ],
        ["strategy.split=joint", "strategy.scales={model.1: 2, model.3: 1}", "strategy.max_grad_norm=1.2"],
        ["strategy.metrics={accuracy: 1, loss: 3, class_counts: 1}"],
    ],
    ids=["groups", "bounds", "joint", "metrics"],
)
def test_dictionaries_on_the_command_line(tmp_path: Path, words: list[str]) -> None:
    run = train(tmp_path, "run", *PRIVATE, "strategy=vector_groups", *words, "trainer.max_steps=5")
    queries = [query.name for query in read_ledger(run / "ledger.jsonl").releases[0][1].queries]
    wanted = {
        "strategy.groups": ["hidden", "output"],
        "strategy.split": ["joint"],
        "strategy.metrics": ["model.1", "model.3", "metric/accuracy", "metric/loss", "metric/class_counts"],
    }
    assert queries == wanted[words[0].partition("=")[0]]
    if "metrics" in words[0]:
        table = pd.read_csv(run / "metrics.csv")
        assert {"private/accuracy", "private/loss", "private/class_counts/9"} <= set(table)


@pytest.mark.slow
def test_both_epsilons_of_microbatches(tmp_path: Path) -> None:
    run = train(tmp_path, "run", *PRIVATE, "strategy.microbatch_size=8", "trainer.max_steps=5")
    privacy = json.loads((run / "result.json").read_text())["privacy"]
    assert privacy["microbatch_size"] == 8
    assert privacy["epsilon_microbatch"]["rdp"] < privacy["epsilon"]["rdp"]
    out, _ = dpbench(tmp_path, "account", "run")
    assert out.index("epsilon ") < out.index("epsilon microbatch")  # per example first
    assert "nominal" in out
    facts = json.loads(dpbench(tmp_path, "account", "run", "--json")[0])
    assert facts["epsilon_microbatch"] == pytest.approx(privacy["epsilon_microbatch"]["rdp"])


@pytest.mark.slow
def test_a_run_never_changes_between_private_and_not(tmp_path: Path) -> None:
    for name, strategy in (("reference", "clip_only"), ("private", "dpsgd")):
        words = [f"strategy={strategy}", *PRIVATE, "trainer.max_steps=90", "run.checkpoint_every_n_steps=20"]
        signalled(tmp_path, signal.SIGKILL, 25, f"hydra.run.dir={name}", "trainer.log_every_n_steps=5", *words)
    _, err = dpbench(tmp_path, "resume", "reference", "strategy._target_=dpbench.strategies.DPSGD", status=1)
    assert "not made by a private strategy" in err
    _, err = dpbench(tmp_path, "resume", "private", "strategy._target_=dpbench.strategies.ClipOnly", status=1)
    assert "holds a private run" in err


@pytest.mark.slow
def test_priors_from_public_data(tmp_path: Path) -> None:
    out, _ = dpbench(tmp_path, "priors", *TINY, "strategy=discretized", "trainer.max_steps=5")
    override = out.splitlines()[-1]
    assert override.startswith("strategy.priors=[") and not list(tmp_path.iterdir())
    train(tmp_path, "run", *PRIVATE, "strategy=discretized", override, "trainer.max_steps=5")


def test_a_final_test_that_cannot_be_made_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The training is kept, and `resume` with another word ends the run."""
    from dpbench.cli import main

    monkeypatch.chdir(tmp_path)
    words = [*TINY, *PRIVATE, "trainer.max_steps=2", "hydra.run.dir=run"]
    assert main(["train", *words, "+trainer.limit_test_batches=0.5"]) == 1
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("dpbench: error")]
    assert "trainer: You requested to check 0.5 of the" in line
    assert main(["resume", "run", "trainer.limit_test_batches=1.0"]) == 0
    assert (tmp_path / "run/result.json").exists()


@pytest.mark.long
def test_the_command_that_calibrate_prints_meets_the_risk(tmp_path: Path) -> None:
    words = ["--advantage", "0.3", "--population", "300", "--batch-size", "30", "--steps", "20"]
    out, _ = dpbench(tmp_path, "calibrate", "--json", *words)
    command = json.loads(out)["train"].removeprefix("dpbench train ").split()
    dpbench(tmp_path, "train", *TINY, "data.train_size=300", *command, "hydra.run.dir=run")
    privacy = json.loads((tmp_path / "run" / "result.json").read_text())["privacy"]
    assert privacy["population"] == 300
    assert 0.299 < privacy["membership"]["advantage"] <= 0.3
