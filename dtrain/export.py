"""``python -m dtrain.export run.dir=DIR [export.dtype=bf16] [export.format=pt2] [OPTION=VALUE ...] [KEY=VALUE ...]``

Turns a checkpoint into an artefact that ``dtrain.predict`` uses without the training config: weights folded in fp32, cast,
read back in a fresh process and compared with the fp32 model. What is too far from it is refused.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dtrain import __version__
from dtrain.config import app
from dtrain.config.app import Composed
from dtrain.config.errors import ConfigError, users_to_fix
from dtrain.config.run import Run, recompose, take, without_secrets
from dtrain.config.schema import Config
from dtrain.data.class_names import class_names
from dtrain.deployment import artefact, cost, divergence, measure_command
from dtrain.deployment.casting import cast, check_range
from dtrain.deployment.comparison import compare
from dtrain.deployment.description import DESCRIPTION, DTYPES, Description
from dtrain.deployment.divergence import Departure
from dtrain.deployment.folding import fold, foldable, outside
from dtrain.deployment.formats import FORMATS
from dtrain.deployment.program import Program, RowSpec
from dtrain.deployment.reference import Reference
from dtrain.deployment.summary import summary
from dtrain.deployment.tolerance import Tolerance
from dtrain.deployment.trust import remember
from dtrain.deployment.verdict import require_close
from dtrain.distributed.world import World
from dtrain.precision import Precision
from dtrain.precision.scripted import refuse_scripted
from dtrain.tracking.console import print_banner
from dtrain.training import build
from dtrain.training.checkpoints import Checkpoints
from dtrain.training.state import load_weights

USAGE = """Usage
  python -m dtrain.export run.dir=DIR [OPTION=VALUE ...] [KEY=VALUE ...]
  python -m dtrain.export measure ARTEFACT [ARTEFACT ...]    time and memory of artefacts that are there already

Options
  run.dir=DIR                    the run's directory
  export.dtype=fp32|bf16|fp16    dtype of the weights (default: bf16)
  export.format=safetensors      weights in a safetensors file, the model built by its _target_
  export.format=pt2              a program for torch.export.load, which needs no training code
  export.format=aotinductor      the same compiled for this kind of machine; needs a C++ compiler
  export.format=onnx             a graph for onnxruntime and others, fp32 or fp16; needs the extra dtrain[onnx]
  export.format=[FORMAT,...]     several, each in a folder of its name in export.out
  export.out=DIR2                folder to write (default: DIR/export); an artefact that is there is replaced
  export.tolerance=X             largest error of an output, as a part of the largest one (fp32 0.001, fp16 0.01, bf16 0.08)
  export.max_metric_difference=X of accuracy, loss, ... from fp32 (default: fp32 0.001, fp16 0.01, bf16 0.02)
  export.measure=false           not how long a forward takes and how much memory, beside the same weights in fp32
  export.batch=[1,32]            rows of the forwards that are measured
  export.max_latency_ms=X        also look for the largest batch that takes at most so long
  export.max_memory_gib=X        and at most so much memory
  checkpoint=best|latest|STEP    which checkpoint (default: best where the run keeps one, else latest)
  weights=ema|raw                moving average or raw weights (default: ema where there is one)
  samples=N                      rows of data.eval for the comparison with fp32 (default: 512; 0: no comparison)
  KEY=VALUE                      any key of the config, such as 'precision.keep_fp32=[head]' or data.eval=null
