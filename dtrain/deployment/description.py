"""``model.json``: what an artefact is, in which form it is stored, what goes in and where it comes from."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dtrain.config.errors import ConfigError
from dtrain.deployment.folding import Pair
from dtrain.deployment.formats import FORMATS
from dtrain.deployment.formats.format import Format
from dtrain.deployment.image_input import ImageInput
from dtrain.deployment.program import RowSpec

DTYPES = ("fp32", "bf16", "fp16")
DESCRIPTION = "model.json"
_KIND, _VERSION = "dtrain-artefact", 3


@dataclass(frozen=True)
class Description:
    """What ``model.json`` holds.

    Attributes:
        stored_as: One of ``FORMATS``.
        model: The config node that builds the model.
        dtype: One of ``DTYPES``.
        keep_fp32: Names of the modules that stay in fp32.
        folded: Pairs of convolution and BatchNorm that were merged.
        input: What goes in; None where that is no image.
        rows: Dtype and shape of what goes in; None where nobody saw any.
        classes: Names of the outputs; None if nobody gave them any.
        device: Type of the device that it was exported on.
        source: The run, the checkpoint's step and its metrics.
        versions: Of dtrain, torch, and what else the format is made with.
        channels_last: Layout of images and of convolutions' weights; torch's default if not.
    """

    stored_as: str
    model: dict[str, Any]
    dtype: str
    keep_fp32: list[str]
    folded: list[Pair]
    input: ImageInput | None
    rows: RowSpec | None
    classes: list[str] | None
    device: str
    source: dict[str, Any]
    versions: dict[str, str]
    channels_last: bool = True

    @property
    def format(self) -> Format:
        """The form in which the model is stored."""
        return FORMATS[self.stored_as]

    @property
    def file(self) -> str:
        """Name of the file that holds the model."""
        return self.format.file

    def write(self, folder: Path, sha256: str) -> None:
        """Writes ``model.json``.

        Args:
            folder: The artefact.
            sha256: Of the file that holds the model.

        Raises:
            OSError: If the disk refuses.
        """
        content = {
            "format": _KIND,
            "version": _VERSION,
            **vars(self),
            "input": self.input and self.input.to_json(),
            "rows": self.rows and vars(self.rows),
            "sha256": sha256,
        }
        (folder / DESCRIPTION).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> tuple[Description, str]:
        """What ``model.json`` says, and the SHA-256 that the file with the model should have.

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
            for key, known in (("dtype", DTYPES), ("stored_as", tuple(FORMATS))):
                if content[key] not in known:
                    raise ValueError(f"{key} {content[key]!r} is none of {', '.join(known)}")
            image, rows, classes = content["input"], content["rows"], content["classes"]
            if classes is not None and not (
                isinstance(classes, list) and all(isinstance(name, str) for name in classes)
            ):
                raise ValueError(f"classes {classes!r} is no list of names")
            description = cls(
                stored_as=content["stored_as"],
                model=dict(content["model"]),
                dtype=content["dtype"],
                keep_fp32=[str(name) for name in content["keep_fp32"]],
                folded=[(str(conv), str(norm)) for conv, norm in content["folded"]],
                input=ImageInput.from_json(image) if image is not None else None,
                rows=RowSpec.from_json(rows) if rows is not None else None,
                classes=classes,
                device=str(content["device"]),
                source=dict(content["source"]),
                versions=dict(content["versions"]),
                channels_last=bool(content["channels_last"]),
            )
            return description, str(content["sha256"])
        except ConfigError:
            raise
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path} is damaged ({type(error).__name__}: {error}). Export the run again.") from error
