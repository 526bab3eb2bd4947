"""Encoders: timm's names and sizes, Hugging Face's weights, and errors that name the fix."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from drivetrain.outcomes import Problem
from drivetrain.tasks.cxr.net.convnext import SHAPES, ConvNext
from drivetrain.tasks.cxr.net.encoders import GreyImages, TimmEncoder, build_image_encoder
from drivetrain.tasks.cxr.net.text_encoders import Bert, PretrainedSource, PretrainedText, TextShape
from drivetrain.tasks.cxr.net.tokens import PretrainedTokenizer, WordTokenizer

# The numbers of parameters of timm's models, without the layer of the classes (num_classes=0).
TIMM_PARAMETERS = {"convnext_tiny": 27_820_128, "convnext_small": 49_454_688, "convnext_base": 87_566_464}


@pytest.mark.parametrize("name", list(TIMM_PARAMETERS))
def test_sizes_are_those_of_timm(name: str) -> None:
    with torch.device("meta"):
        net = ConvNext(SHAPES[name])
    assert sum(p.numel() for p in net.parameters()) == TIMM_PARAMETERS[name]


def test_names_are_those_of_timm() -> None:
    names = set(build_image_encoder("nano", "none").state_dict())
    block = {f"stages.2.blocks.3.{part}" for part in ("gamma", "conv_dw.weight", "norm.weight", "mlp.fc1.weight", "mlp.fc2.bias")}
    assert names >= block | {
        "stem.0.weight",
        "stem.1.weight",
        "stages.1.downsample.0.weight",
        "stages.1.downsample.1.bias",
        "head.norm.weight",
    }
    assert not any(name.startswith("stages.0.downsample") for name in names)


def test_weights_of_a_file_are_loaded_and_other_files_refused(tmp_path: Path) -> None:
    torch.manual_seed(0)
    one = build_image_encoder("nano", "none")
    tensors = {name: torch.randn_like(tensor) for name, tensor in one.state_dict().items()}
    save_file(tensors | {"head.fc.weight": torch.zeros(10, 128), "head.fc.bias": torch.zeros(10)}, tmp_path / "net.safetensors")
    other = build_image_encoder("nano", str(tmp_path / "net.safetensors"))
    assert all(torch.equal(tensors[name], tensor) for name, tensor in other.state_dict().items())
    save_file(tensors | {"stem.0.weight": torch.zeros(3, 3, 4, 4)}, tmp_path / "shape.safetensors")
    save_file({name: tensor for name, tensor in tensors.items() if name != "stem.0.bias"}, tmp_path / "short.safetensors")
    for file, reason in (("shape", "stem.0.weight has the shape"), ("short", "lacks stem.0.bias"), ("no", "no such file")):
        with pytest.raises(Problem, match=reason):
            build_image_encoder("nano", str(tmp_path / f"{file}.safetensors"))
    with pytest.raises(Problem, match="no ImageNet weights"):
        build_image_encoder("nano", "imagenet")
    with pytest.raises(Problem, match="imagenet, none, or a"):
        build_image_encoder("nano", "pretrained")


def test_a_map_has_a_cell_for_32_by_32_pixels() -> None:
    net = build_image_encoder("nano", "none")
    images = GreyImages()(torch.randint(0, 256, (2, 1, 96, 64), dtype=torch.uint8))
    assert net(images).shape == (2, 128, 3, 2)
    assert images.shape == (2, 3, 96, 64)


class Features(nn.Module):
    """Stands for a model of timm with features of any layout."""

    num_features = 5

    def __init__(self, features: Tensor, num_prefix_tokens: int = 0) -> None:
        super().__init__()
        self.features, self.num_prefix_tokens = features, num_prefix_tokens

    def forward_features(self, x: Tensor) -> Tensor:
        return self.features


def test_features_of_timm_in_any_layout_become_maps() -> None:
    maps = torch.randn(2, 5, 3, 3)
    rows = maps.flatten(2).transpose(1, 2)
    for features, prefix in ((maps, 0), (maps.permute(0, 2, 3, 1), 0), (torch.cat([torch.zeros(2, 1, 5), rows], 1), 1)):
        torch.testing.assert_close(TimmEncoder(Features(features, prefix))(torch.zeros(2, 3, 8, 8)), maps)


def test_other_names_come_from_timm(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def create_model(name: str, **options: Any) -> nn.Module:
        asked.append((name, options["pretrained"]))
        if name == "wrong":
            raise RuntimeError("Unknown model (wrong)")
        return Features(torch.zeros(1, 5, 2, 2))

    module = types.ModuleType("timm")
    module.create_model = create_model  # type: ignore[attr-defined]
    module.__spec__ = types.SimpleNamespace()  # type: ignore[assignment]
    monkeypatch.setitem(sys.modules, "timm", module)
    assert build_image_encoder("resnet18", "imagenet").num_features == 5
    assert asked == [("resnet18", True)]
    with pytest.raises(Problem, match="encoder=wrong: Unknown model"):
        build_image_encoder("wrong", "none")
    monkeypatch.delitem(sys.modules, "timm")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(Problem, match=r"needs timm: pip install .*did you mean convnext_base"):
        build_image_encoder("convnext_bas", "none")


class NormedHead(Features):
    """Stands for timm's ConvNeXt without classes: its head keeps the norm."""

    def __init__(self) -> None:
        super().__init__(torch.zeros(1, 5, 2, 2))
        self.stem = nn.Linear(2, 2)
        self.head = nn.ModuleDict({"norm": nn.LayerNorm(5)})


