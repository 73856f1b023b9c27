"""Losses of language models and classifiers that are means over records, as clipping each record needs them.

A mean over all labels of a batch, which Hugging Face's models return, would let the length of one record change the
weight of the others.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def per_record(logits: Tensor, labels: Tensor, ignore_index: int = -100) -> Tensor:
    """Mean cross-entropy of each record's labels, for classification, masked and sequence-to-sequence models.

    Args:
        logits: Logits (R, C), or (R, T, V) with a label for each position.
        labels: Labels (R,) or (R, T), int64.
        ignore_index: Label that does not count.

    Returns:
        Losses (R,); zero, with zero gradients, for a record without a label that counts.
    """
    each = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=ignore_index, reduction="none")
    if labels.dim() == 1:
        return each
    return each.view(labels.shape).sum(1) / (labels != ignore_index).sum(1).clamp(min=1)


def next_token(logits: Tensor, labels: Tensor, ignore_index: int = -100) -> Tensor:
    """Mean cross-entropy of each text's labels by a causal language model: each position predicts the next label.

    Args:
        logits: Logits (R, T, V).
        labels: Labels (R, T), int64: the tokens themselves, as Hugging Face's collators make them.
        ignore_index: Label that does not count, such as that of padding.

    Returns:
        Losses (R,); zero, with zero gradients, for a text without a label after its first token.
    """
    return per_record(logits, F.pad(labels, (0, 1), value=ignore_index)[:, 1:], ignore_index)
