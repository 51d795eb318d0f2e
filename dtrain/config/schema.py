"""The config tree: every key of dtrain, its type, default and meaning.

Hydra merges ``conf/`` and the command line into these classes, so a misspelt key or a value of the wrong type is refused
before anything starts. Groups with a ``_target_`` (model, task, optimizer, schedule) are free-form: the class that
``_target_`` names decides which keys they take.

The comment behind a field, or above it, is its meaning in docs/config.md (``python scripts/config_page.py``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar, get_type_hints

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING

Section = TypeVar("Section")


@dataclass
class WarmStartConfig:
    """Weights of a different model as the initial weights of a new run. All names must match, except those in `skip`."""

    # a run directory, a checkpoint folder, a .safetensors file, an artefact, or a model on the hub: hf://ORG/NAME[@REVISION]
    path: str | None = None
    # prefixes of names: there -> here; the first match counts; each * is one part of a name, such as a number
    rename: dict[str, str] = field(default_factory=dict)
    skip: list[str] = field(default_factory=list)  # patterns (fnmatch) of names that are left out, after renaming
    # patterns of names of matrices stored transposed, after renaming
    transpose: list[str] = field(default_factory=list)


@dataclass
class RunConfig:
    """Identity and directory of the run."""

    name: str | None = None  # name of the run; null: <experiment>-<hash of the config>
    dir: str | None = None  # the run's directory; null: runs/<name>
    seed: int = 0  # seed of the order, the augmentation, the initial weights and dropout
    max_hours: float | None = None  # longest time of a start: it then saves and stops, and the same command resumes
    # auto: resume if there is a checkpoint | must: fail if there is none | never: begin at step 0 and move the records of a run
    # whose checkpoints were lost aside; fail if there is a checkpoint
    resume: str = "auto"
    weights_from: str | None = None  # initial weights of a new run: a path as in warm_start; all names must match
    warm_start: WarmStartConfig = field(default_factory=WarmStartConfig)
    # DIR@STEP: begin with the state of a different run after a step, 0 for its initial state. Without an experiment the command
    # line of DIR is used, except for its name, directory and launcher
    fork: str | None = None
    fork_data: str = "keep"  # keep: continue in the same data | restart: from epoch 0; the data may differ


@dataclass
class TrainConfig:
    """The training loop. `max_steps` and the `*_every` keys count attempted optimizer steps."""

    global_batch_size: int = 64  # samples per optimizer step, over all ranks
    # samples per forward pass on one rank; null: its share of the global batch; auto: the largest that fits, found before the
    # first step
    micro_batch_size: int | str | None = None
    # length of the run in steps; null: no limit. Whichever of max_steps and max_epochs is reached first ends it
    max_steps: int | None = None
    # length of the run in epochs; null: no limit. The schedule is laid out over max_epochs, even if max_steps ends the run
    # earlier; without max_epochs, over max_steps
    max_epochs: int | None = None
    clip_norm: float | None = None  # largest norm of all gradients together; null: no clipping
    log_every: int = 10  # steps between two records in metrics.jsonl
    eval_every: int | None = None  # steps between two evaluations; null: after each epoch; 0: only at the end
    deterministic: bool = False  # the same result bit for bit on the same number of ranks; slower
    # parameters that are not trained: patterns (fnmatch) of names of parameters or modules, or {patterns: [..], until: STEP,
    # batchnorm: eval}: only up to this step, and with their BatchNorm in eval mode; see docs/recipes.md
    freeze: list[Any] = field(default_factory=list)
    ema_decay: float | None = None  # decay of the moving average of the weights; null: no average
    compile: Any = False  # torch.compile: true: the whole model | patterns of modules, such as [blocks.*]
    channels_last: bool = True  # memory layout of images and convolution weights; false: torch's default
    # patterns of modules with activation checkpointing: activations are recomputed in the backward; [blocks.*]
    checkpoint_activations: list[str] = field(default_factory=list)
    # your own code, called at fixed points: [{_target_: package.MyHook}]
    hooks: list[Any] = field(default_factory=list)
    # steps of a start that may be repeated, with smaller micro-batches, if memory runs out
    max_memory_retries: int = 4
    # skipped steps in a row after which the run fails; null: 50 with loss scaling, 10 without
    max_consecutive_skips: int | None = None
    # metrics of torchmetrics in evaluations: {f1: {_target_: torchmetrics.classification.MulticlassF1Score, num_classes: 10}},
    # see docs/models.md
    metrics: dict[str, Any] = field(default_factory=dict)
    # spikes of the gradient norm: {factor: 6, window: 128, action: warn|skip}, see docs/replay.md; null: no search for spikes
    spike: Any = None


@dataclass
class CacheConfig:
    """Local copies of shards on network storage or behind a URL, shared by all processes of a node."""

    dir: str | None = None  # folder, on a local disk; null: the folder shards in dtrain's cache directory
    max_gb: float | None = None  # largest size of all copies; null: half of the free space of that disk


@dataclass
class DataConfig:
    """Shards, fields and order.

    `train` and `eval` are a brace pattern, a glob, a list of them, or `@` and the name of a file with such a list
    (`@shards.txt`); or a `_target_` that returns a map-style dataset, a dict or tuple of arrays, or a `dtrain.data.Generated`.

    `mixture` is `{NAME: {shards: ..., weight: ...}}`: `shards` as `train`; `weight`, a number or points `[[step, number],
    ...]`, is 1 by default; `fields` and `augment` (`none`: no augmentation) replace `data.fields` and `data.augment` for this
    source; and with `tokens_per_sample` weights are shares of the tokens.
    """

    train: Any = None  # training shards, or a _target_; null: the shards of mixture
    # evaluation shards, or a _target_, or {NAME: either of them} for several sets; null: no evaluation
    eval: Any = None
    mixture: dict[str, Any] = field(default_factory=dict)  # several sources instead of train, see above
    epoch_of: str | None = None  # the source whose epochs count as the mixture's; null: the first
    # a field that a source of the mixture lacks: refuse | mask: zeros, and false in the field has_NAME
    missing: str = "refuse"
    # how members are read, by extension: name, role, size, mean, std
    fields: dict[str, Any] = field(default_factory=dict)
    image_size: int = 224  # height and width of images in the presets shards and imagenet
    # processes that build batches; 0: the training process does; auto: as many as the data need and the cores allow
    num_workers: int | str = "auto"
    shuffle: str = "window"  # window: within shuffle windows | full: all samples | none: as stored
    # contiguous pieces of the epoch from which each step draws; null: a divisor of the global batch up to 64, or up to the
    # number of ranks of the first start if it is larger; 1 if unshuffled
    lanes: int | None = None
    window: int | None = None  # shards of a shuffle window: neighbours in a lane that are shuffled together; null: 8
    # samples that are shuffled together in a dataset by _target_; null: 1, in a large dataset more
    shard_size: int | None = None
    tail: str = "pad"  # last batch of an epoch: pad: filled with masked rows | drop: left out
    # rows of tokens begin anywhere in the text of their shard, drawn for each (seed, epoch, sample); training only
    random_offset: bool = False
    augment: Any = None  # _target_ of (sample, rng) -> sample, called in the workers
    mix: Any = None  # mixup and cutmix: dtrain.data.mixing.Mix
    prepare: Any = None  # a _target_ that rank 0 calls once before the shards are listed
    # a file with one sample key per line: these training samples are masked wherever they occur, see docs/replay.md
    exclude: str | None = None
    # new shards when a run resumes: null: refused | next_epoch: they join at the next epoch | now: in the rest of this one;
    # in a mixture, of their source
    grow: str | None = None
    grow_allow_removed: bool = False  # shards that are missing when a run resumes: their unused samples are left out
    # more bad samples end the run: 0: none; below 1 or 0.5%: a share, ten are always allowed; else a count
    max_bad: int | float | str = 0.01
    # bad samples in consecutive steps without a good sample at which the run fails; 0: one such step; null: no limit
    max_bad_consecutive: int | None = 100
    # shards that are cut, damaged, or cannot be found or read: refuse | skip: they are left out as a whole, for as long as the
    # run lasts, see docs/data.md. The path of a run's bad-shards.json leaves out the same shards as that run
    bad_shards: str = "refuse"
    # more damaged shards are refused: 0: none; below 1 or 0.5%: a share, one is always allowed; else a count
    max_bad_shards: int | float | str = 0.01
    storage: str = "auto"  # slow: read files through the cache | fast: directly | auto: slow on network file systems
    cache: CacheConfig = field(default_factory=CacheConfig)
    record_keys: bool = False  # write the sample keys of each step to logs/keys-rank-*.jsonl
    start_method: str | None = None  # start method of the workers: fork | forkserver | spawn; null: Python's default
    prefetch: int = 2  # micro-batches that a worker builds ahead
    max_worker_restarts: int = 3  # times that a rank restarts its workers after one was killed; 0: the run ends
    transfer: str = "auto"  # dtype of features from worker to device: auto: the compute dtype | fp32
    on_overflow: str = "error"  # a feature outside of fp16's range: error | clamp | fp32


@dataclass
class LossScaleConfig:
    """The schedule of the loss scale; used in fp16 only.

    ``precision.loss_scale=none`` trains in fp16 without one, and with a warning: small gradients become zero.
    """

    init: float = 65536.0  # loss scale of the first step
    growth_factor: float = 2.0  # applied after growth_interval steps without a skip
    backoff_factor: float = 0.5  # applied after hysteresis skips
    growth_interval: int = 2000  # steps in a row without a skip before the scale grows
    min: float = 1.0  # lower limit
    max: float = 16777216.0  # upper limit
    hysteresis: int = 1  # skips before a backoff


@dataclass
class PrecisionConfig:
    """The dtypes that the loader transfers and autocast computes in, and whether gradients are scaled."""

    name: str = MISSING  # fp32 | tf32 | bf16 | fp16
    loss_scale: Any = field(default_factory=LossScaleConfig)  # its keys, or none
    keep_fp32: list[str] = field(default_factory=list)  # patterns (fnmatch) of modules that compute in fp32


@dataclass
class ParallelConfig:
    """How the ranks share the model: DistributedDataParallel (DDP), or sharded by torch's ``fully_shard`` (FSDP2)."""

    # none: every rank holds the model (DDP) | full: all ranks hold one copy of it together | hybrid: each group of shard_size
    # ranks holds one copy together. Sharded: rank 0 builds the whole model in host memory, 4 bytes per parameter in fp32
    shard: str = "none"
    # sharded: patterns of modules whose parameters are gathered together, such as [blocks.*]; null: the repeated blocks
    shard_modules: list[str] | None = None
    shard_size: int | None = None  # hybrid: ranks that share one copy of the model; null: the ranks of one machine
    # sharded: dtype in which parameters are gathered: fp32: as with DDP | compute: half the bytes in bf16 and fp16, but all
    # parameters are rounded to it, also in normalisation layers
    gather_dtype: str = "fp32"
    # sharded: when gradients are reduced: window: after the last micro-batch | micro_batch: after each, which needs less memory
    reduce_after: str = "window"
    offload: bool = False  # sharded: parameters, gradients and optimizer state in host memory; GPUs only, slow
    timeout_start: float = 600.0  # seconds without progress that count as a hang, until the first step is done
    timeout_step: float = 300.0  # seconds without progress that count as a hang, after the first step
    bucket_cap_mb: int = 25  # DDP: size of the buckets in which gradients are reduced
    find_unused_parameters: bool = False  # DDP: needed if a step does not use all parameters
    static_graph: bool = False  # DDP: every step uses the same parameters
    # DDP: gradients are views of the buckets, which saves a copy of them; while a step accumulates several micro-batches only
    # without train.deterministic, find_unused_parameters and static_graph
    gradient_as_bucket_view: bool = True
    sync_batchnorm: bool = False  # BatchNorm statistics over all ranks; GPUs only; each layer waits for the GPU
    reduce_dtype: str = "fp32"  # dtype of the all-reduce of gradients: fp32 | bf16 | fp16, which limits the loss scale
    # experimental: when a rank is lost, the others continue without a restart; DDP on CPUs, with srun
    recover: bool = False


