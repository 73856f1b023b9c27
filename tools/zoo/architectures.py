"""The list of the zoo, from `zoo.yaml`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import yaml


class Architecture(NamedTuple):
    """What is trained.

    Attributes:
        name: Of its class or function in the library.
        family: Of the table.
        library: That it comes from; "own" are written for the zoo in plain torch.
        step: What it is trained for.
        private: Whether its step is a function of each record, so that it should be trained; else refusing is right.
    """

    name: str
    family: str
    library: str
    step: str
    private: bool = True


ZOO: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("zoo.yaml").read_text(encoding="utf-8"))
ARCHITECTURES = [
    Architecture(name, group["family"], group["library"], group["step"], group.get("private", True))
    for group in ZOO["networks"]
    for name in group["names"]
]
