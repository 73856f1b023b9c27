"""Transformer encoders of the usual sizes: ViT-S for images, BERT-base for texts; weights are drawn at random."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dpbench.models.shapes import Size, require


def _check_heads(name: str, width: int, heads: int) -> None:
    if width % heads:
        raise ValueError(f"the width of {name} must be divisible by its {heads} heads, not {width}.")


class VisionTransformer(nn.Module):
    """ViT (Dosovitskiy et al. 2021) by torchvision: ViT-S/16, 22,050,664 parameters at 3×224×224 and 1000 classes.

    Args:
        input_shape: (channels, side, side) of an image.
        num_classes: Number of classes.
        patch_size: Side of a patch, which divides that of the image.
        width: Numbers of an embedding.
        depth: Number of layers.
        heads: Number of heads of the attention.

    Raises:
        ValueError: Sizes do not divide one another.

    Shape:
        (N, channels, side, side) → (N, num_classes).
    """

    def __init__(
        self,
        input_shape: tuple[int, int, int],
        num_classes: int,
        patch_size: Size = 16,
        width: Size = 384,
        depth: Size = 12,
        heads: Size = 6,
    ) -> None:
        from torchvision.models import vision_transformer  # late: it takes a second

        super().__init__()
        _check_heads("vit", width, heads)
        channels, height, side = input_shape
        require(
            height == side and not side % patch_size,
            "vit",
            input_shape,
            f"square images whose side model.patch_size={patch_size} divides",
        )
        self.network = vision_transformer.VisionTransformer(
            image_size=side,
            patch_size=patch_size,
            num_layers=depth,
            num_heads=heads,
            hidden_dim=width,
            mlp_dim=4 * width,
            num_classes=num_classes,
        )
        if channels != 3:
            self.network.conv_proj = nn.Conv2d(channels, width, patch_size, patch_size)

    def forward(self, images: Tensor) -> Tensor:
        """Logits (N, num_classes)."""
        logits: Tensor = self.network(images)
        return logits


class TextEncoder(nn.Module):
    """Encoder as BERT's (Devlin et al. 2019), of BERT-base's size unless told otherwise; a class of each text.

    With 30,522 words and two classes 109,482,242 parameters: those of BERT-base, less the embeddings of two kinds of
    sentences, and the output. Padding (0) is a word as others are.

    Args:
        vocabulary_size: Numbers that tokens may have.
        num_classes: Number of classes.
        width: Numbers of an embedding.
        depth: Number of layers.
        heads: Number of attention heads.
        most_tokens: Largest number of tokens in a text.

    Raises:
        ValueError: The heads do not divide the width.

    Shape:
        Tokens (N, T) → logits (N, num_classes).
    """

    def __init__(
        self,
        vocabulary_size: int,
        num_classes: int,
        width: Size = 768,
        depth: Size = 12,
        heads: Size = 12,
        most_tokens: Size = 512,
    ) -> None:
        super().__init__()
        _check_heads("text_encoder", width, heads)
        self.words = nn.Embedding(vocabulary_size, width)
        self.places = nn.Embedding(most_tokens, width)
        self.norm = nn.LayerNorm(width, 1e-12)
        self.layers = nn.Sequential()
        for _ in range(depth):
            layer = nn.TransformerEncoderLayer(
                width,
                heads,
                4 * width,
                dropout=0.0,
                activation="gelu",
                layer_norm_eps=1e-12,
                batch_first=True,
            )
            self.layers.append(layer)
        self.pooler = nn.Linear(width, width)
        self.output = nn.Linear(width, num_classes)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (N, num_classes)."""
        places = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        embeddings = self.layers(self.norm(self.words(tokens) + self.places(places)))
        logits: Tensor = self.output(self.pooler(embeddings[:, 0]).tanh())
        return logits
