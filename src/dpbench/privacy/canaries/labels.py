"""Canaries by their labels: images of noise, whose random labels nothing but a training on them can tell."""

from __future__ import annotations

from dataclasses import dataclass

from dpbench.privacy.canaries.scores import Floats


@dataclass(frozen=True, eq=False)
class LabelScores:
    """What the final weights of a training on noise tell of labels.

    Attributes:
        members: (n,) for each training record by how much the logit of its label exceeds those of all others together.
        others: (k,) the same for noise that nobody trained on.
        recalled: Share of the training records whose label has the largest logit.
        guessed: The same of the others: chance.
        left_out: How many more records were trained on, such as copies of inserted ones, which are no canaries.
    """

    members: Floats
    others: Floats
    recalled: float
    guessed: float
    left_out: int = 0
