"""wandb as its users expect it, read back from the files that `wandb sync` uploads."""

from __future__ import annotations

import signal
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import wandb
import yaml
from wandb.sdk.launch.sweeps.utils import create_sweep_command_args
from wandb.sdk.lib.config_util import save_config_file_from_dict

from dpbench.cli import main
from dpbench.errors import Interrupted
from dpbench.harness.reports.end_of_run import EndOfRun
from dpbench.harness.run import logs
from dpbench.harness.run.logs import Origin
from dpbench.harness.run.train import train
from dpbench.harness.runs.folder import Run, RunFolder
from tests.support.offline import SMALL, config_of, only, read_offline
from tests.support.signalled import Signals

pytestmark = pytest.mark.usefixtures("here")
ROOT = Path(__file__).parents[3]
FEW = [*SMALL, "logger=wandb", "trainer.max_steps=10"]
OPEN = ("val/", "test/", "privacy/", "private/", "nonprivate/", "optimizer/", "best/", "trainer/", "curves", "_")
PROVENANCE = {"epoch", "commit", "config_hash", "code_hash", "seed", "steps", "seconds", "seconds_total"}


@pytest.mark.long
def test_a_sweep() -> None:
    assert main(["train", "-m", *FEW, "optimizer.lr=0.1,0.2", "+optimizer.momentum=0.0", "hydra.sweep.dir=lr"]) == 0
    runs = [only(str(path)) for path in sorted(Path("lr").glob("[0-9]*"))]
    assert [one.run.display_name for one in runs] == [f"digits-mlp-dpsgd optimizer.lr={lr} seed=0" for lr in (0.1, 0.2)]
    assert {(one.run.run_group, one.run.job_type, one.run.project) for one in runs} == {("lr", "train", "dpbench")}
    for one, rate in zip(runs, (0.1, 0.2), strict=True):
        assert one.config["optimizer"]["lr"] == rate
        assert one.axes["*"] == "trainer/global_step" and {"privacy/epsilon_rdp", "privacy/epsilon_pld"} <= set(
            one.axes
        )
        assert one.artifacts == {"run": ["ledger.jsonl", "result.json"]}
        figures = ("privacy/epsilon_rdp", "optimizer/lr", "trainer/global_step")
        measured = [[row[name] for name in figures] for row in one.at("val/accuracy") if "optimizer/lr" in row]
        assert [row[1:] for row in measured] == [[rate, 3], [rate, 7], [rate, 10]]
        assert all(row[0] > 0 for row in measured) and measured == sorted(measured)
        last = one.at("test/accuracy")[-1]
        assert 0 < last["privacy/epsilon_pld"] < last["privacy/epsilon_rdp"] and "val/accuracy" in last
        for name in ("privacy/epsilon", "nonprivate/train_loss", "val/accuracy"):
            steps = [row["trainer/global_step"] for row in one.at(name)]
            assert len(steps) > 2 and steps == sorted(steps)


def test_the_summary_says_what_the_run_is_and_nothing_private_is_unmarked() -> None:
    assert main(["train", *FEW, "hydra.run.dir=run", "logger.checkpoint=true", "diagnostics=gradients"]) == 0
    one = only("run")
    assert set(one.artifacts) == {"run", "model"} and one.artifacts["model"] == ["last.ckpt"]
    told = one.summary
    assert told["best/val/accuracy"] == max(row["val/accuracy"] for row in one.at("val/accuracy"))
    assert told["val/accuracy"] == one.at("val/accuracy")[-1]["val/accuracy"]
    assert told["privacy/epsilon_rdp"] > told["privacy/epsilon_pld"] > 0
    assert (told["privacy/delta"], told["privacy/unit"], told["privacy/noise_multiplier"]) == (1e-4, "example", 1.1)
    assert told["privacy/sample_rate"] == pytest.approx(300 / 1237, rel=0.05)  # val_size is an expected number
    assert len(told["config_hash"]) == 16 and (told["seed"], told["steps"]) == (0, 10)
    names = {name for row in [*one.rows, told] for name in row}
    assert any(name.startswith("nonprivate/grad_norm/") for name in names)
    assert not [name for name in names if not name.startswith(OPEN) and name not in PROVENANCE]
    assert not read_offline(Path("run"))[0].run.entity


