"""Diffusion models: UNets, autoencoders, image and video transformers."""

from collections.abc import Callable
from typing import Any

import torch

from architectures.base import Architecture, diffusers_model, integers, normal

LAYERS = r"^transformer_blocks\.\d+$"
HEADS: dict[str, Any] = {"num_attention_heads": 4, "attention_head_dim": 16}
UNET_PARTS = r"^(down_blocks\.\d+|mid_block|up_blocks\.\d+)$"
AUTOENCODER_PARTS = rf"^(encoder|decoder)\.{UNET_PARTS[1:]}"


def encode_and_decode(model: Any, inputs: dict[str, Any]) -> list[torch.Tensor]:
    """Encode to the mode of the posterior, which draws no noise, and decode that."""
    latent = model.encode(inputs["sample"]).latent_dist.mode()
    return [latent, model.decode(latent).sample]


def _diffusion(
    name: str,
    class_name: str,
    block_pattern: str,
    inputs: Callable[[], dict[str, Any]],
    **config: Any,
) -> Architecture:
    return Architecture(
        name=name,
        build=diffusers_model(class_name, **config),
        inputs=inputs,
        block_pattern=block_pattern,
    )


def _autoencoder(
    name: str, class_name: str, block_pattern: str, *size: int, **config: Any
) -> Architecture:
    return Architecture(
        name=name,
        build=diffusers_model(class_name, **config),
        inputs=lambda: {"sample": normal(*size)},
        block_pattern=block_pattern,
        call=encode_and_decode,
    )


