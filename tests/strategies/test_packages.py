"""`import lightning` and `import pytorch_lightning`: two copies of one library, and every strategy works in both."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning
import lightning.pytorch
import pytest
import pytorch_lightning
import torch
from torch import nn
from torch.utils.data import TensorDataset

from dpbench import DPSGD, LotLoader
from dpbench.errors import ConfigurationError
from dpbench.guards import _trainer_settings as trainer_settings
from dpbench.guards.packages import classes
from dpbench.privacy.accounting.ledger import read_ledger
from dpbench.strategies import AdaptiveQuantileClipping, AutomaticClipping, NonPrivate, VectorGroups
from tests.strategies.worlds import loader_of, pictures, weights_of

PACKAGES = {"pytorch_lightning": pytorch_lightning, "lightning": lightning.pytorch}
both = pytest.mark.parametrize("package", PACKAGES.values(), ids=PACKAGES)


def classifier(package: Any, manual: bool = False) -> Any:
    class Model(package.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(3)
            self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 3))
            self.automatic_optimization = not manual

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
            if not manual:
                return loss
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            return None

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.9)

    return Model()


def gan(package: Any) -> Any:
    class Pair(package.LightningModule):  # type: ignore[misc]
        private_module = "discriminator"

        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(3)
            self.generator, self.discriminator = nn.Linear(4, 64), nn.Linear(64, 1)
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            for_discriminator, for_generator = self.optimizers()
            loss = -self.discriminator(batch[0].flatten(1)).mean()
            self.manual_backward(loss)
            for_discriminator.step()
            for_discriminator.zero_grad()
            self.manual_backward(-self.discriminator(self.generator(torch.randn(8, 4))).mean())
            for_generator.step()
            for_generator.zero_grad()
            for_discriminator.zero_grad()

        def configure_optimizers(self) -> Any:
            return [torch.optim.Adam(net.parameters(), lr=1e-2) for net in (self.discriminator, self.generator)]

    return Pair()


def fit(package: Any, folder: Path, module: Any, callback: Any, steps: int, **options: Any) -> Any:
    resumed = {key: options.pop(key) for key in ("ckpt_path", "weights_only") if key in options}
    settings: dict[str, Any] = {
        "max_steps": steps,
        "max_epochs": -1,
        "accelerator": "cpu",
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "use_distributed_sampler": False,
        "default_root_dir": str(folder),
        "callbacks": [callback],
    }
    trainer = package.Trainer(**{**settings, **options})
    trainer.fit(module, loader_of(pictures()), **resumed)
    return trainer


def private(cls: Any = DPSGD, **options: Any) -> Any:
    return cls(**{"noise_multiplier": 1.0, "seed": 0, "delta": 1e-3, **options})


@pytest.mark.parametrize(
    "make",
    [
        lambda: private(),
        lambda: private(max_physical_batch_size=5),
        lambda: private(AdaptiveQuantileClipping, count_noise_std=5.0),
        lambda: private(AutomaticClipping),
        lambda: private(VectorGroups),
        lambda: NonPrivate(),
    ],
)
@pytest.mark.parametrize("manual", [False, True])
def test_both_train_the_same(tmp_path: Path, make: Any, manual: bool) -> None:
    if manual and getattr(make(), "max_physical_batch_size", None):
        return
    ends = []
    for name, package in PACKAGES.items():
        module = classifier(package, manual)
        strategy = make()
        fit(package, tmp_path / name, module, strategy, 7)
        ends.append(weights_of(module))
        if not isinstance(strategy, NonPrivate):
            assert len(read_ledger(tmp_path / name / "ledger.jsonl").releases) == 7
            assert 0 < strategy.epsilon() < 100
    if not isinstance(make(), NonPrivate):  # whose dropout is of the global generator
        assert torch.equal(*ends)


@both
def test_the_ten_lines_of_the_readme(tmp_path: Path, package: Any) -> None:
    class Model(package.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Linear(20, 2)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), lr=0.01)

    x = torch.randn(1000, 20)
    data = TensorDataset(x, (x[:, 0] > 0).long())
    strategy = DPSGD(max_grad_norm=1.0, target_epsilon=3.0, delta=1e-4)
    trainer = package.Trainer(
        max_steps=30,
        log_every_n_steps=5,
        enable_model_summary=False,
        callbacks=[strategy],
        enable_progress_bar=False,
        accelerator="cpu",
        default_root_dir=tmp_path,
        logger=package.loggers.CSVLogger(tmp_path),
    )
    trainer.fit(Model(), LotLoader.poisson(data, expected_batch_size=50))
    assert 2.9 < strategy.epsilon() <= 3.0
    assert (Path(trainer.log_dir) / "ledger.jsonl").exists()


@both
def test_a_gan(tmp_path: Path, package: Any) -> None:
    strategy = private()
    module = gan(package)
    before = module.generator.weight.clone()
    fit(package, tmp_path, module, strategy, 6)
    assert strategy.releases == 6
    assert not torch.equal(before, module.generator.weight)


@both
def test_resume(tmp_path: Path, package: Any) -> None:
    whole = classifier(package)
    fit(package, tmp_path / "whole", whole, private(fingerprint="x"), 9)
    trainer = fit(package, tmp_path / "parts", classifier(package), private(fingerprint="x"), 4)
    trainer.save_checkpoint(tmp_path / "mid.ckpt")
    resumed = classifier(package)
    fit(
        package,
        tmp_path / "parts",
        resumed,
        private(fingerprint="x"),
        9,
        ckpt_path=tmp_path / "mid.ckpt",
        weights_only=False,
    )
    assert torch.equal(weights_of(whole), weights_of(resumed))
    assert len(read_ledger(tmp_path / "parts" / "ledger.jsonl").releases) == 9


@both
def test_settings_are_refused_in_both(tmp_path: Path, package: Any) -> None:
    class OwnBackward(type(classifier(package))):  # type: ignore[misc]
        def backward(self, loss: Any) -> None:
            loss.backward()

    with pytest.raises(ConfigurationError, match="overrides backward"):
        fit(package, tmp_path, OwnBackward(), private(), 2)
    with pytest.raises(ConfigurationError, match="accumulate_grad_batches=2"):
        fit(package, tmp_path, classifier(package), private(), 2, accumulate_grad_batches=2)


@pytest.mark.long
@both
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:It is recommended to use")
@pytest.mark.own_key
def test_two_processes(tmp_path: Path, package: Any) -> None:
    script = tmp_path / "two.py"
    script.write_text(
        f"""
