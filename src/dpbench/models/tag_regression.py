"""Logistic regression of the federated Stack Overflow task."""

from __future__ import annotations

from torch import nn

from dpbench.models.initialization import draw_as_published, is_published
from dpbench.models.shapes import check_sizes


class TagRegression(nn.Linear):
    """A logit for each tag, linear in the words of a text; 5,000,500 parameters from 10,000 words to 500 tags.

    Used for SO-LR by adaptive_quantile_clipping_2021, after Reddi et al. 2021, "Adaptive federated optimization".

    Args:
        num_features: Numbers that describe a text, such as the share of each word.
        num_tags: Number of tags.
        initialization: "published" (Glorot normal) or "torch".

    Raises:
        ValueError: A size is below 1, or there is no such initialization.

    Shape:
        (N, num_features) → logits (N, num_tags).
    """

    def __init__(
        self,
        num_features: int,
        num_tags: int,
        initialization: str = "published",
    ) -> None:
        check_sizes("tag_regression", num_features=num_features, num_tags=num_tags)
        super().__init__(num_features, num_tags)
        if is_published(initialization):
            draw_as_published(self)
