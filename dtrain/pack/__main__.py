"""``dtrain pack``: writes shards, indexes shards before training does, and repairs shards.

    dtrain pack imagefolder SRC DST                      a folder of images, one folder for each class
    dtrain pack arrays X.npy Y.npy DST                   numpy arrays, one sample for each row
    dtrain pack text SRC DST --length 1024               text files, as rows of tokens
    dtrain pack index 'DST/train-{000000..000009}.tar'   builds the indexes of shards
    dtrain pack repair DST/train-000003.tar              copies the whole samples of shards that are cut
    dtrain pack digits                                   the data of experiment=digits

The same input gives the same bytes for any number of processes. Shards appear when all of them are written, and the same
command resumes after an interruption; once it has finished, it writes nothing, and says so. Errors of the input are one line
without a traceback. Exit code: 0 on success, 1 on an error, 2 for wrong usage, 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from dtrain.command_line import add_json_option
from dtrain.data import digits
from dtrain.errors import EXIT_INTERRUPTED, printable
from dtrain.pack.arrays import pack_arrays
from dtrain.pack.documents import VAL_BY
from dtrain.pack.images import pack_images
from dtrain.pack.indexing import index_shards
from dtrain.pack.repair import repair_shards
from dtrain.pack.resizing import QUALITY
from dtrain.pack.text import FITS, LONG_DOCUMENTS, pack_text


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the subcommand of a command line, ``sys.argv`` by default; returns the exit code."""
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
            index_shards(options.patterns, options.processes, console)
        elif options.command == "repair":
            repair_shards(options.patterns, options.out, options.json, console)
        else:
            _digits(options.destination)
    except (ValueError, OSError, ModuleNotFoundError) as error:
        console.print(printable(f"pack: error: {error}", keep="\n"), markup=False)
        return 1
    except KeyboardInterrupt:
        console.print("pack: interrupted. Run the same command again to continue.")
        return EXIT_INTERRUPTED
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dtrain pack", description="Writes tar shards for training, or indexes and repairs existing shards."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_images(commands)
    _add_arrays(commands)
    _add_text(commands)
    _add_index(commands)
    _add_repair(commands)
    demo = commands.add_parser(
        "digits", help="the data of experiment=digits", description="Writes scikit-learn's digits as shards."
    )
    demo.add_argument(
        "destination", metavar="DST", nargs="?", help="folder of the shards (default: in the user's cache directory)"
    )
    return parser


_Commands = argparse._SubParsersAction


