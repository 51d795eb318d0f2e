"""``dtrain evaluate run.dir=DIR [checkpoint=best|latest|STEP] [weights=ema|raw] [precision=fp32,bf16] ...``

Evaluates a checkpoint of a run on its evaluation data, or on ``data.eval=...``: each sample once, with the same result for any
number of ranks. It uses the run's config with the overrides of the command line. With several precisions it evaluates the
same weights in each, and prints the results side by side.

``artefact=DIR data.eval=...``, or ``artefact=hf://ORGANISATION/NAME[@REVISION]``, evaluates an artefact of ``dtrain export`` in
its own dtype, with the task and fields of the config in it.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
import yaml
from rich.console import Console
from torch import Tensor, nn

from dtrain import command_line
from dtrain.config import compose
from dtrain.config.schema import Config
from dtrain.console import print_banner, progress
from dtrain.data import ShardLoader
from dtrain.data.shards.bad_shards import RECORD
from dtrain.distributed.collectives import from_rank0, on_all_ranks
from dtrain.distributed.hang import HangWatch
from dtrain.distributed.process_group import process_group, settle_network
from dtrain.distributed.world import World, join_srun
from dtrain.errors import ConfigError, as_config_error
from dtrain.export import artefact
from dtrain.export.fold_cast import cast_inputs
from dtrain.export.hub import pull
from dtrain.export.program import Program
from dtrain.files import parse_yaml, read_bounded
from dtrain.precision import Precision
from dtrain.runs import evaluation_results
from dtrain.runs.evaluation_results import CheckpointEvaluation, aligned
from dtrain.runs.hub import is_hub_url
from dtrain.runs.recompose import recompose, take
from dtrain.runs.run_spec import CONFIG, RunSpec, config_without_secrets, parse_mapping, refuse_hidden
from dtrain.runs.trust import TRUST, is_own, require_harmless
from dtrain.training.build import EvaluationParts, build_for_evaluation, build_precision, build_task
from dtrain.training.checkpoint.checkpoints import Checkpoint, Checkpoints
from dtrain.training.checkpoint.resume import pin_weights
from dtrain.training.evaluation import evaluate
from dtrain.training.monitor.memory import forget_peak, peak
from dtrain.training.setup.loaders import (
    check_same_data,
    class_names,
    corpus_beside,
    eval_loader,
    on_all_ranks_alike,
    prepare_data,
)
from dtrain.training.task import NotFinite

USAGE = """Usage
  dtrain evaluate [--nproc N] run.dir=DIR [OPTION=VALUE ...] [KEY=VALUE ...]
  dtrain evaluate [--nproc N] artefact=ARTEFACT data.eval=SHARDS [out=DIR2] [KEY=VALUE ...]

