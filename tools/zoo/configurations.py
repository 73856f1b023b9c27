"""Small configurations of networks of transformers: two narrow layers, few words, tiny pictures."""

from __future__ import annotations

from typing import Any

VOCABULARY = 60
LENGTH = 10
SIDE = 32
"""Of a picture."""

_NUMBERS: dict[str, Any] = {
    # Widths.
    "hidden_size": 16,
    "d_model": 16,
    "n_embd": 16,
    "dim": 16,
    "emb_dim": 16,
    "embed_dim": 16,
    "embedding_size": 16,
    "head_dim": 8,
    "d_kv": 8,
    "d_ff": 32,
    "ffn_dim": 32,
    "ffn_hidden_size": 32,
    "hidden_dim": 32,
    "n_inner": 32,
    "intermediate_size": 32,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "dff": 32,
    # Depths.
    "num_hidden_layers": 2,
    "n_layer": 2,
    "n_layers": 2,
    "num_layers": 2,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "num_encoder_layers": 2,
    "num_decoder_layers": 2,
    # Heads.
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "n_head": 2,
    "n_heads": 2,
    "num_heads": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "num_encoder_attention_heads": 2,
    "num_decoder_attention_heads": 2,
    # Words.
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "n_positions": 64,
    "n_ctx": 64,
    "max_seq_len": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "forced_eos_token_id": None,
    "forced_bos_token_id": None,
    # Pictures.
    "image_size": SIDE,
    "patch_size": 8,
    "num_labels": 4,
    # Experts.
    "num_local_experts": 4,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
}


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
        if name in _NUMBERS and not isinstance(value, list | dict):
            chosen[name] = _NUMBERS[name]
        elif "drop" in name and isinstance(value, float) and not keep_dropout:
            chosen[name] = 0.0
    chosen.update(num_labels=4, **options) if "num_labels" not in options else chosen.update(options)
    config = kind(**chosen)
    config.use_cache = False
    if getattr(config, "decoder_start_token_id", 1) is None or config.is_encoder_decoder:
        config.decoder_start_token_id = 1
    return config
