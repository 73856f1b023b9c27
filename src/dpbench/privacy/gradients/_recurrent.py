"""Per-record gradients of nn.LSTM and nn.GRU.

Each direction of each layer is computed as gates = W_ih x + b (all time steps in one product), then a scan over time
that adds W_hh h. The gradient of the gates is all that the weights need: record by record the gradient of W_ih is
Σ_t g_t x_tᵀ and that of W_hh Σ_t g_t h_{t-1}ᵀ, so nothing of the size of R weights is built.

Derivatives are elementwise in the gates, so all that does not depend on the gradient is computed for all time steps at
once; the loop over time is left with one matrix product and a few products of (R, H). Everything is time-major:
T steps of R records, hidden states of width H, G gate values a record.
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
from dpbench.privacy.gradients.parameter import InstantiatedGradients, OuterProductGradients

_RARE = (
    "the engine does not support {layer} on a PackedSequence or with proj_size: pad the sequences and leave out "
    "proj_size, or set gradients=auto or one_by_one."
)


class _Hidden(torch.autograd.Function):
    """Zeros, where W h is added to the gates inside of the scan: their gradient is that of W h.

    Backward gives W's ordinary gradient; autograd calls it only if that gradient is required.
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


def _with_first(length: int, first: Tensor) -> Tensor:
    """Memory for the states at all T + 1 times in one piece, with the first one written."""
    states = first.new_empty(length + 1, *first.shape)
    states[0] = first
    return states


class _LSTMScan(torch.autograd.Function):
    """i, f, g, o = gates + W_hh h; c = f c + i g; h = o tanh(c).

    Args:
        weight: W_hh, detached.
        states: Gets the hidden states before each step.
        gates: The inputs' part of the gates, (T, R, G).
        hidden: Stand-in for the hidden states' part (see `_Hidden`), (T, R, G).
        h0: First hidden state, (R, H).
        c0: First cell state, (R, H).

    Returns:
        Hidden states (T, R, H), the last hidden state and the last cell state, (R, H) each.
    """

    @staticmethod
    def forward(
        ctx: Any,
        weight: Tensor,
        states: list[Tensor],
        gates: Tensor,
        hidden: Tensor,
        h0: Tensor,
        c0: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        length = len(gates)
        width = c0.shape[1]
        hiddens = _with_first(length, h0)
        cells = _with_first(length, c0)
        activated = gates.new_empty(gates.shape)
        tanh = gates.new_empty(length, *c0.shape)
        transposed = weight.t()
        if_width = 2 * width
        for t in range(length):
            gate = torch.addmm(gates[t], hiddens[t], transposed, out=activated[t])
            i, f, g, o = torch.split(gate, width, 1)
            # i and f lie side by side: one call for both.
            gate[:, :if_width].sigmoid_()
            o.sigmoid_()
            cell = torch.mul(f, cells[t], out=cells[t + 1])
            cell.addcmul_(i, g.tanh_())
            torch.tanh(cell, out=tanh[t])
            torch.mul(o, tanh[t], out=hiddens[t + 1])
        states.append(hiddens[:-1])
        ctx.save_for_backward(weight, activated, tanh, cells[:-1])
        # Clones: these are views of one memory, and autograd tracks writes to outputs of a Function.
        return hiddens[1:].clone(), hiddens[-1].clone(), cells[-1].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, outputs: Tensor, last: Tensor, last_cell: Tensor) -> tuple[Any, ...]:
        weight, activated, tanh, cells = ctx.saved_tensors
        length, records, width = cells.shape
        i, f, g, o = torch.split(activated, width, 2)

        # Derivatives of c by the inputs of i, f and g, and of h = o tanh(c) by that of o. They do not depend on the
        # gradient, which the loop multiplies in.
        gates = activated.new_empty(length, records, 4, width)
        torch.mul(g * i, 1 - i, out=gates[:, :, 0])
        torch.mul(cells * f, 1 - f, out=gates[:, :, 1])
        torch.mul(i, 1 - g.square(), out=gates[:, :, 2])
        torch.mul(tanh * o, 1 - o, out=gates[:, :, 3])
        h_by_c = o * (1 - tanh.square())

        flat = gates.flatten(2)
        dh = last
        dc = last_cell
        for t in reversed(range(length)):
            dh = dh + outputs[t]
            dc = torch.addcmul(dc, dh, h_by_c[t])
            gates[t, :, :3] *= dc[:, None]
            gates[t, :, 3] *= dh
            dc = dc * f[t]
            dh = flat[t] @ weight
        return None, None, flat, flat, dh, dc


