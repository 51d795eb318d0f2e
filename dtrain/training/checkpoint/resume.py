"""Where a start of a run begins and ends: from the newest checkpoint or the weights of a different run, after how many steps.

* All functions but ``EarlierStarts.prepare`` only read, so a refused start leaves the run directory untouched.
* A run *shows progress* if its status, metrics or sample logs have a step. Without a whole checkpoint it is refused, unless
  none was ever saved: a run that was killed before its first save begins again at step 0 by itself.
* A run that is *finished* is not started again by the command that finished it. A longer one extends it. A command that asks
  for fewer steps than the run has done is refused.
* Initial weights of the Hugging Face hub are *pinned*: the first start finds the commit of the revision and saves it in
  ``config.yaml``. Later starts of the same command use this commit.
* ``run.weights_from`` is for the same model: all names and shapes must be equal. ``run.warm_start`` is for a different model:
  ``rename`` rewrites names, ``skip`` leaves out names, and the rest must fit. Only a parameter that ``skip`` names keeps its
  initialisation. Only weights are loaded, the moving average if there is one; everything else starts from the beginning.
* A checkpoint with ``checkpoint.only_trained`` has no parameters that are never trained. They get the values that a new run
  would begin with, and are compared, before it is restored.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from dtrain.config.schema import Config, RunConfig, TrainConfig, WarmStartConfig, from_plain
from dtrain.data.shards.bad_shards import REFUSE, as_recorded, write_record
from dtrain.distributed.collectives import from_rank0, on_all_ranks
from dtrain.distributed.sharding import local_part
from dtrain.errors import ConfigError, as_config_error
from dtrain.runs.hub import DESCRIPTION, WEIGHTS, HubModel, is_hub_url
from dtrain.runs.records import read_records
from dtrain.runs.run_dir import move_records_aside, status_or_none
from dtrain.runs.run_spec import RunSpec
from dtrain.training.checkpoint.checkpoints import Checkpoint, Checkpoints, read_folder, verify_folder
from dtrain.training.checkpoint.fork import Fork, fork_of
from dtrain.training.checkpoint.manifest import MANIFEST
from dtrain.training.checkpoint.other_machines import checkpoint_on_all_machines
from dtrain.training.checkpoint.rest import BuiltRest, Rest, source_of_rest
from dtrain.training.checkpoint.state import TrainState, copy_into, weight_problems
from dtrain.training.checkpoint.tensors import StoredTensor, read_whole
from dtrain.training.schedule import step_limits
from dtrain.urls import redacted

# Set by torchrun, SLURM and dtrain's batch script when they start the same command again.
_AUTOMATIC_STARTS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT", "DTRAIN_STARTS")


@dataclass(frozen=True)
class EarlierStarts:
    """What earlier starts of the run have left, equal on all ranks.

    Attributes:
        checkpoint: Step of the checkpoint to resume from; None for a run that begins at step 0.
        status: Content of ``status.json``; None without one.
        changes: What this command changes, such as ``train.max_steps: 50 -> 100``.
        problems: A line for each file that is damaged and not used.
        source: Folder on rank 0's machine that has all of this, relative to the run directory: ".", or of fetched files.
        moved_aside: Whether ``prepare`` moves all records aside, for ``run.resume=never``.
    """

    checkpoint: int | None = None
    status: Mapping[str, Any] | None = None
    changes: Sequence[str] = field(default_factory=list)
    problems: Sequence[str] = field(default_factory=list)
    source: str = "."
    moved_aside: bool = False

    @classmethod
    def from_config(cls, cfg: Config, spec: RunSpec, source: Path | None = None) -> EarlierStarts:
        """Collective. Reads the run directory, or what was fetched for it.

        Args:
            cfg: The composed config.
            spec: The run.
            source: What was fetched; None: the run directory.

        Raises:
            ConfigError: On every rank, if the directory has a different run, or ``run.resume`` does not allow what there is, or
                there is no whole checkpoint although the run shows progress.
        """
        mode, relative = cfg.run.resume, os.path.relpath(source or spec.dir, spec.dir)
        spec = replace(spec, dir=source or spec.dir)
        if mode == "never" and any(os.environ.get(name) not in (None, "", "0") for name in _AUTOMATIC_STARTS):
            mode = "auto"  # it is about the first start of a job; its restarts continue the new run

        checkpoints = Checkpoints.from_config(spec.dir, cfg.checkpoint)

        def changed() -> list[str]:
            with as_config_error("run.dir"):
                return list(spec.changes())

        changes = from_rank0(changed)
        step, broken = checkpoints.newest_good()

        def read() -> dict[str, Any]:
            problems: list[str] = []
            with as_config_error("run.dir"):
                status = status_or_none(spec.dir, problems)
                progress = [*(f"broken checkpoint: {line}" for line in broken), *_progress(spec.dir, status)]
            if mode == "never":
                if step is not None:
                    raise ConfigError(
                        f"run.resume=never, but {checkpoints.directory} has a checkpoint of step {step}. Leave run.resume out "
                        "to resume, or use a different run.dir for a new run."
                    )
                return asdict(cls(source=relative, moved_aside=bool(progress)))
            skipped = (f"skipped a broken checkpoint: {line}" for line in broken)
            earlier = cls(step, status, changes, [*problems, *skipped], relative)
            if step is None and mode == "must":
                raise ConfigError(_without_checkpoint("run.resume=must, but", checkpoints, progress))
            is_done = earlier.finished and not changes  # as nothing_left says
            is_lost = bool(broken) or (bool(progress) and checkpoints.recorded() != 0)
            if step is None and is_lost and not is_done:
                raise ConfigError(
                    _without_checkpoint(
                        "run.dir:", checkpoints, [*progress, *(f"this command changes {change}" for change in changes)]
                    )
                )
            return asdict(earlier)

        return cls(**from_rank0(read))

    def with_same_shards(self, cfg: Config, spec: RunSpec) -> Config:
        """The config that leaves out the damaged shards that the run, or the run it is forked from, has left out so far.

        A run without a checkpoint decides anew.
        """
        fork = Fork.parse(cfg.run)
        if self.checkpoint is not None:
            origin = spec.dir / self.source
        elif fork is not None and fork.keeps_data:
            origin = Path(fork.dir)
        else:
            return cfg
        recorded = from_rank0(lambda: as_recorded(cfg.data.bad_shards, origin))
        return replace(cfg, data=replace(cfg.data, bad_shards=recorded))

    def prepare(self, run: TrainState) -> None:
        """Collective. Before the start writes anything: rank 0 moves the records aside for ``run.resume=never``.

        Raises:
            ConfigError: If the directory cannot be written; or not from every machine, for a sharded run.
        """
        from_rank0(lambda: self._prepare(run))
        if run.is_sharded:
            on_all_ranks(run.checkpoints.require_visible)

    def _prepare(self, run: TrainState) -> None:
        with as_config_error(f"run.dir: {run.run_dir} cannot be written, choose a different one"):
            if self.moved_aside:
                folder = move_records_aside(run.run_dir)
                print(f"run.resume=never: the records of earlier starts are in {folder}", flush=True)
            run.checkpoints.record(self.checkpoint or 0)
            if run.cfg.data.bad_shards != REFUSE:
                evaluated = run.eval_loader.bad_shards if run.eval_loader is not None else {}
                write_record(run.run_dir, {"train": run.train_loader.bad_shards, "eval": evaluated})

    @property
    def finished(self) -> bool:
        """Whether the run was finished."""
        return self.status is not None and self.status["state"] == "finished"

    def nothing_left(self, spec: RunSpec, train: TrainConfig) -> str | None:
        """A message if this is the command that finished the run; else None."""
        if not self.finished or self.changes:
            return None
        assert self.status is not None
        keys = [key for key in ("max_steps", "max_epochs") if getattr(train, key) is not None]
        longer = " ".join(f"train.{key}=MORE" for key in keys)
        return f"finished at step {self.status['step']} already: {spec.dir} (to train it further: run.dir=DIR {longer})"

    def last_step(self, run: TrainState) -> int:
        """The attempted step after which the restored run is finished. Marks an evaluation that is missing there as due.

        Raises:
            ConfigError: If the run has done more steps already, or is finished and this command changes something else.
        """
        step, train = run.step.step, run.cfg.train
        limits = step_limits(train, run.train_loader, step)
        end = min(limits.values())
        keys = [key for key, limit in limits.items() if limit == end]
        reached = " and ".join(f"{key}={getattr(train, key.removeprefix('train.'))}" for key in keys)
        if run.forked and end <= step:
            raise ConfigError(
                f"{reached}: the fork begins after step {step}, so nothing is left to train. Increase {' and '.join(keys)}."
            )
        if end < step:
            raise ConfigError(
                f"{reached}: the run in {run.run_dir} has done {step} steps already, and this would end it after {end}. "
                f"Increase {' and '.join(keys)} to train it further. For a shorter run use a different run.dir."
            )
        if end == step and self.finished:
            raise ConfigError(
                f"run.dir: the run in {run.run_dir} is finished: {reached} ends it at step {step}. So these changes would have "
                f"no effect:\n{_listed(self.changes)}  Increase {' and '.join(keys)} to train it further, or use a new "
                "run.dir to start a new run."
            )
        if end == step and self.checkpoint is not None:
            run.totals.evaluation_due = True  # stopped here on request, or killed before it could end
        return end


def restore(run: TrainState, earlier: EarlierStarts) -> str:
    """Collective. Restores the run from the first of these that exists; returns a description for the banner.

    1. Its own newest good checkpoint.
    2. The checkpoint of a different run (``run.fork``).
    3. Weights of a different run (``run.weights_from``, ``run.warm_start``).
    4. Nothing: the model keeps its initialisation.

    Raises:
        ConfigError: On every rank, if the checkpoint or the weights do not fit the model.
    """
    if earlier.checkpoint is not None:
        own = run.checkpoints.path(earlier.checkpoint)
        folder = Path(os.path.normpath(run.run_dir / earlier.source))
        fetched = Checkpoints(folder / "checkpoints").path(earlier.checkpoint)
        source = own if earlier.source == "." else fetched
        with checkpoint_on_all_machines(source, run.world, run.run_dir, is_sharded=run.is_sharded) as folder:
            checkpoint = on_all_ranks(lambda: read_folder(folder))
            build_rest(run, checkpoint)
            on_all_ranks(lambda: run.restore(checkpoint))
        mirror = f" of {redacted(str(run.cfg.checkpoint.mirror))}" if source != own else ""
        return f"after step {run.step.step}, from {own.name if mirror else own}{mirror}"
    if (fork := fork_of(run.cfg.run, run.cfg.optimizer)) is not None:
        forked = on_all_ranks(fork.load)
        build_rest(run, forked)
        return fork.restore(run, forked)
    description = _load_starting_weights(run)
    build_rest(run)
    return f"new, {description}" if description else "new"


def build_rest(run: TrainState, checkpoint: Checkpoint | None = None) -> None:
    """Collective. Gives parameters that are never trained the values with which the run begins, and measures them.

    Call it before ``run.restore``. It does nothing if neither the checkpoint nor the run's own ones lack parameters.

    Args:
        run: The run, as it was built.
        checkpoint: The checkpoint that will be restored; None for a new run, whose initial weights are loaded.

    Raises:
        ConfigError: On every rank, if the initial weights cannot be loaded.
    """
    saved = checkpoint.rest if checkpoint is not None else None
    if saved is None and not run.cfg.checkpoint.only_trained:
        return
    source = source_of_rest(run.cfg.model, run.cfg.run)
    run.rest = BuiltRest(run.model, source, saved)
    # Without initial weights if they are not needed, because they may be gone by now.
    complete = checkpoint is None or (saved is not None and run.rest.matches(saved))
    if not complete and _load_starting_weights(run):
        run.rest = BuiltRest(run.model, source, saved)


def load_rest(cfg: Config, model: nn.Module, saved: Rest) -> Rest:
    """Collective. ``build_rest`` for a bare model alone, which was built after seeding with ``run.seed``.

    Args:
        cfg: The config of the run.
        model: Its model.
        saved: What the checkpoint lacks that will be loaded.

    Returns:
        The same parameters as the model has them.

    Raises:
        ConfigError: On every rank, if the initial weights cannot be loaded.
    """
    source = source_of_rest(cfg.model, cfg.run)
    built = Rest.measure(model, saved.digests, source)
    if saved.matches(built) or (weights := starting_weights(cfg.run, model)) is None:
        return built
    on_all_ranks(lambda: weights.load(model))
    return Rest.measure(model, saved.digests, source)


def _load_starting_weights(run: TrainState) -> str:
    """Collective. Loads ``run.weights_from`` and ``run.warm_start``; returns a description, "" if there are none."""
    if (weights := starting_weights(run.cfg.run, run.model)) is None:
        return ""
    on_all_ranks(lambda: weights.load(run.model))
    if run.ema is not None:
        with run.ema.swapped_in() as averaged:
            on_all_ranks(lambda: weights.load(averaged))
    if weights.rest is not None:
        source = source_of_rest(run.cfg.model, replace(run.cfg.run, weights_from=None))
        weights.rest.require(Rest.measure(run.model, weights.rest.digests, source))
    return weights.description


def pin_weights(cfg: Config, spec: RunSpec, source: Path | None = None) -> tuple[Config, RunSpec]:
    """Collective. The config and the run with initial weights of the hub pinned to a commit.

    Args:
        cfg: The composed config.
        spec: The run.
        source: Folder with the config of earlier starts, which have found the commit; None: the run directory.

    Raises:
        ConfigError: On every rank, if a name is wrong or the hub cannot be reached.
    """
    sources = {"run.weights_from": cfg.run.weights_from, "run.warm_start.path": cfg.run.warm_start.path}
    urls = {key: url for key, url in sources.items() if url is not None and is_hub_url(url)}
    if not urls:
        return cfg, spec

    def pinned() -> dict[str, str]:
        found = {}
        for key, url in urls.items():
            model, saved = HubModel.parse(key, url), replace(spec, dir=source or spec.dir).saved_value(key)
            # A run of another user may have any text as its commit, even an interpolation.
            is_same = isinstance(saved, str) and re.fullmatch(re.escape(f"hf://{model.name}@") + "[0-9a-f]{40}", saved)
            found[key] = saved if is_same else str(model.at_commit())
        return found

    spec = spec.with_values(from_rank0(pinned))
    return from_plain(Config, spec.config), spec


@dataclass(frozen=True)
class StartingWeights:
    """Weights that fit a model.

    Attributes:
        tensors: Weights by the model's names, read from their files on use; the other parameters keep their initialisation.
        description: For the banner: the source, and the number of the other parameters.
        rest: What the checkpoint lacks that they are from; None if it has all parameters.
        base: Weights that are loaded before them; None without.
    """

    tensors: Mapping[str, Tensor | StoredTensor]
    description: str
    rest: Rest | None = None
    base: StartingWeights | None = None

    def load(self, module: nn.Module) -> None:
        """Copies them into the model.

        Raises:
            ConfigError: If values are NaN or infinite, unless the model's own were, as in the buffer of a mask; names them.
        """
        if self.base is not None:
            self.base.load(module)
        own = module.state_dict()
        finite = [name for name in self.tensors if _is_finite(own[name])]
        copy_into(module, self.tensors)  # only names in run.warm_start.skip are missing
        if wrong := [name for name in finite if not _is_finite(own[name])]:
            raise ConfigError(
                f"the run would start {self.description}, of which {', '.join(wrong[:3])} "
                f"{f'and {len(wrong) - 3} more have' if len(wrong) > 3 else 'has'} values that are NaN or infinite. Use an "
                "earlier checkpoint, or leave them out with run.warm_start.skip."
            )


def starting_weights(run: RunConfig, model: nn.Module) -> StartingWeights | None:
    """Collective. Reads the weights of ``run.weights_from`` or ``run.warm_start`` for the bare model; None if neither is set.

    Raises:
        ConfigError: On every rank, if there are no weights at the path, or they are damaged or do not fit.
    """
    warm = run.warm_start
    if run.weights_from is not None and warm.path is not None:
        if not _lacks_parameters(Path(str(run.weights_from)).expanduser()):
            raise ConfigError(
                "run.weights_from and run.warm_start.path are both set. Keep one of them: run.weights_from has all parameters, "
                "unless it is a run with checkpoint.only_trained=true."
            )
        base = starting_weights(replace(run, weights_from=None), model)
        weights = starting_weights(replace(run, warm_start=WarmStartConfig()), model)
        return replace(weights, base=base) if weights is not None else None
    if warm.path is None and (warm.rename or warm.skip or warm.transpose):
        raise ConfigError("run.warm_start has a rename, skip or transpose, but no path. Set run.warm_start.path.")
    key, path = ("run.weights_from", run.weights_from) if warm.path is None else ("run.warm_start.path", warm.path)
    if path is None:
        return None
    if is_hub_url(path):
        file = _download(HubModel.parse(key, path))
    else:
        file = _find(key, Path(path).expanduser())
    source = path if is_hub_url(path) else str(file)
    return on_all_ranks(lambda: _fitted(key, file, source, model, warm))


def _download(model: HubModel) -> Path:
    """Collective. The weights of a model of the hub; one process of each machine downloads them."""
    is_first = os.environ.get("LOCAL_RANK", "0") == "0"
    on_all_ranks(lambda: model.weights() if is_first else None)
    return on_all_ranks(lambda: model.download(WEIGHTS))


def _find(key: str, path: Path) -> Path:
    """Collective. The verified checkpoint folder of a path; or the file itself; or the weights file of an artefact."""

    def look() -> list[str]:
        if path.is_file():
            return ["file", str(path)]
        if (path / DESCRIPTION).is_file() and (path / WEIGHTS).is_file():
            return ["file", str(path / WEIGHTS)]
        if (path / "checkpoints").is_dir():
            return ["run", str(path / "checkpoints")]
        if (path / MANIFEST).is_file():
            return ["checkpoint", str(path)]
        if not path.exists():
            raise ConfigError(f"{key}: {path} does not exist (looked in {path.absolute().parent}).")
        raise ConfigError(
            f"{key}: {path} is no run directory, no checkpoint (checkpoints/step-000000050), no artefact with {WEIGHTS}, no "
            ".safetensors file, and no model on the hub (hf://ORGANISATION/NAME). Name one of these."
        )

    kind, found = from_rank0(look)
    if kind == "run":
        checkpoints = Checkpoints(Path(found))
        step = checkpoints.choose("latest")
        return Path(from_rank0(lambda: str(checkpoints.path(step))))
    if kind == "checkpoint":
        verify_folder(Path(found))
    return Path(found)


def _lacks_parameters(path: Path) -> bool:
    """Collective. Whether a path is of a run or checkpoint with ``checkpoint.only_trained``."""
    if not from_rank0(path.is_dir):
        return False
    folder = _find("run.weights_from", path)
    return bool(from_rank0(lambda: folder.is_dir() and read_folder(folder).rest is not None))


def _fitted(key: str, path: Path, source: str, model: nn.Module, warm: WarmStartConfig) -> StartingWeights:
    """Weights of a checkpoint's folder, the moving average if there is one, or of a file; ``source`` names it."""
    is_folded, rest = False, None
    try:
        if path.is_dir():
            checkpoint = read_folder(path)
            group = "ema" if "ema" in checkpoint.tensors else "model"
            loaded, source, rest = checkpoint.stored(group), f"{source} ({group})", checkpoint.rest
        else:
            loaded = read_whole(path)
            with safe_open(path, "pt") as file:
                is_folded = (file.metadata() or {}).get("batchnorm") == "folded"
    except (OSError, SafetensorError) as error:
        if path.is_file() and _is_pickle(path):
            raise ConfigError(
                f"{key}: {source} is a pickle, as torch.save writes it, which could run any code. Convert it: "
                'safetensors.torch.save_file(torch.load("w.pt", weights_only=True), "w.safetensors"); see docs/coming_from.md, '
                "Weights from elsewhere."
            ) from error
        raise ConfigError(f"{key}: {source} cannot be read ({error}).") from error
    if is_folded:
        raise ConfigError(
            f"{key}: {source} cannot be trained, because its BatchNorm was merged into the convolutions. Export the run with "
            "export.fold=false, or name the run or one of its checkpoints."
        )
    if rest is not None and warm.path is not None:
        raise ConfigError(
            f"{key}: {source} has only the parameters that were trained (checkpoint.only_trained). For the same model, set "
            "run.weights_from instead; else use an artefact of it: dtrain export run.dir=DIR export.dtype=fp32."
        )
    unused = [f"rename: {old!r}" for old in warm.rename if not any(_prefix(old, name) for name in loaded)]
    renamed: dict[str, str] = {}
    for name in loaded:
        new = _renamed(name, warm.rename)
        if new in renamed:
            raise ConfigError(f"run.warm_start.rename: {renamed[new]} and {name} both become {new}.")
        renamed[new] = name

    names = [*renamed, *model.state_dict()]
    unused += [f"skip: {pattern!r}" for pattern in warm.skip if not any(fnmatchcase(name, pattern) for name in names)]
    if unused:
        raise ConfigError(
            f"run.warm_start.{unused[0]} matches no name of {source}, such as {next(iter(loaded), 'none')}. Correct or remove "
            "it."
        )

    def skipped(name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in warm.skip)

    def may_lack(name: str) -> bool:
        return skipped(name) or (rest is not None and name in rest.digests)

    tensors = {new: loaded[name] for new, name in renamed.items() if not skipped(new)}
    transposed: set[str] = set()
    for pattern in warm.transpose:
        matching = [name for name in tensors if fnmatchcase(name, pattern)]
        if not matching or any(len(tensors[name].shape) != 2 for name in matching):
            raise ConfigError(
                f"run.warm_start.transpose: {pattern!r} matches {', '.join(matching[:3]) or 'no name'}, want matrices. "
                f"Names are matched after renaming, such as {next(iter(tensors), 'none')}."
            )
        transposed.update(matching)
    tensors |= {name: tensors[name][...].T.contiguous() for name in transposed}
    if problems := weight_problems(model, tensors, may_lack):
        raise ConfigError(
            f"{key}: the weights of {source} do not fit: {problems}. run.warm_start.rename rewrites their names, "
            "run.warm_start.skip leaves out names of the file and of the model."
        )
    total = len(model.state_dict())
    left_out = f", {total - len(tensors)} of {total} left out" if len(tensors) < total else ""
    return StartingWeights(tensors, f"with the weights of {source}{left_out}", rest)


