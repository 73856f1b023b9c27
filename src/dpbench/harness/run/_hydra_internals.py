"""Parts of Hydra without a public name: only this module imports from `hydra._internal`, which may move with a release.

Its public ways in (`hydra.main`, `hydra.compose`) compose a command on their own, and could not be handed what was
composed for the checks.
"""

from hydra._internal.callbacks import Callbacks
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_automatic_config_search_path, get_args_parser

__all__ = [
    "BasicSweeper",
    "Callbacks",
    "ConfigLoaderImpl",
    "Hydra",
    "create_automatic_config_search_path",
    "get_args_parser",
]
