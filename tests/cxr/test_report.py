"""The metrics of an evaluation: by head, type, region and label, and with each source of the graph."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from drivetrain.tasks.cxr.net.graph import Nodes
from drivetrain.tasks.cxr.net.losses import HEADS, LossWeights, Uncertain
from drivetrain.tasks.cxr.net.model import GRAPH_SOURCES, Encoded, GraphSource
from drivetrain.tasks.cxr.scoring.answers import ClassNames
from drivetrain.tasks.cxr.scoring.evaluation import evaluate, pointing, routed
from drivetrain.tasks.cxr.scoring.report import Scoring, summarise
from drivetrain.tasks.cxr.scoring.texts import AnswerTexts
from drivetrain.tasks.cxr.vocabulary import CHEXPERT, QUESTION_TYPES
from tests.cxr.batches import CLASSES, random_batch, small_model

REGION_NAMES = ("unknown", "left lung", "right lung")


def scoring(uncertain: Uncertain = "ignore", samples_of_image: list[int] | None = None) -> Scoring:
    texts = AnswerTexts(ClassNames(REGION_NAMES), lambda question: "There is no effusion in the left lung.")
    return Scoring("none", LossWeights(), uncertain, REGION_NAMES, np.array(samples_of_image or [1] * 100), texts)


def values(head: list[int], target: list[int], answer: list[int], kind: list[int] | None = None) -> dict[str, Tensor]:
    """Returns values of samples with one question each."""
    count = len(head)
    column = {"head": head, "target": target, "type": kind or [0] * count, "answer_none": answer, "answer_oracle": target}
    return {name: torch.tensor(value)[:, None] for name, value in column.items()} | {
        "answer_predicted": torch.zeros(count, 1, dtype=torch.long), "head_loss": torch.ones(count, 1), "question": torch.arange(count)[:, None],
        "is_inside": torch.full((count, 1), -1), "image": torch.arange(count), "chexpert_score": torch.zeros(count, 14),
        "chexpert_label": torch.full((count, 14), -2), "chexpert_loss": torch.full((count, 14), math.nan),
    }  # fmt: skip


def test_accuracies_by_head_type_and_region() -> None:
    found = summarise(values([0, 0, 2, 2, 2, -1], [1, 0, 1, 1, 2, -1], [1, 1, 1, 2, 2, 0], [3, 3, 15, 15, 16, -1]), scoring())
    assert found["accuracy"] == pytest.approx(3 / 5)  # the sample without a head does not count
    assert found["binary_accuracy"] == 0.5 and found["region_accuracy"] == pytest.approx(2 / 3)
    assert found["accuracy_oracle"] == 1 and found["region_accuracy_predicted"] == 0
    assert "severity_accuracy" not in found
    assert found["accuracy by question type"] == {QUESTION_TYPES[3]: 0.5, QUESTION_TYPES[15]: 0.5, QUESTION_TYPES[16]: 1}
    assert found["accuracy by region"] == {"left lung": 0.5, "right lung": 1}
    assert found["macro F1 by head"] == {"binary": pytest.approx(1 / 3), "region": pytest.approx(2 / 3)}
    assert found["yes or no"]["sensitivity"] == 1 and found["yes or no"]["specificity"] == 0
    assert found["loss"] == pytest.approx(1 + 0.5)
    assert found["answers as text"] == {
        "exact match": 3 / 5, "token F1": pytest.approx(3.5 / 5), "ROUGE-L": pytest.approx(0.8 / 5), "BLEU-4": 0.0,
    }  # fmt: skip


def label_values(scores: list[float], labels: list[int], images: list[int]) -> dict[str, Tensor]:
    found = values([0] * len(scores), [0] * len(scores), [0] * len(scores))
    found["image"] = torch.tensor(images)
    found["chexpert_score"][:, 2], found["chexpert_label"][:, 2] = torch.tensor(scores), torch.tensor(labels)
    return found


def test_a_label_has_an_auroc_where_it_has_enough_images() -> None:
    scores, labels = [float(i) for i in range(12)], [0] * 6 + [1] * 6
    found = summarise(label_values(scores, labels, list(range(12))), scoring())
    assert found["AUROC by label"] == {CHEXPERT[2]: 1} and found["chexpert_auroc"] == 1
    assert "chexpert_auroc" not in summarise(label_values(scores[:9], labels[:9], list(range(9))), scoring())


def test_every_image_counts_once_whatever_its_number_of_samples() -> None:
    scores, labels = [float(i % 7) for i in range(12)], [int(i > 4) for i in range(12)]
    once = summarise(label_values(scores, labels, list(range(12))), scoring())
    repeated = summarise(
        label_values(scores + scores[:1] * 4, labels + labels[:1] * 4, [*range(12), 0, 0, 0, 0]), scoring(samples_of_image=[5] + [1] * 11)
    )
    assert repeated["chexpert_auroc"] == pytest.approx(once["chexpert_auroc"])


def test_the_loss_of_the_labels_counts_every_image_once() -> None:
    found = values([-1] * 4, [-1] * 4, [0] * 4)
    found["image"], found["chexpert_loss"][:, 0] = torch.tensor([0, 0, 0, 1]), torch.tensor([1.0, 1.0, 1.0, 3.0])
    assert summarise(found, scoring(samples_of_image=[3, 1]))["loss"] == pytest.approx(0.3 * 2)


@pytest.mark.parametrize(("policy", "auroc"), [("ignore", 1.0), ("soft", 1.0), ("positive", 36 / 42), ("negative", 1.0)])
def test_uncertain_labels_count_in_the_auroc_as_the_policy_says(policy: Uncertain, auroc: float) -> None:
    scores, labels = [float(i) for i in range(13)], [-1] + [0] * 6 + [1] * 6  # the uncertain one has the lowest score
    found = summarise(label_values(scores, labels, list(range(13))), scoring(policy))
    assert found["chexpert_auroc"] == pytest.approx(auroc)


def test_random_answers_give_chance() -> None:
    rng = np.random.default_rng(0)
    found = label_values(rng.normal(size=3000).tolist(), rng.integers(0, 2, 3000).tolist(), list(range(3000)))
    found["target"], found["answer_none"] = (torch.from_numpy(rng.integers(0, 2, (3000, 1))) for _ in range(2))
    result = summarise(found, scoring(samples_of_image=[1] * 3000))
    assert result["binary_accuracy"] == pytest.approx(0.5, abs=0.05)
    assert result["chexpert_auroc"] == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize(
    ("peak", "box", "is_hit"),
    [
        ((0, 3), (0.7, 0.0, 1.0, 0.4), 1),  # row 0, column 3 of a map of 2 x 4 cells: x is the column
        ((0, 3), (0.0, 0.6, 0.4, 1.0), 0),  # the same box with x and y exchanged
        ((1, 0), (0.0, 0.6, 0.4, 1.0), 1),
        ((1, 0), (0.02, 0.92, 0.06, 0.98), 1),  # a small box in the corner of the cell: no centre of a cell is in it
        ((1, 1), (0.02, 0.92, 0.06, 0.98), 0),
        ((0, 2), (0.0, 0.0, 1.0, 1.0), 1),
    ],
)  # fmt: skip
def test_pointing_asks_whether_the_peak_is_in_the_box(peak: tuple[int, int], box: tuple[float, ...], is_hit: int) -> None:
    attention = torch.full((1, 2, 2, 4), 0.1)
    attention[0, 0][peak] = 0.9
    boxes = torch.tensor([[box, (0, 0, 0, 0)]]).float()
    found = pointing(attention, {"answer_boxes": boxes, "has_answer_box": torch.tensor([[True, False]])})
    assert found.tolist() == [[is_hit, -1]]


def test_the_overlap_of_boxes_is_that_with_the_answers_box() -> None:
    """A model with known boxes: the overlaps of the evaluation are those by hand."""
    model, batch = small_model(), random_batch(1, 3)
    predicted = torch.tensor([[(0.0, 0.0, 0.5, 1.0), (0.5, 0.5, 1.0, 1.0), (0.0, 0.0, 0.4, 0.4)]])
    batch["answer_boxes"] = torch.tensor([[(0.25, 0.0, 0.75, 1.0), (0.5, 0.5, 1.0, 1.0), (0.6, 0.6, 0.9, 0.9)]])
    batch["has_answer_box"] = torch.ones(1, 3, dtype=torch.bool)
    plain_answer = model.answer
    model.answer = lambda encoded, nodes: plain_answer(encoded, nodes) | {"answer_box": predicted}  # type: ignore[method-assign]
    with torch.no_grad():
        found = evaluate(model, batch, "none", "ignore", True)
    assert found["box_overlap"][0].tolist() == pytest.approx([1 / 3, 1, 0])


def test_each_source_of_the_graph_gives_its_own_answers() -> None:
    """Answers of a model whose graph decides them: with all sources alike, or one in place of another, they would differ."""
    model, batch = small_model(), random_batch(4, 2)
    chosen: list[str] = []
    plain_nodes, plain_answer = model.nodes, model.answer

    def nodes(batch: dict[str, Tensor], encoded: Encoded, source: GraphSource) -> Nodes:
        chosen.append(source)
        return plain_nodes(batch, encoded, source)

    def answer(encoded: Encoded, nodes: Nodes) -> dict[str, Tensor]:
        place = GRAPH_SOURCES.index(chosen[-1])  # type: ignore[arg-type]
        logits = {name: F.one_hot(torch.tensor(place % CLASSES[name]), CLASSES[name]).float().expand(4, 2, -1) for name in HEADS}
        return plain_answer(encoded, nodes) | logits

    model.nodes, model.answer = nodes, answer  # type: ignore[method-assign]
    batch |= {name: torch.full((4, 2), -1).short() for name in HEADS} | {"region": torch.tensor([[0, 1], [1, 1], [2, 2], [2, 2]]).short()}
    with torch.no_grad():
        found = evaluate(model, batch, "none", "ignore", True)
    assert [int(found[f"answer_{source}"][0, 0]) for source in GRAPH_SOURCES] == [0, 1, 2]
    result = summarise(found, scoring(samples_of_image=[1] * 4))
    assert (result["accuracy"], result["accuracy_oracle"], result["accuracy_predicted"]) == (1 / 8, 3 / 8, 4 / 8)


def test_the_sources_of_the_graph_differ() -> None:
    model, batch = small_model(), random_batch(3, 2)
    with torch.no_grad():
        encoded = model.encode(batch)
        none, oracle, predicted = (model.nodes(batch, encoded, source) for source in GRAPH_SOURCES)
    assert GRAPH_SOURCES == ("none", "oracle", "predicted")
    assert not none.is_node.any()
    assert oracle.is_node.equal(batch["is_node"]) and oracle.boxes.equal(batch["boxes"])
    own = model.predict_graph(encoded).nodes(model.sizes.max_nodes)
    assert predicted.is_node.equal(own.is_node) and predicted.boxes.equal(own.boxes) and not predicted.boxes.equal(oracle.boxes)


def test_an_evaluation_keeps_what_the_report_needs() -> None:
    model, batch = small_model(), random_batch(6, 3)
    with torch.no_grad():
        found = evaluate(model, batch, "none", "ignore", True)
    assert all(len(value) == 6 for value in found.values())
    head, target = routed(batch)
    outputs = model(batch, "none")
    for row in range(6):
        for column in range(3):
            name = HEADS[int(head[row, column])]
            assert int(found["answer_none"][row, column]) == int(outputs[name][row, column].argmax())
            assert int(target[row, column]) == int(batch[name][row, column])
            expected = -outputs[name][row, column].log_softmax(-1)[target[row, column]]
            torch.testing.assert_close(found["head_loss"][row, column], expected)
    assert ((found["is_inside"] >= 0) == batch["has_answer_box"]).all()
    regions = [str(number) for number in range(9)]
    result = summarise(
        found, Scoring("none", LossWeights(), "ignore", regions, np.ones(6), AnswerTexts(ClassNames(regions), lambda question: ""))
    )
    assert {"accuracy", "accuracy_oracle", "accuracy_predicted", "pointing", "box_iou", "loss"} <= set(result)
