"""The how-to pages with a program of their own: their code trains as it stands there."""

from __future__ import annotations

import json
import os
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.models import resnet18

from tests.support import forks
from tests.support.cli import HANGS

HOWTO = Path(__file__).parents[2] / "docs" / "howto"


def block(page: str, kind: str) -> str:
    """The only code block of a kind."""
    (code,) = re.findall(rf"```{re.escape(kind)}\n(.*?)```", (HOWTO / page).read_text(encoding="utf-8"), re.S)
    return str(code)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """A working directory with what the page on fine-tuning asks for: photos, weights, network, configuration."""
    generator = np.random.default_rng(0)
    for kind in ("cat", "dog"):
        (tmp_path / "photos" / kind).mkdir(parents=True)
        for number in range(20):
            pixels = generator.integers(0, 256, (70, 80, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "photos" / kind / f"{number}.png")
    torch.save(resnet18().state_dict(), tmp_path / "resnet18.pth")
    (tmp_path / "pretrained.py").write_text(block("finetune.md", "python title=pretrained.py"), encoding="utf-8")
    (tmp_path / "mine" / "model").mkdir(parents=True)
    (tmp_path / "mine" / "model" / "pretrained.yaml").write_text(block("finetune.md", "yaml"), encoding="utf-8")
    return tmp_path


@pytest.mark.slow
def test_fine_tuning_in_python(photos: Path) -> None:
    code = block("finetune.md", "python title=finetune.py").replace("max_steps=200", "max_steps=3")
    process = forks.start(photos, "-c", [code], {**os.environ})
    out, err = process.communicate(HANGS)
    assert process.returncode == 0, err
    assert "epsilon" in out
    before = torch.load(photos / "resnet18.pth", weights_only=True)
    after = torch.load(photos / "photos.pth", weights_only=True)
    assert torch.equal(after["backbone.bn1.running_mean"], before["bn1.running_mean"])
    assert torch.equal(after["backbone.conv1.weight"], before["conv1.weight"])


@pytest.mark.slow
def test_fine_tuning_on_the_command_line(photos: Path) -> None:
    lines = block("finetune.md", "sh").replace("\\\n", " ").replace("max_steps=200", "max_steps=3").splitlines()
    for line in lines:
        process = forks.start(photos, "dpbench", shlex.split(line)[1:], {**os.environ})
        out, err = process.communicate(HANGS)
        assert process.returncode == 0, out + err
    assert (photos / "models" / "photos" / "model.safetensors").is_file()
    card = (photos / "models" / "photos" / "README.md").read_text(encoding="utf-8")
    assert "Only a part of it was trained: last_layer (" in card


@pytest.mark.slow
def test_hugging_face(tmp_path: Path) -> None:
    lines = [json.dumps({"text": f"text {number} " * (1 + number % 3)}) for number in range(300)]
    (tmp_path / "texts.jsonl").write_text("\n".join(lines), encoding="utf-8")
    code = block("hugging_face.md", "python title=train.py").replace("num_train_epochs=3", "max_steps=2")
    process = forks.start(tmp_path, "-c", [code], {**os.environ, "WANDB_MODE": "disabled"})
    out, err = process.communicate(HANGS)
    assert process.returncode == 0, err
    assert "epsilon 8.00" in out
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()
    assert (tmp_path / "run" / "ledger.jsonl").is_file()
