"""Makes shards, and indexes them ahead of time.

    python -m dtrain.pack imagefolder SRC DST                      from a folder of images, one folder per class
    python -m dtrain.pack arrays X.npy Y.npy DST                   from arrays, one sample a row
    python -m dtrain.pack text SRC DST --length 1024               from text, as rows of tokens
    python -m dtrain.pack index 'DST/train-{000000..000009}.tar'   finds where every sample lies, before training does
    python -m dtrain.pack digits                                   the data of experiment=digits

The same input gives the same bytes, by any number of processes. Shards appear when all are written; a run that was
killed is continued by the same command. What goes wrong with the input is told in one line; the exit code is 1 then, and
2 for a wrong usage.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from dtrain.data import digits
from dtrain.packing.arrays_command import pack_arrays
from dtrain.packing.documents import VAL_BY
from dtrain.packing.images_command import pack_images
from dtrain.packing.indexing import index
from dtrain.packing.text_command import pack_text


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one subcommand; returns the exit code."""
    options = _parser().parse_args(arguments)
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        if options.command == "imagefolder":
            pack_images(options, console)
        elif options.command == "arrays":
            pack_arrays(options, console)
        elif options.command == "text":
            pack_text(options, console)
        elif options.command == "index":
            index(options.patterns, options.processes, console)
        else:
            _digits(options.destination)
    except (ValueError, OSError, ModuleNotFoundError) as error:
        console.print(f"pack: error: {error}", markup=False)
        return 1
    except KeyboardInterrupt:
        console.print("pack: interrupted; the same command continues")
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m dtrain.pack", description="Make tar shards for training, or index shards ahead of time."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_images(commands)
    _add_arrays(commands)
    _add_text(commands)
    _add_index(commands)
    demo = commands.add_parser(
        "digits", help="the demo's data", description="Makes the shards of scikit-learn's digits."
    )
    demo.add_argument("destination", metavar="DST", nargs="?", help="folder to make (default: the user's cache)")
    return parser


_Commands = argparse._SubParsersAction


