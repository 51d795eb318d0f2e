"""The artefact: a folder that is complete or not there, and how it is read back.

``model.json`` says how to build the model, in which form its weights were brought and what goes in. Building runs code
that it names, so by default nothing but a class derived from ``torch.nn.Module`` is called.
"""

from __future__ import annotations

import hashlib
import json
import os
import pkgutil
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from omegaconf import OmegaConf
from safetensors import SafetensorError
from torch import Tensor, nn

from dtrain.config.errors import ConfigError
from dtrain.deployment.casting import cast
from dtrain.deployment.folding import Pair, fold
from dtrain.deployment.image_input import ImageInput
from dtrain.precision import Precision
from dtrain.training.build import build_model
from dtrain.training.state import host_copy, load_module

FORMATS = ("safetensors",)
DTYPES = ("fp32", "bf16", "fp16")
WEIGHTS, DESCRIPTION, REPORT = "model.safetensors", "model.json", "report.json"
_KIND, _VERSION = "dtrain-artefact", 1


@dataclass(frozen=True)
class Description:
    """What ``model.json`` holds.

    Attributes:
        model: The config node that builds the model.
        dtype: One of ``DTYPES``.
        keep_fp32: Names of the modules that stay in fp32.
        folded: Pairs of convolution and BatchNorm that were merged.
        input: What goes in; None where that is no image.
        classes: Names of the outputs; None if nobody gave them any.
        source: The run, the checkpoint's step and its metrics.
        versions: Of dtrain and torch.
    """

    model: dict[str, Any]
    dtype: str
    keep_fp32: list[str]
    folded: list[Pair]
    input: ImageInput | None
    classes: list[str] | None
    source: dict[str, Any]
    versions: dict[str, str]


@dataclass(frozen=True)
class Artefact:
    """A model ready for use.

    Attributes:
        description: Where it comes from and what it takes.
        model: In eval mode, its weights cast.
        device: Where it is.
        warnings: What the user should know of this dtype on this device.
    """

    description: Description
    model: nn.Module
    device: torch.device
    warnings: list[str]

    @torch.inference_mode()
    def outputs(self, rows: Tensor) -> Tensor:
        """The model's outputs in fp32, on the device.

        Args:
            rows: What the loader hands over: uint8 ``[rows, height, width, 3]`` for an image model, else the model's
                argument itself; floats are cast.
        """
        rows = rows.to(self.device)
        precision = Precision(self.description.dtype)
        if self.description.input is not None:
            rows = self.description.input.arrive(rows, precision)
        elif rows.is_floating_point():
            rows = rows.to(precision.compute_dtype)
        return torch.as_tensor(self.model(rows)).float()


def check_place(out: Path) -> None:
    """Looks whether an artefact may be written there: nothing lies there yet, or an empty folder, or an artefact.

    Raises:
        ConfigError: If something else does.
    """
    if not out.exists():
        return
    if not out.is_dir():
        raise ConfigError(f"export.out: {out} is a file. Name a folder that does not exist yet.")
    names = {entry.name for entry in out.iterdir()}
    foreign = sorted(names - {WEIGHTS, DESCRIPTION, REPORT})
    if foreign or (names and DESCRIPTION not in names):
        raise ConfigError(
            f"export.out: {out} exists and is not an artefact (it holds {(foreign or sorted(names))[0]}). Name a folder "
            "that does not exist yet, or an artefact to replace."
        )


