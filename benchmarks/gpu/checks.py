"""What must hold on any device: gradients, sensitivity, noise, resuming, several processes."""

from __future__ import annotations

import copy
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from scipy.stats import norm
from torch import Tensor, nn

from benchmarks.gpu.ways import on_device
from benchmarks.ours import loop, mechanism_of
from benchmarks.workloads import WORKLOADS, Workload
from dpbench.privacy.gradients.engine import PerRecordEngine
from dpbench.privacy.mechanism.clipping import VectorGroup, clip_and_sum
from dpbench.privacy.mechanism.noise import add_gaussian_noise
from dpbench.session.executors import REFERENCE, Eager
from dpbench.session.graphs import Graphs

Check = Callable[[str, Path], str]
"""(device, folder for files) → what was found; AssertionError where it does not hold."""

_FEW = 6  # records
_LOT = 64  # of a release, whose counts have noise of their own
_CLOSE, _CLOSE_TF32 = 1e-4, 2e-2  # relative, of gradients
_BEYOND = 1e-5  # of the bound, that a record may move a sum by, for the rounding of the sum itself
_AFTER = (1, 20)  # steps of two processes
_NUMBERS = 2_000_000
_REPEATED = 60  # steps by graphs
_STRATEGIES = ("flat", "per_layer", "adaptive_quantile", "adaptive_mean", "discretized")
_RUN = [
    *("model=mnist_cnn", "data=digits", "data.image_size=28", "logger=none", "strategy.delta=1e-4", "seed=1"),
    *("run.group=gpu", "run.checkpoint_every_n_steps=10", "data.expected_batch_size=64"),
]


def few(workload: Workload, records: int = _FEW) -> Workload:
    """The workload with few records, each of one example."""
    return replace(workload, batch=records, microbatch_size=1)


@contextmanager
def _tf32(convolutions: bool, products: bool) -> Iterator[None]:
    before = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = convolutions, products
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = before


def _expected(model: nn.Module, x: Tensor, y: Tensor) -> list[Tensor]:
    """Sums over records of gradients whose norms are brought down to 1: one record at a time, float64, on the CPU."""
    model, x, y = copy.deepcopy(model).cpu().double(), x.cpu().double(), y.cpu()
    total = [torch.zeros_like(p) for p in model.parameters()]
    for record, label in zip(torch.split(x, 1), torch.split(y, 1), strict=True):
        gradients = torch.autograd.grad(F.cross_entropy(model(record), label), list(model.parameters()))
        length = math.sqrt(sum(float(one.square().sum()) for one in gradients))
        for whole, one in zip(total, gradients, strict=True):
            whole.add_(one * min(1.0, 1.0 / length))
    return total


