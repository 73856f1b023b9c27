"""Layers that torch computes in one call, computed from parts for which per-record gradients are known.

`nn.LSTM` and `nn.MultiheadAttention` hand all their weights to one function. A `TorchFunctionMode`, PyTorch's own way
to give a function another meaning within a scope, is in force while such a layer runs, and only there.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode

from dpbench.privacy.gradients.parameter import ParameterGradients

Arguments = tuple[Any, ...]
"""Positional arguments of a layer's call."""
TorchFunction = Callable[..., Any]
LayerGradients = dict[str, ParameterGradients]
"""By the parameters' names in the layer."""
FromGradients = Callable[[Sequence[Tensor | None]], LayerGradients]
"""From the gradients of a part's outputs to per-record gradients."""


@dataclass(frozen=True)
class Part:
    """One part of a layer's computation: linear in the parameters that it uses.

    Attributes:
        edges: Gradient edges of its outputs.
        gradients: Function from the gradients of the outputs to those of its parameters.
        records: Number of records that it saw.
        inputs: Tensors that `gradients` will read, and that must not change until then.
        versions: Versions of the inputs when they were seen.
    """

    edges: tuple[GradientEdge | None, ...]
    gradients: FromGradients
    records: int
    inputs: tuple[Tensor, ...]
    versions: tuple[int, ...]


class Interception(TorchFunctionMode):
    """Stands in for torch's function while one call of a layer runs.

    Args:
        layer: The layer.

    Attributes:
        parts: Seen so far.
    """

    targets: tuple[TorchFunction, ...] = ()
    """Functions that `compute` stands in for."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer: Any = layer
        self.parts: list[Part] = []
        self._is_live = False

    def open(self) -> None:
        """Stand in for the functions from now on."""
        self._is_live = True
        self.__enter__()  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """Stand in for nothing any more, also where an interrupted pass has left another mode on top."""
        self._is_live = False
        if torch.overrides._get_current_function_mode() is self:  # type: ignore[no-untyped-call]
            self.__exit__(None, None, None)

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Arguments = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if self._is_live and func in self.targets:
            return self.compute(func, *args, **kwargs)
        return func(*args, **kwargs)

    @abstractmethod
    def compute(self, func: TorchFunction, *args: Any, **kwargs: Any) -> Any:
        """Return the result of `func`, and note a `Part` for every use of parameters."""

    def note(
        self,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        records: int,
        gradients: FromGradients,
    ) -> None:
        """Append a part of the computation to `parts`.

        Args:
            outputs: Outputs of the part; without gradient if they depend on nothing trainable.
            inputs: Tensors that `gradients` will read.
            records: R.
            gradients: Function of the gradients of `outputs`, None for outputs without one.
        """
        edges = tuple(get_gradient_edge(output) if output.requires_grad else None for output in outputs)
        if all(edge is None for edge in edges):
            return
        part = Part(
            edges,
            gradients,
            records,
            inputs=tuple(inputs),
            versions=tuple(x._version for x in inputs),
        )
        self.parts.append(part)
