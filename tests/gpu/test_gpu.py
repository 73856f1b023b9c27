"""What must hold on any device: gradients, sensitivity, noise, graphs, resuming, several processes.

On a machine with a GPU: `python -m pytest -m gpu --device cuda tests/gpu`. What dpbench needs suffices there, beside
pytest: nothing of the extra `dev`.
"""

from __future__ import annotations

import copy
import gc
import math
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from benchmarks.plain import on_device
from benchmarks.workloads import WORKLOADS, Workload
from dpbench.capabilities.graphs.executor import Graphs
from dpbench.models import MNISTCNN
from dpbench.modules.image_classifier import ImageClassifier
from dpbench.privacy.gradients.engine import PerRecordEngine
from dpbench.privacy.mechanism.clipping import VectorGroup, clip_and_sum
from dpbench.privacy.mechanism.noise import add_gaussian_noise
from dpbench.privacy.randomness import seed_global_generators
from dpbench.session.executor import REFERENCE, Executor
from dpbench.strategies import DPSGD
from tests.strategies.worlds import (
    Classifier,
    assert_same_training,
    clipped_sum,
    fit,
    loader_of,
    trainer_for,
    weights_of,
)
from tests.support.checks import accepts_scale

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]
FEW = 3  # records
LOT = 64  # of a release, whose counts have noise of their own
CLOSE = 1e-4  # relative, of gradients and weights
CLOSE_IN_TF32 = 2e-2
ROUNDING = 1e-5  # of the bound, that a record may move a sum by beyond it, for the rounding of the sum itself
STD = 1.7
NUMBERS = 200_000
REPEATED = 40  # steps by graphs
NETWORKS = [name for name in WORKLOADS if "microbatches" not in name]


def few(workload: Workload) -> Workload:
    """The workload with few records, each of one example."""
    return replace(workload, batch=FEW, microbatch_size=1)


@contextmanager
def tf32(convolutions: bool, products: bool) -> Iterator[None]:
    """The precision of a GPU's convolutions and matrix products; a CPU has one only."""
    before = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    torch.backends.cudnn.allow_tf32 = convolutions
    torch.backends.cuda.matmul.allow_tf32 = products
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = before