def _add_images(commands: _Commands[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "imagefolder",
        help="a folder of images, one folder for each class",
        description="Packs SRC/CLASS/IMAGE, or SRC/{train,val,test}/CLASS/IMAGE, into shards DST/train-000000.tar, ... "
        "Image files are stored in random order, unchanged or, with --max-side, resized. A label is the position of "
        "the class name in DST/classes.json. --val and --split take their fraction from every class.",
        epilog="example: dtrain pack imagefolder photos/ shards/ --val 0.1 --max-side 512",
    )
    parser.add_argument("source", metavar="SRC", type=Path)
    parser.add_argument("destination", metavar="DST", type=Path)
    _add_sizes(parser, "1000 samples")
    _add_splits(parser)
    parser.add_argument(
        "--max-side",
        type=int,
        metavar="N",
        help="resize larger images to N pixels on their longer side; copy smaller ones unchanged (default: copy all unchanged)",
    )
    parser.add_argument(
        "--quality",
        type=int,
        metavar="Q",
        help=f"with --max-side: JPEG quality of the resized images, 1 to 100 (default: {QUALITY})",
    )
    _add_bad(parser, "files that are not images")
    parser.add_argument(
        "--verify", action="store_true", help="decode every image completely (default: read its header only)"
    )


def _add_arrays(commands: _Commands[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "arrays",
        help="numpy arrays, one sample for each row",
        description="Packs .npy files and the arrays of .npz files. Row n of each array belongs to sample n, and the names "
        "of the arrays become the names of the fields. Single integers are stored as text (.cls), everything else as .npy. "
        "Arrays are memory-mapped, so they may be larger than the main memory.",
        epilog="example: dtrain pack arrays mnist.npz shards/ --field image=x_train --field label=y_train --png image",
    )
    parser.add_argument("files", metavar="FILE", type=Path, nargs="+", help=".npy or .npz")
    parser.add_argument("destination", metavar="DST", type=Path)
    parser.add_argument(
        "--field",
        type=_named,
        action="append",
        default=[],
        metavar="NAME=ARRAY",
        help="pack only the arrays named here, and rename them; may be repeated",
    )
    parser.add_argument(
        "--dtype",
        type=_dtype,
        action="append",
        default=[],
        metavar="[NAME=]DTYPE",
        help="convert floats, or the floats of one array, to fp32, fp16 or bf16 (default: not converted); may be repeated",
    )
    parser.add_argument(
        "--png", action="append", default=[], metavar="NAME", help="store this array of images as PNG; may be repeated"
    )
    parser.add_argument("--shuffle", action="store_true", help="shuffle the rows; use it if they are sorted")
    _add_sizes(parser, "64 megabytes")
    _add_splits(parser)


def _add_text(commands: _Commands[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "text",
        help="text files, as rows of tokens",
        description="Encodes UTF-8 files, one document each (in .jsonl files: one in each line), into rows of N + 1 tokens: N "
        "inputs and N targets. With --fit cut, the documents are joined by the end-of-text token and cut into rows, each of "
        "which begins with the last token of the row before. With --fit best, rows hold whole documents and padding. Either "
        "way, each token is a target exactly once. DST/dataset.json describes the rows, DST/vocabulary.json the tokenizer.",
        epilog="example: dtrain pack text 'books/**/*.txt' shards/ --tokenizer tiktoken:gpt2 --length 1024 --val 0.05",
    )
    parser.add_argument("sources", metavar="SRC", nargs="+", help="file, folder, or quoted glob")
    parser.add_argument("destination", metavar="DST", type=Path, help="folder of the shards")
    parser.add_argument(
        "--tokenizer",
        default="bytes",
        metavar="SPEC",
        help="bytes (default; 257 tokens), characters (of the text), tiktoken:NAME, tokenizers:FILE (a tokenizer.json), "
        "or vocabulary:FOLDER (of other shards)",
    )
    parser.add_argument(
        "--length", type=int, required=True, metavar="N", help="number of inputs, and of targets, of each row"
    )
    parser.add_argument(
        "--fit",
        choices=FITS,
        default=FITS[0],
        help="cut the joined documents into rows of equal length (default), or fit whole documents into rows (best fit), "
        "with padding at the end of each row",
    )
    parser.add_argument(
        "--long-documents",
        choices=LONG_DOCUMENTS,
        default=LONG_DOCUMENTS[0],
        help="documents longer than a row: cut them into rows (default), or refuse them",
    )
    parser.add_argument(
        "--end-of-text",
        metavar="TOKEN",
        help="the end-of-text token of a tokenizer.json, if it has an unusual name; with characters: add one, for several "
        "documents",
    )
    parser.add_argument(
        "--json-key", default="text", metavar="KEY", help="key of the text in a line of a .jsonl file (default: text)"
    )
    parser.add_argument(
        "--val-by",
        choices=VAL_BY,
        help="what the splits get: whole files; the last lines of each file (tail); or exactly their share of the bytes at the "
        "end of each file (character) (default: whole files if there are enough, else tail)",
    )
    _add_sizes(parser, "64 megabytes")
    _add_splits(parser, files=True)
    _add_bad(parser, "files that are not UTF-8")


def _add_index(commands: _Commands[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "index",
        help="build the indexes of shards",
        description="Writes the index of each shard, with the position of every field, next to the shard, or into the cache "
        "if the folder is read-only. Training builds missing indexes when it starts; existing indexes make it start "
        "faster.",
        epilog="example: dtrain pack index 'shards/train-{000000..000099}.tar'",
    )
    parser.add_argument("patterns", metavar="PATTERN", nargs="+", help="path, glob or 'train-{00000..00009}.tar'")
    parser.add_argument(
        "--processes",
        type=int,
        metavar="N",
        help="number of processes (default: one for each 64 shards, at most all cores)",
    )


def _add_repair(commands: _Commands[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "repair",
        help="copy the whole samples of shards that are cut off",
        description="Copies the whole samples of each shard that is cut off or lacks its end mark to NAME.repaired.tar next to "
        "it, and reports what was lost. Nothing is overwritten; intact shards are not copied. The exit code is 1 if a shard "
        "could not be repaired.",
        epilog="example: dtrain pack repair 'shards/train-*.tar' --out repaired/",
    )
    parser.add_argument(
        "patterns", metavar="SHARD", nargs="+", help="path, glob, 'train-{00000..00009}.tar' or @list.txt"
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="folder for the copies, which then keep the names of the shards (default: next to the shards)",
    )
    add_json_option(parser)


def _add_sizes(parser: argparse.ArgumentParser, default: str) -> None:
    sizes = parser.add_mutually_exclusive_group()
    sizes.add_argument("--shards", type=int, metavar="N", help="number of shards of each split")
    sizes.add_argument("--samples-per-shard", type=int, metavar="N", help="maximum number of samples in a shard")
    sizes.add_argument(
        "--shard-mb", type=float, metavar="MB", help=f"approximate megabytes of a shard (default: {default})"
    )
    parser.add_argument(
        "--processes", type=int, metavar="N", help="number of processes (default: all cores, fewer for small data)"
    )


def _add_splits(parser: argparse.ArgumentParser, files: bool = False) -> None:
    parser.add_argument(
        "--prefix", default="train", help="name of the split that gets all other samples (default: train)"
    )
    parser.add_argument("--val", type=float, metavar="SHARE", help="the same as --split val=SHARE")
    parser.add_argument(
        "--split",
        type=_share_or_files if files else _share,
        action="append",
        default=[],
        metavar="NAME=SHARE",
        help="an additional split with its fraction of the samples, such as test=0.1"
        + (", or with its files, such as 'test=books/test/*.txt'" if files else "")
        + "; may be repeated",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the order and the splits (default: 0)")


def _add_bad(parser: argparse.ArgumentParser, files: str) -> None:
    parser.add_argument(
        "--bad",
        choices=("error", "skip"),
        default="error",
        help=f"{files}: stop at the first one (error, the default), or list and skip them",
    )


def _named(text: str) -> tuple[str, str]:
    name, _, value = text.partition("=")
    if not name or not value:
        raise argparse.ArgumentTypeError(f"got {text!r}, want NAME=VALUE")
    return name, value


def _dtype(text: str) -> tuple[str, str]:
    return _named(text) if "=" in text else ("", text)


def _share(text: str) -> tuple[str, float]:
    name, _, share = text.partition("=")
    try:
        return name, float(share)
    except ValueError:
        raise argparse.ArgumentTypeError(f"got {text!r}, want a name and a fraction, such as val=0.1") from None


def _share_or_files(text: str) -> tuple[str, float | str]:
    try:
        return _share(text)
    except argparse.ArgumentTypeError:
        return _named(text)


def _digits(destination: str | None) -> None:
    digits.prepare(destination)
    print(f"{destination or digits.shard_dir()}: {digits.TRAIN_SAMPLES:,} train and {digits.TEST_SAMPLES} test images")


if __name__ == "__main__":
    sys.exit(main())
