"""Fixtures for all tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("WANDB_SILENT", "true")


@pytest.fixture(autouse=True)
def _quiet_torch() -> None:
    """Few threads, so that parallel test processes do not fight, and a fixed seed."""
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def data_folder() -> Path:
    """Real image data; a machine that declares DPBENCH_DATA may not skip."""
    folder = os.environ.get("DPBENCH_DATA")
    if folder is None:
        pytest.skip("needs $DPBENCH_DATA")
    return Path(folder)
