"""The recurrences of LSTM, GRU and Elman cells over time, forwards and backwards, for a whole lot.

Derivatives are elementwise in the gates, so all that does not depend on the gradient is computed for all time steps at
once; what is left in the loop over time is one matrix product and a few products of (R, H). Everything is time-major:
T steps of R records, hidden states of width H, G gate values a record.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor


class ScanResult(NamedTuple):
    """Results of a scan over time.

    Attributes:
        outputs: Hidden state after each step, (T, R, H); a view.
        previous: Hidden state before each step, (T, R, H); a view.
        last: Hidden state after the last step, (R, H); a view.
        gates: Activated gates, (T, R, G).
        extra: What else the cell's `backward` reads: tanh of the LSTM's cell states, W_hn h + b_hn of the GRU.
        cells: Cell state before each step (T, R, H), LSTM only.
        last_cell: Cell state after the last step (R, H), LSTM only.
    """

    outputs: Tensor
    previous: Tensor
    last: Tensor
    gates: Tensor
    extra: Tensor | None = None
    cells: Tensor | None = None
    last_cell: Tensor | None = None


class ScanGradients(NamedTuple):
    """Gradients with respect to what a scan takes.

    Attributes:
        gates: Of W_ih x + b, (T, R, G).
        hidden: Of W_hh h + b_hh, (T, R, G).
        h0: Of the first hidden state, (R, H).
        c0: Of the first cell state (R, H), LSTM only.
    """

    gates: Tensor
    hidden: Tensor
    h0: Tensor
    c0: Tensor | None = None


class _States(NamedTuple):
    """Three views of the states at all times: before each step, after each step (T, R, H), after the last (R, H)."""

    before: Tensor
    after: Tensor
    last: Tensor


class Cell(ABC):
    """Recurrence of one direction of one layer over time.

    Args:
        weight: W_hh.
        bias: b_hh, where it is not a part of the gates.
        reverse: From the last step to the first.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, reverse: bool) -> None:
        self.weight = weight
        self.bias = bias
        self.reverse = reverse

    @abstractmethod
    def forward(self, gates: Tensor, h0: Tensor, c0: Tensor | None) -> ScanResult:
        """Scan over time.

        Args:
            gates: W_ih x + b, (T, R, G).
            h0: First hidden state, (R, H).
            c0: First cell state (R, H), LSTM only.
        """

    @abstractmethod
    def backward(self, scan: ScanResult, outputs: Tensor, last: Tensor, last_cell: Tensor | None) -> ScanGradients:
        """Scan back.

        Args:
            scan: What `forward` returned.
            outputs: Gradients of the hidden states, (T, R, H).
            last: Gradient of the last hidden state, (R, H).
            last_cell: Gradient of the last cell state (R, H), LSTM only.
        """

    def steps(self, length: int) -> range:
        """Time steps in the order of the scan."""
        if self.reverse:
            return range(length - 1, -1, -1)
        return range(length)

    def allocate(self, length: int, first: Tensor) -> _States:
        """Memory for the states at all T + 1 times in one piece, with the first one written."""
        states = first.new_empty(length + 1, *first.shape)
        if self.reverse:
            states[length] = first
            return _States(states[1:], states[:length], states[0])
        states[0] = first
        return _States(states[:length], states[1:], states[length])


class LSTMCell(Cell):
    """i, f, g, o = gates + W_hh h; c = f c + i g; h = o tanh(c)."""

    def forward(self, gates: Tensor, h0: Tensor, c0: Tensor | None) -> ScanResult:
        assert c0 is not None
        length = len(gates)
        width = c0.shape[1]
        hidden = self.allocate(length, h0)
        cells = self.allocate(length, c0)
        activated = gates.new_empty(gates.shape)
        tanh = gates.new_empty(length, *c0.shape)
        transposed = self.weight.t()
        if_width = 2 * width
        for t in self.steps(length):
            gate = torch.addmm(gates[t], hidden.before[t], transposed, out=activated[t])
            i, f, g, o = torch.split(gate, width, 1)
            # i and f lie side by side: one call for both.
            gate[:, :if_width].sigmoid_()
            o.sigmoid_()
            cell = torch.mul(f, cells.before[t], out=cells.after[t])
            cell.addcmul_(i, g.tanh_())
            torch.tanh(cell, out=tanh[t])
            torch.mul(o, tanh[t], out=hidden.after[t])
        return ScanResult(hidden.after, hidden.before, hidden.last, activated, tanh, cells.before, cells.last)

    def backward(self, scan: ScanResult, outputs: Tensor, last: Tensor, last_cell: Tensor | None) -> ScanGradients:
        cells = scan.cells
        tanh = scan.extra
        assert cells is not None and tanh is not None and last_cell is not None
        length, records, width = cells.shape
        i, f, g, o = torch.split(scan.gates, width, 2)

        # Derivatives of c by the inputs of i, f and g, and of h = o tanh(c) by that of o. They do not depend on the
        # gradient, which the loop multiplies in.
        gates = scan.gates.new_empty(length, records, 4, width)
        torch.mul(g * i, 1 - i, out=gates[:, :, 0])
        torch.mul(cells * f, 1 - f, out=gates[:, :, 1])
        torch.mul(i, 1 - g.square(), out=gates[:, :, 2])
        torch.mul(tanh * o, 1 - o, out=gates[:, :, 3])
        h_by_c = o * (1 - tanh.square())

        flat = gates.flatten(2)
        dh = last
        dc = last_cell
        for t in reversed(self.steps(length)):
            dh = dh + outputs[t]
            dc = torch.addcmul(dc, dh, h_by_c[t])
            gates[t, :, :3] *= dc[:, None]
            gates[t, :, 3] *= dh
            dc = dc * f[t]
            dh = flat[t] @ self.weight
        return ScanGradients(flat, flat, dh, dc)