def _prefix(old: str, name: str) -> re.Match[str] | None:
    return re.match(re.escape(old).replace(r"\*", r"([^.]+)"), name)


def _is_finite(tensor: Tensor) -> bool:
    """Whether the values of this rank's part are finite; true for types of one byte, for which torch does not compute it."""
    return tensor.dtype.itemsize == 1 or bool(local_part(tensor).isfinite().all())


def _is_pickle(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(2) in (b"PK", b"\x80\x02")  # a zip file of torch 1.6 or newer, or a plain pickle


def _renamed(name: str, rename: Mapping[str, str]) -> str:
    for old, new in rename.items():
        if old.count("*") != new.count("*"):
            raise ConfigError(
                f"run.warm_start.rename: got {{{old}: {new}}}, want as many * in the new name as in the old one."
            )
        if found := _prefix(old, name):
            parts = iter(found.groups())
            return re.sub(r"\*", lambda _, parts=parts: next(parts), new) + name[found.end() :]  # type: ignore[misc]
    return name


def _progress(run_dir: Path, status: Mapping[str, Any] | None) -> Iterator[str]:
    """A line for each file that shows that the run has trained."""
    if status is not None and status.get("step", 0) > 0:
        yield f"status.json: {status['state']} at step {status['step']}"
    with suppress(OSError):
        if any(record["step"] > 0 for record in read_records(run_dir / "metrics.jsonl")):
            yield "metrics.jsonl has records"
    logs = [path for path in sorted((run_dir / "logs").glob("keys-rank-*.jsonl")) if path.stat().st_size]
    if logs:
        yield f"logs/{logs[0].name} has the samples of its steps"


def _without_checkpoint(what: str, checkpoints: Checkpoints, found: Sequence[str]) -> str:
    saved = checkpoints.recorded()
    last = f", the last one was saved after step {saved}" if saved else ""
    return (
        f"{what} {checkpoints.directory} has no checkpoint to resume from{last}:\n"
        f"{_listed(found or ['there is none'])}  Restore the checkpoints; or add run.resume=never to begin again at step 0, "
        "which moves all records of the run aside; or use a different run.dir."
    )


def _listed(changes: Sequence[str]) -> str:
    return "".join(f"    {change}\n" for change in changes)
