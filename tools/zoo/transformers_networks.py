"""Networks of transformers, by the step that they are trained for."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from tools.zoo.configurations import LENGTH, SIDE, small
from tools.zoo.network import RECORDS, Network, label, loss_of_output, tokens

Record = dict[str, Tensor]


def _classified() -> Record:
    return {"input_ids": tokens(LENGTH), "labels": label()}


def _masked() -> Record:
    """Of each text, three words are asked for."""
    words = tokens(LENGTH)
    labels = torch.full_like(words, -100)
    chosen = torch.randperm(LENGTH)[:3]
    labels[chosen] = words[chosen]
    return {"input_ids": words.index_fill(0, chosen, 4), "labels": labels}


def _tagged() -> Record:
    return {"input_ids": tokens(LENGTH), "labels": torch.randint(0, 4, (LENGTH,))}


def _answered() -> Record:
    start = torch.randint(0, LENGTH, ())
    return {"input_ids": tokens(LENGTH), "start_positions": start, "end_positions": start}


def _chosen() -> Record:
    return {"input_ids": tokens(3 * LENGTH).view(3, LENGTH), "labels": label(3)}


def _continued() -> Record:
    words = tokens(LENGTH)
    return {"input_ids": words, "labels": words}


def _translated() -> Record:
    return {"input_ids": tokens(LENGTH), "labels": tokens(7)}


def _boxed() -> Record:
    boxes = torch.randint(0, 500, (LENGTH, 4)).sort(-1).values
    return {**_tagged(), "bbox": boxes}


def _pictured(side: int = SIDE) -> Record:
    return {"pixel_values": torch.randn(3, side, side), "labels": label()}


def _filmed() -> Record:
    return {"pixel_values": torch.randn(4, 3, SIDE, SIDE), "labels": label()}


def _segmented(side: int = SIDE) -> Record:
    return {"pixel_values": torch.randn(3, side, side), "labels": torch.randint(0, 4, (side, side))}


def _measured(side: int = SIDE) -> Record:
    return {"pixel_values": torch.randn(3, side, side), "labels": torch.rand(side, side) + 0.5}


def _transcribed(samples: int = 1200) -> Record:
    return {"input_values": torch.randn(samples), "labels": torch.randint(1, 30, (3,))}


def _spoken(samples: int = 1200) -> Record:
    return {"input_values": torch.randn(samples), "labels": label()}


def _forecast() -> Record:
    return {
        "past_values": torch.randn(15),
        "past_time_features": torch.randn(15, 1),
        "past_observed_mask": torch.ones(15),
        "future_values": torch.randn(6),
        "future_time_features": torch.randn(6, 1),
    }


_OF_64_PIXELS = (
    "MobileViTForImageClassification",
    "LevitForImageClassification",
    "PvtForImageClassification",
    "HieraForImageClassification",
    "CvtForImageClassification",
)
_RANDOM = ("ViTMAEForPreTraining", "InformerForPrediction")
"""Their steps draw masks of patches, or keys that queries are compared with."""

RECORDS_OF: dict[str, Callable[[], Record]] = {
    "classification": _classified,
    "masked language modelling": _masked,
    "token classification": _tagged,
    "question answering": _answered,
    "multiple choice": _chosen,
    "causal language modelling": _continued,
    "with a loss that balances the experts": _continued,
    "sequence to sequence": _translated,
    "classification of pictures": _pictured,
    "CTC": _transcribed,
}
"""Of networks of text; others have their own."""

_OF_WAVES = (
    "Wav2Vec2ForCTC",
    "UniSpeechForCTC",
    "Data2VecAudioForCTC",
    "HubertForSequenceClassification",
    "WavLMForSequenceClassification",
)
_AUDIO = {
    "conv_dim": [16, 16],
    "conv_kernel": [10, 3],
    "conv_stride": [10, 4],
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "mask_time_prob": 0.0,
    "mask_feature_prob": 0.0,
    "vocab_size": 32,
    "ctc_loss_reduction": "mean",
}
_FORECAST: dict[str, Any] = {
    "prediction_length": 6,
    "context_length": 12,
    "lags_sequence": [1, 2, 3],
    "num_time_features": 1,
}

OPTIONS: dict[str, dict[str, Any]] = {
    "ReformerForSequenceClassification": {
        "axial_pos_embds_dim": [8, 8],
        "axial_pos_shape": [2, 5],
        "attn_layers": ["local", "lsh"],
        "lsh_attn_chunk_length": 5,
        "local_attn_chunk_length": 5,
        "num_hashes": 1,
        "num_buckets": 2,
        "feed_forward_size": 32,
        "attention_head_size": 8,
        "hash_seed": 0,
    },
    "CanineForSequenceClassification": {"num_hash_functions": 2, "num_hash_buckets": 32, "local_transformer_stride": 8},
    "FunnelForSequenceClassification": {"block_sizes": [1, 1], "d_head": 8, "d_inner": 32},
    "LongformerForSequenceClassification": {"attention_window": 4},
    "BigBirdForSequenceClassification": {"attention_type": "original_full", "sep_token_id": 3},
    "XLNetForSequenceClassification": {"d_inner": 32},
    "ModernBertForMaskedLM": {"cls_token_id": 3, "sep_token_id": 4},
    "PerceiverForMaskedLM": {
        "num_latents": 4,
        "d_latents": 16,
        "num_self_attends_per_block": 1,
        "num_blocks": 1,
        "num_self_attention_heads": 2,
        "num_cross_attention_heads": 2,
        "qk_channels": 16,
        "v_channels": 16,
        "max_position_embeddings": LENGTH,
    },
    "BertForQuestionAnswering": {"num_labels": 2},
    "EsmForMaskedLM": {"mask_token_id": 4},
    "NystromformerForMaskedLM": {"segment_means_seq_len": LENGTH, "num_landmarks": 5},
    # Pictures.
    "BeitForImageClassification": {"vocab_size": 10},
    "SwinForImageClassification": {"embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2], "window_size": 2},
    "Swinv2ForImageClassification": {"embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2], "window_size": 2},
    "ConvNextForImageClassification": {"depths": [1, 1], "hidden_sizes": [8, 16], "num_stages": 2, "patch_size": 4},
    "PoolFormerForImageClassification": {
        "depths": [1, 1],
        "hidden_sizes": [8, 16],
        "num_encoder_blocks": 2,
        "patch_sizes": [4, 2],
        "strides": [4, 2],
        "padding": [0, 0],
    },
    "ResNetForImageClassification": {"depths": [1, 1], "hidden_sizes": [8, 16], "embedding_size": 8},
    "MobileViTForImageClassification": {
        "hidden_sizes": [16, 16, 16],
        "neck_hidden_sizes": [8, 8, 16, 16, 16, 16, 32],
        "patch_size": 2,
        "image_size": 64,
    },
    "LevitForImageClassification": {
        "hidden_sizes": [16, 16],
        "num_attention_heads": [2, 2],
        "depths": [1, 1],
        "key_dim": [8, 8],
        "attention_ratio": [2, 2],
        "mlp_ratio": [2, 2],
        "patch_size": 16,
        "image_size": 64,
        "down_ops": [["Subsample", 8, 2, 4, 2, 2], [""]],
    },
    "CvtForImageClassification": {"embed_dim": [8, 16, 16], "num_heads": [1, 2, 2], "depth": [1, 2, 3]},
    "PvtForImageClassification": {
        "image_size": 64,
        "hidden_sizes": [8, 16, 16, 16],
        "depths": [1, 1, 1, 1],
        "num_attention_heads": [1, 2, 2, 2],
        "mlp_ratios": [2, 2, 2, 2],
    },
    "FocalNetForImageClassification": {
        "embed_dim": 16,
        "depths": [1, 1],
        "focal_levels": [1, 1],
        "focal_windows": [3, 3],
        "hidden_sizes": [16, 32],
        "patch_size": 4,
    },
    "BitForImageClassification": {"depths": [1, 1], "hidden_sizes": [32, 64], "embedding_size": 32, "num_groups": 8},
    "HieraForImageClassification": {
        "image_size": [64, 64],
        "embed_dim": 8,
        "depths": [1, 1, 1],
        "num_heads": [1, 2, 2],
        "query_stride": [2, 2],
        "masked_unit_size": [4, 4],
        "num_query_pool": 1,
    },
    "VideoMAEForVideoClassification": {"num_frames": 4, "use_mean_pooling": True},
    "ViTMAEForPreTraining": {
        "decoder_hidden_size": 16,
        "decoder_num_hidden_layers": 1,
        "decoder_num_attention_heads": 2,
        "decoder_intermediate_size": 32,
        "norm_pix_loss": False,
    },
    "SegformerForSemanticSegmentation": {
        "depths": [1, 1, 1, 1],
        "hidden_sizes": [8, 8, 16, 16],
        "num_attention_heads": [1, 1, 2, 2],
        "decoder_hidden_size": 16,
        "mlp_ratios": [2, 2, 2, 2],
    },
    "DPTForDepthEstimation": {
        "num_hidden_layers": 4,
        "backbone_out_indices": [0, 1, 2, 3],
        "neck_hidden_sizes": [8, 8, 8, 8],
        "fusion_hidden_size": 8,
        "is_hybrid": False,
    },
    "GLPNForDepthEstimation": {
        "depths": [1, 1, 1, 1],
        "hidden_sizes": [8, 8, 16, 16],
        "num_attention_heads": [1, 1, 2, 2],
        "decoder_hidden_size": 16,
        "mlp_ratios": [2, 2, 2, 2],
    },
    # Detection.
    "YolosForObjectDetection": {"num_detection_tokens": 5, "image_size": [32, 32]},
    "LayoutLMv3ForTokenClassification": {"input_size": 32, "coordinate_size": 2, "shape_size": 4},
    # Speech.
    **dict.fromkeys(_OF_WAVES, _AUDIO),
    "Wav2Vec2ConformerForCTC": {**_AUDIO, "position_embeddings_type": "relative", "max_source_positions": 200},
    "Wav2Vec2BertForCTC": {
        "ctc_loss_reduction": "mean",
        "vocab_size": 32,
        "mask_time_prob": 0.0,
        "feature_projection_input_dim": 16,
    },
    "SEWForCTC": {**_AUDIO, "squeeze_factor": 2},
    "ASTForAudioClassification": {
        "max_length": 32,
        "num_mel_bins": 16,
        "patch_size": 8,
        "frequency_stride": 8,
        "time_stride": 8,
    },
    "WhisperForConditionalGeneration": {
        "max_source_positions": 20,
        "max_target_positions": 20,
        "num_mel_bins": 8,
        "suppress_tokens": None,
        "begin_suppress_tokens": None,
    },
    "Speech2TextForConditionalGeneration": {
        "max_source_positions": 20,
        "max_target_positions": 20,
        "input_feat_per_channel": 8,
        "conv_channels": 16,
    },
    "MoonshineForConditionalGeneration": {},
    # Series.
    "PatchTSTForPrediction": {
        "num_input_channels": 2,
        "context_length": 24,
        "patch_length": 6,
        "patch_stride": 6,
        "prediction_length": 6,
        "loss": "mse",
    },
    "PatchTSMixerForPrediction": {
        "num_input_channels": 2,
        "context_length": 24,
        "patch_length": 6,
        "patch_stride": 6,
        "prediction_length": 6,
    },
    "InformerForPrediction": _FORECAST,
    "AutoformerForPrediction": {**_FORECAST, "label_length": 6, "moving_average": 3},
    "TimeSeriesTransformerForPrediction": _FORECAST,
    # Decoders.
    "GPTNeoForCausalLM": {"attention_types": [[["global", "local"], 1]], "window_size": 4, "hidden_size": 16},
    "GPTJForCausalLM": {"rotary_dim": 4},
    "OPTForCausalLM": {"word_embed_proj_dim": 16},
    "Gemma3ForCausalLM": {"sliding_window": 4},
    # Experts.
    "Qwen2MoeForCausalLM": {"decoder_sparse_step": 1},
    "Qwen3MoeForCausalLM": {"decoder_sparse_step": 1},
    "DeepseekV3ForCausalLM": {
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 4,
        "head_dim": 4,
        "qk_nope_head_dim": 4,
        "v_head_dim": 8,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "num_key_value_heads": 2,
    },
    "JetMoeForCausalLM": {"kv_channels": 8},
    "GptOssForCausalLM": {"sliding_window": 4},
    "DbrxForCausalLM": {
        "attn_config": {"kv_n_heads": 1, "clip_qkv": 8, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "SwitchTransformersForConditionalGeneration": {
        "num_sparse_encoder_layers": 1,
        "num_sparse_decoder_layers": 1,
        "router_jitter_noise": 0.0,
    },
    "PhimoeForCausalLM": {"router_jitter_noise": 0.0, "input_jitter_noise": 0.0},
    # State spaces.
    "MambaForCausalLM": {"state_size": 4, "time_step_rank": 2},
    "Mamba2ForCausalLM": {"state_size": 4, "num_heads": 4, "head_dim": 8, "n_groups": 1, "chunk_size": 4},
    "FalconMambaForCausalLM": {"state_size": 4, "time_step_rank": 2},
    "JambaForCausalLM": {
        "mamba_d_state": 4,
        "mamba_dt_rank": 2,
        "use_mamba_kernels": False,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
    },
    "BambaForCausalLM": {
        "mamba_d_state": 4,
        "mamba_n_heads": 4,
        "mamba_d_head": 8,
        "mamba_chunk_size": 4,
        "attn_layer_indices": [1],
    },
    "RwkvForCausalLM": {"attention_hidden_size": 16, "context_length": 64},
    "Zamba2ForCausalLM": {
        "mamba_d_state": 4,
        "mamba_headdim": 8,
        "mamba_ngroups": 1,
        "n_mamba_heads": 4,
        "chunk_size": 4,
        "num_mem_blocks": 1,
        "attention_hidden_size": 32,
        "attention_head_dim": 16,
        "layers_block_type": ["mamba", "hybrid"],
        "num_hidden_layers": 2,
        "use_mem_rope": False,
    },
    "FalconH1ForCausalLM": {
        "mamba_d_ssm": 32,
        "mamba_d_state": 4,
        "mamba_n_heads": 4,
        "mamba_d_head": 8,
        "mamba_chunk_size": 4,
    },
    "Qwen3NextForCausalLM": {
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "layer_types": ["linear_attention", "full_attention"],
    },
    # From sequence to sequence.
    "LEDForConditionalGeneration": {"attention_window": 4},
    "LongT5ForConditionalGeneration": {"local_radius": 3},
    "ProphetNetForConditionalGeneration": {"hidden_size": 16},
}
"""What a network needs beside the usual small numbers."""


def _boxes_and_labels() -> Record:
    """An object or two: each record has as many as it has."""
    count = 1 + int(torch.randint(0, 2, ()))
    labels = {"class_labels": torch.randint(0, 4, (count,)), "boxes": torch.rand(count, 4) * 0.3 + 0.3}
    return {"pixel_values": torch.randn(3, SIDE, SIDE), "labels": labels}  # type: ignore[dict-item]


def _masks_and_labels() -> Record:
    """Masks of an object or two."""
    count = 1 + int(torch.randint(0, 2, ()))
    return {
        "pixel_values": torch.randn(3, SIDE, SIDE),
        "mask_labels": torch.randint(0, 2, (count, SIDE, SIDE)).double(),
        "class_labels": torch.randint(0, 4, (count,)),
    }


def _listed(records: list[Record]) -> dict[str, Any]:
    """A batch whose pictures are a tensor, and whose labels are a list, as processors of transformers make it."""
    batch: dict[str, Any] = {key: [record[key] for record in records] for key in records[0]}
    batch["pixel_values"] = torch.stack(batch["pixel_values"])
    return batch


def _asked() -> Record:
    answer = torch.nn.functional.one_hot(label(), 4).double()
    return {"input_ids": tokens(LENGTH), "pixel_values": torch.randn(3, SIDE, SIDE), "labels": answer}


def _captioned() -> Record:
    return {**_continued(), "pixel_values": torch.randn(3, SIDE, SIDE)}


def _described() -> Record:
    return {"pixel_values": torch.randn(3, SIDE, SIDE), "labels": tokens(7)}


def _with_picture_in_text() -> Record:
    """The word 3 stands for a patch of the picture: 16 of them."""
    words = torch.cat([torch.full((16,), 3), tokens(LENGTH)])
    return {"input_ids": words, "labels": words, "pixel_values": torch.randn(3, SIDE, SIDE)}


def _laid_out() -> Record:
    return {**_boxed(), "pixel_values": torch.randn(3, SIDE, SIDE)}


def _of_pairs() -> Record:
    return {"input_ids": tokens(LENGTH), "pixel_values": torch.randn(3, SIDE, SIDE)}


def _heard(frames: int, features: int, name: str = "input_features") -> Record:
    return {name: torch.randn(frames, features), "labels": torch.randint(5, 30, (5,))}


def _measured_series() -> Record:
    return {"past_values": torch.randn(24, 2), "future_values": torch.randn(6, 2)}


RECORD: dict[str, Callable[[], Record]] = {
    "LayoutLMForTokenClassification": _boxed,
    "BlipForConditionalGeneration": _captioned,
    "GitForCausalLM": _captioned,
    "VisionEncoderDecoderModel": _described,
    "LlavaForConditionalGeneration": _with_picture_in_text,
    "ViltForQuestionAnswering": _asked,
    "LayoutLMv3ForTokenClassification": _laid_out,
    "CLIPModel": _of_pairs,
    "VideoMAEForVideoClassification": _filmed,
    "ViTMAEForPreTraining": lambda: {"pixel_values": torch.randn(3, SIDE, SIDE)},
    "SegformerForSemanticSegmentation": _segmented,
    "UperNetForSemanticSegmentation": partial(_segmented, 128),
    "DPTForDepthEstimation": lambda: {"pixel_values": torch.randn(3, SIDE, SIDE), "labels": torch.rand(64, 64)},
    "GLPNForDepthEstimation": _measured,
    "DetrForObjectDetection": _boxes_and_labels,
    "YolosForObjectDetection": _boxes_and_labels,
    "MaskFormerForInstanceSegmentation": _masks_and_labels,
    "HubertForSequenceClassification": _spoken,
    "WavLMForSequenceClassification": _spoken,
    "ASTForAudioClassification": lambda: {"input_values": torch.randn(32, 16), "labels": label()},
    "Wav2Vec2BertForCTC": lambda: _heard(20, 16),
    "WhisperForConditionalGeneration": lambda: {"input_features": torch.randn(8, 40), "labels": tokens(5)},
    "Speech2TextForConditionalGeneration": lambda: _heard(40, 8),
    "MoonshineForConditionalGeneration": lambda: {"input_values": torch.randn(1500), "labels": tokens(5)},
    "PatchTSTForPrediction": _measured_series,
    "PatchTSMixerForPrediction": _measured_series,
    **{f"{name}ForPrediction": _forecast for name in ("Informer", "Autoformer", "TimeSeriesTransformer")},
    **{name: partial(_pictured, 64) for name in _OF_64_PIXELS},
}
"""Records of networks that take others than those of their step."""
_LISTS = ("DetrForObjectDetection", "YolosForObjectDetection", "MaskFormerForInstanceSegmentation")


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


def build(name: str, step: str, keep_dropout: bool = False) -> Network:
    """A network of transformers with its records.

    Args:
        name: Of its class.
        step: What it is trained for.
        keep_dropout: Whether rates of dropout and the like stay as they are.
    """
    kind: Any = getattr(transformers, name)
    options = dict(OPTIONS.get(name, {}))
    if "balances" in step:
        options["output_router_logits"] = True
    config = _composed(name, keep_dropout) or small(kind.config_class, keep_dropout, **options)
    config._attn_implementation = "eager"
    model: nn.Module = kind(config)
    if "ForImageClassification" in name:
        step = "classification of pictures"
    record = RECORD.get(name) or RECORDS_OF[step]
    records = [record() for _ in range(RECORDS)]
    network = Network(model, records, loss_of_output, keep_dropout=keep_dropout)
    if name in _LISTS:
        network.collate = _listed
    if name == "CLIPModel":
        network.step = lambda net, batch: net(**batch, return_loss=True).loss
    if name == "DPTForDepthEstimation":
        network.step = _depth  # it has no loss of its own
    network.is_random = name in _RANDOM
    return network
