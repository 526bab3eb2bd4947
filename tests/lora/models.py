"""Writes a folder with a tiny language model as users have them: weights, and a tokenizer with a chat template."""

from __future__ import annotations

import json
from pathlib import Path

TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
WORDS = [
    "the",
    "cat",
    "sat",
    "on",
    "a",
    "mat",
    "and",
    "saw",
    "one",
    "red",
    "hat",
    "while",
    "two",
    "dogs",
    "ran",
    "past",
    "it",
    "with",
    "no",
    "care",
    "for",
    "what",
    "they",
    "did",
]

EXTRA_CONFIG: dict[str, dict[str, object]] = {
    "mistral": {"sliding_window": 6},
    "gptj": {"rotary_dim": 8, "n_inner": 48},
    "gemma2": {"sliding_window": 6, "head_dim": 8, "query_pre_attn_scalar": 8},
    "gpt_oss": {"sliding_window": 6, "head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1},
    "mpt": {"max_seq_len": 256},
}  # settings that only these kinds of models need


def sentences(count: int, seed: int = 0) -> list[str]:
    """Returns texts of 3 to 40 words, in which each word is mostly followed by the same next word."""
    import random

    draw, texts = random.Random(seed), []
    for _ in range(count):
        index, words = draw.randrange(len(WORDS)), []
        for _ in range(draw.randint(3, 40)):
            words.append(WORDS[index])
            index = (index + 1) % len(WORDS) if draw.random() < 0.9 else draw.randrange(len(WORDS))
        texts.append(" ".join(words))
    return texts


def write_model(folder: Path, template: str | None = TEMPLATE, kind: str = "llama", layers: int = 2, begins: bool = False) -> Path:
    """Writes a model; with `begins`, its tokenizer puts a begin token before every text, as Llama's does."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedTokenizerFast

    special_tokens = ["<unk>", "</s>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>"]
    words = {word: number for number, word in enumerate(special_tokens + sorted(set(WORDS)) + ["<s>"])}
    core = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    if begins:
        core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", words["<s>"])])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        pad_token="</s>",
        additional_special_tokens=special_tokens[2:],
    )
    tokenizer.chat_template = template
    shape = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": layers, "num_attention_heads": 4, "num_key_value_heads": 2,
        "vocab_size": len(words), "max_position_embeddings": 256, "eos_token_id": 1, "bos_token_id": None,
    }  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**(shape | EXTRA_CONFIG.get(kind, {}))))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_jsonl(path: Path, rows: list[dict[str, object]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
