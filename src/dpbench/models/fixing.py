"""Replacement of layers that mix the records of a batch, or hide a weight."""

from __future__ import annotations

import math

from torch import nn
from torch.nn.utils import parametrize

_BATCH_NORM = nn.modules.batchnorm._BatchNorm
_INSTANCE_NORM = nn.modules.instancenorm._InstanceNorm
_MOST_GROUPS = 32
"""Largest number of groups of a GroupNorm (Wu and He 2018)."""


def fix(model: nn.Module) -> list[str]:
    """Replace the layers that private training refuses, in place; before an optimizer is made for the model.

    * BatchNorm becomes GroupNorm with its scale and shift, of at most 32 groups (of one group where there may be no
      further dimensions). That is another function: train it, or go on from weights that were trained with it.
    * InstanceNorm keeps no running statistics any more.
    * BatchNorm and InstanceNorm in evaluation mode stay: their statistics are constants.
    * Parametrizations (`torch.nn.utils.parametrizations`) that have several parameters, or buffers, such as weight and
      spectral normalization, are taken off; the weight keeps its present value, and stays frozen where it was.
    * Parametrizations of one tensor without buffers stay, such as weight standardization: they are part of the network,
      and per-record gradients go through them.

    Args:
        model: The network, not yet trained.

    Returns:
        A line for each layer that was changed.

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
        raise ValueError("the model is itself a BatchNorm: wrap it in a module, in which it can be replaced.")
    for name, layer in model.named_modules():
        if isinstance(layer, _BATCH_NORM) and not layer.num_features:  # of a lazy layer
            raise ValueError(
                f"{name} ({type(layer).__name__}) is not initialized yet: run one forward pass on random data before."
            )
    changes: list[str] = []
    replaced: dict[nn.Module, nn.Module] = {}
    for name, layer in list(model.named_modules(remove_duplicate=False)):
        subject = f"{name or 'the model'} ({type(layer).__name__})"
        if isinstance(layer, _BATCH_NORM) and (layer.training or layer.running_mean is None):
            # A layer that stands in two places stays one layer.
            group_norm = _group_norm(layer)
            # A subclass may hold an activation, too (timm's BatchNormAct2d).
            further = list(layer.children())
            stand_in = nn.Sequential(group_norm, *further) if further else group_norm
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, replaced.setdefault(layer, stand_in))
            kinds = "".join(f", {type(part).__name__}" for part in further)
            changes.append(f"{subject} is GroupNorm({group_norm.num_groups}, {group_norm.num_channels}){kinds} now")
        elif isinstance(layer, _INSTANCE_NORM) and layer.track_running_stats and layer.training:
            layer.track_running_stats = False
            layer.running_mean = None
            layer.running_var = None
            layer.num_batches_tracked = None
            changes.append(f"{subject} keeps no running statistics any more")
        for computation in _plain_weights(layer):
            changes.append(f"{subject} has no {computation} any more")
    return changes


def _group_norm(layer: nn.Module) -> nn.GroupNorm:
    """A GroupNorm with the scale and shift of a BatchNorm, where it is trained."""
    channels = int(layer.num_features)  # type: ignore[arg-type]
    # Of rows without further dimensions a group of one number would be normalized to zero.
    may_be_rows = isinstance(layer, nn.BatchNorm1d | nn.SyncBatchNorm)
    groups = 1 if may_be_rows else math.gcd(_MOST_GROUPS, channels)
    affine = bool(layer.affine)
    eps = float(layer.eps)  # type: ignore[arg-type]
    group_norm = nn.GroupNorm(groups, channels, eps=eps, affine=affine)
    if affine:
        group_norm.weight = layer.weight  # type: ignore[assignment]
        group_norm.bias = layer.bias  # type: ignore[assignment]
    return group_norm


def _is_function(parametrizations: nn.Module) -> bool:
    """Return whether a weight is computed from one tensor, without state from one call to the next."""
    has_state = any(True for _ in parametrizations.buffers())
    return bool(getattr(parametrizations, "is_tensor", False)) and not has_state


def _plain_weights(layer: nn.Module) -> list[str]:
    """Take off parametrizations of a layer that private training refuses.

    Returns:
        Their names.
    """
    changes = []
    if parametrize.is_parametrized(layer):
        for name, parametrizations in list(layer.parametrizations.items()):  # type: ignore[union-attr, operator]
            if _is_function(parametrizations):
                continue
            kinds = [type(parametrization).__name__.strip("_") for parametrization in parametrizations]
            is_parameter = any(True for _ in parametrizations.parameters(recurse=False))
            parametrize.remove_parametrizations(layer, name, leave_parametrized=True)
            if is_parameter and name not in layer._parameters:  # torch leaves no parameter of frozen ones
                weight = getattr(layer, name).detach()
                delattr(layer, name)
                layer.register_parameter(name, nn.Parameter(weight, requires_grad=False))
            changes.append(f"{', '.join(kinds)} of {name}")
    return changes