@dataclass
class CheckpointConfig:
    """When checkpoints are written and which are kept. One is always written at the end and on a stop request."""

    every_steps: int | None = None  # steps between two checkpoints; null: not by steps
    every_minutes: float | None = 15.0  # minutes between two checkpoints; null: not by time
    keep_last: int = 2  # number of newest checkpoints that are kept
    keep_every: int | None = None  # checkpoints whose step is a multiple of it are never deleted; null: none
    # leave out parameters that require no gradient, such as the base of an adapter: they are built again and compared by hash
    only_trained: bool = False
    # a URL that complete checkpoints and the records of the run are copied to, such as s3://BUCKET/runs/NAME. A start with an
    # empty run.dir continues from there, on any machine, see docs/mirror.md; null: none
    mirror: str | None = None
    mirror_seconds: float = 60.0  # longest wait for the mirror when the run ends or stops
    best: str | None = None  # a metric such as eval/accuracy, whose best checkpoint is kept; null: none
    best_mode: str | None = (
        None  # max | min: which value is the best; null: by the metric of train.metrics, else by its name
    )


@dataclass
class ProfileConfig:
    """Profiling of a few steps with torch.profiler; see docs/profiling.md."""

    steps: list[int] | None = None  # [first, last] attempted step; null: no profile
    ranks: list[int] = field(default_factory=lambda: [0])  # ranks that write a trace


