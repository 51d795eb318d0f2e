"""Training steps on a CUDA that computes nothing: real autograd, DDP, autocast and fused optimizers, fake numbers.

``main`` trains rank 0 of four in each case, in a process of its own, and prints a line of JSON for each. The library made of
``fake_cuda_guard.cpp`` has to be loaded before torch is imported: ``tests/training/test_fake_cuda.py`` builds it, runs
``main`` in a new process and checks the lines. It proves devices, dtypes, collectives and host syncs; it says nothing about
numbers, streams and kernels.

fp32, tf32, bf16, fp16 and their options run; fused SGD, ``find_unused_parameters`` and ``static_graph`` do not, because torch's
fake tensors have no such kernels, or DDP reads values.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode, unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from dtrain.config.schema import ParallelConfig
from dtrain.data import Batch
from dtrain.data.fields.parse import parse_fields
from dtrain.data.loading.batch import DeviceCopies, Transfer
from dtrain.distributed import sharding
from dtrain.distributed.sharding import local_part, shard_model
from dtrain.distributed.world import World
from dtrain.precision import Precision
from dtrain.precision import vote as vote_module
from dtrain.precision.loss_scale import LossScale
from dtrain.precision.reduce_dtype import reduce_in
from dtrain.precision.spike import SpikeOptions, SpikeRule
from dtrain.tasks import Classification
from dtrain.training import step as step_module
from dtrain.training.evaluation import _Sums
from dtrain.training.setup.ema import Ema
from dtrain.training.setup.model import use_channels_last
from dtrain.training.step import TrainStep
from dtrain.training.task import require_output
from tests.toys import NormNet

CUDA, RANKS, ROWS, SIDE = torch.device("cuda", 0), 4, 2, 8
FIELDS = {"jpg": {"name": "image", "role": "image", "size": SIDE}, "cls": {"name": "label", "role": "label"}}
Case = Callable[[], dict[str, Any]]


class Watch(TorchDispatchMode):
    """Records collectives with their numbers of elements, and copies between host and device that make the host wait."""

    def __init__(self) -> None:
        super().__init__()
        self.collectives: list[tuple[str, int]] = []
        self.blocking: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func.namespace == "c10d":
            tensors = args[0] if isinstance(args[0], list) else [args[0]]
            self.collectives.append((func._opname, sum(t.numel() for t in tensors if isinstance(t, Tensor))))
        if func in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default):
            source, target = (args[1], args[0]) if func is torch.ops.aten.copy_.default else (args[0], result)
            non_blocking = kwargs.get("non_blocking") or (len(args) > 2 and args[2])
            if source.device.type != target.device.type and not non_blocking:
                places = [f"{Path(frame.filename).name}:{frame.lineno}" for frame in traceback.extract_stack()]
                self.blocking.append(f"{source.device.type} to {target.device.type} at {' '.join(places[-8:-1])}")
        return result


class Stream:
    def wait_stream(self, other: Any) -> None:
        pass

    wait_event = wait_stream

    def record_event(self, event: Any = None) -> Event:
        return Event()


class Event:
    def __init__(self, *args: Any, **options: Any) -> None:
        pass

    def record(self, *args: Any) -> None:
        pass

    def query(self) -> bool:
        return True


class RealVote(vote_module.Vote):
    """Its page-locked memory has to be real: a numpy view of it is written to."""

    def __init__(self, device: torch.device, world_size: int, spikes: SpikeOptions | None = None) -> None:
        with unset_fake_temporarily():
            super().__init__(device, world_size)
        self.spikes = SpikeRule(spikes, device) if spikes is not None else None


class Done:
    """The work of an all-reduce; that of the fake backend has no result."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def get_future(self) -> Any:
        future: Any = torch.futures.Future()
        future.set_result([self._tensor])
        return future