def test_a_file_for_a_model_of_timm_may_hold_layers_of_the_classes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    module = types.ModuleType("timm")
    module.create_model = lambda name, **options: NormedHead()  # type: ignore[attr-defined]
    module.__spec__ = types.SimpleNamespace()  # type: ignore[assignment]
    monkeypatch.setitem(sys.modules, "timm", module)
    tensors = {name: torch.randn_like(tensor) for name, tensor in NormedHead().state_dict().items()}
    classes = {name: torch.zeros(3, 5) for name in ("head.fc.weight", "classifier.weight", "fc.weight")}
    file = tmp_path / "net.safetensors"
    save_file(tensors | classes, file)
    encoder = build_image_encoder("convnext_large", str(file))
    assert isinstance(encoder, TimmEncoder)
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in encoder.net.state_dict().items())
    save_file({name: tensor for name, tensor in tensors.items() if name != "head.norm.weight"}, file)
    with pytest.raises(Problem, match=r"lacks head\.norm\.weight"):
        build_image_encoder("convnext_large", str(file))


def test_a_bert_has_the_features_of_hugging_face(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=40, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, max_position_embeddings=12
    )
    reference = transformers.BertModel(config).eval()
    reference.save_pretrained(tmp_path)
    own = PretrainedSource(str(tmp_path)).model(8).eval()
    assert isinstance(own, Bert)
    tokens = torch.randint(1, 40, (3, 8))
    is_token = torch.arange(8) < torch.tensor([[8], [3], [1]])
    expected = reference(input_ids=tokens, attention_mask=is_token.long()).last_hidden_state
    torch.testing.assert_close(own(tokens, is_token)[is_token], expected[is_token], rtol=1e-4, atol=1e-5)
    with pytest.raises(Problem, match="take max_tokens=12 or fewer"):
        PretrainedSource(str(tmp_path)).model(13)
    with pytest.raises(Problem, match=r"text=.* cannot be read .*text=small"):
        PretrainedSource(str(tmp_path / "nowhere")).tokenizer()


def test_other_models_of_hugging_face_are_wrapped(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.DistilBertConfig(vocab_size=40, dim=16, n_layers=1, n_heads=2, hidden_dim=32, max_position_embeddings=12)
    transformers.DistilBertModel(config).save_pretrained(tmp_path)
    text = PretrainedSource(str(tmp_path)).model(8).eval()
    assert isinstance(text, PretrainedText) and text.width == 16
    assert text(torch.ones(2, 8).int(), torch.ones(2, 8, dtype=torch.bool)).shape == (2, 8, 16)


def test_padding_tokens_change_nothing() -> None:
    torch.manual_seed(0)
    net = Bert(TextShape(30, 16, 2, 2, 32, 10)).eval()
    tokens, is_token = torch.randint(1, 30, (2, 10)), torch.arange(10) < torch.tensor([[4], [7]])
    changed = torch.where(is_token, tokens, torch.randint(1, 30, (2, 10)))
    torch.testing.assert_close(net(tokens, is_token)[is_token], net(changed, is_token)[is_token])


def test_a_word_tokenizer_knows_its_words() -> None:
    tokenizer = WordTokenizer(["is", "there", "?", "effusion"])
    assert tokenizer.encode(["Is there effusion?", "is there edema ?"]) == [[2, 3, 5, 4], [2, 3, 1, 4]]
    assert tokenizer.num_tokens == 6
    assert tokenizer.key != WordTokenizer(["there", "is", "?", "effusion"]).key


def test_a_pretrained_tokenizer_cuts_texts() -> None:
    class Tokenizer:
        def get_vocab(self) -> dict[str, int]:
            return {"a": 1}

        def __call__(self, texts: list[str], truncation: bool, max_length: int) -> dict[str, list[list[int]]]:
            return {"input_ids": [[101, *[7] * min(len(text.split()), max_length - 2), 102] for text in texts]}

    tokenizer = PretrainedTokenizer(Tokenizer(), 5)
    assert tokenizer.encode(["a b", "a b c d e f"]) == [[101, 7, 7, 102], [101, 7, 7, 7, 102]]
