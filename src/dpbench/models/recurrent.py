"""What recurrent networks share."""

from __future__ import annotations

from torch import nn


def lstm_with_one_bias(
    input_size: int,
    hidden_size: int,
    num_layers: int = 1,
) -> nn.LSTM:
    """An LSTM, batch first, whose second bias is zero and frozen.

    PyTorch adds two biases in every gate, W_ih x + b_ih + W_hh h + b_hh, where the definition has one. Per-record
    gradients of the two are equal: if both are trained, they count twice in the norm that is clipped, and noise falls
    twice on what is one parameter.

    Args:
        input_size: Numbers in an element of a sequence.
        hidden_size: Numbers in the state.
        num_layers: Layers, one on top of the other.
    """
    lstm = nn.LSTM(input_size, hidden_size, num_layers, batch_first=True)
    for name, parameter in lstm.named_parameters():
        if name.startswith("bias_hh"):
            nn.init.zeros_(parameter).requires_grad_(False)
    return lstm
