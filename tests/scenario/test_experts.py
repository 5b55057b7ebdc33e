"""Experts: without gradients only those cross that a router has chosen."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn

import stagehand
from architectures.base import transformers_model
from architectures.language import NO_SPECIAL_TOKENS, VOCABULARY
from scenario.small import runtime_of
from streamed import weight_bytes

EXPERTS, TAKEN, DEPTH = 16, 2, 3
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": DEPTH,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "num_experts_per_tok": TAKEN,
    **NO_SPECIAL_TOKENS,
}
MODELS = {
    "qwen3": transformers_model(
        "Qwen3MoeForCausalLM",
        **_SIZES,
        num_experts=EXPERTS,
        moe_intermediate_size=64,
        intermediate_size=128,
    ),
    "gpt_oss": transformers_model(
        "GptOssForCausalLM",
        **_SIZES,
        num_local_experts=EXPERTS,
        intermediate_size=64,
    ),
}
