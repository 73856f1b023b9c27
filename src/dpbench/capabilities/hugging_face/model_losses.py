"""The loss of each record for models of Hugging Face, chosen by their class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from dpbench.callback.loop import Loss
from dpbench.errors import ConfigurationError
from dpbench.losses import next_token, per_record

_CAUSAL = ("ForCausalLM", "GPT2LMHeadModel", "OpenAIGPTLMHeadModel", "CTRLLMHeadModel", "BertLMHeadModel")
"""Ends of names of models whose labels are shifted by one."""
_ALIGNED = ("ForMaskedLM", "ForTokenClassification", "ForMultipleChoice")
"""Ends of names of models with logits for each label."""
_CLASSIFIERS = ("ForSequenceClassification", "ForImageClassification")
"""Ends of names of models with classes, or, by their configuration, with other targets."""


def loss_of(model: nn.Module) -> Loss:
    """Find the loss of a model by the name of its class.

    Args:
        model: A model of Hugging Face, perhaps within one of peft.

    Raises:
        ConfigurationError: Its labels may mean something else than classes.
    """
    name = type(base_model(model)).__name__
    config = getattr(model, "config", None)
    is_translator = name.endswith("ForConditionalGeneration") and getattr(config, "is_encoder_decoder", False)
    has_classes = getattr(config, "num_labels", 0) > 1
    has_classes &= getattr(config, "problem_type", None) in (None, "single_label_classification")
    if name.endswith(_CAUSAL):
        return causal
    if name.endswith(_ALIGNED) or (name.endswith(_CLASSIFIERS) and has_classes):
        return aligned
    if is_translator:
        return translation
    raise ConfigurationError(
        f"the loss of each record of {name} is unknown: pass loss=, a function of the model and a batch that returns "
        "the mean of its records' losses (dpbench.losses has those of labels that are classes)."
    )


def is_causal(model: nn.Module) -> bool:
    """Return whether a model predicts the next token of a text."""
    return type(base_model(model)).__name__.endswith(_CAUSAL)


def base_model(model: nn.Module) -> nn.Module:
    """The model that peft has wrapped, or the model itself."""
    unwrapped: nn.Module = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    return unwrapped


def causal(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    """Mean over texts of the mean loss of their tokens."""
    return next_token(_logits(model, batch), batch["labels"]).mean()


def aligned(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    """Mean over records of the mean loss of their labels."""
    return per_record(_logits(model, batch), batch["labels"]).mean()


def translation(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    """As `aligned`; the decoder's inputs are made of the labels, unless the batch has them."""
    labels = _labels(batch)
    return per_record(model(**batch, return_dict=True).logits, labels).mean()


def _logits(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    """Logits, without the model's own loss, which is a mean over labels of all records."""
    _labels(batch)
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    logits: Tensor = model(**inputs, return_dict=True).logits
    return logits


def _labels(batch: Mapping[str, Any]) -> Tensor:
    if "labels" not in batch:
        raise ConfigurationError(
            "the batches have no labels: let the data_collator make them (DataCollatorForLanguageModeling(tokenizer, "
            "mlm=False), say), or pass loss=."
        )
    labels: Tensor = batch["labels"]
    return labels