Options
  run.dir=DIR                    the run's directory
  artefact=DIR                   a safetensors artefact instead of a run, or hf://ORG/NAME[@REVISION] on the Hugging Face hub
  checkpoint=best|latest|STEP    which checkpoint (default: best if the run keeps one, else latest)
  weights=ema|raw                averaged or raw weights (default: ema if the checkpoint has them)
  precision=NAME[,NAME ...]      one precision or several: precision=fp32,bf16,fp16 (default: the run's)
  out=DIR2                       folder for the result as JSON and a picture (default: DIR/evaluations)
  --trust                        use a run that a different user started: its saved command line can run any code
  KEY=VALUE                      any key of the config, such as 'data.eval="shards/val-*.tar"'
"""


# Keys of the config in an artefact that an evaluation depends on. The model comes from its model.json.
_OF_ARTEFACT = (
    *("task", "data.eval", "data.fields", "data.mixture", "data.missing", "data.image_size", "data.max_bad"),
    *("data.transfer", "data.on_overflow", "train.global_batch_size", "train.micro_batch_size", "train.channels_last"),
    "train.metrics",
)


def run_evaluation(configs: Sequence[compose.Composed], which: str, weights: str, out: str) -> None:
    """Evaluates one checkpoint; prints and writes the result on rank 0.

    Args:
        configs: The run's config in each precision.
        which: ``best``, ``latest``, a step, or ``""`` for the default.
        weights: ``ema``, ``raw``, or ``""`` for the default.
        out: Folder to write to, or ``""`` for the default.

    Raises:
        ConfigError: On every rank, if the evaluation is impossible; or if a metric is not finite, after everything was
            printed and written.
    """
    cfg: Config = configs[0].cfg
    spec = RunSpec.from_composed(configs[0])
    with process_group(cfg.parallel.timeout_start) as world, HangWatch(world, cfg.parallel):
        if not cfg.data.eval:
            raise ConfigError("data.eval is not set, so there is nothing to evaluate on. Set data.eval=...")
        checkpoints = Checkpoints.from_config(spec.dir, cfg.checkpoint)
        step = checkpoints.choose(which)
        checkpoint = on_all_ranks(lambda: checkpoints.load(step))
        if checkpoint.rest is not None:  # the initial weights are needed, at the commit that the run has used
            run = pin_weights(cfg, spec)[0].run
            for one in configs:
                one.cfg.run = run
        for warning in on_all_ranks(lambda: check_precisions(configs, world)):
            if world.rank == 0:
                print(warning, flush=True)
        if (record := from_rank0(lambda: _record_of_shards(spec))) is not None:
            for one in configs:
                one.cfg.data.bad_shards = record
        prepare_data(cfg.data)
        names = on_all_ranks(lambda: class_names(cfg.data))
        path = checkpoints.path(step)
        results = [evaluate_checkpoint(one, precision_name(one), world, checkpoint, path, weights) for one in configs]
        if world.rank == 0:
            show(results, names)
        folder = Path(out).expanduser().absolute() if out else spec.dir / "evaluations"
        from_rank0(lambda: write(results, names, folder))
        if problem := evaluation_results.explain_not_finite(results):
            raise ConfigError(problem)


def _record_of_shards(spec: RunSpec) -> str | None:
    """The record of the damaged shards that the run leaves out; None if it has none, or is evaluated on other data."""
    record = spec.dir.absolute() / RECORD
    if not record.exists():
        return None
    saved = parse_mapping(spec.dir / CONFIG, read_bounded(spec.dir / CONFIG))
    return str(record) if saved.get("data", {}).get("eval") == spec.config["data"]["eval"] else None


def run_artefact_evaluation(composed: compose.Composed, folder: Path, name: str, out: str, *, trust: bool) -> None:
    """Evaluates an artefact in its own dtype; prints and writes the result on rank 0.

    Args:
        composed: The config of the artefact.
        folder: The artefact.
        name: What it is called in the result.
        out: Folder to write to, or ``""`` for ``evaluations``.
        trust: As ``artefact.load``.

    Raises:
        ConfigError: On every rank, as ``run_evaluation``.
    """
    cfg: Config = composed.cfg
    with process_group(cfg.parallel.timeout_start) as world, HangWatch(world, cfg.parallel):
        if not cfg.data.eval:
            raise ConfigError(
                "data.eval is not set, and the artefact's own is on a different machine. Set data.eval=..."
            )
        expected = from_rank0(lambda: artefact.read_description(folder)[1])

        def load() -> artefact.Artefact:
            if artefact.read_description(folder)[1] != expected:
                raise ConfigError(
                    f"artefact: {folder} is not the one that rank 0 has. Name a commit, hf://ORG/NAME@COMMIT."
                )
            return artefact.load(folder, world.device, trust=trust)

        model = on_all_ranks(load)
        if not isinstance(model.program, Program):
            raise ConfigError(
                f"artefact: {folder} is stored as {model.description.stored_as}, whose preprocessing is part of its program. "
                "Evaluate one of export.format=safetensors; dtrain export has compared the others with fp32 (report.json)."
            )
        names = on_all_ranks(lambda: class_names(cfg.data)) or model.description.classes
        precision = Precision("fp32")  # of the loader: the artefact casts its input itself
        loader = on_all_ranks_alike(lambda also_bad: eval_loader(cfg, world, precision, also_bad))
        assert loader is not None  # data.eval is set
        check_same_data(None, loader)
        task = on_all_ranks(lambda: build_task(cfg.task, corpus_beside(cfg.data), cfg.train.metrics))
        dtype = Precision(model.description.dtype).compute_dtype
        parts = EvaluationParts(precision, loader, AsExported(model.program.model, dtype), "exported", task)
        result = evaluate_parts(composed, model.description.dtype, world, parts, Path(name))
        result = dataclasses.replace(result, config={**result.config, "model": model.description.model})
        if world.rank == 0:
            show([result], names)
        from_rank0(lambda: write([result], names, Path(out or "evaluations").expanduser().absolute()))
        if problem := evaluation_results.explain_not_finite([result]):
            raise ConfigError(problem)


class AsExported(nn.Module):
    """The model of an artefact as a task calls it: floats become its dtype, and its output fp32."""

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.model = model
        self._dtype = dtype

    def forward(self, *rows: Any, **options: Any) -> Any:
        """Calls the model, see above."""
        rows, options = cast_inputs(self._dtype, self.model, rows, options)
        outputs = self.model(*rows, **options)
        return outputs.float() if isinstance(outputs, Tensor) else outputs


def recompose_artefact(folder: Path, arguments: Sequence[str], presets: Path) -> list[str]:
    """The command line that composes the config in an artefact, with ``arguments`` on top.

    Args:
        folder: The artefact.
        arguments: What was typed.
        presets: An empty folder. The config becomes a preset in it: Hydra's command line cannot express every key of a mapping,
            such as ``jpg;png`` of ``data.fields``.

    Raises:
        ConfigError: If the artefact has no config, or another user's config names code outside dtrain and torch.
    """
    path = folder / artefact.CONFIG
    typed = {argument.partition("=")[0] for argument in arguments}
    if chosen := typed & {"run.dir", "precision", "model"}:
        raise ConfigError(f"{min(chosen)}: an artefact has its own. Leave out either this key or artefact=.")
    if not path.is_file():
        raise ConfigError(f"artefact: {folder} has no {path.name}. Export the run again.")
    try:
        text = read_bounded(path)
        content = parse_yaml(text)
    except (OSError, ValueError) as error:
        raise ConfigError(f"artefact: {path} cannot be read ({error}). Export the run again.") from error
    if not isinstance(content, dict):
        raise ConfigError(f"artefact: {path} does not hold a config. Export the run again.")
    config: dict[str, Any] = {}
    for key in _OF_ARTEFACT:
        plain: Any = content
        for part in key.split("."):
            plain = plain.get(part) if isinstance(plain, Mapping) else None
        # Its paths belong to a different machine.
        is_elsewhere = key == "data.eval" and not str(plain).startswith("hf://")
        if plain not in (None, {}, []) and key not in typed and not is_elsewhere:
            *parents, name = key.split(".")
            section = config
            for parent in parents:
                section = section.setdefault(parent, {})
            section[name] = plain
    if TRUST not in arguments and not is_own(text, artefact.MARKS):
        for first, node in config.items():
            require_harmless(node, path, first)
    preset = presets / "artefact" / "config.yaml"
    preset.parent.mkdir()
    preset.write_text(f"# @package _global_\n{yaml.safe_dump(config)}", encoding="utf-8")
    typed_arguments = [argument for argument in arguments if argument != TRUST]
    return ["--config-dir", str(presets), "+artefact=config", *typed_arguments]


def evaluate_checkpoint(
    composed: compose.Composed, name: str, world: World, checkpoint: Checkpoint, path: Path, weights: str
) -> CheckpointEvaluation:
    """Collective. Evaluates the checkpoint at ``path`` in the precision ``name`` of one config.

    Raises:
        ConfigError: On every rank, if model, task or data cannot be built, or the checkpoint belongs to a different model.
    """
    config = RunSpec.from_composed(composed).config
    refuse_hidden({section: config[section] for section in ("data", "model")})
    parts = build_for_evaluation(composed.cfg, world, checkpoint, weights)
    return evaluate_parts(composed, name, world, parts, path)


def evaluate_parts(
    composed: compose.Composed, name: str, world: World, parts: EvaluationParts, path: Path
) -> CheckpointEvaluation:
    """Collective. Evaluates what was built, see ``evaluate_checkpoint``."""
    forget_peak(world.device)
    started = time.monotonic()
    with _progress_bar(parts.loader, world, name) as on_progress:
        try:
            result = evaluate(
                parts.model,
                parts.task,
                parts.loader,
                world=world,
                precision=parts.precision,
                progress=on_progress,
                metrics=composed.cfg.train.metrics,
            )
        except NotFinite as error:
            result = error.evaluation
    seconds = time.monotonic() - started
    parts.loader.close()
    config = config_without_secrets(RunSpec.from_composed(composed).config)
    return CheckpointEvaluation(
        checkpoint=path,
        weights=parts.weights,
        precision=name,
        data={"eval": config["data"]["eval"], **parts.loader.index.describe()},
        config={group: config[group] for group in ("model", "task", "precision")},
        ranks=world.size,
        metrics=result.metrics,
        tables=result.tables,
        seconds=seconds,
        memory=_peak_of_ranks(world),
    )


@contextmanager
def _progress_bar(loader: ShardLoader, world: World, precision: str) -> Iterator[Callable[[int, int], None] | None]:
    """A progress bar on rank 0's standard error; yields the ``progress`` argument of ``evaluate``."""
    if world.rank != 0:
        yield None
        return
    total = loader.steps_per_epoch * loader.micro_batches_per_step
    with progress(Console(stderr=True), f"evaluating in {precision}, micro-batches", total) as advance:
        yield lambda done, all: advance(1)


def _peak_of_ranks(world: World) -> dict[str, float]:
    """Collective. The highest peak memory of all ranks, by the name of the metric."""
    name, gib = peak(world.device)
    highest = torch.tensor(gib, dtype=torch.float64)
    dist.all_reduce(highest, dist.ReduceOp.MAX)
    return {name: highest.item()}


def check_precisions(configs: Sequence[compose.Composed], world: World) -> list[str]:
    """Checks that this device supports all precisions, before the first evaluation. Returns warnings for the user."""
    return [warning for one in configs for warning in build_precision(one.cfg.precision, world.device)[1]]


def precision_name(composed: compose.Composed) -> str:
    """The name of the precision preset on the command line (several presets may share a dtype); else the config's dtype."""
    chosen = [override.partition("=")[2] for override in composed.overrides if override.startswith("precision=")]
    return chosen[-1].replace("/", "-") if chosen else str(composed.cfg.precision.name)


def show(results: Sequence[CheckpointEvaluation], names: Sequence[str] | None) -> None:
    """Prints the metrics, several precisions side by side, and the per-class results of the first."""
    first = results[0]
    head = evaluation_results.evaluation_banner(first)
    if len(results) > 1:
        head = {name: head[name] for name in ("checkpoint", "data")}
    print_banner("evaluation", head)
    if len(results) > 1:
        print(aligned(evaluation_results.side_by_side(results)), flush=True)
    if "confusion" in first.tables:
        classes = evaluation_results.per_class(first.tables["confusion"], names)
        print(
            f"classes in {first.precision}, the worst first\n{aligned(evaluation_results.class_table(classes))}",
            flush=True,
        )
        if left_out := evaluation_results.class_table_omissions(classes):
            print(f"  {left_out}", flush=True)


def write(results: Sequence[CheckpointEvaluation], names: Sequence[str] | None, folder: Path) -> None:
    """Writes the result files, on the calling rank."""
    with as_config_error(f"out: the result cannot be written to {folder}"):
        for one in results:
            for path in evaluation_results.write_evaluation(folder, one, names):
                print(f"written: {path}", flush=True)


def one_for_each_precision(arguments: Sequence[str]) -> list[list[str]]:
    """One command line for each precision in ``precision=A,B,...``."""
    options = [argument for argument in arguments if argument.startswith("precision=")]
    if len(options) != 1:
        return [list(arguments)]
    names = dict.fromkeys(options[0].removeprefix("precision=").split(","))
    return [[f"precision={name}" if one is options[0] else one for one in arguments] for name in names]


def main() -> None:
    """Command line."""
    if {"--help", "-h"} & set(sys.argv[1:]):
        print(USAGE)
        return
    join_srun()
    settle_network()
    options, rest = take(sys.argv[1:], checkpoint="", weights="", out="", artefact="")
    if options["artefact"]:
        main_of_artefact(options, rest)
        return
    *others, last = one_for_each_precision(rest)
    configs: list[compose.Composed] = []
    for arguments in others:
        command_line.run(configs.append, arguments, rewrite=recompose)
    command_line.run(
        lambda composed: run_evaluation(
            [*configs, composed], options["checkpoint"], options["weights"], options["out"]
        ),
        last,
        rewrite=recompose,
    )


def main_of_artefact(options: Mapping[str, str], arguments: list[str]) -> None:
    """Command line with ``artefact=``."""
    place = options["artefact"].strip("'\"")
    folders: list[Path] = []

    def rewrite(arguments: list[str]) -> list[str]:
        if ignored := [name for name in ("checkpoint", "weights") if options[name]]:
            raise ConfigError(
                f"{ignored[0]}: an artefact has one set of weights. Leave out either this option or artefact=."
            )
        # Every process asks the hub; only one per machine downloads; the others wait for its lock.
        folders.append(pull(place, config=True) if is_hub_url(place) else Path(place))
        return recompose_artefact(folders[0], arguments, Path(presets))

    def evaluate_it(composed: compose.Composed) -> None:
        name = folders[0].resolve().name
        if is_hub_url(place):  # the folder is named after the commit
            name = f"{place.removeprefix('hf://').partition('@')[0].replace('/', '--')}-{name[:8]}"
        run_artefact_evaluation(composed, folders[0], name, options["out"], trust=TRUST in arguments)

    with TemporaryDirectory() as presets:
        command_line.run(evaluate_it, arguments, rewrite=rewrite)


if __name__ == "__main__":
    main()
