"""One export, from the options to the published artefact, in six phases.

1. *Check*: the options, and the repository of a push. Everything that can be checked without the model is checked here.
2. *Load*: the trained model in fp32, and its outputs on rows of the evaluation set.
3. *Fold and cast*: BatchNorm is merged into convolutions, the weights become ``export.dtype``.
4. *Write*: model, ``model.json`` and the run's config, into a staged folder.
5. *Compare and measure*: the written artefact against fp32. It is refused if it differs by more than the tolerance.
6. *Publish*: the folder moves into place, and to the hub.

Phases 4 to 6 run once for each format. With ``export.adapter=separate``, the adapter alone is written after phase 2.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor, nn

from dtrain import __version__
from dtrain.config.compose import Composed
from dtrain.config.schema import Config
from dtrain.console import print_banner
from dtrain.data.fields.tokenizers import Tokenizer
from dtrain.distributed.world import World
from dtrain.errors import ConfigError, as_config_error
from dtrain.export import adapter, artefact, benchmark
from dtrain.export.compare import ModuleError, Tolerance, compare, compare_modules, require_close
from dtrain.export.description import DESCRIPTION, DTYPES, Description, export_summary
from dtrain.export.fold_cast import Pair, cast, check_fits_dtype, fold, foldable, pairs_outside
from dtrain.export.formats import FORMATS
from dtrain.export.hub import Push, model_identity
from dtrain.export.model_card import ModelCard
from dtrain.export.program import Program, RowSpec
from dtrain.export.reference import Reference
from dtrain.precision import Precision
from dtrain.precision.modules import refuse_scripted
from dtrain.runs.run_spec import RunSpec, config_without_secrets
from dtrain.training import build
from dtrain.training.checkpoint.checkpoints import Checkpoint, Checkpoints
from dtrain.training.checkpoint.rest import source_of_rest
from dtrain.training.checkpoint.resume import pin_weights
from dtrain.training.setup.loaders import class_names, corpus_beside


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
    plan = _check(composed, samples)
    trained = _load(plan, which, weights)
    if plan.cfg.export.adapter == adapter.SEPARATE:
        _write_adapter(plan, trained)
        return
    exported = _fold_and_cast(plan, trained)
    for stored_as, out in plan.destinations.items():
        with artefact.replacing(out) as folder:
            description = _write(folder, stored_as, plan, trained, exported)
            report = _compare_and_measure(folder, description, plan, trained, exported)
            if plan.push is not None:
                _card(plan, trained, description, report, plan.push).write(folder)
        _publish(out, description, report, plan.push)


# -- 1. check


@dataclass(frozen=True)
class _Plan:
    """The checked options.

    Attributes:
        precision: ``export.dtype``.
        destinations: Name of each format to the folder of its artefact.
        samples: Largest number of rows to compare on.
        model: Config that builds the exported model, without secrets.
        task: Target of the task.
    """

    cfg: Config
    spec: RunSpec
    world: World
    precision: Precision
    destinations: dict[str, Path]
    samples: int
    classes: list[str] | None
    tokenizer: Tokenizer | None
    model: dict[str, Any]
    task: Any
    push: Push | None


def _check(composed: Composed, samples: str) -> _Plan:
    cfg: Config = composed.cfg
    spec = RunSpec.from_composed(composed)
    world = World.of_one_process("dtrain export")
    if cfg.export.dtype not in DTYPES:
        raise ConfigError(f"export.dtype: got {cfg.export.dtype!r}, want one of {', '.join(DTYPES)}.")
    precision = Precision(cfg.export.dtype, tuple(cfg.precision.keep_fp32))
    destinations = _destinations(cfg, spec)
    _check_adapter(cfg)
    benchmark.check_budget(cfg.export)
    classes, tokenizer = class_names(cfg.data), _tokenizer(cfg)
    if not samples.isdecimal():
        raise ConfigError(f"samples: got {samples!r}, want a number of rows; 0 for no comparison.")
    model, task = config_without_secrets(spec.config["model"]), spec.config["task"].get("_target_")
    if cfg.export.adapter == adapter.MERGED:
        model = adapter.without_adapter(model)
    push = Push.from_config(cfg.export, model_identity(model, task, classes, tokenizer.identity if tokenizer else None))
    return _Plan(
        cfg, spec, world, precision, destinations, int(samples), classes, tokenizer, model=model, task=task, push=push
    )


def _destinations(cfg: Config, spec: RunSpec) -> dict[str, Path]:
    """Name of each requested format to the folder of its artefact; checks formats and folders."""
    wanted = cfg.export.format
    formats = list(wanted) if isinstance(wanted, Sequence) and not isinstance(wanted, str) else [wanted]
    if not formats or not {*formats} <= FORMATS.keys():
        raise ConfigError(f"export.format: got {wanted!r}, want one or several of {', '.join(FORMATS)}.")
    for stored_as in formats:
        FORMATS[stored_as].check(cfg.export.dtype)
    out = Path(cfg.export.out).expanduser().absolute() if cfg.export.out is not None else spec.dir / "export"
    if isinstance(wanted, str):
        destinations = {wanted: out}
    elif (out / DESCRIPTION).exists():
        raise ConfigError(
            f"export.out: {out} is an artefact, but export.format={wanted} needs a folder that holds several. Set export.out "
            "to a different folder."
        )
    else:
        destinations = {stored_as: out / stored_as for stored_as in formats}
    for destination in destinations.values():
        artefact.check_place(destination)
    return destinations


def _check_adapter(cfg: Config) -> None:
    if cfg.export.adapter not in adapter.ADAPTERS:
        raise ConfigError(f"export.adapter: got {cfg.export.adapter!r}, want one of {', '.join(adapter.ADAPTERS)}.")
    if cfg.export.adapter == adapter.SEPARATE and (cfg.export.format != "safetensors" or cfg.export.push is not None):
        raise ConfigError(
            f"export.adapter: got {adapter.SEPARATE}, which writes files of peft. Leave out export.format and export.push."
        )


def _tokenizer(cfg: Config) -> Tokenizer | None:
    """The tokenizer of the training shards, if the task needs it."""
    corpus = corpus_beside(cfg.data) if build.takes_corpus(cfg.task) else None
    if corpus is None:
        return None
    with as_config_error("export"):
        return corpus.tokenizer()


# -- 2. load


@dataclass(frozen=True)
class _Trained:
    """The trained model and its outputs.

    Attributes:
        step: Step of the checkpoint.
        build: Builds the trained model once more, in fp32.
        model: The trained model in fp32; phase 3 changes it in place.
        weights: ``ema`` or ``raw``.
        parameters: Number of its parameters.
        nbytes: Bytes of its state in fp32.
        example: Two input rows; None if dtype and shape are unknown.
    """

    checkpoint: Checkpoint
    step: int
    build: Callable[[], nn.Module]
    model: nn.Module
    weights: str
    parameters: int
    nbytes: int
    reference: Reference
    example: Tensor | None
    tolerance: Tolerance


def _load(plan: _Plan, which: str, weights: str) -> _Trained:
    cfg, device = plan.cfg, plan.world.device
    with as_config_error("checkpoint"):
        checkpoints = Checkpoints.from_config(plan.spec.dir, cfg.checkpoint)
    step = checkpoints.choose(which)
    checkpoint = checkpoints.load(step)
    Precision("fp32").apply(device)
    if checkpoint.rest is not None:  # the initial weights are needed, at the commit that the run has used
        cfg = pin_weights(cfg, plan.spec)[0]

    def load_trained() -> tuple[nn.Module, str]:
        model, used = build.build_trained(cfg, device, checkpoint, weights)
        refuse_scripted(model, "", "dtrain export")
        return model.eval().requires_grad_(False), used

    def merged(model: nn.Module) -> nn.Module:
        return adapter.merge(model, cfg.model) if cfg.export.adapter == adapter.MERGED else model

    model, used_weights = load_trained()
    reference = Reference.measure(cfg, model, plan.world, plan.samples)
    model = merged(model)
    example = reference.example(device)
    if example is None and any(FORMATS[stored_as].traced for stored_as in plan.destinations):
        raise ConfigError(
            f"export.format: got {', '.join(plan.destinations)}, which needs example rows to trace the model, and there are "
            f"none ({reference.missing_because}). Set data.eval and samples, or use export.format=safetensors."
        )
    return _Trained(
        checkpoint=checkpoint,
        step=step,
        build=lambda: merged(load_trained()[0]),
        model=model,
        weights=used_weights,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        nbytes=_nbytes(model),
        reference=reference,
        example=example,
        tolerance=Tolerance.from_config(cfg.export, len(reference.rows.inputs) if reference.rows is not None else 0),
    )


def _write_adapter(plan: _Plan, trained: _Trained) -> None:
    out, source = plan.destinations["safetensors"], source_of_rest(plan.cfg.model, plan.cfg.run)
    check_fits_dtype(trained.model, plan.precision.compute_dtype, [], {})
    with artefact.replacing(out) as folder:
        nbytes = adapter.write_adapter(trained.model, plan.precision.compute_dtype, folder)
    rows = {
        "adapter": str(out),
        "from": f"step {trained.step} of {plan.spec.dir.name}, {trained.weights} weights",
        "weights": f"{plan.precision.name}, {nbytes:,} bytes, without the base ({source})",
        "load with": "peft.PeftModel.from_pretrained(base, folder)",
    }
    print_banner("export", rows)


# -- 3. fold and cast


@dataclass(frozen=True)
class _Exported:
    """The model to write.

    Attributes:
        pairs: The pairs that were folded.
        not_folded: Reason why BatchNorm was not folded; None if it was, or there is none.
        keep_fp32: Names of the modules that stay in fp32.
        became_zero: Name of a tensor to the number of its values that became zero.
    """

    program: Program
    pairs: list[Pair]
    not_folded: str | None
    keep_fp32: list[str]
    became_zero: dict[str, int]


def _fold_and_cast(plan: _Plan, trained: _Trained) -> _Exported:
    model, dtype = trained.model, plan.precision.compute_dtype
    pairs, not_folded = foldable(model) if plan.cfg.export.fold else ([], "export.fold=false")
    keep_fp32 = plan.precision.wrap_keep_fp32(model)
    pairs = pairs_outside(keep_fp32, pairs)
    fold(model, pairs)
    became_zero = check_fits_dtype(model, dtype, keep_fp32, dict(pairs))
    cast(model, dtype, keep_fp32)
    program = Program(model, trained.reference.image, dtype, plan.cfg.train.channels_last).eval()
    return _Exported(program, pairs, not_folded, keep_fp32, became_zero)


# -- 4. write


def _write(folder: Path, stored_as: str, plan: _Plan, trained: _Trained, exported: _Exported) -> Description:
    """Writes all of the artefact but its report and its card."""
    form = FORMATS[stored_as]
    description = Description(
        stored_as=stored_as,
        model=plan.model,
        dtype=plan.precision.name,
        keep_fp32=exported.keep_fp32,
        folded=exported.pairs,
        input=trained.reference.image,
        rows=RowSpec.from_rows(trained.example) if trained.example is not None else None,
        classes=plan.classes,
        device=plan.world.device.type,
        source={
            "run": plan.spec.dir.name,
            "checkpoint_step": trained.step,
            "weights": trained.weights,
            "trained_in": plan.cfg.precision.name,
            "task": plan.task,
            "metrics": trained.checkpoint.state["metrics"],
        },
        versions={"dtrain": __version__, "torch": torch.__version__, **form.versions()},
        channels_last=plan.cfg.train.channels_last,
        tokenizer=plan.tokenizer.identity if plan.tokenizer is not None else None,
    )
    _print_progress(f"writing {form.file}")
    artefact.write(folder, exported.program, description, trained.example)
    if plan.tokenizer is not None:
        plan.tokenizer.save(folder)
    config = yaml.safe_dump(plan.spec.published(), sort_keys=False)
    (folder / artefact.CONFIG).write_text(config, encoding="utf-8")
    return description


# -- 5. compare and measure


def _compare_and_measure(
    folder: Path, description: Description, plan: _Plan, trained: _Trained, exported: _Exported
) -> dict[str, Any]:
    """Writes ``report.json`` and returns its content."""
    reference, form = trained.reference, FORMATS[description.stored_as]
    device = form.runs_on(plan.world.device)
    nbytes = _nbytes(exported.program.model)
    report: dict[str, Any] = {
        "dtype": description.dtype,
        "format": description.stored_as,
        "bytes": {"fp32": trained.nbytes, "exported": nbytes, "file": (folder / form.file).stat().st_size},
        "ratio": nbytes / trained.nbytes,
        "folded": len(exported.pairs),
        "not_folded": exported.not_folded,
        "became_zero": exported.became_zero,
        "comparison": None,
        "not_compared": reference.missing_because,
        "device": str(device),
        "versions": description.versions,
    }
    if (rows := reference.rows) is not None:

        def module_errors(numbers: Tensor) -> list[ModuleError]:
            original = Program(trained.build(), reference.image, torch.float32, description.channels_last)
            return compare_modules(
                original, exported.program, rows.inputs[numbers].to(plan.world.device), exported.pairs
            )

        _print_progress(f"comparing with fp32 on {len(rows.inputs):,} samples")
        comparison = compare(folder, rows, device)
        require_close(comparison, trained.tolerance, description, module_errors)
        report["comparison"] = comparison.report(trained.tolerance)

    def folded_in_fp32() -> nn.Module:
        original = trained.build()
        fold(original, exported.pairs)
        return original

    if plan.cfg.export.measure:
        _print_progress("measuring latency, throughput and memory")
    in_fp32 = folded_in_fp32 if description.dtype != "fp32" else None
    report["cost"] = benchmark.benchmark_export(plan.cfg.export, folder, description, in_fp32, plan.world.device)
    (folder / artefact.REPORT).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return report


# -- 6. publish


def _card(plan: _Plan, trained: _Trained, description: Description, report: dict[str, Any], push: Push) -> ModelCard:
    return ModelCard(
        model=push.model,
        spec=plan.spec,
        config=plan.spec.published(),
        description=description,
        report=report,
        state=trained.checkpoint.state,
        parameters=trained.parameters,
        license=plan.cfg.export.license,
        intended_use=plan.cfg.export.intended_use,
        limitations=plan.cfg.export.limitations,
        front_matter=push.front_matter,
    )


def _publish(out: Path, description: Description, report: dict[str, Any], push: Push | None) -> None:
    """Marks the artefact as this user's, pushes it, and prints the summary."""
    artefact.mark_trusted(out)
    form, source = FORMATS[description.stored_as], description.source
    summary = export_summary(description, report, file=form.file, holds_code=form.holds_code)
    if push is not None:
        _print_progress(f"pushing to {push.model}")
        origin = f"step {source['checkpoint_step']} of {source['run']}"
        summary["hub"] = push.upload(out, f"{description.dtype} {description.stored_as} of {origin}, by dtrain")
    print_banner("export", {"artefact": str(out), **summary, **benchmark.benchmark_summary(report["cost"])})


def _nbytes(model: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in model.state_dict().values())


def _print_progress(text: str) -> None:
    print(f"... {text}", file=sys.stderr, flush=True)
