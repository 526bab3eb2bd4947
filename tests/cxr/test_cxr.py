"""The task `cxr` from the command line, on the synthetic twin: train, eval, predict, recipes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml

from drivetrain import recipe
from drivetrain.engine.numerics.bootstrap import sample_groups
from drivetrain.outcomes import Outcome, Problem
from drivetrain.tasks.cxr.cxr import Cxr
from drivetrain.tasks.cxr.net import losses
from drivetrain.tasks.cxr.net.answer_graph import AnswerGraph
from drivetrain.tasks.cxr.scoring.answers import ClassNames, head_of_question
from tests.command import expect_error, run_ok
from tests.cxr.conftest import TWIN_STUDIES
from tests.cxr.small_data import answer, question, write_data

ROOT = Path(__file__).parents[2]
TINY = [
    "encoder=nano", "encoder_weights=none", "text=small", "text_layers=1", "width=32", "heads=2", "layers=1", "image_size=64", "max_tokens=16",
    "grade=unrated", "global_batch=8", "plan.compile=off",
]  # fmt: skip


def settings_of(twin: tuple[Path, Path], **more: object) -> dict[str, object]:
    words = dict(word.split("=") for word in TINY if not word.startswith("plan."))
    return words | {"data": str(twin[0]), "questions": str(twin[1])} | more


class Rand:
    """Stands for the engine's random numbers."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def uniform(self, k: int = 1) -> torch.Tensor:
        return torch.rand(self.samples, k, generator=torch.Generator().manual_seed(0))


def test_train_eval_predict(twin: tuple[Path, Path], folder: Path) -> None:
    data = [f"data={twin[0]}", f"questions={twin[1]}"]
    run_ok("train", "cxr", *TINY, *data, "steps=4", "eval_every=2", "log_every=2", "eval_split=train", "max_studies=6", "--name", "a")
    rows = [json.loads(line) for line in Path("runs/a/metrics.jsonl").read_text().splitlines()]
    names = set().union(*rows)
    assert {"train/binary", "train/chexpert", "train/graph_entity", "train/accuracy"} <= names
    assert {"eval/accuracy", "eval/accuracy_oracle", "eval/accuracy_predicted", "eval/loss"} <= names
    assert len(list(Path("runs/a/media").glob("answers-*.png"))) == len(list(Path("runs/a/media").glob("answers-*.html"))) == 2
    assert "<article>" in Path("runs/a/media/answers-00000004.html").read_text()
    assert json.loads(Path("runs/a/data-check.json").read_text())["totals"]["studies"] == TWIN_STUDIES

    run_ok("train", "cxr", *TINY, *data, "steps=1", "eval_split=train", "max_studies=6", "questions_per_image=1", "--name", "b")
    output = run_ok("eval", "a", "--against", "b", "--bootstrap", "20")
    assert "accuracy by question type:" in output and "metric" in output and "by resampling" in output
    facts = json.loads(Path("runs/a/eval.json").read_text())
    assert facts["metrics"]["accuracy"] == pytest.approx(rows[-1]["eval/accuracy"])
    low, high = facts["intervals"]["accuracy"]
    assert low <= facts["metrics"]["accuracy"] <= high and low < high

    image = next(twin[0].rglob("*.jpg"))
    answer = run_ok("predict", "a", str(image), "question=Is there a pleural effusion?", "picture=seen.png")
    assert "yes" in answer and "no" in answer and "Cardiomegaly" in answer and "no medical device" in answer
    assert Path("seen.png").stat().st_size > 5000
    for words in (
        ("a", "--image", str(image), "--question", "Is there a pleural effusion?", "--picture=other.png"),
        ("--question=Is there a pleural effusion?", f"--image={image}", "a", "picture=other.png", "-q"),
    ):
        assert run_ok("predict", *words).replace("other", "seen") == answer, "flags mean what NAME=VALUE means"
    assert "did you mean question" in expect_error("predict", "a", str(image), "--qestion", "Why?", max_lines=9)
    assert "--question needs a value" in expect_error("predict", "a", str(image), "--question")
    assert "--image INPUT" in expect_error("predict", "a", "--question", "Why?", max_lines=9)
    assert "missing" in expect_error("predict", "a", "nowhere.jpg", max_lines=9)


