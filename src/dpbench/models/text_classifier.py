"""A text's class from the mean of its words."""

from __future__ import annotations

from torch import Tensor, nn

from dpbench.models.shapes import Size


class TextClassifier(nn.Module):
    """Mean of the words' embeddings, one hidden layer (as fastText, Joulin et al. 2016, with a layer more).

    Args:
        vocabulary_size: Numbers that tokens may have; 0 is padding.
        num_classes: Number of classes.
        embedding: Numbers for each word.
        hidden: Width of the hidden layer.

    Shape:
        Tokens (N, T), padded with 0 → logits (N, num_classes).
    """

    def __init__(
        self,
        vocabulary_size: int,
        num_classes: int,
        embedding: Size = 16,
        hidden: Size = 32,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary_size, embedding, padding_idx=0)
        self.layers = nn.Sequential(
            nn.Linear(embedding, hidden),
            nn.Tanh(),  # bounded, so that gradients stay small and clipping costs less
            nn.Linear(hidden, num_classes),
        )

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (N, num_classes); of a text without words, those of zeros."""
        is_word = (tokens != 0).unsqueeze(2)
        words = (self.embedding(tokens) * is_word).sum(1)
        logits: Tensor = self.layers(words / is_word.sum(1).clamp(min=1))
        return logits
