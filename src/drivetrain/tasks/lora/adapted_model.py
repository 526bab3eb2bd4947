"""A frozen language model with low-rank adapters, as a module whose state dict holds only the adapters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain.outcomes import Problem
from drivetrain.tasks.lora.head_loss import IGNORED, losses, losses_of_logits


class AdaptedModel(nn.Module):
    """Computes the losses of rows of tokens. Checkpoints hold its adapters and a hash of the base, not the base itself."""

    base: Tensor

    def __init__(self, net: Any, digest: bytes) -> None:
        super().__init__()
        self.net = net
        self.register_buffer("base", torch.frombuffer(bytearray(digest), dtype=torch.uint8).clone())
        head = net.get_output_embeddings()
        self.has_fused_attention = net.config._attn_implementation != "eager"
        """Whether attention is torch's own, which takes boolean masks; other implementations add the mask to the scores."""
        if self.has_fused_attention and not _has_sliding_window(net.config):
            net.get_base_model().set_attn_implementation(_register_attention())
        head_is_last = any(child is head for child in net.get_base_model().children())  # else a larger last module contains it
        self._has_linear_head = (
            type(head) is nn.Linear and head_is_last and not head.weight.requires_grad and not _changes_logits(net.config)
        )
        """Whether the head only multiplies by a frozen matrix."""

    def forward(self, tokens: Tensor, document: Tensor, learned: Tensor, single_document: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """Returns (the summed loss, each row's loss, each row's number of learned tokens).

        `single_document` says that no row has more than one document, so that attention needs no mask.
        """
        ids = tokens.long()
        is_target = learned[:, 1:] & (document[:, 1:] == document[:, :-1])
        targets = torch.where(is_target, ids[:, 1:], IGNORED)
        targets = torch.nn.functional.pad(targets, (0, 1), value=IGNORED).flatten()
        attention = {} if single_document else self._attention_arguments(document)
        if self._has_linear_head:
            states = self.net.get_base_model().get_decoder()(input_ids=ids, use_cache=False, **attention).last_hidden_state
            head = self.net.get_output_embeddings()  # not stored: a sharded model replaces its weights
            total, token_losses = losses(states.flatten(0, 1), head.weight, head.bias, targets)
        else:
            total, token_losses = losses_of_logits(self.net(input_ids=ids, use_cache=False, **attention).logits.flatten(0, 1), targets)
        return total, token_losses.view(tokens.shape).sum(1), is_target.sum(1)

    def _attention_arguments(self, document: Tensor) -> dict[str, Any]:
        """Returns positions and a mask: a token sees earlier tokens of the same document. Padding comes last, so no token sees it."""
        length = document.shape[1]
        index = torch.arange(length, device=document.device)
        is_first = torch.nn.functional.pad(document[:, 1:] != document[:, :-1], (1, 0), value=True)
        positions = index - torch.cummax(torch.where(is_first, index, 0), 1).values
        if self.has_fused_attention and _has_sliding_window(self.net.config, length):
            return {"position_ids": positions}  # layers have different windows: transformers finds the documents by the positions
        distance = index[:, None] - index
        is_seen = (document[:, None, :, None] == document[:, None, None, :]) & (distance >= 0)
        return {
            "position_ids": positions,
            "attention_mask": is_seen if self.has_fused_attention else self._additive_mask(is_seen, distance),
        }

    def _additive_mask(self, is_seen: Tensor, distance: Tensor) -> Any:
        """Returns the mask to add to scores: 0 for visible tokens, else the lowest number; a dict by kind if layers have several kinds."""
        config, dtype = self.net.config, self.net.get_base_model().dtype
        is_near = is_seen & (distance < config.sliding_window) if _has_sliding_window(config) else is_seen

        def additive(mask: Tensor) -> Tensor:
            return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, torch.finfo(dtype).min)

        kinds = getattr(config, "layer_types", None)
        if not kinds:
            return additive(is_near)
        return {kind: additive(is_near if kind == "sliding_attention" else is_seen) for kind in sorted(set(kinds))}

    @torch.no_grad()
    def separates_documents(self) -> bool:
        """Whether a document gets the same logits after another document as alone: a check for models with their own attention."""
        device = next(self.net.parameters()).device
        document = torch.tensor([[1] * 6 + [2] * 8], device=device)
        tokens = torch.arange(14, device=device)[None] % self.net.config.vocab_size
        try:
            packed = self.net(input_ids=tokens, use_cache=False, **self._attention_arguments(document)).logits[:, 6:].float()
        except Exception:  # the model does not accept the mask
            return False
        alone = self.net(input_ids=tokens[:, 6:], use_cache=False).logits.float()
        return bool((packed - alone).norm() < 0.1 * alone.norm())

    def convert_base(self, dtype: torch.dtype) -> None:
        """Converts the frozen parameters to this dtype, one by one to save memory."""
        for parameter in self.net.parameters():
            if not parameter.requires_grad and parameter.is_floating_point():
                parameter.data = parameter.data.to(dtype)

    # --- state ---

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        saved = {name for name, p in self.named_parameters() if p.requires_grad} | {"base"}
        return {name: value for name, value in super().state_dict(*args, **kwargs).items() if name in saved}

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        digest = state_dict.get("base")
        if digest is not None and not torch.equal(torch.as_tensor(digest).cpu(), self.base.cpu()):
            raise Problem("these adapters were trained on another base model: its weights have changed since, or base= names another one")
        return super().load_state_dict(state_dict, strict=False, assign=assign)


def _changes_logits(config: Any) -> bool:
    """Whether the model changes logits after the head (by a scale or a cap)."""
    settings = ((name, value) for name, value in config.to_dict().items() if "logit" in name or "lm_head" in name)
    return any(isinstance(value, (int, float)) and not isinstance(value, bool) and value != 1 for _, value in settings)


def _has_sliding_window(config: Any, length: int | None = None) -> bool:
    """Whether layers see only a window of tokens; with `length`, whether rows are longer than the window."""
    window = getattr(config, "sliding_window", None)
    return window is not None and (length is None or window < length) and getattr(config, "use_sliding_window", True)


def _register_attention() -> str:
    """Registers an attention function that uses masks unchanged, and returns its name.

    For rows without a mask, transformers' own function searches positions for documents, which makes the host wait for the device.
    """
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    AttentionInterface.register("as_given", sdpa_attention_forward)
    return "as_given"