def test_a_batch_trains_on_every_head(twin: tuple[Path, Path]) -> None:
    task = Cxr(**settings_of(twin))
    data = task.train_data()
    batch = task.collate([data[place] for place in range(8)])
    changed = task.augment(batch, Rand(8))  # type: ignore[arg-type]
    assert 0 < int(changed["use_graph"].sum()) < 8
    assert changed["image"].dtype == torch.float32 and batch["image"].dtype == torch.uint8
    model = task.model()
    parts, logged = task.loss(model, changed)
    assert set(parts) == set(task.counts(batch)) and all(int(task.counts(batch)[name]) == int(count) for name, (_, count) in parts.items())
    assert set(losses.HEADS) < set(parts) and 0 <= logged["accuracy"][0] <= logged["accuracy"][1]
    sum(total / count for total, count in parts.values() if count).backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


def test_words_keep_their_ids_whatever_the_grade(twin: tuple[Path, Path]) -> None:
    """The second stage of a recipe begins with the embeddings of the first."""
    first, second = (Cxr(**settings_of(twin, grade=grade))._tokenizer for grade in ("B", "A"))
    question = ["Is there a pleural effusion in the left lung?"]
    assert first.encode(question) == second.encode(question) and first.key == second.key


def test_runs_with_other_questions_per_image_are_compared_by_patient_and_question(twin: tuple[Path, Path]) -> None:
    found = []
    for k, seed in ((1, 0), (4, 0), (4, 1)):
        task = Cxr(**settings_of(twin, questions_per_image=k, eval_split="train", max_studies=4 + seed))
        data = task.eval_data()
        batch = task.collate([data[place] for place in range(len(data))])
        with torch.no_grad():
            values = task.metrics(task.model().eval(), batch)
        groups = sample_groups(task, values)
        assert groups is not None and sum(map(len, groups.members)) == len(data)
        patients = {int(task._index.study["patient"][study]) for study in data.selection.study}
        assert len(groups.members) == len(patients)
        found.append(groups)
    assert found[0].digest == found[1].digest != found[2].digest
    assert len(found[0].members[0]) > 1


def test_a_training_is_refused_if_the_data_check_fails(tmp_path: Path) -> None:
    data = write_data(tmp_path, [question("D02_has_finding", answer("pos"))])
    image = next(data[0].rglob("*.jpg"))
    image.write_bytes(b"damaged")
    settings = settings_of(data, bad_images="skip")
    assert int(Cxr(**settings).train_data()[0]["question"].max()) == -1, "the image is left out, and named in a list"
    refused = Cxr(**settings)
    refused.run_folder = tmp_path
    with pytest.raises(Problem, match=r"the data check fails: 1 image files cannot be read.*check=false") as problem:
        refused.train_data()
    assert problem.value.outcome is Outcome.DATA
    assert json.loads((tmp_path / "data-check.json").read_text())["errors"]
    assert len(Cxr(**settings, check=False).train_data()) == 1


def test_a_training_without_images_is_refused(tmp_path: Path) -> None:
    data = write_data(tmp_path, [question("D02_has_finding", answer("pos"))])
    next(data[0].rglob("*.jpg")).unlink()
    with pytest.raises(Problem, match="the data check fails: no image file exists"):
        Cxr(**settings_of(data)).train_data()


def test_a_predicted_graph_is_the_graph_of_the_main_metrics_if_asked(twin: tuple[Path, Path]) -> None:
    task = Cxr(**settings_of(twin, graph="predicted", eval_split="train", max_studies=4))
    data = task.eval_data()
    batch = task.collate([data[place] for place in range(8)])
    with torch.no_grad():
        values = task.metrics(task.model().eval(), batch)
    assert {"accuracy", "accuracy_none", "accuracy_oracle"} <= set(task.summary(values))


def test_the_exported_graph_answers_as_the_model_does(twin: tuple[Path, Path]) -> None:
    task = Cxr(**settings_of(twin))
    model = task.model().eval()
    module, inputs = task.exports(model)["model"]
    assert isinstance(module, AnswerGraph)
    data = task.train_data()
    batch = task.collate([data[0], data[1]])
    exported = torch.export.export(module, tuple(inputs.values()), strict=False).module()
    found = exported(batch["image"], batch["tokens"].long(), batch["num_tokens"].long())
    torch.testing.assert_close(found["binary"], model(batch, "none")["binary"], rtol=1e-4, atol=1e-5)