@dataclass
class TrackerConfig:
    """Trackers of metrics besides metrics.jsonl and the console."""

    # wandb | tensorboard | mlflow | trackio | both (wandb and tensorboard) | none, or a list: [wandb,mlflow]
    name: Any = "none"
    project: str = "dtrain"  # project of wandb and Trackio, experiment of MLflow
    entity: str | None = None  # wandb user or team; null: wandb's default
    # mode of wandb: online | offline | disabled; null: WANDB_MODE, else online for the agent of a sweep, else as at the run's
    # last start, else offline
    mode: str | None = None
    tags: list[str] = field(default_factory=list)  # tags of the run in wandb and MLflow
    # checkpoints that wandb gets as artifacts: none | best (of checkpoint.best) | last (at the end of each start) | all
    artifacts: str = "none"
    # MLflow's server or store; null: MLFLOW_TRACKING_URI, else MLflow's own default, mlflow.db in the working directory
    mlflow_uri: str | None = None
    media: bool = True  # write pictures and texts to <run.dir>/media after evaluations


@dataclass
class SearchConfig:
    """A search for good values with Optuna: `launch.search.trials=20 'optimizer.lr=tag(log,interval(1e-4,1e-1))'`."""

    trials: int | None = None  # number of runs; null: no search
    metric: str = "eval/loss"  # the objective: a metric of the evaluations
    # maximize | minimize; null: by the name of the metric
    direction: str | None = None
    best: bool = False  # the objective of a run is its best value; false: its last value
    sampler: str = "tpe"  # tpe: values near the good runs' | random
    seed: int = 0  # seed of the sampler
    # median: stop a run that is worse than the median of the others at its step | halving: successive halving | none
    pruner: str = "none"
    max_failures: int = 3  # failed runs in a row after which the search ends


