"""The baseline without privacy."""

from __future__ import annotations

import pytorch_lightning as pl


class NonPrivate(pl.Callback):
    """Ordinary training: same data, model, loop and results as the private strategies, epsilon infinite."""

    default_sampling = "shuffled"
