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
    # {prefix of names there: prefix here}; the first match counts; each * is one part of a name, such as a number
    rename: dict[str, str] = field(default_factory=dict)
    skip: list[str] = field(default_factory=list)  # patterns (fnmatch) of names that are left out, after renaming
    # patterns of names of matrices that are stored transposed there, after renaming
    transpose: list[str] = field(default_factory=list)


@dataclass
class RunConfig:
    """Identity and directory of the run."""

    name: str | None = None  # name of the run; null: <experiment>-<hash of the config>
    dir: str | None = None  # directory of the run; null: runs/<name>
    seed: int = 0  # seed of the order, the augmentation, the initial weights and dropout
    max_hours: float | None = None  # hours after which this start saves and stops; the same command resumes
    # auto: resume if there is a checkpoint | must: fail if there is none | never: fail if there is one; else begin at step 0,
    # and move aside the records of a run whose checkpoints were lost
    resume: str = "auto"
    weights_from: str | None = None  # initial weights of a new run: a path as in warm_start; all names must match
    warm_start: WarmStartConfig = field(default_factory=WarmStartConfig)
    # DIR@STEP: begin with the state of a different run after this step; 0 is its initial state. Without an experiment, the
    # command line of DIR is used, except for name, directory and launcher
    fork: str | None = None
    fork_data: str = "keep"  # keep: continue in the same data | restart: begin at epoch 0, perhaps of different data


@dataclass
class TrainConfig:
    """The training loop. `max_steps` and the `*_every` keys count attempted optimizer steps."""

    global_batch_size: int = 64  # samples per optimizer step, over all ranks
    # samples per forward pass on one rank; null: its share of the global batch; auto: the largest number that fits into memory,
    # found before the first step
    micro_batch_size: int | str | None = None
    # length of the run in steps; null: no limit. Whichever of max_steps and max_epochs is reached first ends it
    max_steps: int | None = None
    # length of the run in epochs; null: no limit. The schedule spans max_epochs if it is set, even if max_steps ends the run
    # earlier; else max_steps
    max_epochs: int | None = None
    clip_norm: float | None = None  # maximum norm of all gradients together; null: no clipping
    log_every: int = 10  # number of steps from one record in metrics.jsonl to the next
    eval_every: int | None = None  # steps from one evaluation to the next; null: after each epoch; 0: only at the end
    deterministic: bool = False  # bit-identical results on the same number of ranks; slower
    # parameters that are not trained: patterns (fnmatch) of names of parameters or modules, or {patterns: [..], until: STEP,
    # batchnorm: eval}: only up to this step, and with their BatchNorm in eval mode; see docs/recipes.md
    freeze: list[Any] = field(default_factory=list)
    ema_decay: float | None = None  # decay of the moving average of the weights; null: no average
    compile: Any = False  # torch.compile: true: the whole model | patterns of modules, such as [blocks.*]
    channels_last: bool = True  # whether images and convolution weights are in channels_last memory format
    # activation checkpointing: patterns of modules, such as [blocks.*], whose activations are recomputed in the backward
    checkpoint_activations: list[str] = field(default_factory=list)
    hooks: list[Any] = field(default_factory=list)  # your code, called at fixed points: [{_target_: package.MyHook}]
    # how many steps of a start may be repeated with smaller micro-batches when memory runs out
    max_memory_retries: int = 4
    # number of skipped steps in a row after which the run fails; null: 50 with loss scaling, 10 without
    max_consecutive_skips: int | None = None
    # metrics of torchmetrics in evaluations: {f1: {_target_: torchmetrics.classification.MulticlassF1Score, num_classes: 10}},
    # see docs/models.md
    metrics: dict[str, Any] = field(default_factory=dict)
    # detection of spikes of the gradient norm: {factor: 6, window: 128, action: warn|skip}, see docs/replay.md; null: off
    spike: Any = None


