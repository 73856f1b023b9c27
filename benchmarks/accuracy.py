"""CPU seconds from data to weights of a given accuracy, beside Opacus: `python -m benchmarks accuracy`.

A row is a whole process of one thread: imports, features, training and the test. `dpbench train` is started as a user
does; Opacus trains the same model on the same features (`dpbench.data`), with the same expected batch size, steps,
noise multiplier, bound, optimizer and schedule. Steps are fixed; how they were chosen is on the page.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.machine import cpu_of_tree
from benchmarks.orders import one_line
from benchmarks.rows import Row
from benchmarks.timing import Say

METHODS = ("dpbench", "opacus")
SEEDS = (1, 2, 3)
_PHYSICAL = 1024


@dataclass(frozen=True)
class Recipe:
    """What is trained until when.

    Attributes:
        goal: Mean test accuracy that is asked for.
        epsilon: By the PLD accountant, at δ = 1e-5.
        data: Name of the data set.
        features: Of its images; None: pixels.
        steps: Of training.
        lr: Learning rate, which falls in a straight line to a tenth.
        batch: Expected batch size.
        max_grad_norm: Bound of each record's gradient.
        image_size: Side of the images in pixels; None: as they are.
    """

    goal: float
    epsilon: float
    data: str
    features: str | None
    steps: int
    lr: float
    batch: int = 8192
    max_grad_norm: float = 0.1
    image_size: int | None = None

    @property
    def words(self) -> tuple[str, ...]:
        """After `dpbench train`: a linear model on features, a CNN on pixels."""
        model = (
            ("model=mnist_cnn", "model.activation=tanh") if self.features is None else ("model=mlp", "model.hidden=[]")
        )
        chosen = {
            "data.features": self.features or "null",
            "data.image_size": self.image_size or "null",
            "data.expected_batch_size": self.batch,
            "strategy.target_epsilon": self.epsilon,
            "strategy.max_grad_norm": self.max_grad_norm,
            "optimizer.lr": self.lr,
            "trainer.max_steps": self.steps,
        }
        return (
            f"data={self.data}",
            *model,
            "strategy=dpsgd",
            "strategy.noise_multiplier=null",
            "strategy.accountant=pld",
            "strategy.delta=1e-5",
            f"strategy.max_physical_batch_size={_PHYSICAL}",
            "optimizer=momentum",
            "schedule=linear",
            *(f"{name}={value}" for name, value in chosen.items()),
        )


RECIPES = {
    "MNIST 95 %": Recipe(0.95, 3, "mnist", None, 200, 4.0, 1024),
    "MNIST 98 %": Recipe(0.98, 3, "mnist", "scattering", 200, 16.0),
    "MNIST 98.5 %": Recipe(0.985, 3, "mnist", "scattering", 488, 14.0),
    "CIFAR-10 60 %": Recipe(0.60, 1, "cifar10", "mirrored_scattering", 45, 16.0, image_size=24),
    "CIFAR-10 65 %": Recipe(0.65, 3, "cifar10", "mirrored_scattering", 160, 16.0, image_size=24),
    "CIFAR-10 69 %": Recipe(0.69, 3, "cifar10", "mirrored_scattering", 250, 10.0),
}


def measure(
    names: Sequence[str],
    methods: Sequence[str],
    seeds: Sequence[int],
    old: Iterable[Row],
    say: Say,
) -> Iterable[Row]:
    """Yield a row for each run that has none.

    Args:
        names: Of `RECIPES`.
        methods: Of `METHODS`; Opacus takes the noise multiplier that ours had.
        seeds: Of the runs.
        old: Rows that are there.
        say: Told what is being done.
    """
    known = {(row["workload"], row["method"], row["seed"]): row for row in old}
    for seed in seeds:
        for name in names:
            for method in METHODS:
                key = (name, method, seed)
                if method not in methods or key in known:
                    continue
                say(f"{name}: {method}, seed {seed}")
                ours = known.get((name, "dpbench", seed), {})
                row = {"workload": name, "method": method, "seed": seed, "error": None}
                try:
                    row |= run(RECIPES[name], seed, None if method == "dpbench" else ours["noise_multiplier"])
                except (KeyError, subprocess.CalledProcessError) as error:
                    row["error"] = one_line(error)
                known[key] = row
                yield row


def run(recipe: Recipe, seed: int, noise_multiplier: float | None) -> Row:
    """Train once, in a process of one thread.

    Args:
        recipe: What is trained.
        seed: Of weights, batches and noise.
        noise_multiplier: Of Opacus; None: `dpbench train`, which finds it.

    Returns:
        CPU seconds, test accuracy and noise multiplier.
    """
    with TemporaryDirectory() as folder:
        if noise_multiplier is None:
            words = [*recipe.words, f"seed={seed}", "logger=none", f"hydra.run.dir={folder}/run"]
            command = ["-m", "dpbench", "train", *words, "+trainer.limit_val_batches=0"]
        else:
            facts = json.dumps([vars(recipe), seed, noise_multiplier, f"{folder}/result.json"])
            command = ["-m", "benchmarks.accuracy", facts]
        before = cpu_of_tree()
        subprocess.run(
            [sys.executable, *command],
            check=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
        )
        seconds = cpu_of_tree() - before
        if noise_multiplier is None:
            result = json.loads(Path(folder, "run", "result.json").read_text(encoding="utf-8"))
            privacy = result["privacy"]
            outcome = {
                "accuracy": result["metrics"]["test/accuracy"],
                "noise_multiplier": privacy["noise_multiplier"],
                "epsilon": privacy["epsilon"]["pld"],
            }
        else:
            outcome = json.loads(Path(folder, "result.json").read_text(encoding="utf-8"))
        return {"cpu_s": seconds, **outcome}


def opacus(recipe: Recipe, seed: int, noise_multiplier: float) -> Row:
    """Train and test as Opacus' examples do, by ghost clipping for a linear model."""
    import warnings

    import torch
    from opacus import PrivacyEngine
    from opacus.utils.batch_memory_manager import BatchMemoryManager
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    from dpbench.data.images import ImageDataModule
    from dpbench.models import MLP, MNISTCNN

    warnings.filterwarnings("ignore")
    torch.manual_seed(seed)
    images = ImageDataModule(recipe.data, features=recipe.features, image_size=recipe.image_size)
    images.prepare_data()
    images.setup("fit")
    pixels = images.train_set.pixels.permute(0, 3, 1, 2)
    records = TensorDataset(pixels, images.train_set.labels)
    shape = images.input_shape
    network: nn.Module = MLP(shape, 10, []) if recipe.features else MNISTCNN(shape, 10, activation="tanh")
    sgd = torch.optim.SGD(network.parameters(), recipe.lr, momentum=0.9)
    engine: Any = PrivacyEngine()
    options: dict[str, Any] = {"grad_sample_mode": "ghost"} if recipe.features else {}
    model, optimizer, *criteria, loader = engine.make_private(
        module=network,
        optimizer=sgd,
        criterion=nn.CrossEntropyLoss(),
        data_loader=DataLoader(records, recipe.batch),
        noise_multiplier=noise_multiplier,
        max_grad_norm=recipe.max_grad_norm,
        **options,
    )
    criterion: Any = criteria[0] if criteria else nn.CrossEntropyLoss()
    schedule = torch.optim.lr_scheduler.LinearLR(sgd, 1.0, 0.1, recipe.steps)
    steps = 0
    while steps < recipe.steps:
        with BatchMemoryManager(data_loader=loader, max_physical_batch_size=_PHYSICAL, optimizer=optimizer) as batches:
            for x, y in batches:
                optimizer.zero_grad()
                criterion(model(x), y).backward()
                optimizer.step()
                if optimizer._is_last_step_skipped:
                    continue
                schedule.step()
                steps += 1
                if steps == recipe.steps:
                    break
    model.eval()
    right = 0
    with torch.no_grad():
        for x, y in images.test_dataloader():
            right += int((model(x).argmax(1) == y).sum())
    epsilon = engine.accountant.get_epsilon(1e-5)
    return {"accuracy": right / len(images.test_set), "noise_multiplier": noise_multiplier, "epsilon": epsilon}


def summary(rows: Iterable[Row]) -> list[Row]:
    """A line for each recipe: means and deviations of accuracy, and median seconds."""
    rows = list(rows)
    lines = []
    for name, recipe in RECIPES.items():
        line: Row = {"name": name, "recipe": recipe, "words": " ".join(recipe.words)}
        for method in METHODS:
            runs = [row for row in rows if (row["workload"], row["method"]) == (name, method) and not row["error"]]
            scores = [row["accuracy"] for row in runs]
            line[method] = {
                "n": len(runs),
                "accuracy": 100 * statistics.mean(scores) if scores else None,
                "deviation": 100 * statistics.stdev(scores) if len(scores) > 1 else None,
                "cpu_s": statistics.median(row["cpu_s"] for row in runs) if runs else None,
                "reached": bool(scores) and statistics.mean(scores) >= recipe.goal,
            }
        lines.append(line)
    return lines


if __name__ == "__main__":
    options, seed, noise_multiplier, path = json.loads(sys.argv[1])
    Path(path).write_text(json.dumps(opacus(Recipe(**options), seed, noise_multiplier)), encoding="utf-8")
