"""``python -m dtrain.export run.dir=DIR [export.dtype=bf16] [export.out=DIR2] [OPTION=VALUE ...] [KEY=VALUE ...]``

Turns a checkpoint into an artefact that ``dtrain.predict`` uses without the training config: weights folded in fp32, cast,
read back in a fresh process and compared with the fp32 model.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import nn

from dtrain import __version__
from dtrain.config import app
from dtrain.config.app import Composed
from dtrain.config.errors import ConfigError, users_to_fix
from dtrain.config.run import Run, recompose, take, without_secrets
from dtrain.config.schema import Config
from dtrain.deployment import artefact
from dtrain.deployment.artefact import Description
from dtrain.deployment.casting import cast, check_range
from dtrain.deployment.class_names import class_names
from dtrain.deployment.comparison import NotComparable, Samples, compare, sample
from dtrain.deployment.folding import fold, foldable
from dtrain.deployment.image_input import ImageInput
from dtrain.distributed.world import World
from dtrain.precision import Precision
from dtrain.tracking.console import print_banner
from dtrain.training import build
from dtrain.training.checkpoint import Checkpoints
from dtrain.training.loaders import declared_fields, eval_loader
from dtrain.training.state import load_weights

USAGE = """Usage
  python -m dtrain.export run.dir=DIR [OPTION=VALUE ...] [KEY=VALUE ...]

Options
  run.dir=DIR                    the run's directory
  export.dtype=fp32|bf16|fp16    dtype of the weights (default: bf16)
  export.format=safetensors      weights in a safetensors file, the model built by its _target_
  export.out=DIR2                folder to write (default: DIR/export); an artefact that is there is replaced
  checkpoint=best|latest|STEP    which checkpoint (default: best where the run keeps one, else latest)
  weights=ema|raw                moving average or raw weights (default: ema where there is one)
  samples=N                      rows of data.eval for the comparison with fp32 (default: 512; 0: no comparison)
  KEY=VALUE                      any key of the config, such as 'precision.keep_fp32=[head]' or data.eval=null
