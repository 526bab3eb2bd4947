"""Samples: what a batch holds, that an epoch visits every question once, and which image and questions a sample has."""

from __future__ import annotations

import pickle
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from drivetrain.outcomes import Problem
from drivetrain.tasks.cxr.data.columns import CxrIndex
from drivetrain.tasks.cxr.data.samples import CxrDataset, collate
from drivetrain.tasks.cxr.data.words import all_words, words_of
from drivetrain.tasks.cxr.vocabulary import CHEXPERT, HEADS, QUESTION_TYPES
from tests.cxr.small_data import answer, boxes, build, question, write_data


class Words:
    """A tokenizer with a number for each word."""

    def __init__(self, key: str = "words") -> None:
        self.key, self.calls, self.ids = key, 0, dict[str, int]()

    def encode(self, texts: list[str]) -> list[list[int]]:
        self.calls += 1
        return [[self.ids.setdefault(word, len(self.ids) + 1) for word in words_of(text)] for text in texts]


def test_a_batch_has_the_agreed_tensors(twin_index: CxrIndex) -> None:
    data = CxrDataset(twin_index, "train", tokenizer=Words(), questions_per_image=4, size=48, grade="B", max_tokens=16)
    batch = collate([data[i] for i in range(3)])
    n, forms = data.num_nodes, dict.fromkeys(HEADS, (torch.int16, (3, 4)))
    forms |= {
        "image": (torch.uint8, (3, 1, 48, 48)), "boxes": (torch.float32, (3, n, 4)), "has_box": (torch.bool, (3, n)),
        "node_region": (torch.int16, (3, n)), "node_entity": (torch.int16, (3, n)), "is_node": (torch.bool, (3, n)),
        "tokens": (torch.int32, (3, 4, 16)), "num_tokens": (torch.int16, (3, 4)), "type": (torch.int8, (3, 4)),
        "chexpert": (torch.int8, (3, 14)), "answer_boxes": (torch.float32, (3, 4, 4)), "has_answer_box": (torch.bool, (3, 4)),
        "question": (torch.int64, (3, 4)), "image_row": (torch.int64, (3,)),
    }  # fmt: skip
    assert {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in batch.items()} == forms
    assert batch["boxes"].min() >= 0 and batch["boxes"].max() <= 1
    assert (sum((batch[name] >= 0).int() for name in HEADS) == (batch["type"] >= 0).int()).all(), "one target for each question"
    assert (batch["num_tokens"] > 0).equal(batch["type"] >= 0)
    assert not batch["boxes"][~batch["has_box"]].any()


