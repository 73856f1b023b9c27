"""Discretized DP-SGD with error correction (gradient_compression_denoising_2020)."""

from __future__ import annotations

from dpbench.strategies.dpsgd import DPSGD


class DiscretizedDPSGD(DPSGD):
    r"""Discretize each record's gradient to {−1, 0, +1}, clip, sum, add noise, correct errors.

    A coordinate becomes +1 above τ, −1 below −τ, else 0; the discretized vector is clipped at C, summed and noised as
    in `DPSGD`; each coordinate of the noisy result then becomes −ν, 0 or +ν, whichever hypothesis about the sum is
    the most probable (`privacy.mechanism.denoising.ErrorCorrection`). Algorithms 1 to 3 of the paper.

    Guarantee: that of `DPSGD`. Discretization happens before clipping, the correction is post-processing.

    Args:
        discretization_threshold: τ ≥ 0; None: no discretization.
        discretization_values: Values of coordinates beyond τ: "signs" (the paper's ±1), ± the "threshold",
            "rescaled" signs or "kept" values.
        correction_threshold: ν > 0; None: no correction.
        correction_hypotheses: Likelihood of the error correction.
        correction_scale: Quantity that ν is compared with: the noisy "sum" (Algorithm 1 to the letter) or "mean".
        correction_estimate: The most probable of −ν, 0, +ν (the "mode"), or their posterior "mean".
    """

    discretization_threshold: float | None = 0.001
    correction_threshold: float | None = 0.01
