"""Texts that a language model writes, at the end of a run."""

from __future__ import annotations

from pathlib import Path

import pytorch_lightning as pl
import torch

from dpbench.capabilities.own_data.texts import BYTES, Tokenizer
from dpbench.files import write_atomically
from dpbench.modules.next_token import continued
from dpbench.options import PositiveInt

FILE = "samples.txt"
_SEED = 0


class TextSamples(pl.Callback):
    """Writes samples.txt into the run's folder after the test: continuations of a prompt by the last weights.

    They are a function of released weights and cost no privacy; the prompt must not come from the private texts.

    Args:
        prompt: Beginning of each text.
        tokenizer: Tokenizer of the data (`data.options.tokenizer`); None: bytes.
        number: Number of texts.
        length: Tokens of each, with the prompt.
    """

    def __init__(
        self,
        prompt: str = "The ",
        tokenizer: str | None = None,
        number: PositiveInt = 5,
        length: PositiveInt = 120,
    ) -> None:
        self._prompt = prompt
        self._tokenizer = Tokenizer(tokenizer or BYTES)
        self._number = number
        self._length = length

    def on_test_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Draw the texts, token by token."""
        tokens = torch.from_numpy(self._tokenizer.rows([self._prompt] * self._number, self._length)).long()
        start = len(self._tokenizer.encoded(self._prompt)) - 1  # without the end
        tokens[:, start:] = 0
        generator = torch.Generator().manual_seed(_SEED)
        drawn = continued(pl_module, tokens, range(start, self._length), generator)
        texts = [self._tokenizer.text(row) for row in drawn.tolist()]
        if trainer.is_global_zero:
            write_atomically(Path(trainer.default_root_dir) / FILE, "\n---\n".join(texts) + "\n")
