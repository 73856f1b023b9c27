"""Per-record gradients by the samplers in Opacus' registry: for its own layers, and for what users registered."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from functools import cache, partial
from importlib import import_module

from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from dpbench.errors import UnsupportedModuleError
from dpbench.privacy.gradients._interception import Arguments, LayerGradients
from dpbench.privacy.gradients.parameter import InstantiatedGradients

_REGISTRY = "opacus.grad_sample"
_IN_OPACUS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d, nn.RMSNorm)
"""Layers of torch that we leave to Opacus, the only ones for which it is imported (two seconds)."""
_WRONG_IN_OPACUS = (nn.EmbeddingBag,)
"""Opacus 1.6 counts a token that a bag holds twice only once."""


class Sampled:
    """A rule made of a sampler: (layer, [inputs], gradient of the output) → {parameter: (R, *shape)}."""

    def __init__(self, sampler: Callable[..., dict[nn.Parameter, Tensor]]) -> None:
        self._sampler = sampler

    def __call__(self, layer: nn.Module, inputs: Arguments, grad_output: Tensor) -> LayerGradients:
        rows = cache(lambda: self._sampler(layer, list(inputs), grad_output))

        def compute(name: str, parameter: nn.Parameter) -> Tensor:
            gradient = rows().get(parameter)
            shape = (len(grad_output), *parameter.shape)
            if gradient is None or gradient.shape != shape:
                received = "nothing" if gradient is None else tuple(gradient.shape)
                raise UnsupportedModuleError(
                    f"the gradient sampler registered for {type(layer).__name__} gives "
                    f"{received} for {name}, and should give {shape}."
                )
            return gradient.to(grad_output.dtype)

        gradients: LayerGradients = {}
        for name, parameter in layer.named_parameters(recurse=False):
            if parameter.requires_grad:
                gradients[name] = InstantiatedGradients(partial(compute, name, parameter))
        return gradients


def sampler_of(layer: nn.Module) -> Sampled | None:
    """Rule for a layer whose exact type has a sampler in Opacus' registry; None: it has none."""
    kind = type(layer)
    if kind in _WRONG_IN_OPACUS:
        return None
    if _REGISTRY not in sys.modules and kind not in _IN_OPACUS:
        return None  # whoever registers a sampler has imported Opacus
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        registry = import_module(_REGISTRY).GradSampleModule.GRAD_SAMPLERS
    sampler = registry.get(kind)
    if sampler is None:
        return None
    return Sampled(sampler)


def of_opacus(layer: nn.Module, name: str) -> bool:
    """Whether a layer is Opacus' own of this name; does not import it."""
    kind = type(layer)
    if not kind.__module__.startswith("opacus.layers."):
        return False
    return any(base.__name__ == name for base in kind.__mro__)


def refuse_packed(layer: nn.Module, args: Arguments) -> None:
    """Raise UnsupportedModuleError for packed sequences in Opacus' recurrent layers, which reorder the records."""
    if any(isinstance(x, PackedSequence) for x in args):
        raise UnsupportedModuleError(
            f"a PackedSequence in {type(layer).__name__} orders the records by length, so that gradients would be "
            f"those of other records: take torch.nn.{type(layer).__name__.removeprefix('DP')}, which can do with it."
        )
