"""How a layer was called: with names, in a network that is checkpointed."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dpbench.errors import ConfigurationError, UnsupportedModuleError
from dpbench.privacy.gradients._interception import Arguments


def positional(
    layer: nn.Module,
    args: Arguments,
    kwargs: dict[str, Any],
) -> Arguments:
    """The arguments of a call in the order of `forward`.

    Raises:
        UnsupportedModuleError: Some can be given by name only.
    """
    kind = type(layer)
    signature = inspect.signature(kind.forward)
    bound = signature.bind(layer, *args, **kwargs)
    if not bound.kwargs:
        return bound.args[1:]
    # A default that lies between positions may be all that is missing.
    bound.apply_defaults()
    if bound.kwargs:
        names = ", ".join(bound.kwargs)
        raise UnsupportedModuleError(
            f"{kind.__name__} is called with {names}, which can only be given by name: per-record gradients need "
            "positional arguments."
        )
    return bound.args[1:]


_REENTRANT = (
    "gradient checkpointing with use_reentrant=True hides the layers inside from everything but loss.backward(): pass "
    "use_reentrant=False to torch.utils.checkpoint (gradient_checkpointing_kwargs in transformers)."
)

_WITHIN_BACKWARD = (
    "a backward pass within the backward pass (a custom autograd Function that calls backward(), as reversible "
    "networks do) adds gradients to p.grad that are not clipped, so its layers could not be trained: leave the "
    "Function out (torch.utils.checkpoint with use_reentrant=False also saves memory)."
)


def _nodes_of(loss: Tensor) -> Iterator[Any]:
    """Nodes of the graph behind a loss, each once."""
    visited: set[Any] = set()
    stack: list[Any] = [loss.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        yield node
        stack += [following for following, _ in node.next_functions]


def refuse_reentrant(loss: Tensor) -> None:
    """Raise UnsupportedModuleError where a part of the network runs under reentrant checkpointing."""
    if any(node.name() == "CheckpointFunctionBackward" for node in _nodes_of(loss)):
        raise UnsupportedModuleError(_REENTRANT)


def refuse_other_losses(loss: Tensor) -> None:
    """Raise ConfigurationError where a loss is not one number, or depends on nothing that is trained."""
    if loss.numel() != 1:
        raise ConfigurationError(
            f"the loss must be one number, not a tensor of shape {tuple(loss.shape)} (reduction='none'?): return the "
            "mean over the records (the sum with loss_reduction='sum')."
        )
    if not loss.requires_grad:
        raise ConfigurationError(
            "the loss depends on no trainable parameter: return it as it was computed, without detach(), item() or "
            "torch.no_grad()."
        )


def backward(
    loss: Tensor,
    inputs: Sequence[Any],
    scale: Tensor,
    parameters: Sequence[nn.Parameter],
    retain: bool = False,
) -> tuple[Tensor | None, ...]:
    """Gradients of a loss times `scale`, None where it does not depend on an input.

    Args:
        loss: Scalar.
        inputs: Tensors and gradient edges.
        scale: Scalar.
        parameters: The network's parameters. Nothing may be added to their `grad`, which is hidden meanwhile.
        retain: Keep the graph for another backward pass.

    Raises:
        ConfigurationError: The loss is not one number, or depends on nothing.
        UnsupportedModuleError: The network has layers with gradients of another origin.
    """
    refuse_other_losses(loss)
    before = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    # Hooks, such as those that log gradients, must not see sums over private records, only released gradients.
    hooks = [x._backward_hooks for x in inputs if isinstance(x, Tensor) and x._backward_hooks]
    copies_of_hooks = [dict(tensor_hooks) for tensor_hooks in hooks]
    for tensor_hooks in hooks:
        tensor_hooks.clear()
    try:
        gradients = torch.autograd.grad(loss, inputs, scale, retain_graph=retain, allow_unused=True)
        if any(parameter.grad is not None for parameter in parameters):
            raise UnsupportedModuleError(_WITHIN_BACKWARD)
        return gradients
    except RuntimeError as error:
        if "use_reentrant" not in str(error):
            raise
        raise UnsupportedModuleError(_REENTRANT) from error
    finally:
        for tensor_hooks, copy in zip(hooks, copies_of_hooks, strict=True):
            tensor_hooks.update(copy)
        for parameter, gradient in zip(parameters, before, strict=True):
            parameter.grad = gradient
