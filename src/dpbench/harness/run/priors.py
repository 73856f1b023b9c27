"""`dpbench priors`: estimate the priors of the error correction on public data."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytorch_lightning as pl
from omegaconf import DictConfig

from dpbench.errors import ConfigurationError
from dpbench.harness.run import build
from dpbench.harness.run.progress import bars, quiet
from dpbench.harness.runs.folder import RunFolder
from dpbench.strategies.priors import PublicPriors


def priors_job(cfg: DictConfig) -> None:
    """Train without noise on public data, and print the override that a private run takes.

    Args:
        cfg: The composed configuration; options of `strategy=discretized` or `strategy=dpsgd`.
    """
    quiet()
    config = build.plain(cfg)
    if config["strategy"]["_target_"].rpartition(".")[2] not in ("DPSGD", "DiscretizedDPSGD"):
        raise ConfigurationError("dpbench priors knows strategy=discretized and strategy=dpsgd; choose one of them.")
    config["strategy"]["_target_"] = f"{PublicPriors.__module__}.{PublicPriors.__name__}"
    with tempfile.TemporaryDirectory() as folder:
        strategy = build.build_strategy(config, RunFolder(Path(folder)))
        assert isinstance(strategy, PublicPriors)
        data = build.build_data(config, strategy)
        pl.seed_everything(config["seed"], verbose=False)
        module = build.build_module(config, data)
        trainer = build.build_trial_trainer(config, folder, [strategy, *bars(config["trainer"])])
        trainer.fit(module, data)
    numbers = ",".join(f"{p:.6g}" for p in strategy.estimate)
    name = config["data"].get("name", type(data).__name__)
    print(f"estimated on {name} in {strategy.releases} steps, without privacy: public data only")
    print(f"strategy.priors=[{numbers}]")
