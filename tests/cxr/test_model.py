"""The model: padding changes nothing, an image is encoded once, and the graph comes from where the setting says."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from drivetrain.tasks.cxr.net.graph import GraphPredictor, PredictedGraph, nodes_of
from drivetrain.tasks.cxr.net.model import GRAPH_SOURCES, GraphSource
from tests.cxr.batches import CLASSES, ENTITIES, NODES, REGIONS, TOKENS, random_batch, small_model


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    for name, value in one.items():
        torch.testing.assert_close(other[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("source", GRAPH_SOURCES)
def test_outputs_have_their_shapes(source: GraphSource) -> None:
    outputs = small_model()(random_batch(3, 2), source)
    shapes = {name: tuple(value.shape) for name, value in outputs.items()}
    assert shapes == {name: (3, 2, count) for name, count in CLASSES.items()} | {
        "answer_box": (3, 2, 4), "chexpert": (3, 14), "graph_presence": (3, ENTITIES), "graph_region": (3, ENTITIES, REGIONS),
        "graph_boxes": (3, ENTITIES, 4),
    }  # fmt: skip
    assert all(value.isfinite().all() for value in outputs.values())


def test_padded_nodes_and_tokens_change_nothing() -> None:
    model, batch = small_model(), random_batch(4, 2)
    noise = random_batch(4, 2, seed=9)
    is_padding = ~batch["is_node"]
    changed = dict(batch)
    for name in ("node_region", "node_entity"):
        changed[name] = torch.where(is_padding, noise[name].clamp(max=REGIONS - 2) + 1, batch[name])
    changed["boxes"] = torch.where(is_padding[..., None], torch.rand(4, NODES, 4).sort(-1)[0], batch["boxes"])
    changed["has_box"] = batch["has_box"] | is_padding
    is_token = torch.arange(TOKENS) < batch["num_tokens"][..., None]
    changed["tokens"] = torch.where(is_token, batch["tokens"], noise["tokens"])
    assert not torch.equal(changed["boxes"], batch["boxes"]) and not torch.equal(changed["tokens"], batch["tokens"])
    assert_same(model(batch), model(changed))


def test_real_nodes_change_the_answers_but_never_the_labels() -> None:
    model, batch = small_model(), random_batch(4, 2)
    changed = batch | {"node_entity": (batch["node_entity"] % (ENTITIES - 1) + 1) * batch["is_node"]}
    one, other = model(batch), model(changed)
    assert not torch.allclose(one["binary"], other["binary"])
    assert torch.equal(one["chexpert"], other["chexpert"])


def test_a_question_does_not_depend_on_the_others_of_its_image() -> None:
    model, batch = small_model(), random_batch(3, 4)
    alone = {name: value[:, 2:3] if name in ("tokens", "num_tokens") else value for name, value in batch.items()}
    together, single = model(batch), model(alone)
    for name in CLASSES:
        torch.testing.assert_close(together[name][:, 2:3], single[name], rtol=1e-4, atol=1e-5)


def test_an_image_is_encoded_once_for_all_questions() -> None:
    model, batch = small_model(), random_batch(3, 5)
    sizes: list[int] = []
    model.image.register_forward_hook(lambda module, inputs, output: sizes.append(len(output)))
    model(batch)
    assert sizes == [3]


def test_none_and_dropped_graphs_are_the_same() -> None:
    model, batch = small_model(), random_batch(4, 2)
    rows = torch.tensor([True, False, True, False])
    some, none, oracle = model(batch | {"use_graph": rows}), model(batch, "none"), model(batch, "oracle")
    torch.testing.assert_close(some["binary"][rows], oracle["binary"][rows])
    torch.testing.assert_close(some["binary"][~rows], none["binary"][~rows])
    assert not torch.allclose(oracle["binary"], none["binary"])


def test_a_predicted_graph_holds_the_entities_that_are_likelier_present_than_not() -> None:
    presence = torch.full((1, ENTITIES), -2.0)
    presence[0, 0], presence[0, 4], presence[0, 7] = 9.0, 1.0, 3.0  # entity 0 is unknown: it is never a node
    region = torch.zeros(1, ENTITIES, REGIONS)
    region[0, 4, 2] = region[0, 7, 5] = 1
    boxes = torch.linspace(0, 1, ENTITIES)[None, :, None].expand(1, ENTITIES, 4)
    nodes = PredictedGraph(presence, region, boxes).nodes(4)
    assert nodes.is_node.tolist() == [[True, True, False, False]]
    assert nodes.entity.tolist() == [[7, 4, 0, 0]] and nodes.region.tolist() == [[5, 2, 0, 0]]
    assert nodes.boxes[0, 0, 0] == boxes[0, 7, 0] and not nodes.boxes[0, 2:].any()


def test_a_graph_predictor_learns_where_an_entity_is() -> None:
    torch.manual_seed(0)
    predictor = GraphPredictor(16, 3, 4)
    cells = torch.tensor([[0.0, 0.0, 0.5, 1.0], [0.5, 0.0, 1.0, 1.0]])
    grid = torch.zeros(2, 2, 16)
    grid[0, 0], grid[1, 1] = 1, 1  # the entity is left in the first image, right in the second one
    target = torch.stack([cells[0], cells[1]])
    optimizer = torch.optim.Adam(predictor.parameters(), 1e-2)
    for _ in range(80):
        loss = (predictor(grid, cells).boxes[:, 1] - target).abs().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.1


def test_attention_over_the_image_has_the_sum_one() -> None:
    model, batch = small_model(), random_batch(3, 2)
    encoded = model.encode(batch)
    attention = model.attention(encoded, nodes_of(batch))
    assert attention.shape == (3, 2, 2, 2)
    torch.testing.assert_close(attention.sum((-1, -2)), torch.ones(3, 2))


def test_all_parameters_learn() -> None:
    model, batch = small_model().train(), random_batch(4, 3)
    outputs = model(batch | {"use_graph": torch.tensor([True, True, False, True])})
    sum(value.float().square().mean() for value in outputs.values()).backward()  # type: ignore[union-attr]
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []


def test_half_precision_stays_finite() -> None:
    model, batch = small_model(), random_batch(3, 2)
    exact = model(batch)
    with torch.autocast("cpu", torch.bfloat16):
        outputs = model(batch)
    assert all(value.isfinite().all() for value in outputs.values())
    torch.testing.assert_close(outputs["binary"].float(), exact["binary"], rtol=0.1, atol=0.1)


def test_the_model_compiles_to_one_graph() -> None:
    model, batch = small_model(), random_batch(2, 2)
    exported = torch.export.export(model, (batch,), strict=False)  # fails where the host reads a value
    assert_same(model(batch), exported.module()(batch))
