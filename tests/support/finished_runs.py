"""Folders of runs that are finished: trained once for all tests that read runs, or written without training."""

from __future__ import annotations

import fcntl
import json
from pathlib import Path
from typing import Any

import yaml

from tests.support.cli import TINY, dpbench

STEPS = 6
"""Steps of the runs on digits without a GAN."""
_PRIVATE = [*TINY, f"trainer.max_steps={STEPS}", "strategy.delta=1e-4", "strategy.noise_multiplier=2"]
_GAN = "experiment=digits_gan logger=none trainer.max_steps=12 model.width=8 model.noise_size=8"
_NOISE = """
data=random_noise data.like=digits data.image_size=8 data.train_size=300 data.test_size=400 model=mlp model.hidden=[32]
logger=none data.expected_batch_size=50 optimizer=momentum optimizer.lr=0.05 trainer.check_val_every_n_epoch=null
trainer.max_steps=40 strategy.noise_multiplier=0.7
"""
RUNS = {
    "secure": [*_PRIVATE, "strategy.secure=true"],
    "seeded": _PRIVATE,
    "seed_1": [*_PRIVATE, "seed=1"],
    "not_private": [*TINY, f"trainer.max_steps={STEPS}", "strategy=none"],
    "gan": _GAN.split(),
    "noise": _NOISE.split(),
}
"""Kind of run → what trains it."""


def trained(kind: str, folder: Path) -> Path:
    """Train a run of a kind, or find it where another test, or another process of the tests, has trained it.

    Args:
        kind: A key of `RUNS`.
        folder: Folder of all kinds, which the processes of the tests share.

    Returns:
        The run, which tests may read; what they change is a copy.
    """
    folder.mkdir(exist_ok=True)
    with open(folder / f"{kind}.lock", "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / kind / "result.json").exists():
            dpbench(folder, "train", *RUNS[kind], f"hydra.run.dir={kind}")
    return folder / kind


def finished(folder: Path, accuracy: float | None, epsilon: float | None, **strategy: Any) -> None:
    folder.mkdir(parents=True)
    config = {"run": {"name": folder.name}, "strategy": {"_target_": "dpbench.strategies.DPSGD", **strategy}, "seed": 0}
    record = {
        "config": config,
        "metrics": {"test/accuracy": accuracy},
        "privacy": {"epsilon": {"rdp": epsilon, "pld": None}},
        "seed": 0,
        "seconds": 3.0,
        "steps": 1000,
    }
    (folder / "result.json").write_text(json.dumps(record))


_SHORT = {"lr": "config.optimizer.lr", "accuracy": "metrics.test/accuracy", "rdp": "privacy.epsilon.rdp"}


def written(folder: Path, runs: str) -> Path:
    """Write records of runs, as far as reports read them.

    Args:
        folder: Where they go.
        runs: YAML: the name of each run, and what differs in its record, by dotted keys or those of `_SHORT`.
            `seed` is that of the configuration too, and `choices` is what Hydra leaves of the groups of a run.
    """
    for name, changes in yaml.safe_load(runs).items():
        own = folder / name
        own.mkdir(parents=True)
        config: dict[str, Any] = {"run": {"name": own.name}, "optimizer": {"lr": 0.1}, "seed": changes.get("seed", 0)}
        privacy = {"epsilon": {"rdp": 1.5, "pld": None}, "delta": 1e-5, "unit": "example"}
        record = {"config": config, "metrics": {"test/accuracy": 0.9}, "privacy": privacy, "seed": config["seed"]}
        record |= {"seconds": 3.0, "steps": 1000, "code_hash": "c", "versions": {}, "foreign_code": {}}
        for key, value in changes.items():
            *parents, last = _SHORT.get(key, key).split(".")
            place: dict[str, Any] = record
            for parent in parents:
                place = place.setdefault(parent, {})
            place[last] = value
        if (choices := record.pop("choices", None)) is not None:
            (own / ".hydra").mkdir()
            text = yaml.safe_dump({"hydra": {"runtime": {"choices": {**choices, "hydra/launcher": "basic"}}}})
            (own / ".hydra" / "hydra.yaml").write_text(text)
        settings = {key: value for key, value in config.items() if key != "run"}
        (own / "result.json").write_text(json.dumps({"config_hash": str(settings), **record}))
    return folder
