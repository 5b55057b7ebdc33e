"""Four models of a video pipeline take turns under one budget, and lose no bit.

A text encoder, a transformer that is larger than the budget, a spatial and a temporal
upscaler, all small and random, so that this runs anywhere in seconds. Each stage says
what may stay: the text encoder while it is needed, the transformer's blocks from then
on; the upscalers are guests, who take what is left and are gone afterwards.

    python examples/four_pass_pipeline.py
    python examples/four_pass_pipeline.py --budget 3MB --device cuda
"""

import argparse
from copy import deepcopy

import torch
from torch import nn

import stagehand
from stagehand.units import format_bytes, parse_bytes

WIDTH, TOKENS, FRAMES, SIZE, STEPS = 128, 12, 4, 8, 8


class TextEncoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(500, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(2))

    def forward(self, prompt: torch.Tensor) -> torch.Tensor:
        x = self.words(prompt)
        for layer in self.layers:
            x = layer(x)
        return x


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.rise = nn.Linear(WIDTH, 4 * WIDTH)
        self.fall = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.fall(nn.functional.gelu(self.rise(self.norm(x))))


class Transformer(nn.Module):
    """Predicts the noise of a latent video, given what the text means."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(4, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(12))
        self.leave = nn.Linear(WIDTH, 4)

    def forward(
        self, latent: torch.Tensor, text: torch.Tensor, time: float
    ) -> torch.Tensor:
        x = self.enter(latent.flatten(2).transpose(1, 2))
        x = x + text.mean(1, keepdim=True) + time
        for block in self.blocks:
            x = block(x)
        return self.leave(x).transpose(1, 2).view_as(latent)


class SpatialUpscaler(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Conv3d(4, 64, 3, padding=1),
            nn.SiLU(),
            nn.Conv3d(64, 64, 3, padding=1),
            nn.Upsample(scale_factor=(1, 2, 2)),
            nn.Conv3d(64, 4, 3, padding=1),
        )


class TemporalUpscaler(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Conv3d(4, 64, 3, padding=1),
            nn.SiLU(),
            nn.Upsample(scale_factor=(2, 1, 1)),
            nn.Conv3d(64, 4, 3, padding=1),
        )


def make_models() -> dict[str, nn.Module]:
    torch.manual_seed(0)
    models = {
        "text_encoder": TextEncoder(),
        "transformer": Transformer(),
        "spatial_upscaler": SpatialUpscaler(),
        "temporal_upscaler": TemporalUpscaler(),
    }
    return {name: model.eval() for name, model in models.items()}


def denoise(
    transformer: nn.Module, noise: torch.Tensor, text: torch.Tensor
) -> torch.Tensor:
    latent = noise
    for step in range(STEPS):
        time = 1 - step / STEPS
        latent = latent - transformer(latent, text, time) / STEPS
    return latent


@torch.no_grad()
def generate(
    models: dict[str, nn.Module], prompt: torch.Tensor, noise: torch.Tensor
) -> torch.Tensor:
    """The pipeline as it would be without a budget."""
    text = models["text_encoder"](prompt)
    latent = denoise(models["transformer"], noise, text)
    latent = models["spatial_upscaler"](latent)
    return models["temporal_upscaler"](latent)


@torch.no_grad()
def generate_held(
    models: dict[str, nn.Module], prompt: torch.Tensor, noise: torch.Tensor
) -> torch.Tensor:
    """The same, and each stage says what may stay on the device."""
    transformer = models["transformer"]._stagehand_layer_runtime
    with transformer.keep_resident(models["text_encoder"]):
        text = models["text_encoder"](prompt)

    transformer.reserve_for_resident(priority=stagehand.ResidentPriority.PRIMARY)
    with transformer.managed_forward():
        latent = denoise(models["transformer"], noise, text)
    print(transformer.report())

    with transformer.as_guest(models["spatial_upscaler"]):
        latent = models["spatial_upscaler"](latent)
    with transformer.as_guest(models["temporal_upscaler"]):
        video = models["temporal_upscaler"](latent)

    transformer.release_reservation()
    return video


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--budget", default="3MB", help="for all weights together")
    parser.add_argument("--device", help="the accelerator by default")
    options = parser.parse_args()

    models = make_models()
    torch.manual_seed(1)
    prompt = torch.randint(0, 500, (1, TOKENS))
    noise = torch.randn(1, 4, FRAMES, SIZE, SIZE)
    weights = sum(p.nbytes for m in models.values() for p in m.parameters())
    print(f"weights {format_bytes(weights)}, budget {options.budget}")

    plain = deepcopy(models)
    streamed = stagehand.pipeline(
        models, vram_budget=options.budget, device=options.device
    )
    with streamed:
        place = streamed.runtimes["transformer"].torch_device
        expected = generate(
            {name: model.to(place) for name, model in plain.items()},
            prompt.to(place),
            noise.to(place),
        )
        for number in range(2):
            video = generate_held(models, prompt, noise.to(place))
            print(f"video {number}: {list(video.shape)}, peak of all weights", end=" ")
            print(format_bytes(streamed.peak_device_bytes))
            if not torch.equal(video, expected):
                raise SystemExit("not the video that the models give without a budget")
            if streamed.peak_device_bytes > parse_bytes(options.budget, name="budget"):
                raise SystemExit("the weights took more than the budget")


if __name__ == "__main__":
    main()
