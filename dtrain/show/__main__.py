"""``dtrain show experiment=... [--split NAME] [--epoch E] [--n N]``: what the model will see, as one HTML file.

Nothing is trained. The loader is built from the config as ``dtrain train`` builds it, without the
model, and read in this process. Exit code: 0; 1 if the data cannot be loaded; 2 if the command line is wrong.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
from rich.console import Console

from dtrain import command_line
from dtrain.command_line import add_json_option, write_json
from dtrain.config.compose import Composed
from dtrain.config.instantiate import by_target
from dtrain.config.schema import Config
from dtrain.console import OnProgress, progress, until_reader_leaves
from dtrain.errors import ConfigError, as_config_error, printable
from dtrain.files import replace_file
from dtrain.precision import Precision
from dtrain.report.gallery import Card, gallery_page
from dtrain.runs.recompose import recompose_if_run
from dtrain.show import counts
from dtrain.show.counts import Examined
from dtrain.show.fields import describe_fields, suggestions
from dtrain.show.looks import BOX_FORMATS, Looks
from dtrain.show.page import Facts
from dtrain.show.split import Row, Split, other_splits
from dtrain.training.build import make_precision
from dtrain.training.setup.loaders import class_names, corpus_beside

_MOST_SHARED = 5_000_000  # samples of which rank 0's share is computed


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line, ``sys.argv`` by default; returns the exit code."""
    options, rest = _parser().parse_known_args(sys.argv[1:] if arguments is None else arguments)
    trust = ["--trust"] * options.trust
    command_line.run(lambda composed: show(composed, options), [*rest, *trust], rewrite=recompose_if_run)
    return 0


def show(composed: Composed, options: argparse.Namespace) -> None:
    """Writes the page and the JSON file, and prints a summary.

    Raises:
        ConfigError: If the data cannot be loaded or a file cannot be written.
    """
    cfg, now = composed.cfg, time.time()
    if cfg.data.prepare is not None:
        with as_config_error("data.prepare"):
            by_target("data.prepare", cfg.data.prepare)
    precision = make_precision(cfg.precision)
    split = Split.build(cfg, options.split, precision, options.nproc, options.n)
    try:
        facts, cards = _look(cfg, split, precision, options)
    finally:
        split.close()
    out = options.out or Path(f"show-{split.name}.html")
    title = f"{_name(composed)}: {split.name}, epoch {options.epoch}"
    page = gallery_page(title, "dtrain show of", now, facts.parts(cards))
    try:
        with replace_file(out) as file:
            file.write(page.encode("utf-8", errors="replace"))  # keys may not be valid text
        write_json(options.json, facts.to_json())
    except OSError as error:
        raise ConfigError(f"--out {out}: the page cannot be written ({error}). Name a different file.") from error
    with until_reader_leaves():
        for line in facts.lines():
            print(printable(line))
        print(printable(str(out.resolve())), flush=True)


def _look(cfg: Config, split: Split, precision: Precision, options: argparse.Namespace) -> tuple[Facts, list[Card]]:
    """Reads the rows, and the samples of all splits that the facts need."""
    everything, notes = options.all, list[str]()
    with _counted("show: rows", options.n) as advance:
        rows, stored = [], []
        for row in split.rows(options.epoch, options.n):
            rows.append(row)
            stored.append(split.stored_values(row))
            advance(1)
    splits = [split, *_others(cfg, split, precision, options, notes)]
    names = class_names(cfg.data)
    looks = _looks(cfg, names, options.boxes, notes)
    examined, labels = [], {}
    for each in splits:
        examined.append(_examined(each, rows if each is split else [], options, looks))
        with _counted(f"show: labels of {each.name}", each.num_samples) as advance:
            labels[each.name] = counts.all_labels(each, examined[-1], advance, everything=everything)
    with _counted("show: shards", sum(len(source.index.shards) for source in split.sources if source.index)) as advance:
        extensions = counts.extensions(split, advance, everything=everything)
    notes += _limits(splits, everything)
    facts = Facts(
        split=split,
        epoch=options.epoch,
        seed=cfg.run.seed,
        precision=cfg.precision.name,
        global_batch_size=cfg.train.global_batch_size,
        shown=[row.key for row in rows],
        fields=describe_fields(split, stored),
        looks=looks,
        labels=labels,
        share=_share(split, options.epoch, notes),
        examined=examined,
        sizes=counts.sizes(split),
        extensions=extensions,
        duplicates=counts.duplicates(examined) if split.sources else None,
        lacking=counts.lacking(labels, None if names is None else len(names)),
        advice=suggestions(split),
        notes=notes,
    )
    of_rows = [split.loader.source.fields if row.source is None else row.source.source.fields for row in rows]
    cards = [looks.card(*each) for each in zip(rows, stored, of_rows, strict=True)]
    for each in splits[1:]:
        each.close()
    return facts, cards


