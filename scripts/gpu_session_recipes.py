"""What ``gpu_session.py`` trains on noise: overrides that make a recipe short, and large enough to fill a GPU."""

from __future__ import annotations

import os

from gpu_session_bench import Bench

#: Attempted steps of a run; the last so many are timed; these are profiled where that is asked for.
STEPS, TIMED, PROFILED = 60, 20, (31, 35)


def image_rows(bench: Bench) -> int:
    """Of ResNet-50, on each rank."""
    return 4 if bench.quick else 256 if bench.roomy else 64


def token_rows(bench: Bench) -> int:
    """Of the GPT, on each rank."""
    return 2 if bench.quick else 32 if bench.roomy else 8


def resnet50(bench: Bench, ranks: int = 1) -> list[str]:
    """The ImageNet recipe on images of noise."""
    size, number = (32, 64) if bench.quick else (224, 4 * image_rows(bench) * ranks)
    small = ["model.depth=18", "model.width=4"] if bench.quick else []
    return [
        "experiment=imagenet_resnet50",
        *small,
        *images("train", number, size, classes=1000),
        f"train.global_batch_size={image_rows(bench) * ranks}",
        *_short(bench),
    ]


def gpt(bench: Bench, ranks: int = 1) -> list[str]:
    """The byte-level GPT at GPT-2 small's width and depth, on rows of noise."""
    length, width, depth, heads = (16, 16, 1, 1) if bench.quick else (1024, 768, 12, 12)
    return [
        "experiment=bytes_gpt",
        f"model={{width: {width}, depth: {depth}, heads: {heads}, context: {length}}}",
        f"data.train={{_target_: bench_synthetic.tokens, number: 1024, length: {length + 1}, vocabulary: 257}}",
        "data.fields={tok: {dtype: null, length: null}}",
        "data.prepare=null",
        "task.sample=null",
        f"train.global_batch_size={token_rows(bench) * ranks}",
        *_short(bench),
    ]


def images(split: str, number: int, size: int, classes: int) -> list[str]:
    """Images of noise in place of a recipe's own."""
    noise = f"{{_target_: bench_synthetic.images, number: {number}, size: {size}, classes: {classes}, split: {split}}}"
    return [
        "data=map",
        f"data.fields={{image: {{size: {size}}}}}",
        f"data.{'eval' if split == 'test' else split}={noise}",
    ]


def _short(bench: Bench) -> list[str]:
    steps, log_every = (6, 2) if bench.quick else (STEPS, TIMED)
    workers = 1 if bench.quick else min(8, max(1, (os.cpu_count() or 1) // 2))
    return [
        f"train.max_steps={steps}",
        f"train.log_every={log_every}",
        "train.eval_every=0",
        "data.eval=null",
        f"data.num_workers={workers}",
        "optimizer.lr=0.001",  # noise is not worth a recipe's rate, at which it could diverge
    ]
