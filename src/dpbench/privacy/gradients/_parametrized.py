"""Layers with a weight that is a function of other tensors (`torch.nn.utils.parametrize`), as in weight normalization.

The layer's own rule gives each record's gradient g with respect to the weight w that the layer computed with. With
respect to v, where w = f(v), it is Jᵀg, with the Jacobian J of f at v, which is the same for all records.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from dpbench.privacy.gradients._interception import Arguments, LayerGradients
from dpbench.privacy.gradients.parameter import InstantiatedGradients, ParameterGradients, zero_gradients

_Rule = Callable[[Any, Arguments, Tensor], LayerGradients]


@contextmanager
def silent_fallbacks() -> Iterator[None]:
    """Within, torch does not warn of functions that vmap runs record by record, which is exact."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="There is a performance drop")
        yield


def is_function(parametrizations: nn.Module) -> bool:
    """Return whether a parametrization keeps nothing from one call to the next."""
    return not any(True for _ in parametrizations.buffers())


def is_parametrized(layer: nn.Module) -> bool:
    """Return whether some tensors of a layer are computed."""
    return parametrize.is_parametrized(layer)


def type_of(layer: nn.Module) -> type[nn.Module]:
    """Type of a layer; for a parametrized layer, the type before the parametrization."""
    kind = type(layer)
    return kind.__bases__[0] if is_parametrized(layer) else kind


def of_parametrized(rule: _Rule, layer: Any, inputs: Arguments, grad_output: Tensor) -> LayerGradients:
    """Gradients of a layer's parameters, and of the tensors from which its computed ones are made.

    Args:
        rule: Rule of the layer without the parametrization.
        layer: The layer.
        inputs: Positional arguments of the call.
        grad_output: Gradient of the output.
    """
    gradients = rule(layer, inputs, grad_output)
    for name, computation in layer.parametrizations.items():
        computed = gradients.pop(name)
        parameters = {}
        for inner, parameter in computation.named_parameters():
            parameters[inner] = parameter.detach().to(grad_output.dtype)
        pulled = _Pulled(computed, computation, parameters)
        for inner, parameter in parameters.items():
            if len(grad_output):
                of_inner: ParameterGradients = InstantiatedGradients(partial(pulled.rows, inner))
            else:
                of_inner = zero_gradients(parameter, 0)
            gradients[f"parametrizations.{name}.{inner}"] = of_inner
    return gradients


class _Pulled:
    """Jᵀg of each record, on first use, for all parameters of one computation together.

    Norms and sums are taken of the same rows: a gradient that J nearly annihilates cannot leave more of its rounding in
    the sum than its norm says.

    Args:
        computed: g, over R records.
        computation: f.
        parameters: v, by name.
    """

    def __init__(
        self,
        computed: ParameterGradients,
        computation: nn.Module,
        parameters: dict[str, Tensor],
    ) -> None:
        self._computed: ParameterGradients | None = computed
        self._computation = computation
        self._parameters = parameters
        self._rows: dict[str, Tensor] = {}

    def rows(self, name: str) -> Tensor:
        """Gradients of a parameter, shape (R, *shape)."""
        if self._computed is not None:
            # One linear map for all records, whatever f would give if it were called again.
            _, pull, *_ = torch.func.vjp(self._weight, self._parameters)
            with silent_fallbacks():
                (self._rows,) = torch.func.vmap(pull)(self._computed.per_record())
            self._computed = None  # its memory is as large as that of the result
        return self._rows[name]

    def _weight(self, parameters: dict[str, Tensor]) -> Any:
        return torch.func.functional_call(self._computation, parameters, ())
