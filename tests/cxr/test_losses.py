"""The loss: each question reaches its head only, padding weighs nothing, and uncertain labels count as the policy says."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from drivetrain.tasks.cxr.net.losses import GraphTargets, LossWeights, Uncertain, counts, graph_targets, label_targets, losses
from tests.cxr.batches import CLASSES, ENTITIES, REGIONS, random_batch, small_model

WEIGHTS = LossWeights()


def outputs_for(batch: dict[str, Tensor], seed: int = 3) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    images, questions = batch["type"].shape
    corners = torch.rand(images, ENTITIES, 2, 2).sort(2)[0].flatten(2)
    heads = {name: torch.randn(images, questions, count) for name, count in CLASSES.items()}
    return heads | {
        "answer_box": torch.rand(images, questions, 2, 2).sort(2)[0].flatten(2), "chexpert": torch.randn(images, 14),
        "graph_presence": torch.randn(images, ENTITIES), "graph_region": torch.randn(images, ENTITIES, REGIONS), "graph_boxes": corners,
    }  # fmt: skip


def one_question(**targets: int) -> dict[str, Tensor]:
    """Returns a batch of one image with one question and no labels."""
    batch = random_batch(1, 1)
    values = {name: torch.tensor([[targets.get(name, -1)]]) for name in CLASSES}
    return batch | values | {"chexpert": torch.full((1, 14), -2), "has_answer_box": torch.zeros(1, 1, dtype=torch.bool)}


def test_a_question_reaches_the_head_of_its_type_only() -> None:
    batch = one_question(region=4)
    outputs = outputs_for(batch)
    parts = losses(outputs, batch, WEIGHTS, "ignore", ENTITIES)
    expected = -outputs["region"][0, 0].log_softmax(-1)[4]
    assert float(parts["region"][0]) == pytest.approx(0.5 * float(expected)) and int(parts["region"][1]) == 1
    for name in ("binary", "category", "severity", "chexpert", "box"):
        assert float(parts[name][0]) == 0 and int(parts[name][1]) == 0


def test_weights_multiply_their_parts_and_zero_leaves_one_out() -> None:
    batch = random_batch(4, 3)
    outputs = outputs_for(batch)
    plain = losses(outputs, batch, LossWeights(1, 1, 1, 1, 1, 1, 1), "ignore", ENTITIES)
    weighted = losses(outputs, batch, LossWeights(1, 0.5, 0.5, 0.3, 0.3, 0.1, 0), "ignore", ENTITIES)
    assert set(plain) - set(weighted) == {"graph_entity", "graph_region", "graph_box"}
    for name, weight in (("binary", 1), ("category", 0.5), ("region", 0.5), ("severity", 0.3), ("chexpert", 0.3), ("box", 0.1)):
        assert float(weighted[name][0]) == pytest.approx(weight * float(plain[name][0]))
        assert int(weighted[name][1]) == int(plain[name][1])


def padded(batch: dict[str, Tensor], outputs: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Returns the same batch with two questions of padding for each image, with outputs that are far off."""

    def extend(value: Tensor, fill: float) -> Tensor:
        return torch.cat([value, torch.full_like(value[:, :1], fill).expand(-1, 2, *value.shape[2:])], 1)

    heads = {name: extend(batch[name], -1) for name in (*CLASSES, "type", "question")}
    boxes = {name: extend(batch[name], 0) for name in ("answer_boxes", "has_answer_box", "tokens", "num_tokens")}
    return batch | heads | boxes, outputs | {name: extend(outputs[name], 50.0) for name in (*CLASSES, "answer_box")}


def test_questions_of_padding_change_nothing() -> None:
    batch = random_batch(3, 2)
    outputs = outputs_for(batch)
    one = losses(outputs, batch, WEIGHTS, "ignore", ENTITIES)
    more = padded(batch, outputs)
    other = losses(more[1], more[0], WEIGHTS, "ignore", ENTITIES)
    for name, (total, count) in one.items():
        torch.testing.assert_close(other[name][0], total)
        assert int(other[name][1]) == int(count)


