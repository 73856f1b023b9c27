"""Lightning under its two names, `pytorch_lightning` and `lightning`: one code, in classes apart."""

from __future__ import annotations

import sys
from typing import Any

PACKAGES = ("pytorch_lightning", "lightning.pytorch")


def classes(name: str, part: str = "") -> tuple[type, ...]:
    """The classes of that name in those of the two packages that are loaded; imports neither.

    Args:
        name: Name of the class.
        part: Module of the package that exports it, such as "strategies"; by default the package itself.
    """
    loaded = []
    for package in PACKAGES:
        module = sys.modules.get(f"{package}.{part}".rstrip("."))
        cls = getattr(module, name, None)
        if isinstance(cls, type):
            loaded.append(cls)
    return tuple(loaded)


def overrides(module: Any, method: str) -> bool:
    """Return whether a LightningModule has its own version of a method of `LightningModule`."""
    if method in vars(module):
        return True
    originals = [getattr(cls, method) for cls in classes("LightningModule")]
    return getattr(type(module), method) not in originals


def ddp_strategies() -> tuple[type, ...]:
    """Lightning's strategies that copy the model to each process."""
    return classes("DDPStrategy", "strategies")
