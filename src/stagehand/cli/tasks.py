"""What a model is run for: embedding texts, generating text.

A task's `run` returns tensors on the host, so that two runs can be compared bit by bit;
`show` turns them into something to look at.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from torch import nn

from stagehand.errors import ConfigError

__all__ = ["Embedding", "Generation", "Task", "bitwise_equal"]


class Task(Protocol):
    """Something to do with a model, more than once with the same result."""

    @property
    def steps(self) -> int:
        """The most times that one `run` calls `advance`."""

    def run(
        self, model: nn.Module, *, device: torch.device, advance: Callable[[], None]
    ) -> tuple[torch.Tensor, ...]:
        """Do it and return the results, on the host."""

    def show(self, results: Sequence[torch.Tensor]) -> RenderableType:
        """Return the results of `run` in a form for the terminal."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Embedding:
    """One normalized, mean-pooled vector per text.

    Each text is a pass of its own: no padding, and a pass for every text to stream.
    """

    tokenizer: Any
    """The model's tokenizer."""
    texts: tuple[str, ...]
    """What to embed."""

    @property
    def steps(self) -> int:
        """One per text."""
        return len(self.texts)

    @torch.inference_mode()
    def run(
        self, model: nn.Module, *, device: torch.device, advance: Callable[[], None]
    ) -> tuple[torch.Tensor, ...]:
        """Return a vector per text."""
        vectors = []
        for text in self.texts:
            tokens = _tokenize(self.tokenizer, text, model, device, room=0)
            hidden = model(**tokens).last_hidden_state
            mask = tokens["attention_mask"].unsqueeze(-1).to(hidden.dtype)
            pooled = (hidden * mask).sum(dim=1) / mask.sum(dim=1)
            vectors.append(nn.functional.normalize(pooled, dim=-1)[0].cpu())
            advance()
        return tuple(vectors)

    def show(self, results: Sequence[torch.Tensor]) -> RenderableType:
        """Return the texts, and the table of their cosine similarities."""
        vectors = torch.stack(list(results)).float()
        similarity = vectors @ vectors.T
        others = similarity.clone().fill_diagonal_(-torch.inf)
        nearest = others.argmax(dim=1).tolist()
        numbers = range(1, len(results) + 1)
        table = Table("", *map(str, numbers), "nearest", title="Cosine similarity")
        for number, row in zip(numbers, similarity.tolist(), strict=True):
            best = str(nearest[number - 1] + 1) if len(results) > 1 else "-"
            table.add_row(str(number), *(f"{value:.2f}" for value in row), best)
        texts = zip(numbers, self.texts, strict=True)
        return Group(*(Text(f"{number}. {text}") for number, text in texts), table)


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """A greedy continuation per prompt."""

    tokenizer: Any
    """The model's tokenizer."""
    prompts: tuple[str, ...]
    """What to continue."""
    max_new_tokens: int
    """The most tokens to add to each prompt."""

    @property
    def steps(self) -> int:
        """One per token."""
        return len(self.prompts) * self.max_new_tokens

    def run(
        self, model: nn.Module, *, device: torch.device, advance: Callable[[], None]
    ) -> tuple[torch.Tensor, ...]:
        """Return two tensors per prompt: all tokens, and the logits of the new ones."""
        results: list[torch.Tensor] = []
        for prompt in self.prompts:
            room = self.max_new_tokens
            tokens = _tokenize(self.tokenizer, prompt, model, device, room=room)
            pad = self.tokenizer.pad_token_id
            generator: Any = model
            output = generator.generate(
                **tokens,
                do_sample=False,
                num_beams=1,
                max_new_tokens=room,
                pad_token_id=self.tokenizer.eos_token_id if pad is None else pad,
                streamer=_Ticker(advance),
                return_dict_in_generate=True,
                output_logits=True,
            )
            results.append(output.sequences[0].cpu())
            results.append(torch.cat(output.logits).cpu())
        return tuple(results)

    def show(self, results: Sequence[torch.Tensor]) -> RenderableType:
        """Return each prompt with its continuation."""
        texts = self.tokenizer.batch_decode(results[::2], skip_special_tokens=True)
        return Group(*map(Text, texts))


class _Ticker:
    """A streamer for `generate()`: calls a function for each new token."""

    def __init__(self, advance: Callable[[], None]) -> None:
        self._advance = advance
        self._prompt_seen = False

    def put(self, value: torch.Tensor) -> None:
        """Count one token; the first call brings the prompt instead."""
        if self._prompt_seen:
            self._advance()
        self._prompt_seen = True

    def end(self) -> None:
        """Do nothing: a text may end before its most tokens."""


def _tokenize(
    tokenizer: Any, text: str, model: nn.Module, device: torch.device, *, room: int
) -> dict[str, torch.Tensor]:
    """Return a text's tokens on the device, if the model has a place for each."""
    tokens = tokenizer(text, return_tensors="pt")
    count = tokens["input_ids"].shape[1]
    positions = getattr(model.config, "max_position_embeddings", None)
    limit = min(tokenizer.model_max_length, positions or tokenizer.model_max_length)
    if not 0 < count <= limit - room:
        raise ConfigError(
            f"the text {text[:40]!r} has {count} tokens: expected 1 to "
            f"{max(limit - room, 0)}, as the model has {limit} positions"
            + (f" of which {room} are for new tokens" if room else "")
        )
    known = getattr(model.config, "vocab_size", None)
    last = int(tokens["input_ids"].max())
    if known is not None and last >= known:
        raise ConfigError(
            f"the text {text[:40]!r} has token {last}: expected 0 to {known - 1}, as"
            f" the model knows {known}; use the tokenizer of this model"
        )
    return {name: value.to(device) for name, value in tokens.items()}


def bitwise_equal(left: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> bool:
    """Return whether two results have the same bits, NaNs and signs of zero too."""
    return len(left) == len(right) and all(
        one.dtype == other.dtype
        and one.shape == other.shape
        and torch.equal(_bytes_of(one), _bytes_of(other))
        for one, other in zip(left, right, strict=True)
    )


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)
