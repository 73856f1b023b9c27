"""What hundreds of tests ask of libraries with the same arguments, computed once in each process.

All of it is a pure function, or an object that nobody changes: no test sees another value than it would without.
"""

from __future__ import annotations

import copy
import functools
import pickle
import sys
from collections.abc import Callable
from importlib import metadata
from typing import Any

import yaml
from dp_accounting.pld import privacy_loss_distribution
from dp_accounting.rdp import rdp_privacy_accountant
from hydra.core.config_store import ConfigStore
from sklearn import datasets


def install() -> None:
    """Put caches before functions of dp_accounting, Hydra and OmegaConf."""
    pld, rdp = privacy_loss_distribution, rdp_privacy_accountant
    cached = functools.lru_cache(maxsize=256)
    pld.from_gaussian_mechanism = cached(pld.from_gaussian_mechanism)
    pld.PrivacyLossDistribution.self_compose = cached(pld.PrivacyLossDistribution.self_compose)
    # A moment is a sum of up to a thousand terms, each with a binomial coefficient that knows nothing of the noise.
    cached = functools.lru_cache(maxsize=2**20)
    rdp._compute_log_a = cached(rdp._compute_log_a)
    rdp._compute_rdp_sample_wor_gaussian_scalar = cached(rdp._compute_rdp_sample_wor_gaussian_scalar)
    rdp._log_comb = cached(rdp._log_comb)
    # Hydra copies all structured configurations of the process for each question about a group; it changes none of
    # them, and copies again what it loads.
    ConfigStore.__deepcopy__ = lambda store, memo: store  # type: ignore[attr-defined]
    yaml.load = _remembering(yaml.load)
    digits = functools.cache(datasets.load_digits)
    datasets.load_digits = lambda: copy.deepcopy(digits())
    # Each question reads the metadata of two hundred packages, and a run asks ten times.
    own = metadata.entry_points
    answer = functools.cache(lambda path, **chosen: own(**chosen))
    for module in list(sys.modules.values()):
        if vars(module).get("entry_points") is own:
            module.entry_points = lambda **chosen: answer(tuple(sys.path), **chosen)  # type: ignore[attr-defined]


def _remembering(load: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """A loader of YAML that parses the same text of a configuration once; files may change in between."""
    parsed: dict[str, bytes] = {}

    def remembered(stream: Any, Loader: Any) -> Any:
        if Loader.__name__ != "OmegaConfLoader" or not hasattr(stream, "seek"):
            return load(stream, Loader)
        start = stream.tell()
        text = stream.read()
        if text not in parsed:
            stream.seek(start)  # not the text: an error names the file
            parsed[text] = pickle.dumps(load(stream, Loader))
        return pickle.loads(parsed[text])

    return remembered
