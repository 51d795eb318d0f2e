"""``model.json``: the model of an artefact, its input, its storage format and the run that it comes from."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dtrain.errors import ConfigError
from dtrain.export.fold_cast import Pair
from dtrain.export.program import ImageInput, RowSpec
from dtrain.files import MAX_JSON_BYTES, read_bounded

DTYPES = ("fp32", "bf16", "fp16")
DESCRIPTION = "model.json"
_KIND, _VERSION = "dtrain-artefact", 3


@dataclass(frozen=True)
class Description:
    """The content of ``model.json``.

    Attributes:
        stored_as: Name of the storage format, a key of ``FORMATS``.
        model: Config node that builds the model.
        dtype: Dtype of the weights, one of ``DTYPES``.
        keep_fp32: Names of the modules that stay in fp32.
        folded: Pairs of convolution and BatchNorm that were merged.
        input: Preprocessing of the image that the model takes; None if it takes something else.
        rows: Dtype and shape of the model's input; None if unknown.
        classes: Names of the outputs; None if the dataset does not name its classes.
        device: Type of the device on which the artefact was exported.
        source: The run, the checkpoint's step and its metrics.
        versions: Versions of dtrain, torch and the packages of the format.
        channels_last: Whether images and convolution weights are in channels_last layout.
        tokenizer: Identity of the tokenizer, whose vocabulary file is in the artefact; None if the model takes no text.
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
    tokenizer: str | None = None

    @property
    def facts(self) -> dict[str, str]:
        """The metadata that is stored in a file with the weights."""
        return {
            "model": str(self.model.get("_target_")),
            "dtype": self.dtype,
            "batchnorm": "folded" if self.folded else "kept",
            "run": str(self.source.get("run")),
            "step": str(self.source.get("checkpoint_step")),
            "dtrain": self.versions.get("dtrain", ""),
        }

    def write(self, folder: Path, sha256: str) -> None:
        """Writes ``model.json``; ``sha256`` is the hash of the model's file.

        Raises:
            OSError: On a write failure.
        """
        content = {"format": _KIND, "version": _VERSION, **asdict(self), "sha256": sha256}
        (folder / DESCRIPTION).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> tuple[Description, str, bytes]:
        """Reads ``model.json``: the description, the expected SHA-256 of the model's file, and its own bytes.

        It does not check whether the storage format exists; ``artefact.read_description`` does.

        Raises:
            ConfigError: If the folder is not an artefact, or its ``model.json`` is damaged or of a different version.
        """
        path = folder / DESCRIPTION
        if not path.is_file():
            raise ConfigError(
                f"{folder} is not an artefact: it has no {DESCRIPTION}. Export one: dtrain export run.dir=DIR"
            )
        try:
            text = read_bounded(path, MAX_JSON_BYTES)
            content = json.loads(text)
            kind, version = content["format"], content["version"]
            if (kind, version) != (_KIND, _VERSION):
                raise ConfigError(
                    f"{path}: format {kind!r} version {version!r}; this dtrain reads {_KIND!r} version {_VERSION}. Export "
                    "the run again with this version."
                )
            if content["dtype"] not in DTYPES:
                raise ValueError(f"dtype {content['dtype']!r} is none of {', '.join(DTYPES)}")
            image, rows, classes = content["input"], content["rows"], content["classes"]
            if classes is not None and [str(name) for name in classes] != classes:
                raise ValueError(f"classes {classes!r} is not a list of names")
            description = cls(
                stored_as=str(content["stored_as"]),
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
                tokenizer=str(content["tokenizer"]) if content["tokenizer"] is not None else None,
            )
            return description, str(content["sha256"]), text
        except ConfigError:
            raise
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise ConfigError(f"{path} is damaged ({type(error).__name__}: {error}). Export the run again.") from error


def export_summary(description: Description, report: dict[str, Any], *, file: str, holds_code: bool) -> dict[str, str]:
    """Summarises an export for ``print_banner``.

    Args:
        description: Description of the artefact.
        report: Content of ``report.json``.
        file: Name of the model's file.
        holds_code: Whether this file holds code, so that other users need ``--trust`` to load it.
    """
    source, comparison = description.source, report["comparison"]
    before, after = report["bytes"]["fp32"], report["bytes"]["exported"]
    lines = {
        "from": f"step {source['checkpoint_step']} of {source['run']}, {source['weights']} weights",
        "weights": f"{description.dtype}, {after:,} bytes, {after / before:.2f} of fp32"
        + (f" (fp32 kept in {', '.join(description.keep_fp32)})" if description.keep_fp32 else ""),
        "file": f"{file}, {report['bytes']['file']:,} bytes"
        + (f", takes {description.rows}" if description.rows is not None else "")
        + ("; holds code, so dtrain predict needs --trust on other machines" if holds_code else ""),
        "BatchNorm": f"not folded: {report['not_folded']}" if report["not_folded"] else f"{report['folded']} folded",
    }
    if report["became_zero"]:
        lines["became zero"] = ", ".join(f"{name} ({count})" for name, count in report["became_zero"].items())
    if comparison is None:
        return lines | {"not compared": report["not_compared"]}
    lines["outputs"] = (
        f"max error {comparison['max_abs_error']:.2e}, mean {comparison['mean_abs_error']:.2e} (fp32 outputs up to "
        f"{comparison['max_abs_output']:.3g}), {comparison['samples']} samples in a fresh process on {comparison['device']}"
    )
    if "top1_agreement" in comparison:
        lines["top-1"] = f"{comparison['top1_agreement']:.2%} of the samples have the same best class as in fp32"
    return lines | {
        name: f"{values['exported']:.4f}, fp32 {values['fp32']:.4f} (difference {values['difference']:+.4f})"
        for name, values in comparison["metrics"].items()
    }
