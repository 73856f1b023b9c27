"""dpbench: differentially private deep learning with PyTorch Lightning, by adding one callback."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dpbench.data.lots import LotLoader
    from dpbench.data.users import UserDataset
    from dpbench.records.local_training import LocalTraining
    from dpbench.records.users import Users
    from dpbench.strategies.dpsgd import DPSGD

__version__ = "0.2.0"
__all__ = ["DPSGD", "LocalTraining", "LotLoader", "UserDataset", "Users", "__version__"]

_LAZY = {
    "DPSGD": "dpbench.strategies.dpsgd",
    "LocalTraining": "dpbench.records.local_training",
    "LotLoader": "dpbench.data.lots",
    "UserDataset": "dpbench.data.users",
    "Users": "dpbench.records.users",
}


def __getattr__(name: str) -> Any:
    """Import torch only when something of it is asked for, so that `dpbench --help` answers at once."""
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'dpbench' has no attribute {name!r}")
