"""Language models of transformers as networks of the harness: token numbers in, logits out, with adapters by peft.

Tokens are those of tables with `text=tokens` or a `tokenizer`: the tokenizer's numbers plus 1, and 0 for padding, which
stands behind a text.
"""

from __future__ import annotations

import inspect
import warnings
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from dpbench.errors import ConfigurationError, brief
from dpbench.options import PositiveInt

_PADDING_LOGIT = -1e4
"""Logit of padding, which no text contains."""
Checkpoint = Annotated[str | None, Field(min_length=1), "a folder of weights, the name of such, or null"]


class _Pretrained(nn.Module):
    """A network of transformers.

    Args:
        network: The network.
        checkpoint: Name in messages.
        num_tokens: Numbers that the tokenizer gives.
        lora_rank: Rank of adapters in its attention (Hu et al. 2021), which train together with a classifier's head,
            and nothing else does; None: all weights train.

    Raises:
        ConfigurationError: The network has another number of tokens, or peft finds no layer for an adapter.
    """

    def __init__(self, network: Any, checkpoint: str | None, num_tokens: int, lora_rank: int | None) -> None:
        super().__init__()
        known = network.get_input_embeddings().num_embeddings
        if known < num_tokens:
            raise ConfigurationError(
                f"model.checkpoint={checkpoint} knows {known} tokens and the tokenizer gives {num_tokens}: set "
                "data.options.tokenizer to the checkpoint's own."
            )
        if lora_rank is not None:
            network = _with_adapters(network, lora_rank)
        self.network = network
        self._has_adapters = lora_rank is not None
        self._positions: int | None = getattr(network.config, "max_position_embeddings", None)
        self._padding = max(0, getattr(network.config, "pad_token_id", None) or 0)

    def _ids(self, tokens: Tensor) -> Tensor:
        """The tokenizer's own numbers of tokens (N, T); for padding the network's, by which some find a text's end."""
        if self._positions is not None and tokens.shape[1] > self._positions:
            raise ConfigurationError(
                f"texts of {tokens.shape[1]} tokens are longer than the model's {self._positions} positions: lower "
                "data.options.sequence_length."
            )
        return torch.where(tokens == 0, self._padding, tokens - 1)

    def export_to(self, folder: Path) -> None:
        """Write the network into a folder as transformers reads it, its adapters alone as peft does."""
        name = "adapter" if self._has_adapters else "transformers"
        self.network.save_pretrained(folder / name)
        (folder / name / "README.md").unlink(missing_ok=True)  # peft's card knows no ε


def _with_adapters(network: Any, rank: int) -> Any:
    from peft import LoraConfig, TaskType, get_peft_model

    is_causal = type(network).__name__.endswith(("LMHeadModel", "ForCausalLM"))
    config = LoraConfig(
        task_type=TaskType.CAUSAL_LM if is_causal else TaskType.SEQ_CLS,
        r=rank,
        lora_alpha=rank,
        lora_dropout=0.0,
        # Of GPT-2, whose layers keep their weights turned.
        fan_in_fan_out=network.config.model_type == "gpt2",
    )
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*is_gradient_checkpointing", FutureWarning)  # peft 0.21, transformers 5
            return get_peft_model(network, config)
    except ValueError as error:
        raise ConfigurationError(f"model.lora_rank={rank}: {brief(error)}") from error


def _require_multiple(width: int, heads: int) -> None:
    if width % heads:
        raise ConfigurationError(f"model.width={width} is no multiple of model.heads={heads}.")


def _load(auto: Any, checkpoint: str, **options: Any) -> Any:
    try:
        return auto.from_pretrained(checkpoint, **options).train()
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"model.checkpoint={checkpoint} cannot be loaded ({brief(error)}): name a folder with its weights, or null "
            "for random ones."
        ) from error


