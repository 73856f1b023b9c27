"""`dpbench export`: a model that loads with plain PyTorch, a card that says what is known, and nothing else."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from dpbench.capabilities.export._network import load_network
from dpbench.capabilities.export.folder import build_file
from dpbench.cli import main
from dpbench.harness.runs.folder import RunFolder
from dpbench.harness.runs.numbers import membership_text
from dpbench.models import MLP, ConvGAN
from dpbench.privacy.accounting.seal import seal_of
from tests.support.cli import dpbench

FILES = {"model.safetensors", "config.json", "privacy.json", "ledger.jsonl", "README.md"}


@pytest.fixture(scope="module")
def runs(trained: Callable[[str], Path]) -> Path:
    """A run with noise of the operating system, one with noise from a seed, and one without privacy."""
    for kind in ("secure", "seeded", "not_private"):
        run = trained(kind)
    return run.parent


def card_of(out: Path) -> tuple[dict[str, Any], str]:
    """The front matter of a card, and its text."""
    _, front, text = (out / "README.md").read_text(encoding="utf-8").split("---\n", 2)
    return yaml.safe_load(front), text


def test_it_loads_in_three_lines(runs: Path, tmp_path: Path) -> None:
    out = tmp_path / "new" / "model"
    out.parent.mkdir()
    assert main(["export", str(runs / "secure"), "--out", str(out)]) == 0
    assert {path.name for path in out.iterdir()} == FILES
    _, text = card_of(out)
    snippet = text.split("```python\n")[1].split("```")[0]
    check = "import torch; torch.save(model(torch.ones(3, 1, 8, 8)), 'out.pt')"
    done = subprocess.run([sys.executable, "-c", snippet + check], cwd=out, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    state = torch.load(runs / "secure" / "checkpoints" / "last.ckpt", weights_only=False)["state_dict"]
    model = MLP(hidden=[16], input_shape=(1, 8, 8), num_classes=10)
    model.load_state_dict({name.removeprefix("model."): value for name, value in state.items()})
    assert torch.equal(torch.load(out / "out.pt"), model.eval()(torch.ones(3, 1, 8, 8)))


def test_the_card_says_what_is_known(runs: Path, tmp_path: Path) -> None:
    out = tmp_path / "model"
    assert main(["export", str(runs / "secure"), "--out", str(out)]) == 0
    front, text = card_of(out)
    record = json.loads((runs / "secure" / "result.json").read_text())
    privacy = front["differential_privacy"]
    assert privacy["epsilon"]["rdp"] == pytest.approx(record["privacy"]["epsilon"]["rdp"], abs=1e-6)
    assert privacy["unit"] == "example" and privacy["noise_multiplier"] == 2 and privacy["secure_randomness"]
    assert privacy["ledger_sha256"] == record["privacy"]["ledger"]["sha256"] == seal_of(out / "ledger.jsonl").sha256
    for words in ("Tuning", "Other runs on the same data", "Preparation of the data", "6 releases", "poisson"):
        assert words in text, words
    facts = json.loads((out / "privacy.json").read_text())
    assert facts["membership"] == record["privacy"]["membership"]
    assert f"- Membership inference: {membership_text(facts['membership'])}." in text
    assert "Seeded noise" not in text and "differential-privacy" in front["tags"] and front["datasets"] == ["digits"]
    assert f"ε = {record['privacy']['epsilon']['rdp']:.3f} (RDP)" in text and record["code_hash"] in text


def test_inputs_of_features_have_no_scale(runs: Path) -> None:
    network = load_network(RunFolder(runs / "not_private"))
    assert build_file(network)["inputs"]["scale"] == "standard"
    featured = network.config | {"data": network.config["data"] | {"features": "scattering"}}
    inputs = build_file(replace(network, config=featured))["inputs"]
    assert inputs["features"] == "scattering" and "scale" not in inputs


def test_nothing_else_of_the_checkpoint_is_there(runs: Path, tmp_path: Path) -> None:
    out = tmp_path / "model"
    assert main(["export", str(runs / "secure"), "--out", str(out)]) == 0
    network = load_network(RunFolder(runs / "secure"))
    assert set(load_file(out / "model.safetensors")) == set(network.weights)
    assert all(name.startswith("layers.") or name.split(".")[-1] in ("weight", "bias") for name in network.weights)
    count = sum(value.numel() for value in network.weights.values())
    assert count == (64 * 16 + 16) + (16 * 10 + 10)
    assert (out / "model.safetensors").stat().st_size < 4 * count + 1000  # no state of an optimizer beside them
    facts = json.loads((out / "privacy.json").read_text())
    assert not any("nonprivate" in name or "val/" in name for name in facts["metrics"])


def test_seeded_noise_is_said(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["export", str(runs / "seeded"), "--out", str(tmp_path / "model")]
    assert main(words) == 1
    error = capsys.readouterr().err
    assert "strategy.secure=true" in error and "--insecure" in error and error.count("\n") == 1
    assert not (tmp_path / "model").exists()
    assert main([*words, "--insecure"]) == 0
    front, text = card_of(tmp_path / "model")
    assert "Seeded noise" in text and front["differential_privacy"]["secure_randomness"] is False


def test_a_card_tells_of_the_sweep(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number, name in enumerate(("secure", "seeded")):
        shutil.copytree(runs / name, tmp_path / "sweep" / str(number))
    words = ["export", str(tmp_path / "sweep" / "0"), "--out", str(tmp_path / "model")]
    assert main(words) == 0
    shutil.rmtree(tmp_path / "model")
    assert "of a sweep" not in capsys.readouterr().out
    (tmp_path / "sweep" / "multirun.yaml").touch()
    assert main(words) == 0
    told = "This run is one of the 2 runs of a sweep, which cost ε = "
    assert told in capsys.readouterr().out and told in (tmp_path / "model" / "README.md").read_text()
    assert told in json.loads((tmp_path / "model" / "privacy.json").read_text())["sweep"]


def test_a_run_without_privacy_is_labelled(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(runs / "not_private"), "--out", str(tmp_path / "model")]) == 0
    assert "NOT private" in capsys.readouterr().out
    front, text = card_of(tmp_path / "model")
    assert "not-private" in front["tags"] and "WITHOUT privacy" in text and "its ε is infinite" in text
    assert {path.name for path in (tmp_path / "model").iterdir()} == FILES - {"ledger.jsonl"}


@pytest.mark.parametrize("damage", ["cut", "gone", "edited"])
def test_a_damaged_ledger_is_refused(
    runs: Path, tmp_path: Path, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(runs / "secure", run)
    ledger = run / "ledger.jsonl"
    lines = ledger.read_text().splitlines(keepends=True)
    if damage == "gone":
        ledger.unlink()
    else:
        ledger.write_text(
            "".join(
                lines[:-2] if damage == "cut" else [*lines[:-1], lines[-1].replace('"checksum":"', '"checksum":"0')]
            )
        )
    assert main(["export", str(run), "--out", str(tmp_path / "model"), "--insecure"]) == 1
    assert capsys.readouterr().err.count("\n") == 1 and not (tmp_path / "model").exists()


def test_an_unfinished_run_and_an_accused_one(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    shutil.copytree(runs / "secure", run)
    record = json.loads((run / "result.json").read_text())
    audit = {"verdict": "VIOLATED", "audited": {}}
    (run / "result.json").write_text(json.dumps({**record, "privacy": {**record["privacy"], "audit": audit}}))
    assert main(["export", str(run), "--out", str(tmp_path / "model")]) == 1
    assert "VIOLATED" in capsys.readouterr().err
    (run / "result.json").unlink()
    assert main(["export", str(run), "--out", str(tmp_path / "model")]) == 0
    assert "The run has not ended" in card_of(tmp_path / "model")[1]


def test_a_folder_of_somebody_else_stays(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "model"
    words = ["export", str(runs / "secure"), "--out", str(out)]
    out.mkdir()
    (out / "thesis.tex").touch()
    assert main(words) == 1 and "is not empty" in capsys.readouterr().err
    (out / "thesis.tex").unlink()
    assert main(words) == 0 and main(words) == 1
    assert main(["export", str(tmp_path), "--out", str(tmp_path / "x")]) == 1
    assert "holds no run of dpbench" in capsys.readouterr().err


@pytest.mark.long
def test_of_a_gan_the_generator_is_exported(tmp_path: Path) -> None:
    small = ["experiment=digits_gan", "logger=none", "trainer.max_steps=6", "model.width=8", "model.noise_size=8"]
    dpbench(tmp_path, "train", *small, "ema_decay=0.9", "hydra.run.dir=gan")
    assert main(["export", str(tmp_path / "gan"), "--out", str(tmp_path / "model"), "--insecure"]) == 0
    built = json.loads((tmp_path / "model" / "config.json").read_text())
    assert built["part"] == "generator" and built["target"] == "dpbench.models.ConvGAN"
    generator = ConvGAN(**built["arguments"]).generator
    generator.load_state_dict(load_file(tmp_path / "model" / "model.safetensors"))
    text = card_of(tmp_path / "model")[1]
    assert ".generator\n" in text and "moving average" in text
