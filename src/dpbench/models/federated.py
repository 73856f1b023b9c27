"""Networks of the federated tasks of Reddi et al. 2021, "Adaptive federated optimization": images, texts, tags.

adaptive_quantile_clipping_2021 trains them. `initialization="published"` draws weights as the tasks' program does.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Annotated

from pydantic import Field
from torch import Tensor, nn

from dpbench.models.initialization import draw_as_published, is_published
from dpbench.models.shapes import Size, require

Widths = Annotated[list[Size] | tuple[Size, ...], Field(min_length=1), "widths of at least 1, such as [1000, 30]"]
Layers = Annotated[int, Field(ge=1, le=100), "a whole number from 1 to 100"]


class EMNISTCNN(nn.Sequential):
    """Two convolutions, two fully connected layers, dropout; 1,206,590 parameters at 62 classes, 1,199,882 at 10.

    | layer | output on 1×28×28 |
    | --- | --- |
    | conv 3×3, 32 channels, ReLU | 32×26×26 |
    | conv 3×3, 64 channels, ReLU | 64×24×24 |
    | max-pool 2×2, dropout 0.25 | 64×12×12 |
    | fully connected, ReLU, dropout 0.5 | 128 |
    | fully connected | num_classes |

    Used for EMNIST-CR.

    Args:
        input_shape: (channels, height, width) of an image; at least 6×6.
        num_classes: Number of classes.
        initialization: "published" (Glorot normal) or "torch".

    Raises:
        ValueError: The images are too small, or there is no such initialization.

    Shape:
        (N, channels, height, width) → (N, num_classes).
    """

    def __init__(
        self,
        input_shape: tuple[int, int, int],
        num_classes: int,
        initialization: str = "published",
    ) -> None:
        channels, height, width = input_shape
        require(min(height, width) >= 6, "emnist_cnn", input_shape, "images of at least 6×6 pixels")
        super().__init__(
            nn.Conv2d(channels, 32, 3),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Dropout(0.25),
            nn.Flatten(),
            nn.Linear(64 * ((height - 4) // 2) * ((width - 4) // 2), 128),
            nn.ReLU(),
            nn.Dropout(0.5),
            nn.Linear(128, num_classes),
        )
        if is_published(initialization):
            draw_as_published(self)


class Autoencoder(nn.Sequential):
    """784-1000-500-250-30-250-500-1000-784, sigmoid but for the linear code in the middle; 2,837,314 parameters.

    Used for EMNIST-AE.

    Args:
        input_shape: (channels, height, width) of an image.
        hidden: Widths from the first layer to the code; behind the code they come in reverse.
        initialization: "published" (Glorot normal) or "torch".

    Raises:
        ValueError: There is no such initialization.

    Shape:
        (N, channels, height, width) → pixels in (0, 1), (N, channels · height · width).
    """

    def __init__(
        self,
        input_shape: tuple[int, int, int],
        hidden: Widths = (1000, 500, 250, 30),
        initialization: str = "published",
    ) -> None:
        pixels = math.prod(input_shape)
        widths = [pixels, *hidden, *reversed(hidden[:-1]), pixels]
        layers: list[nn.Module] = [nn.Flatten()]
        for number, (n_in, n_out) in enumerate(pairwise(widths), 1):
            layers.append(nn.Linear(n_in, n_out))
            if number != len(hidden):  # the code
                layers.append(nn.Sigmoid())
        super().__init__(*layers)
        if is_published(initialization):
            draw_as_published(self)


class CharLSTM(nn.Module):
    """Embedding, two LSTM layers, a logit for each next character; 820,522 trained parameters at 90 characters.

    | layer | output on 80 characters |
    | --- | --- |
    | embedding; character 0 is padding | 80×8 |
    | LSTM | 80×256 |
    | LSTM | 80×256 |
    | fully connected | 80×vocabulary_size |

    Used for SHAKESPEARE, after McMahan et al. 2017, "Communication-efficient learning of deep networks from
    decentralized data". The second bias of PyTorch's LSTMs is zero and frozen.

    Args:
        vocabulary_size: Number of characters, with padding and the like.
        embedding: Numbers for a character.
        hidden: Numbers in the state of a layer.
        layers: LSTM layers, at most 100.
        initialization: "published" (Keras', as in the task's program) or "torch".

    Raises:
        ValueError: There is no such initialization.

    Shape:
        Characters (N, T), int64 → logits (N, T, vocabulary_size).
    """

    def __init__(
        self,
        vocabulary_size: int,
        embedding: Size = 8,
        hidden: Size = 256,
        layers: Layers = 2,
        initialization: str = "published",
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary_size, embedding, padding_idx=0)
        self.lstm = lstm_with_one_bias(embedding, hidden, layers)
        self.output = nn.Linear(hidden, vocabulary_size)
        if is_published(initialization):
            draw_as_published(self)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the character after each one."""
        states, _ = self.lstm(self.embedding(tokens))
        logits: Tensor = self.output(states)
        return logits


