"""A sweeper that chooses: it runs two values of a key, and writes down which returned less."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.types import Override


class BetterOfTwo:
    """Runs both.

    Args:
        key: Key of the configuration.
        values: Two values of it.
    """

    def __init__(self, key: str, values: list[Any]) -> None:
        self.key = key
        self.values = values

    def directions(self) -> list[str]:
        """Minimize one objective."""
        return ["minimize"]

    def search(self, overrides: Sequence[Override], folder: Path, run_jobs: Callable[..., list[Any]]) -> list[Any]:
        """Run both at once, and choose by what they return."""
        words = [override.input_line for override in overrides]
        returned = run_jobs([[*words, f"{self.key}={value}"] for value in self.values])
        best = min(range(len(returned)), key=returned.__getitem__)
        (folder / "best.txt").write_text(f"{best} {returned[best][0]}")
        return returned


ConfigStore.instance().store(
    group="hydra/sweeper",
    name="better_of_two",
    node={"_target_": f"{__name__}.BetterOfTwo", "key": "optimizer.lr", "values": [0.001, 0.3]},
)
