"""What a module logs in local training: hundreds of steps, of which a round shows the mean."""

from __future__ import annotations

import numbers
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from dpbench.records.training import replaced_methods


class LocalLogs:
    """Collects what `log` and `log_dict` are given in the local steps of a round, and logs their means once.

    Args:
        module: Its two methods are replaced in between.
    """

    def __init__(self, module: Any) -> None:
        self._module = module
        self._values: dict[str, tuple[Any, int, dict[str, Any]]] = {}

    @contextmanager
    def collected(self) -> Iterator[None]:
        """Within, nothing is logged; after it, the means are."""
        self._values = {}
        with replaced_methods(self._module, log=self._log, log_dict=self._log_dict):
            yield
        for name, (total, count, options) in self._values.items():
            # Not over the processes: those without a user in this round would not take part.
            options |= {"batch_size": max(count, 1), "sync_dist": False}
            self._module.log(name, total / count if count else total, **options)

    @contextmanager
    def silent(self) -> Iterator[None]:
        """Within, nothing is logged, and nothing collected."""
        kept, self._values = self._values, {}
        try:
            with replaced_methods(self._module, log=self._log, log_dict=self._log_dict):
                yield
        finally:
            self._values = kept

    def _log(self, name: str, value: Any, *args: Any, **options: Any) -> None:
        if args:
            options |= {"prog_bar": args[0]}
        if isinstance(value, Tensor | numbers.Number):
            value = torch.as_tensor(value).detach().float().mean()
            total, count, _ = self._values.get(name, (0.0, 0, {}))
            self._values[name] = (total + value, count + 1, options)
        else:  # a metric, which adds up by itself
            self._values[name] = (value, 0, options)

    def _log_dict(self, dictionary: Mapping[str, Any], *args: Any, **options: Any) -> None:
        for name, value in dictionary.items():
            self._log(name, value, *args, **options)