class GRUCell(Cell):
    """r, z = σ(gates + W_hh h + b_hh); n = tanh(gate + r (W_hn h + b_hn)); h = (1 - z) n + z h."""

    def forward(self, gates: Tensor, h0: Tensor, c0: Tensor | None) -> ScanResult:
        length = len(gates)
        width = h0.shape[1]
        rz_width = 2 * width
        hidden = self.allocate(length, h0)
        activated = gates.new_empty(gates.shape)
        hidden_n = gates.new_empty(length, *h0.shape)  # W_hn h + b_hn
        transposed = self.weight.t()
        for t in self.steps(length):
            if self.bias is None:
                product = hidden.before[t] @ transposed
            else:
                product = torch.addmm(self.bias, hidden.before[t], transposed)
            product_n = product[:, rz_width:]
            hidden_n[t] = product_n
            gate = activated[t]
            rz = gate[:, :rz_width]
            torch.add(gates[t, :, :rz_width], product[:, :rz_width], out=rz)
            rz.sigmoid_()
            r, z, n = torch.split(gate, width, 1)
            torch.addcmul(gates[t, :, rz_width:], r, product_n, out=n)
            n.tanh_()
            torch.lerp(n, hidden.before[t], z, out=hidden.after[t])
        return ScanResult(hidden.after, hidden.before, hidden.last, activated, hidden_n)

    def backward(self, scan: ScanResult, outputs: Tensor, last: Tensor, last_cell: Tensor | None) -> ScanGradients:
        hidden_n = scan.extra
        assert hidden_n is not None
        length, records, width = scan.previous.shape
        r, z, n = torch.split(scan.gates, width, 2)

        # Derivatives of h by the inputs of r, z and n; the loop multiplies the gradient in.
        gates = scan.gates.new_empty(length, records, 3, width)
        h_by_n = torch.mul(1 - z, 1 - n.square(), out=gates[:, :, 2])
        torch.mul((scan.previous - n) * z, 1 - z, out=gates[:, :, 1])
        torch.mul(h_by_n * hidden_n * r, 1 - r, out=gates[:, :, 0])
        hidden = gates.clone()
        hidden[:, :, 2] *= r  # n sees W_hn h + b_hn through r

        flat = hidden.flatten(2)
        dh = last
        for t in reversed(self.steps(length)):
            dh = dh + outputs[t]
            gates[t] *= dh[:, None]
            hidden[t] *= dh[:, None]
            dh = torch.addmm(dh * z[t], flat[t], self.weight)
        return ScanGradients(gates.flatten(2), flat, dh)


class ElmanCell(Cell):
    """h = tanh(gates + W_hh h), or its positive part."""

    positive = False

    def forward(self, gates: Tensor, h0: Tensor, c0: Tensor | None) -> ScanResult:
        length = len(gates)
        hidden = self.allocate(length, h0)
        transposed = self.weight.t()
        for t in self.steps(length):
            h = torch.addmm(gates[t], hidden.before[t], transposed, out=hidden.after[t])
            if self.positive:
                h.relu_()
            else:
                h.tanh_()
        return ScanResult(hidden.after, hidden.before, hidden.last, hidden.after)

    def backward(self, scan: ScanResult, outputs: Tensor, last: Tensor, last_cell: Tensor | None) -> ScanGradients:
        # The derivative of h by its gate, as a function of h.
        h = scan.outputs
        gates = (h > 0).to(outputs.dtype) if self.positive else 1 - h.square()
        dh = last
        for t in reversed(self.steps(len(gates))):
            dh = dh + outputs[t]
            gates[t] *= dh
            dh = gates[t] @ self.weight
        return ScanGradients(gates, gates, dh)


class ReLUCell(ElmanCell):
    """h = max(0, gates + W_hh h): an Elman cell with ReLU instead of tanh."""

    positive = True


CELLS: dict[Callable[..., Any], type[Cell]] = {
    torch.lstm: LSTMCell,
    torch.gru: GRUCell,
    torch.rnn_tanh: ElmanCell,
    torch.rnn_relu: ReLUCell,
}