@dataclass
class LaunchConfig:
    """How `dtrain launch` starts a run. The keys from `min_nodes` on apply to SLURM only."""

    name: str = "local"  # local | slurm; set by the preset
    nodes: int = 1  # machines
    processes_per_node: int | None = None  # null, for local only: one per GPU, or one without GPUs
    dry_run: bool = False  # only show what would be started or submitted
    # runs of a sweep or search at a time; null: one, but all runs of a sweep on SLURM. local: cores and GPUs are divided
    # among them. slurm: a sweep is then one job array
    max_running: int | None = None
    search: SearchConfig = field(default_factory=SearchConfig)
    # start with fewer nodes, at least this many, if the others are not free; the global batch stays the same
    min_nodes: int | None = None
    time: str = "01:00:00"  # time limit of one allocation, not of the run
    partition: str | None = None  # partition of the job; null: the cluster's default
    account: str | None = None  # account to charge; null: the cluster's default
    gpus_per_node: int | None = None  # GPUs per node; null: one per process; 0: nodes without GPUs
    # CPU cores per process; null: one, and one for each of data.num_workers (auto: four)
    cpus_per_process: int | None = None
    # seconds before the end of the allocation at which the run is asked to stop: more than a step and a checkpoint take
    stop_seconds: int = 120
    requeue: bool = True  # submit again until the run is finished
    extra: list[str] = field(default_factory=list)  # further sbatch options: 'launch.extra=["--qos=high"]'
    srun: list[str] = field(default_factory=list)  # further srun options, such as Pyxis' --container-image=IMAGE
    container: list[str] = field(default_factory=list)  # command in front of python: [apptainer,exec,--nv,image.sif]
    python: str | None = None  # python on the nodes, or in the container; null: the one that runs dtrain launch


