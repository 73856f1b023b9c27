"""dpbench: differentially private deep learning with PyTorch Lightning, by adding one callback."""

from __future__ import annotations

import warnings
from contextlib import suppress
from importlib import import_module, metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dpbench.callback.check import check
    from dpbench.callback.loop import PrivateLoop
    from dpbench.data.loader import PrivateDataLoader
    from dpbench.models.fixing import fix
    from dpbench.models.trainable import train_only
    from dpbench.privacy.accounting.ledger import read_ledger
    from dpbench.records.step_state import independent
    from dpbench.strategies import (
        DPSGD,
        AdaptiveMeanClipping,
        AdaptiveQuantileClipping,
        AutomaticClipping,
        ClipOnly,
        DiscretizedDPSGD,
        FederatedAveraging,
        NoiseOnly,
        NonPrivate,
        PrivateStrategy,
        VectorGroups,
    )

__version__ = "0.2.0"
__all__ = [
    "DPSGD",
    "AdaptiveMeanClipping",
    "AdaptiveQuantileClipping",
    "AutomaticClipping",
    "ClipOnly",
    "DiscretizedDPSGD",
    "FederatedAveraging",
    "NoiseOnly",
    "NonPrivate",
    "PrivateDataLoader",
    "PrivateLoop",
    "PrivateStrategy",
    "VectorGroups",
    "__version__",
    "check",
    "fix",
    "independent",
    "read_ledger",
    "train_only",
]

_ELSEWHERE = {
    "PrivateDataLoader": "dpbench.data.loader",
    "PrivateLoop": "dpbench.callback.loop",
    "check": "dpbench.callback.check",
    "fix": "dpbench.models.fixing",
    "independent": "dpbench.records.step_state",
    "read_ledger": "dpbench.privacy.accounting.ledger",
    "train_only": "dpbench.models.trainable",
}


def __getattr__(name: str) -> Any:
    """Import torch only when something of it is asked for, so that `dpbench --help` answers at once."""
    if name in __all__:
        return getattr(import_module(_ELSEWHERE.get(name, "dpbench.strategies")), name)
    if name == "LotLoader":  # until 0.3
        loader = __getattr__("PrivateDataLoader")  # first: imports change filters, after which a warning is shown again
        warnings.warn("LotLoader is now PrivateDataLoader.", FutureWarning, stacklevel=2)
        return loader
    from dpbench.names import from_capability

    return from_capability("dpbench", name)


def __dir__() -> list[str]:
    return sorted({*__all__, *metadata.entry_points(group="dpbench").names})


# By name: packages_distributions() would read the files of every distribution.
with suppress(metadata.PackageNotFoundError):
    warnings.warn(
        f"the distribution dpbench {metadata.version('dpbench')} is another project with an import package of this "
        "name, and files of both overwrite each other: pip uninstall -y dpbench, then install ours "
        "(dpbench-lightning) again.",
        stacklevel=2,
    )
