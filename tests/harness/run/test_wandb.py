"""wandb as its users expect it, read back from the files that `wandb sync` uploads."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

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
FEW = [*SMALL, "logger=wandb", "trainer.max_steps=6"]
MORE = ["logger.checkpoint=true", "logger.entity=me", "diagnostics=gradients"]
OPEN = ("val/", "test/", "privacy/", "private/", "nonprivate/", "optimizer/", "best/", "trainer/", "curves", "_")
PROVENANCE = {"epoch", "commit", "config_hash", "code_hash", "seed", "steps", "seconds", "seconds_total"}


def test_the_summary_says_what_the_run_is_and_nothing_private_is_unmarked() -> None:
    assert main(["train", *FEW, "hydra.run.dir=run", *MORE]) == 0
    one = only("run")
    assert one.artifacts == {"run": ["ledger.jsonl", "result.json"], "model": ["last.ckpt"]}
    assert one.axes["*"] == "trainer/global_step" and one.run.entity == "me"
    assert [row["trainer/global_step"] for row in one.at("val/accuracy")][:2] == [3, 6]
    told = one.summary
    assert told["best/val/accuracy"] == max(row["val/accuracy"] for row in one.at("val/accuracy"))
    assert told["val/accuracy"] == one.at("val/accuracy")[-1]["val/accuracy"]
    assert told["privacy/epsilon_rdp"] > told["privacy/epsilon_pld"] > 0
    assert (told["privacy/delta"], told["privacy/unit"], told["privacy/noise_multiplier"]) == (1e-4, "example", 1.1)
    names = {name for row in [*one.rows, told] for name in row}
    assert any(name.startswith("nonprivate/grad_norm/") for name in names)
    assert not [name for name in names if not name.startswith(OPEN) and name not in PROVENANCE]


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
    assert first.run.run_id == second.run.run_id and second.run.run_group == "lr"
    assert first.run.display_name == second.run.display_name == "digits-mlp-dpsgd optimizer.lr=0.1 seed=0"
    assert second.rows[0]["_step"] > first.rows[-1]["_step"]  # a server takes them for rows of one run
    assert first.artifacts == {"run": ["ledger.jsonl", "partial_result.json"]}
    assert logs.how_to_open(RunFolder(Path("run"))).count(f"-{first.run.run_id}") == 2


@pytest.mark.parametrize(
    ("origin", "name", "group"),
    [
        (Origin(), "own seed=3", "digits"),
        (Origin("2026/07", ("optimizer.lr=0.1", "run.name=x")), "own optimizer.lr=0.1 seed=3", "2026/07"),
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
def test_the_example_of_a_wandb_sweep(monkeypatch: pytest.MonkeyPatch, own_process: Callable[[], None]) -> None:
    """All of it but the server: the words that `wandb agent` makes of the file are run in the environment it makes."""
    example = yaml.safe_load((ROOT / "docs/wandb_sweep.yaml").read_text(encoding="utf-8"))
    chosen = {name: {"value": own.get("values", [own.get("max")])[0]} for name, own in example["parameters"].items()}
    variables = create_sweep_command_args({"args": chosen})
    words = [part for word in example["command"] for part in variables.get(str(word).strip("${}"), [word])]
    assert words[:2] == ["dpbench", "train"] and "optimizer.lr=1.0" in words
    save_config_file_from_dict("agent/chosen.yaml", chosen)
    names = {"SWEEP_ID": "abc", "RUN_ID": "run7", "SWEEP_PARAM_PATH": "agent/chosen.yaml"}
    for name, value in names.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    own_process()
    fast = ["trainer.max_steps=2", "data.image_size=4", "model.hidden=[4]", "hydra.run.dir=run"]
    assert main([*words[1:], *fast]) == 0
    one = only("run")
    run = one.run
    assert (run.run_id, run.sweep_id, run.run_group) == ("run7", "abc", "abc")
    said = "optimizer.lr=1.0 strategy.max_grad_norm=0.5 data.expected_batch_size=64 seed=0"
    assert run.display_name == f"digits-mlp-dpsgd {said}"
    assert one.config["optimizer.lr"] == 1.0 and one.config["optimizer"]["lr"] == 1.0
    assert example["metric"]["name"] in one.summary


def test_who_is_logged_in(monkeypatch: pytest.MonkeyPatch) -> None:
    assert logs.wandb_mode("auto") == "offline"
    monkeypatch.delenv("WANDB_MODE")
    login = mock.Mock(side_effect=[True, False, wandb.errors.AuthenticationError("no such key")])
    monkeypatch.setattr("wandb.login", login)
    assert [logs.wandb_mode("auto"), logs.wandb_mode("auto")] == ["online", "offline"]
    assert logs.wandb_mode("offline") == "offline"
    with pytest.warns(UserWarning, match="logs offline: no such key"):
        assert logs.wandb_mode("auto") == "offline"
