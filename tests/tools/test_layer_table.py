"""docs/layers.md forgets no layer of torch."""

from __future__ import annotations

import inspect
import warnings

from torch import nn

from tools import layer_table


def test_no_layer_of_torch_is_forgotten() -> None:
    """Those that own parameters when they are made of small numbers."""
    named = {case.name.split(",")[0] for case in layer_table.cases()}
    for name, kind in inspect.getmembers(nn, inspect.isclass):
        if not issubclass(kind, nn.Module) or name.startswith("Lazy") or name in named:
            continue
        for arguments in ((), (4,), (4, 2), (4, 2, 2), (4, 8, [2, 4])):
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    made = kind(*arguments)
            except (TypeError, ValueError, AssertionError):
                continue
            own = any(True for _ in made.parameters(recurse=False))
            assert not own, f"{name} has parameters and is not in the table"