class WordLSTM(nn.Module):
    """Embedding, an LSTM, a projection, a logit for each next word; 4,050,748 trained parameters at 10,004 words.

    | layer | output on 20 words |
    | --- | --- |
    | embedding; word 0 is padding | 20×96 |
    | LSTM | 20×670 |
    | fully connected | 20×96 |
    | fully connected | 20×vocabulary_size |

    Used for SO-NWP. The second bias of PyTorch's LSTM is zero and frozen.

    Args:
        vocabulary_size: Number of words, with padding and the like.
        embedding: Numbers for a word, and behind the projection.
        hidden: Numbers in the state.
        initialization: "published" (Keras', as in the task's program) or "torch".

    Raises:
        ValueError: There is no such initialization.

    Shape:
        Words (N, T), int64 → logits (N, T, vocabulary_size).
    """

    def __init__(
        self,
        vocabulary_size: int,
        embedding: Size = 96,
        hidden: Size = 670,
        initialization: str = "published",
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary_size, embedding, padding_idx=0)
        self.lstm = lstm_with_one_bias(embedding, hidden)
        self.projection = nn.Linear(hidden, embedding)
        self.output = nn.Linear(embedding, vocabulary_size)
        if is_published(initialization):
            draw_as_published(self)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the word after each one."""
        states, _ = self.lstm(self.embedding(tokens))
        logits: Tensor = self.output(self.projection(states))
        return logits


def lstm_with_one_bias(
    input_size: int,
    hidden_size: int,
    num_layers: int = 1,
) -> nn.LSTM:
    """Make an LSTM, batch first, with a second bias that is zero and frozen.

    PyTorch adds two biases in every gate, W_ih x + b_ih + W_hh h + b_hh, where the definition has one. Per-record
    gradients of the two are equal: if both are trained, they count twice in the norm that is clipped, and noise falls
    twice on a single parameter.

    Args:
        input_size: Numbers in an element of a sequence.
        hidden_size: Numbers in the state.
        num_layers: Layers, one on top of the other.
    """
    lstm = nn.LSTM(input_size, hidden_size, num_layers, batch_first=True)
    for name, parameter in lstm.named_parameters():
        if name.startswith("bias_hh"):
            nn.init.zeros_(parameter).requires_grad_(False)
    return lstm


class TagRegression(nn.Linear):
    """A logit for each tag, linear in the words of a text; 5,000,500 parameters from 10,000 words to 500 tags.

    Used for SO-LR.

    Args:
        num_features: Numbers that describe a text, such as the share of each word.
        num_tags: Number of tags.
        initialization: "published" (Glorot normal) or "torch".

    Raises:
        ValueError: There is no such initialization.

    Shape:
        (N, num_features) → logits (N, num_tags).
    """

    def __init__(
        self,
        num_features: int,
        num_tags: int,
        initialization: str = "published",
    ) -> None:
        super().__init__(num_features, num_tags)
        if is_published(initialization):
            draw_as_published(self)
