"""The recurrences of LSTM, GRU and Elman cells over time, forwards and backwards, for a whole lot.

Derivatives are elementwise in the gates, so all that does not depend on the gradient is computed for all time steps at
once; what is left in the loop over time is one matrix product and a few products of (R, H). Everything is time-major.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Scanned(NamedTuple):
    """Results of a scan over time.

    Attributes:
        outputs: Hidden state after each step, (T, R, H); a view.
        previous: Hidden state before each step; a view.
        last: After the last step, (R, H); a view.
        gates: Activated, (T, R, G).
        extra: Of the cell's own.
        cells: Cell state before each step (T, R, n), LSTM only.
        last_cell: After the last step, LSTM only.
        unprojected: Hidden state before a projection (T, R, n), where there is one.
    """

    outputs: Tensor
    previous: Tensor
    last: Tensor
    gates: Tensor
    extra: Tensor | None = None
    cells: Tensor | None = None
    last_cell: Tensor | None = None
    unprojected: Tensor | None = None


Backward = tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor | None]
"""Gradients of the gates' inputs, of W_hh h + b_hh, of the projection's output, and of the first states."""


class Cell(ABC):
    """Recurrence of one direction of one layer over time.

    Args:
        weight: W_hh.
        bias: b_hh, where it is not a part of the gates.
        projection: W_hr, LSTM only.
        reverse: From the last step to the first.
        mask: False where a sequence has ended, (T, R, 1); None: all are as long.
    """

    def __init__(
        self, weight: Tensor, bias: Tensor | None, projection: Tensor | None, reverse: bool, mask: Tensor | None
    ) -> None:
        self.weight, self.bias, self.projection = weight, bias, projection
        self.reverse, self.mask = reverse, mask

    @abstractmethod
    def forward(self, gates: Tensor, h0: Tensor, c0: Tensor | None) -> Scanned:
        """Scan; `gates` is W_ih x + b, (T, R, G)."""

    @abstractmethod
    def backward(self, s: Scanned, outputs: Tensor, last: Tensor, last_cell: Tensor | None) -> Backward:
        """Scan back, given the gradients of hidden states, last hidden and last cell state."""

    def steps(self, length: int) -> range:
        """Time steps in the order of the scan."""
        return range(length - 1, -1, -1) if self.reverse else range(length)

    def states(self, length: int, first: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Room for states: all (T + 1, ...), those before each step, after each step, and after the last."""
        room = first.new_empty(length + 1, *first.shape)
        room[length if self.reverse else 0] = first
        early, late = room[:length], room[1:]
        return room, late if self.reverse else early, early if self.reverse else late, room[0 if self.reverse else -1]

    def stay(self, t: int, after: Tensor, before: Tensor) -> None:
        """Leave states as they were where a sequence has ended."""
        if self.mask is not None:
            torch.where(self.mask[t], after[t], before[t], out=after[t])


class LSTMCell(Cell):
    """i, f, g, o = gates + W_hh h; c = f c + i g; h = o tanh(c), projected where W_hr is given."""

    def forward(self, gates: Tensor, h0: Tensor, c0: Tensor | None) -> Scanned:
        assert c0 is not None
        length, width = len(gates), c0.shape[1]
        _, before, after, last = self.states(length, h0)
        _, cells, later, last_cell = self.states(length, c0)
        activated = gates.new_empty(gates.shape)
        tanh = gates.new_empty(length, *c0.shape)
        unprojected = None if self.projection is None else torch.empty_like(tanh)
        turned = self.weight.t()
        for t in self.steps(length):
            gate = torch.addmm(gates[t], before[t], turned, out=activated[t])
            i, f, g, o = torch.split(gate, width, 1)
            gate[:, : 2 * width].sigmoid_()
            o.sigmoid_()
            torch.mul(f, cells[t], out=later[t]).addcmul_(i, g.tanh_())
            self.stay(t, later, cells)
            torch.tanh(later[t], out=tanh[t])
            if self.projection is None or unprojected is None:
                torch.mul(o, tanh[t], out=after[t])
            else:
                torch.mm(torch.mul(o, tanh[t], out=unprojected[t]), self.projection.t(), out=after[t])
            self.stay(t, after, before)
        return Scanned(after, before, last, activated, tanh, cells, last_cell, unprojected)

    def backward(self, s: Scanned, outputs: Tensor, last: Tensor, last_cell: Tensor | None) -> Backward:
        assert s.cells is not None and s.extra is not None and last_cell is not None
        length, records, width = s.cells.shape
        i, f, g, o = torch.split(s.gates, width, 2)
        factors = s.gates.new_empty(length, records, 4, width)  # of dc and, for the output gate, of dm
        torch.mul(g * i, 1 - i, out=factors[:, :, 0])
        torch.mul(s.cells * f, 1 - f, out=factors[:, :, 1])
        torch.mul(i, 1 - g.square(), out=factors[:, :, 2])
        torch.mul(s.extra * o, 1 - o, out=factors[:, :, 3])
        through = o * (1 - s.extra.square())  # from dm to dc
        if self.mask is not None:
            factors *= self.mask[:, :, None]
            through *= self.mask
            f = torch.where(self.mask, f, 1.0)
        projected = None if self.projection is None else torch.empty_like(outputs)
        flat = factors.flatten(2)
        dh, dc = last, last_cell
        for t in reversed(self.steps(length)):
            dh = dh + outputs[t]
            dm = dh
            if self.projection is not None and projected is not None:
                projected[t] = dh if self.mask is None else dh * self.mask[t]
                dm = dh @ self.projection
            dc = torch.addcmul(dc, dm, through[t])
            factors[t, :, :3] *= dc[:, None]
            factors[t, :, 3] *= dm
            dc = dc * f[t]
            ended = None if self.mask is None else dh * ~self.mask[t]
            dh = flat[t] @ self.weight if ended is None else torch.addmm(ended, flat[t], self.weight)
        return flat, flat, projected, dh, dc


