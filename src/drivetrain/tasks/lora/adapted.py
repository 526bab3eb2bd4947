"""A frozen language model with low-rank adapters, as a module whose state is the adapters alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain.outcomes import Problem
from drivetrain.tasks.lora.head import IGNORED, losses, plain_losses


class Adapted(nn.Module):
    """Gives the losses of rows of tokens. What is saved of it is what it learns: the base is where it was."""

    base: Tensor

    def __init__(self, net: Any, digest: bytes) -> None:
        super().__init__()
        self.net = net
        self.register_buffer("base", torch.frombuffer(bytearray(digest), dtype=torch.uint8).clone())
        head = net.get_output_embeddings()
        self.fused = net.config._attn_implementation != "eager"
        """Whether its attention is torch's own, which takes masks of truths; others add numbers to their scores."""
        if self.fused and not _slides(net.config):
            net.get_base_model().set_attn_implementation(_attention())
        last = any(child is head for child in net.get_base_model().children())  # else it is a part of what comes at the end
        self._multiplies = type(head) is nn.Linear and last and not head.weight.requires_grad and not _changes_logits(net.config)
        """Whether the head is a frozen matrix and nothing else."""

    def forward(self, tokens: Tensor, document: Tensor, learned: Tensor, alone: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """(the summed loss, each row's, each row's number of learned tokens); alone, no row has more than one document."""
        ids = tokens.long()
        follows = learned[:, 1:] & (document[:, 1:] == document[:, :-1])
        targets = torch.where(follows, ids[:, 1:], IGNORED)
        targets = torch.nn.functional.pad(targets, (0, 1), value=IGNORED).flatten()
        how = {} if alone else self._attending(document)
        if self._multiplies:
            states = self.net.get_base_model().get_decoder()(input_ids=ids, use_cache=False, **how).last_hidden_state
            head = self.net.get_output_embeddings()  # looked up each time: a sharded model's weights come and go
            total, each = losses(states.flatten(0, 1), head.weight, head.bias, targets)
        else:
            total, each = plain_losses(self.net(input_ids=ids, use_cache=False, **how).logits.flatten(0, 1), targets)
        return total, each.view(tokens.shape).sum(1), follows.sum(1)

    def _attending(self, document: Tensor) -> dict[str, Any]:
        """Which tokens see which: those before them in the same document. Padding comes last, where nothing looks back at it."""
        length = document.shape[1]
        place = torch.arange(length, device=document.device)
        begins = torch.nn.functional.pad(document[:, 1:] != document[:, :-1], (1, 0), value=True)
        positions = place - torch.cummax(torch.where(begins, place, 0), 1).values
        if self.fused and _slides(self.net.config, length):
            return {"position_ids": positions}  # its layers see differently far: transformers finds the documents by these
        distance = place[:, None] - place
        seen = (document[:, None, :, None] == document[:, None, None, :]) & (distance >= 0)
        return {"position_ids": positions, "attention_mask": seen if self.fused else self._added(seen, distance)}

    def _added(self, seen: Tensor, distance: Tensor) -> Any:
        """What is added to scores: nothing where a token is seen, the least number where it is not; for each kind of layers."""
        config, kind = self.net.config, self.net.get_base_model().dtype
        near = seen & (distance < config.sliding_window) if _slides(config) else seen

        def numbers(seen: Tensor) -> Tensor:
            return torch.zeros(seen.shape, dtype=kind, device=seen.device).masked_fill(~seen, torch.finfo(kind).min)

        kinds = getattr(config, "layer_types", None)
        if not kinds:
            return numbers(near)
        return {kind: numbers(near if kind == "sliding_attention" else seen) for kind in sorted(set(kinds))}

    @torch.no_grad()
    def keeps_apart(self) -> bool:
        """Whether a document beside another one gets what it gets alone: asked of models whose code is their own."""
        place = next(self.net.parameters()).device
        document = torch.tensor([[1] * 6 + [2] * 8], device=place)
        tokens = torch.arange(14, device=place)[None] % self.net.config.vocab_size
        try:
            beside = self.net(input_ids=tokens, use_cache=False, **self._attending(document)).logits[:, 6:].float()
        except Exception:  # what a model makes of a mask that it does not know
            return False
        alone = self.net(input_ids=tokens[:, 6:], use_cache=False).logits.float()
        return bool((beside - alone).norm() < 0.1 * alone.norm())

    def narrow(self, kind: torch.dtype) -> None:
        """Keep what is frozen in this precision, one tensor after the other."""
        for parameter in self.net.parameters():
            if not parameter.requires_grad and parameter.is_floating_point():
                parameter.data = parameter.data.to(kind)

    # --- state ---

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        wanted = {name for name, p in self.named_parameters() if p.requires_grad} | {"base"}
        return {name: value for name, value in super().state_dict(*args, **kwargs).items() if name in wanted}

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        given = state_dict.get("base")
        if given is not None and not torch.equal(torch.as_tensor(given).cpu(), self.base.cpu()):
            raise Problem("these adapters were trained on another base model: its weights have changed since, or base= names another one")
        return super().load_state_dict(state_dict, strict=False, assign=assign)


def _changes_logits(config: Any) -> bool:
    """Whether something is done to logits after the head."""
    figures = ((name, value) for name, value in config.to_dict().items() if "logit" in name or "lm_head" in name)
    return any(isinstance(value, (int, float)) and not isinstance(value, bool) and value != 1 for _, value in figures)


def _slides(config: Any, length: int | None = None) -> bool:
    """Whether layers see only so far back; given a length, only if rows are longer than that."""
    window = getattr(config, "sliding_window", None)
    return window is not None and (length is None or window < length) and getattr(config, "use_sliding_window", True)


def _attention() -> str:
    """The name of an attention that takes masks as they are given: transformers' own looks for documents in the positions of
    rows without a mask, and the host waits for the device's answer at every step."""
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    AttentionInterface.register("as_given", sdpa_attention_forward)
    return "as_given"
