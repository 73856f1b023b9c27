"""Per-record gradients of nn.LSTM, nn.GRU and nn.RNN.

Each direction of each layer is computed as gates = W_ih x + b (all time steps in one product), then a scan over time
that adds W_hh h. The gradient of the gates is all that the weights need: record by record the gradient of W_ih is
Σ_t g_t x_tᵀ and that of W_hh Σ_t g_t h_{t-1}ᵀ, so nothing of the size of R weights is built.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from dpbench.errors import UnsupportedModuleError
from dpbench.privacy.gradients._interception import Interception, LayerGradients, TorchFunction
from dpbench.privacy.gradients._scans import CELLS, Cell, ScanGradients, ScanResult
from dpbench.privacy.gradients.parameter import InstantiatedGradients, OuterProductGradients

_RARE = (
    "{layer} is given a PackedSequence, or projects its hidden states (proj_size): per-record gradients of these are "
    "computed record by record (gradients=auto or one_by_one). Pad the sequences, and leave proj_size out, to use the "
    "engine."
)


class _Hidden(torch.autograd.Function):
    """Zeros, where W h is added to the gates inside of the scan: their gradient is that of W h.

    Backward gives W's ordinary gradient; autograd comes here only if somebody asks for it.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, bias: Tensor | None, states: list[Tensor], shape: torch.Size) -> Tensor:
        ctx.states = states
        ctx.has_bias = bias is not None
        return weight.new_zeros(()).expand(shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # Both with all time steps of all records in a row.
        flat = grad.flatten(0, 1)
        states = ctx.states[0].flatten(0, 1)
        weight_grad = flat.t() @ states.to(flat.dtype)
        bias_grad = flat.sum(0) if ctx.has_bias else None
        return weight_grad, bias_grad, None, None


class _Scan(torch.autograd.Function):
    """The recurrence over time; see `_scans` for what it computes.

    Args:
        cell: Computes it.
        states: Gets the hidden states before each step.
        gates: The inputs' part of the gates, (T, R, G).
        hidden: Stand-in for the hidden states' part (see `_Hidden`), (T, R, G).
        h0: First hidden state, (R, H).
        c0: First cell state (R, H), LSTM only.

    Returns:
        Hidden states (T, R, H), the last hidden state (R, H) and the last cell state (R, H), LSTM only.
    """

    @staticmethod
    def forward(
        ctx: Any,
        cell: Cell,
        states: list[Tensor],
        gates: Tensor,
        hidden: Tensor,
        h0: Tensor,
        c0: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        scan = cell.forward(gates, h0, c0)
        states.append(scan.previous)
        ctx.cell = cell
        ctx.save_for_backward(*scan)
        # Clones: the scan's results are views of one memory, and autograd tracks writes to what a Function returns.
        last_cell = None if scan.last_cell is None else scan.last_cell.clone()
        return scan.outputs.clone(), scan.last.clone(), last_cell

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, outputs: Tensor, last: Tensor, last_cell: Tensor | None = None) -> tuple[Any, ...]:
        scan = ScanResult(*ctx.saved_tensors)
        grads: ScanGradients = ctx.cell.backward(scan, outputs, last, last_cell)
        of_cell_and_states = (None, None)
        return *of_cell_and_states, grads.gates, grads.hidden, grads.h0, grads.c0


class RecurrentInterception(Interception):
    """Computes `torch.lstm`, `gru`, `rnn_tanh` and `rnn_relu`, any number of layers and directions."""

    targets = tuple(CELLS)

    def compute(self, func: TorchFunction, *args: Any, **kwargs: Any) -> Any:
        layer: nn.RNNBase = self.layer
        is_packed = isinstance(args[3], Sequence)  # its second argument is the sizes of batches
        if is_packed or layer.proj_size:
            raise UnsupportedModuleError(_RARE.format(layer=type(layer).__name__))
        x, states = args[:2]
        with torch.autocast(x.device.type, enabled=False):
            if layer.batch_first:
                x = x.transpose(0, 1)
            outputs, *last = self._layers(func, x, states)
            if layer.batch_first:
                outputs = outputs.transpose(0, 1)
            return outputs, *last

    def _layers(self, func: TorchFunction, x: Tensor, states: Any) -> tuple[Tensor, ...]:
        """All layers, one after another.

        Args:
            func: The function that this computes.
            x: Inputs, (T, R, I).
            states: First hidden states (layers · directions, R, H), or a pair with the first cell states.
        """
        layer: nn.RNNBase = self.layer
        h0, c0 = states if func is torch.lstm else (states, None)
        directions = ("", "_reverse") if layer.bidirectional else ("",)
        last: list[Tensor] = []
        last_cell: list[Tensor] = []
        for depth in range(layer.num_layers):
            if depth and layer.dropout:
                x = F.dropout(x, layer.dropout, layer.training)
            outputs = []
            for direction in directions:
                row = len(last)
                first_cell = None if c0 is None else c0[row]
                output, h, c = self._direction(func, f"_l{depth}{direction}", x, h0[row], first_cell)
                outputs.append(output)
                last.append(h)
                last_cell.append(c)
            x = torch.cat(outputs, 2) if layer.bidirectional else outputs[0]
        last_states = torch.stack(last)
        if c0 is None:
            return x, last_states
        return x, last_states, torch.stack(last_cell)

    def _direction(self, func: TorchFunction, suffix: str, x: Tensor, h0: Tensor, c0: Tensor | None) -> Any:
        """One direction of one layer.

        Args:
            func: The function that this computes.
            suffix: Of the parameters' names.
            x: Inputs, (T, R, I).
            h0: First hidden state, (R, H).
            c0: First cell state (R, H), LSTM only.

        Returns:
            What `_Scan` does.
        """
        layer = self.layer
        w_ih: Tensor = getattr(layer, f"weight_ih{suffix}")
        w_hh: Tensor = getattr(layer, f"weight_hh{suffix}")
        b_ih: Tensor | None = getattr(layer, f"bias_ih{suffix}", None)
        b_hh: Tensor | None = getattr(layer, f"bias_hh{suffix}", None)
        x = x.to(w_ih.dtype)
        h0 = h0.to(w_ih.dtype)
        c0 = None if c0 is None else c0.to(w_ih.dtype)

        separate = func is torch.gru  # its reset gate is between W_hh h + b_hh and the new state
        input_bias = b_ih
        hidden_bias = b_hh if separate else None
        if b_ih is not None and b_hh is not None and not separate:
            input_bias = b_ih + b_hh

        # In the layout of the input: a view would be copied by the product.
        batch_major = x.transpose(0, 1)
        if not x.is_contiguous() and batch_major.is_contiguous():
            gates = F.linear(batch_major, w_ih, input_bias).transpose(0, 1)
        else:
            gates = F.linear(x, w_ih, input_bias)

        states: list[Tensor] = []  # filled when the scan has run
        hidden = _Hidden.apply(w_hh, hidden_bias, states, gates.shape)
        # The cell gets detached weights: their gradients are those of the stand-in.
        bias = None if hidden_bias is None else hidden_bias.detach()
        cell = CELLS[func](w_hh.detach(), bias, reverse=suffix.endswith("_reverse"))
        result = _Scan.apply(cell, states, gates, hidden, h0, c0)

        inputs = [x.detach(), *states]
        self.note(
            outputs=(gates, hidden),
            inputs=inputs,
            records=x.shape[1],
            gradients=lambda grads: _gradients(suffix, grads, inputs, separate),
        )
        return result


def _gradients(
    suffix: str,
    grads: Sequence[Tensor | None],
    inputs: Sequence[Tensor],
    separate: bool,
) -> LayerGradients:
    """Gradients of the parameters of one direction.

    Args:
        suffix: Of their names.
        grads: Gradients of W x (T, R, G) for W_ih and W_hh.
        inputs: The two x (T, R, I).
        separate: Whether b_hh is added on the side of W_hh.
    """
    result: LayerGradients = {}
    side_of_hidden_bias = "hh" if separate else "ih"
    for side, grad, x in zip(("ih", "hh"), grads, inputs, strict=True):
        if grad is None:
            continue
        # Rules have the records in front.
        g = grad.transpose(0, 1)
        a = x.transpose(0, 1).to(grad.dtype)
        result[f"weight_{side}{suffix}"] = OuterProductGradients(g, a)
        bias = InstantiatedGradients(partial(torch.sum, g, 1))
        if side == "ih":
            result[f"bias_ih{suffix}"] = bias
        if side == side_of_hidden_bias:
            result[f"bias_hh{suffix}"] = bias
    return result
