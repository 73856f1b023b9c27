"""First weights as the published programs draw them (Keras), and PyTorch's own."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

_CHOICES = ("published", "torch")
_CUT = 0.87962566103423978  # deviation of a standard normal variable that is cut at ±2


def is_published(initialization: str) -> bool:
    """Return whether the weights are drawn as by the published program; False: as by PyTorch.

    Raises:
        ValueError: It is neither.
    """
    if initialization not in _CHOICES:
        raise ValueError(f"model.initialization must be {' or '.join(_CHOICES)}, not {initialization!r}.")
    return initialization == "published"


def _fans(weight: Tensor) -> tuple[int, int]:
    """Inputs and outputs of a weight (outputs, inputs, *kernel), each counted with the kernel's positions."""
    places = math.prod(weight.shape[2:])
    return weight.shape[1] * places, weight.shape[0] * places


def _truncated_normal_(weight: Tensor, variance: float) -> None:
    std = math.sqrt(variance) / _CUT
    nn.init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std)


def glorot_normal_(weight: Tensor) -> None:
    """Normal of variance 2 / (fan in + fan out), cut at two deviations (Glorot and Bengio 2010), in place."""
    _truncated_normal_(weight, 2 / sum(_fans(weight)))


def he_normal_(weight: Tensor) -> None:
    """Normal of variance 2 / fan in, cut at two deviations (He et al. 2015), in place."""
    _truncated_normal_(weight, 2 / _fans(weight)[0])


def lecun_normal_(weight: Tensor) -> None:
    """Normal of variance 1 / fan in, cut at two deviations (Haiku's `VarianceScaling(1)`), in place."""
    _truncated_normal_(weight, 1 / _fans(weight)[0])


@torch.no_grad()
def draw_as_keras(network: nn.Module) -> None:
    """Draw the weights of linear layers and convolutions again as Keras does unless told otherwise, in place.

    Glorot uniform (Glorot and Bengio 2010), zero biases.
    """
    for layer in network.modules():
        if isinstance(layer, nn.Linear | nn.Conv2d):
            nn.init.xavier_uniform_(layer.weight)
            if layer.bias is not None:
                layer.bias.zero_()


@torch.no_grad()
def draw_as_published(network: nn.Module) -> None:
    """Draw the weights of a network of the federated tasks again, in place.

    Linear layers and convolutions: Glorot normal, zero biases. Embeddings: uniform in ±0.05, zero of padding. LSTMs: He
    normal from the input, orthogonal from the state, zero biases but for the forget gate's, which is one.
    """
    for layer in network.modules():
        if isinstance(layer, nn.Linear | nn.Conv2d):
            glorot_normal_(layer.weight)
            if layer.bias is not None:
                layer.bias.zero_()
        elif isinstance(layer, nn.Embedding):
            layer.weight.uniform_(-0.05, 0.05)
            if layer.padding_idx is not None:
                layer.weight[layer.padding_idx] = 0
        elif isinstance(layer, nn.LSTM):
            _draw_lstm(layer)


def _draw_lstm(layer: nn.LSTM) -> None:
    """Gates lie one below the other in PyTorch's order: input, forget, cell, output."""
    size = layer.hidden_size
    for name, parameter in layer.named_parameters():
        if name.startswith("weight_ih"):
            he_normal_(parameter)
        elif name.startswith("weight_hh"):
            nn.init.orthogonal_(parameter)
        else:
            parameter.zero_()
            if name.startswith("bias_ih"):
                parameter[size : 2 * size] = 1
