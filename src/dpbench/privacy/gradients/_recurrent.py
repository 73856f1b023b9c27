"""Per-record gradients of nn.LSTM, nn.GRU and nn.RNN, and of their cells.

Each direction of each layer is computed as gates = W_ih x + b (all time steps in one product), then a scan over time
that adds W_hh h. The gradient of the gates is all that the weights need: record by record the gradient of W_ih is
Σ_t g_t x_tᵀ and that of W_hh Σ_t g_t h_{t-1}ᵀ, so nothing of the size of R weights is built.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.utils.rnn import PackedSequence

from dpbench.privacy.gradients._interception import Interception, LayerGradients, TorchFunction
from dpbench.privacy.gradients._scans import CELLS, Cell, ScanGradients, ScanResult
from dpbench.privacy.gradients.parameter import InstantiatedGradients, OuterProductGradients, ParameterGradients


class _Hidden(torch.autograd.Function):
    """Zeros, where W h is added to the gates inside of the scan: their gradient is that of W h.

    Backward gives W's ordinary gradient; autograd comes here only if somebody asks for it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        weight: Tensor,
        bias: Tensor | None,
        states: list[Tensor],
        shape: torch.Size,
    ) -> Tensor:
        ctx.states = states
        ctx.has_bias = bias is not None
        return weight.new_zeros(()).expand(shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # Both with all time steps of all records in a row.
        flat = grad.flatten(0, 1)
        states = ctx.states[0].flatten(0, 1)
        states = states.to(flat.dtype)
        weight_grad = flat.t() @ states
        bias_grad = flat.sum(0) if ctx.has_bias else None
        return weight_grad, bias_grad, None, None


class _Scan(torch.autograd.Function):
    """The recurrence over time; see `_scans` for what it computes.

    Args:
        cell: Computes it.
        states: Gets the hidden states before each step, and those before the projection, where there is one.
        gates: The inputs' part of the gates, (T, R, G).
        hidden: Stand-in for the hidden states' part (see `_Hidden`), (T, R, G).
        projected: Stand-in for the projection's output, (T, R, H).
        h0: First hidden state, (R, H).
        c0: First cell state (R, n), LSTM only.

    Returns:
        Hidden states (T, R, H), the last hidden state (R, H) and the last cell state (R, n), LSTM only.
    """

    @staticmethod
    def forward(
        ctx: Any,
        cell: Cell,
        states: list[Tensor],
        gates: Tensor,
        hidden: Tensor | None,
        projected: Tensor | None,
        h0: Tensor,
        c0: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        scan = cell.forward(gates, h0, c0)
        states.append(scan.previous)
        if scan.unprojected is not None:
            states.append(scan.unprojected)
        ctx.cell = cell
        ctx.has_hidden = hidden is not None
        ctx.has_projected = projected is not None
        ctx.save_for_backward(*scan)
        # Clones: the scan's results are views of one memory, and autograd tracks writes to what a Function returns.
        last_cell = None if scan.last_cell is None else scan.last_cell.clone()
        outputs = scan.outputs.clone()
        last = scan.last.clone()
        return outputs, last, last_cell

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any,
        outputs: Tensor,
        last: Tensor,
        last_cell: Tensor | None = None,
    ) -> tuple[Any, ...]:
        scan = ScanResult(*ctx.saved_tensors)
        grads: ScanGradients = ctx.cell.backward(
            scan,
            outputs,
            last,
            last_cell,
        )
        hidden = grads.hidden if ctx.has_hidden else None
        projected = grads.projected if ctx.has_projected else None
        return (
            None,  # the cell
            None,  # the list of states
            grads.gates,
            hidden,
            projected,
            grads.h0,
            grads.c0,
        )


class RecurrentInterception(Interception):
    """Computes `torch.lstm`, `gru`, `rnn_tanh` and `rnn_relu`, any number of layers and directions."""

    targets = tuple(CELLS)

    def compute(self, func: TorchFunction, *args: Any, **kwargs: Any) -> Any:
        batch_first = self.layer.batch_first
        with torch.autocast(args[0].device.type, enabled=False):
            if isinstance(args[3], Sequence):  # (data, batch sizes, states, weights, ...) of a PackedSequence
                data, batch_sizes, states = args[:3]
                return self._packed(func, data, batch_sizes, states)
            x, states = args[:2]
            if batch_first:
                x = x.transpose(0, 1)
            outputs, *last = self._layers(
                func,
                x,
                states,
                mask=None,
                order=None,
            )
            if batch_first:
                outputs = outputs.transpose(0, 1)
            return outputs, *last

    def _packed(
        self,
        func: TorchFunction,
        data: Tensor,
        batch_sizes: Tensor,
        states: Any,
    ) -> Any:
        """Lay a PackedSequence out as a (T, R) grid, longest sequence first, scan that, and take its rows back.

        Args:
            func: The function that this computes.
            data: Inputs of all steps and sequences, (rows, I).
            batch_sizes: Number of sequences that have not ended yet, (T,).
            states: See `_layers`.
        """
        steps = len(batch_sizes)
        records = int(batch_sizes[0])
        mask = torch.arange(records) < batch_sizes[:, None]
        mask = mask.to(data.device)
        positions = mask.flatten().nonzero().squeeze(1)
        width = data.shape[1]
        grid = data.new_zeros(steps * records, width)
        grid = grid.index_copy(0, positions, data)
        grid = grid.view(steps, records, -1)
        sequence = next(x for x in self.arguments if isinstance(x, PackedSequence))
        outputs, *last = self._layers(
            func,
            grid,
            states,
            mask[:, :, None],
            sequence.unsorted_indices,
        )
        rows = outputs.flatten(0, 1)
        return rows.index_select(0, positions), *last

    def _layers(
        self,
        func: TorchFunction,
        x: Tensor,
        states: Any,
        mask: Tensor | None,
        order: Tensor | None,
    ) -> tuple[Tensor, ...]:
        """All layers, one after another.

        Args:
            func: The function that this computes.
            x: Inputs, (T, R, I).
            states: First hidden states (layers · directions, R, H), or a pair with the first cell states.
            mask: See `Cell`.
            order: Position of each record among the rows; None: in order.
        """
        layer: nn.RNNBase = self.layer
        has_cells = isinstance(states, tuple | list)
        h0, c0 = states if has_cells else (states, None)
        directions = ("", "_reverse") if layer.bidirectional else ("",)
        last: list[Tensor] = []
        last_cell: list[Tensor] = []
        for depth in range(layer.num_layers):
            if depth and layer.dropout:
                x = F.dropout(x, layer.dropout, layer.training)
            outputs = []
            for direction in directions:
                row = len(last)
                output, h, c = self._direction(
                    func,
                    f"_l{depth}{direction}",
                    x,
                    h0[row],
                    None if c0 is None else c0[row],
                    mask,
                    order,
                )
                outputs.append(output)
                last.append(h)
                last_cell.append(c)
            x = torch.cat(outputs, 2) if layer.bidirectional else outputs[0]
        last_states = torch.stack(last)
        if c0 is None:
            return x, last_states
        return x, last_states, torch.stack(last_cell)

    def _direction(
        self,
        func: TorchFunction,
        suffix: str,
        x: Tensor,
        h0: Tensor,
        c0: Tensor | None,
        mask: Tensor | None,
        order: Tensor | None,
    ) -> Any:
        """One direction of one layer.

        Args:
            func: The function that this computes.
            suffix: Of the parameters' names.
            x: Inputs, (T, R, I).
            h0: First hidden state, (R, H).
            c0: First cell state (R, n), LSTM only.
            mask: See `Cell`.
            order: See `_layers`.

        Returns:
            What `_Scan` does.
        """
        layer = self.layer
        w_ih: Tensor = getattr(layer, f"weight_ih{suffix}")
        w_hh: Tensor = getattr(layer, f"weight_hh{suffix}")
        b_ih: Tensor | None = getattr(layer, f"bias_ih{suffix}", None)
        b_hh: Tensor | None = getattr(layer, f"bias_hh{suffix}", None)
        w_hr: Tensor | None = getattr(layer, f"weight_hr{suffix}", None)
        dtype = w_ih.dtype
        x = x.to(dtype)
        h0 = h0.to(dtype)
        c0 = None if c0 is None else c0.to(dtype)

        separate = func is torch.gru  # its reset gate is between W_hh h + b_hh and the new state
        input_bias = b_ih
        hidden_bias = b_hh if separate else None
        if b_ih is not None and b_hh is not None and not separate:
            input_bias = b_ih + b_hh

        # In the layout of the input: a view would be copied by the product.
        batch_major = x.transpose(0, 1)
        if not x.is_contiguous() and batch_major.is_contiguous():
            gates = F.linear(batch_major, w_ih, input_bias)
            gates = gates.transpose(0, 1)
        else:
            gates = F.linear(x, w_ih, input_bias)

        # Both lists are filled below, when the scan has run.
        previous: list[Tensor] = []
        unprojected: list[Tensor] = []
        hidden = _Hidden.apply(w_hh, hidden_bias, previous, gates.shape)
        projected = None
        if w_hr is not None:
            steps, records, _ = x.shape
            shape = torch.Size((steps, records, len(w_hr)))
            projected = _Hidden.apply(w_hr, None, unprojected, shape)

        # The cell gets detached weights: their gradients are those of the stand-ins.
        cell = CELLS[func](
            weight=w_hh.detach(),
            bias=None if hidden_bias is None else hidden_bias.detach(),
            projection=None if w_hr is None else w_hr.detach(),
            reverse=suffix.endswith("_reverse"),
            mask=mask,
        )
        states: list[Tensor] = []
        result = _Scan.apply(
            cell,
            states,
            gates,
            hidden,
            projected,
            h0,
            c0,
        )
        previous.append(states[0])
        unprojected.extend(states[1:])

        inputs = [x.detach(), *states]
        self.note(
            outputs=(gates, hidden, projected),
            inputs=inputs,
            records=x.shape[1],
            gradients=lambda grads: _gradients(suffix, grads, inputs, separate, order),
        )
        return result


class CellInterception(Interception):
    """Computes one step of `torch.lstm_cell`, `gru_cell`, `rnn_tanh_cell` and `rnn_relu_cell`."""

    targets = (
        torch.lstm_cell,
        torch.gru_cell,
        torch.rnn_tanh_cell,
        torch.rnn_relu_cell,
    )

    def compute(self, func: TorchFunction, *args: Any, **kwargs: Any) -> Any:
        # Biases are optional arguments.
        x, state, w_ih, w_hh, b_ih, b_hh = (*args, None, None)[:6]
        h = state[0] if func is torch.lstm_cell else state
        from_input = F.linear(x, w_ih, b_ih)
        from_hidden = F.linear(h, w_hh, b_hh)
        # Of one time step.
        inputs = [
            x.detach()[None],
            h.detach()[None],
        ]

        def gradients(grads: Sequence[Tensor | None]) -> LayerGradients:
            one_step = [None if grad is None else grad[None] for grad in grads]
            return _gradients(
                "",
                one_step,
                inputs,
                separate=True,
                order=None,
            )

        self.note(
            outputs=[from_input, from_hidden],
            inputs=inputs,
            records=len(x),
            gradients=gradients,
        )
        if func is torch.lstm_cell:
            i, f, g, o = (from_input + from_hidden).chunk(4, 1)
            from_previous = f.sigmoid() * state[1]
            from_candidate = i.sigmoid() * g.tanh()
            c = from_previous + from_candidate
            return o.sigmoid() * c.tanh(), c
        if func is torch.gru_cell:
            r, z, n = from_input.chunk(3, 1)
            r_h, z_h, n_h = from_hidden.chunk(3, 1)
            reset = (r + r_h).sigmoid()
            new = (n + reset * n_h).tanh()
            update = (z + z_h).sigmoid()
            return torch.lerp(new, h, update)
        if func is torch.rnn_tanh_cell:
            return (from_input + from_hidden).tanh()
        return (from_input + from_hidden).relu()


def _gradients(
    suffix: str,
    grads: Sequence[Tensor | None],
    inputs: Sequence[Tensor],
    separate: bool,
    order: Tensor | None,
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
    sides = ("ih", "hh", "hr")
    side_of_hidden_bias = "hh" if separate else "ih"
    for side, grad, x in zip(sides, grads, inputs, strict=False):
        if grad is None:
            continue
        # Rules have the records in front.
        g = grad.transpose(0, 1)
        a = x.transpose(0, 1)
        a = a.to(grad.dtype)
        if order is not None:
            g = g[order]
            a = a[order]
        result[f"weight_{side}{suffix}"] = OuterProductGradients(g, a)
        bias = _time_sum(g)
        if side == "ih":
            result[f"bias_ih{suffix}"] = bias
        if side == side_of_hidden_bias:
            result[f"bias_hh{suffix}"] = bias
    return result


def _time_sum(g: Tensor) -> ParameterGradients:
    """Gradients of a bias: output gradients (R, T, out) added up over time."""
    return InstantiatedGradients(lambda: g.sum(1))