def _add_images(commands: _Commands[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "imagefolder",
        help="a folder of images, one folder per class",
        description="Packs SRC/CLASS/IMAGE, or SRC/{train,val,test}/CLASS/IMAGE, into DST/train-000000.tar and on. "
        "Files are copied unchanged; their order is shuffled so that classes mix. Labels are the places of the class "
        "names in DST/classes.json. Splits are shares of every class.",
        epilog="example: python -m dtrain.pack imagefolder photos/ shards/ --val 0.1",
    )
    parser.add_argument("source", metavar="SRC", type=Path)
    parser.add_argument("destination", metavar="DST", type=Path)
    _add_sizes(parser, "1000 samples")
    _add_splits(parser)
    _add_bad(parser, "files that are not images")
    parser.add_argument("--verify", action="store_true", help="decode every image, rather than look at its header only")


def _add_arrays(commands: _Commands[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "arrays",
        help="numpy arrays, one sample a row",
        description="Packs .npy files (mapped: memory holds a row) and the arrays of .npz files. Row n of each is sample "
        "n; fields have the arrays' names. Single integers are stored as text (.cls), everything else as .npy.",
        epilog="example: python -m dtrain.pack arrays mnist.npz shards/ --field image=x_train --field label=y_train "
        "--png image",
    )
    parser.add_argument("files", metavar="FILE", type=Path, nargs="+", help=".npy or .npz")
    parser.add_argument("destination", metavar="DST", type=Path)
    parser.add_argument(
        "--field",
        type=_named,
        action="append",
        default=[],
        metavar="NAME=ARRAY",
        help="take these arrays only, under these names; may be repeated",
    )
    parser.add_argument(
        "--dtype",
        type=_dtype,
        action="append",
        default=[],
        metavar="[NAME=]DTYPE",
        help="store floats, or those of one array, in fp32, fp16 or bf16 (default: as they are); may be repeated",
    )
    parser.add_argument(
        "--png", action="append", default=[], metavar="NAME", help="store this array's pixels as PNG; may be repeated"
    )
    parser.add_argument("--shuffle", action="store_true", help="mix the rows, as sorted ones should be")
    _add_sizes(parser, "64 megabytes")
    _add_splits(parser)


def _add_text(commands: _Commands[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "text",
        help="text files, as rows of tokens",
        description="Encodes UTF-8 files, each a document, joins them with the end-of-text token and cuts the stream into "
        "rows of N + 1 tokens: N inputs and their N next tokens. A row begins with the last token of the one before, so "
        "that each token is predicted once. DST/dataset.json tells vocabulary and tokenizer.",
        epilog="example: python -m dtrain.pack text 'books/**/*.txt' shards/ --tokenizer tiktoken:gpt2 --length 1024 "
        "--val 0.05",
    )
    parser.add_argument("sources", metavar="SRC", nargs="+", help="file, folder, or glob in quotes")
    parser.add_argument("destination", metavar="DST", type=Path)
    parser.add_argument(
        "--tokenizer",
        default="bytes",
        metavar="SPEC",
        help="bytes (default; 256 and an end), tiktoken:NAME or tokenizers:FILE (a tokenizer.json)",
    )
    parser.add_argument("--length", type=int, required=True, metavar="N", help="tokens that a row predicts")
    parser.add_argument("--end-of-text", metavar="TOKEN", help="the token of a tokenizer.json that ends a document")
    parser.add_argument(
        "--val-by",
        choices=VAL_BY,
        default=VAL_BY[0],
        help="splits take whole documents (default), or the end of each, which suits a few large ones",
    )
    _add_sizes(parser, "64 megabytes")
    _add_splits(parser)
    _add_bad(parser, "files that are not UTF-8")


def _add_index(commands: _Commands[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "index",
        help="index shards ahead of time",
        description="Finds where every field of every sample lies and keeps it beside the shard (in the cache where "
        "the folder is read-only). Training does so itself when it starts; done ahead, it starts at once.",
        epilog="example: python -m dtrain.pack index 'shards/train-{000000..000099}.tar'",
    )
    parser.add_argument("patterns", metavar="PATTERN", nargs="+", help="path, glob or 'train-{00000..00009}.tar'")
    parser.add_argument("--processes", type=int, metavar="N", help="default: one for each 64 shards, up to all cores")


def _add_sizes(parser: argparse.ArgumentParser, default: str) -> None:
    sizes = parser.add_mutually_exclusive_group()
    sizes.add_argument("--shards", type=int, metavar="N", help="shards of each split")
    sizes.add_argument("--samples-per-shard", type=int, metavar="N", help="samples in a shard at most")
    sizes.add_argument("--shard-mb", type=float, metavar="MB", help=f"megabytes of a shard (default: {default})")
    parser.add_argument(
        "--processes", type=int, metavar="N", help="default: all cores, fewer where there is little to do"
    )


def _add_splits(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prefix", default="train", help="name of the split, or of what others leave (default train)")
    parser.add_argument("--val", type=float, metavar="SHARE", help="short for --split val=SHARE")
    parser.add_argument(
        "--split",
        type=_share,
        action="append",
        default=[],
        metavar="NAME=SHARE",
        help="take another split from SRC, such as test=0.1; may be repeated",
    )
    parser.add_argument("--seed", type=int, default=0, help="decides order and splits (default 0)")


def _add_bad(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument(
        "--bad",
        choices=("error", "skip"),
        default="error",
        help=f"{what}: end with the first, or list and leave them out",
    )


def _named(text: str) -> tuple[str, str]:
    name, _, value = text.partition("=")
    if not name or not value:
        raise argparse.ArgumentTypeError(f"{text!r}: want NAME=VALUE.")
    return name, value


def _dtype(text: str) -> tuple[str, str]:
    return _named(text) if "=" in text else ("", text)


def _share(text: str) -> tuple[str, float]:
    name, _, share = text.partition("=")
    try:
        return name, float(share)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: want a name and a share, such as val=0.1") from None


def _digits(destination: str | None) -> None:
    digits.prepare(destination)
    print(f"{destination or digits.shard_dir()}: {digits.TRAIN_SAMPLES:,} train and {digits.TEST_SAMPLES} test images")


if __name__ == "__main__":
    sys.exit(main())