UNETS = (
    _diffusion(
        "unet_2d_condition",
        "UNet2DConditionModel",
        UNET_PARTS,
        lambda: {
            "sample": normal(1, 4, 16, 16),
            "timestep": torch.tensor(37),
            "encoder_hidden_states": normal(1, 5, 32),
        },
        sample_size=16,
        block_out_channels=(16, 32, 32),
        down_block_types=(
            "CrossAttnDownBlock2D",
            "CrossAttnDownBlock2D",
            "DownBlock2D",
        ),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
        layers_per_block=1,
        cross_attention_dim=32,
        attention_head_dim=4,
        norm_num_groups=8,
    ),
    _diffusion(
        "unet_2d",
        "UNet2DModel",
        UNET_PARTS,
        lambda: {"sample": normal(1, 3, 16, 16), "timestep": torch.tensor(37)},
        sample_size=16,
        block_out_channels=(16, 32, 48),
        down_block_types=("DownBlock2D", "AttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "AttnUpBlock2D", "UpBlock2D"),
        layers_per_block=1,
        norm_num_groups=8,
    ),
    _diffusion(
        "stable_cascade",
        "StableCascadeUNet",
        r"^(down|up)_blocks\.\d+\.\d+$",
        lambda: {
            "sample": normal(1, 8, 8, 8),
            "timestep_ratio": torch.tensor([0.3]),
            "clip_text_pooled": normal(1, 1, 24),
            "clip_text": normal(1, 5, 24),
            "clip_img": normal(1, 1, 24),
        },
        in_channels=8,
        out_channels=8,
        timestep_ratio_embedding_dim=16,
        conditioning_dim=32,
        block_out_channels=(32, 32),
        num_attention_heads=(4, 4),
        down_num_layers_per_block=(1, 1),
        up_num_layers_per_block=(1, 1),
        clip_text_in_channels=24,
        clip_text_pooled_in_channels=24,
        clip_image_in_channels=24,
    ),
)

AUTOENCODERS = (
    _autoencoder(
        "autoencoder_kl",
        "AutoencoderKL",
        AUTOENCODER_PARTS,
        *(1, 3, 16, 16),
        block_out_channels=(16, 32, 32),
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        norm_num_groups=8,
        sample_size=16,
    ),
    _autoencoder(
        "autoencoder_kl_wan",
        "AutoencoderKLWan",
        AUTOENCODER_PARTS,
        *(1, 3, 5, 16, 16),
        base_dim=8,
        z_dim=4,
        dim_mult=[1, 2, 2],
        num_res_blocks=1,
        temperal_downsample=[False, True],
        latents_mean=[0.0] * 4,
        latents_std=[1.0] * 4,
    ),
)

IMAGE_TRANSFORMERS = (
    _diffusion(
        "sd3",
        "SD3Transformer2DModel",
        LAYERS,
        lambda: {
            "hidden_states": normal(1, 4, 8, 8),
            "encoder_hidden_states": normal(1, 5, 32),
            "pooled_projections": normal(1, 24),
            "timestep": torch.tensor([37]),
        },
        **HEADS,
        sample_size=8,
        in_channels=4,
        out_channels=4,
        num_layers=3,
        joint_attention_dim=32,
        caption_projection_dim=64,
        pooled_projection_dim=24,
        pos_embed_max_size=8,
        dual_attention_layers=(0,),
        qk_norm="rms_norm",
    ),
    # Two stacks of blocks of different kinds and sizes.
    _diffusion(
        "flux",
        "FluxTransformer2DModel",
        r"^(single_)?transformer_blocks\.\d+$",
        lambda: {
            "hidden_states": normal(1, 16, 8),
            "encoder_hidden_states": normal(1, 5, 32),
            "pooled_projections": normal(1, 24),
            "timestep": torch.tensor([0.37]),
            "img_ids": integers(4, 16, 3, low=0).float(),
            "txt_ids": torch.zeros(5, 3),
            "guidance": torch.tensor([3.5]),
        },
        **HEADS,
        in_channels=8,
        num_layers=2,
        num_single_layers=3,
        joint_attention_dim=32,
        pooled_projection_dim=24,
        guidance_embeds=True,
        axes_dims_rope=(4, 4, 8),
    ),
    _diffusion(
        "pixart",
        "PixArtTransformer2DModel",
        LAYERS,
        lambda: {
            "hidden_states": normal(1, 4, 8, 8),
            "encoder_hidden_states": normal(1, 5, 32),
            "timestep": torch.tensor([37]),
            "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
        },
        **HEADS,
        num_layers=3,
        cross_attention_dim=64,
        caption_channels=32,
        sample_size=8,
    ),
    _diffusion(
        "dit",
        "DiTTransformer2DModel",
        LAYERS,
        lambda: {
            "hidden_states": normal(1, 4, 8, 8),
            "timestep": torch.tensor([37]),
            "class_labels": torch.tensor([5]),
        },
        **HEADS,
        num_layers=3,
        sample_size=8,
        num_embeds_ada_norm=10,
    ),
)

VIDEO_TRANSFORMERS = (
    _diffusion(
        "ltx_video",
        "LTXVideoTransformer3DModel",
        LAYERS,
        lambda: {
            "hidden_states": normal(1, 32, 8),
            "encoder_hidden_states": normal(1, 5, 32),
            "timestep": torch.tensor([37]),
            "encoder_attention_mask": torch.ones(1, 5, dtype=torch.bool),
            "num_frames": 2,
            "height": 4,
            "width": 4,
        },
        **HEADS,
        in_channels=8,
        out_channels=8,
        cross_attention_dim=64,
        num_layers=3,
        caption_channels=32,
    ),
    _diffusion(
        "cogvideox",
        "CogVideoXTransformer3DModel",
        LAYERS,
        lambda: {
            "hidden_states": normal(1, 2, 4, 8, 8),
            "encoder_hidden_states": normal(1, 5, 32),
            "timestep": torch.tensor([37]),
        },
        **HEADS,
        in_channels=4,
        out_channels=4,
        time_embed_dim=32,
        text_embed_dim=32,
        num_layers=3,
        sample_width=8,
        sample_height=8,
        sample_frames=5,
        max_text_seq_length=5,
    ),
    # Its patches are cut by a three-dimensional convolution.
    _diffusion(
        "wan",
        "WanTransformer3DModel",
        r"^blocks\.\d+$",
        lambda: {
            "hidden_states": normal(1, 4, 2, 8, 8),
            "timestep": torch.tensor([37]),
            "encoder_hidden_states": normal(1, 5, 32),
        },
        **HEADS,
        in_channels=4,
        out_channels=4,
        text_dim=32,
        freq_dim=32,
        ffn_dim=128,
        num_layers=3,
        rope_max_seq_len=32,
    ),
)

DIFFUSION = (*UNETS, *AUTOENCODERS, *IMAGE_TRANSFORMERS, *VIDEO_TRANSFORMERS)