@dataclass
class CacheConfig:
    """Local copies of shards on network storage or behind a URL, shared by all processes of a node."""

    dir: str | None = None  # folder on a local disk; null: the folder shards in dtrain's cache directory
    max_gb: float | None = None  # maximum size in units of 1e9 bytes; null: half of the free space of the disk


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
    # if a source of the mixture lacks a field: refuse | mask: zeros, and false in the field has_NAME
    missing: str = "refuse"
    fields: dict[str, Any] = field(default_factory=dict)  # extension of a member to its name, role, size, ...
    image_size: int = 224  # height and width of images in the presets shards and imagenet
    # processes that build batches; 0: the training process itself; auto: as many as the data need and the cores allow
    num_workers: int | str = "auto"
    shuffle: str = "window"  # window: within shuffle windows | full: all samples | none: as stored
    # number of contiguous pieces of the epoch from which each step draws; null: the largest divisor of the global batch up to
    # 64, or up to the number of ranks of the first start if that is larger; 1 if unshuffled
    lanes: int | None = None
    window: int | None = None  # number of neighbouring shards of a lane that are shuffled together; null: 8
    # with a dataset by _target_: neighbouring samples that the shuffle keeps together; null: 1, more in a large dataset
    shard_size: int | None = None
    tail: str = "pad"  # last batch of an epoch: pad: filled with masked rows | drop: left out
    # rows of tokens begin at a random token of their shard's text, drawn for each (seed, epoch, sample); training only
    random_offset: bool = False
    augment: Any = None  # _target_ of a callable (sample, rng) -> sample, which the workers call
    mix: Any = None  # mixup and cutmix: _target_ dtrain.data.mixing.Mix, and its arguments
    prepare: Any = None  # a _target_ that rank 0 calls once before the shards are listed
    # a file with one sample key per line: these training samples are masked wherever they occur, see docs/replay.md
    exclude: str | None = None
    # what happens to new shards when a run resumes: null: they are refused | next_epoch: they join at the next epoch (in a
    # mixture, of their source) | now: in the rest of this epoch
    grow: str | None = None
    grow_allow_removed: bool = False  # allow missing shards when a run resumes; their unused samples are left out
    # how many bad samples are allowed before the run fails: 0: none; below 1 or 0.5%: this share, always ten; else this many
    max_bad: int | float | str = 0.01
    # how many bad samples are allowed in consecutive steps without any good sample; null: no limit
    max_bad_consecutive: int | None = 100
    # shards that are cut, damaged, or cannot be found or read: refuse | skip: they are left out as a whole until the end of the
    # run, see docs/data.md | the path of a run's bad-shards.json: the same shards are left out as in that run
    bad_shards: str = "refuse"
    # how many damaged shards bad_shards=skip allows: 0: none; below 1 or 0.5%: this share, and always one; else this many
    max_bad_shards: int | float | str = 0.01
    storage: str = "auto"  # slow: read files through the cache | fast: directly | auto: slow on network file systems
    cache: CacheConfig = field(default_factory=CacheConfig)
    record_keys: bool = False  # write the sample keys of each step to logs/keys-rank-*.jsonl
    start_method: str | None = None  # start method of the workers: fork | forkserver | spawn; null: Python's default
    prefetch: int = 2  # micro-batches that each worker builds ahead
    max_worker_restarts: int = 3  # how many times a rank restarts its workers after one was killed; 0: the run ends
    transfer: str = "auto"  # dtype of features from worker to device: auto: the compute dtype | fp32
    on_overflow: str = "error"  # features outside the range of fp16: error | clamp | fp32: send all features in fp32


@dataclass
class LossScaleConfig:
    """The dynamic loss scale; used in fp16 only.

    ``precision.loss_scale=none`` trains in fp16 without loss scaling, with a warning: small gradients become zero.
    """

    init: float = 65536.0  # loss scale of the first step
    growth_factor: float = 2.0  # the scale is multiplied by this after growth_interval steps without a skip
    backoff_factor: float = 0.5  # the scale is multiplied by this after hysteresis skipped steps
    growth_interval: int = 2000  # number of steps in a row without a skip after which the scale grows
    min: float = 1.0  # lower limit of the scale
    max: float = 16777216.0  # upper limit of the scale
    hysteresis: int = 1  # number of skipped steps after which the scale is reduced


@dataclass
class PrecisionConfig:
    """The dtypes that the loader transfers and autocast computes in, and whether gradients are scaled."""

    name: str = MISSING  # fp32 | tf32 | bf16 | fp16
    loss_scale: Any = field(default_factory=LossScaleConfig)  # the keys of the loss scale; or none, for fp16 without it
    keep_fp32: list[str] = field(default_factory=list)  # patterns (fnmatch) of modules that compute in fp32


