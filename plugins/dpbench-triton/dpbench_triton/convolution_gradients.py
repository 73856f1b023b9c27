"""Per-record gradients of convolutions by the kernels in Triton."""

from __future__ import annotations

from functools import cached_property

from torch import Tensor

from dpbench.privacy.gradients import tf32
from dpbench.privacy.gradients._convolution import ConvolutionGradients, _record_of, weight_gradient
from dpbench_triton import kernels


class TritonConvolutionGradients(ConvolutionGradients):
    """Weight of a 2-d convolution, zero-padded, by the kernels in Triton.

    Gradients are stored where they are no larger than what they are computed of, and summed as they are. Others never
    exist: their norms come from the tiles of a pass that keeps none, and their weighted sum is one ordinary weight
    gradient, of output gradients that were multiplied by the weights.
    """

    _layout = None  # as the parameter's

    @staticmethod
    def _each_alone(inputs: Tensor) -> tuple[Tensor, Tensor]:
        return kernels.each_alone(len(inputs), inputs.device)

    def _is_stored(self) -> bool:
        """By shapes only: another way rounds otherwise, and a resumed run repeats the interrupted one to the bit."""
        if self._threshold is not None:
            return True  # signs have no other sum
        rows_of_record = len(self._inputs) / max(len(self._members[1]) - 1, 1)
        numbers = self._inputs[0].numel() + self._outputs[0].numel()
        return self._layer.weight.numel() <= rows_of_record * numbers

    def _convolve(self, stored: bool) -> kernels.Convolved:
        layer = self._layer
        geometry = kernels.Geometry(
            _pair(layer.kernel_size),
            _pair(layer.stride),
            self._padding,
            _pair(layer.dilation),
            layer.groups,
        )
        return kernels.convolution(
            geometry,
            self._inputs,
            self._outputs,
            self._members,
            self._factor,
            self._threshold,
            stored,
        )

    @cached_property
    def _convolved(self) -> kernels.Convolved:
        return self._convolve(self._is_stored())

    @cached_property
    def _stored(self) -> Tensor:
        weights = self._convolved.weights
        if weights is None:
            weights = self._convolve(stored=True).weights
            assert weights is not None
        return weights

    def squared_norms(self) -> Tensor:
        return self._convolved.squared_norms

    def weighted_sum(self, weights: Tensor) -> Tensor:
        if self._threshold is not None:
            return kernels.weighted_signs(self._stored, weights)
        if self._is_stored():
            rows = self._stored
            return (weights.to(rows.dtype) @ rows.flatten(1)).view(rows.shape[1:])
        a = self._inputs.float()
        g = self._outputs.float()
        if not self._is_each_alone:
            order, starts = self._members
            a = a[order]
            g = g[order]
            weights = weights[_record_of(order, starts)]
        weights = self._factor * weights.to(g.dtype)
        g = g * weights[:, None, None, None]
        weight = g.new_empty(()).expand_as(self._layer.weight)
        # In TF32 the sum would not be the one whose norm was bounded.
        with tf32.refused(a.device.type):
            return weight_gradient(self._layer, a, g, weight, self._padding, records=1)


def _pair(numbers: tuple[int, ...]) -> tuple[int, int]:
    vertical, horizontal = numbers
    return vertical, horizontal
