"""From command line words to Hydra jobs."""

from __future__ import annotations

import difflib
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from dpbench.errors import ConfigurationError

_EXTRAS = ("joblib", "submitit", "ray")


def conf_dir() -> Path:
    """The configuration files: inside the installed package, or at the top of the checkout."""
    package = Path(__file__).parents[1]
    installed = package / "conf"
    return installed if installed.is_dir() else package.parents[1] / "conf"


def groups_of(conf: Path) -> dict[str, list[str]]:
    """Names in each configuration group."""
    groups = sorted(path for path in conf.iterdir() if path.is_dir())
    return {
        group.name: sorted(path.relative_to(group).with_suffix("").as_posix() for path in group.rglob("*.yaml"))
        for group in groups
    }


def launch(words: Sequence[str], conf: Path | None = None, name: str = "config") -> int:
    """Compose the configuration and run the job or the sweep.

    Args:
        words: Hydra overrides and flags.
        conf: Folder of the configuration.
        name: Primary configuration in it.

    Raises:
        ConfigurationError: The words do not compose.
    """
    import hydra
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    from dpbench.training.run import train_job
    from dpbench.training.schema import register_schemas

    register_schemas()
    conf = conf or conf_dir()
    os.environ["HYDRA_FULL_ERROR"] = "1"  # let exceptions through; `cli` prints them
    before, sys.argv = sys.argv, ["dpbench train", *words]
    try:
        hydra.main(version_base="1.3", config_path=str(conf.resolve()), config_name=name)(train_job)()
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigurationError(_one_line(error, words, conf)) from error
    finally:
        sys.argv = before
    return 0


def launch_again(folder: Path, words: Sequence[str]) -> int:
    """Continue an interrupted run in its own folder, with its own configuration.

    Raises:
        ConfigurationError: The folder holds no run.
    """
    saved = folder / ".hydra" / "config.yaml"
    if not saved.is_file():
        raise ConfigurationError(f"{folder} holds no run of dpbench ({saved} is missing).")
    place = [f"hydra.run.dir='{folder.resolve()}'", "hydra.output_subdir=null", "run.resume=true"]
    return launch([*place, *words], saved.parent)


def _one_line(error: BaseException, words: Sequence[str], conf: Path) -> str:
    """Hydra's message without its ornaments, with the nearest name that exists."""
    lines = [line.strip() for line in str(error.__cause__ or error).splitlines() if line.strip()]
    text = " ".join(line for line in lines if not line.startswith(("object_type=", "reference_type=", "full_key:")))
    first = str(error).splitlines()[0]
    text = first if first in text or not text else f"{first} {text}"
    if (missing := re.search(r"Could not find '(\w+)/([\w/]+)'", str(error))) is not None:
        group, name = missing.groups()
        names = groups_of(conf).get(group, [])
        near = difflib.get_close_matches(name, names, 1)
        hint = f" Did you mean {group}={near[0]}?" if near else ""
        return f"there is no {group}={name}.{hint} Known: {', '.join(names)}."
    for extra in _EXTRAS:
        if f"hydra/launcher/{extra}" in str(error):
            return f'launcher={extra} is not installed: pip install "dpbench[{extra}]".'
    return text
