"""The next-word network of the federated Stack Overflow task."""

from __future__ import annotations

from torch import Tensor, nn

from dpbench.models.initialization import draw_as_published, is_published
from dpbench.models.recurrent import lstm_with_one_bias
from dpbench.models.shapes import check_sizes


class WordLSTM(nn.Module):
    """Embedding, an LSTM, a projection, a logit for each next word; 4,050,748 trained parameters at 10,004 words.

    | layer | output on 20 words |
    | --- | --- |
    | embedding; word 0 is padding | 20×96 |
    | LSTM | 20×670 |
    | fully connected | 20×96 |
    | fully connected | 20×vocabulary_size |

    Used for SO-NWP by adaptive_quantile_clipping_2021, after Reddi et al. 2021, "Adaptive federated optimization". The
    second bias of PyTorch's LSTM is zero and frozen.

    Args:
        vocabulary_size: Number of words, with padding and the like.
        embedding: Numbers for a word, and behind the projection.
        hidden: Numbers in the state.
        initialization: "published" (Keras', as in the task's program) or "torch".

    Raises:
        ValueError: A size is below 1, or there is no such initialization.

    Shape:
        Words (N, T), int64 → logits (N, T, vocabulary_size).
    """

    def __init__(
        self,
        vocabulary_size: int,
        embedding: int = 96,
        hidden: int = 670,
        initialization: str = "published",
    ) -> None:
        super().__init__()
        check_sizes(
            "word_lstm",
            vocabulary_size=vocabulary_size,
            embedding=embedding,
            hidden=hidden,
        )
        self.embedding = nn.Embedding(vocabulary_size, embedding, padding_idx=0)
        self.lstm = lstm_with_one_bias(embedding, hidden)
        self.projection = nn.Linear(hidden, embedding)
        self.output = nn.Linear(embedding, vocabulary_size)
        if is_published(initialization):
            draw_as_published(self)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the word after each one."""
        logits: Tensor = self.output(self.projection(self.lstm(self.embedding(tokens))[0]))
        return logits
