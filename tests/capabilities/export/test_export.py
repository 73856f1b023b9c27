"""`dpbench export`: a model that loads with plain PyTorch, a card that says what is known, and nothing else."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
import yaml
from safetensors.torch import load_file
from torch import Tensor, nn

from dpbench.capabilities.export._network import load_network
from dpbench.capabilities.export.folder import build_file
from dpbench.harness.runs.folder import RunFolder
from dpbench.harness.runs.numbers import membership_text
from dpbench.models import MLP, ConvGAN
from dpbench.privacy.accounting.seal import seal_of
from tests.support.cli import dpbench

MODEL = MLP(hidden=[16], input_shape=(1, 8, 8), num_classes=10)
FILES = {"model.safetensors", "config.json", "privacy.json", "ledger.jsonl", "README.md"}


class Classes(pl.LightningModule):
    """A module that is its own network, and takes an optimizer."""

    def __init__(self, optimizer: Callable[..., Any]) -> None:
        super().__init__()
        self.line = nn.Linear(64, 10)
        self._optimizer = optimizer

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.line(images.flatten(1))
        return logits

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return self._optimizer(self.parameters())


@pytest.fixture
def folder(trained: Callable[[str], Path], tmp_path: Path) -> Path:
    """Has a run with noise of the operating system, one with noise from a seed, and one without privacy."""
    for kind in ("secure", "seeded", "not_private"):
        shutil.copytree(trained(kind), tmp_path / kind)
    return tmp_path


def export(folder: Path, run: str, *words: str, status: int = 0) -> str:
    """What is printed."""
    return "".join(dpbench(folder, "export", run, "--out", "model", *words, status=status))


def card_of(out: Path) -> tuple[dict[str, Any], str]:
    """The front matter of a card, and its text."""
    _, front, text = (out / "README.md").read_text(encoding="utf-8").split("---\n", 2)
    return yaml.safe_load(front), text


def load_as_the_card_says(out: Path, monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    snippet = card_of(out)[1].split("```python\n")[1].split("```")[0]
    names: dict[str, Any] = {}
    monkeypatch.chdir(out)
    exec(snippet, names)
    model: nn.Module = names["model"]
    return model


@pytest.mark.filterwarnings("ignore:unclosed file")  # in a script's three lines Python closes it
def test_it_loads_in_three_lines(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    export(folder, "secure")
    out = folder / "model"
    assert {path.name for path in out.iterdir()} == FILES
    model = load_as_the_card_says(out, monkeypatch)
    state = torch.load(folder / "secure" / "checkpoints" / "last.ckpt", weights_only=False)["state_dict"]
    MODEL.load_state_dict({name.removeprefix("model."): value for name, value in state.items()})
    images = torch.ones(3, 1, 8, 8)
    assert torch.equal(model(images), MODEL.eval()(images))


@pytest.mark.filterwarnings("ignore:unclosed file", "ignore:dpbench")
def test_an_own_module_loads_without_an_optimizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine" / "module").mkdir(parents=True)
    (tmp_path / "mine" / "module" / "classes.yaml").write_text(f"_target_: {__name__}.Classes\n")
    words = [
        "--config-dir=mine",
        "data.image_size=8",
        "model=none",
        "module=classes",
        "trainer.max_steps=1",
        "logger=none",
    ]
    more = ["trainer.max_steps=1", "logger=none", "strategy=dpsgd", "strategy.secure=true", "hydra.run.dir=run"]
    dpbench(tmp_path, "train", *words, *more)
    export(tmp_path, "run")
    model = load_as_the_card_says(tmp_path / "model", monkeypatch)
    assert model(torch.ones(2, 1, 8, 8)).shape == (2, 10)


def test_the_card_says_what_is_known_and_nothing_else_of_the_checkpoint_is_there(folder: Path) -> None:
    export(folder, "secure")
    out = folder / "model"
    front, text = card_of(out)
    record = json.loads((folder / "secure" / "result.json").read_text())
    privacy = front["differential_privacy"]
    assert privacy["epsilon"]["rdp"] == pytest.approx(record["privacy"]["epsilon"]["rdp"], abs=1e-6)
    assert (privacy["unit"], privacy["noise_multiplier"], privacy["secure_randomness"]) == ("example", 2, True)
    assert privacy["ledger_sha256"] == record["privacy"]["ledger"]["sha256"] == seal_of(out / "ledger.jsonl").sha256
    facts = json.loads((out / "privacy.json").read_text())
    assert facts["membership"] == record["privacy"]["membership"]
    for words in (
        "6 releases",
        "poisson",
        f"- Membership inference: {membership_text(facts['membership'])}.",
        f"ε = {record['privacy']['epsilon']['rdp']:.3f} (RDP)",
        record["code_hash"],
    ):
        assert words in text, words
    assert "Seeded noise" not in text
    assert front["datasets"] == ["digits"]
    assert set(load_file(out / "model.safetensors")) == set(dict(MODEL.named_parameters()))
    assert not any("nonprivate" in name or "val/" in name for name in facts["metrics"])


def test_inputs_of_features_have_no_scale(folder: Path) -> None:
    network = load_network(RunFolder(folder / "not_private"))
    inputs = build_file(network)["inputs"]
    assert inputs["scale"] == "standard"
    assert len(inputs["mean"]) == len(inputs["std"]) == 1
    featured = network.config | {"data": network.config["data"] | {"features": "scattering"}}
    inputs = build_file(replace(network, config=featured, described={}))["inputs"]
    assert inputs["features"] == "scattering"
    assert "scale" not in inputs


def test_inputs_are_described_for_own_classes_too(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    described = {"classes": ["cat", "dog"], "preparation": "as they are"}
    network = replace(load_network(RunFolder(folder / "secure")), target="mine.Net", described=described)
    monkeypatch.setattr("dpbench.capabilities.export.folder.load_network", lambda *_: network)
    export(folder, "secure")
    built = json.loads((folder / "model" / "config.json").read_text())
    assert built["inputs"] == {"name": "digits", "scale": "standard", "image_size": 8, **described}
    text = card_of(folder / "model")[1]
    assert "Prepare inputs as `inputs` in config.json states" in text
    assert "Its `classes` are the names of the outputs, in their order." in text
    assert "`mine.Net` is not a class of dpbench" in text


def test_a_card_of_data_that_describe_no_inputs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    network = load_network(RunFolder(folder / "secure"))
    network = replace(network, config=network.config | {"data": {"_target_": "mine.Data"}}, described={})
    monkeypatch.setattr("dpbench.capabilities.export.folder.load_network", lambda *_: network)
    export(folder, "secure")
    assert "Prepare inputs as `mine.Data` does" in card_of(folder / "model")[1]


def test_seeded_noise_is_said(folder: Path) -> None:
    error = export(folder, "seeded", status=1)
    assert "strategy.secure=true" in error
    assert "--insecure" in error
    assert not (folder / "model").exists()
    export(folder, "seeded", "--insecure")
    front, text = card_of(folder / "model")
    assert "Seeded noise" in text
    assert front["differential_privacy"]["secure_randomness"] is False


def test_a_card_tells_of_made_up_records(folder: Path) -> None:
    export(folder, "secure")
    assert "made up" not in card_of(folder / "model")[1]
    shutil.rmtree(folder / "model")
    record = json.loads((folder / "secure" / "result.json").read_text())
    record["config"]["data"]["inserted"] = {"records": 3, "copies": 400}
    (folder / "secure" / "result.json").write_text(json.dumps(record))
    export(folder, "secure")
    assert "**1,200 of its training records were made up**" in card_of(folder / "model")[1]
    assert json.loads((folder / "model" / "privacy.json").read_text())["inserted_copies"] == 1200


def test_a_card_tells_of_the_sweep(folder: Path) -> None:
    shutil.rmtree(folder / "not_private")
    assert "of a sweep" not in export(folder, "secure")
    shutil.rmtree(folder / "model")
    (folder / "multirun.yaml").touch()
    told = "This run is one of the 2 runs of a sweep, which cost ε = "
    assert told in export(folder, "secure")
    assert told in card_of(folder / "model")[1]
    assert told in json.loads((folder / "model" / "privacy.json").read_text())["sweep"]


def test_a_run_without_privacy_is_labelled(folder: Path) -> None:
    assert "NOT private" in export(folder, "not_private")
    front, text = card_of(folder / "model")
    assert "not-private" in front["tags"]
    assert "WITHOUT privacy" in text
    assert "its ε is infinite" in text
    assert {path.name for path in (folder / "model").iterdir()} == FILES - {"ledger.jsonl"}


@pytest.mark.parametrize("damage", ["cut", "edited"])
def test_a_damaged_ledger_is_refused(folder: Path, damage: str) -> None:
    ledger = folder / "secure" / "ledger.jsonl"
    *lines, last = ledger.read_text().splitlines(keepends=True)
    if damage == "edited":
        lines.append(last.replace('"checksum":"', '"checksum":"0'))
    ledger.write_text("".join(lines))
    assert export(folder, "secure", "--insecure", status=1).count("\n") == 1
    assert not (folder / "model").exists()


def test_an_unfinished_run_and_an_accused_one(folder: Path) -> None:
    result = folder / "secure" / "result.json"
    text = result.read_text()
    result.write_text(text.replace('"privacy": {', '"privacy": {"audit": {"verdict": "VIOLATED", "audited": {}}, '))
    assert "VIOLATED" in export(folder, "secure", status=1)
    result.unlink()
    export(folder, "secure")
    assert "The run is not finished" in card_of(folder / "model")[1]


def test_a_folder_of_somebody_else_stays(folder: Path) -> None:
    (folder / "model").mkdir()
    (folder / "model" / "thesis.tex").touch()
    assert "is not empty" in export(folder, "secure", status=1)
    assert "holds no run of dpbench" in dpbench(folder, "export", "model", "--out", "new", status=1)[1]


@pytest.mark.long
def test_of_a_gan_the_generator_is_exported(tmp_path: Path) -> None:
    words = "experiment=digits_gan logger=none trainer.max_steps=6 model.width=8 model.noise_size=8 ema_decay=0.9"
    dpbench(tmp_path, "train", *words.split(), "hydra.run.dir=gan")
    export(tmp_path, "gan", "--insecure")
    built = json.loads((tmp_path / "model" / "config.json").read_text())
    assert built["part"] == "generator"
    assert built["target"] == "dpbench.models.ConvGAN"
    generator = ConvGAN(**built["arguments"]).generator
    generator.load_state_dict(load_file(tmp_path / "model" / "model.safetensors"))
    text = card_of(tmp_path / "model")[1]
    assert ".generator\n" in text
    assert "moving average" in text