@pytest.mark.parametrize("k", [1, 3, 4, 1000])
def test_an_epoch_visits_every_question_once(twin_index: CxrIndex, k: int) -> None:
    data = CxrDataset(twin_index, "train", questions_per_image=k, size=32, grade="unrated")
    visits = Counter(int(row) for i in range(len(data)) for row in data.question_rows(i)[1])
    assert set(visits.values()) == {1}
    assert len(visits) == data.num_questions
    studies = set(twin_index.question["study"][list(visits)].tolist())
    numbers = np.bincount(twin_index.question["study"][sorted(visits)])
    assert len(data) == sum(-(-int(numbers[study]) // k) for study in studies)
    has_target = np.any([twin_index.question[head] >= 0 for head in HEADS], axis=0)
    train = twin_index.image["split"][twin_index.study["first_image"][:-1]][twin_index.question["study"]] == 0
    assert set(visits) == set(np.flatnonzero(has_target & train).tolist())
    assert data.counts["questions without a target"] == int((~has_target & train).sum())


def test_samples_repeat_and_padding_has_no_weight(twin_index: CxrIndex) -> None:
    data = CxrDataset(twin_index, "test", tokenizer=Words(), questions_per_image=1000, size=32)
    sample, again = data[0], pickle.loads(pickle.dumps(data))[0]
    assert all(torch.equal(sample[name], again[name]) for name in sample)
    padding = sample["question"] < 0
    assert padding.any() and not padding.all()
    assert (sample["type"][padding] == -1).all()
    assert all((sample[name][padding] == -1).all() for name in HEADS)
    assert not sample["tokens"][padding].any() and not sample["has_answer_box"][padding].any()
    with pytest.raises(IndexError):
        data[len(data)]


def test_the_questions_of_a_sample_are_of_different_types(twin_index: CxrIndex) -> None:
    data = CxrDataset(twin_index, "train", questions_per_image=4, size=32)
    numbers = [len(set(data[i]["type"].tolist())) for i in range(50)]
    assert sum(numbers) / 50 > 3


IMAGES = (("image-a", "LATERAL"), ("image-b", "AP"), ("image-c", "PA"))


@pytest.mark.parametrize(("views", "name"), [("frontal_only", "image-c"), ("lateral_only", "image-a"), ("all", "image-c")])
def test_the_preferred_allowed_view_is_used(views: str, name: str, tmp_path: Path) -> None:
    places = boxes("image-a", (0, 0, 100, 100)) | boxes("image-c", (100, 50, 200, 100))
    index = build(*write_data(tmp_path, [question("D02_has_finding", answer("pos", localization=places))], images=IMAGES))
    data = CxrDataset(index, "train", views=views, size=32)  # type: ignore[arg-type]
    sample = data[0]
    assert data.image_path(int(sample["image_row"])).name == f"{name}.jpg"
    expected = [0, 0, 0.5, 1] if name == "image-a" else [0.5, 0.5, 1, 1]
    assert torch.allclose(sample["answer_boxes"][0], torch.tensor(expected), atol=1e-4)


def test_a_missing_image_is_replaced_by_the_next_view_or_stops_the_run(tmp_path: Path) -> None:
    mimic, qba = write_data(tmp_path, [question("D02_has_finding", answer("pos"))], images=IMAGES)
    next(mimic.rglob("image-c.jpg")).unlink()
    index = build(mimic, qba)
    assert index.counts == {"missing image files": 1}
    with pytest.raises(Problem, match=r"image-c\.jpg is missing.*bad_images=skip"):
        CxrDataset(index, "train", size=32)
    data = CxrDataset(index, "train", size=32, bad_images="skip")
    assert data.image_path(int(data[0]["image_row"])).name == "image-b.jpg"
    assert data.counts["missing images"] == 1


def test_a_skipped_image_keeps_its_place_without_weight(tmp_path: Path) -> None:
    mimic, qba = write_data(tmp_path, [question("D02_has_finding", answer("pos"))], labels={"Edema": "1.0"})
    index = build(mimic, qba)
    next(mimic.rglob("image-a.jpg")).write_bytes(b"cut")
    data = CxrDataset(index, "train", size=32, bad_images="skip")
    assert len(data) == 1
    sample = data[0]
    assert not sample["image"].any()
    assert sample["chexpert"].tolist() == [-2] * 14
    assert sample["type"].tolist() == sample["binary"].tolist() == sample["question"].tolist() == [-1]


def test_a_damaged_image_is_replaced_by_the_next_allowed_view(tmp_path: Path) -> None:
    places = boxes("image-b", (0, 0, 100, 100)) | boxes("image-c", (100, 50, 200, 100))
    asked = [question("D02_has_finding", answer("pos", localization=places))]
    mimic, qba = write_data(tmp_path, asked, images=(*IMAGES, ("image-d", "PA")), labels={"Edema": "1.0"})
    index = build(mimic, qba)
    for name in ("image-c", "image-d"):
        next(mimic.rglob(f"{name}.jpg")).write_bytes(b"cut")
    data = CxrDataset(index, "train", size=32, bad_images="skip")
    sample = data[0]
    assert data.image_path(int(sample["image_row"])).name == "image-b.jpg" and sample["image"].any()
    assert torch.allclose(sample["answer_boxes"][0], torch.tensor([0, 0, 0.5, 1.0]), atol=1e-4), "the boxes are those in this image"
    assert sample["question"][0] >= 0 and 1 in sample["chexpert"]
    next(mimic.rglob("image-b.jpg")).write_bytes(b"cut")
    empty = CxrDataset(index, "train", size=32, bad_images="skip", cache_images=False)[0]
    assert empty["question"].tolist() == [-1], "the lateral view is not allowed"
    with pytest.raises(Problem, match=r"image-[cd]"):
        CxrDataset(index, "train", size=32, cache_images=False)[0]


def test_labels_are_positive_negative_uncertain_and_missing(tmp_path: Path) -> None:
    labels = {"Atelectasis": "1.0", "Cardiomegaly": "0.0", "Edema": "-1.0", "No Finding": "1"}
    index = build(*write_data(tmp_path, [question("D02_has_finding", answer("pos"))], labels=labels))
    values = dict(zip(CHEXPERT, CxrDataset(index, "train", size=32)[0]["chexpert"].tolist(), strict=True))
    assert {name: value for name, value in values.items() if value != -2} == {
        "Atelectasis": 1, "Cardiomegaly": 0, "Edema": -1, "No Finding": 1,
    }  # fmt: skip


def test_a_grade_means_at_least_and_types_can_be_chosen(tmp_path: Path) -> None:
    grades = ("A++", "A+", "A", "B", "C", "D", None)
    asked = [question("D02_has_finding", answer("pos"), question_quality={"rating": grade}) for grade in grades]
    index = build(*write_data(tmp_path, [*asked, question("D06_has_device", answer("pos"))]))
    sizes = {grade: len(CxrDataset(index, "train", size=32, grade=grade, types=["D02"])) for grade in ("A++", "A", "B", "D", "unrated")}
    assert sizes == {"A++": 1, "A": 3, "B": 4, "D": 6, "unrated": 7}
    assert len(CxrDataset(index, "train", size=32, types=["has_device"])) == 1
    with pytest.raises(Problem, match="no question type 'D99'"):
        CxrDataset(index, "train", types=["D99"])
    with pytest.raises(Problem, match=r"the split test has no questions .*: the index has none"):
        CxrDataset(index, "test", size=32)


def test_large_graphs_are_cut_and_counted(tmp_path: Path) -> None:
    observations = {f"O{i:02d}": {"regions": [f"region {i}"], "obs_entities": ["edema"]} for i in range(9)}
    index = build(*write_data(tmp_path, [question("D02_has_finding", answer("pos"))], observations))
    data = CxrDataset(index, "train", size=32, max_nodes=4)
    assert data.num_nodes == 4
    assert data.counts["studies whose scene graph is cut"] == 1
    assert [data.region_names[i] for i in data[0]["node_region"]] == [f"region {i}" for i in range(4)]
    assert CxrDataset(index, "train", size=32)[0]["is_node"].sum() == 9


def test_tokens_are_made_once_for_each_tokenizer(twin_index: CxrIndex) -> None:
    first, second, other = Words("a"), Words("a"), Words("b")
    settings = {"size": 32, "questions_per_image": 2, "max_tokens": 5}
    data = CxrDataset(twin_index, "train", tokenizer=first, **settings)  # type: ignore[arg-type]
    again = CxrDataset(twin_index, "train", tokenizer=second, **settings)  # type: ignore[arg-type]
    CxrDataset(twin_index, "train", tokenizer=other, **settings)  # type: ignore[arg-type]
    assert (first.calls, second.calls, other.calls) == (1, 0, 1)
    sample = again[7]
    text = data.question_text(int(sample["question"][0]))
    assert sample["tokens"][0, : sample["num_tokens"][0]].tolist() == [first.ids[word] for word in words_of(text)][:5]


def test_texts_and_vocabulary(twin_index: CxrIndex) -> None:
    data = CxrDataset(twin_index, "train", size=32)
    row = int(data[0]["question"][0])
    assert data.question_text(row).strip()
    assert data.answer_text(row).strip()
    words = all_words(twin_index.question_texts)
    assert {"is", "the", "?", "pneumothorax"} <= set(words) and words == sorted(set(words))
    assert QUESTION_TYPES[int(data[0]["type"][0])] == "A_indication"
