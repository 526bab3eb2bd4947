"""Images and questions without a scene graph: the graph that `export` writes, and the empty entries of their batch."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from drivetrain.tasks.cxr.net.model import CxrModel


class AnswerGraph(nn.Module):
    """The model for `export`: an image and questions to the logits of all heads, without a scene graph."""

    def __init__(self, model: CxrModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, image: Tensor, tokens: Tensor, num_tokens: Tensor) -> dict[str, Tensor]:
        batch = {"image": image, "tokens": tokens, "num_tokens": num_tokens} | empty_graph(len(image), 1, image.device)
        encoded = self.model.encode(batch)
        outputs = self.model.answer(encoded, self.model.nodes(batch, encoded, "none"))
        return outputs | {"chexpert": self.model.label(encoded)}


def empty_graph(images: int, nodes: int, device: torch.device) -> dict[str, Tensor]:
    """Returns the entries of a batch for images without a scene graph."""
    no = torch.zeros(images, nodes, dtype=torch.bool, device=device)
    return {
        "boxes": no[..., None].expand(-1, -1, 4).float(),
        "has_box": no,
        "is_node": no,
        "node_region": no.short(),
        "node_entity": no.short(),
    }
