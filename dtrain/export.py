"""Exports a checkpoint as an artefact: ``python -m dtrain.export run.dir=DIR [OPTION=VALUE ...] [KEY=VALUE ...]``.

An artefact needs no training config (``dtrain.deployment``). The export folds BatchNorm in fp32, casts the weights, writes the
artefact, loads it in a process of its own and compares it with the fp32 model. An artefact that differs by more than the
tolerance is refused. With ``export.push`` it is then published on the Hugging Face hub.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor, nn

from dtrain import __version__
from dtrain.config import compose
from dtrain.config.compose import Composed
from dtrain.config.errors import ConfigError, as_config_error
from dtrain.config.run import Run, recompose, take, without_secrets
from dtrain.config.schema import Config
from dtrain.data.tokenizers import VOCABULARY, Tokenizer
from dtrain.deployment import artefact, benchmark
from dtrain.deployment.compare import ModuleError, Tolerance, compare, compare_modules, require_close
from dtrain.deployment.description import DESCRIPTION, DTYPES, Description, export_summary
from dtrain.deployment.fold_cast import cast, check_range, fold, foldable, pairs_outside
from dtrain.deployment.formats import FORMATS
from dtrain.deployment.hub import Push, model_identity
from dtrain.deployment.model_card import ModelCard
from dtrain.deployment.program import Program, RowSpec
from dtrain.deployment.reference import Reference
from dtrain.distributed.world import World
from dtrain.precision import Precision
from dtrain.precision.modules import refuse_scripted
from dtrain.tracking.console import print_banner
from dtrain.training import build
from dtrain.training.checkpoints import Checkpoints
from dtrain.training.loaders import class_names, corpus_beside
from dtrain.training.state import load_weights

USAGE = """Usage
  python -m dtrain.export run.dir=DIR [OPTION=VALUE ...] [KEY=VALUE ...]
  python -m dtrain.export measure ARTEFACT [ARTEFACT ...]    measures existing artefacts; see measure --help

Options
  run.dir=DIR                    the run's directory
  export.dtype=fp32|bf16|fp16    dtype of the weights (default: bf16)
  export.format=safetensors      weights in a safetensors file; the model is built by its _target_ (default)
  export.format=pt2              a program for torch.export.load; needs no training code
  export.format=aotinductor      the same, compiled for one kind of device; exporting needs a C++ compiler
  export.format=onnx             a graph for onnxruntime and other runtimes, fp32 or fp16; needs the extra dtrain[onnx]
  export.format=[FORMAT,...]     several formats, each in a folder of its name inside export.out
  export.out=DIR2                folder to write (default: DIR/export); an artefact in its place is replaced
  export.tolerance=X             largest error of an output, as a fraction of the largest fp32 output (default: fp32 0.001,
                                 fp16 0.01, bf16 0.08)
  export.max_metric_difference=X largest difference of accuracy, loss, ... from fp32 (default: fp32 0.001, fp16 0.01,
                                 bf16 0.02)
  export.measure=false           do not measure latency, throughput and memory beside the same weights in fp32
  export.batch=[1,32]            batch sizes to measure
  export.max_latency_ms=X        also find the largest batch that takes at most X ms
  export.max_memory_gib=X        also find the largest batch that takes at most X GiB
  export.fold=false              keep BatchNorm, so that a training can start from the weights (run.weights_from)
  export.push=hf://ORG/NAME      also publish the artefact with a model card on the Hugging Face hub; ORG/NAME@BRANCH for a
                                 branch. The token is HF_TOKEN, or that of `hf auth login`; needs the extra dtrain[hf]
  export.private=false           a repository that the push creates is public (default: private)
  export.license=NAME            licence in the model card, such as apache-2.0
  export.push_replace=true       replace a repository that has another model
  checkpoint=best|latest|STEP    which checkpoint (default: best if the run keeps one, else latest)
  weights=ema|raw                moving average or raw weights (default: ema if the run has one)
  samples=N                      rows of data.eval for the comparison with fp32 (default: 512; 0: no comparison)
  --trust                        use a run that somebody else started: its saved command line can run any code
  KEY=VALUE                      any key of the config, such as 'precision.keep_fp32=[head]' or data.eval=null