class _GRUScan(torch.autograd.Function):
    """r, z = σ(gates + W_hh h + b_hh); n = tanh(gate + r (W_hn h + b_hn)); h = (1 - z) n + z h.

    Args:
        weight: W_hh, detached.
        bias: b_hh, detached, or None.
        states: States, as of the LSTM.
        gates: Gates, as of the LSTM.
        hidden: Hidden states, as of the LSTM.
        h0: First hidden state, (R, H).

    Returns:
        Hidden states (T, R, H) and the last hidden state (R, H).
    """

    @staticmethod
    def forward(
        ctx: Any,
        weight: Tensor,
        bias: Tensor | None,
        states: list[Tensor],
        gates: Tensor,
        hidden: Tensor,
        h0: Tensor,
    ) -> tuple[Tensor, Tensor]:
        length = len(gates)
        width = h0.shape[1]
        rz_width = 2 * width
        hiddens = _with_first(length, h0)
        activated = gates.new_empty(gates.shape)
        hidden_n = gates.new_empty(length, *h0.shape)  # W_hn h + b_hn
        transposed = weight.t()
        for t in range(length):
            product = hiddens[t] @ transposed if bias is None else torch.addmm(bias, hiddens[t], transposed)
            product_n = product[:, rz_width:]
            hidden_n[t] = product_n
            gate = activated[t]
            rz = gate[:, :rz_width]
            torch.add(gates[t, :, :rz_width], product[:, :rz_width], out=rz)
            rz.sigmoid_()
            r, z, n = torch.split(gate, width, 1)
            torch.addcmul(gates[t, :, rz_width:], r, product_n, out=n)
            n.tanh_()
            torch.lerp(n, hiddens[t], z, out=hiddens[t + 1])
        states.append(hiddens[:-1])
        ctx.save_for_backward(weight, activated, hidden_n, hiddens[:-1])
        return hiddens[1:].clone(), hiddens[-1].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, outputs: Tensor, last: Tensor) -> tuple[Any, ...]:
        weight, activated, hidden_n, previous = ctx.saved_tensors
        length, records, width = previous.shape
        r, z, n = torch.split(activated, width, 2)

        # Derivatives of h by the inputs of r, z and n; the loop multiplies the gradient in.
        gates = activated.new_empty(length, records, 3, width)
        h_by_n = torch.mul(1 - z, 1 - n.square(), out=gates[:, :, 2])
        torch.mul((previous - n) * z, 1 - z, out=gates[:, :, 1])
        torch.mul(h_by_n * hidden_n * r, 1 - r, out=gates[:, :, 0])
        hidden = gates.clone()
        hidden[:, :, 2] *= r  # n sees W_hn h + b_hn through r

        flat = hidden.flatten(2)
        dh = last
        for t in reversed(range(length)):
            dh = dh + outputs[t]
            gates[t] *= dh[:, None]
            hidden[t] *= dh[:, None]
            dh = torch.addmm(dh * z[t], flat[t], weight)
        return None, None, None, gates.flatten(2), flat, dh


