"""Installs each extra alone in a fresh environment and uses it once; without it, the same use must name the pip command.

    python scripts/check_extras.py [EXTRA ...] [--python PYTHON]

Builds the wheel of this checkout, and installs it without extras, with the versions of constraints.txt. There, a training
must run, and the use of every extra must fail with ``pip install 'dtrain[EXTRA]'`` in its message. Each extra is then
installed into a copy of that environment. The table shows what the extra adds: packages, megabytes, seconds of the
installation and of its use. The exit code is 1 if something failed.

Servers are on the loopback interface; only pip needs a network. ``media`` needs FFmpeg's libraries.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.http_server import FileServer, Handler, running  # noqa: E402
from tests.hub_server import HubServer  # noqa: E402

#: Need an older package than constraints.txt has.
UNCONSTRAINED = ("trackio",)
#: Config of a training of two steps on the shards, without the data.
SMALL = (
    "--config-dir=shards/conf data=packed model=small_cnn model.classes=2 model.width=4 train.max_steps=2 "
    "train.global_batch_size=4 data.num_workers=0"
)
TRAIN = f"-m dtrain train {SMALL} tracker=none"
#: Arrays, a run and a tokenizer, made without any extra; a recording in a shard.
PREPARE = """
import io, json, tarfile, wave
import numpy as np
image = np.random.default_rng(0).integers(0, 255, (24, 16, 16, 3), dtype=np.uint8)
np.savez("toy.npz", image=image, label=np.arange(24) % 2)
open("text.txt", "w").write("to be or not to be " * 50)
json.dump({"version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
           "pre_tokenizer": {"type": "Whitespace"}, "post_processor": None, "decoder": None,
           "model": {"type": "WordLevel", "vocab": {"to": 0, "be": 1, "or": 2, "not": 3, "?": 4, "</s>": 5}, "unk_token": "?"}},
          open("tokenizer.json", "w"))
sound = io.BytesIO()
with wave.open(sound, "wb") as file:
    file.setnchannels(1); file.setsampwidth(2); file.setframerate(8000); file.writeframes(b"\\0\\1" * 800)
with tarfile.open("sound.tar", "w") as tar:
    member = tarfile.TarInfo("0.wav"); member.size = len(sound.getvalue())
    tar.addfile(member, io.BytesIO(sound.getvalue()))
"""
HEAR = """
from dtrain.data import ShardDataset
(sample,) = ShardDataset("sound.tar", {"wav": {"name": "sound", "role": "audio"}})
assert sample["sound"].shape[-1] == 800, sample["sound"].shape
"""
#: By extra: the arguments of Python, one line for each process. The first one is refused without the extra.
USES = {
    "demo": "-m dtrain train experiment=digits train.max_steps=2 data.num_workers=0 tracker=none run.dir=demo",
    "http": f"{TRAIN} data.train=HTTP/train-000000.tar data.eval=null run.dir=http",
    "s3": f"{TRAIN} data.train=s3://shards/train-000000.tar data.eval=null run.dir=s3",
    "hf": f"{TRAIN} data.train=hf://datasets/org/name/train-000000.tar data.eval=null run.dir=hf",
    "text": "-m dtrain pack text text.txt tokens --tokenizer tokenizers:tokenizer.json --length 8",
    "media": "sound.py",
    "onnx": "-m dtrain export run.dir=run export.format=onnx export.dtype=fp32 export.out=artefact\n"
    "-m dtrain predict artefact toy.png",
    "tensorboard": f"-m dtrain train {SMALL} tracker=tensorboard run.dir=tensorboard",
    "mlflow": f"-m dtrain train {SMALL} tracker=mlflow run.dir=mlflow",
    "trackio": f"-m dtrain train {SMALL} tracker=trackio run.dir=trackio",
    "optuna": f"-m dtrain launch {SMALL} tracker=none launch.search.trials=2 launch.search.metric=eval/loss "
    "optimizer.lr=interval(0.001,0.01) run.dir=search launch.processes_per_node=1",
    "metrics": f"{TRAIN} train.metrics={{f1:{{_target_:torchmetrics.classification.MulticlassF1Score,num_classes:2}}}} "
    "run.dir=metrics",
}


class Environment:
    """A virtual environment in ``folder``; its commands run in the folder ``work``."""

    def __init__(self, folder: Path, work: Path, variables: dict[str, str]) -> None:
        self.folder = folder
        self.work = work
        self.variables = {**os.environ, "PYTHONNOUSERSITE": "1", "OMP_NUM_THREADS": "1", **variables}
        self.variables.pop("PYTHONPATH", None)

    def python(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Runs the environment's Python."""
        command = [str(self.folder / "bin" / "python"), *arguments]
        return subprocess.run(
            command,
            cwd=self.work,
            env=self.variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=900,
        )

    def must(self, *arguments: str) -> str:
        """The same; ends the script on failure."""
        done = self.python(*arguments)
        if done.returncode:
            raise SystemExit(f"{' '.join(arguments)}: exit code {done.returncode}\n{done.stdout[-4000:]}")
        return done.stdout

    def install(self, *what: str, constrained: bool = True) -> None:
        """Installs with pip, in the versions of constraints.txt."""
        versions = ["-c", str(ROOT / "constraints.txt")] if constrained else []
        self.must("-m", "pip", "-q", "--disable-pip-version-check", "install", *versions, *what)

    def use(self, extra: str) -> str | None:
        """Uses an extra; the output if that fails."""
        for line in USES[extra].replace("HTTP", self.variables["DTRAIN_TEST_HTTP"]).splitlines():
            done = self.python(*line.split())
            if done.returncode:
                return f"{line}\n{done.stdout}"
        return None

    def packages(self) -> int:
        """How many distributions it has."""
        return len(list(self.folder.glob("lib/python*/site-packages/*.dist-info")))

    def megabytes(self) -> float:
        """Size of its files."""
        return (
            sum(path.lstat().st_size for path in self.folder.rglob("*") if not path.is_symlink() and path.is_file())
            / 1e6
        )


