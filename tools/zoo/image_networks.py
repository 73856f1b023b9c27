"""Networks of torchvision and timm, on tiny pictures."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from hydra.utils import instantiate
from torch import Tensor, nn

from tools.zoo.architectures import ZOO
from tools.zoo.network import CLASSES, Network, cross_entropy, label

_PICTURES = 4
"""Records: fewer than elsewhere, since networks of pictures cannot all be made small."""


def build_torchvision(name: str, step: str, keep_dropout: bool = False) -> Network:
    """A network of torchvision."""
    from torchvision.models import get_model

    match step:
        case "detection":
            return _detector(name)
        case "optical flow":
            return _flow(get_model(name, weights=None))
        case "segmentation":
            model = _small(name) or get_model(name, weights=None, weights_backbone=None, num_classes=CLASSES)
            records = [(torch.randn(3, 32, 32), torch.randint(0, CLASSES, (32, 32))) for _ in range(_PICTURES)]
            return Network(model, records, _segmentation)
    depth = {"stochastic_depth_prob": 0.2} if keep_dropout else {}
    model = _small(name, **depth) or get_model(name, weights=None, num_classes=CLASSES)
    return _classifier(model, ZOO["shapes"].get(name, [3, 32, 32]), keep_dropout)


def build_timm(name: str, *_: object) -> Network:
    """A network of timm."""
    import timm

    options = ZOO["options"].get(name, {})
    model = _small(name) or timm.create_model(name, pretrained=False, num_classes=CLASSES, **options)
    side = options.get("img_size", 64)
    return _classifier(model, ZOO["shapes"].get(name, [3, side, side]))


def _small(name: str, **options: Any) -> nn.Module | None:
    """A network that is small by its arguments, as the list says; None: it says nothing."""
    if name not in ZOO["built"]:
        return None
    entry = dict(ZOO["built"][name])
    head = entry.pop("head", None)
    model: nn.Module = instantiate({**entry, **options}, _convert_="all")
    if head is not None:
        model.classifier = instantiate(head)
    return model


def _classifier(model: nn.Module, shape: list[int], keep_dropout: bool = False) -> Network:
    records = [(torch.randn(*shape), label()) for _ in range(_PICTURES)]
    return Network(model, records, cross_entropy, keep_dropout=keep_dropout)


def _segmentation(net: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    return F.cross_entropy(net(x)["out"], y)


def _flow(model: nn.Module) -> Network:
    records = [(torch.randn(3, 128, 128), torch.randn(3, 128, 128), torch.randn(2, 128, 128)) for _ in range(_PICTURES)]

    def step(net: nn.Module, batch: Any) -> Tensor:
        one, other, flow = batch
        return torch.stack([(flow - guess).abs().mean() for guess in net(one, other, num_flow_updates=2)]).mean()

    return Network(model, records, step)


def _detector(name: str) -> Network:
    from torchvision.models import get_model

    sizes = {} if name.startswith("ssdlite") else {"min_size": 64, "max_size": 64}
    model = get_model(name, weights=None, weights_backbone=None, num_classes=CLASSES, **sizes)
    records = []
    for number in range(_PICTURES):
        count = 1 + number % 2
        corners = torch.rand(count, 2) * 24
        target = {
            "boxes": torch.cat([corners, corners + 24 + 8 * torch.rand(count, 2)], 1),
            "labels": torch.randint(1, CLASSES, (count,)),
        }
        if name.startswith("maskrcnn"):
            target["masks"] = torch.randint(0, 2, (count, 64, 64), dtype=torch.uint8)
        records.append((torch.rand(3, 64, 64), target))

    def step(net: nn.Module, batch: Any) -> Tensor:
        pictures, targets = batch
        return torch.stack(list(net(list(pictures), [dict(target) for target in targets]).values())).sum()

    # Regions with proposals draw which of them they learn from.
    return Network(model, records, step, collate=lists, is_random="rcnn" in name)


def lists(records: Any) -> Any:
    """A batch of detection: a list of pictures, and a list of what is on each."""
    pictures, targets = zip(*records, strict=True)
    return list(pictures), list(targets)
