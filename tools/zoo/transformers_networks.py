"""Networks of transformers, by the step that they are trained for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from hydra.utils import instantiate
from torch import Tensor, nn

from tools.zoo.architectures import ZOO
from tools.zoo.network import RECORDS, Network, loss_of_output

Record = dict[str, Any]
_LENGTH = 10
_SIDE = 32
_RANDOM = ("ViTMAEForPreTraining", "InformerForPrediction")
"""Their steps draw masks of patches, or keys that queries are compared with."""


def drawn(fields: dict[str, str]) -> Record:
    """Draw a record.

    Args:
        fields: Name → kind and numbers, such as "normal 3 32 32" or "int 4 10": ten numbers below 4.
    """
    record: Record = {}
    for name, text in fields.items():
        kind, *words = text.split()
        if kind == "same":
            record[name] = record[words[0]]
        else:
            record[name] = _KINDS[kind](*map(int, words))
    return record


_KINDS: dict[str, Callable[..., Tensor]] = {
    "words": lambda *shape: torch.randint(5, 60, shape),
    # The word 3 stands for a patch of the picture: 16 of them.
    "picture_words": lambda *shape: torch.cat([torch.full((16,), 3), torch.randint(5, 60, shape)]),
    "letters": lambda *shape: torch.randint(1, 30, shape),
    "int": lambda most, *shape: torch.randint(0, most, shape),
    "one_hot": lambda classes: nn.functional.one_hot(torch.randint(0, classes, ()), classes).double(),
    "boxes": lambda *shape: torch.randint(0, 500, (*shape, 4)).sort(-1).values,
    "normal": torch.randn,
    "uniform": torch.rand,
    "depth": lambda *shape: torch.rand(shape) + 0.5,
    "ones": torch.ones,
}


def _masked() -> Record:
    """Of each text, three words are asked for."""
    words = torch.randint(5, 60, (_LENGTH,))
    labels = torch.full_like(words, -100)
    chosen = torch.randperm(_LENGTH)[:3]
    labels[chosen] = words[chosen]
    return {"input_ids": words.index_fill(0, chosen, 4), "labels": labels}


def _boxes_and_labels() -> Record:
    """An object or two: each record has as many as it has."""
    count = 1 + int(torch.randint(0, 2, ()))
    labels = {"class_labels": torch.randint(0, 4, (count,)), "boxes": torch.rand(count, 4) * 0.3 + 0.3}
    return {"pixel_values": torch.randn(3, _SIDE, _SIDE), "labels": labels}


def _masks_and_labels() -> Record:
    """Masks of an object or two."""
    count = 1 + int(torch.randint(0, 2, ()))
    return {
        "pixel_values": torch.randn(3, _SIDE, _SIDE),
        "mask_labels": torch.randint(0, 2, (count, _SIDE, _SIDE)).double(),
        "class_labels": torch.randint(0, 4, (count,)),
    }


_SPECIAL: dict[str, Callable[[], Record]] = {
    "masked language modelling": _masked,
    "DetrForObjectDetection": _boxes_and_labels,
    "YolosForObjectDetection": _boxes_and_labels,
    "MaskFormerForInstanceSegmentation": _masks_and_labels,
}
"""Records whose fields hang on one another, by network or step; the others are in zoo.yaml."""


def _record(name: str, step: str) -> Record:
    for key in (name, step):
        if key in _SPECIAL:
            return _SPECIAL[key]()
        if key in ZOO["records"]:
            return drawn(ZOO["records"][key])
    raise KeyError(f"zoo.yaml has no records for {name}, {step}")


def _listed(records: list[Record]) -> dict[str, Any]:
    """A batch whose pictures are a tensor, and whose labels are a list, as processors of transformers make it."""
    batch: dict[str, Any] = {key: [record[key] for record in records] for key in records[0]}
    batch["pixel_values"] = torch.stack(batch["pixel_values"])
    return batch


def _depth(net: nn.Module, batch: Any) -> Tensor:
    return (net(batch["pixel_values"]).predicted_depth - batch["labels"]).abs().mean()


def part(kind: str, **options: Any) -> Any:
    """A small configuration of a class of transformers, for a network that is made of several."""
    return small(getattr(transformers, kind), **options)


def part_as_dict(kind: str, **options: Any) -> dict[str, Any]:
    """The same as a dictionary, which is what some configurations take."""
    options_of_part: dict[str, Any] = part(kind, **options).to_dict()
    return options_of_part


def _composed(name: str) -> Any:
    """The configuration of a network that is made of others."""
    config = instantiate(ZOO["composed"][name], _convert_="all")
    config.num_labels = 4
    config.pad_token_id = 0
    config.decoder_start_token_id = 1
    return config


def small(kind: Any, keep_dropout: bool = False, **options: Any) -> Any:
    """A small configuration.

    Args:
        kind: Class of the configuration.
        keep_dropout: Whether rates of dropout and the like stay as they are.
        **options: What this network needs beside, or instead of, the usual small numbers.
    """
    default = kind().to_dict()
    chosen = {}
    for name, value in default.items():
        if name in ZOO["sizes"] and not isinstance(value, list | dict):
            chosen[name] = ZOO["sizes"][name]
        elif "drop" in name and isinstance(value, float) and not keep_dropout:
            chosen[name] = 0.0
    config = kind(**{**chosen, "num_labels": 4, **options})
    config.use_cache = False
    if getattr(config, "decoder_start_token_id", 1) is None or config.is_encoder_decoder:
        config.decoder_start_token_id = 1
    return config


def build(name: str, step: str, keep_dropout: bool = False) -> Network:
    """A network of transformers with its records.

    Args:
        name: Of its class.
        step: What it is trained for.
        keep_dropout: Whether rates of dropout and the like stay as they are.
    """
    kind: Any = getattr(transformers, name)
    options = dict(ZOO["options"].get(name, {}))
    if "balances" in step:
        options["output_router_logits"] = True
    composed = name in ZOO["composed"]
    config = _composed(name) if composed else small(kind.config_class, keep_dropout, **options)
    config._attn_implementation = "eager"
    model: nn.Module = kind(config)
    if "ForImageClassification" in name:
        step = "classification of pictures"
    records = [_record(name, step) for _ in range(RECORDS)]
    network = Network(model, records, loss_of_output, keep_dropout=keep_dropout)
    if "Detection" in name or "Instance" in name:
        network.collate = _listed
    if name == "CLIPModel":
        network.step = lambda net, batch: net(**batch, return_loss=True).loss
    if name == "DPTForDepthEstimation":
        network.step = _depth  # it has no loss of its own
    network.is_random = name in _RANDOM
    return network