@contextlib.contextmanager
def fake_cuda() -> Iterator[None]:
    """As rank 0 of ``RANKS`` with a CUDA device, on which every look at a value raises ``DataDependentOutputException``."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    stream, all_reduce = Stream(), dist.all_reduce

    def reduced(tensor: Tensor, *args: Any, async_op: bool = False, **options: Any) -> Any:
        all_reduce(tensor)
        return Done(tensor) if async_op else None

    # What the host reads of a vote: a step of all ranks without an overflow.
    settled = [0.0, RANKS, RANKS, 1.0, 1.0, 8.0, 1.0, 8.0, 0.0, 0.0, 8.0, 0.0, 0.0]
    waits = AssertionError("the host waits for the device")
    with contextlib.ExitStack() as stack:
        patches: list[tuple[Any, str, Any]] = [
            (torch.cuda.amp.common, "amp_definitely_not_available", lambda: False),
            (torch.cuda, "is_bf16_supported", lambda *args: True),
            (torch.cuda, "Stream", lambda *args, **options: stream),
            (torch.cuda, "Event", Event),
            (torch.cuda, "current_device", lambda: 0),
            (torch.cuda, "current_stream", lambda *args: stream),
            (torch.cuda, "stream", lambda stream: contextlib.nullcontext()),
            (torch.cuda, "synchronize", mock.Mock(side_effect=waits)),
            (Tensor, "record_stream", lambda self, stream: None),
            (dist, "all_reduce", reduced),
            (dist.Reducer, "_rebuild_buckets", lambda self: False),  # reads values, once a process
            (fake_tensor, "init_gpu_context", lambda device: None),
            (step_module, "make_vote", RealVote),
            (step_module, "seed_generators", lambda *place: None),
            (sharding, "_mesh", mesh_of_ranks),
            (Precision, "_require_device", lambda self, device: None),
            # A vote that looks for spikes copies one more number.
            (vote_module._HostCopy, "wait", lambda self: settled + [0.0] * (self._payload.numel() - len(settled))),
        ]
        for owner, name, value in patches:
            if hasattr(owner, name):
                stack.enter_context(mock.patch.object(owner, name, value))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        yield


def averaging(state, bucket):  # without annotations: DDP compares them with types
    return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda future: future.value()[0])


@contextlib.contextmanager
def in_buckets(limit: int | None) -> Iterator[None]:
    """DDP's buckets from its first step on; it lays them out after that step, which here it does not."""
    assign = dist._compute_bucket_assignment_by_size

    def limited(parameters: Any, limits: list[int], *rest: Any) -> Any:
        return assign(parameters, limits if limit is None else [limit], *rest)

    with mock.patch.object(dist, "_compute_bucket_assignment_by_size", limited):
        yield


def mesh_of_ranks(parallel: ParallelConfig, world: World) -> Any:
    with unset_fake_temporarily():
        return DeviceMesh("cuda", torch.arange(RANKS), mesh_dim_names=("shard",))