def clipped_by_autograd(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Sum over records of gradients whose norms are brought down to 1: record by record, in float64, on the CPU."""
    model = copy.deepcopy(model).cpu().double()
    records = zip(x.cpu().double().split(1), y.cpu().split(1), strict=True)
    sums = clipped_sum((F.cross_entropy(model(x), y) for x, y in records), list(model.parameters()), 1.0)
    return torch.cat([part.flatten() for part in sums])


def clipped_by_engine(engine: PerRecordEngine, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    group = VectorGroup("all", tuple(range(len(engine.parameters))), 1.0)
    gradients = engine.backward(F.cross_entropy(model(x), y), len(x))
    with torch.no_grad():
        sums, _ = clip_and_sum(gradients, (group,))
    return torch.cat([part.flatten() for part in sums]).cpu().double()


@pytest.mark.parametrize("name", NETWORKS)
def test_clipped_sums_are_those_of_autograd(name: str, device: str) -> None:
    for convolutions_in_tf32, close in ((False, CLOSE), (True, CLOSE_IN_TF32)):
        if convolutions_in_tf32 and device == "cpu":
            break
        model, x, y = on_device(few(WORKLOADS[name]), device)
        expected = clipped_by_autograd(model, x, y)
        with tf32(convolutions_in_tf32, False):
            actual = clipped_by_engine(PerRecordEngine(model), model, x, y)
        assert float((actual - expected).norm() / expected.norm()) < close


@pytest.mark.parametrize("name", NETWORKS)
def test_a_record_moves_the_sum_by_at_most_the_bound(name: str, device: str) -> None:
    model, x, y = on_device(few(WORKLOADS[name]), device)
    engine = PerRecordEngine(model)
    for products in (False, True) if device == "cuda" else (False,):
        with tf32(True, products):
            for record, label in zip(x.split(1), y.split(1), strict=True):
                assert float(clipped_by_engine(engine, model, record, label).norm()) <= 1 + ROUNDING


def test_noise_has_its_scale_and_repeats_with_its_key(device: str) -> None:
    one, again, other = (
        add_gaussian_noise(torch.zeros(NUMBERS, device=device), [(NUMBERS, STD)], (key,)).cpu() for key in (1, 1, 2)
    )
    assert torch.equal(one, again)
    assert [accepts_scale(one.numpy(), factor * STD) for factor in (1, 2 / 3, 3 / 2)] == [True, False, False]
    correlation = float((one.double() * other.double()).mean()) / STD**2
    assert abs(correlation) < 5 / math.sqrt(NUMBERS), f"two keys correlate by {correlation}"


class GraphsLikeEager(Graphs):
    """Graphs with the keys of the reference: the noise is the same, and what differs is rounding."""

    name = REFERENCE
    needs_gpu = False


def overwrite_free_memory(device: str) -> None:
    """What a graph reads or writes, and nobody holds, is not a number after this."""
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
    blocks = []
    for megabytes in (0.001, 0.01, 0.1, 1, 4, 16):
        for _ in range(16):
            blocks.append(torch.full((int(megabytes * 2**18),), math.nan, device=device))
    del blocks


class Overwriting(pl.Callback):
    """Overwrites free memory between some steps: what a graph reads belongs to it."""

    def __init__(self, device: str) -> None:
        self._device = device

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step % 10 == 5:
            overwrite_free_memory(self._device)


def trainer_options(device: str, **more: Any) -> dict[str, Any]:
    own = {"accelerator": "gpu", "deterministic": "warn"} if device == "cuda" else {}
    return {"devices": 1, **own, **more}


def classifier_trained(executor: Executor, device: str, folder: Path, callback: pl.Callback) -> Tensor:
    """Weights of a module that heeds padding, after some steps on Poisson lots."""
    torch.manual_seed(0)
    module = ImageClassifier(MNISTCNN((1, 28, 28), 10), partial(torch.optim.SGD, lr=0.1), num_classes=10)
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(600, 1, 28, 28, generator=generator)
    labels = torch.randint(10, (600,), generator=generator)
    strategy = DPSGD(noise_multiplier=1.0, max_grad_norm=1.0, delta=1e-4, seed=1)
    strategy._session._executor_on = lambda device: executor
    options = trainer_options(device, log_every_n_steps=5)
    trainer = trainer_for(folder, callback, REPEATED // 2, more=[Overwriting(device), strategy], **options)
    trainer.fit(module, loader_of(TensorDataset(images, labels), LOT, seed=1))
    return torch.cat([p.detach().double().cpu().flatten() for p in module.parameters()])


class WaitsOfSteps(pl.Callback):
    """Counts what PyTorch says that a GPU is waited for, by the step."""

    def __init__(self) -> None:
        self.counts: list[int] = []
        self._warnings: list[warnings.WarningMessage] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self.counts.append(len(self._warnings))
        self._warnings.clear()

    @contextmanager
    def counting(self, device: str) -> Iterator[None]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("ignore")
            warnings.filterwarnings("always", message="called a synchronizing CUDA operation")
            self._warnings = caught
            if device == "cuda":
                torch.cuda.set_sync_debug_mode("warn")
            try:
                yield
            finally:
                if device == "cuda":
                    torch.cuda.set_sync_debug_mode("default")


def test_padded_lots_make_the_releases_of_eager_ones(device: str, tmp_path: Path) -> None:
    """One recording (or two, with a logged loss), fused updates, and few waits."""
    executors = (Executor(), GraphsLikeEager())
    waits = WaitsOfSteps()
    weights = []
    for executor in executors:
        folder = tmp_path / type(executor).__name__
        with waits.counting(device):
            waits.counts.clear()
            weights.append(classifier_trained(executor, device, folder, waits))
    graphs = executors[1]
    assert graphs.recordings <= 2 and graphs.repeats > REPEATED // 4  # type: ignore[attr-defined]
    eager, padded = weights
    assert float((eager - padded).norm() / eager.norm()) < CLOSE_IN_TF32
    # Whether all records are finite, the checksum of the ledger, and the copy of the batch to the device: two tensors.
    assert median(waits.counts) <= 4


def run(*command: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.long  # the tests of ledgers make the same statement on a CPU
def test_a_resumed_run_is_the_uninterrupted_one_to_the_last_bit(device: str, tmp_path: Path) -> None:
    options = trainer_options(device)
    whole = Classifier()
    half, resumed = copy.deepcopy(whole), copy.deepcopy(whole)
    fit(tmp_path / "whole", whole, 6, trainer=options)
    fit(tmp_path / "parts", half, 3, trainer=options)
    half.trainer.save_checkpoint(tmp_path / "half.ckpt")
    fit(tmp_path / "parts", resumed, 6, trainer=options, start=tmp_path / "half.ckpt")
    assert torch.equal(weights_of(whole), weights_of(resumed))
    ledgers = [(tmp_path / name / "ledger.jsonl").read_bytes() for name in ("whole", "parts")]
    assert ledgers[0] == ledgers[1]


@pytest.mark.long  # the tests of DDP make the same statement on a CPU
def test_two_processes_make_the_releases_of_one_up_to_rounding(device: str, tmp_path: Path) -> None:
    alone = tmp_path / "alone" / "weights.pt"
    together = tmp_path / "together" / "weights.pt"
    for file in (alone, together):
        file.parent.mkdir()
    run("tests.gpu.ranks", device, str(alone))
    torchrun = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    run(*torchrun, "-m", "tests.gpu.ranks", device, str(together))
    assert_same_training(torch.load(together), torch.load(alone), noise_std=1.0, expected_batch_size=12)


def test_a_step_draws_by_its_whole_key(device: str) -> None:
    draws = []
    for key in ((1, 2), (1, 2), (1 + 2**64, 2)):
        seed_global_generators(key, torch.device(device))
        draws.append(torch.rand(5, device=device))
    assert torch.equal(draws[0], draws[1]) and not torch.equal(draws[0], draws[2])
