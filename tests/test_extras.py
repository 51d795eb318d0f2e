"""What needs an extra names it: each feature without the packages of its extra is refused with the pip command.

scripts/check_extras.py does the same, and its opposite, in fresh environments.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dtrain.extras import EXTRAS
from tests.refusals import assert_refused

ROOT = Path(__file__).resolve().parents[1]

#: By extra: its packages, the first one as the message names it, and a call that needs them.
USES = {
    "demo": ("scikit-learn sklearn", "digits._load()"),
    "s3": ("s3fs", "fsspec_file_system('s3://bucket/x.tar')"),
    "http": ("aiohttp", "fsspec_file_system('https://host/x.tar')"),
    "hf": ("huggingface_hub", "fsspec_file_system('hf://datasets/org/name/x.tar')"),
    "text": ("tiktoken tokenizers", "Tokenizer('tiktoken:gpt2')"),
    "media": ("torchcodec", "torchcodec_decoders()"),
    "onnx": ("onnx onnxscript onnxruntime", "_import_onnx_package('onnx')"),
    "tensorboard": ("tensorboard", "check_tracker(TrackerConfig(name='tensorboard'))"),
    "mlflow": ("mlflow", "check_tracker(TrackerConfig(name='mlflow'))"),
    "trackio": ("trackio", "check_tracker(TrackerConfig(name='trackio'))"),
    "optuna": ("Optuna optuna", "require_optuna()"),
    "metrics": ("torchmetrics", "build_metric('f1', {'_target_': 'torchmetrics.F1Score'})"),
}
CODE = """
import json, sys
from importlib.abc import MetaPathFinder

class Absent(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in absent:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

uses = json.loads(sys.argv[1])
absent = {package for packages, _ in uses.values() for package in packages.split()}
sys.meta_path.insert(0, Absent())
import importlib.util
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name in absent else find_spec(name, package)

from dtrain.config.metrics import build_metric
from dtrain.config.schema import TrackerConfig
from dtrain.data import digits
from dtrain.data.fields.media import torchcodec_decoders
from dtrain.urls import fsspec_file_system
from dtrain.data.fields.tokenizers import Tokenizer
from dtrain.export.formats import _import_onnx_package
from dtrain.launch.search import require_optuna
from dtrain.tracking.sinks import check_tracker

messages = {}
for extra, (_, expression) in uses.items():
    try:
        messages[extra] = f"was used: {eval(expression)!r}"
    except Exception as error:
        messages[extra] = f"{type(error).__name__}: {error}"
print(json.dumps(messages))
"""


@pytest.fixture(scope="module")
def messages() -> dict[str, str]:
    """By extra: the error of its use, in a process that cannot import any package of an extra."""
    command = [sys.executable, "-c", CODE, json.dumps(USES)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


def requirements() -> dict[str, list[str]]:
    """By extra: its requirements, as pyproject.toml has them."""
    section = (ROOT / "pyproject.toml").read_text().partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    lines = re.findall(r"^(\w+) = \[(.*)\]", section, re.MULTILINE)
    return {extra: re.findall(r'"([^"]+)"', packages) for extra, packages in lines}


def test_every_extra_has_a_row_and_is_known_to_messages() -> None:
    extras = requirements()
    assert sorted(USES) == sorted(extras.keys() - {"all"}) == sorted(EXTRAS)
    distributions = {"sklearn": "scikit-learn"}
    for extra, packages in EXTRAS.items():
        names = [re.split(r"[<>=]", requirement)[0] for requirement in extras[extra]]
        assert names == [distributions.get(package, package) for package in packages]


def test_all_leaves_out_what_needs_ffmpeg_and_what_replaces_pillow() -> None:
    [named] = requirements()["all"]
    assert sorted(named.removeprefix("dtrain[").removesuffix("]").split(",")) == sorted(
        EXTRAS.keys() - {"media", "trackio"}
    )


@pytest.mark.parametrize("extra", USES)
def test_without_its_extra_a_feature_names_the_command_that_installs_it(messages: dict[str, str], extra: str) -> None:
    assert_refused(messages[extra], key=USES[extra][0].split()[0], remedy=f"pip install 'dtrain[{extra}]'")
