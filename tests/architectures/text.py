"""Text encoders and encoder-decoders."""

from typing import Any

import torch

from architectures.base import Architecture, integers, transformers_model

VOCABULARY = 256
ENCODER_LAYERS = r"^encoder\.layers?\.\d+$"
BOTH_LAYERS = r"^model\.(encoder|decoder)\.layers\.\d+$"
ENCODER: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "max_position_embeddings": 64,
}
BART_LIKE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": 64,
    "encoder_layers": 3,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "forced_eos_token_id": None,
}


def sentences() -> dict[str, torch.Tensor]:
    """Make two rows of ten tokens, the second with four of padding on its right."""
    mask = torch.ones(2, 10, dtype=torch.int64)
    mask[1, 6:] = 0
    return {"input_ids": integers(VOCABULARY, 2, 10), "attention_mask": mask}


def sentence_pairs() -> dict[str, torch.Tensor]:
    """Make `sentences()` and seven tokens a row of what the decoder has said."""
    return {**sentences(), "decoder_input_ids": integers(VOCABULARY, 2, 7)}


def _encoder(
    name: str, class_name: str, block_pattern: str = ENCODER_LAYERS, **config: Any
) -> Architecture:
    return Architecture(
        name=name,
        build=transformers_model(class_name, **config),
        inputs=sentences,
        block_pattern=block_pattern,
    )


def _encoder_decoder(
    name: str, class_name: str, block_pattern: str = BOTH_LAYERS, **config: Any
) -> Architecture:
    return Architecture(
        name=name,
        build=transformers_model(class_name, **config),
        inputs=sentence_pairs,
        block_pattern=block_pattern,
    )


T5 = _encoder_decoder(
    "t5",
    "T5ForConditionalGeneration",
    r"^(encoder|decoder)\.block\.\d+$",
    vocab_size=VOCABULARY,
    d_model=64,
    d_kv=16,
    d_ff=128,
    feed_forward_proj="gated-gelu",
    initializer_factor=2.0,  # at 1.0 it writes its first token for ever
    num_layers=3,
    num_heads=4,
    decoder_start_token_id=0,
)

# Its encoder finds positions where its input is.
M2M_100 = _encoder_decoder("m2m_100", "M2M100ForConditionalGeneration", **BART_LIKE)

ENCODERS = (
    _encoder("bert", "BertModel", **ENCODER),
    _encoder("roberta", "RobertaModel", **ENCODER, pad_token_id=1),
    _encoder(
        "distilbert",
        "DistilBertModel",
        r"^transformer\.layer\.\d+$",
        vocab_size=VOCABULARY,
        max_position_embeddings=64,
        n_layers=4,
        n_heads=4,
        dim=64,
        hidden_dim=128,
    ),
    _encoder(
        "deberta_v2",
        "DebertaV2Model",
        **ENCODER,
        relative_attention=True,
        position_buckets=8,
        norm_rel_ebd="layer_norm",
        share_att_key=True,
        pos_att_type="p2c|c2p",
        conv_kernel_size=3,
        conv_act="gelu",
    ),
    _encoder(
        "modernbert",
        "ModernBertModel",
        r"^layers\.\d+$",
        **ENCODER,
        layer_types=["full_attention", "sliding_attention"] * 2,
        local_attention=4,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        cls_token_id=1,
        sep_token_id=2,
    ),
    # Two groups of two layers; each layer runs twice a pass.
    _encoder(
        "albert",
        "AlbertModel",
        r"^encoder\.albert_layer_groups\.\d+\.albert_layers\.\d+$",
        **{**ENCODER, "hidden_size": 128, "intermediate_size": 256},
        embedding_size=32,
        num_hidden_groups=2,
        inner_group_num=2,
    ),
)

ENCODER_DECODERS = (
    T5,
    _encoder_decoder("bart", "BartForConditionalGeneration", **BART_LIKE),
    _encoder_decoder("marian", "MarianMTModel", **BART_LIKE),
    _encoder_decoder("mbart", "MBartForConditionalGeneration", **BART_LIKE),
)

TEXT = (*ENCODERS, *ENCODER_DECODERS)

# They name the bias of their decoder, whose weight is the table, once more.
HEADS = (
    _encoder("bert_head", "BertForMaskedLM", r"^bert\.encoder\.layer\.\d+$", **ENCODER),
    _encoder(
        "roberta_head",
        "RobertaForMaskedLM",
        r"^roberta\.encoder\.layer\.\d+$",
        **ENCODER,
        pad_token_id=1,
    ),
)
