"""What options are called here that have other names in Opacus, TensorFlow Privacy or the papers."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_NAMES_HERE = {
    "target_delta": "delta",
    "epsilon": "target_epsilon",
    "eps": "target_epsilon",
    "target_eps": "target_epsilon",
    "sigma": "noise_multiplier",
    "noise": "noise_multiplier",
    "noise_scale": "noise_multiplier",
    "l2_norm_clip": "max_grad_norm",
    "clip_norm": "max_grad_norm",
    "clipping_norm": "max_grad_norm",
    "clipping_threshold": "max_grad_norm",
    "max_per_sample_grad_norm": "max_grad_norm",
    "num_microbatches": "microbatch_size",
    "max_batch_size": "max_physical_batch_size",
    "grad_sample_mode": "gradients",
    "random_seed": "seed",
    "batch_size": "expected_batch_size",
    "learning_rate": "lr",
}
_ELSEWHERE = {
    **dict.fromkeys(
        ("epochs", "max_epochs", "steps", "max_steps", "num_steps"),
        "The Trainer says how long: max_steps or max_epochs (on the command line trainer.max_steps).",
    ),
    **dict.fromkeys(
        ("poisson_sampling", "sample_rate", "batch_size", "expected_batch_size"),
        "The loader draws the lots: LotLoader.poisson(dataset, expected_batch_size=...) (on the command line "
        "data.expected_batch_size).",
    ),
    **dict.fromkeys(
        ("secure_mode", "secure_rng", "noise_generator"),
        "Noise comes from the operating system's entropy where no seed is given (on the command line "
        "strategy.secure=true).",
    ),
}


def suggestion(name: str, known: Iterable[str], prefix: str = "") -> str:
    """A sentence on what a name that is unknown here may stand for; empty where nobody knows.

    Args:
        name: That was given.
        known: Names of the options that there are.
        prefix: Of these, in the sentence.
    """
    options = list(known)
    here = _NAMES_HERE.get(name)
    if here in options:
        return f"Did you mean {prefix}{here}?"
    if name in _ELSEWHERE:
        return _ELSEWHERE[name]
    close = difflib.get_close_matches(name, options, 1)
    return f"Did you mean {prefix}{close[0]}?" if close else ""