def _others(
    cfg: Config, split: Split, precision: Precision, options: argparse.Namespace, notes: list[str]
) -> list[Split]:
    """The splits that the split is compared with; one that cannot be loaded becomes a note."""
    found = []
    for name in other_splits(cfg, split.name):
        try:
            other = Split.build(cfg, name, precision, options.nproc, options.n)
        except ConfigError as error:
            notes.append(f"{name} is not compared: {error}")
            continue
        if other.sources and (options.all or not other.is_remote):
            found.append(other)
    return found


def _examined(split: Split, rows: Sequence[Row], options: argparse.Namespace, looks: Looks) -> Examined:
    if not split.sources:
        return counts.examine_rows(split, rows)
    chosen, number = counts.places(split, rows, options.epoch, everything=options.all)
    with _counted(f"show: samples of {split.name}", number) as advance:
        return counts.examine(split, chosen, number, advance, looks.class_name)


def _looks(cfg: Config, classes: Sequence[str] | None, boxes: str, notes: list[str]) -> Looks:
    corpus, tokenizer = corpus_beside(cfg.data), None
    if corpus is not None:
        try:
            tokenizer = corpus.tokenizer()
        except (ImportError, ValueError, OSError) as error:
            notes.append(f"tokens are shown as numbers: {error}")
    return Looks(classes, corpus, tokenizer, boxes)


def _share(split: Split, epoch: int, notes: list[str]) -> np.ndarray | None:
    if split.ranks == 1 or not split.sources:
        return None
    if split.num_samples > _MOST_SHARED:
        notes.append(f"the share of rank 0 is computed for up to {_MOST_SHARED:,} samples")
        return None
    return split.share(epoch)


def _limits(splits: Sequence[Split], everything: bool) -> list[str]:
    """What is not known of the splits, and why."""
    found = []
    for split in splits:
        if not split.sources:
            found.append(f"{split.name} is a stream: only the samples shown were read; they have no stored values")
        elif split.is_remote and not everything:
            found.append(f"{split.name} is behind a URL: only the samples shown were read; --all reads all")
    return found


def _counted(description: str, total: int) -> AbstractContextManager[OnProgress]:
    return progress(Console(stderr=True), description, total)


def _name(composed: Composed) -> str:
    return str(composed.cfg.run.name or composed.experiment or "data")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dtrain show",
        usage="%(prog)s experiment=NAME [KEY=VALUE ...] [--split NAME] [--epoch E] [--n N] [--all]\n"
        "       [--out FILE.html] [--json FILE]\n"
        "       %(prog)s run.dir=DIR [KEY=VALUE ...]",
        description="Shows what the model will see, without training, as one HTML file: samples of an epoch, as stored and\n"
        "after crop, augmentation and mixing; dtype, transfer dtype, cost and range of each field; counts of labels;\n"
        "sizes and extensions; bad samples, exact duplicates, and classes that are missing in a split.",
        epilog="example: dtrain show experiment=digits --split eval --n 16",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--split", metavar="NAME", default="train", help="train (default), eval, or the name of a set of data.eval"
    )
    parser.add_argument("--epoch", type=_from(0), metavar="E", default=0, help="epoch of the samples (default: 0)")
    parser.add_argument("--n", type=_from(1), metavar="N", default=64, help="number of samples to show (default: 64)")
    parser.add_argument(
        "--nproc", type=_from(1), metavar="N", default=1, help="number of ranks of the run, for rank 0's share"
    )
    parser.add_argument(
        "--all",
        action="store_true",
        help=f"examine all samples, not {counts.MOST_EXAMINED:,} or {counts.MOST_BYTES >> 20} MiB of each split",
    )
    parser.add_argument(
        "--boxes",
        choices=BOX_FORMATS,
        default="xyxy",
        help="format of boxes with four coordinates (default: xyxy, two corners)",
    )
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="the page (default: show-SPLIT.html in the current folder)"
    )
    add_json_option(parser)
    parser.add_argument(
        "--trust", action="store_true", help="use a run that a different user started; its config runs code"
    )
    return parser


def _from(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not (text.isdecimal() and least <= int(text) < 2**31):
            raise argparse.ArgumentTypeError(f"got {text}, want a number from {least} on")
        return int(text)

    return number


if __name__ == "__main__":
    sys.exit(main())