@dataclass
class ParallelConfig:
    """How the ranks share the model: DistributedDataParallel (DDP), or sharded by torch's ``fully_shard`` (FSDP2)."""

    # none: every rank holds the whole model (DDP) | full: all ranks share one copy | hybrid: each group of shard_size ranks
    # shares one copy. To shard it, rank 0 builds the whole model in host memory: 4 bytes per parameter in fp32
    shard: str = "none"
    # sharded: patterns of modules whose parameters are gathered together, such as [blocks.*]; null: the repeated blocks
    shard_modules: list[str] | None = None
    shard_size: int | None = None  # hybrid: ranks that share one copy of the model; null: the ranks of one machine
    # sharded: dtype in which parameters are gathered: fp32: as with DDP | compute: the compute dtype; half the bytes in bf16
    # and fp16, but all parameters are rounded to it, including those of normalisation layers
    gather_dtype: str = "fp32"
    # sharded: when gradients are reduced: window: after the last micro-batch | micro_batch: after each, which needs less memory
    reduce_after: str = "window"
    offload: bool = False  # sharded: keep parameters, gradients and optimizer state in host memory; GPUs only, slow
    timeout_start: float = 600.0  # seconds without progress that count as a hang, until the first step is done
    timeout_step: float = 300.0  # seconds without progress that count as a hang, after the first step
    bucket_cap_mb: int = 25  # DDP: size in MiB of the buckets in which gradients are reduced
    find_unused_parameters: bool = False  # DDP: needed if a step does not use all parameters
    static_graph: bool = False  # DDP: every step uses the same parameters
    # DDP: gradients are views of the buckets, which saves a copy of them. If a step accumulates several micro-batches, this
    # applies only without train.deterministic, find_unused_parameters and static_graph
    gradient_as_bucket_view: bool = True
    sync_batchnorm: bool = False  # BatchNorm statistics over all ranks; GPUs only; each layer waits for the GPU
    # dtype in which gradients are all-reduced: fp32 | bf16 | fp16, which limits the loss scale
    reduce_dtype: str = "fp32"
    # experimental: when a rank is lost, the others continue without a restart; only DDP on CPUs, started with srun
    recover: bool = False


@dataclass
class CheckpointConfig:
    """When checkpoints are written and which are kept. One is always written at the end and on a stop request."""

    every_steps: int | None = None  # number of steps from one checkpoint to the next; null: not by steps
    every_minutes: float | None = 15.0  # minutes from one checkpoint to the next; null: not by time
    keep_last: int = 2  # number of newest checkpoints to keep
    keep_every: int | None = None  # checkpoints whose step is a multiple of this number are never deleted; null: none
    # leave out parameters that require no gradient, such as the base of an adapter; on resume they are built again, and their
    # hashes compared
    only_trained: bool = False
    # a URL to which complete checkpoints and the records of the run are copied, such as s3://BUCKET/runs/NAME. A start with an
    # empty run.dir continues from there, on any machine, see docs/mirror.md; null: none
    mirror: str | None = None
    mirror_seconds: float = 60.0  # maximum time to wait for the mirror when the run ends or stops
    best: str | None = None  # a metric such as eval/accuracy, whose best checkpoint is also kept; null: none
    # max | min: which value of that metric is the best; null: decided by the metric of train.metrics, else by its name
    best_mode: str | None = None


@dataclass
class ProfileConfig:
    """Profiling of a few steps with torch.profiler; see docs/profiling.md."""

    steps: list[int] | None = None  # [first, last] attempted step of the profile; null: no profile
    ranks: list[int] = field(default_factory=lambda: [0])  # ranks that write a trace


@dataclass
class TrackerConfig:
    """Trackers of metrics, in addition to metrics.jsonl and the console."""

    # wandb | tensorboard | mlflow | trackio | both (wandb and tensorboard) | none, or a list: [wandb,mlflow]
    name: Any = "none"
    project: str = "dtrain"  # project of wandb and Trackio, experiment of MLflow
    entity: str | None = None  # wandb user or team; null: wandb's default
    # mode of wandb: online | offline | disabled; null: WANDB_MODE; if it is not set, online for a sweep's agent, else as at the
    # run's last start, else offline
    mode: str | None = None
    tags: list[str] = field(default_factory=list)  # tags of the run in wandb and MLflow
    # checkpoints uploaded to wandb as artifacts: none | best (of checkpoint.best) | last (at the end of each start) | all
    artifacts: str = "none"
    # MLflow's server or store; null: MLFLOW_TRACKING_URI, else MLflow's own default, mlflow.db in the working directory
    mlflow_uri: str | None = None
    media: bool = True  # write pictures and texts to <run.dir>/media after evaluations