class Bucket(Handler):
    """The folder as the bucket ``shards``."""

    def _answer(self, body: bool) -> None:
        self.path = self.path.removeprefix("/shards")
        super()._answer(body)


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("extras", nargs="*", metavar="EXTRA", help="default: all")
    parser.add_argument("--python", default=sys.executable, help="makes the environments")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="dtrain-extras-") as scratch, ExitStack() as stack:
        work = Path(scratch, "work")
        (work / "shards").mkdir(parents=True)
        files, bucket, hub = (
            FileServer(work / "shards"),
            FileServer(work / "shards", Bucket),
            HubServer(work / "shards"),
        )
        for server in (files, bucket, hub):
            stack.enter_context(running(server))
        variables = {
            "DTRAIN_TEST_HTTP": files.url("").rstrip("/"),
            "AWS_ENDPOINT_URL": bucket.url(""),
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
            "HF_ENDPOINT": hub.endpoint,
            "DTRAIN_CACHE": str(work / "cache"),
            "HOME": scratch,
        }
        base = Environment(Path(scratch, "base"), work, variables)
        began = time.monotonic()
        subprocess.run([arguments.python, "-m", "venv", base.folder], check=True)
        base.must("-m", "pip", "-q", "wheel", "--no-deps", "-w", f"{scratch}/dist", str(ROOT))
        base.install(*map(str, Path(scratch, "dist").glob("dtrain-*.whl")))
        installed = time.monotonic()
        prepare(base)
        print(f"{'extra':14}{'packages':>9}{'MB':>9}{'install s':>11}{'use s':>7}  without it")
        row("(none)", base.packages(), base.megabytes(), installed - began, time.monotonic() - installed, "")
        known = base.must(
            "-c", "import importlib.metadata as m; print(*m.metadata('dtrain').get_all('Provides-Extra'))"
        )
        extras = arguments.extras or [name for name in known.split() if name != "all"]
        failed = [extra for extra in extras if not check(extra, base, Path(scratch, extra))]
    print(f"failed: {', '.join(failed)}" if failed else "all extras can be installed alone, used, and are asked for")
    return bool(failed)


def prepare(base: Environment) -> None:
    """Shards and a run, without any extra."""
    (base.work / "sound.py").write_text(HEAR)
    base.must("-c", PREPARE)
    base.must("-c", "from PIL import Image; Image.new('RGB', (16, 16)).save('toy.png')")
    pack = "-m dtrain pack arrays toy.npz shards --field image=image --field label=label --png image --val 0.25"
    base.must(*pack.split())
    base.must(*f"{TRAIN} run.dir=run".split())


def check(extra: str, base: Environment, folder: Path) -> bool:
    """Uses an extra without it and with it, and prints the row; whether both went as they should."""
    if extra not in USES:
        print(f"{extra:14}has no line in USES of {Path(__file__).name}")
        return False
    command = f"pip install 'dtrain[{extra}]'"
    refusal = base.use(extra)
    is_refused = (
        refusal is not None and command in refusal and ("-m dtrain" not in USES[extra] or "Traceback" not in refusal)
    )
    # Hard links: pip replaces files and never writes into one.
    shutil.copytree(base.folder, folder, symlinks=True, copy_function=os.link)
    environment = Environment(folder, base.work, base.variables)
    began = time.monotonic()
    environment.install(f"dtrain[{extra}]", constrained=extra not in UNCONSTRAINED)
    installed = time.monotonic()
    failure = environment.use(extra)
    used = time.monotonic()
    size, packages = environment.megabytes() - base.megabytes(), environment.packages() - base.packages()
    row(extra, packages, size, installed - began, used - installed, "refused" if is_refused else "NOT REFUSED")
    for text in [failure] if failure else [] + ([] if is_refused else [f"want: {command}\n{refusal or 'it was used'}"]):
        print(text[-4000:])
    shutil.rmtree(folder)
    return is_refused and failure is None


def row(extra: str, packages: int, megabytes: float, install: float, use: float, without: str) -> None:
    """Prints a row of the table."""
    print(f"{extra:14}{packages:9}{megabytes:9.1f}{install:11.1f}{use:7.1f}  {without}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
