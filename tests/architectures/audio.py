"""Speech models and a time series model."""

from typing import Any

from architectures.base import Architecture, integers, normal, transformers_model

SPEECH_LAYERS = r"^encoder\.layers\.\d+$"
SPEECH: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "conv_dim": (32, 32, 32),
    "conv_stride": (5, 4, 4),
    "conv_kernel": (10, 4, 4),
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
}


def _speech(name: str, class_name: str, **config: Any) -> Architecture:
    # Their positional convolution is weight-normed: the weight that it uses is computed
    # from two parameters at every call.
    return Architecture(
        name=name,
        build=transformers_model(class_name, **SPEECH, **config),
        inputs=lambda: {"input_values": normal(2, 1600)},
        block_pattern=SPEECH_LAYERS,
    )


AUDIO = (
    Architecture(
        name="whisper",
        build=transformers_model(
            "WhisperForConditionalGeneration",
            vocab_size=256,
            num_mel_bins=16,
            d_model=64,
            encoder_layers=3,
            decoder_layers=3,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=128,
            decoder_ffn_dim=128,
            max_source_positions=32,
            max_target_positions=32,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=1,
            begin_suppress_tokens=None,
        ),
        inputs=lambda: {
            "input_features": normal(2, 16, 64),
            "decoder_input_ids": integers(256, 2, 7),
        },
        block_pattern=r"^model\.(encoder|decoder)\.layers\.\d+$",
    ),
    _speech("wav2vec2", "Wav2Vec2Model", feat_extract_norm="group"),
    _speech(
        "hubert",
        "HubertModel",
        feat_extract_norm="layer",
        do_stable_layer_norm=True,
        conv_bias=True,
    ),
    Architecture(
        name="patch_tst",
        build=transformers_model(
            "PatchTSTForPrediction",
            num_input_channels=3,
            context_length=32,
            prediction_length=8,
            patch_length=4,
            patch_stride=4,
            num_hidden_layers=4,
            d_model=64,
            ffn_dim=128,
            loss="mse",
        ),
        inputs=lambda: {"past_values": normal(2, 32, 3)},
        block_pattern=r"^model\.encoder\.layers\.\d+$",
    ),
)
