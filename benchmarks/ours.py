"""Our step: through the bare engine, and through everything that `dpbench train` does."""

from __future__ import annotations

import atexit
import itertools
import shutil
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from benchmarks.orders import Orders
from benchmarks.plain import SGD, MakeOptimizer, Step, laid_out
from benchmarks.workloads import Workload
from dpbench.callback.loop import PrivateLoop
from dpbench.data.lots import LotLoader
from dpbench.privacy.events import UNITS, Summands
from dpbench.privacy.gradients.engine import PerRecordEngine
from dpbench.privacy.mechanism.mechanism import Mechanism, Merge
from dpbench.privacy.mechanism.noise_process import Gaussian
from dpbench.privacy.mechanism.training_plan import TrainingPlan
from dpbench.privacy.sampling import PoissonSampling
from dpbench.strategies import DPSGD, AdaptiveMeanClipping, AdaptiveQuantileClipping, DiscretizedDPSGD, PrivateStrategy

POPULATION = 60_000
_LOTS = 8  # that the records of a loop would fill
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


def mechanism_of(name: str, workload: Workload, engine: PerRecordEngine) -> Mechanism:
    """What the strategy of that name does to per-record gradients."""
    make, options = STRATEGIES[name]
    strategy = make(noise_multiplier=1.0, delta=1e-5, microbatch_size=workload.microbatch_size, **options)
    sampling = PoissonSampling(POPULATION, workload.batch / POPULATION)
    sizes = tuple(parameter.numel() for parameter in engine.parameters)
    groups = strategy.recipe.groups(engine.names, sizes)
    size = workload.microbatch_size
    summands = Summands("microbatch", size) if size > 1 else UNITS
    plan = TrainingPlan(strategy.recipe, sampling, Gaussian(1.0), groups, sizes, summands=summands)
    return Mechanism(plan, engine.parameters)


def bare(workload: Workload, name: str, device: str, make_optimizer: MakeOptimizer = SGD) -> Step:
    """Forward, per-record gradients, clipping, noise, SGD (or another); without Lightning and without a ledger."""
    layout = torch.channels_last
    model = workload.model().to(device, memory_format=layout)  # type: ignore[call-overload]
    x, y = (data.to(device) for data in workload.data())
    x = laid_out(x, layout)
    optimizer = make_optimizer(model.parameters())
    engine = PerRecordEngine(model)
    mechanism = mechanism_of(name, workload, engine)
    merge = _merge(workload, device)
    releases = itertools.count()

    def step() -> torch.Tensor:
        loss = F.cross_entropy(model(x), y)
        with torch.no_grad():
            mechanism.clear()
            mechanism.accumulate(engine.backward(loss, len(x)), len(x), merge)
            mechanism.add_noise(lambda step: (1, next(releases)))
            for parameter, gradient in zip(engine.parameters, mechanism.post_process(), strict=True):
                parameter.grad = gradient
        optimizer.step()
        return loss

    return step


def _merge(workload: Workload, device: str) -> Merge | None:
    """Each example joins one of the microbatches, as the harness draws them; each view that of its record."""
    if workload.views > 1:
        of_view = torch.arange(workload.batch).repeat_interleave(workload.views)
        return of_view.to(device), workload.batch, 1 / workload.views
    if workload.microbatch_size == 1:
        return None
    records = workload.batch // workload.microbatch_size
    members = torch.randint(records, (workload.batch,), generator=torch.Generator().manual_seed(2)).to(device)
    return members, records, 1 / workload.microbatch_size


def loop(
    workload: Workload, device: str, executor: str, make: Callable[..., PrivateStrategy] = DPSGD
) -> tuple[Step, nn.Module]:
    """A step of `PrivateLoop`: Poisson lots, guards and ledger, without Lightning.

    Args:
        workload: Its records come again until there are eight lots of them.
        device: Of the model.
        executor: Of the strategy.
        make: The strategy.

    Returns:
        The step and the model.
    """
    layout = torch.channels_last
    model = workload.model().to(device, memory_format=layout)  # type: ignore[call-overload]
    x, y = workload.data()
    records = TensorDataset(x.repeat(_LOTS, *[1] * (x.dim() - 1)), y.repeat(_LOTS))
    folder = mkdtemp()
    # The ledger is written as long as steps are made, that is as long as the process lives.
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    strategy = make(
        noise_multiplier=1.0,
        delta=1e-5,
        seed=1,
        executor=executor,
        ledger=str(Path(folder) / "ledger.jsonl"),
    )
    steps = iter(
        PrivateLoop(
            model,
            SGD(model.parameters()),
            LotLoader.poisson(records, workload.batch, seed=1),
            strategy,
            lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
            steps=10**6,
        )
    )

    def step() -> object:
        return next(steps)

    return step, model


class Conductor(pl.Callback):
    """Makes the trainer's loop take one step for each that is ordered.

    Args:
        orders: The orders.
        facts: Said when the first step is over and orders may come.
    """

    def __init__(self, orders: Orders, facts: dict[str, Any]) -> None:
        self._orders = orders
        self._facts: dict[str, Any] | None = facts

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Wait for the next order of a step."""
        if self._facts is not None:
            self._orders.say(**self._facts)
            self._facts = None
        self._orders.advance(len(batch[1]))


def harness(workload: Workload, name: str, device: str, orders: Orders) -> None:
    """Run `dpbench train` with the strategy: Poisson lots, ledger, metrics, progress bar; obeys orders."""
    from hydra import compose, initialize_config_dir

    from dpbench.run.build import plain
    from dpbench.run.search_path import conf_dir
    from dpbench.run.train import train

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
        train(config, Path(folder), [Conductor(orders, {"methods": {f"harness/{name}": {}}})], show=True)
