"""Causal language models: dense, mixture of experts, state space."""

from typing import Any

import torch

from architectures.base import Architecture, integers, transformers_model

VOCABULARY = 256
LAYERS = r"^model\.layers\.\d+$"
GPT_LAYERS = r"^transformer\.h\.\d+$"
NO_SPECIAL_TOKENS: dict[str, Any] = {
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
DENSE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    **NO_SPECIAL_TOKENS,
}
GATED: dict[str, Any] = {**DENSE, "intermediate_size": 128}
GROUPED: dict[str, Any] = {**GATED, "num_key_value_heads": 2}


def prompt() -> dict[str, torch.Tensor]:
    """Make two rows of ten tokens, the first with three of padding on its left."""
    mask = torch.ones(2, 10, dtype=torch.int64)
    mask[0, :3] = 0
    return {"input_ids": integers(VOCABULARY, 2, 10), "attention_mask": mask}


def _causal(
    name: str,
    class_name: str,
    block_pattern: str = LAYERS,
    **config: Any,
) -> Architecture:
    """Describe a causal language model of `transformers`."""
    return Architecture(
        name=name,
        build=transformers_model(class_name, **config),
        inputs=prompt,
        block_pattern=block_pattern,
    )


LLAMA = _causal("llama", "LlamaForCausalLM", **GROUPED)
QWEN3 = _causal("qwen3", "Qwen3ForCausalLM", **GROUPED, head_dim=16)
GPT2 = _causal(
    "gpt2",
    "GPT2LMHeadModel",
    GPT_LAYERS,
    vocab_size=VOCABULARY,
    n_positions=64,
    n_embd=64,
    n_layer=4,
    n_head=4,
    **NO_SPECIAL_TOKENS,
)
MIXTRAL = _causal(
    "mixtral",
    "MixtralForCausalLM",
    **GROUPED,
    num_local_experts=4,
    num_experts_per_tok=2,
)

DENSE_MODELS = (
    LLAMA,
    _causal("qwen2", "Qwen2ForCausalLM", **GROUPED),
    QWEN3,
    # Scaled and tied embeddings, local and global layers in turn.
    _causal(
        "gemma3",
        "Gemma3ForCausalLM",
        **GROUPED,
        head_dim=16,
        sliding_window=4,
        layer_types=["sliding_attention", "full_attention"] * 2,
        query_pre_attn_scalar=16,
    ),
    _causal("mistral", "MistralForCausalLM", **GROUPED, sliding_window=4),
    GPT2,
    _causal(
        "opt",
        "OPTForCausalLM",
        r"^model\.decoder\.layers\.\d+$",
        **DENSE,
        ffn_dim=128,
        word_embed_proj_dim=32,
    ),
    _causal("phi", "PhiForCausalLM", **GATED),
    _causal("falcon", "FalconForCausalLM", GPT_LAYERS, **DENSE, alibi=False),
    _causal(
        "bloom",
        "BloomForCausalLM",
        GPT_LAYERS,
        vocab_size=VOCABULARY,
        hidden_size=64,
        n_layer=4,
        n_head=4,
        **NO_SPECIAL_TOKENS,
    ),
    _causal("gpt_neox", "GPTNeoXForCausalLM", r"^gpt_neox\.layers\.\d+$", **GATED),
)

# Latent attention, a dense layer first, a shared expert, grouped routing.
DEEPSEEK_V3 = _causal(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    **GATED,
    num_key_value_heads=4,
    moe_intermediate_size=32,
    n_routed_experts=8,
    num_experts_per_tok=2,
    n_group=4,
    topk_group=2,
    first_k_dense_replace=1,
    q_lora_rank=32,
    kv_lora_rank=16,
    qk_rope_head_dim=8,
    qk_nope_head_dim=16,
    v_head_dim=16,
)

EXPERT_MODELS = (
    MIXTRAL,
    _causal(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        **GROUPED,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        decoder_sparse_step=2,
        experts_implementation="eager",
    ),
    DEEPSEEK_V3,
    _causal(
        "olmoe",
        "OlmoeForCausalLM",
        **{**GATED, "intermediate_size": 32},
        num_experts=8,
        num_experts_per_tok=2,
    ),
)

STATE_SPACE_MODELS = (
    _causal(
        "mamba",
        "MambaForCausalLM",
        r"^backbone\.layers\.\d+$",
        vocab_size=VOCABULARY,
        hidden_size=64,
        state_size=8,
        num_hidden_layers=4,
        **NO_SPECIAL_TOKENS,
    ),
    _causal(
        "mamba2",
        "Mamba2ForCausalLM",
        r"^backbone\.layers\.\d+$",
        vocab_size=VOCABULARY,
        hidden_size=64,
        state_size=16,
        num_heads=8,
        head_dim=16,
        n_groups=2,
        chunk_size=8,
        num_hidden_layers=4,
        **NO_SPECIAL_TOKENS,
    ),
)

LANGUAGE = (*DENSE_MODELS, *EXPERT_MODELS, *STATE_SPACE_MODELS)
