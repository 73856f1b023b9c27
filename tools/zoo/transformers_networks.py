"""Networks of transformers, by the step that they are trained for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
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
            record[name] = _tensor(kind, [int(word) for word in words])
    return record


def _tensor(kind: str, numbers: list[int]) -> Tensor:
    match kind:
        case "words":
            return torch.randint(5, 60, numbers)
        case "picture_words":  # the word 3 stands for a patch of the picture: 16 of them
            return torch.cat([torch.full((16,), 3), torch.randint(5, 60, numbers)])
        case "letters":
            return torch.randint(1, 30, numbers)
        case "int":
            return torch.randint(0, numbers[0], numbers[1:])
        case "one_hot":
            return nn.functional.one_hot(torch.randint(0, numbers[0], ()), numbers[0]).double()
        case "boxes":
            return torch.randint(0, 500, (*numbers, 4)).sort(-1).values
        case "normal":
            return torch.randn(numbers)
        case "uniform":
            return torch.rand(numbers)
        case "depth":
            return torch.rand(numbers) + 0.5
        case "ones":
            return torch.ones(numbers)
    raise ValueError(f"zoo.yaml: there is no kind of field {kind!r}")


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


def _composed(name: str, keep_dropout: bool) -> Any:
    """Configurations of networks that are made of others; None: it is not one of them."""
    t: Any = transformers

    def part(kind: Any, **options: Any) -> Any:
        return small(kind, keep_dropout, **options)

    if name == "EncoderDecoderModel":
        config = t.EncoderDecoderConfig.from_encoder_decoder_configs(part(t.BertConfig), part(t.BertConfig))
    elif name == "VisionEncoderDecoderModel":
        config = t.VisionEncoderDecoderConfig.from_encoder_decoder_configs(part(t.ViTConfig), part(t.GPT2Config))
    elif name == "LlavaForConditionalGeneration":
        config = t.LlavaConfig(
            vision_config=part(t.CLIPVisionConfig),
            text_config=part(t.LlamaConfig),
            image_token_id=3,
            vision_feature_layer=-1,
        )
    elif name in ("CLIPModel", "CLIPForImageClassification"):
        config = t.CLIPConfig(
            text_config=part(t.CLIPTextConfig).to_dict(),
            vision_config=part(t.CLIPVisionConfig).to_dict(),
            projection_dim=16,
        )
    elif name == "SiglipForImageClassification":
        config = t.SiglipConfig(
            text_config=part(t.SiglipTextConfig).to_dict(), vision_config=part(t.SiglipVisionConfig).to_dict()
        )
    elif name == "BlipForConditionalGeneration":
        config = t.BlipConfig(
            text_config=part(t.BlipTextConfig, encoder_hidden_size=16).to_dict(),
            vision_config=part(t.BlipVisionConfig).to_dict(),
        )
    elif name == "GitForCausalLM":
        config = part(t.GitConfig, vision_config=part(t.GitVisionConfig).to_dict())
    elif name in ("DetrForObjectDetection", "MaskFormerForInstanceSegmentation", "UperNetForSemanticSegmentation"):
        backbone = t.ResNetConfig(
            embedding_size=8,
            hidden_sizes=[8, 8, 16, 16],
            depths=[1, 1, 1, 1],
            out_features=["stage1", "stage2", "stage3", "stage4"],
        )
        return _with_backbone(name, backbone, part)
    else:
        return None
    config.num_labels = 4
    config.pad_token_id = 0
    config.decoder_start_token_id = 1
    return config


def _with_backbone(name: str, backbone: Any, part: Callable[..., Any]) -> Any:
    t: Any = transformers
    if name == "DetrForObjectDetection":
        return part(t.DetrConfig, backbone_config=backbone, num_queries=5, use_timm_backbone=False, backbone=None)
    if name == "UperNetForSemanticSegmentation":
        return part(
            t.UperNetConfig,
            backbone_config=backbone,
            pool_scales=[2, 4],
            use_auxiliary_head=False,
            hidden_size=64,
            backbone=None,
        )
    decoder = part(t.DetrConfig, backbone_config=backbone, num_queries=5, use_timm_backbone=False, backbone=None)
    swin = t.SwinConfig(
        image_size=32,
        patch_size=2,
        embed_dim=8,
        depths=[1, 1, 1, 1],
        num_heads=[1, 1, 2, 2],
        window_size=2,
        drop_path_rate=0.0,
        out_features=["stage1", "stage2", "stage3", "stage4"],
    )
    return t.MaskFormerConfig(
        backbone_config=swin, decoder_config=decoder, fpn_feature_size=32, mask_feature_size=32, num_labels=4
    )


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
    config = _composed(name, keep_dropout) or small(kind.config_class, keep_dropout, **options)
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