"""
OPTIONS = {"checkpoint": "", "weights": "", "samples": "512"}


@torch.no_grad()
def export(composed: Composed, which: str, weights: str, samples: str) -> None:
    """Writes the artefacts of one checkpoint and prints how they compare with fp32.

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
    places = destinations(cfg, run)
    cost.check(cfg.export)
    if not samples.isdecimal():
        raise ConfigError(f"samples: got {samples!r}, want a number of rows; 0 for no comparison.")

    # -- the trained model, in fp32
    with users_to_fix("checkpoint"):
        checkpoints = Checkpoints.of(run.dir, cfg.checkpoint)
    step = checkpoints.choose(which)
    checkpoint = checkpoints.load(step)
    Precision("fp32").apply(world.device)

    def trained() -> tuple[nn.Module, str]:
        model = build.build_model(cfg.model, world.device, cfg.train.channels_last)
        refuse_scripted(model, "", "dtrain.export")
        model.eval().requires_grad_(False)
        return model, load_weights(model, checkpoint, weights)

    model, used = trained()
    before = size(model)
    reference = Reference.of(cfg, model, world, int(samples))
    compared, image = reference.samples, reference.image
    classes = class_names(cfg.data)
    example = reference.example(world.device)
    if example is None and any(FORMATS[stored_as].traced for stored_as in places):
        raise ConfigError(
            f"export.format: {' and '.join(places)}: a program is traced with rows, and nobody saw any "
            f"({reference.why_not}). Set data.eval and samples, or use export.format=safetensors."
        )
    tolerance = Tolerance.of(cfg.export, len(compared.rows) if compared is not None else 0)

    # -- folded in fp32, then cast
    pairs, untraceable = foldable(model)
    kept = precision.wrap_keep_fp32(model)
    pairs = outside(kept, pairs)
    fold(model, pairs)
    vanished = check_range(model, precision.compute_dtype, kept, dict(pairs))
    cast(model, precision.compute_dtype, kept)
    program = Program(model, image, precision.compute_dtype, cfg.train.channels_last).eval()

    def departures(numbers: Tensor) -> list[Departure]:
        original = Program(trained()[0], image, torch.float32, cfg.train.channels_last)
        assert compared is not None
        return divergence.departures(original, program, compared.rows[numbers].to(world.device), pairs)

    def in_fp32() -> nn.Module:
        original = trained()[0]
        fold(original, pairs)
        return original

    for stored_as, out in places.items():
        description = Description(
            stored_as=stored_as,
            model=without_secrets(run.config["model"]),
            dtype=precision.name,
            keep_fp32=kept,
            folded=pairs,
            input=image,
            rows=RowSpec.of(example) if example is not None else None,
            classes=classes,
            device=world.device.type,
            source={
                "run": run.dir.name,
                "checkpoint_step": step,
                "weights": used,
                "trained_in": cfg.precision.name,
                "task": run.config["task"].get("_target_"),
                "metrics": checkpoint.state.get("metrics", {}),
            },
            versions={"dtrain": __version__, "torch": torch.__version__, **FORMATS[stored_as].versions()},
            channels_last=cfg.train.channels_last,
        )
        device = description.format.runs_on(world.device)
        # -- written aside, compared as it is on disk, then put in place
        with artefact.replacing(out) as folder:
            _say(f"writing {description.file}")
            artefact.write(folder, program, description, example)
            report: dict[str, Any] = {
                "dtype": precision.name,
                "format": stored_as,
                "bytes": {"fp32": before, "exported": size(model), "file": (folder / description.file).stat().st_size},
                "ratio": size(model) / before,
                "folded": len(pairs),
                "not_folded": untraceable,
                "became_zero": vanished,
                "comparison": None,
                "not_compared": reference.why_not,
                "device": str(device),
                "versions": description.versions,
            }
            if compared is not None:
                _say(f"comparing it with fp32 on {len(compared.rows):,} samples, in a fresh process")
                comparison = compare(folder, compared, device)
                require_close(comparison, tolerance, description, departures)
                report["comparison"] = comparison.report(tolerance)
            if cfg.export.measure:
                _say("measuring what it costs")
            twin = in_fp32 if precision.name != "fp32" else None
            report["cost"] = cost.measured(cfg.export, folder, description, twin, world.device)
            (folder / artefact.REPORT).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        remember(out)
        print_banner("export", {"artefact": str(out), **summary(description, report), **cost.summary(report["cost"])})


def _say(what: str) -> None:
    print(f"... {what}", file=sys.stderr, flush=True)


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
        ConfigError: If there is no such dtype.
    """
    if cfg.export.dtype not in DTYPES:
        raise ConfigError(f"export.dtype: got {cfg.export.dtype!r}, want one of {', '.join(DTYPES)}.")
    return Precision(cfg.export.dtype, tuple(cfg.precision.keep_fp32))


def destinations(cfg: Config, run: Run) -> dict[str, Path]:
    """Where the artefact of each wanted format goes.

    Raises:
        ConfigError: If there is no such format, something that it needs is missing, or something else lies in the place.
    """
    wanted = cfg.export.format
    formats = list(wanted) if isinstance(wanted, Sequence) and not isinstance(wanted, str) else [wanted]
    if not formats or not {*formats} <= FORMATS.keys():
        raise ConfigError(f"export.format: got {wanted!r}, want one or several of {', '.join(FORMATS)}.")
    for stored_as in formats:
        FORMATS[stored_as].check(cfg.export.dtype)
    out = Path(cfg.export.out).expanduser().absolute() if cfg.export.out is not None else run.dir / "export"
    if isinstance(wanted, str):
        places = {wanted: out}
    elif (out / DESCRIPTION).exists():
        raise ConfigError(
            f"export.out: {out} is an artefact, and {wanted} needs a folder for several. Name another one."
        )
    else:
        places = {stored_as: out / stored_as for stored_as in formats}
    for place in places.values():
        artefact.check_place(place)
    return places


def size(model: nn.Module) -> int:
    """Bytes of the tensors that would be saved."""
    return sum(tensor.nbytes for tensor in model.state_dict().values())


def main() -> None:
    """Command line."""
    if sys.argv[1:2] == ["measure"]:
        sys.exit(measure_command.main(sys.argv[2:]))
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