@contextmanager
def replacing(out: Path) -> Iterator[Path]:
    """A folder beside ``out`` that takes its place when the block ends without an error.

    Raises:
        ConfigError: If ``out`` is something else than an artefact, or the folder cannot be written.
    """
    check_place(out)
    aside = out.with_name(f".{out.name}.{os.getpid()}")
    replaced = aside.with_suffix(".replaced")
    try:
        aside.mkdir(parents=True)
        yield aside
        if out.exists():
            os.rename(out, replaced)
        os.rename(aside, out)
        shutil.rmtree(replaced, ignore_errors=True)
    except OSError as error:
        if replaced.exists() and not out.exists():
            os.rename(replaced, out)
        raise ConfigError(f"export.out: {out} cannot be written ({error}).") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def write(folder: Path, model: nn.Module, description: Description) -> None:
    """Writes weights and description.

    Raises:
        OSError: If the disk refuses.
    """
    safetensors.torch.save_file(host_copy(model.state_dict()), folder / WEIGHTS)
    content = {
        "format": _KIND,
        "version": _VERSION,
        **vars(description),
        "input": description.input and description.input.to_json(),
        "weights": {"file": WEIGHTS, "sha256": _digest(folder / WEIGHTS)},
    }
    (folder / DESCRIPTION).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def read_description(folder: Path) -> tuple[Description, str]:
    """What ``model.json`` says, and the SHA-256 that the weights should have.

    Raises:
        ConfigError: If the folder is no artefact of this version.
    """
    path = folder / DESCRIPTION
    if not path.is_file():
        raise ConfigError(
            f"{folder} is no artefact (it has no {DESCRIPTION}). Make one: python -m dtrain.export run.dir=DIR"
        )
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        kind, version = content["format"], content["version"]
        if (kind, version) != (_KIND, _VERSION):
            raise ConfigError(
                f"{path}: format {kind!r} version {version!r}; this dtrain reads {_KIND!r} version {_VERSION}. Export "
                "the run again with this version."
            )
        if content["dtype"] not in DTYPES:
            raise ValueError(f"dtype {content['dtype']!r} is none of {', '.join(DTYPES)}")
        given = content["input"]
        description = Description(
            model=dict(content["model"]),
            dtype=content["dtype"],
            keep_fp32=[str(name) for name in content["keep_fp32"]],
            folded=[(str(conv), str(norm)) for conv, norm in content["folded"]],
            input=ImageInput.from_json(given) if given is not None else None,
            classes=content["classes"],
            source=dict(content["source"]),
            versions=dict(content["versions"]),
        )
        return description, content["weights"]["sha256"]
    except ConfigError:
        raise
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is damaged ({type(error).__name__}: {error}). Export the run again.") from error


def load(folder: Path, device: torch.device, *, trust: bool = False) -> Artefact:
    """Builds the model of an artefact and fills in its weights.

    Args:
        folder: The artefact.
        device: Where to.
        trust: Also call what is not a class derived from ``torch.nn.Module``.

    Raises:
        ConfigError: If the folder is no artefact, its files do not agree, its ``_target_`` is refused or cannot be
            imported, or the device has no such arithmetic.
    """
    description, expected = read_description(folder)
    try:
        if (found := _digest(folder / WEIGHTS)) != expected:
            raise ConfigError(f"{folder / WEIGHTS} has SHA-256 {found}, {DESCRIPTION} says {expected}. Export again.")
        tensors = safetensors.torch.load_file(folder / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{folder / WEIGHTS} cannot be read ({error}). Export again.") from error
    if not trust:
        _require_modules(description.model, folder)
    precision = Precision(description.dtype)
    warnings = precision.apply(device)
    model = build_model(OmegaConf.create(description.model), device).eval().requires_grad_(False)
    try:
        fold(model, description.folded)
    except AttributeError as error:
        raise ConfigError(
            f"{folder}: the model that {description.model.get('_target_')} builds here has changed since the export "
            f"({error}). Use the code that it was exported with."
        ) from error
    cast(model, precision.compute_dtype, description.keep_fp32)
    load_module(model, tensors, str(folder))
    return Artefact(description, model, device, warnings)


def _require_modules(node: Any, folder: Path) -> None:
    """Refuses a node in which a ``_target_`` is anything else than a class of modules."""
    if isinstance(node, Mapping):
        if "_target_" in node:
            target = node["_target_"]
            try:
                found = pkgutil.resolve_name(str(target))
            except (ImportError, AttributeError, ValueError) as error:
                raise ConfigError(
                    f"{folder}: its model is built by {target}, which cannot be imported ({error}). Install its package, "
                    "or set PYTHONPATH to the folder of its module."
                ) from error
            if not (isinstance(found, type) and issubclass(found, nn.Module)):
                raise ConfigError(
                    f"{folder}: its model is built by calling {target}, which is not a torch.nn.Module class and could "
                    "do anything. If you trust whoever made the artefact, add --trust."
                )
        for value in node.values():
            _require_modules(value, folder)
    elif isinstance(node, Sequence) and not isinstance(node, str):
        for value in node:
            _require_modules(value, folder)


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
