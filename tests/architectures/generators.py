"""Language models that write a few tokens with a key-value cache."""

import dataclasses
from typing import Any

from architectures.language import GPT2, LLAMA, MIXTRAL, QWEN3, prompt
from architectures.text import M2M_100, T5, sentences

NEW_TOKENS = 8


def generate(model: Any, inputs: dict[str, Any]) -> Any:
    """Write eight tokens greedily; the output has them, their logits and the cache."""
    if hasattr(model.config, "num_local_experts"):
        # Else it depends on where the first parameter is which kernels compute them.
        model.set_experts_implementation("batched_mm")
    return model.generate(
        **inputs,
        do_sample=False,
        use_cache=True,
        min_new_tokens=NEW_TOKENS,
        max_new_tokens=NEW_TOKENS,
        output_logits=True,
        return_dict_in_generate=True,
    )


GENERATORS = (
    *(
        dataclasses.replace(model, call=generate, inputs=prompt)
        for model in (LLAMA, QWEN3, GPT2, MIXTRAL)
    ),
    *(
        dataclasses.replace(model, call=generate, inputs=sentences)
        for model in (T5, M2M_100)
    ),
)