def test_micro_batches_add_up() -> None:
    batch = random_batch(5, 3)
    outputs = outputs_for(batch)
    full = losses(outputs, batch, WEIGHTS, "soft", ENTITIES)
    pieces = [
        losses(
            {name: value[rows] for name, value in outputs.items()},
            {name: value[rows] for name, value in batch.items()},
            WEIGHTS,
            "soft",
            ENTITIES,
        )
        for rows in (slice(0, 2), slice(2, 5))
    ]
    for name, (total, count) in full.items():
        torch.testing.assert_close(pieces[0][name][0] + pieces[1][name][0], total)
        assert int(pieces[0][name][1] + pieces[1][name][1]) == int(count)


def test_counts_come_from_the_batch_alone() -> None:
    batch = random_batch(4, 3)
    parts = losses(outputs_for(batch), batch, WEIGHTS, "ignore", ENTITIES)
    known = counts(batch, WEIGHTS, "ignore", ENTITIES)
    assert {name: int(count) for name, count in known.items()} == {name: int(count) for name, (_, count) in parts.items()}


@pytest.mark.parametrize(
    ("policy", "targets", "counted"),
    [
        ("ignore", [1, 0, None, None], 2),
        ("positive", [1, 0, 1, None], 3),
        ("negative", [1, 0, 0, None], 3),
        ("soft", [1, 0, 0.5, None], 3),
    ],
)  # fmt: skip
def test_uncertain_labels_count_as_the_policy_says(policy: Uncertain, targets: list[float | None], counted: int) -> None:
    labels = torch.tensor([[1, 0, -1, -2]])
    target, mask = label_targets(labels, policy)
    assert [float(t) if m else None for t, m in zip(target[0], mask[0], strict=True)] == targets
    batch = one_question() | {"chexpert": torch.cat([labels, torch.full((1, 10), -2)], 1)}
    scores = torch.tensor([[2.0, 1.0, -1.0, 5.0]])
    outputs = outputs_for(batch) | {"chexpert": torch.cat([scores, torch.full((1, 10), 9.0)], 1)}
    by_hand = sum(
        -target * math.log(1 / (1 + math.exp(-score))) - (1 - target) * math.log(1 - 1 / (1 + math.exp(-score)))
        for target, score in zip(targets, scores[0].tolist(), strict=True)
        if target is not None
    )
    total, count = losses(outputs, batch, WEIGHTS, policy, ENTITIES)["chexpert"]
    assert float(total) == pytest.approx(0.3 * by_hand, rel=1e-5) and int(count) == counted


def test_the_graph_to_predict_is_the_first_node_of_each_entity() -> None:
    batch = random_batch(1, 1)
    batch["is_node"] = torch.tensor([[True, True, True, False, False, False]])
    batch["node_entity"] = torch.tensor([[3, 5, 3, 7, 0, 0]])
    batch["node_region"] = torch.tensor([[2, 0, 4, 1, 0, 0]])
    batch["has_box"] = torch.tensor([[True, False, True, True, False, False]])
    targets: GraphTargets = graph_targets(batch, ENTITIES)
    assert targets.is_present[0].nonzero().flatten().tolist() == [3, 5]  # node 3 is padding
    assert targets.region[0, 3] == 2 and targets.region[0, 5] == -1  # region 0 is unknown
    assert targets.has_box[0].nonzero().flatten().tolist() == [3]
    torch.testing.assert_close(targets.boxes[0, 3], batch["boxes"][0, 0])


def test_the_gradient_of_a_dropped_graph_still_teaches_to_predict_it() -> None:
    model, batch = small_model(), random_batch(3, 2) | {"use_graph": torch.zeros(3, dtype=torch.bool)}
    parts = losses(model(batch), batch, WEIGHTS, "ignore", ENTITIES)
    assert int(parts["graph_region"][1]) > 0
    parts["graph_region"][0].backward()
    assert model.graph_predictor.queries.grad is not None and model.graph_predictor.queries.grad.abs().sum() > 0