@dataclass
class ExportConfig:
    """What `dtrain export` writes."""

    dtype: str = "bf16"  # fp32 | bf16 | fp16
    format: Any = "safetensors"  # safetensors | pt2 | aotinductor | onnx, or a list of them
    out: str | None = None  # folder of the artefact; null: <run.dir>/export
    # allowed error of an output, relative to the largest fp32 one; null: the dtype's default
    tolerance: float | None = None
    # allowed difference of accuracy, loss and other metrics from fp32; null: the dtype's default
    max_metric_difference: float | None = None
    measure: bool = True  # measure time and memory, compared with the same weights in fp32
    batch: list[int] = field(default_factory=lambda: [1, 32])  # batch sizes to measure
    max_latency_ms: float | None = None  # also find the largest batch within this latency
    max_memory_gib: float | None = None  # also find the largest batch within this memory
    # merge BatchNorm into convolutions; false: keep it, so that a training can start from the weights (run.weights_from)
    fold: bool = True
    # an adapter of peft: merged: into the weights | separate: only the adapter, in the format of peft | kept: as it was trained
    adapter: str = "merged"
    # a model on the Hugging Face hub to publish the artefact to: hf://ORG/NAME[@BRANCH]; null: none
    push: str | None = None
    # a new repository of export.push is visible to its owners only; an existing one does not change
    private: bool = True
    # licence in the model card of export.push, such as apache-2.0. What is null here and below is "Not stated" in the card
    license: str | None = None
    intended_use: str | None = None  # in the model card, Markdown: what the model is for
    limitations: str | None = None  # in the model card, Markdown: where the model fails or must not be used
    push_replace: bool = False  # export.push replaces all files of a repository that has a different model


@dataclass
class Config:
    """A run."""

    run: RunConfig = field(default_factory=RunConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    data: DataConfig = field(default_factory=DataConfig)
    model: dict[str, Any] | None = None  # required: _target_ of a torch.nn.Module, and its arguments
    task: dict[str, Any] | None = None  # _target_ of task(model, batch) -> Output, and its arguments
    # _target_ of an optimizer, and its arguments; no_decay: patterns of parameters without weight decay; groups:
    # {NAME: {patterns: [..], lr: FACTOR, weight_decay: FACTOR}}: groups with their own rates and decays, see docs/recipes.md
    optimizer: dict[str, Any] | None = None
    schedule: dict[str, Any] | None = None  # _target_ of a learning-rate schedule, and its arguments
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    tracker: TrackerConfig = field(default_factory=TrackerConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    export: ExportConfig = field(default_factory=ExportConfig)
    # your own values, for use in other keys: vars.width=64 'model.width=${vars.width}'
    vars: dict[str, Any] = field(default_factory=dict)


def key_types(section: type) -> dict[str, Any]:
    """The type of each key of a section of the schema.

    A key that is a section by default, such as ``precision.loss_scale``, has the dataclass of that section, though it may
    be set to a value as well.
    """
    sections = {field.name: field.default_factory for field in dataclasses.fields(section)}
    hints = get_type_hints(section)
    return hints | {name: kind for name, kind in sections.items() if dataclasses.is_dataclass(kind)}


def from_plain(section: type[Section], values: Mapping[str, Any]) -> Section:
    """A section of the schema from its values as plain data. A value that is not set, ``???``, gets the default."""
    made: dict[str, Any] = {}
    for key in dataclasses.fields(section):  # type: ignore[arg-type]
        value, kind = values.get(key.name, MISSING), key.default_factory
        if isinstance(kind, type) and dataclasses.is_dataclass(kind) and isinstance(value, Mapping):
            value = from_plain(kind, value)
        if value != MISSING:
            made[key.name] = value
    return section(**made)


def register() -> None:
    """Registers the schema with Hydra as ``schema``, the first entry of the defaults list in ``conf/train.yaml``."""
    ConfigStore.instance().store(name="schema", node=Config, provider="dtrain")
