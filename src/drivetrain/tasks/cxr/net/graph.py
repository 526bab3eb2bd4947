"""Scene graphs as tensors, and their prediction from the image."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from drivetrain.tasks.cxr.net.fusion import head
from drivetrain.tasks.cxr.net.regions import box_geometry

EMBEDDING = 64
"""Width of the embeddings of regions and of entities in a node."""
QUERY = 128
"""Width of the queries that look for entities in the image."""


class Nodes(NamedTuple):
    """The nodes of the scene graphs of a batch, padded to one number."""

    boxes: Tensor
    """[n, nodes, 4]: x1, y1, x2, y2 in 0..1 of the image."""
    has_box: Tensor
    region: Tensor
    entity: Tensor
    is_node: Tensor

    def only(self, rows: Tensor) -> Nodes:
        """Returns the nodes without the graphs of all other rows; `rows` are bools [n]."""
        keep = rows[:, None]
        return self._replace(is_node=self.is_node & keep, has_box=self.has_box & keep)


def nodes_of(batch: dict[str, Tensor]) -> Nodes:
    """Returns the nodes of a batch of the data set; of padding, a node has neither box nor names."""
    is_node = batch["is_node"]
    region, entity = (batch[name].long() * is_node for name in ("node_region", "node_entity"))
    return Nodes(batch["boxes"].float() * is_node[..., None], batch["has_box"] & is_node, region, entity, is_node)


class NodeFeatures(nn.Module):
    """A node's box (6 numbers), region and entity to one vector."""

    def __init__(self, num_regions: int, num_entities: int, width: int) -> None:
        super().__init__()
        self.region = nn.Embedding(num_regions, EMBEDDING)
        self.entity = nn.Embedding(num_entities, EMBEDDING)
        self.join = nn.Sequential(nn.Linear(6 + 2 * EMBEDDING, width), nn.LayerNorm(width), nn.GELU(), nn.Linear(width, width))

    def forward(self, nodes: Nodes) -> Tensor:
        geometry = box_geometry(nodes.boxes) * nodes.has_box[..., None]
        region, entity = self.region(nodes.region), self.entity(nodes.entity)
        return self.join(torch.cat([geometry.to(region.dtype), region, entity], -1))  # type: ignore[no-any-return]


class PredictedGraph(NamedTuple):
    """What the image says about each entity: [n, entities], [n, entities, regions], [n, entities, 4]."""

    presence: Tensor
    """Logits."""
    region: Tensor
    """Logits."""
    boxes: Tensor

    def nodes(self, num_nodes: int) -> Nodes:
        """Returns the likeliest entities as nodes; a node is one that is more likely present than not."""
        presence = self.presence.float().index_fill(1, torch.zeros(1, dtype=torch.long, device=self.presence.device), float("-inf"))
        score, entity = presence.topk(min(num_nodes, presence.shape[1]), 1)
        region = self.region.argmax(-1).gather(1, entity)
        boxes = self.boxes.gather(1, entity[..., None].expand(-1, -1, 4))
        is_node = score > 0
        return Nodes(boxes * is_node[..., None], is_node, region * is_node, entity * is_node, is_node)


class GraphPredictor(nn.Module):
    """One query for each entity attends to the image, and predicts whether it is there, in which region, and its box."""

    def __init__(self, width: int, num_regions: int, num_entities: int) -> None:
        super().__init__()
        self.queries = nn.Parameter(torch.randn(num_entities, QUERY) / QUERY**0.5)
        self.key, self.value = nn.Linear(width, QUERY), nn.Linear(width, width)
        self.geometry = nn.Linear(6, QUERY)
        self.norm = nn.LayerNorm(width + QUERY)
        hidden = min(width, 256)
        self.presence = head(width + QUERY, hidden, 1, 0.0)
        self.region = head(width + QUERY, hidden, num_regions, 0.0)
        self.boxes = head(width + QUERY, hidden, 4, 0.0)

    def forward(self, grid: Tensor, cells: Tensor) -> PredictedGraph:
        """`grid`: features of the image's cells [n, cells, width]; `cells`: their boxes [cells, 4]."""
        weights = (self.queries @ self.key(grid).transpose(1, 2)).softmax(-1)
        where = self.geometry((weights.float() @ box_geometry(cells)).to(grid.dtype))
        features = self.norm(torch.cat([weights @ self.value(grid), where + self.queries], -1))
        return PredictedGraph(self.presence(features)[..., 0], self.region(features), corners(self.boxes(features)))


def corners(raw: Tensor) -> Tensor:
    """Returns boxes x1, y1, x2, y2 from four numbers without bounds: centre and size by a sigmoid."""
    centre, half = raw.float().sigmoid().split(2, -1)
    return torch.cat([centre - half / 2, centre + half / 2], -1).clamp(0, 1)
