"""Per-record gradients by the samplers in Opacus' registry: for its own layers, and for what users registered."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from dpbench.errors import UnsupportedModuleError
from dpbench.privacy.gradients.interception import LayerGradients
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

    def __call__(self, layer: nn.Module, inputs: tuple[Any, ...], grad_output: Tensor) -> LayerGradients:
        rows = cache(lambda: self._sampler(layer, list(inputs), grad_output))

        def of(name: str, parameter: nn.Parameter) -> Tensor:
            got = rows().get(parameter)
            shape = (len(grad_output), *parameter.shape)
            if got is None or got.shape != shape:
                raise UnsupportedModuleError(
                    f"the gradient sampler registered for {type(layer).__name__} gives "
                    f"{'nothing' if got is None else tuple(got.shape)} for {name}, and should give {shape}."
                )
            return got.to(grad_output.dtype)

        return {
            name: InstantiatedGradients(lambda name=name, p=p: of(name, p))  # type: ignore[misc]
            for name, p in layer.named_parameters(recurse=False)
            if p.requires_grad
        }


def sampler_of(layer: nn.Module) -> Sampled | None:
    """Rule for a layer whose exact type has a sampler in Opacus' registry; None: it has none."""
    kind = type(layer)
    if kind in _WRONG_IN_OPACUS or (_REGISTRY not in sys.modules and kind not in _IN_OPACUS):
        return None  # who has registered a sampler has imported Opacus
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        registry = import_module(_REGISTRY).GradSampleModule.GRAD_SAMPLERS
    sampler = registry.get(kind)
    return None if sampler is None else Sampled(sampler)


def of_opacus(layer: nn.Module, name: str) -> bool:
    """Whether a layer is Opacus' own of this name; does not import it."""
    return type(layer).__module__.startswith("opacus.layers.") and any(t.__name__ == name for t in type(layer).__mro__)


def refuse_packed(layer: nn.Module, args: tuple[Any, ...]) -> None:
    """Raise UnsupportedModuleError for packed sequences in Opacus' recurrent layers, which reorder the records."""
    if any(isinstance(x, PackedSequence) for x in args):
        raise UnsupportedModuleError(
            f"a PackedSequence in {type(layer).__name__} orders the records by length, so that gradients would be "
            f"those of other records: take torch.nn.{type(layer).__name__.removeprefix('DP')}, which can do with it."
        )
