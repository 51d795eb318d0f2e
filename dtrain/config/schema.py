"""The config tree: every key that dtrain itself reads, its type and its default.

Hydra merges ``conf/`` and the command line into these classes, so that a misspelt key or a value of the wrong type is
refused before anything starts. Groups whose node is a ``_target_`` (model, task, optimizer, schedule) are free-form:
what they may contain is decided by the class they name.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING


@dataclass
class WarmStartConfig:
    """Weights of another model for a new run; every name that is not skipped must fit."""

    path: str | None = None  # a run directory, a checkpoint's folder, or a .safetensors file
    rename: dict[str, str] = field(default_factory=dict)  # how names begin there -> here; the first that fits
    skip: list[str] = field(default_factory=list)  # patterns (fnmatch) of names, after renaming, that are left out


@dataclass
class RunConfig:
    """Identity and place of the run."""

    name: str | None = None  # null: <experiment>-<hash of the config>
    dir: str | None = None  # null: runs/<name>
    seed: int = 0  # of the order, the augmentation, the first weights and dropout
    max_hours: float | None = None  # of this start: it then saves and stops, and the same command continues
    resume: str = "auto"  # auto: continue if there is a checkpoint | must: fail if there is none | never: refuse one
    weights_from: str | None = None  # a new run begins with these weights: a path as in warm_start; all names must fit
    warm_start: WarmStartConfig = field(default_factory=WarmStartConfig)


@dataclass
class TrainConfig:
    """The loop. ``max_steps`` and the ``*_every`` keys count attempted optimizer steps."""

    global_batch_size: int = 64  # samples of one optimizer step, over all ranks
    micro_batch_size: int | None = None  # null: a rank's whole share of the global batch
    max_steps: int | None = None  # the first of max_steps and max_epochs ends the run
    max_epochs: int | None = None  # null: no limit
    clip_norm: float | None = None  # the largest norm of all gradients together; null: not clipped
    log_every: int = 10  # steps from one line of metrics to the next
    eval_every: int | None = None  # null: after each epoch; 0: only at the end
    deterministic: bool = False  # bit for bit the same on as many ranks; slower
    ema_decay: float | None = None  # null: no moving average of the weights
    compile: Any = False  # torch.compile: true: the whole model | patterns of modules, such as [blocks.*]
    channels_last: bool = True  # layout of images and of convolutions' weights; false: as torch has them by default
    checkpoint_activations: list[str] = field(default_factory=list)  # modules that compute theirs again: [blocks.*]
    max_consecutive_skips: int | None = None  # so many in a row end the run; null: 50 with loss scaling, 10 without


@dataclass
class CacheConfig:
    """Where copies of shards are kept that lie on a network or behind a URL; shared by all processes of a node."""

    dir: str | None = None  # null: shards in dtrain's cache directory; best on a local disk
    max_gb: float | None = None  # null: half of what is free on that disk


@dataclass
class DataConfig:
    """Shards, fields and order.

    ``train`` and ``eval`` are a brace pattern, a glob, or a list of them; or a ``_target_`` that makes a map-style data set,
    a dict or tuple of arrays, or a ``dtrain.data.Generated``.
    """

    train: Any = MISSING  # shards to train on, or a _target_
    eval: Any = None  # the same to evaluate on; null: no evaluation
    fields: dict[str, Any] = field(default_factory=dict)  # extension of a member: its name, role, size, mean, std
    image_size: int = 224  # height and width that the presets shards and imagenet give their images
    # processes that build batches; 0: none; auto: as many as the data need and the cores allow
    num_workers: int | str = 2
    shuffle: str = "window"  # window: within windows of shards | full: all samples | none: as stored
    lanes: int | None = None  # pieces of the epoch that a step draws from; null: a divisor of the global batch up to 64
    window: int | None = None  # neighbouring shards of a lane that are shuffled as one; null: 8
    shard_size: int | None = None  # of a data set by _target_: samples shuffled as one; null: one, in a large set a few
    tail: str = "pad"  # of an epoch: pad: its last batch is filled with masked rows | drop: left out
    augment: Any = None  # _target_ of (sample, rng) -> sample, in the workers
    mix: Any = None  # dtrain.data.mixing.Mix: mixup and cutmix
    prepare: Any = None  # a _target_ that rank 0 calls once before the shards are looked for
    # bad samples that end the run: 0: the first one; below 1 a share (ten are forgiven); else a count
    max_bad: float = 0.01
    max_bad_consecutive: int | None = 100  # bad ones in steps without one good sample; 0: one such step; null: no limit
    storage: str = "auto"  # slow: files through the cache; fast: where they lie; auto: slow on network file systems
    cache: CacheConfig = field(default_factory=CacheConfig)
    record_keys: bool = False  # which samples each step used, in logs/keys-rank-*.jsonl
    start_method: str | None = None  # null: Python's default | fork | forkserver | spawn
    prefetch: int = 2  # micro-batches a worker builds ahead
    wire: str = "auto"  # auto: follows the precision | fp32: features travel in fp32
    on_overflow: str = "error"  # a feature outside fp16's range: error | clamp | fp32


@dataclass
class LossScaleConfig:
    """The schedule of the loss scale; read in fp16 only."""

    init: float = 65536.0  # of the first step
    growth_factor: float = 2.0  # after growth_interval steps without a skip
    backoff_factor: float = 0.5  # after hysteresis skips
    growth_interval: int = 2000  # steps
    min: float = 1.0  # it does not fall below
    max: float = 16777216.0  # it does not rise above
    hysteresis: int = 1  # skips until it falls


@dataclass
class PrecisionConfig:
    """What the loader puts on the wire, what autocast computes in, whether gradients are scaled."""

    name: str = MISSING  # fp32 | tf32 | bf16 | fp16
    loss_scale: LossScaleConfig = field(default_factory=LossScaleConfig)
    keep_fp32: list[str] = field(default_factory=list)  # modules that compute in fp32: patterns of names (fnmatch)


@dataclass
class ParallelConfig:
    """DistributedDataParallel and its process group."""

    timeout_start: float = 600.0  # seconds a collective may take until the first step is done
    timeout_step: float = 300.0  # seconds from then on
    bucket_cap_mb: int = 25  # of DDP: gradients that are reduced together
    find_unused_parameters: bool = False  # of DDP: for models that do not use all parameters in each step
    static_graph: bool = False  # of DDP: the same parameters are used in each step
    gradient_as_bucket_view: bool = True  # of DDP: no second copy of the gradients
    sync_batchnorm: bool = False  # statistics of all ranks' micro-batches; GPUs only
    comm_dtype: str = "fp32"  # of the all-reduce of gradients: fp32 | bf16 | fp16, which caps the loss scale
    comm_hook: Any = None  # instead: _target_ of a DDP communication hook, hook(state, bucket), and its state


@dataclass
class CheckpointConfig:
    """When checkpoints are written and which are kept."""

    every_steps: int | None = None  # null: only at the end, on a stop request and every_minutes
    every_minutes: float | None = 15.0  # null: not by the clock
    keep_last: int = 2  # newest ones
    keep_every: int | None = None  # those of steps divisible by it stay for good
    best: str | None = None  # a metric such as eval/accuracy; its best checkpoint is kept
    best_mode: str = "max"  # max | min


@dataclass
class ProfileConfig:
    """A look at a few steps with torch.profiler; see docs/profiling.md."""

    steps: list[int] | None = None  # [first, last] attempted step; null: none
    ranks: list[int] = field(default_factory=lambda: [0])  # which of them write a trace


@dataclass
class TrackerConfig:
    """Where metrics go besides metrics.jsonl and the terminal."""

    name: str = "none"  # wandb | tensorboard | both | none
    project: str = "dtrain"  # of wandb
    entity: str | None = None  # of wandb: user or team; null: its default
    mode: str | None = None  # online | offline | disabled; null: WANDB_MODE, else online when logged in, else offline
    tags: list[str] = field(default_factory=list)  # of the run in wandb
    media: bool = True  # pictures and texts after evaluations, in <run.dir>/media


@dataclass
class LaunchConfig:
    """What ``dtrain.launch`` starts, and where. From ``min_nodes`` on for SLURM only."""

    name: str = "local"  # local | slurm; the preset sets it
    nodes: int = 1  # machines
    processes_per_node: int | None = None  # null: local: one for each GPU, or one on a machine without
    dry_run: bool = False  # show what would be started or submitted, and do nothing
    min_nodes: int | None = None  # start with as few where others are missing; the global batch stays what it is
    time: str = "01:00:00"  # of one allocation, not of the run
    partition: str | None = None  # null: the cluster's default; likewise account
    account: str | None = None  # what the time is charged to
    gpus_per_node: int | None = None  # null: one for each process; 0 for nodes without GPUs
    cpus_per_process: int | None = None  # null: one, and one for each of data.num_workers
    stop_seconds: int = 120  # asked to stop so long before the time is up: more than a step and a checkpoint take
    requeue: bool = True  # ask for new allocations until the run is finished
    max_running: int | None = None  # --multirun: one job array, so many of its runs at once; null: a job for each
    extra: list[str] = field(default_factory=list)  # further sbatch options: 'launch.extra=["--qos=high"]'
    srun: list[str] = field(default_factory=list)  # further srun options, as of Pyxis: --container-image=IMAGE
    container: list[str] = field(default_factory=list)  # what python is started with: [apptainer,exec,--nv,image.sif]
    python: str | None = None  # on the nodes, or in the container; null: the one that runs dtrain.launch


@dataclass
class ExportConfig:
    """What ``dtrain.export`` writes."""

    dtype: str = "bf16"  # fp32 | bf16 | fp16
    format: Any = "safetensors"  # safetensors | pt2 | aotinductor | onnx, or a list of them
    out: str | None = None  # null: <run.dir>/export
    tolerance: float | None = None  # error of an output as a part of the largest fp32 one; null: the dtype's default
    max_metric_difference: float | None = None  # from fp32, of accuracy, loss, ...; null: the dtype's default
    measure: bool = True  # time and memory of its use, beside those of the same weights in fp32
    batch: list[int] = field(default_factory=lambda: [1, 32])  # rows of a forward, each measured
    max_latency_ms: float | None = None  # also look for the largest batch that takes at most so long
    max_memory_gib: float | None = None  # and at most so much


@dataclass
class Config:
    """A run."""

    run: RunConfig = field(default_factory=RunConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    data: DataConfig = field(default_factory=DataConfig)
    model: dict[str, Any] = MISSING  # _target_ of a torch.nn.Module, and its arguments
    task: dict[str, Any] = MISSING  # _target_ of task(model, batch) -> Output, and its arguments
    # _target_ of an optimizer and its arguments; no_decay: parameters without weight decay, by patterns of their names
    optimizer: dict[str, Any] = MISSING
    schedule: dict[str, Any] = MISSING  # _target_ of a learning-rate schedule, and its arguments
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    tracker: TrackerConfig = field(default_factory=TrackerConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    export: ExportConfig = field(default_factory=ExportConfig)
    faults: list[str] = field(default_factory=list)  # to be injected: crash@rank=1,step=5; see training/faults.py


def register() -> None:
    """Makes the schema known to Hydra as ``schema``, the first entry of ``conf/train.yaml``'s defaults list."""
    ConfigStore.instance().store(name="schema", node=Config, provider="dtrain")
