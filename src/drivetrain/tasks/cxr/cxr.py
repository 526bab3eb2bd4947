"""The task `cxr`: answers questions on chest X-rays and predicts CheXpert labels. Research software, no medical device."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch._guards import detect_fake_mode

from drivetrain.data import Picture, Rand
from drivetrain.outcomes import Outcome, Problem
from drivetrain.settings import Duration, Range
from drivetrain.task import Task
from drivetrain.tasks.cxr.data.check import check_data, is_checking_process
from drivetrain.tasks.cxr.data.columns import CxrIndex
from drivetrain.tasks.cxr.data.images import BadImageError, decode
from drivetrain.tasks.cxr.data.index import find_or_build, print_notice
from drivetrain.tasks.cxr.data.names import DataNames, check_same, names_of_index, names_of_start, read_names, write_names, write_run_file
from drivetrain.tasks.cxr.data.samples import CxrDataset, collate
from drivetrain.tasks.cxr.net import augmentation, losses
from drivetrain.tasks.cxr.net.answer_graph import AnswerGraph, empty_graph
from drivetrain.tasks.cxr.net.encoders import build_image_encoder, check_weights
from drivetrain.tasks.cxr.net.model import CxrModel, GraphSource, ModelSizes
from drivetrain.tasks.cxr.net.text_encoders import PretrainedSource, build_small
from drivetrain.tasks.cxr.net.tokens import PretrainedTokenizer, WordTokenizer
from drivetrain.tasks.cxr.scoring import answers, evaluation, report
from drivetrain.tasks.cxr.scoring.page import page
from drivetrain.tasks.cxr.scoring.pictures import Shown, draw, write_picture
from drivetrain.tasks.cxr.scoring.texts import AnswerTexts
from drivetrain.tasks.cxr.twin.write import write_twin
from drivetrain.tasks.cxr.vocabulary import CHEXPERT, SEVERITIES
from drivetrain.tasks.lora.cache import cache_folder, create_once

SHOWN = 8
"""Questions in the picture of an evaluation."""


def _read_image(file: str, size: int) -> np.ndarray:
    """Returns an image file as [1, size, size] bytes."""
    path = Path(file).expanduser()
    try:
        return decode(path, size)[None].copy()
    except (OSError, BadImageError) as error:
        raise Problem(f"{path} cannot be read as an image: {error}") from None


class Cxr(Task):
    """Questions on chest X-rays and CheXpert labels, from the folders of MIMIC-CXR-JPG and MIMIC-Ext-CXR-QBA or a synthetic twin."""

    data: str = "twin"
    """The folder of MIMIC-CXR-JPG; or twin: synthetic images and questions in the same layout, generated once."""
    questions: str = ""
    """The folder of MIMIC-Ext-CXR-QBA, unzipped or not. Not needed with data=twin."""
    studies: Annotated[int, Range(20)] = 4000
    """Studies of data=twin."""
    cache: str = ""
    """Folder of the index and of resized images (with data=twin also of the twin); by default beside the questions, or in the user's cache."""
    grade: Literal["unrated", "D", "C", "B", "A", "A+", "A++"] = "A"
    """The lowest quality grade of a question."""
    views: Literal["frontal_only", "lateral_only", "all"] = "frontal_only"
    """Which images of a study may be used."""
    questions_per_image: Annotated[int, Range(1, 256)] = 4
    """Questions that share one encoding of their image: more questions cost little more time."""
    image_size: Annotated[int, Range(32, 1024)] = 224
    """Side of the images."""
    max_tokens: Annotated[int, Range(4, 512)] = 128
    """Tokens of a question; longer ones are cut."""
    bad_images: Literal["error", "skip"] = "error"
    """Whether a missing or damaged image stops the run, or is left out and named."""
    eval_split: Literal["train", "validate", "test"] = "validate"
    """The split that evaluations use."""
    max_studies: Annotated[int, Range(1)] | None = None
    """Use only this many studies of each split."""
    types: list[str] = []
    """Question types to use, such as D02_has_finding; by default all."""
    check: bool = True
    """Check the data before training: faults end the run, and warnings are shown (`drivetrain data cxr-check` prints all)."""

    encoder: str = "convnext_base"
    """The image encoder: convnext_tiny, convnext_small, convnext_base, nano (small, for CPUs), or any name of timm."""
    encoder_weights: str = "imagenet"
    """First weights of the image encoder: imagenet (downloaded), none (random), or a .safetensors file with timm's names."""
    text: str = "emilyalsentzer/Bio_ClinicalBERT"
    """The text encoder: a folder or a name on the hub of Hugging Face, or small (random weights, the words of all questions)."""
    text_layers: Annotated[int, Range(1, 48)] = 2
    """With text=small: its layers."""
    width: Annotated[int, Range(32, 8192)] = 768
    """Width of the layers that join image, question and graph; with text=small also of the text encoder."""
    heads: Annotated[int, Range(1, 256)] = 12
    """Attention heads of these layers."""
    layers: Annotated[int, Range(1, 64)] = 2
    """Number of these layers."""
    dropout: Annotated[float, Range(0, 1)] = 0.1
    """Share of the activations that training drops, outside the image encoder."""
    max_nodes: Annotated[int, Range(1, 1024)] = 64
    """Nodes of a scene graph; further ones are cut, and counted."""

    graph: Literal["none", "oracle", "predicted"] = "none"
    """The scene graph behind the main metrics and `predict`: none, oracle (of the report, which also gave the answer), or predicted."""
    graph_dropout: Annotated[float, Range(0, 1)] = 0.5
    """Share of training images without their scene graph, so that the model answers without one, too."""
    binary_weight: Annotated[float, Range(0)] = 1.0
    """Weight of the loss of yes-or-no questions."""
    category_weight: Annotated[float, Range(0)] = 0.5
    """Weight of the loss of questions for a finding."""
    region_weight: Annotated[float, Range(0)] = 0.5
    """Weight of the loss of questions for a place."""
    severity_weight: Annotated[float, Range(0)] = 0.3
    """Weight of the loss of questions for a severity."""
    chexpert_weight: Annotated[float, Range(0)] = 0.3
    """Weight of the loss of the CheXpert labels."""
    box_weight: Annotated[float, Range(0)] = 0.1
    """Weight of the loss of the answers' boxes; 0 predicts none."""
    graph_weight: Annotated[float, Range(0)] = 0.1
    """Weight of the loss of the predicted scene graph; 0 does not learn one."""
    uncertain: Literal["ignore", "positive", "negative", "soft"] = "ignore"
    """What an uncertain CheXpert label counts as: nothing, positive, negative, or half of each."""
    rotation: Annotated[float, Range(0, 180)] = 5.0
    """Training images turn by up to so many degrees."""
    translation: Annotated[float, Range(0, 1)] = 0.05
    """Training images move by up to this share of their side."""
    scaling: Annotated[float, Range(0, 0.9)] = 0.05
    """Training images grow or shrink by up to this share."""
    brightness: Annotated[float, Range(0, 1)] = 0.1
    """Brightness and contrast of training images change by up to this share."""

    epochs: Annotated[int, Range(1)] = 20
    """Passes over the questions."""
    global_batch: Annotated[int, Range(1)] = 64
    """Images in one optimizer step, over all processes; each has `questions_per_image` questions."""
    learning_rate: Annotated[float, Range(0)] = 5e-5
    """The optimizer's peak learning rate."""
    clip: Annotated[float, Range(0)] = 1.0
    """Largest norm of the gradients; 0 does not clip."""
    warmup: Duration = "0.1ep"
    """Steps (or epochs, 1ep) over which the learning rate rises to its peak."""
    best: str | None = "max:accuracy"
    """Keep the checkpoint with the best value of this metric: max:NAME, min:NAME or NAME."""

    tune_metric = "accuracy"
    search = {"learning_rate": "1e-5..1e-3,log", "dropout": "0..0.3", "graph_dropout": "0.2|0.5|0.8"}
    classes = CHEXPERT

    # --- the data ---

    @cached_property
    def _index(self) -> CxrIndex:
        cache = Path(self.cache).expanduser() if self.cache else cache_folder("cxr")
        if self.data == "twin":
            folder = cache / f"twin-{self.studies}"
            with create_once(folder) as empty:
                if empty is not None:
                    write_twin(empty, self.studies)
            images, questions = write_twin(folder, self.studies)  # finds it finished
        elif self.questions:
            images, questions = Path(self.data).expanduser(), Path(self.questions).expanduser()
        else:
            raise Problem(f"data={self.data} needs the questions, too: give questions=FOLDER of MIMIC-Ext-CXR-QBA")
        return find_or_build(images, questions, cache / "index" if self.cache else None)

    @cached_property
    def _index_names(self) -> DataNames:
        return names_of_index(self._index, with_words=self.text == "small")

    @cached_property
    def _data_names(self) -> DataNames:
        """Those of the run; of the data where a run begins."""
        return read_names(self.run_folder) or self._index_names

    @cached_property
    def _tokenizer(self) -> WordTokenizer | PretrainedTokenizer:
        if self.text == "small":
            return WordTokenizer(self._data_names.words)
        return PretrainedTokenizer(PretrainedSource(self.text).tokenizer(), self.max_tokens)

    def _dataset(self, split: str, tokenizer: WordTokenizer | PretrainedTokenizer | None) -> CxrDataset:
        check_same(read_names(self.run_folder), self._index_names, f"{self.run_folder}")
        return CxrDataset(
            self._index, split, tokenizer=tokenizer, views=self.views, grade=self.grade, types=self.types,
            questions_per_image=self.questions_per_image, size=self.image_size, max_nodes=self.max_nodes, max_tokens=self.max_tokens,
            bad_images=self.bad_images, max_studies=self.max_studies,
        )  # fmt: skip

    @cached_property
    def _eval_dataset(self) -> CxrDataset:
        return self._dataset(self.eval_split, self._tokenizer)

    @cached_property
    def _samples_of_image(self) -> np.ndarray:
        """The number of evaluation samples of each image of the index."""
        data = self._eval_dataset
        counts = np.ones(self._index.num_studies, np.int64)
        counts[data.selection.study] = -(-np.diff(data.selection.first_row) // self.questions_per_image)
        return np.take(counts, self._index.image["study"])  # a sample may show another image of its study

    def train_data(self) -> CxrDataset:
        if self.check and is_checking_process() and detect_fake_mode() is None:
            self._check_data()
        if read_names(self.run_folder) is None:
            write_names(self.run_folder, self._index_names)
        return self._dataset("train", self._tokenizer)

    def _check_data(self) -> None:
        """Raises Problem if nothing could be learned from the data; prints what else is wrong with it."""
        found = check_data(self._index)
        write_run_file(self.run_folder, "data-check.json", found)
        if found["errors"]:
            raise Problem(f"the data check fails: {found['errors'][0]} (check=false trains nevertheless)", Outcome.DATA)
        for warning in found["warnings"]:
            print_notice(f"data check: {warning}")

    def eval_data(self) -> CxrDataset:
        return self._eval_dataset

    def collate(self, samples: list[Any]) -> dict[str, Tensor]:
        return collate(samples)

    # --- the model ---

    @property
    def _names(self) -> answers.ClassNames:
        return answers.ClassNames(self._data_names.regions)

    @property
    def _num_entities(self) -> int:
        return len(self._data_names.entities)

    def model(self) -> CxrModel:
        if self.width % self.heads:
            raise Problem(
                f"width={self.width} is no multiple of heads={self.heads}: take width={self.heads * max(1, self.width // self.heads)}"
            )
        check_weights(self.encoder_weights)
        if self.start:
            check_same(names_of_start(self.start), self._data_names, f"start={self.start}")
        image = build_image_encoder(self.encoder, self.encoder_weights)
        text: Any
        if isinstance(self._tokenizer, WordTokenizer):
            text = build_small(self._tokenizer.num_tokens, self.width, self.text_layers, self.max_tokens, self.dropout)
        else:
            text = PretrainedSource(self.text).model(self.max_tokens)
        classes = {"binary": 2, "category": len(CHEXPERT), "region": len(self._names.region), "severity": len(SEVERITIES)}
        sizes = ModelSizes(
            len(self._names.region), self._num_entities, classes, self.width, self.heads, self.layers, self.dropout,
            min(self._data_names.num_nodes, self.max_nodes),
        )  # fmt: skip
        return CxrModel(image, text, image.num_features, text.width, sizes)

    # --- learning ---

    @property
    def _weights(self) -> losses.LossWeights:
        return losses.LossWeights(
            self.binary_weight, self.category_weight, self.region_weight, self.severity_weight, self.chexpert_weight, self.box_weight,
            self.graph_weight,
        )  # fmt: skip

    def augment(self, batch: dict[str, Tensor], rand: Rand) -> dict[str, Tensor]:
        draws = rand.uniform(1 + augmentation.DRAWS)
        changed = batch | {"use_graph": draws[:, 0] >= self.graph_dropout}
        strength = augmentation.Strength(self.rotation, self.translation, self.scaling, self.brightness)
        if not strength.is_on:
            return changed
        image, (nodes, boxes) = augmentation.augment(batch["image"], [batch["boxes"], batch["answer_boxes"]], draws[:, 1:], strength)
        return changed | {"image": image, "boxes": nodes, "answer_boxes": boxes}

    def counts(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return losses.counts(batch, self._weights, self.uncertain, self._num_entities)

    def loss(self, model: CxrModel, batch: dict[str, Tensor]) -> Any:
        outputs = model(batch)
        head, target = evaluation.routed(batch)
        logged = {}
        with torch.no_grad():
            right = sum((outputs[name].argmax(-1) == target) & (head == place) for place, name in enumerate(losses.HEADS))
            logged["accuracy"] = (right.float().sum(), (head >= 0).sum())
        return losses.losses(outputs, batch, self._weights, self.uncertain, self._num_entities), logged

    # --- evaluation ---

    def metrics(self, model: CxrModel, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return evaluation.evaluate(model, batch, self.graph, self.uncertain, self.box_weight > 0)

    def summary(self, values: dict[str, Tensor]) -> dict[str, Any]:
        return report.summarise(values, self._scoring)

    def resample_groups(self, values: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Returns the patient of each sample, and each question with its image and target."""
        study = self._index.image["study"][values["image"].cpu().numpy()]
        return torch.from_numpy(self._index.study["patient"][study]), evaluation.asked(values)

    @cached_property
    def _scoring(self) -> report.Scoring:
        texts = AnswerTexts(self._names, self._eval_dataset.answer_text)
        return report.Scoring(self.graph, self._weights, self.uncertain, self._names.region, self._samples_of_image, texts)

    def summary_fields(self) -> dict[str, Any]:
        return {"Dataset": self.data, "Image encoder": self.encoder, "Text encoder": self.text, "Scene graph": self.graph}

    def remarks(self, model: CxrModel) -> list[str | Picture]:
        data = self._eval_dataset
        if not len(data):
            return []
        step = max(1, len(data) // SHOWN)
        batch = self.collate([data[place] for place in range(0, len(data), step)[:SHOWN]])
        shown, title = self._shown(model, batch), f"scene graph: {self.graph}"
        return [Picture("answers", draw(shown, title), page(shown, title))] if shown else []

    def _shown(self, model: CxrModel, batch: dict[str, Tensor]) -> list[Shown]:
        """Returns the first answerable question of each image of a batch, preferably one whose answer has a box."""
        device = next(model.parameters()).device
        on_device = {name: value.to(device) for name, value in batch.items()}
        encoded = model.encode(on_device)
        nodes = model.nodes(on_device, encoded, self.graph)
        outputs, attention = model.answer(encoded, nodes), model.attention(encoded, nodes).float().cpu().numpy()
        head, target = evaluation.routed(batch)
        chosen = ((head >= 0).long() + (batch["has_answer_box"] & (head >= 0)).long()).argmax(1)
        shown = []
        for row, column in enumerate(chosen.tolist()):
            kind = int(head[row, column])
            if kind < 0:
                continue
            probability = outputs[losses.HEADS[kind]][row, column].float().softmax(-1).cpu()
            boxes = [
                box.tolist() if batch["has_answer_box"][row, column] else None
                for box in (batch["answer_boxes"][row, column], outputs["answer_box"][row, column])
            ]
            shown.append(
                Shown(
                    batch["image"][row, 0].numpy(), self._eval_dataset.question_text(int(batch["question"][row, column])),
                    self._names.answer(kind, int(probability.argmax())), float(probability.max()), self._names.answer(kind, int(target[row, column])),
                    attention[row, column], boxes[0], boxes[1] if self.box_weight else None, self._named_nodes(nodes, row),
                )
            )  # fmt: skip
        return shown

    def _named_nodes(self, nodes: Any, row: int) -> list[tuple[str, list[float]]]:
        entities, keep = nodes.entity[row].tolist(), (nodes.is_node & nodes.has_box)[row].tolist()
        return [(self._data_names.entities[entities[i]], nodes.boxes[row, i].tolist()) for i in range(len(keep)) if keep[i]]

    # --- using it ---

    def predict(self, model: CxrModel, image: str, question: str = "", graph: str = "none", picture: str = "") -> Iterator[str]:
        """Yields the answer to a question on an image file, and the CheXpert labels; `picture` is a .png or .html file to write."""
        if graph not in ("none", "predicted"):
            raise Problem(f"graph={graph} does not fit: none or predicted (an image alone has no other scene graph)")
        yield from self._answer(
            model, _read_image(image, self.image_size), question, "predicted" if graph == "predicted" else "none", picture
        )

    @torch.no_grad()
    def _answer(self, model: CxrModel, image: np.ndarray, question: str, graph: GraphSource, picture: str) -> list[str]:
        batch = self._question_on(image, question or "?")
        encoded = model.encode(batch)
        nodes, lines = model.nodes(batch, encoded, graph), []
        if question:
            head = answers.head_of_question(question)
            outputs, names = model.answer(encoded, nodes), self._names.of(head)
            probability = outputs[head][0, 0].float().softmax(-1)
            lines.append(f"{question}\n  {answers.describe(probability, names)}\n")
            if picture:
                place = int(probability.argmax())
                entry = Shown(
                    image[0], question, names[place], float(probability[place]),
                    attention=model.attention(encoded, nodes)[0, 0].float().numpy(),
                    predicted_box=outputs["answer_box"][0, 0].tolist() if self.box_weight else None, nodes=self._named_nodes(nodes, 0),
                )  # fmt: skip
                write_picture([entry], picture)
                lines.append(f"  picture: {picture}\n")
        lines += ["CheXpert labels\n", *answers.describe_labels(model.label(encoded)[0]), "Research software, no medical device.\n"]
        return lines

    def _question_on(self, image: np.ndarray, question: str) -> dict[str, Tensor]:
        """Returns a batch of one image with one question."""
        tokens = torch.tensor(self._tokenizer.encode([question])[0][: self.max_tokens], dtype=torch.int32).view(1, 1, -1)
        num_tokens = torch.tensor([[tokens.shape[-1]]])
        return {"image": torch.from_numpy(image)[None], "tokens": tokens, "num_tokens": num_tokens} | empty_graph(1, 1, tokens.device)

    def exports(self, model: CxrModel) -> dict[str, tuple[nn.Module, dict[str, Tensor]]]:
        size = self.image_size
        image = torch.zeros(2, 1, size, size, dtype=torch.uint8)
        tokens = torch.ones(2, self.questions_per_image, self.max_tokens, dtype=torch.int64)
        return {"model": (AnswerGraph(model), {"image": image, "tokens": tokens, "num_tokens": tokens[..., 0] * 4})}
