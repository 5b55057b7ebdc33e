"""Generate text with a Qwen2 model whose layers are streamed from its files.

    python examples/layer_streamer_generate.py                  # a small random model
    python examples/layer_streamer_generate.py --model DIR --prompt "def fibonacci("
    python examples/layer_streamer_generate.py --model DIR --config best.json

Only a few layers are on the device at once; embeddings, final norm and head stay there.
The model's computation is written out below: rotary positions, grouped queries, a cache
of keys and values, gated layers. Without `--model`, `transformers` writes the same
tokens with all weights on the device. `best.json` is what layer_streamer_tune.py wrote.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from stagehand import LayerStreamer

Weights = dict[str, torch.Tensor]


class Qwen2:
    """The computation of a Qwen2 model on a streamer's weights."""

    def __init__(self, streamer: LayerStreamer, config: dict[str, Any]) -> None:
        self.streamer = streamer
        self.eps = config["rms_norm_eps"]
        self.heads = config["num_attention_heads"]
        self.kv_heads = config["num_key_value_heads"]
        self.head_dim = config.get("head_dim") or config["hidden_size"] // self.heads
        self.embed = streamer.load_static("model.embed_tokens.weight")
        self.norm = streamer.load_static("model.norm.weight")
        self.head = self.embed
        if not config["tie_word_embeddings"]:
            self.head = streamer.load_static("lm_head.weight")
        theta = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
        steps = torch.arange(0, self.head_dim, 2, dtype=torch.int64).float()
        self.frequencies = (1.0 / theta ** (steps / self.head_dim)).to(
            self.embed.device
        )
        self.cache: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def reset(self) -> None:
        """Forget what was read."""
        self.cache.clear()

    @torch.inference_mode()
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Read more tokens; return the logits after the last one."""
        start = self.cache[0][0].shape[-2] if self.cache else 0
        count = tokens.shape[-1]
        place = torch.arange(start, start + count, device=tokens.device)
        angles = torch.outer(place.float(), self.frequencies).repeat(1, 2)
        self.rotation = (
            angles.cos().to(self.embed.dtype),
            angles.sin().to(self.embed.dtype),
        )
        x = F.embedding(tokens, self.embed)
        x = self.streamer.run_pass(x, self.layer)
        return F.linear(self.normed(x[:, -1], self.norm), self.head)

    def layer(self, x: torch.Tensor, weights: Weights, number: int) -> torch.Tensor:
        """What one layer does; its weights are on the device."""
        hidden = self.normed(x, weights["input_layernorm.weight"])
        x = x + self.attention(hidden, weights, number)
        hidden = self.normed(x, weights["post_attention_layernorm.weight"])
        gate = F.silu(F.linear(hidden, weights["mlp.gate_proj.weight"]))
        hidden = gate * F.linear(hidden, weights["mlp.up_proj.weight"])
        return x + F.linear(hidden, weights["mlp.down_proj.weight"])

    def attention(
        self, hidden: torch.Tensor, weights: Weights, number: int
    ) -> torch.Tensor:
        """Attend to all that was read, and remember this."""
        batch, count, _ = hidden.shape

        def projected(name: str) -> torch.Tensor:
            weight = weights[f"self_attn.{name}_proj.weight"]
            bias = weights[f"self_attn.{name}_proj.bias"]
            found = F.linear(hidden, weight, bias)
            return found.view(batch, count, -1, self.head_dim).transpose(1, 2)

        query, key = self.rotated(projected("q")), self.rotated(projected("k"))
        value = projected("v")
        if number in self.cache:
            key = torch.cat([self.cache[number][0], key], dim=-2)
            value = torch.cat([self.cache[number][1], value], dim=-2)
        self.cache[number] = key, value
        groups = self.heads // self.kv_heads
        found = F.scaled_dot_product_attention(
            query,
            key.repeat_interleave(groups, dim=1),
            value.repeat_interleave(groups, dim=1),
            is_causal=count > 1,
        )
        found = found.transpose(1, 2).reshape(batch, count, -1)
        return F.linear(found, weights["self_attn.o_proj.weight"])

    def rotated(self, x: torch.Tensor) -> torch.Tensor:
        """Turn pairs of features by their position's angle."""
        cos, sin = self.rotation
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat([-second, first], dim=-1) * sin

    def normed(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Scale to a root mean square of one, in float32."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return weight * wide.to(x.dtype)

    def generate(self, tokens: torch.Tensor, count: int, end: set[int]) -> list[int]:
        """Return the likeliest continuation, token by token."""
        self.reset()
        written: list[int] = []
        while len(written) < count and not end.intersection(written[-1:]):
            tokens = self.forward(tokens).argmax(-1, keepdim=True)
            written.append(int(tokens))
        return written


def read_config(folder: Path) -> dict[str, Any]:
    """Return a model's `config.json`."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


def make_model(folder: Path) -> None:
    """Write a small model with random weights, in several files."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=None,
        dtype="float32",
    )
    Qwen2ForCausalLM(config).save_pretrained(folder, max_shard_size="1MB")


def written_by_transformers(
    folder: Path, tokens: torch.Tensor, count: int
) -> list[int]:
    """Return what the resident model writes."""
    from transformers import Qwen2ForCausalLM

    model = Qwen2ForCausalLM.from_pretrained(folder).to(tokens.device)
    mask = torch.ones_like(tokens)
    found = model.generate(
        tokens, attention_mask=mask, max_new_tokens=count, do_sample=False
    )
    return found[0, tokens.shape[-1] :].tolist()


def generate(options: argparse.Namespace, folder: Path) -> None:
    """Stream the model and print what it writes."""
    config = read_config(folder)
    settings = json.loads(options.config.read_text()) if options.config else {}
    with LayerStreamer.from_pretrained(
        folder, device=options.device, **settings
    ) as streamer:
        print(streamer)
        model = Qwen2(streamer, config)
        device = model.embed.device
        tokenizer, end = None, set()
        if options.model:
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(folder)
            tokens = tokenizer(options.prompt, return_tensors="pt").input_ids
            end = {tokenizer.eos_token_id}
        else:
            tokens = torch.randint(config["vocab_size"], (1, 12))
        began = time.perf_counter()
        written = model.generate(tokens.to(device), options.tokens, end)
        seconds = (time.perf_counter() - began) / len(written)
        peak = max(r.device_peak_bytes or 0 for r in streamer.telemetry.records)
    rate = streamer.read_bytes / seconds / 1e9
    print(f"{seconds:.3f} s a token, {rate:.2f} GB/s, {peak / 1e6:.2f} MB of layers")
    # The allocator of a GPU rounds layers up: small ones by half of them at most.
    assert peak <= 1.5 * (streamer.depths.n_gpu + 1) * max(streamer.layer_bytes)
    if tokenizer is not None:
        print(options.prompt + tokenizer.decode(written))
        return
    print(f"tokens {written}")
    assert written == written_by_transformers(folder, tokens.to(device), options.tokens)
    print("The tokens are those of the resident model.")


def main() -> None:
    """Read the options, and make a model if none is given."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, help="a directory with a Qwen2 model")
    parser.add_argument("--prompt", default="def fibonacci(n):\n")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--device", help="default: the accelerator, or the CPU")
    parser.add_argument("--config", type=Path, help="depths, as JSON")
    options = parser.parse_args()
    if options.model:
        generate(options, options.model)
        return
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder))
        generate(options, Path(folder))


if __name__ == "__main__":
    main()
