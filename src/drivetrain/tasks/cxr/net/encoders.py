"""Image encoders: `build_image_encoder` gives one by name, with random, ImageNet's or a file's weights."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch._guards import detect_fake_mode

from drivetrain.outcomes import Problem
from drivetrain.settings import nearest
from drivetrain.tasks.cxr.net.convnext import SHAPES, ConvNext
from drivetrain.tasks.lora.base_model import hub_answers

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""ImageNet's: what pretrained encoders expect."""
FRESH_SCALE = 0.1
"""The first layer scale of a ConvNeXt that begins with random weights. With ImageNet's 1e-6 it would hardly learn at first."""


class GreyImages(nn.Module):
    """Grey images as bytes to the three normalised channels of an encoder."""

    mean: Tensor
    std: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor(MEAN).view(1, 3, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(STD).view(1, 3, 1, 1), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        grey = images.float() / 255 if images.dtype == torch.uint8 else images
        return (grey - self.mean) / self.std


class TimmEncoder(nn.Module):
    """Any model of timm: images to a feature map [n, channels, height, width], whatever the layout of its own features."""

    def __init__(self, net: Any) -> None:
        super().__init__()
        self.net = net
        self.num_features = int(net.num_features)
        self.num_prefix_tokens = int(getattr(net, "num_prefix_tokens", 0))

    def forward(self, x: Tensor) -> Tensor:
        features: Tensor = self.net.forward_features(x)
        if features.dim() == 3:  # tokens of a transformer, row by row
            features = features[:, self.num_prefix_tokens :]
            side = round(features.shape[1] ** 0.5)
            return features.transpose(1, 2).unflatten(2, (side, side))  # type: ignore[no-any-return]
        return features if features.shape[1] == self.num_features else features.permute(0, 3, 1, 2)


def build_image_encoder(name: str, weights: str) -> ConvNext | TimmEncoder:
    """Returns the encoder of this name. `weights`: imagenet, none (random), or a .safetensors file with timm's names."""
    check_weights(weights)
    if name not in SHAPES:
        return _timm_encoder(name, weights)
    encoder = ConvNext(SHAPES[name], 1e-6 if weights != "none" else FRESH_SCALE)
    if weights != "none" and detect_fake_mode() is None:  # a plan needs no values
        load_named_weights(encoder, _read(name, weights), f"encoder_weights={weights}", ("head.fc.",))
    return encoder


def check_weights(weights: str) -> None:
    """Raises Problem for a value of `encoder_weights` that cannot be read."""
    if weights in ("imagenet", "none"):
        return
    if not weights.endswith(".safetensors"):
        raise Problem(f"encoder_weights={weights} does not fit: imagenet, none, or a .safetensors file with the names of timm")
    if not Path(weights).is_file():
        raise Problem(f"encoder_weights={weights}: there is no such file")


def _read(name: str, weights: str) -> dict[str, Tensor]:
    if weights != "imagenet":
        return load_file(weights)  # type: ignore[no-any-return]
    if not SHAPES[name].weights:
        raise Problem(f"encoder={name} has no ImageNet weights: take encoder_weights=none, or an encoder such as convnext_tiny")
    return load_file(_downloaded(SHAPES[name].weights, "model.safetensors"))  # type: ignore[no-any-return]


def _downloaded(repository: str, file: str) -> str:
    """Returns the path of a file of the hub, downloaded once."""
    if importlib.util.find_spec("huggingface_hub") is None:
        raise Problem("encoder_weights=imagenet downloads from the hub: pip install 'drivetrain[cxr]'")
    if os.environ.get("DRIVETRAIN_OFFLINE"):
        os.environ["HF_HUB_OFFLINE"] = "1"
    from huggingface_hub import hf_hub_download

    try:
        return str(hf_hub_download(repository, file, local_files_only=not hub_answers()))
    except (OSError, ValueError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise Problem(
            f"the weights {repository} cannot be downloaded ({reason}): give their file, encoder_weights=FILE.safetensors, or encoder_weights=none"
        ) from None


def load_named_weights(module: nn.Module, tensors: Mapping[str, Tensor], origin: str, ignored: tuple[str, ...] = ()) -> None:
    """Loads a state dict; raises Problem if a name or a shape does not fit. Names that begin with `ignored` are left out,
    unless the module has them."""
    own = module.state_dict()
    given = {name: tensor for name, tensor in tensors.items() if name in own or not name.startswith(ignored)}
    missing, foreign = sorted(own.keys() - given.keys()), sorted(given.keys() - own.keys())
    if missing or foreign:
        word = f"lacks {missing[0]}" if missing else f"has {foreign[0]}, which the model does not have"
        raise Problem(f"{origin} holds other weights than this model's: it {word}")
    for name, tensor in given.items():
        if tensor.shape != own[name].shape:
            raise Problem(f"{origin}: {name} has the shape {list(tensor.shape)}, and the model needs {list(own[name].shape)}")
    module.load_state_dict(given)


def _timm_encoder(name: str, weights: str) -> TimmEncoder:
    if importlib.util.find_spec("timm") is None:
        known = ", ".join(SHAPES)
        raise Problem(f"encoder={name} needs timm: pip install 'drivetrain[cxr]' (without it: {known}){nearest(name, SHAPES)}")
    try:
        import timm
    except (ImportError, RuntimeError, AttributeError) as error:  # torchvision of another torch version
        raise Problem(f"encoder={name} needs timm, which cannot be imported here ({error}); without it: {', '.join(SHAPES)}") from None
    is_real = detect_fake_mode() is None
    try:
        net = timm.create_model(name, pretrained=weights == "imagenet" and is_real, num_classes=0, in_chans=3)
    except (RuntimeError, ValueError, OSError) as error:
        raise Problem(f"encoder={name}: {next(iter(str(error).splitlines()), type(error).__name__)}") from None
    if weights.endswith(".safetensors") and is_real:
        load_named_weights(net, load_file(weights), f"encoder_weights={weights}", ("head.", "classifier.", "fc."))
    return TimmEncoder(net)
