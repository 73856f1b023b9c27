"""The next-character network of the federated Shakespeare task."""

from __future__ import annotations

from torch import Tensor, nn

from dpbench.models.initialization import draw_as_published, is_published
from dpbench.models.recurrent import lstm_with_one_bias
from dpbench.models.shapes import check_sizes

_MOST_LAYERS = 100


class CharLSTM(nn.Module):
    """Embedding, two LSTM layers, a logit for each next character; 820,522 trained parameters at 90 characters.

    | layer | output on 80 characters |
    | --- | --- |
    | embedding; character 0 is padding | 80×8 |
    | LSTM | 80×256 |
    | LSTM | 80×256 |
    | fully connected | 80×vocabulary_size |

    Used for SHAKESPEARE by adaptive_quantile_clipping_2021, after McMahan et al. 2017, "Communication-efficient
    learning of deep networks from decentralized data". The second bias of PyTorch's LSTMs is zero and frozen.

    Args:
        vocabulary_size: Number of characters, with padding and the like.
        embedding: Numbers for a character.
        hidden: Numbers in the state of a layer.
        layers: LSTM layers, at most 100.
        initialization: "published" (Keras', as in the task's program) or "torch".

    Raises:
        ValueError: A size is below 1, there are too many layers, or there is no such initialization.

    Shape:
        Characters (N, T), int64 → logits (N, T, vocabulary_size).
    """

    def __init__(
        self,
        vocabulary_size: int,
        embedding: int = 8,
        hidden: int = 256,
        layers: int = 2,
        initialization: str = "published",
    ) -> None:
        super().__init__()
        check_sizes(
            "char_lstm",
            vocabulary_size=vocabulary_size,
            embedding=embedding,
            hidden=hidden,
            layers=layers,
        )
        if layers > _MOST_LAYERS:
            raise ValueError(f"char_lstm needs at most {_MOST_LAYERS} layers, not {layers}.")
        self.embedding = nn.Embedding(vocabulary_size, embedding, padding_idx=0)
        self.lstm = lstm_with_one_bias(embedding, hidden, layers)
        self.output = nn.Linear(hidden, vocabulary_size)
        if is_published(initialization):
            draw_as_published(self)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the character after each one."""
        logits: Tensor = self.output(self.lstm(self.embedding(tokens))[0])
        return logits
