"""Replaces what mixes the records of a lot, or hides a weight from its layer."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize, remove_spectral_norm, remove_weight_norm

_BATCH_NORM = nn.modules.batchnorm._BatchNorm
_INSTANCE_NORM = nn.modules.instancenorm._InstanceNorm
_MOST_GROUPS = 32
"""Of a GroupNorm (Wu and He 2018)."""


def fix(model: nn.Module) -> list[str]:
    """Replace the layers that private training refuses, in place; before an optimizer is made for the model.

    * BatchNorm becomes GroupNorm with its scale and shift, of at most 32 groups (of one group where there may be no
      further dimensions). That is another function: train it, or go on from weights that were trained with it.
    * InstanceNorm keeps no running statistics any more.
    * BatchNorm and InstanceNorm in evaluation mode stay: their statistics are constants.
    * Weight and spectral normalization and other parametrizations are taken off; the weight stays what it is now, and
      stays frozen where it was.

    Args:
        model: Trained afterwards.

    Returns:
        What was done, a line for each layer.

    Raises:
        TypeError: It is no module.
        ValueError: The model itself is a BatchNorm, so that it cannot be replaced in place; or one does not know its
            number of channels yet.

    >>> fix(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)))
    ['1 (BatchNorm2d) is GroupNorm(8, 8) now']
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"fix takes a torch.nn.Module, not {model!r}.")
    if isinstance(model, _BATCH_NORM):
        raise ValueError("the model is a BatchNorm itself: put it into a module, in which it can be replaced.")
    for name, layer in model.named_modules():
        if isinstance(layer, _BATCH_NORM) and not layer.num_features:  # of a lazy layer
            raise ValueError(
                f"{name} ({type(layer).__name__}) is not initialized yet: run one forward pass on random data before."
            )
    done: list[str] = []
    replaced: dict[nn.Module, nn.Module] = {}
    for name, layer in list(model.named_modules(remove_duplicate=False)):
        kind = type(layer).__name__
        who = f"{name or 'the model'} ({kind})"
        if isinstance(layer, _BATCH_NORM) and (layer.training or layer.running_mean is None):
            # A layer that stands in two places stays one layer.
            group_norm = _group_norm(layer)
            # A subclass may hold an activation, too (timm's BatchNormAct2d).
            further = list(layer.children())
            stand_in = nn.Sequential(group_norm, *further) if further else group_norm
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, replaced.setdefault(layer, stand_in))
            kinds = "".join(f", {type(part).__name__}" for part in further)
            done.append(f"{who} is GroupNorm({group_norm.num_groups}, {group_norm.num_channels}){kinds} now")
        elif isinstance(layer, _INSTANCE_NORM) and layer.track_running_stats and layer.training:
            layer.track_running_stats = False
            layer.running_mean = None
            layer.running_var = None
            layer.num_batches_tracked = None
            done.append(f"{who} keeps no running statistics any more")
        done += [f"{who} has no {what} any more" for what in _plain_weights(layer)]
    return done


def _group_norm(layer: nn.Module) -> nn.GroupNorm:
    """A GroupNorm with the scale and shift of a BatchNorm, where it is trained."""
    channels = int(layer.num_features)  # type: ignore[arg-type]
    # Of rows without further dimensions a group of one number would be normalized to zero.
    may_be_rows = isinstance(layer, nn.BatchNorm1d | nn.SyncBatchNorm)
    groups = 1 if may_be_rows else math.gcd(_MOST_GROUPS, channels)
    affine = bool(layer.affine)
    group_norm = nn.GroupNorm(
        groups,
        channels,
        eps=float(layer.eps),
        affine=affine,
    )  # type: ignore[arg-type]
    if affine:
        group_norm.weight = layer.weight  # type: ignore[assignment]
        group_norm.bias = layer.bias  # type: ignore[assignment]
    return group_norm


def _plain_weights(layer: nn.Module) -> list[str]:
    """Take off whatever computes the weights of a layer; what it was."""
    taken = []
    if parametrize.is_parametrized(layer):
        for name, parametrizations in list(layer.parametrizations.items()):  # type: ignore[union-attr, operator]
            kinds = ", ".join(type(one).__name__.strip("_") for one in parametrizations)
            of_weight = dict(parametrizations.named_parameters(recurse=False))
            parametrize.remove_parametrizations(layer, name, leave_parametrized=True)
            if of_weight and name not in layer._parameters:  # torch leaves no parameter of frozen ones
                weight = getattr(layer, name).detach()
                delattr(layer, name)
                layer.register_parameter(name, nn.Parameter(weight, requires_grad=False))
            taken.append(f"{kinds} of {name}")
    hooks: dict[str, Callable[[nn.Module, str], nn.Module]] = {
        "WeightNorm": remove_weight_norm,
        "SpectralNorm": remove_spectral_norm,
    }
    hook: Any
    for hook in list(layer._forward_pre_hooks.values()):
        remove = hooks.get(type(hook).__name__)
        if remove is not None:
            sources = [f"{hook.name}{end}" for end in ("_v", "_g", "_orig")]
            is_trained = any(getattr(layer, source).requires_grad for source in sources if source in layer._parameters)
            with torch.no_grad():
                remove(layer, hook.name)
            layer.get_parameter(hook.name).requires_grad_(is_trained)
            taken.append(f"{type(hook).__name__} of {hook.name}")
    return taken
