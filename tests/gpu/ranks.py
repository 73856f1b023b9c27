"""A private step by one process or by several on one device: `torchrun ... -m tests.gpu.ranks DEVICE OUT`."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning_fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from pytorch_lightning.strategies import DDPStrategy
from torch import nn

from tests.strategies.worlds import Classifier, fit, weights_of


def main(device: str, out: str) -> None:
    """Make one step, after which rounding has not grown yet, and have the first process write the weights to `out`."""
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    torch.backends.cudnn.allow_tf32 = False  # to be compared in float32
    world = int(os.environ.get("WORLD_SIZE", "1"))
    options: dict[str, Any] = {"devices": 1} if world == 1 else _on_one_device(device, world)
    if device == "cuda":
        options |= {"accelerator": "gpu", "deterministic": "warn"}  # as trainer=gpu
    torch.manual_seed(0)
    module = Classifier()
    module.net[4] = nn.Identity()  # dropout masks belong to a position in a process
    fit(Path(out).parent, module, 1, trainer=options)
    if module.trainer.is_global_zero:
        torch.save(weights_of(module).cpu(), out)


def _on_one_device(device: str, world: int) -> dict[str, Any]:
    """Processes that share a device add up by gloo: NCCL wants one each."""
    shared = [torch.device(device, 0) if device == "cuda" else torch.device(device)] * world
    strategy = DDPStrategy(parallel_devices=shared, process_group_backend="gloo")
    return {"strategy": strategy, "plugins": [TorchElasticEnvironment()], "devices": world}


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