"""
OPTIONS = {"checkpoint": "", "weights": "", "samples": "512"}


@torch.no_grad()
def export(composed: Composed, which: str, weights: str, samples: str) -> None:
    """Writes the artefact of one checkpoint and prints how it compares with fp32.

    Args:
        composed: The run's config.
        which: ``best``, ``latest``, a step, or ``""`` for the default.
        weights: ``ema``, ``raw``, or ``""`` for the default.
        samples: How many rows of the evaluation set to compare on.
    """
    cfg: Config = composed.cfg
    run = Run.of(composed)
    world = one_process()
    precision = export_precision(cfg)
    out = Path(cfg.export.out).expanduser().absolute() if cfg.export.out is not None else run.dir / "export"
    artefact.check_place(out)
    if not samples.isdigit():
        raise ConfigError(f"samples: got {samples!r}, want a number of rows; 0 for no comparison.")

    # -- the trained model, in fp32
    with users_to_fix("checkpoint"):
        checkpoints = Checkpoints.of(run.dir, cfg.checkpoint)
    step = checkpoints.choose(which)
    checkpoint = checkpoints.load(step)
    Precision("fp32").apply(world.device)
    model = build.build_model(cfg.model, world.device).eval().requires_grad_(False)
    used = load_weights(model, checkpoint, weights)
    before = size(model)
    compared, why_not, image = reference(cfg, model, world, int(samples))

    # -- folded in fp32, then cast
    pairs, untraceable = foldable(model)
    kept = precision.wrap_keep_fp32(model)
    pairs = [pair for pair in pairs if not {*pair} & {*kept}]
    fold(model, pairs)
    vanished = check_range(model, precision.compute_dtype, kept, dict(pairs))
    cast(model, precision.compute_dtype, kept)

    # -- written aside, compared as it is on disk, then put in place
    description = Description(
        model=without_secrets(run.config["model"]),
        dtype=precision.name,
        keep_fp32=kept,
        folded=pairs,
        input=image,
        classes=class_names(None if OmegaConf.is_missing(cfg.data, "train") else cfg.data.train, cfg.data.eval),
        source={
            "run": run.dir.name,
            "checkpoint_step": step,
            "weights": used,
            "trained_in": cfg.precision.name,
            "task": run.config["task"].get("_target_"),
            "metrics": checkpoint.state.get("metrics", {}),
        },
        versions={"dtrain": __version__, "torch": torch.__version__},
    )
    with artefact.replacing(out) as folder:
        artefact.write(folder, model, description)
        report: dict[str, Any] = {
            "bytes": {"fp32": before, "exported": size(model)},
            "folded": len(pairs),
            "not_folded": untraceable,
            "became_zero": vanished,
            "comparison": compare(folder, compared, world.device) if compared is not None else None,
            "not_compared": why_not,
        }
        (folder / artefact.REPORT).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")

    print_banner("export", {"artefact": str(out), **rows(description, report)})


def one_process() -> World:
    """The world of this process.

    Raises:
        ConfigError: If there are more.
    """
    world = World.of()
    if world.size > 1:
        raise ConfigError(
            f"export runs in one process, torchrun started {world.size}. Use python -m dtrain.export, or --nproc-per-node=1."
        )
    return world


def export_precision(cfg: Config) -> Precision:
    """The precision that the weights shall have.

    Raises:
        ConfigError: If there is no such dtype or format.
    """
    if cfg.export.format not in artefact.FORMATS:
        raise ConfigError(f"export.format: got {cfg.export.format!r}, want one of {', '.join(artefact.FORMATS)}.")
    if cfg.export.dtype not in artefact.DTYPES:
        raise ConfigError(f"export.dtype: got {cfg.export.dtype!r}, want one of {', '.join(artefact.DTYPES)}.")
    return Precision(cfg.export.dtype, tuple(cfg.precision.keep_fp32))


def reference(
    cfg: Config, model: nn.Module, world: World, limit: int
) -> tuple[Samples | None, str | None, ImageInput | None]:
    """What to compare the artefact with, and what goes into it.

    Returns:
        Rows of the evaluation set with their fp32 outputs, or None and why there are none; the image that the task was
        seen to hand to the model, or, where nobody looked, the only one that the config declares.

    Raises:
        ConfigError: If the evaluation set cannot be read.
    """
    images = {field.name: field for field in declared_fields(cfg.data) if field.role == "image"}
    if not cfg.data.eval or not limit:
        only = ImageInput.of(next(iter(images.values()))) if len(images) == 1 else None
        return None, "samples=0" if cfg.data.eval else "data.eval is not set", only
    cfg.data.num_workers = 0  # some hundred rows are read before a worker has started
    try:
        if cfg.data.prepare is not None:
            with users_to_fix("data.prepare"):
                build.by_target("data.prepare", cfg.data.prepare)
        loader = eval_loader(cfg, world, Precision("fp32"))
        assert loader is not None
    except ConfigError as error:
        raise ConfigError(f"{error} (samples=0 exports without the comparison.)") from error
    try:
        found = sample(model, build.by_target("task", cfg.task), loader, images, world.device, limit)
    except NotComparable as error:
        return None, f"the model is no function of one tensor: {error}", None
    finally:
        loader.close()
    return found, None, found.image


def size(model: nn.Module) -> int:
    """Bytes of the tensors that would be saved."""
    return sum(tensor.nbytes for tensor in model.state_dict().values())


def rows(description: Description, report: dict[str, Any]) -> dict[str, str]:
    """What a person wants to know of an export, for ``print_banner``."""
    source, found = description.source, report["comparison"]
    before, after = report["bytes"]["fp32"], report["bytes"]["exported"]
    lines = {
        "from": f"step {source['checkpoint_step']} of {source['run']}, {source['weights']} weights",
        "weights": f"{description.dtype}, {after:,} bytes, {after / before:.2f} of fp32"
        + (f" (fp32 kept in {', '.join(description.keep_fp32)})" if description.keep_fp32 else ""),
        "BatchNorm": f"not folded: {report['not_folded']}" if report["not_folded"] else f"{report['folded']} folded",
    }
    if report["became_zero"]:
        names = ", ".join(f"{name} ({count})" for name, count in report["became_zero"].items())
        lines["became zero"] = names
    if found is None:
        return lines | {"not compared": report["not_compared"]}
    lines["outputs"] = (
        f"max error {found['max_abs_error']:.2e}, mean {found['mean_abs_error']:.2e} (fp32 outputs up to "
        f"{found['max_abs_output']:.3g}), {found['samples']} samples in a fresh process on {found['device']}"
    )
    if "top1_agreement" in found:
        lines["top-1"] = f"{found['top1_agreement']:.2%} as in fp32"
    return lines


def main() -> None:
    """Command line."""
    if {"--help", "-h"} & set(sys.argv[1:]):
        print(USAGE)
        return
    options, rest = take(sys.argv[1:], **OPTIONS)
    app.run(
        lambda composed: export(composed, options["checkpoint"], options["weights"], options["samples"]),
        rest,
        rewrite=recompose,
    )


if __name__ == "__main__":
    main()