class RecurrentInterception(Interception):
    """Computes `torch.lstm` and `torch.gru`, any number of layers and directions."""

    targets = (torch.lstm, torch.gru)

    def compute(self, func: TorchFunction, *args: Any, **kwargs: Any) -> Any:
        layer: nn.RNNBase = self.layer
        is_packed = isinstance(args[3], Sequence)  # its second argument is the sizes of batches
        if is_packed or layer.proj_size:
            raise UnsupportedModuleError(_RARE.format(layer=type(layer).__name__))
        x, states = args[:2]
        with torch.autocast(x.device.type, enabled=False):
            if layer.batch_first:
                x = x.transpose(0, 1)
            outputs, *last = self._layers(x, states)
            if layer.batch_first:
                outputs = outputs.transpose(0, 1)
            return outputs, *last

    def _layers(self, x: Tensor, states: Any) -> list[Tensor]:
        """All layers, one after another.

        Args:
            x: Inputs, (T, R, I).
            states: First hidden states (layers · directions, R, H), or a pair with the first cell states.

        Returns:
            Outputs (T, R, directions · H) and the last states, in the form of the first ones.
        """
        layer: nn.RNNBase = self.layer
        first = states if isinstance(states, tuple) else (states,)
        directions = ("", "_reverse") if layer.bidirectional else ("",)
        last: list[list[Tensor]] = []
        for depth in range(layer.num_layers):
            if depth and layer.dropout:
                x = F.dropout(x, layer.dropout, layer.training)
            outputs = []
            for direction in directions:
                output, *ends = self._direction(f"_l{depth}{direction}", x, [state[len(last)] for state in first])
                outputs.append(output)
                last.append(ends)
            x = torch.cat(outputs, 2) if layer.bidirectional else outputs[0]
        return [x, *(torch.stack(ends) for ends in zip(*last, strict=True))]

    def _direction(self, suffix: str, x: Tensor, first: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """One direction of one layer.

        Args:
            suffix: Suffix of the parameters' names.
            x: Inputs, (T, R, I).
            first: First hidden state, (R, H); of an LSTM with the first cell state.

        Returns:
            Results of the scan, in the order of the inputs.
        """
        layer = self.layer
        w_ih: Tensor = getattr(layer, f"weight_ih{suffix}")
        w_hh: Tensor = getattr(layer, f"weight_hh{suffix}")
        b_ih: Tensor | None = getattr(layer, f"bias_ih{suffix}", None)
        b_hh: Tensor | None = getattr(layer, f"bias_hh{suffix}", None)
        x = x.to(w_ih.dtype)
        first = [state.to(w_ih.dtype) for state in first]

        is_gru = isinstance(layer, nn.GRU)  # its reset gate is between W_hh h + b_hh and the new state
        input_bias = b_ih
        hidden_bias = b_hh if is_gru else None
        if b_ih is not None and b_hh is not None and not is_gru:
            input_bias = b_ih + b_hh

        # In the layout of the input: a view would be copied by the product.
        batch_major = x.transpose(0, 1)
        if not x.is_contiguous() and batch_major.is_contiguous():
            gates = F.linear(batch_major, w_ih, input_bias).transpose(0, 1)
        else:
            gates = F.linear(x, w_ih, input_bias)

        states: list[Tensor] = []  # filled when the scan has run
        hidden = _Hidden.apply(w_hh, hidden_bias, states, gates.shape)
        is_reverse = suffix.endswith("_reverse")
        steps = (gates.flip(0), hidden.flip(0)) if is_reverse else (gates, hidden)
        # The scan gets detached weights: their gradients are those of the stand-in.
        if is_gru:
            bias = None if hidden_bias is None else hidden_bias.detach()
            outputs, *last = _GRUScan.apply(w_hh.detach(), bias, states, *steps, *first)
        else:
            outputs, *last = _LSTMScan.apply(w_hh.detach(), states, *steps, *first)
        if is_reverse:
            outputs = outputs.flip(0)
            states[0] = states[0].flip(0)

        inputs = [x.detach(), *states]
        self.note(
            outputs=(gates, hidden),
            inputs=inputs,
            records=x.shape[1],
            gradients=lambda grads: _gradients(suffix, grads, inputs, is_gru),
        )
        return outputs, *last


def _gradients(
    suffix: str,
    grads: Sequence[Tensor | None],
    inputs: Sequence[Tensor],
    is_gru: bool,
) -> LayerGradients:
    """Gradients of the parameters of one direction.

    Args:
        suffix: Suffix of the parameters' names.
        grads: Gradients of W x (T, R, G) for W_ih and W_hh.
        inputs: The two x (T, R, I).
        is_gru: True if b_hh is added on the side of W_hh.
    """
    result: LayerGradients = {}
    side_of_hidden_bias = "hh" if is_gru else "ih"
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
