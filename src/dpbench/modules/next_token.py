"""Prediction of the next character or word of a sequence."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.classification import MulticlassAccuracy
from torchmetrics.text import Perplexity

from dpbench.errors import DataError
from dpbench.losses import per_record
from dpbench.modules.supervised import OptimizerMaker, ScheduleMaker, Supervised


class NextToken(Supervised):
    """Cross-entropy training of a network on sequences that are padded behind; knows nothing of privacy.

    A sequence's loss is the mean over those of its targets that are no padding (zero without any), and a batch's loss
    the mean over its sequences.

    Args:
        model: Tokens (N, T) → logits (N, T, vocabulary_size).
        optimizer: Called with the parameters, such as `functools.partial(torch.optim.SGD, lr=0.1)`.
        vocabulary_size: Number of tokens, with padding and the like; ids go from 0 to one less.
        padding: Id of the targets that do not count.
        ignored: Ids of targets that count in the loss, but not in the accuracy, such as those of unknown words and of
            the end of a sentence.
        monitored: Name of the data that the validation loop sees, "val" or "test" (the papers' learning curves).
        schedule: Called with the optimizer; it moves after every step. None: a constant learning rate.

    Raises:
        ValueError: `padding` or `ignored` are no tokens of the vocabulary.
    """

    objective = "val/accuracy"
    masks_padding = True

    def __init__(
        self,
        model: nn.Module,
        optimizer: OptimizerMaker,
        vocabulary_size: int,
        padding: int = 0,
        ignored: list[int] | tuple[int, ...] = (),
        monitored: str = "val",
        schedule: ScheduleMaker | None = None,
    ) -> None:
        for name, ids in (("padding", [padding]), ("ignored", ignored)):
            if strange := [token for token in ids if not 0 <= token < vocabulary_size]:
                raise ValueError(f"module.{name} must lie between 0 and {vocabulary_size - 1}, not {strange[0]}.")
        super().__init__(model, optimizer, self._new_metric(vocabulary_size, padding), monitored, schedule)
        self._size = vocabulary_size
        self._padding = padding
        self.register_buffer(
            "_uncounted",
            torch.tensor(sorted({padding, *ignored})),
            persistent=False,
        )
        self.record_metrics = {"accuracy": 1, "loss": 1}

    def _new_metric(self, vocabulary_size: int, padding: int) -> Metric:
        return MulticlassAccuracy(vocabulary_size, average="micro", ignore_index=padding)

    def training_step(
        self,
        batch: tuple[Tensor, Tensor],
        batch_idx: int,
    ) -> dict[str, Any]:
        """Mean over sequences of the mean cross-entropy of their targets; the budget does not cover the logged value.

        Args:
            batch: Tokens (N, T) and targets (N, T), int64.
            batch_idx: Unused.
        """
        targets = batch[1]
        logits = self._logits(batch)
        losses = per_record(logits, targets, self._padding)
        return self._result(
            losses,
            {
                "accuracy": lambda: _mean_of_counted(
                    (logits.argmax(2) == targets).to(losses.dtype), self._counted(targets)
                )
            },
        )

    def losses(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Mean cross-entropy of each sequence's targets, (N,), in double precision."""
        return per_record(self._logits(batch).double(), batch[1], self._padding)

    def measure(self, metric: Metric, batch: tuple[Tensor, Tensor]) -> None:
        """Count targets that are predicted correctly, of all sequences together."""
        targets = batch[1].where(self._counted(batch[1]), self._padding)
        metric(self._logits(batch).argmax(2), targets)

    def _counted(self, targets: Tensor) -> Tensor:
        """Mask of the targets that count in the accuracy, (N, T)."""
        uncounted: Any = self._uncounted
        return torch.isin(targets, uncounted, invert=True)

    def _logits(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Logits (N, T, V).

        Raises:
            DataError: Tokens and targets differ in shape, or the model has logits for another vocabulary.
        """
        tokens, targets = batch
        if tokens.shape != targets.shape or tokens.dim() != 2:
            raise DataError(
                f"tokens are {_by(tokens)} and targets {_by(targets)}: both must be (sequences, length), with the next "
                "token as the target."
            )
        logits: Tensor = self(tokens)
        if logits.shape != (*tokens.shape, self._size):
            raise DataError(
                f"the model returns {_by(logits)} for tokens {_by(tokens)}, not logits (sequences, length, "
                f"{self._size}): use model=char_lstm or word_lstm, say."
            )
        return logits


class LanguageModel(NextToken):
    """`NextToken`, measured by its perplexity: exp of the mean cross-entropy over all tokens that are no padding."""

    objective = "val/perplexity"
    masks_padding = True

    def _new_metric(self, vocabulary_size: int, padding: int) -> Metric:
        return Perplexity(ignore_index=padding)

    def measure(self, metric: Metric, batch: tuple[Tensor, Tensor]) -> None:
        """Bring the perplexity up to date with a batch."""
        metric(self._logits(batch), batch[1])


def _mean_of_counted(values: Tensor, counted: Tensor) -> Tensor:
    """Mean of the counted values of each row (N, T) → (N,), zero where none counts."""
    return (values * counted).sum(1) / counted.sum(1).clamp(min=1)


def _by(tensor: Tensor) -> str:
    return f"({', '.join(map(str, tensor.shape))})"


@torch.no_grad()
def continued(
    module: pl.LightningModule,
    tokens: Tensor,
    places: Iterable[int],
    generator: torch.Generator | None = None,
) -> Tensor:
    """Continue texts by a language model, token by token.

    Args:
        module: Tokens (N, T) → logits (N, T, V).
        tokens: Texts (N, T), int64, on the CPU.
        places: Positions to fill in, in increasing order, from 1 on; tokens at others stay.
        generator: Generator of the draws; None takes the most likely tokens.

    Returns:
        (N, T).
    """
    tokens = tokens.clone()
    for place in places:
        # Of a model that diverged logits are no numbers.
        logits = module(tokens[:, :place].to(module.device))[:, -1].float().nan_to_num().cpu()
        if generator is None:
            tokens[:, place] = logits.argmax(1)
        else:
            tokens[:, place] = torch.multinomial(logits.softmax(1), 1, generator=generator)[:, 0]
    return tokens
