"""Per-record gradients of nn.LSTM, nn.GRU and nn.RNN, and of their cells.

Each direction of each layer is computed as gates = W_ih x + b (all time steps in one product), then a scan over time
that adds W_hh h. The gradient of the gates is all that the weights need: record by record the gradient of W_ih is
Σ_t g_t x_tᵀ and that of W_hh Σ_t g_t h_{t-1}ᵀ, so nothing of the size of R weights is built.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.utils.rnn import PackedSequence

from dpbench.privacy.gradients.interception import Interception, LayerGradients
from dpbench.privacy.gradients.parameter import InstantiatedGradients, OuterProductGradients, ParameterGradients
from dpbench.privacy.gradients.scans import CELLS, Cell, Scanned


class _Hidden(torch.autograd.Function):
    """Zeros, where W h is added to the gates inside of the scan: their gradient is that of W h.

    Backward gives W's ordinary gradient; autograd comes here only if somebody asks for it.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, bias: Tensor | None, states: list[Tensor], shape: torch.Size) -> Tensor:
        ctx.states, ctx.biased = states, bias is not None
        return weight.new_zeros(()).expand(shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        flat = grad.flatten(0, 1)
        weight = flat.t() @ ctx.states[0].flatten(0, 1).to(flat.dtype)
        return weight, flat.sum(0) if ctx.biased else None, None, None


class _Scan(torch.autograd.Function):
    """The recurrence over time; see `scans` for what it computes.

    Inputs: a cell, the gates' part of the inputs (T, R, G), two stand-ins (see `_Hidden`), constants and first states.
    Outputs: hidden states (T, R, H), the last hidden state (R, H) and cell state.
    """

    @staticmethod
    def forward(
        ctx: Any,
        cell: Cell,
        kept: list[Tensor],
        gates: Tensor,
        hidden: Tensor | None,
        projected: Tensor | None,
        h0: Tensor,
        c0: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        scanned = cell.forward(gates, h0, c0)
        kept.append(scanned.previous)
        if scanned.unprojected is not None:
            kept.append(scanned.unprojected)
        ctx.cell, ctx.fields = cell, type(scanned)._fields
        ctx.wanted = hidden is not None, projected is not None
        ctx.save_for_backward(*scanned)
        last = None if scanned.last_cell is None else scanned.last_cell.clone()
        return scanned.outputs.clone(), scanned.last.clone(), last

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, outputs: Tensor, last: Tensor, last_cell: Tensor | None = None) -> tuple[Any, ...]:
        gates, hidden, projected, h0, c0 = ctx.cell.backward(Scanned(*ctx.saved_tensors), outputs, last, last_cell)
        wants_hidden, wants_projected = ctx.wanted
        return None, None, gates, hidden if wants_hidden else None, projected if wants_projected else None, h0, c0


class RecurrentInterception(Interception):
    """Computes `torch.lstm`, `gru`, `rnn_tanh` and `rnn_relu`, any number of layers and directions."""

    targets = tuple(CELLS)

    def compute(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        layer = self.layer
        with torch.autocast(args[0].device.type, enabled=False):
            if isinstance(args[3], Sequence):  # (data, batch sizes, states, weights, ...) of a PackedSequence
                return self._packed(func, args[0], args[1], args[2])
            x = args[0].transpose(0, 1) if layer.batch_first else args[0]
            outputs, *states = self._layers(func, x, args[1], None, None)
            return outputs.transpose(0, 1) if layer.batch_first else outputs, *states

    def _packed(self, func: Callable[..., Any], data: Tensor, batch_sizes: Tensor, states: Any) -> Any:
        """Rows of data are those of a (T, R) grid where a sequence has not ended yet, longest sequence first."""
        steps, records = len(batch_sizes), int(batch_sizes[0])
        mask = (torch.arange(records) < batch_sizes[:, None]).to(data.device)
        place = mask.flatten().nonzero().squeeze(1)
        grid = data.new_zeros(steps * records, data.shape[1]).index_copy(0, place, data)
        sequence = next(x for x in self.arguments if isinstance(x, PackedSequence))
        outputs, *last = self._layers(
            func, grid.view(steps, records, -1), states, mask[:, :, None], sequence.unsorted_indices
        )
        return outputs.flatten(0, 1).index_select(0, place), *last

    def _layers(
        self, func: Callable[..., Any], x: Tensor, states: Any, mask: Tensor | None, order: Tensor | None
    ) -> tuple[Tensor, ...]:
        layer: nn.RNNBase = self.layer
        h0, c0 = states if isinstance(states, tuple | list) else (states, None)
        directions = 2 if layer.bidirectional else 1
        last: list[Tensor] = []
        last_cell: list[Tensor] = []
        for depth in range(layer.num_layers):
            if depth and layer.dropout:
                x = F.dropout(x, layer.dropout, layer.training)
            outputs = []
            for direction in range(directions):
                row = depth * directions + direction
                suffix = f"_l{depth}" + "_reverse" * direction
                first = h0[row], None if c0 is None else c0[row]
                out, h, c = self._direction(func, suffix, x, first, mask, order)
                outputs.append(out)
                last.append(h)
                last_cell.append(c)
            x = torch.cat(outputs, 2) if directions == 2 else outputs[0]
        return (x, torch.stack(last)) if c0 is None else (x, torch.stack(last), torch.stack(last_cell))

    def _direction(
        self,
        func: Callable[..., Any],
        suffix: str,
        x: Tensor,
        first: tuple[Tensor, Tensor | None],
        mask: Tensor | None,
        order: Tensor | None,
    ) -> Any:
        w_ih, w_hh, b_ih, b_hh, w_hr = (
            getattr(self.layer, f"{name}{suffix}", None)
            for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh", "weight_hr")
        )
        w_ih, w_hh = cast(Tensor, w_ih), cast(Tensor, w_hh)
        separate = func is torch.gru  # whose reset gate is between W_hh h + b_hh and the new state
        x, h0 = x.to(w_ih.dtype), first[0].to(w_ih.dtype)
        c0 = None if first[1] is None else first[1].to(w_ih.dtype)
        bias = b_ih if b_ih is None or separate else b_ih + cast(Tensor, b_hh)
        # In the layout of the input: a view would be copied by the product.
        turned = not x.is_contiguous() and x.transpose(0, 1).is_contiguous()
        gates = F.linear(x.transpose(0, 1), w_ih, bias).transpose(0, 1) if turned else F.linear(x, w_ih, bias)
        states: list[Tensor] = []
        unprojected: list[Tensor] = []
        hidden = _Hidden.apply(w_hh, b_hh if separate else None, states, gates.shape)
        projected = None
        if w_hr is not None:
            shape = torch.Size((*x.shape[:2], w_hr.shape[0]))
            projected = _Hidden.apply(w_hr, None, unprojected, shape)
        inner = b_hh.detach() if separate and b_hh is not None else None
        projection = None if w_hr is None else w_hr.detach()
        cell = CELLS[func](w_hh.detach(), inner, projection, suffix.endswith("_reverse"), mask)
        kept: list[Tensor] = []
        result = _Scan.apply(cell, kept, gates, hidden, projected, h0, c0)
        states.append(kept[0])
        unprojected.extend(kept[1:])
        inputs = [x.detach(), *kept]
        self.note(
            (gates, hidden, projected),
            inputs,
            x.shape[1],
            lambda grads: _gradients(suffix, grads, inputs, separate, order),
        )
        return result


class CellInterception(Interception):
    """Computes one step of `torch.lstm_cell`, `gru_cell`, `rnn_tanh_cell` and `rnn_relu_cell`."""

    targets = (torch.lstm_cell, torch.gru_cell, torch.rnn_tanh_cell, torch.rnn_relu_cell)

    def compute(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        x, state, w_ih, w_hh, b_ih, b_hh = (*args, None, None)[:6]
        h = state[0] if func is torch.lstm_cell else state
        own, side = F.linear(x, w_ih, b_ih), F.linear(h, w_hh, b_hh)
        inputs = [x.detach()[None], h.detach()[None]]  # one time step
        self.note(
            [own, side],
            inputs,
            len(x),
            lambda grads: _gradients("", [None if g is None else g[None] for g in grads], inputs, True, None),
        )
        if func is torch.lstm_cell:
            i, f, g, o = (own + side).chunk(4, 1)
            c = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
            return o.sigmoid() * c.tanh(), c
        if func is torch.gru_cell:
            (r, z, n), (r_h, z_h, n_h) = own.chunk(3, 1), side.chunk(3, 1)
            return torch.lerp((n + (r + r_h).sigmoid() * n_h).tanh(), h, (z + z_h).sigmoid())
        return (own + side).tanh() if func is torch.rnn_tanh_cell else (own + side).relu()


def _gradients(
    suffix: str, grads: Sequence[Tensor | None], inputs: Sequence[Tensor], separate: bool, order: Tensor | None
) -> LayerGradients:
    """Gradients of the parameters of one direction.

    Args:
        suffix: Of their names.
        grads: Gradients of W x (T, R, G) for W_ih, W_hh and W_hr.
        inputs: The three x (T, R, I); W_hr's only where there is one.
        separate: Whether b_hh is added on the side of W_hh.
        order: Position of each record among the rows; None: in order.
    """
    result: LayerGradients = {}
    for side, grad, x in zip(("ih", "hh", "hr"), grads, inputs, strict=False):
        if grad is None:
            continue
        g, a = grad.transpose(0, 1), x.transpose(0, 1).to(grad.dtype)
        if order is not None:
            g, a = g[order], a[order]
        result[f"weight_{side}{suffix}"] = OuterProductGradients(g, a)
        summed = _summed(g)
        if side == "ih":
            result[f"bias_ih{suffix}"] = summed
        if side == ("hh" if separate else "ih"):
            result[f"bias_hh{suffix}"] = summed
    return result


def _summed(g: Tensor) -> ParameterGradients:
    return InstantiatedGradients(lambda: g.sum(1))
