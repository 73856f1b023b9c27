"""Logs of a module in the steps of one batch, of single users or records: their mean is logged."""

from __future__ import annotations

import numbers
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dpbench.privacy.processes import Processes
from dpbench.privacy.record_axis.verdict import new_axis
from dpbench.records.training import replaced_methods


class _Logged(NamedTuple):
    """Values logged under one name.

    Attributes:
        total: Weighted sum of its values; or a metric, which adds them up by itself.
        steps: Sum of the values' weights; 0 for a metric.
        options: Options of the last call of `log`.
    """

    total: Any
    steps: int
    options: dict[str, Any]


class LocalLogs:
    """Collects the values given to `log` and `log_dict` in the steps of a batch, and logs their means once.

    Args:
        module: Its two methods are replaced in between.

    Attributes:
        weight: The weight of the values that are logged next, in their mean; 0: they do not count.
    """

    def __init__(self, module: Any) -> None:
        self._module = module
        self._values: dict[str, _Logged] = {}
        self.weight = 1

    @contextmanager
    def collected(self, processes: Processes) -> Iterator[None]:
        """Within, nothing is logged; after it, the means are.

        Args:
            processes: Processes of the training; a metric that one of them logs is logged by all.
        """
        self.forget()
        with replaced_methods(self._module, log=self._log, log_dict=self._log_dict):
            yield
        if processes.world > 1:
            self._share_metrics(processes)
        for name, (total, steps, options) in self._values.items():
            options["batch_size"] = max(steps, 1)
            # Not over the processes: those without a user or record in this lot would not take part.
            options["sync_dist"] = False
            with new_axis(1):  # a later step may read it
                mean = total / steps if steps else total
                self._module.log(name, mean, **options)

    def forget(self) -> None:
        """Begin the batch again."""
        self._values = {}
        self.weight = 1

    def _share_metrics(self, processes: Processes) -> None:
        """Log the metrics of rank 0 here too: computing one waits for all processes, also for those without a user.

        Rank 0 trains the largest user of every cohort, and the first record of every batch, so that it logs whenever a
        process does.
        """
        attributes = {id(metric): attribute for attribute, metric in self._module.named_modules()}
        metrics = {
            name: (attributes[id(logged.total)], logged.options)
            for name, logged in self._values.items()
            if id(logged.total) in attributes
        }
        for name, (attribute, options) in processes.broadcast(metrics).items():
            if name not in self._values:
                self._values[name] = _Logged(self._module.get_submodule(attribute), 0, dict(options))

    @contextmanager
    def silent(self) -> Iterator[None]:
        """Within, nothing is logged, and nothing collected."""
        values = self._values
        self._values = {}
        try:
            with replaced_methods(self._module, log=self._log, log_dict=self._log_dict):
                yield
        finally:
            self._values = values

    def _log(self, name: str, value: Any, *args: Any, **options: Any) -> None:
        if args:
            options["prog_bar"] = args[0]
        if not isinstance(value, Tensor | numbers.Number):  # a metric, which adds up by itself
            self._values[name] = _Logged(value, 0, options)
        elif self.weight:
            value = torch.as_tensor(value).detach().float().mean() * self.weight
            before = self._values.get(name, _Logged(0.0, 0, {}))
            self._values[name] = _Logged(before.total + value, before.steps + self.weight, options)

    def _log_dict(self, dictionary: Mapping[str, Any], *args: Any, **options: Any) -> None:
        for name, value in dictionary.items():
            self._log(name, value, *args, **options)