@dataclass
class SearchConfig:
    """A search for good values with Optuna: `launch.search.trials=20 'optimizer.lr=tag(log,interval(1e-4,1e-1))'`."""

    trials: int | None = None  # number of runs; null: no search
    metric: str = "eval/loss"  # the objective: a metric of the evaluations
    # maximize | minimize; null: decided by the name of the metric
    direction: str | None = None
    best: bool = False  # the objective of a run is: true: its best value | false: its last value
    sampler: str = "tpe"  # tpe: values near those of good runs | random
    seed: int = 0  # seed of the sampler
    # median: stop a run that is worse than the median of the others at its step | halving: successive halving | none
    pruner: str = "none"
    max_failures: int = 3  # number of failed runs in a row after which the search ends


@dataclass
class LaunchConfig:
    """How `dtrain launch` starts a run. The keys from `min_nodes` on apply to SLURM only."""

    name: str = "local"  # local | slurm; set by the preset
    nodes: int = 1  # number of machines
    # number of processes on each machine; null, for local only: one per GPU, or one without GPUs
    processes_per_node: int | None = None
    dry_run: bool = False  # only show what would be started or submitted
    # how many runs of a sweep or search run at a time; null: one, but on SLURM all runs of a sweep. local: cores and GPUs are
    # divided among them. slurm: a sweep with this key is one job array
    max_running: int | None = None
    search: SearchConfig = field(default_factory=SearchConfig)
    # start with fewer nodes, but at least this many, if not all are free; the global batch size stays the same
    min_nodes: int | None = None
    time: str = "01:00:00"  # time limit of one allocation; a run may take several
    partition: str | None = None  # null: the cluster's default
    account: str | None = None  # account to charge; null: the cluster's default
    gpus_per_node: int | None = None  # null: one per process; 0: nodes without GPUs
    cpus_per_process: int | None = None  # null: one, plus one for each of data.num_workers (auto: four)
    # the run is asked to stop this many seconds before the end of the allocation: more than a step and a checkpoint take
    stop_seconds: int = 120
    requeue: bool = True  # submit again until the run is finished
    extra: list[str] = field(default_factory=list)  # additional sbatch options: 'launch.extra=["--qos=high"]'
    srun: list[str] = field(default_factory=list)  # additional srun options, such as Pyxis' --container-image=IMAGE
    container: list[str] = field(default_factory=list)  # command in front of python: [apptainer,exec,--nv,image.sif]
    python: str | None = None  # python on the nodes, or in the container; null: the one that runs dtrain launch


@dataclass
class ExportConfig:
    """What `dtrain export` writes."""

    dtype: str = "bf16"  # dtype of the weights: fp32 | bf16 | fp16
    format: Any = "safetensors"  # safetensors | pt2 | aotinductor | onnx, or a list of them
    out: str | None = None  # folder of the artefact; null: <run.dir>/export
    # maximum error of an output, relative to the largest fp32 output; null: the dtype's default
    tolerance: float | None = None
    # maximum difference of accuracy, loss and other metrics from fp32; null: the dtype's default
    max_metric_difference: float | None = None
    measure: bool = True  # measure time and memory, also of the same weights in fp32
    batch: list[int] = field(default_factory=lambda: [1, 32])  # batch sizes to measure
    max_latency_ms: float | None = None  # also find the largest batch within this latency
    max_memory_gib: float | None = None  # also find the largest batch within this memory
    # merge BatchNorm into convolutions; false: keep it, so that a new run can start from the weights (run.weights_from)
    fold: bool = True
    # an adapter of peft: merged: into the weights | separate: only the adapter, in peft's format | kept: base and adapter
    adapter: str = "merged"
    # a model on the Hugging Face hub to publish the artefact to: hf://ORG/NAME[@BRANCH]; null: none
    push: str | None = None
    # whether a repository that export.push creates is private; an existing repository does not change
    private: bool = True
    # licence in the model card, such as apache-2.0. In the card, null is "Not stated", here and in the next two keys
    license: str | None = None
    intended_use: str | None = None  # section of the model card, Markdown: what the model is for
    limitations: str | None = None  # section of the model card, Markdown: where the model fails or must not be used
    push_replace: bool = False  # whether export.push may replace all files of a repository that has a different model


@dataclass
class Config:
    """A run."""

    run: RunConfig = field(default_factory=RunConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    data: DataConfig = field(default_factory=DataConfig)
    model: dict[str, Any] | None = None  # required: _target_ of a torch.nn.Module, and its arguments
    task: dict[str, Any] | None = None  # _target_ of task(model, batch) -> Output, and its arguments
    # _target_ of an optimizer, and its arguments; no_decay: patterns of parameters without weight decay; groups:
    # {NAME: {patterns: [..], lr: FACTOR, weight_decay: FACTOR}}: parameters with different rates, see docs/recipes.md
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