"""
OPTIONS = {"checkpoint": "", "weights": "", "samples": "512"}


def main() -> None:
    """Command line."""
    if sys.argv[1:2] == ["measure"]:
        sys.exit(benchmark.main(sys.argv[2:]))
    if {"--help", "-h"} & set(sys.argv[1:]):
        print(USAGE)
        return
    options, rest = take(sys.argv[1:], **OPTIONS)

    def rewrite(arguments: list[str]) -> list[str]:
        if any(argument.lstrip("+").startswith(("export.token=", "export.hf_token=")) for argument in arguments):
            raise ConfigError(
                "export.token: there is no such key, because a command line is seen by others and saved. Set the environment "
                "variable HF_TOKEN, or run `hf auth login` once."
            )
        return recompose(arguments)

    compose.run(
        lambda composed: export(composed, options["checkpoint"], options["weights"], options["samples"]),
        rest,
        rewrite=rewrite,
    )


@torch.no_grad()
def export(composed: Composed, which: str, weights: str, samples: str) -> None:
    """Writes the artefacts of one checkpoint and prints their differences from fp32.

    Args:
        composed: The run's config.
        which: ``best``, ``latest``, a step, or ``""`` for the default.
        weights: ``ema``, ``raw``, or ``""`` for the default.
        samples: Number of rows of the evaluation set to compare on, as text.

    Raises:
        ConfigError: If an option is impossible, the weights do not fit into the dtype, the model cannot be stored in a format,
            or an artefact differs from fp32 by more than the tolerance.
    """
    cfg: Config = composed.cfg
    run = Run.of(composed)

    # -- options, checked before anything is loaded
    world = _single_process_world()
    precision = _export_precision(cfg)
    destinations = _destinations(cfg, run)
    benchmark.check_budget(cfg.export)
    classes = class_names(cfg.data)
    tokenizer = _tokenizer(cfg)
    if not samples.isdecimal():
        raise ConfigError(f"samples: got {samples!r}, want a number of rows; 0 for no comparison.")
    model_node, task_name = without_secrets(run.config["model"]), run.config["task"].get("_target_")
    tokenizer_name = tokenizer.identity if tokenizer is not None else None
    push = Push.of(cfg.export, model_identity(model_node, task_name, classes, tokenizer_name))

    # -- the trained model in fp32, and its outputs on rows of the evaluation set
    with as_config_error("checkpoint"):
        checkpoints = Checkpoints.of(run.dir, cfg.checkpoint)
    step = checkpoints.choose(which)
    checkpoint = checkpoints.load(step)
    Precision("fp32").apply(world.device)

    def load_trained() -> tuple[nn.Module, str]:
        model = build.build_model(cfg.model, world.device, cfg.train.channels_last)
        refuse_scripted(model, "", "dtrain.export")
        model.eval().requires_grad_(False)
        return model, load_weights(model, checkpoint, weights)

    model, used_weights = load_trained()
    bytes_in_fp32 = _bytes_of_state(model)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    reference = Reference.of(cfg, model, world, int(samples))
    example = reference.example(world.device)
    if example is None and any(FORMATS[stored_as].traced for stored_as in destinations):
        raise ConfigError(
            f"export.format: got {', '.join(destinations)}, which needs example rows to trace the model, and there are none "
            f"({reference.missing_because}). Set data.eval and samples, or use export.format=safetensors."
        )
    tolerance = Tolerance.of(cfg.export, len(reference.rows.inputs) if reference.rows is not None else 0)

    # -- folded in fp32, then cast
    pairs, not_folded = foldable(model) if cfg.export.fold else ([], "export.fold=false")
    keep_fp32 = precision.wrap_keep_fp32(model)
    pairs = pairs_outside(keep_fp32, pairs)
    fold(model, pairs)
    became_zero = check_range(model, precision.compute_dtype, keep_fp32, dict(pairs))
    cast(model, precision.compute_dtype, keep_fp32)
    program = Program(model, reference.image, precision.compute_dtype, cfg.train.channels_last).eval()

    def module_errors(numbers: Tensor) -> list[ModuleError]:
        assert reference.rows is not None
        original = Program(load_trained()[0], reference.image, torch.float32, cfg.train.channels_last)
        return compare_modules(original, program, reference.rows.inputs[numbers].to(world.device), pairs)

    def folded_in_fp32() -> nn.Module:
        original = load_trained()[0]
        fold(original, pairs)
        return original

    # -- each format: written to a staged folder, checked from there, then moved into place
    for stored_as, out in destinations.items():
        form = FORMATS[stored_as]
        device = form.runs_on(world.device)
        description = Description(
            stored_as=stored_as,
            model=model_node,
            dtype=precision.name,
            keep_fp32=keep_fp32,
            folded=pairs,
            input=reference.image,
            rows=RowSpec.of(example) if example is not None else None,
            classes=classes,
            device=world.device.type,
            source={
                "run": run.dir.name,
                "checkpoint_step": step,
                "weights": used_weights,
                "trained_in": cfg.precision.name,
                "task": task_name,
                "metrics": checkpoint.state.get("metrics", {}),
            },
            versions={"dtrain": __version__, "torch": torch.__version__, **form.versions()},
            channels_last=cfg.train.channels_last,
            tokenizer=tokenizer_name,
        )
        with artefact.replacing(out) as folder:
            _print_progress(f"writing {form.file}")
            artefact.write(folder, program, description, example)
            if tokenizer is not None:
                tokenizer.save(folder)
            config = run.published()
            (folder / artefact.CONFIG).write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
            bytes_exported = _bytes_of_state(model)
            report: dict[str, Any] = {
                "dtype": precision.name,
                "format": stored_as,
                "bytes": {
                    "fp32": bytes_in_fp32,
                    "exported": bytes_exported,
                    "file": (folder / form.file).stat().st_size,
                },
                "ratio": bytes_exported / bytes_in_fp32,
                "folded": len(pairs),
                "not_folded": not_folded,
                "became_zero": became_zero,
                "comparison": None,
                "not_compared": reference.missing_because,
                "device": str(device),
                "versions": description.versions,
            }
            if reference.rows is not None:
                _print_progress(f"comparing with fp32 on {len(reference.rows.inputs):,} samples")
                comparison = compare(folder, reference.rows, device)
                require_close(comparison, tolerance, description, module_errors)
                report["comparison"] = comparison.report(tolerance)
            if cfg.export.measure:
                _print_progress("measuring latency, throughput and memory")
            in_fp32 = folded_in_fp32 if precision.name != "fp32" else None
            report["cost"] = benchmark.benchmark_export(cfg.export, folder, description, in_fp32, world.device)
            (folder / artefact.REPORT).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
            if push is not None:
                license, known = cfg.export.license, push.front_matter
                ModelCard(
                    push.model, run, config, description, report, checkpoint.state, parameters, license, known
                ).write(folder)
        artefact.mark_trusted(out)
        summary = export_summary(description, report, file=form.file, holds_code=form.holds_code)
        if push is not None:
            _print_progress(f"pushing to {push.model}")
            summary["hub"] = push.upload(
                out, f"{description.dtype} {stored_as} of step {step} of {run.dir.name}, by dtrain"
            )
        print_banner("export", {"artefact": str(out), **summary, **benchmark.benchmark_summary(report["cost"])})


def _single_process_world() -> World:
    world = World.of()
    if world.size > 1:
        raise ConfigError(
            f"dtrain.export runs in one process, but torchrun started {world.size}. Use python -m dtrain.export, or "
            "--nproc-per-node=1."
        )
    return world


def _export_precision(cfg: Config) -> Precision:
    if cfg.export.dtype not in DTYPES:
        raise ConfigError(f"export.dtype: got {cfg.export.dtype!r}, want one of {', '.join(DTYPES)}.")
    return Precision(cfg.export.dtype, tuple(cfg.precision.keep_fp32))


def _tokenizer(cfg: Config) -> Tokenizer | None:
    """The tokenizer of the training shards, if the task needs it."""
    corpus = corpus_beside(cfg.data) if build.takes_corpus(cfg.task) else None
    if corpus is None:
        return None
    if not (corpus.folder / VOCABULARY).is_file() and corpus.tokenizer_identity.startswith("tokenizers:"):
        # Shards of earlier versions; their models can be exported nevertheless.
        _print_progress(
            f"without a tokenizer, so dtrain.predict --prompt is not possible: {corpus.folder} has no {VOCABULARY}. Pack the "
            "text again, which writes it, and export again."
        )
        return None
    with as_config_error("export"):
        return corpus.tokenizer()


def _destinations(cfg: Config, run: Run) -> dict[str, Path]:
    """Name of each requested format to the folder of its artefact; checks formats and folders."""
    wanted = cfg.export.format
    formats = list(wanted) if isinstance(wanted, Sequence) and not isinstance(wanted, str) else [wanted]
    if not formats or not {*formats} <= FORMATS.keys():
        raise ConfigError(f"export.format: got {wanted!r}, want one or several of {', '.join(FORMATS)}.")
    for stored_as in formats:
        FORMATS[stored_as].check(cfg.export.dtype)
    out = Path(cfg.export.out).expanduser().absolute() if cfg.export.out is not None else run.dir / "export"
    if isinstance(wanted, str):
        destinations = {wanted: out}
    elif (out / DESCRIPTION).exists():
        raise ConfigError(
            f"export.out: {out} is an artefact, but export.format={wanted} needs a folder that holds several. Set export.out "
            "to another folder."
        )
    else:
        destinations = {stored_as: out / stored_as for stored_as in formats}
    for destination in destinations.values():
        artefact.check_place(destination)
    return destinations


def _bytes_of_state(model: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in model.state_dict().values())


def _print_progress(text: str) -> None:
    print(f"... {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
