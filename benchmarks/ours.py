"""Our step: through the bare engine, and through everything that `dpbench train` does."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytorch_lightning as pl
import torch
import torch.nn.functional as F

from benchmarks.orders import Orders
from benchmarks.plain import SGD, MakeOptimizer, Step, on_device
from benchmarks.workloads import Workload
from dpbench.privacy.events import UNITS, Summands
from dpbench.privacy.gradients.engine import PerRecordEngine
from dpbench.privacy.mechanism.mechanism import Mechanism, Merge
from dpbench.privacy.mechanism.noise_process import Gaussian
from dpbench.privacy.mechanism.training_plan import TrainingPlan
from dpbench.privacy.sampling import PoissonSampling
from dpbench.strategies import DPSGD, AdaptiveMeanClipping, AdaptiveQuantileClipping, DiscretizedDPSGD, PrivateStrategy

POPULATION = 60_000
STRATEGIES: dict[str, tuple[Callable[..., PrivateStrategy], dict[str, Any]]] = {
    "flat": (DPSGD, {}),
    "per_layer": (DPSGD, {"clipping": "per_layer"}),
    "adaptive_quantile": (AdaptiveQuantileClipping, {}),
    "adaptive_mean": (AdaptiveMeanClipping, {"initial_max_grad_norm": 1.0}),
    "discretized": (DiscretizedDPSGD, {}),
}
HARNESS = {
    "flat": ["strategy=dpsgd", "strategy.executor=eager"],
    "flat graph": ["strategy=dpsgd", "strategy.executor=graph"],
    "per_layer": ["strategy=dpsgd", "strategy.clipping=per_layer"],
    "adaptive_quantile": ["strategy=adaptive_quantile"],
    "adaptive_mean": ["strategy=adaptive_mean", "strategy.initial_max_grad_norm=1.0"],
    "discretized": ["strategy=discretized"],
    "no privacy": ["strategy=none"],
}


def mechanism_of(name: str, engine: PerRecordEngine, batch: int, microbatch_size: int = 1) -> Mechanism:
    """What the strategy of that name does to per-record gradients."""
    make, options = STRATEGIES[name]
    strategy = make(noise_multiplier=1.0, delta=1e-5, microbatch_size=microbatch_size, **options)
    sampling = PoissonSampling(POPULATION, batch / POPULATION)
    sizes = tuple(parameter.numel() for parameter in engine.parameters)
    groups = strategy.recipe.groups(engine.names, sizes)
    summands = Summands("microbatch", microbatch_size) if microbatch_size > 1 else UNITS
    plan = TrainingPlan(strategy.recipe, sampling, Gaussian(1.0), groups, sizes, summands=summands)
    return Mechanism(plan, engine.parameters)


def bare(workload: Workload, name: str, device: str, make_optimizer: MakeOptimizer = SGD) -> Step:
    """Forward, per-record gradients, clipping, noise, SGD (or another); without Lightning and without a ledger."""
    model, x, y = on_device(workload, device)
    optimizer = make_optimizer(model.parameters())
    engine = PerRecordEngine(model)
    mechanism = mechanism_of(name, engine, workload.batch, workload.microbatch_size)
    merge = _merge(workload, device)
    return private_step(engine, mechanism, optimizer, lambda: F.cross_entropy(model(x), y), len(x), merge)


def private_step(
    engine: PerRecordEngine,
    mechanism: Mechanism,
    optimizer: torch.optim.Optimizer,
    forward: Callable[[], torch.Tensor],
    records: int,
    merge: Merge | None = None,
) -> Step:
    """Forward, per-record gradients, clipping, noise and update.

    Args:
        engine: Of the network.
        mechanism: Clipping and noise.
        optimizer: Of the network's parameters.
        forward: Returns the mean of the records' losses.
        records: In a lot.
        merge: Microbatch of each record.
    """
    releases = itertools.count()

    def step() -> torch.Tensor:
        loss = forward()
        with torch.no_grad():
            mechanism.clear()
            mechanism.accumulate(engine.backward(loss, records), records, merge)
            mechanism.add_noise(lambda step: (1, next(releases)))
            for parameter, gradient in zip(engine.parameters, mechanism.post_process(), strict=True):
                parameter.grad = gradient
        optimizer.step()
        return loss

    return step


def _merge(workload: Workload, device: str) -> Merge | None:
    """Each example joins one of the microbatches, as the harness draws them."""
    if workload.microbatch_size == 1:
        return None
    records = workload.batch // workload.microbatch_size
    members = torch.randint(records, (workload.batch,), generator=torch.Generator().manual_seed(2)).to(device)
    return members, records, 1 / workload.microbatch_size


class Conductor(pl.Callback):
    """Makes the trainer's loop take one step for each that is ordered.

    Args:
        orders: The orders, which may come when the first step is over.
    """

    def __init__(self, orders: Orders) -> None:
        self._orders = orders
        self._is_ready = False

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Wait for the next order of a step."""
        if not self._is_ready:
            self._orders.say()
            self._is_ready = True
        self._orders.advance(len(batch[1]))


def harness(workload: Workload, name: str, device: str, orders: Orders) -> None:
    """Run `dpbench train` with the strategy: Poisson lots, ledger, metrics, progress bar; obeys orders."""
    from hydra import compose, initialize_config_dir

    from dpbench.harness.run.build import plain
    from dpbench.harness.run.search_path import conf_dir
    from dpbench.harness.run.train import train

    words = [
        *workload.harness,
        *HARNESS[name],
        f"data.expected_batch_size={workload.batch}",
        f"trainer={'gpu' if device == 'cuda' else 'cpu'}",
        "trainer.max_steps=1000000",
        "+trainer.limit_val_batches=0",
        "logger=none",
        "run.name=benchmark",
        "run.group=benchmark",
    ]
    with TemporaryDirectory() as folder:
        with initialize_config_dir(str(conf_dir().resolve()), version_base="1.3"):
            config = plain(compose("config", words))
        train(config, Path(folder), [Conductor(orders)], show=True)
