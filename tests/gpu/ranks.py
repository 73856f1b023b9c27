"""A private step by one process or by several on one device: `torchrun ... -m tests.gpu.ranks DEVICE OUT`."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from lightning_fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from pytorch_lightning.strategies import DDPStrategy
from torch import Tensor
from torch.utils.data import TensorDataset

from dpbench.data.lots import PrivateBatchSampler, PrivateDataLoader, make_sampling
from dpbench.models import MNISTCNN
from dpbench.strategies import DPSGD

_RECORDS = 600
_LOT = 60


class _Network(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = MNISTCNN((1, 28, 28), 10)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        return F.cross_entropy(self.model(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5)


def main(device: str, out: str) -> None:
    """Make one step, after which rounding has not grown yet, and have the first process write the weights to `out`."""
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    torch.backends.cudnn.allow_tf32 = False  # to be compared in float32
    world = int(os.environ.get("WORLD_SIZE", "1"))
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    records = TensorDataset(
        torch.randn(_RECORDS, 1, 28, 28, generator=generator), torch.randint(10, (_RECORDS,), generator=generator)
    )
    lots = PrivateBatchSampler(make_sampling("poisson", _RECORDS, _LOT), seed=1)
    several: dict[str, Any] = {} if world == 1 else _on_one_device(device, world)
    trainer = pl.Trainer(
        max_steps=1,
        max_epochs=-1,
        callbacks=[DPSGD(noise_multiplier=1.0, max_grad_norm=1.0, delta=1e-4, seed=1)],
        accelerator="gpu" if device == "cuda" else "cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        deterministic="warn" if device == "cuda" else None,  # as trainer=gpu
        default_root_dir=str(Path(out).parent),  # where the ledger is put
        **{"devices": 1, **several},
    )
    network = _Network()
    trainer.fit(network, PrivateDataLoader(records, lots))
    if trainer.is_global_zero:
        torch.save({name: value.cpu() for name, value in network.model.state_dict().items()}, out)


def _on_one_device(device: str, world: int) -> dict[str, Any]:
    """Processes that share a device add up by gloo: NCCL wants one each."""
    shared = [torch.device(device, 0) if device == "cuda" else torch.device(device)] * world
    strategy = DDPStrategy(parallel_devices=shared, process_group_backend="gloo")
    return {"strategy": strategy, "plugins": [TorchElasticEnvironment()], "devices": world}


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
