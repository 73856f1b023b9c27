"""Configurations as Hydra composes them."""

from __future__ import annotations

from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf

from dpbench.harness.run.search_path import conf_dir, groups_of, use_plugins
from dpbench.strategies import PrivateStrategy

GROUPS = groups_of(conf_dir())


def composed(*words: str) -> DictConfig:
    use_plugins()
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        cfg = compose("config", list(words), return_hydra_config=True)
    HydraConfig.instance().set_config(cfg)
    return cfg


STRATEGIES: dict[str, type[PrivateStrategy]] = {
    name: get_object(OmegaConf.load(conf_dir() / "strategy" / f"{name}.yaml")["_target_"])
    for name in GROUPS["strategy"]
    if name != "none"
}
