"""Training by the callback needs a few packages; what else a command needs is named in one line."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

SOURCE = Path(__file__).parents[1] / "src"
NEEDED = ("torch", "pytorch-lightning", "torchmetrics", "numpy", "scipy", "dp-accounting", "pydantic")
TRAINING = """\
import pytorch_lightning as pl
import torch
from dpbench import DPSGD, PrivateDataLoader


class Linear(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return torch.nn.functional.cross_entropy(self.layer(x), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


records = torch.utils.data.TensorDataset(torch.randn(100, 4), torch.randint(2, (100,)))
private = DPSGD(noise_multiplier=1.0, delta=1e-5, seed=0)
trainer = pl.Trainer(max_steps=3, callbacks=[private], logger=False, accelerator="cpu", enable_progress_bar=False)
trainer.fit(Linear(), PrivateDataLoader.poisson(records, 10, seed=0))
print(f"epsilon = {private.epsilon():.3f}")
"""
COMMAND = "from dpbench.cli import main\nraise SystemExit(main())\n"


def with_requirements(names: tuple[str, ...]) -> dict[str, metadata.Distribution]:
    """Installed packages of these names, and what they require."""
    distributions: dict[str, metadata.Distribution] = {}
    pending = list(names)
    while pending:
        name = re.sub(r"[-_.]+", "-", pending.pop()).lower()
        if name in distributions:
            continue
        try:
            distributions[name] = metadata.distribution(name)
        except metadata.PackageNotFoundError:  # of other platforms
            continue
        for line in distributions[name].requires or []:
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                pending.append(requirement.name)
    return distributions


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment of links to these packages alone."""
    folder = tmp_path_factory.mktemp("packages")
    for distribution in with_requirements(NEEDED).values():
        for name in {file.parts[0] for file in distribution.files or []} - {"..", "__pycache__"}:
            target = Path(str(distribution.locate_file(name)))
            if target.exists() and not (folder / name).exists():
                (folder / name).symlink_to(target)
    return folder


def run(program: str, packages: Path, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a program where nothing but these packages and dpbench can be imported."""
    first = f"import sys\nsys.path[:0] = {[str(SOURCE), str(packages)]!r}\n"
    return subprocess.run(
        [sys.executable, "-I", "-S", "-W", "ignore", "-c", first + program, *words],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.slow
def test_the_callback_trains(packages: Path, tmp_path: Path) -> None:
    assert not (packages / "hydra").exists() and not (packages / "pandas").exists()
    done = run(TRAINING, packages, tmp_path)
    assert done.returncode == 0 and "epsilon = 2." in done.stdout, done.stderr


@pytest.mark.parametrize(("command", "missing"), [("train", "hydra"), ("table", "pandas")])
def test_a_command_names_what_is_missing(command: str, missing: str, packages: Path, tmp_path: Path) -> None:
    done = run(COMMAND, packages, tmp_path, command, "runs")
    assert done.returncode == 1
    assert done.stderr == f"dpbench: error: this command needs {missing}, which is not installed: pip install it.\n"
