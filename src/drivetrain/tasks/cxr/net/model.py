"""The network: encodes an image once for its questions, and answers each with and without a scene graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from drivetrain.tasks.cxr.net.encoders import GreyImages
from drivetrain.tasks.cxr.net.fusion import Fusion, TokenSet, head, is_token
from drivetrain.tasks.cxr.net.graph import GraphPredictor, NodeFeatures, Nodes, PredictedGraph, corners, nodes_of
from drivetrain.tasks.cxr.net.regions import box_geometry, box_means

GraphSource = Literal["oracle", "none", "predicted"]
GRAPH_SOURCES: tuple[GraphSource, ...] = ("none", "oracle", "predicted")
HIDDEN = {"binary": 256, "category": 512, "region": 512, "severity": 128}
"""Hidden width of each question head."""
NUM_LABELS = 14
CROP = 512
"""Width of the layer that reads a feature of the image."""


@dataclass(frozen=True)
class ModelSizes:
    """Sizes of the parts between the encoders and the answers."""

    num_regions: int
    num_entities: int
    classes: dict[str, int]
    """Question head -> number of its classes."""
    width: int = 768
    heads: int = 12
    layers: int = 2
    dropout: float = 0.1
    max_nodes: int = 64


class Encoded(NamedTuple):
    """An image and its questions after their encoders."""

    features: Tensor
    """The feature map [n, channels, height, width]."""
    grid: Tensor
    """Its cells as tokens [n, cells, width]."""
    cells: Tensor
    """Their boxes [cells, 4]."""
    text: TokenSet
    """The questions: [n x questions, tokens, width]."""
    num_questions: int


class CxrModel(nn.Module):
    """Answers questions on a chest X-ray, and labels it."""

    def __init__(self, image: nn.Module, text: nn.Module, channels: int, text_width: int, sizes: ModelSizes) -> None:
        super().__init__()
        self.sizes, width = sizes, sizes.width
        self.grey, self.image, self.text = GreyImages(), image, text
        self.read_text = nn.Linear(text_width, width) if text_width != width else nn.Identity()
        self.crop = nn.Sequential(nn.Linear(channels, CROP), nn.LayerNorm(CROP), nn.GELU(), nn.Linear(CROP, width))
        self.position = nn.Linear(6, width)
        self.node_features = NodeFeatures(sizes.num_regions, sizes.num_entities, width)
        self.graph_predictor = GraphPredictor(width, sizes.num_regions, sizes.num_entities)
        self.fusion = Fusion(width, sizes.heads, sizes.layers, sizes.dropout)
        self.answers = nn.ModuleDict({name: head(width, HIDDEN[name], count, sizes.dropout) for name, count in sizes.classes.items()})
        self.answer_box = head(width, 256, 4, sizes.dropout)
        self.labels = head(width, 512, NUM_LABELS, sizes.dropout)

    def encode(self, batch: dict[str, Tensor]) -> Encoded:
        """Encodes the images, and all questions of the batch at once."""
        features = self.image(self.grey(batch["image"]))
        tokens, num_tokens = batch["tokens"].flatten(0, 1), batch["num_tokens"].flatten()
        real = is_token(num_tokens, tokens.shape[1])
        text = TokenSet(self.read_text(self.text(tokens, real)), real)
        cells = cell_boxes(features.shape[-2], features.shape[-1], features.device)
        grid = self.crop(features.flatten(2).transpose(1, 2))
        return Encoded(features, grid + self._positions(cells, grid), cells, text, batch["tokens"].shape[1])

    def _positions(self, boxes: Tensor, like: Tensor) -> Tensor:
        return self.position(box_geometry(boxes).to(like.dtype))  # type: ignore[no-any-return]

    def _tokens(self, encoded: Encoded, nodes: Nodes) -> tuple[TokenSet, TokenSet, TokenSet]:
        """Returns the visual tokens (cells of the image, then crops of the nodes), the text and the graph for each question."""
        # A node without a box shows the whole image.
        means = box_means(encoded.features, nodes.boxes)
        mean = encoded.features.flatten(2).mean(-1)[:, None]
        crops = self.crop(torch.where(nodes.has_box[..., None], means, mean.to(means.dtype)))
        crops = crops + self._positions(nodes.boxes, crops)
        is_cell = torch.ones(encoded.grid.shape[:2], dtype=torch.bool, device=crops.device)
        visual = TokenSet(torch.cat([encoded.grid, crops], 1), torch.cat([is_cell, nodes.is_node], 1))
        scene = TokenSet(self.node_features(nodes), nodes.is_node)
        return visual.repeat(encoded.num_questions), encoded.text, scene.repeat(encoded.num_questions)

    def answer(self, encoded: Encoded, nodes: Nodes) -> dict[str, Tensor]:
        """Returns the logits of each question head [n, questions, classes] and the predicted `answer_box` [n, questions, 4]."""
        joined = self.fusion(*self._tokens(encoded, nodes)).unflatten(0, (-1, encoded.num_questions))
        answers = {name: module(joined) for name, module in self.answers.items()}
        return answers | {"answer_box": corners(self.answer_box(joined))}

    def attention(self, encoded: Encoded, nodes: Nodes) -> Tensor:
        """Returns how each question attends to the cells of the image: [n, questions, height, width], with the sum 1."""
        weights = self.fusion.attention(*self._tokens(encoded, nodes))[:, : encoded.grid.shape[1]]
        weights = weights / weights.sum(-1, keepdim=True).clamp(min=1e-9)
        height, width = encoded.features.shape[-2:]
        return weights.unflatten(-1, (height, width)).unflatten(0, (-1, encoded.num_questions))  # type: ignore[no-any-return]

    def label(self, encoded: Encoded) -> Tensor:
        """Returns the logits of the CheXpert labels. They depend on the image alone: no box of a graph can reveal them."""
        return self.labels(encoded.grid.mean(1))  # type: ignore[no-any-return]

    def predict_graph(self, encoded: Encoded) -> PredictedGraph:
        return self.graph_predictor(encoded.grid, encoded.cells)  # type: ignore[no-any-return]

    def nodes(self, batch: dict[str, Tensor], encoded: Encoded, source: GraphSource) -> Nodes:
        """Returns the nodes of the scene graphs from the index, none, or those that the model predicts."""
        if source == "predicted":
            return self.predict_graph(encoded).nodes(self.sizes.max_nodes)
        nodes = nodes_of(batch)
        if source == "none":
            return nodes.only(torch.zeros_like(nodes.is_node[:, 0]))
        return nodes

    def forward(self, batch: dict[str, Tensor], source: GraphSource = "oracle") -> dict[str, Tensor]:
        """Returns the logits of all heads. In a training batch, `use_graph` [n] says which images keep their graph."""
        encoded = self.encode(batch)
        nodes = self.nodes(batch, encoded, source)
        if "use_graph" in batch:
            nodes = nodes.only(batch["use_graph"])
        graph = self.predict_graph(encoded)
        return self.answer(encoded, nodes) | {
            "chexpert": self.label(encoded),
            "graph_presence": graph.presence,
            "graph_region": graph.region,
            "graph_boxes": graph.boxes,
        }


def cell_boxes(height: int, width: int, device: torch.device) -> Tensor:
    """Returns the boxes of the cells of a feature map, row by row: [cells, 4]."""
    y, x = (torch.arange(size, device=device) / size for size in (height, width))
    corner = torch.stack(torch.meshgrid(x, y, indexing="xy"), -1).flatten(0, 1)
    size = torch.stack([torch.full_like(corner[:, 0], 1 / width), torch.full_like(corner[:, 0], 1 / height)], -1)
    return torch.cat([corner, corner + size], -1)