import sys
import {package.__name__} as pl
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from dpbench.errors import ConfigurationError
from tests.strategies.test_packages import classifier, fit, private
Model = type(classifier(pl))
Model.__module__, Model.__qualname__ = "__main__", "Model"
if __name__ == "__main__":
    for devices in (1, 2):
        options = {{}} if devices == 1 else {{"devices": 2, "strategy": "ddp_fork"}}
        trainer = fit(pl, Path(sys.argv[1]) / str(devices), Model(), private(), 6, **options)
        try:
            trainer.save_checkpoint(Path(sys.argv[1]) / f"{{devices}}.ckpt")
        except ConfigurationError as error:  # of the spawned processes' releases this one knows nothing
            assert devices == 2 and "did not train" in str(error), error
            trainer.save_checkpoint(Path(sys.argv[1]) / f"{{devices}}.ckpt", weights_only=True)
"""
    )
    subprocess.run([sys.executable, script, tmp_path], check=True, cwd=Path(__file__).parents[2], timeout=400)
    saved = [torch.load(tmp_path / f"{n}.ckpt", weights_only=False) for n in (1, 2)]
    ends = [checkpoint["state_dict"] for checkpoint in saved]
    assert ["callbacks" in checkpoint for checkpoint in saved] == [True, False]
    books = [read_ledger(tmp_path / name / "ledger.jsonl") for name in ("1", "2")]
    assert [len(book.releases) for book in books] == [6, 6]
    assert all(ends[0][name].shape == ends[1][name].shape for name in ends[0])


@pytest.mark.long
def test_neither_package_is_imported_for_the_other() -> None:
    assert classes("Trainer") == (pytorch_lightning.Trainer, lightning.pytorch.Trainer)
    assert classes("DDPStrategy", "strategies")[1] is lightning.pytorch.strategies.DDPStrategy
    code = "import dpbench.strategies, dpbench.data.lots, sys; assert 'lightning' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=600)


@pytest.mark.parametrize("trainer", PACKAGES.values(), ids=PACKAGES)
def test_a_mixture_is_refused_by_lightning(tmp_path: Path, trainer: Any) -> None:
    other = next(package for package in PACKAGES.values() if package is not trainer)
    with pytest.raises(TypeError, match="LightningModule"):
        fit(trainer, tmp_path, classifier(other), private(), 2)


def test_strategies_with_a_backward_pass_of_their_own() -> None:
    """DeepSpeed's is derived from DDP's."""
    made = {
        name: object.__new__(getattr(pytorch_lightning.strategies, name))
        for name in ("DDPStrategy", "DeepSpeedStrategy")
    }
    assert [trainer_settings._is_supported(strategy) for strategy in made.values()] == [True, False]