def _clipped(engine: PerRecordEngine, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    everything = VectorGroup("all", tuple(range(len(engine.parameters))), 1.0)
    gradients = engine.backward(F.cross_entropy(model(x), y), len(x))
    with torch.no_grad():
        sums, _ = clip_and_sum(gradients, (everything,))
    return torch.cat([one.flatten() for one in sums])


def gradients(device: str, folder: Path) -> str:
    """Clipped sums are those of autograd, record by record, in float64; TF32 in convolutions is measured beside."""
    worst = {False: (0.0, ""), True: (0.0, "")}
    for tf32 in (False, True):
        for name, workload in WORKLOADS.items():
            model, x, y = on_device(few(workload), device)
            expected = torch.cat([one.flatten() for one in _expected(model, x, y)])
            with _tf32(tf32, False):
                found = _clipped(PerRecordEngine(model), model, x, y).cpu().double()
            worst[tf32] = max(worst[tf32], (float((found - expected).norm() / expected.norm()), name))
    assert worst[False][0] < _CLOSE and worst[True][0] < _CLOSE_TF32, f"relative errors {worst}"
    return "largest relative error " + ", ".join(
        f"{error:.1e} ({name}){' with TF32 in convolutions, the default' if tf32 else ''}"
        for tf32, (error, name) in worst.items()
    )


def sensitivity(device: str, folder: Path) -> str:
    """One record moves the clipped sum by at most the bound, also where matrix products are made in TF32."""
    worst = {}
    for tf32 in (False, True):
        lengths = []
        for workload in WORKLOADS.values():
            model, x, y = on_device(few(workload), device)
            engine = PerRecordEngine(model)
            with _tf32(True, tf32):
                lengths += [
                    float(_clipped(engine, model, a, b).double().norm())
                    for a, b in zip(torch.split(x, 1), torch.split(y, 1), strict=True)
                ]
        worst[tf32] = max(lengths)
    assert worst[False] <= 1 + _BEYOND, f"a record moves a sum by {worst[False]} of its bound"
    return f"largest {worst[False]:.7f} of the bound; {worst[True]:.7f} with torch.set_float32_matmul_precision('high')"


def noise(device: str, folder: Path) -> str:
    """Noise has the right scale (and not 2/3 or 3/2 of it), repeats with its key, and differs with another."""
    std = 1.7

    def drawn(key: int) -> Tensor:
        return add_gaussian_noise(torch.zeros(_NUMBERS, device=device), [(_NUMBERS, std)], (key,))

    first, again, other = drawn(1), drawn(1), drawn(2)
    assert torch.equal(first, again) and not torch.equal(first, other), "noise is not a function of its key"
    limit = norm.isf(1e-6) * math.sqrt(2 / _NUMBERS)  # of the variance, relative
    ratios = [float(first.double().square().mean()) / (std * wrong) ** 2 for wrong in (1, 2 / 3, 3 / 2)]
    assert abs(ratios[0] - 1) < limit and all(abs(ratio - 1) > limit for ratio in ratios[1:]), f"variances {ratios}"
    correlation = float((first.double() * other.double()).mean()) / std**2
    assert abs(correlation) < norm.isf(1e-6) / math.sqrt(_NUMBERS), f"two keys correlate by {correlation}"
    return (
        f"variance {ratios[0]:.4f} of the declared (allowed: 1 ± {limit:.4f}), two keys correlate by {correlation:.1e}"
    )


def strategies(device: str, folder: Path) -> str:
    """Every strategy makes a finite release of every network."""
    made = 0
    for name, workload in WORKLOADS.items():
        for strategy in _STRATEGIES:
            small = few(workload, _LOT)
            model, x, y = on_device(small, device)
            engine = PerRecordEngine(model)
            mechanism = mechanism_of(strategy, small, engine)
            grads = engine.backward(F.cross_entropy(model(x), y), len(x))
            with torch.no_grad():
                mechanism.accumulate(grads, len(x))
                mechanism.add_noise(lambda step: (1, 1))
                released = mechanism.post_process()
            assert all(bool(one.isfinite().all()) for one in released), f"{strategy} of {name} is not finite"
            made += 1
    return f"{made} of {made} finite"


def _dpbench(*words: str) -> None:
    done = subprocess.run([sys.executable, "-m", "dpbench", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"dpbench {words[0]}: {done.stderr.strip().splitlines()[-1:]}"


def _kept(run: Path) -> tuple[dict[str, Tensor], bytes]:
    state = torch.load(run / "checkpoints" / "last.ckpt", map_location="cpu", weights_only=False)["state_dict"]
    return state, (run / "ledger.jsonl").read_bytes()


def resumed(device: str, folder: Path) -> str:
    """A run that goes on from its checkpoint is the run that was never interrupted, to the last bit."""
    words = [*_RUN, f"trainer={'gpu' if device == 'cuda' else 'cpu'}"]
    whole, parts = folder / "whole", folder / "parts"
    _dpbench("train", *words, "trainer.max_steps=40", f"hydra.run.dir={whole}")
    _dpbench("train", *words, "trainer.max_steps=20", f"hydra.run.dir={parts}")
    _dpbench("resume", str(parts), "trainer.max_steps=40")
    (one, ledger), (other, second) = _kept(whole), _kept(parts)
    assert ledger == second, "the ledgers differ"
    different = [name for name, value in one.items() if not torch.equal(value, other[name])]
    assert not different, f"weights differ: {', '.join(different[:3])}"
    return "weights and ledger of 20 + 20 steps are those of 40"


def processes(device: str, folder: Path) -> str:
    """Two processes make the releases of one, up to rounding."""
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    apart = {}
    for steps in _AFTER:
        weights = []
        for name, start in {"one": [], "two": torchrun}.items():
            file = folder / f"{name}{steps}" / "weights.pt"
            file.parent.mkdir(parents=True)
            words = [sys.executable, "-m", *start, "benchmarks.gpu.ranks", device, str(file), str(steps)]
            env = {**os.environ, "OMP_NUM_THREADS": "1"}
            done = subprocess.run(words, capture_output=True, text=True, check=False, env=env)
            assert done.returncode == 0, f"{words[2]}: {done.stderr.strip().splitlines()[-1:]}"
            weights.append(torch.load(file))
        one, two = weights
        apart[steps] = max(float((one[name] - two[name]).abs().max() / one[name].abs().max()) for name in one)
    found = ", ".join(f"{value:.1e} after {steps} steps" for steps, value in apart.items())
    assert apart[_AFTER[0]] < _CLOSE, f"weights differ by {found}"
    return f"weights differ by {found}"


class _AlikeGraphs(Graphs):
    """Graphs with the keys of the reference: the noise is the same, and what differs is rounding."""

    name = REFERENCE
    needs_gpu = False


def graphs(device: str, folder: Path) -> str:
    """A lot that is repeated as a graph makes the release of an eager lot, up to rounding."""
    differences = {}
    for name in ("mnist_cnn b256", "mlp b256", "small_alexnet b128"):
        weights = []
        for executor in (Eager(), _AlikeGraphs()):
            with patch("dpbench.callback.strategy.executor_of", lambda _, executor=executor: executor):
                small = few(WORKLOADS[name], _LOT)
                torch.manual_seed(0)
                step, model = loop(small, device, "auto")
            for _ in range(_REPEATED):
                step()
            weights.append(torch.cat([p.detach().double().flatten() for p in model.parameters()]))
            if isinstance(executor, _AlikeGraphs):
                assert executor.repeats > _REPEATED // 4, (
                    f"{name}: {executor.repeats} of {_REPEATED} lots were repeated"
                )
        eager, repeated = weights
        differences[name] = float((eager - repeated).norm() / eager.norm())
    found = ", ".join(f"{difference:.1e} ({name})" for name, difference in differences.items())
    assert max(differences.values()) < _CLOSE_TF32, f"weights differ by {found}"
    return f"relative difference of the weights after {_REPEATED} steps: {found}"


CHECKS: dict[str, Check] = {
    "graphs": graphs,
    "gradients": gradients,
    "sensitivity": sensitivity,
    "noise": noise,
    "strategies": strategies,
    "resumed": resumed,
    "two processes": processes,
}


def checked(name: str, device: str, folder: Path) -> dict[str, Any]:
    """Row of a check: whether it holds, and what was found."""
    folder.mkdir(parents=True, exist_ok=True)
    about = " ".join((CHECKS[name].__doc__ or "").split())
    try:
        return {"check": name, "about": about, "holds": True, "found": CHECKS[name](device, folder)}
    except Exception as error:  # one that fails does not hide the others
        return {
            "check": name,
            "about": about,
            "holds": False,
            "found": " ".join(f"{type(error).__name__}: {error}".split())[:300],
        }
