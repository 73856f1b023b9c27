"""`import lightning` and `import pytorch_lightning`: two copies of one library, and every strategy works in both."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch
import pytest
import pytorch_lightning
import torch
from torch import nn

from dpbench.errors import ConfigurationError
from dpbench.guards import _trainer_settings as trainer_settings
from dpbench.guards.packages import classes
from dpbench.strategies import DPSGD
from tests.strategies.worlds import loader_of, pictures, trainer_for, update, weights_of


def classifier(package: Any, manual: bool = False) -> Any:
    class Model(package.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(3)
            self.net = nn.Sequential(nn.Flatten(), nn.Dropout(0.1), nn.Linear(64, 3))
            self.automatic_optimization = not manual

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return update(self, nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.9)

    return Model()


def fit(package: Any, folder: Path, module: Any, steps: int, start: Any = None, **options: Any) -> Any:
    strategy = DPSGD(noise_multiplier=1.0, seed=0, delta=1e-3, fingerprint="x")
    trainer = trainer_for(folder, strategy, steps, package, **options)
    trainer.fit(module, loader_of(pictures()), ckpt_path=start, weights_only=False)
    return trainer


@pytest.mark.parametrize("manual", [False, True])
def test_a_run_resumed_in_one_is_the_whole_one_of_the_other(tmp_path: Path, manual: bool) -> None:
    package = lightning.pytorch
    start = tmp_path / "half.ckpt"
    fit(package, tmp_path / "parts", classifier(package, manual), 2).save_checkpoint(start)
    resumed, whole = classifier(package, manual), classifier(pytorch_lightning, manual)
    fit(package, tmp_path / "parts", resumed, 4, start)
    fit(pytorch_lightning, tmp_path / "whole", whole, 4)
    assert torch.equal(weights_of(resumed), weights_of(whole))
    ledgers = [(tmp_path / name / "ledger.jsonl").read_bytes() for name in ("parts", "whole")]
    assert ledgers[0] == ledgers[1]


def test_settings_are_refused_in_both(tmp_path: Path) -> None:
    package = lightning.pytorch

    class OwnBackward(type(classifier(package))):  # type: ignore[misc]
        def backward(self, loss: Any) -> None:
            loss.backward()

    with pytest.raises(ConfigurationError, match="overrides backward"):
        fit(package, tmp_path, OwnBackward(), 2)
    with pytest.raises(ConfigurationError, match="accumulate_grad_batches=2"):
        fit(package, tmp_path, classifier(package), 2, accumulate_grad_batches=2)


@pytest.mark.long
def test_neither_package_is_imported_for_the_other() -> None:
    assert classes("Trainer") == (pytorch_lightning.Trainer, lightning.pytorch.Trainer)
    assert classes("DDPStrategy", "strategies")[1] is lightning.pytorch.strategies.DDPStrategy
    code = "import dpbench.strategies, dpbench.data.loader, sys; assert 'lightning' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=600)


def test_strategies_with_a_backward_pass_of_their_own() -> None:
    """DeepSpeed's is derived from DDP's."""
    for name, is_supported in (("DDPStrategy", True), ("DeepSpeedStrategy", False)):
        strategy = object.__new__(getattr(pytorch_lightning.strategies, name))
        assert trainer_settings._is_supported(strategy) is is_supported
