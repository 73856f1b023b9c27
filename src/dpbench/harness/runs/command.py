"""A run's command, read back from `.hydra`: its words, and the chosen file of each group."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from dpbench.errors import ConfigurationError, brief
from dpbench.harness.runs.folder import FastLoader, RunFolder


def words_of(folder: RunFolder) -> tuple[str, ...]:
    """Overrides of a run; of one of a sweep with the values that it had. Empty where Hydra did not make it.

    Raises:
        ConfigurationError: The file is damaged.
    """
    words = _read(folder.hydra / "overrides.yaml")
    return tuple(map(str, words)) if isinstance(words, list) else ()


def choices_of(folder: RunFolder) -> dict[str, str]:
    """Group → name of its file, such as strategy → dpsgd. Empty where Hydra did not make the run.

    Raises:
        ConfigurationError: The file is damaged.
    """
    content = _read(folder.hydra / "hydra.yaml")
    for key in ("hydra", "runtime", "choices"):
        content = content.get(key) if isinstance(content, dict) else None
    choices = {}
    if isinstance(content, dict):
        for group, name in content.items():
            if name is not None and "hydra/" not in str(group):  # Hydra's own groups say nothing of a result
                choices[str(group)] = str(name)
    return choices


def key_of(word: str) -> str:
    """Key that a word sets: optimizer.momentum for `+optimizer.momentum=0.9`."""
    return word.partition("=")[0].lstrip("+~")


def _read(path: Path) -> Any:
    if not path.is_file():
        return None
    try:
        return yaml.load(path.read_text(encoding="utf-8"), FastLoader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigurationError(f"{path} is damaged: {brief(error)} (delete it; it is not needed).") from error