def test_wrong_settings_name_the_fix(twin: tuple[Path, Path]) -> None:
    with pytest.raises(Problem, match="width=32"):
        Cxr(**settings_of(twin, width=33)).model()
    with pytest.raises(Problem, match="questions=FOLDER"):
        Cxr(**settings_of(twin, questions="")).train_data()
    with pytest.raises(Problem, match="none or predicted"):
        list(Cxr(**settings_of(twin)).predict(None, "x.jpg", graph="oracle"))  # type: ignore[arg-type]


def test_a_trained_model_answers_without_the_data_and_refuses_other_data(twin: tuple[Path, Path], folder: Path) -> None:
    copy = Path(shutil.copytree(twin[0].parent, "copy"))
    data = [f"data={copy / twin[0].name}", f"questions={copy / twin[1].name}", "eval_split=train", "max_studies=2"]
    run_ok("train", "cxr", *TINY, *data, "steps=1", "--name", "a")
    image = str(shutil.copy(next(copy.rglob("*.jpg")), "x.jpg"))
    words = ("predict", "a", image, "question=Where is the effusion?", "graph=predicted")
    answer = run_ok(*words)
    moved = copy.rename("moved")
    assert run_ok(*words) == answer

    moved.rename(copy)
    names = Path("runs/a/cxr-names.json")
    stored = json.loads(names.read_text())
    stored["regions"][1:3] = stored["regions"][2:0:-1]
    names.write_text(json.dumps(stored))
    for words in (("eval", "a"), ("train", "cxr", *TINY, *data, "steps=1", "start=a", "--name", "b")):
        assert "was trained on data with other regions" in expect_error(*words, code=Outcome.DATA.code, max_lines=9)


@pytest.mark.parametrize(
    ("question", "head"),
    [
        ("Is there a pleural effusion?", "binary"), ("Does the patient have any devices?", "binary"), ("Where is the effusion?", "region"),
        ("In which lobe is the opacity located?", "region"), ("How severe is the edema?", "severity"), ("Describe the lungs.", "category"),
    ],
)  # fmt: skip
def test_a_free_question_is_answered_by_the_head_of_its_wording(question: str, head: str) -> None:
    assert head_of_question(question) == head


def test_answers_have_names() -> None:
    names = ClassNames(["unknown", "left lung"])
    assert (
        names.answer(0, 1) == "yes" and names.answer(2, 1) == "left lung" and names.answer(3, 3) == "severe" and names.answer(-1, 0) == ""
    )


def test_the_recipe_of_guide_004_trains_in_two_stages(twin: tuple[Path, Path], folder: Path) -> None:
    path = ROOT / "recipes" / "guide-004.yaml"
    assert "drivetrain train recipes/guide-004.yaml" in path.read_text()
    pretrain, finetune = recipe.load(str(path), [])
    assert (pretrain.settings["grade"], finetune.settings["grade"]) == ("B", "A")
    weights = [
        [stage.settings[f"{head}_weight"] for head in ("binary", "category", "region", "severity", "chexpert")]
        for stage in (pretrain, finetune)
    ]
    assert weights == [[1, 0.3, 0.3, 0.2, 0.3], [1, 0.5, 0.5, 0.3, 0.3]]
    assert finetune.settings["patience"] == 5 and finetune.references == {"start": "${pretrain.path}"}
    words = [
        *TINY[:-3],
        "global_batch=8",
        "plan.compile=off",
        f"data={twin[0]}",
        f"questions={twin[1]}",
        "eval_split=train",
        "max_studies=4",
    ]
    run_ok("train", str(path), *words, "steps=2", "warmup=1", "questions_per_image=16", "eval_every=2", "--name", "guide")
    assert json.loads(Path("runs/guide/2-finetune/run.json").read_text())["status"] == "finished"


def test_the_quick_start_recipe_needs_no_download() -> None:
    (quick,) = recipe.load("cxr-twin", [])
    assert quick.settings["data"] == "twin" and quick.settings["text"] == "small" and quick.settings["encoder_weights"] == "none"
    assert yaml.safe_load((ROOT / "src/drivetrain/recipes/cxr-twin.yaml").read_text())["task"] == "cxr"
    assert TWIN_STUDIES >= 20