class GRUCell(Cell):
    """r, z = σ(gates + W_hh h + b_hh); n = tanh(gate + r (W_hn h + b_hn)); h = (1 - z) n + z h."""

    def forward(self, gates: Tensor, h0: Tensor, c0: Tensor | None) -> Scanned:
        length, width = len(gates), h0.shape[1]
        _, before, after, last = self.states(length, h0)
        activated = gates.new_empty(gates.shape)
        reset = gates.new_empty(length, *h0.shape)  # W_hn h + b_hn
        turned = self.weight.t()
        for t in self.steps(length):
            side = before[t] @ turned if self.bias is None else torch.addmm(self.bias, before[t], turned)
            gate, both = activated[t], 2 * width
            torch.add(gates[t, :, :both], side[:, :both], out=gate[:, :both]).sigmoid_()
            r, z, n = torch.split(gate, width, 1)
            reset[t] = side[:, both:]
            torch.addcmul(gates[t, :, both:], r, side[:, both:], out=n).tanh_()
            torch.lerp(n, before[t], z, out=after[t])
            self.stay(t, after, before)
        return Scanned(after, before, last, activated, reset)

    def backward(self, s: Scanned, outputs: Tensor, last: Tensor, last_cell: Tensor | None) -> Backward:
        assert s.extra is not None
        length, records, width = s.previous.shape
        r, z, n = torch.split(s.gates, width, 2)
        factors = s.gates.new_empty(length, records, 3, width)  # of dh
        new = torch.mul(1 - z, 1 - n.square(), out=factors[:, :, 2])
        torch.mul((s.previous - n) * z, 1 - z, out=factors[:, :, 1])
        torch.mul(new * s.extra * r, 1 - r, out=factors[:, :, 0])
        if self.mask is not None:
            factors *= self.mask[:, :, None]
            z = torch.where(self.mask, z, 1.0)
        hidden = factors.clone()
        hidden[:, :, 2] *= r
        flat = hidden.flatten(2)
        dh = last
        for t in reversed(self.steps(length)):
            dh = dh + outputs[t]
            factors[t] *= dh[:, None]
            hidden[t] *= dh[:, None]
            dh = torch.addmm(dh * z[t], flat[t], self.weight)
        return factors.flatten(2), flat, None, dh, None


class ElmanCell(Cell):
    """h = tanh(gates + W_hh h), or its positive part."""

    positive = False

    def forward(self, gates: Tensor, h0: Tensor, c0: Tensor | None) -> Scanned:
        length, turned = len(gates), self.weight.t()
        _, before, after, last = self.states(length, h0)
        for t in self.steps(length):
            h = torch.addmm(gates[t], before[t], turned, out=after[t])
            _ = h.relu_() if self.positive else h.tanh_()
            self.stay(t, after, before)
        return Scanned(after, before, last, after)

    def backward(self, s: Scanned, outputs: Tensor, last: Tensor, last_cell: Tensor | None) -> Backward:
        factors = (s.outputs > 0).to(outputs.dtype) if self.positive else 1 - s.outputs.square()
        if self.mask is not None:
            factors *= self.mask
        dh = last
        for t in reversed(self.steps(len(factors))):
            dh = dh + outputs[t]
            factors[t] *= dh
            ended = None if self.mask is None else dh * ~self.mask[t]
            dh = factors[t] @ self.weight if ended is None else torch.addmm(ended, factors[t], self.weight)
        return factors, factors, None, dh, None


class ReLUCell(ElmanCell):
    """h = max(0, gates + W_hh h): an Elman cell with ReLU instead of tanh."""

    positive = True


CELLS: dict[Callable[..., Any], type[Cell]] = {
    torch.lstm: LSTMCell,
    torch.gru: GRUCell,
    torch.rnn_tanh: ElmanCell,
    torch.rnn_relu: ReLUCell,
}