def test_a_picture_has_no_curve_that_was_computed_without_noise(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for name, keys in (("val/accuracy", ["curves"]), ("nonprivate/discriminator_loss", [])):
        folder.metrics.write_text(f"step,{name}\n1,0.5\n2,0.6\n")
        assert list(EndOfRun().draw(Run(folder, {"run": {"name": "x"}}))) == keys


def test_a_resumed_run_is_the_same_run() -> None:
    config = config_of(*FEW, "run.checkpoint_every_n_steps=100")
    with pytest.raises(Interrupted):
        train(config, Path("run"), [Signals(signal.SIGTERM, 5)], origin=Origin("lr", ("optimizer.lr=0.1",)))
    assert main(["resume", "run"]) == 0
    first, second = read_offline(Path("run"))
    assert first.run.run_id == second.run.run_id and first.run.display_name == second.run.display_name
    assert first.run.display_name == "digits-mlp-dpsgd optimizer.lr=0.1 seed=0" and second.run.run_group == "lr"
    assert second.rows[0]["_step"] > first.rows[-1]["_step"]  # a server takes them for rows of one run
    assert first.artifacts == {"run": ["ledger.jsonl", "partial_result.json"]}
    assert second.artifacts == {"run": ["ledger.jsonl", "result.json"]}
    opening = logs.how_to_open(RunFolder(Path("run")))
    assert opening.count(f"-{first.run.run_id}") == 2


NAMES = {"WANDB_NAME": "theirs", "WANDB_RUN_GROUP": "team", "WANDB_TAGS": "a,b", "WANDB_JOB_TYPE": "tune"}


@pytest.mark.parametrize(
    ("origin", "name", "group"),
    [
        (Origin(), "own seed=3", "digits"),
        (Origin("2026/07", ("optimizer.lr=0.1", "run.name=x")), "own optimizer.lr=0.1 seed=3", "2026/07"),
        (Origin("2026/07", ("seed=3", "optimizer.lr=0.1")), "own seed=3 optimizer.lr=0.1", "2026/07"),
    ],
)
def test_names(origin: Origin, name: str, group: str) -> None:
    config = {"run": {"name": "own", "group": "digits", "tags": ["t"]}, "seed": 3}
    assert logs.run_names(config, origin) == {"name": name, "group": group, "tags": ["t"], "job_type": "train"}
    assert logs.run_names({**config, "audit": {"_target_": "x"}}, origin)["job_type"] == "audit"


@pytest.fixture
def own_process() -> Iterator[Callable[[], None]]:
    """Lets wandb read the environment again, which it does once in a process: an agent starts one for each run."""
    yield wandb.teardown
    wandb.teardown()


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")  # of wandb
def test_the_environment_in_a_run(monkeypatch: pytest.MonkeyPatch, own_process: Callable[[], None]) -> None:
    for name, value in NAMES.items():
        monkeypatch.setenv(name, value)
    for name in ("PROJECT", "ENTITY", "NOTES"):
        monkeypatch.setenv(f"WANDB_{name}", name.lower())
    own_process()
    assert main(["train", *FEW, "trainer.max_steps=1", "hydra.run.dir=run", "logger.entity=me"]) == 0
    run = only("run").run
    assert (run.display_name, run.run_group, list(run.tags), run.job_type) == ("theirs", "team", ["a", "b"], "tune")
    assert (run.project, run.entity, run.notes) == ("project", "me", "notes")


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")  # of wandb
def test_the_example_of_a_wandb_sweep(monkeypatch: pytest.MonkeyPatch, own_process: Callable[[], None]) -> None:
    """All of it but the server: the words that `wandb agent` makes of the file are run in the environment it makes."""
    example = yaml.safe_load((ROOT / "docs/wandb_sweep.yaml").read_text(encoding="utf-8"))
    chosen = {name: {"value": own.get("values", [own.get("max")])[0]} for name, own in example["parameters"].items()}
    variables = create_sweep_command_args({"args": chosen})
    words = [part for word in example["command"] for part in variables.get(str(word).strip("${}"), [word])]
    assert words[:2] == ["dpbench", "train"] and "optimizer.lr=1.0" in words
    save_config_file_from_dict("agent/chosen.yaml", chosen)
    for name, value in (("SWEEP_ID", "abc"), ("RUN_ID", "run7"), ("SWEEP_PARAM_PATH", "agent/chosen.yaml")):
        monkeypatch.setenv(f"WANDB_{name}", value)
    own_process()
    fast = ["trainer.max_steps=8", "data.image_size=4", "model.hidden=[4]", "hydra.run.dir=run"]
    assert main([*words[1:], *fast]) == 0
    one = only("run")
    assert (one.run.run_id, one.run.sweep_id, one.run.run_group) == ("run7", "abc", "abc")
    said = "optimizer.lr=1.0 strategy.max_grad_norm=0.5 data.expected_batch_size=64 seed=0"
    assert one.run.display_name == f"digits-mlp-dpsgd {said}"
    assert one.config["optimizer.lr"] == 1.0 and one.config["optimizer"]["lr"] == 1.0
    assert example["metric"]["name"] in one.summary


def test_a_login_that_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "too-short")
    words = ["train", *FEW, "trainer.max_steps=1", "logger.mode=online", "hydra.run.dir=run"]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert main(words) == 0
    told = [str(one.message) for one in said if "wandb" in str(one.message)]
    assert len(told) == 1 and "wandb cannot be reached, and logs offline: WANDB_API_KEY invalid" in told[0]
    assert "wandb sync run/wandb/offline-run-" in capsys.readouterr().out
    assert only("run").run.display_name == "digits-mlp-dpsgd seed=0"


def test_who_is_logged_in(monkeypatch: pytest.MonkeyPatch) -> None:
    assert logs.wandb_mode("auto") == "offline"
    monkeypatch.delenv("WANDB_MODE")
    for logged_in, mode in ((True, "online"), (False, "offline")):
        monkeypatch.setattr("wandb.login", lambda logged_in=logged_in, **_: logged_in)
        assert logs.wandb_mode("auto") == mode
    assert logs.wandb_mode("offline") == "offline"

    def refused(**_: Any) -> bool:
        raise wandb.errors.AuthenticationError("no such key")

    monkeypatch.setattr("wandb.login", refused)
    with pytest.warns(UserWarning, match="logs offline: no such key"):
        assert logs.wandb_mode("auto") == "offline"
