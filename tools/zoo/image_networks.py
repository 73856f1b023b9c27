"""Networks of torchvision and timm, on tiny pictures."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tools.zoo.architectures import ZOO
from tools.zoo.network import CLASSES, Network, cross_entropy, label

_PICTURES = 4
"""Records: fewer than elsewhere, since networks of pictures cannot all be made small."""


def _pairs(side: int) -> list[tuple[Tensor, Tensor]]:
    return [(torch.randn(3, side, side), label()) for _ in range(_PICTURES)]


def build_torchvision(name: str, step: str, keep_dropout: bool = False) -> Network:
    """A network of torchvision."""
    import torchvision

    if step == "detection":
        return _detector(name)
    if step == "segmentation":
        model = _fcn() if name == "fcn_resnet50" else _segmenter(name)
        records = [(torch.randn(3, 32, 32), torch.randint(0, CLASSES, (32, 32))) for _ in range(_PICTURES)]
        return Network(model, records, _segmentation)
    if step == "optical flow":
        return _flow(name)
    if name == "r3d_18":
        video = torchvision.models.video.resnet
        model = video.VideoResNet(
            video.BasicBlock, [video.Conv3DSimple] * 4, [1, 1, 1, 1], video.BasicStem, num_classes=CLASSES
        )
        records = [(torch.randn(3, 4, 16, 16), label()) for _ in range(_PICTURES)]
        return Network(model, records, cross_entropy)
    if name == "mvit_v1_b":
        return _mvit()
    model = _convolutional(name) or _windowed(name, 0.2 if keep_dropout else 0.0)
    return Network(model, _pairs(ZOO["sides"].get(name, 32)), cross_entropy, keep_dropout=keep_dropout)


def _convolutional(name: str) -> nn.Module | None:
    """A network that is small by its arguments; None: it is not one of them."""
    from torchvision import models

    model: nn.Module
    if name == "resnet18":
        model = models.ResNet(models.resnet.BasicBlock, [1, 1, 1, 1], num_classes=CLASSES)
    elif name == "resnext50_32x4d":
        model = models.ResNet(models.resnet.Bottleneck, [1, 1, 1, 1], num_classes=CLASSES, groups=32, width_per_group=4)
    elif name == "densenet121":
        model = models.DenseNet(8, (1, 1, 1, 1), 16, num_classes=CLASSES)
    elif name == "vgg11":
        model = models.VGG(models.vgg.make_layers([16, "M", 32, "M", 32, "M"]), CLASSES, init_weights=False)
        model.classifier = nn.Sequential(nn.Linear(32 * 49, 32), nn.ReLU(), nn.Dropout(), nn.Linear(32, CLASSES))
    elif name == "alexnet":
        model = models.AlexNet(CLASSES)
        model.classifier = nn.Sequential(nn.Dropout(), nn.Linear(256 * 36, 16), nn.ReLU(), nn.Linear(16, CLASSES))
    elif name == "googlenet":
        model = models.GoogLeNet(CLASSES, aux_logits=False, init_weights=False)
    else:
        return None
    return model


def _windowed(name: str, stochastic_depth: float) -> nn.Module:
    """A transformer or a ConvNeXt of two stages; or a network as it is."""
    from torchvision import models

    stages: dict[str, Any] = {
        "patch_size": [4, 4],
        "embed_dim": 16,
        "depths": [2, 2],
        "num_heads": [2, 4],
        "window_size": [4, 4],
        "stochastic_depth_prob": stochastic_depth,
        "num_classes": CLASSES,
    }
    model: nn.Module
    if name == "vit_b_16":
        model = models.VisionTransformer(32, 8, 2, 2, 16, 32, num_classes=CLASSES)
    elif name == "swin_t":
        model = models.SwinTransformer(**stages)
    elif name == "swin_v2_t":
        swin = models.swin_transformer
        model = models.SwinTransformer(
            **stages, block=swin.SwinTransformerBlockV2, downsample_layer=swin.PatchMergingV2
        )
    elif name == "maxvit_t":
        model = models.MaxVit((64, 64), 16, 4, [16, 32], [1, 1], 8, 0.0, num_classes=CLASSES)
    elif name == "convnext_tiny":
        blocks = [models.convnext.CNBlockConfig(16, 32, 1), models.convnext.CNBlockConfig(32, None, 1)]
        model = models.ConvNeXt(blocks, stochastic_depth, num_classes=CLASSES)
    else:
        model = models.get_model(name, weights=None, num_classes=CLASSES)
    return model


def _mvit() -> Network:
    from torchvision.models.video.mvit import MSBlockConfig, MViT

    setting = [
        MSBlockConfig(1, 16, 16, [3, 3, 3], [1, 2, 2], [1, 1, 1], [1, 2, 2]),
        MSBlockConfig(2, 16, 32, [3, 3, 3], [1, 1, 1], [1, 2, 2], [1, 1, 1]),
    ]
    model = MViT(
        (32, 32),
        4,
        setting,
        residual_pool=False,
        residual_with_cls_embed=False,
        rel_pos_embed=False,
        proj_after_attn=False,
        num_classes=CLASSES,
    )
    records = [(torch.randn(3, 4, 32, 32), label()) for _ in range(_PICTURES)]
    return Network(model, records, cross_entropy)


def _segmenter(name: str) -> nn.Module:
    import torchvision

    model: nn.Module = torchvision.models.get_model(name, weights=None, weights_backbone=None, num_classes=CLASSES)
    return model


def _fcn() -> nn.Module:
    from torchvision.models import ResNet
    from torchvision.models._utils import IntermediateLayerGetter
    from torchvision.models.resnet import Bottleneck
    from torchvision.models.segmentation.fcn import FCN, FCNHead

    backbone = ResNet(Bottleneck, [1, 1, 1, 1], replace_stride_with_dilation=[False, True, True])
    model: nn.Module = FCN(IntermediateLayerGetter(backbone, {"layer3": "out"}), FCNHead(1024, CLASSES))
    return model


def _segmentation(net: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    return F.cross_entropy(net(x)["out"], y)


def _flow(name: str) -> Network:
    import torchvision

    model = torchvision.models.get_model(name, weights=None)
    records = [(torch.randn(3, 128, 128), torch.randn(3, 128, 128), torch.randn(2, 128, 128)) for _ in range(_PICTURES)]

    def step(net: nn.Module, batch: Any) -> Tensor:
        one, other, flow = batch
        return torch.stack([(flow - guess).abs().mean() for guess in net(one, other, num_flow_updates=2)]).mean()

    return Network(model, records, step)


def _detector(name: str) -> Network:
    import torchvision

    sizes = {} if name.startswith("ssdlite") else {"min_size": 64, "max_size": 64}
    model = torchvision.models.get_model(name, weights=None, weights_backbone=None, num_classes=CLASSES, **sizes)
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


def build_timm(name: str) -> Network:
    """A network of timm."""
    import timm

    options = ZOO["options"].get(name, {})
    model = _by_hand(name)
    if model is None:
        model = timm.create_model(name, pretrained=False, num_classes=CLASSES, **options)
    side = 256 if name == "halonet26t" else options.get("img_size", 64)
    return Network(model, _pairs(side), cross_entropy)


def _by_hand(name: str) -> nn.Module | None:
    """Networks of timm that are small by other means than options of their functions; None: it is not one of them."""
    model: nn.Module
    if name == "convmixer_768_32":
        from timm.models.convmixer import ConvMixer

        model = ConvMixer(16, 2, kernel_size=3, patch_size=4, num_classes=CLASSES)
    elif name == "nfnet_f0":
        from timm.models.nfnet import NormFreeNet, model_cfgs

        small = replace(
            model_cfgs["nfnet_f0"], depths=(1, 1, 1, 1), channels=(16, 32, 32, 32), group_size=8, num_features=32
        )
        model = NormFreeNet(small, num_classes=CLASSES)
    elif name == "resnetv2_50x1_bit":
        from timm.layers import StdConv2d
        from timm.models.resnetv2 import ResNetV2

        model = ResNetV2(
            [1, 1, 1, 1],
            channels=(128, 128, 128, 128),
            num_classes=CLASSES,
            stem_type="fixed",
            conv_layer=partial(StdConv2d, eps=1e-8),
        )
    else:
        return None
    return model
