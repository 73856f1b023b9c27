"""Networks of transformers, by the step that they are trained for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from tools.zoo.configurations import LENGTH, SIDE, VOCABULARY, small
from tools.zoo.network import RECORDS, Network, label, loss_of_output, tokens

Record = dict[str, Tensor]


def classified() -> Record:
    return {"input_ids": tokens(LENGTH), "labels": label()}


def masked() -> Record:
    """Of each text, three words are asked for."""
    words = tokens(LENGTH)
    labels = torch.full_like(words, -100)
    chosen = torch.randperm(LENGTH)[:3]
    labels[chosen] = words[chosen]
    return {"input_ids": words.index_fill(0, chosen, 4), "labels": labels}


def tagged() -> Record:
    return {"input_ids": tokens(LENGTH), "labels": torch.randint(0, 4, (LENGTH,))}


def answered() -> Record:
    start = torch.randint(0, LENGTH, ())
    return {"input_ids": tokens(LENGTH), "start_positions": start, "end_positions": start}


def chosen() -> Record:
    return {"input_ids": tokens(3 * LENGTH).view(3, LENGTH), "labels": label(3)}


def continued() -> Record:
    words = tokens(LENGTH)
    return {"input_ids": words, "labels": words}


def translated() -> Record:
    return {"input_ids": tokens(LENGTH), "labels": tokens(7)}


def boxed() -> Record:
    boxes = torch.randint(0, 500, (LENGTH, 4)).sort(-1).values
    return {**tagged(), "bbox": boxes}


def pictured(side: int = SIDE) -> Record:
    return {"pixel_values": torch.randn(3, side, side), "labels": label()}


def filmed() -> Record:
    return {"pixel_values": torch.randn(4, 3, SIDE, SIDE), "labels": label()}


def segmented(side: int = SIDE) -> Record:
    return {"pixel_values": torch.randn(3, side, side), "labels": torch.randint(0, 4, (side, side))}


def measured(side: int = SIDE) -> Record:
    return {"pixel_values": torch.randn(3, side, side), "labels": torch.rand(side, side) + 0.5}


def transcribed(samples: int = 1200) -> Record:
    return {"input_values": torch.randn(samples), "labels": torch.randint(1, 30, (3,))}


def spoken(samples: int = 1200) -> Record:
    return {"input_values": torch.randn(samples), "labels": label()}


def forecast() -> Record:
    return {
        "past_values": torch.randn(24),
        "past_time_features": torch.randn(24, 1),
        "past_observed_mask": torch.ones(24),
        "future_values": torch.randn(6),
        "future_time_features": torch.randn(6, 1),
    }


RECORDS_OF: dict[str, Callable[[], Record]] = {
    "classification": classified,
    "masked language modelling": masked,
    "token classification": tagged,
    "question answering": answered,
    "multiple choice": chosen,
    "causal language modelling": continued,
    "with a loss that balances the experts": continued,
    "sequence to sequence": translated,
}
"""Of networks of text; others have their own."""

_SMALL_STAGES = {"depths": [1, 1], "hidden_sizes": [8, 16], "num_stages": 2}
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
        "axial_pos_shape": [4, 4],
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
        "qk_nope_head_dim": 4,
        "v_head_dim": 8,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "num_key_value_heads": 2,
    },
    "JetMoeForCausalLM": {"kv_channels": 8},
    "GptOssForCausalLM": {"sliding_window": 4},
    "SwitchTransformersForConditionalGeneration": {"num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1},
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
    # From sequence to sequence.
    "LEDForConditionalGeneration": {"attention_window": 4},
    "LongT5ForConditionalGeneration": {"local_radius": 3},
    "ProphetNetForConditionalGeneration": {"hidden_size": 16},
}
"""What a network needs beside the usual small numbers."""

RECORD: dict[str, Callable[[], Record]] = {}
"""Records of networks that take others than those of their step."""


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
    config = small(kind.config_class, keep_dropout, **options)
    config._attn_implementation = "eager"
    model: nn.Module = kind(config)
    record = RECORD.get(name) or RECORDS_OF[step]
    return Network(model, [record() for _ in range(RECORDS)], loss_of_output, keep_dropout=keep_dropout)
