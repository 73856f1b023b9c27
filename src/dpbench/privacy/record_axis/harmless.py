"""Functions within which a value that is read goes nowhere.

Each is a proof by hand, so that its reason is stated with it: either nothing of the value comes back, or both ways that
it decides between compute the same function of each record.
"""

from __future__ import annotations

import os
from types import FrameType
from typing import NamedTuple

from dpbench.privacy.record_axis.tags import HIDDEN


class Function(NamedTuple):
    """A function of a library.

    Attributes:
        file: End of the path of its source file; or a folder, with slashes around it.
        name: Its name.
        reason: Proof that the values that it reads go nowhere.
    """

    file: str
    name: str
    reason: str


_MASK = "a mask of ones is left out: attention with it and without it is the same"
_CHECK = "arguments are checked, and refused by an error"
_LOG = "a value that is only shown"
_METRIC = "values go into states, which are tagged, and come back tagged as mixed (`host`)"

FUNCTIONS = (
    Function("transformers/masking_utils.py", "_ignore_causal_mask_sdpa", _MASK),
    Function("transformers/masking_utils.py", "_ignore_bidirectional_mask_sdpa", _MASK),
    Function("transformers/modeling_attn_mask_utils.py", "_ignore_causal_mask_sdpa", _MASK),
    Function("transformers/modeling_attn_mask_utils.py", "_prepare_4d_attention_mask_for_sdpa", _MASK),
    Function("transformers/modeling_utils.py", "warn_if_padding_and_no_attention_mask", "a warning"),
    Function("torch/distributions/distribution.py", "__init__", _CHECK),
    Function("torch/distributions/distribution.py", "_validate_sample", _CHECK),
    Function("torch/nn/modules/transformer.py", "_detect_is_causal_mask", _MASK),
    Function("pytorch_lightning/core/module.py", "log", _LOG),
    Function("pytorch_lightning/core/module.py", "log_dict", _LOG),
    Function("lightning/pytorch/core/module.py", "log", _LOG),
    Function("lightning/pytorch/core/module.py", "log_dict", _LOG),
    Function("/torchmetrics/", "forward", _METRIC),
    Function("/torchmetrics/", "update", _METRIC),
)
_DEPTH = 16
_BY_NAME: dict[str, list[Function]] = {}
for _function in FUNCTIONS:
    _BY_NAME.setdefault(_function.name, []).append(_function)


def harmless_function(frame: FrameType | None) -> Function | None:
    """The listed function that runs in a frame or in one that called it, or None.

    Args:
        frame: The innermost frame.
    """
    is_of_metric = True  # and of no code that it calls
    for _ in range(_DEPTH):
        if frame is None:
            return None
        name = frame.f_code.co_filename
        file = name.replace(os.sep, "/")
        for function in _BY_NAME.get(frame.f_code.co_name, ()):
            is_in_file = file.endswith(function.file) or (function.file.endswith("/") and function.file in file)
            if is_in_file and (is_of_metric or function.reason != _METRIC):
                return function
        is_of_metric = is_of_metric and (name.startswith(HIDDEN) or "/torchmetrics/" in file)
        frame = frame.f_back
    return None
