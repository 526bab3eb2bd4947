"""Text generation: continues a prompt with a language model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from drivetrain.outcomes import Problem
from drivetrain.tasks.lora import text


def generate(net: Any, tokenizer: Any, prompt: str, num_tokens: int, temperature: float) -> Iterator[str]:
    """Yields new text piece by piece. A piece never ends inside a character that several tokens encode."""
    tokens: list[int] = []
    yielded = ""
    for token in generate_tokens(net, tokenizer, prompt, num_tokens, temperature):
        if token == tokenizer.eos_token_id:
            return
        tokens.append(token)
        decoded = tokenizer.decode(tokens, skip_special_tokens=True)
        if not decoded.endswith("\N{REPLACEMENT CHARACTER}"):
            yield decoded[len(yielded) :]
            yielded = decoded


@torch.no_grad()
def generate_tokens(net: Any, tokenizer: Any, prompt: str, num_tokens: int, temperature: float) -> Iterator[int]:
    """Yields exactly `num_tokens` tokens; does not stop at the end-of-text token."""
    (prompt_ids,) = tokenizer([prompt], add_special_tokens=False)["input_ids"]
    ids = torch.tensor([text.with_prefix(text.prefix_tokens(tokenizer), list(prompt_ids))], dtype=torch.long)
    device = next(net.parameters()).device
    window = getattr(net.config, "max_position_embeddings", 2048) - num_tokens
    ids = ids[:, -max(1, window) :].to(device)
    if not ids.shape[1]:
        raise Problem("the prompt is empty: give at least one character")
    key_value_cache, was_training = None, net.training
    net.eval()
    try:
        for _ in range(num_tokens):
            out = net(input_ids=ids, past_key_values=key_value_cache, use_cache=True)
            key_value_cache, logits = out.past_key_values, out.logits[:, -1].float()
            ids = logits.argmax(-1, keepdim=True) if not temperature else torch.multinomial((logits / temperature).softmax(-1), 1)
            yield int(ids)
    finally:
        net.train(was_training)