def to_cuda(model: nn.Module) -> nn.Module:
    """``model.to("cuda")``, which would swap the data of real tensors for that of fake ones."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = nn.Parameter(parameter.detach().to(CUDA))
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(CUDA)
    return model


def host_batch(transfer: Transfer) -> Batch:
    """What a loader worker hands over, in page-locked memory."""
    with unset_fake_temporarily():
        image, label = torch.zeros(ROWS, SIDE, SIDE, 3, dtype=torch.uint8), torch.zeros(ROWS, dtype=torch.int64)
        batch = Batch({"image": image, "label": label}, ["a", "b"], torch.ones(ROWS, dtype=torch.bool)).pin_memory()
    batch.transfer = transfer
    return batch


def adamw(parameters: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, **{"lr": 0.1, "fused": True} | options)


def mixed_groups(parameters: Any) -> torch.optim.Optimizer:
    first, *others = parameters
    return adamw([{"params": [first]}, {"params": others, "fused": False}])


def steps(
    precision: str,
    make_optimizer: Callable[..., torch.optim.Optimizer] = adamw,
    *,
    parallel: str = "ddp",
    reduce_dtype: torch.dtype | None = None,
    hysteresis: int = 1,
    ema: bool = True,
    clip_norm: float | None = 1.0,
    micro_batches: int = 2,
    bucket_bytes: int | None = None,
    evaluates: bool = False,
    spikes: SpikeOptions | None = None,
    **ddp_options: Any,
) -> Case:
    """A case: three steps, and an evaluation of two micro-batches with ``evaluates``."""

    def run() -> dict[str, Any]:
        policy, model = Precision(precision), to_cuda(NormNet())
        transfer = Transfer(parse_fields(FIELDS), policy)
        world = World(0, RANKS, 0, RANKS, CUDA, "nccl", launched=True)
        wrapped = model
        if parallel != "fsdp":
            use_channels_last(model)
        if parallel == "ddp":
            with in_buckets(bucket_bytes):
                ddp: Any = DistributedDataParallel(model, device_ids=[0], init_sync=False, **ddp_options)
            kept.append(ddp.logger)
            ddp.logger = mock.MagicMock()  # its timer is CUDA's
            if reduce_dtype is not None:
                reduce_in(ddp, reduce_dtype)
            else:
                ddp.register_comm_hook(None, averaging)
            wrapped = ddp
        elif parallel == "fsdp":
            shard_model(model, ParallelConfig(shard="full", shard_modules=["conv*"]), world)
        average = Ema(model, 0.9) if ema else None
        optimizer = make_optimizer(list(model.parameters()))
        step = TrainStep(
            wrapped,
            Classification(),
            optimizer,
            world=world,
            precision=policy,
            loss_scale=LossScale(CUDA, init=1.0, hysteresis=hysteresis) if precision == "fp16" else None,
            nominal=8,
            schedule=lambda applied_steps: 1.0,
            clip_norm=clip_norm,
            ema=average,
            spikes=spikes,
        )
        copies = DeviceCopies(CUDA)
        seen: list[dict[str, Any]] = []
        for _ in range(3):
            with Watch() as watch:
                step.accumulate((copies(host_batch(transfer)) for _ in range(micro_batches)), micro_batches)
                step.settle()
                step.apply()
            seen.append({"collectives": watch.collectives, "blocking": watch.blocking})
        evaluation: list[str] = []
        if evaluates:
            assert average is not None
            with average.swapped_in() as averaged, torch.no_grad(), Watch() as watch:
                sums = _Sums(CUDA)
                for _ in range(2):
                    with policy.autocast("cuda"):
                        sums.add(require_output(Classification()(averaged.eval(), copies(host_batch(transfer)))), 0)
            evaluation = [*watch.blocking, *(name for name, _ in watch.collectives)]
        state = [value for of in optimizer.state.values() for value in of.values() if isinstance(value, Tensor)]
        tensors = [*model.parameters(), *model.buffers(), *state, *(average._averages if average is not None else ())]
        return {
            "steps": seen,
            "evaluation": evaluation,
            "devices": sorted({str(local_part(tensor).device) for tensor in tensors}),
            "dtypes": sorted({str(parameter.dtype) for parameter in model.parameters()}),
            "elements": sum(parameter.numel() for parameter in model.parameters()),
            "buffers": sum(1 for _ in model.buffers()),
            "optimizer_tensors": len(state),
        }

    return run


kept: list[Any] = []  # DDP's loggers
CASES: dict[str, Case] = {
    "fp32": steps("fp32", evaluates=True),
    "tf32": steps("tf32"),
    "bf16": steps("bf16", evaluates=True),
    "fp16": steps("fp16", evaluates=True),
    "fp16, hysteresis, amsgrad": steps("fp16", lambda parameters: adamw(parameters, amsgrad=True), hysteresis=2),
    "bf16, reduced in bf16": steps("bf16", reduce_dtype=torch.bfloat16),
    "fp16, reduced in fp16": steps("fp16", reduce_dtype=torch.float16),
    "bf16, bucket views, 3 micro-batches": steps("bf16", micro_batches=3, gradient_as_bucket_view=True),
    "bf16, several buckets": steps("bf16", bucket_bytes=512),
    "bf16, no clipping, no average, 1 micro-batch": steps("bf16", clip_norm=None, ema=False, micro_batches=1),
    "fp16, no DDP": steps("fp16", parallel="none"),
    "bf16, fsdp": steps("bf16", parallel="fsdp"),
    "fp16, spikes are skipped": steps("fp16", spikes=SpikeOptions(action="skip")),
    "fp16, foreach": steps("fp16", lambda parameters: torch.optim.AdamW(parameters, lr=0.1, foreach=True)),
    "fp16, one group that is not fused": steps("fp16", mixed_groups),
}


def run_case(name: str, pipe: Any) -> None:
    """Sends the result of a case, or its error."""
    result: dict[str, Any]
    try:
        with fake_cuda():
            result = CASES[name]()
    except DataDependentOutputException as error:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/dtrain/" in frame.filename]
        result = {"waits": f"{Path(frames[-1].filename).name}: {frames[-1].line}"}
    except BaseException:  # noqa: BLE001 - the test shows it
        result = {"error": traceback.format_exc()}
    pipe.send(result)


def main() -> None:
    """Trains the cases named on the command line, by default all; the library is loaded already."""
    names = sys.argv[1:]
    context = multiprocessing.get_context("fork")
    for name in names or CASES:
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=run_case, args=(name, sender))
        process.start()
        sender.close()
        try:
            result = receiver.recv()
        except EOFError:
            process.join()
            result = {"error": f"ended with code {process.exitcode}"}
        process.kill()  # threads of torch do not survive the fork
        process.join()
        print(json.dumps({"case": name} | result), flush=True)
