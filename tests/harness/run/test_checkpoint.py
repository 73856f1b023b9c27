"""The last checkpoint is whole, whatever happens while it is written."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch

from dpbench.harness.run._checkpoint import LastCheckpoint
from dpbench.harness.runs.folder import RunFolder
from dpbench.strategies import DPSGD
from tests.strategies.worlds import Classifier, loader_of, pictures, trainer_for


def test_a_full_disk_leaves_the_checkpoint_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder(tmp_path)
    whole = pl.Trainer.save_checkpoint

    def save(trainer: pl.Trainer, filepath: Any, *rest: Any, **options: Any) -> None:
        if trainer.global_step < 6:
            whole(trainer, filepath, *rest, **options)
            return
        Path(filepath).write_bytes(b"PK half of a checkpoint")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(pl.Trainer, "save_checkpoint", save)
    private = DPSGD(noise_multiplier=1.0, seed=0, delta=1e-3)
    callbacks = [private, LastCheckpoint(folder, every_n_steps=2)]
    trainer = trainer_for(tmp_path, private, 8, callbacks=callbacks, enable_checkpointing=True)
    with pytest.raises(OSError, match="No space left"):
        trainer.fit(Classifier(), loader_of(pictures()))
    assert torch.load(folder.checkpoint, weights_only=False)["global_step"] == 4
    assert sorted(file.name for file in folder.checkpoints.iterdir()) == ["last.ckpt", "metrics.json"]