class CausalLM(_Pretrained):
    """A causal language model: GPT-2 with random weights, or any checkpoint of `AutoModelForCausalLM`.

    Args:
        vocabulary_size: Numbers that tokens may have; 0 is padding.
        checkpoint: Folder or name of the weights, which must have been trained on public data.
        lora_rank: Rank of adapters, which alone are trained; None: all weights are.
        layers: Layers of a network with random weights, as are the following.
        heads: Heads of its attention.
        width: Width, a multiple of the heads.
        positions: Longest text, in tokens.

    Shape:
        Tokens (N, T), padded with 0 → logits (N, T, vocabulary_size).
    """

    def __init__(
        self,
        vocabulary_size: int,
        checkpoint: Checkpoint = None,
        lora_rank: PositiveInt | None = None,
        layers: PositiveInt = 4,
        heads: PositiveInt = 4,
        width: PositiveInt = 128,
        positions: PositiveInt = 1024,
    ) -> None:
        from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

        if checkpoint is None:
            _require_multiple(width, heads)
            config = GPT2Config(
                vocab_size=vocabulary_size - 1,
                n_positions=positions,
                n_embd=width,
                n_layer=layers,
                n_head=heads,
                resid_pdrop=0.0,
                embd_pdrop=0.0,
                attn_pdrop=0.0,
                bos_token_id=None,
                eos_token_id=None,
            )
            network = GPT2LMHeadModel(config)
        else:
            network = _load(AutoModelForCausalLM, checkpoint)
        network.config.use_cache = False
        takes_positions = "position_ids" in inspect.signature(network.forward).parameters
        super().__init__(network, checkpoint, vocabulary_size - 1, lora_rank)
        self._num_tokens = vocabulary_size - 1
        self._takes_positions = takes_positions

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (N, T, vocabulary_size): what stands behind a token does not change them, so padding needs no mask."""
        options = {}
        if self._takes_positions:  # with a row for each record, the engine has a rule for their embedding
            options["position_ids"] = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        logits = self.network(input_ids=self._ids(tokens), **options).logits[..., : self._num_tokens]
        return F.pad(logits, (1, 0), value=_PADDING_LOGIT)


class SequenceClassifier(_Pretrained):
    """A classifier of texts: BERT with random weights, or any checkpoint of `AutoModelForSequenceClassification`.

    Args:
        vocabulary_size: Numbers that tokens may have; 0 is padding.
        num_classes: Number of classes.
        checkpoint: Folder or name of the weights, which must have been trained on public data; a head is added.
        lora_rank: Rank of adapters, which are trained with the head; None: all weights are.
        layers: Layers of a network with random weights, as are the following.
        heads: Heads of its attention.
        width: Width, a multiple of the heads.
        positions: Longest text, in tokens.

    Shape:
        Tokens (N, T), padded with 0 → logits (N, num_classes).
    """

    def __init__(
        self,
        vocabulary_size: int,
        num_classes: int,
        checkpoint: Checkpoint = None,
        lora_rank: PositiveInt | None = None,
        layers: PositiveInt = 2,
        heads: PositiveInt = 4,
        width: PositiveInt = 128,
        positions: PositiveInt = 512,
    ) -> None:
        from transformers import AutoModelForSequenceClassification, BertConfig, BertForSequenceClassification

        if checkpoint is None:
            _require_multiple(width, heads)
            config = BertConfig(
                vocab_size=vocabulary_size - 1,
                hidden_size=width,
                num_hidden_layers=layers,
                num_attention_heads=heads,
                intermediate_size=4 * width,
                max_position_embeddings=positions,
                hidden_dropout_prob=0.0,
                attention_probs_dropout_prob=0.0,
            )
            config.num_labels = num_classes
            network = BertForSequenceClassification(config)
        else:
            network = _load(AutoModelForSequenceClassification, checkpoint, num_labels=num_classes)
        super().__init__(network, checkpoint, vocabulary_size - 1, lora_rank)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (N, num_classes); padding is masked."""
        logits: Tensor = self.network(input_ids=self._ids(tokens), attention_mask=(tokens != 0).to(tokens.dtype)).logits
        return logits
