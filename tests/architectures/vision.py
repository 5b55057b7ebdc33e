"""Image encoders, image-text models and a segmenter."""

from collections.abc import Callable
from typing import Any

from architectures.base import Architecture, integers, normal, transformers_model

VIT: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
}
TOWER: dict[str, Any] = {**VIT, "intermediate_size": 128}
TEXT_TOWER: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "max_position_embeddings": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def images() -> dict[str, Any]:
    """Make two images of 32 x 32 pixels."""
    return {"pixel_values": normal(2, 3, 32, 32)}


def captioned_images() -> dict[str, Any]:
    """Make `images()` and a caption of eight tokens for each."""
    return {**images(), "input_ids": integers(256, 2, 8)}


def _vision(
    name: str,
    class_name: str,
    block_pattern: str,
    inputs: Callable[[], dict[str, Any]] = images,
    **config: Any,
) -> Architecture:
    return Architecture(
        name=name,
        build=transformers_model(class_name, **config),
        inputs=inputs,
        block_pattern=block_pattern,
    )


VISION = (
    _vision("vit", "ViTModel", r"^layers\.\d+$", **TOWER),
    _vision("dinov2", "Dinov2Model", r"^encoder\.layer\.\d+$", **VIT, mlp_ratio=2),
    _vision(
        "clip",
        "CLIPModel",
        r"^(text|vision)_model\.encoder\.layers\.\d+$",
        captioned_images,
        text_config=TEXT_TOWER,
        vision_config=TOWER,
        projection_dim=32,
    ),
    _vision(
        "siglip",
        "SiglipModel",
        r"^(text|vision)_model\.encoder\.layers\.\d+$",
        captioned_images,
        text_config=TEXT_TOWER,
        vision_config=TOWER,
    ),
    _vision(
        "convnext",
        "ConvNextModel",
        r"^encoder\.stages\.\d+\.layers\.\d+$",
        hidden_sizes=(16, 32, 64, 96),
        depths=(1, 2, 2, 1),
    ),
    _vision(
        "resnet",
        "ResNetForImageClassification",
        r"^resnet\.encoder\.stages\.\d+\.layers\.\d+$",
        embedding_size=16,
        hidden_sizes=(32, 64, 64, 128),
        depths=(1, 2, 2, 1),
        layer_type="basic",
        num_labels=10,
    ),
    _vision(
        "swin",
        "SwinModel",
        r"^encoder\.layers\.\d+\.blocks\.\d+$",
        image_size=32,
        patch_size=4,
        embed_dim=24,
        depths=(2, 2, 2),
        num_heads=(2, 4, 8),
        window_size=2,
    ),
    _vision(
        "sam",
        "SamModel",
        r"^vision_encoder\.layers\.\d+$",
        lambda: {
            "pixel_values": normal(1, 3, 64, 64),
            "input_points": 30 + 10 * normal(1, 1, 2, 2),
        },
        vision_config={
            **VIT,
            "image_size": 64,
            "initializer_range": 0.02,  # not 1e-10, or the image would not matter
            "output_channels": 32,
            "window_size": 4,
            "global_attn_indexes": (1, 3),
            "num_pos_feats": 16,
            "mlp_ratio": 2.0,
        },
        prompt_encoder_config={"hidden_size": 32, "image_size": 64, "patch_size": 8},
        mask_decoder_config={
            "hidden_size": 32,
            "mlp_dim": 64,
            "num_attention_heads": 4,
            "iou_head_hidden_dim": 32,
        },
    ),
)
