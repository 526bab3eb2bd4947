"""Random batches in the form of the data set, and a small model for them."""

from __future__ import annotations

import torch
from torch import Tensor

from drivetrain.tasks.cxr.net.encoders import build_image_encoder
from drivetrain.tasks.cxr.net.model import CxrModel, ModelSizes
from drivetrain.tasks.cxr.net.text_encoders import build_small

REGIONS, ENTITIES, WORDS, NODES, TOKENS, SIZE = 9, 12, 50, 6, 10, 64
CLASSES = {"binary": 2, "category": 14, "region": REGIONS, "severity": 4}
HEAD_NAMES = tuple(CLASSES)


def small_model(dropout: float = 0.0) -> CxrModel:
    torch.manual_seed(1)
    image = build_image_encoder("nano", "none")
    sizes = ModelSizes(REGIONS, ENTITIES, CLASSES, width=32, heads=2, layers=2, dropout=dropout, max_nodes=NODES)
    return CxrModel(image, build_small(WORDS, 32, 1, TOKENS, dropout), image.num_features, 32, sizes).eval()


def random_batch(images: int = 3, questions: int = 2, seed: int = 0) -> dict[str, Tensor]:
    """Returns a batch in which every question has a target of one head, and every image some nodes."""
    torch.manual_seed(seed)
    corners = torch.rand(images, NODES, 2, 2).sort(2)[0]
    head = torch.randint(0, 4, (images, questions))
    targets = {
        name: torch.where(head == place, torch.randint(0, CLASSES[name], head.shape), -1).short() for place, name in enumerate(HEAD_NAMES)
    }
    is_node = torch.arange(NODES) < torch.randint(1, NODES, (images, 1))
    answer = torch.rand(images, questions, 2, 2).sort(2)[0].flatten(2)
    has_answer_box = torch.rand(images, questions) < 0.7
    return targets | {
        "image": torch.randint(0, 256, (images, 1, SIZE, SIZE), dtype=torch.uint8),
        "boxes": corners.flatten(2) * is_node[..., None],
        "has_box": is_node & (torch.rand(images, NODES) < 0.8),
        "node_region": torch.randint(1, REGIONS, (images, NODES)).short() * is_node,
        "node_entity": torch.randint(1, ENTITIES, (images, NODES)).short() * is_node,
        "is_node": is_node,
        "tokens": torch.randint(1, WORDS, (images, questions, TOKENS)).int(),
        "num_tokens": torch.randint(1, TOKENS, (images, questions)).short(),
        "type": head.to(torch.int8),
        "chexpert": torch.randint(-2, 2, (images, 14)).to(torch.int8),
        "answer_boxes": answer * has_answer_box[..., None],
        "has_answer_box": has_answer_box,
        "question": torch.arange(images * questions).view(images, questions),
        "image_row": torch.arange(images),
    }
