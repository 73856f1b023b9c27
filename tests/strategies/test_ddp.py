"""Two gloo processes: the same lots, noise and weights as one."""

from __future__ import annotations

import atexit
import json
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn

from dpbench.errors import ConfigurationError
from dpbench.privacy.accounting.ledger import read_ledger
from dpbench.records import examples
from dpbench.strategies import DPSGD
from tests.strategies.worlds import Classifier, assert_same_training, fit, loader_of, pictures, trainer_for, weights_of

pytestmark = [
    pytest.mark.own_key,  # other processes take the keys that users get
    pytest.mark.filterwarnings("ignore:It is recommended to use `self.log"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


class WatchesItsEnd(DPSGD):
    """Notes whether a process is still in its group when the interpreter ends: some then abort."""

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        # Without an assertion: pytest rewrites it in this process alone, and source is part of the key.
        note = Path(str(self.ledger_path)).with_name(f"end-{trainer.global_rank}")
        atexit.register(lambda: note.write_text(str(dist.is_initialized())))  # last come, first called
        super().setup(trainer, pl_module, stage)


def run(
    folder: Path, make: Any = DPSGD, start: str | None = "ddp_fork", expected: float = 12, **options: Any
) -> Tensor:
    """Weights of a training by two processes, or by one where there is no start."""
    torch.manual_seed(3)
    module = Classifier(options.pop("manual", False))
    module.net[4] = nn.Identity()  # dropout masks belong to a position in a process
    ledger = str(folder / "ledger.jsonl")
    trainer = {"devices": 2, "strategy": start} if start else {}
    fit(folder, module, 4, make, loader_of(pictures(), expected), trainer, ledger=ledger, **options)
    return weights_of(module)


@pytest.mark.parametrize(
    ("manual", "expected", "start"),
    [(False, 12, "ddp_spawn"), (True, 12, "ddp_fork"), (False, 1, "ddp_fork")],  # forks have no end of an interpreter
    ids=["auto", "manual", "empty"],
)
@pytest.mark.slow
def test_two_processes_agree_with_one(tmp_path: Path, manual: bool, expected: float, start: str) -> None:
    one, two = (  # of the same class: it is part of the key
        run(tmp_path / name, WatchesItsEnd, way, expected, manual=manual) for name, way in (("1", None), ("2", start))
    )
    if start == "ddp_spawn":
        assert [(tmp_path / "2" / f"end-{rank}").read_text() for rank in (0, 1)] == ["False", "False"]
    assert_same_training(two, one, noise_std=1.0, expected_batch_size=expected)
    books = [read_ledger(tmp_path / name / "ledger.jsonl") for name in ("1", "2")]
    events = [[(r.number, r.sampling, r.queries) for _, r in book.releases] for book in books]
    assert events[0] == events[1]


@pytest.mark.slow
def test_two_processes_begin_a_batch_again_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is over on one of them; sums and sizes are those of the size from the start."""
    forward = nn.Linear.forward
    monkeypatch.setattr(examples, "_RAISES_WHEN_FULL", ("cuda", "cpu"))

    def over(self: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        if dist.is_initialized() and dist.get_rank() == 1 and len(x) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return forward(self, x)

    with monkeypatch.context() as patch:
        patch.setattr(nn.Linear, "forward", over)
        auto = run(tmp_path / "auto", max_physical_batch_size="auto")
    sizes = json.loads((tmp_path / "auto" / "piece_sizes.json").read_text())
    assert sizes == {"0": 1}
    assert torch.equal(auto, run(tmp_path / "given", max_physical_batch_size=1))
    ledgers = [(tmp_path / name / "ledger.jsonl").read_bytes() for name in ("auto", "given")]
    assert ledgers[0] == ledgers[1]


@pytest.mark.slow
def test_system_entropy_and_budget_on_two_processes(tmp_path: Path) -> None:
    trainer = {"devices": 2, "strategy": "ddp_fork"}
    options = {"target_epsilon": 2.0, "seed": None, "ledger": str(tmp_path / "ledger.jsonl")}
    fit(tmp_path, Classifier(), 200, loader=loader_of(pictures(), seed=None), trainer=trainer, **options)
    assert 0 < len(read_ledger(tmp_path / "ledger.jsonl").releases) < 200


def test_who_started_processes_saves_no_checkpoint(tmp_path: Path) -> None:
    """It has the weights, but not what was released: a run that goes on from there would begin at zero."""
    trainer = trainer_for(tmp_path, DPSGD(noise_multiplier=1.0, delta=1e-3), 2, devices=2, strategy="ddp_fork")
    trainer.fit(Classifier(), loader_of(pictures()))
    with pytest.raises(ConfigurationError, match=r"did not train.*ModelCheckpoint"):
        trainer.save_checkpoint(tmp_path / "all.ckpt")
    trainer.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    assert not (tmp_path / "all.ckpt").exists() and (tmp_path / "weights.ckpt").exists()


@pytest.mark.slow
def test_lightnings_own_sampler_is_refused(tmp_path: Path) -> None:
    trainer = {"devices": 2, "strategy": "ddp_fork", "use_distributed_sampler": True}
    with pytest.raises(Exception, match="use_distributed_sampler=False|sampler draws from|sampling"):
        fit(tmp_path, Classifier(), trainer=trainer)
