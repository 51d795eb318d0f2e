"""Initial weights of the Hugging Face hub: of one commit for all ranks and all starts of a run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from operator import attrgetter
from pathlib import Path

import pytest
import torch
from safetensors.torch import save
from torch import nn

from dtrain.config.schema import Config, RunConfig, WarmStartConfig, from_plain
from dtrain.distributed.process_group import process_group
from dtrain.errors import ConfigError
from dtrain.runs.hub import hub_errors
from dtrain.runs.run_dir import save_run
from dtrain.runs.run_spec import RunSpec
from dtrain.training.checkpoint.resume import pin_weights, starting_weights
from tests.hub_server import HubServer, Model, point_at, serving_hub
from tests.ranks import RanksFailed
from tests.refusals import refused
from tests.whole_runs import metrics, train_on

pytest.importorskip("huggingface_hub", reason="hf needs huggingface_hub: pip install 'dtrain[hf]'")
URL = "hf://org/name"


def weights(value: float, **metadata: str) -> bytes:
    return save({"weight": torch.full((2, 3), value), "bias": torch.zeros(2)}, metadata={"format": "pt"} | metadata)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with serving_hub(tmp_path) as server:
        point_at(server, tmp_path / "home", monkeypatch)
        monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        yield server


@pytest.fixture
def model(server: HubServer) -> Model:
    """A repository that is not dtrain's, of a model with the weights 1."""
    return server.add_model("org/name", {"model.safetensors": weights(1.0), "pytorch_model.bin": b"pickle"})


@pytest.fixture(autouse=True)
def world_of_one(request: pytest.FixtureRequest) -> Iterator[None]:
    if "digits" in request.fixturenames:  # its ranks make their own
        yield
        return
    with process_group(timeout=20):
        yield


def loaded(run: RunConfig, rows: int = 2) -> tuple[nn.Linear, str]:
    linear = nn.Linear(3, rows)
    start = starting_weights(run, linear)
    assert start is not None
    start.load(linear)
    return linear, start.description


def test_weights_of_the_hub_are_loaded_and_named(model: Model) -> None:
    linear, description = loaded(RunConfig(weights_from=URL))
    assert (linear.weight == 1).all()
    assert URL in description
    linear, _ = loaded(RunConfig(warm_start=WarmStartConfig(URL, {}, ["bias"])))
    assert (linear.weight == 1).all()
    assert (linear.bias != 0).any()


def test_a_file_of_others_may_have_the_name_of_our_description(server: HubServer) -> None:
    server.add_model("org/name", {"model.safetensors": weights(1.0), "model.json": b'{"layers": []}'})
    linear, _ = loaded(RunConfig(weights_from=URL))
    assert (linear.weight == 1).all()


@pytest.mark.parametrize(
    ("files", "names"),
    [
        ({"model.safetensors": weights(1.0, batchnorm="folded")}, ["export.fold=false", URL]),
        ({"pytorch_model.bin": b"pickle"}, ["model.safetensors", "never loaded", URL]),
        ({"model.safetensors": weights(1.0), "model.json": b'{"sha256": "00"}'}, ["SHA-256", "Delete", URL]),
        ({"model.safetensors": b"no tensors"}, ["cannot be read", URL]),
    ],
    ids=["folded", "pickle", "hash", "damaged"],
)
def test_weights_that_cannot_be_used_are_refused(server: HubServer, files: dict[str, bytes], names: list[str]) -> None:
    server.add_model("org/name", files)
    with refused(ConfigError, "run.weights_from", *names):
        starting_weights(RunConfig(weights_from=URL), nn.Linear(3, 2))


def test_an_error_of_the_way_to_the_hub_shows_no_signed_url() -> None:
    with refused(ConfigError, "run.weights_from", "connection") as error, hub_errors("run.weights_from"):
        raise OSError("https://me:hunter2@host/file?X-Amz-Signature=abcdef123")
    assert "hunter2" not in str(error.value)
    assert "abcdef123" not in str(error.value)
    assert error.value.__cause__ is None
    assert error.value.__suppress_context__


def test_weights_that_do_not_fit_are_refused_by_their_name(model: Model) -> None:
    with refused(ConfigError, "run.weights_from", URL, "[2, 3]"):
        starting_weights(RunConfig(weights_from=URL), nn.Linear(3, 5))


def test_the_weights_of_an_artefacts_folder_are_loaded(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(weights(2.0))
    (tmp_path / "model.json").write_text("{}")
    assert (loaded(RunConfig(weights_from=str(tmp_path)))[0].weight == 2).all()


def begin(run_dir: Path, url: str, key: str = "run.weights_from") -> tuple[str, RunSpec]:
    """What ``train`` does: pins the weights and saves the config. Returns the pinned URL, and the run."""
    config = RunSpec("name", run_dir, asdict(Config()), (f"{key}={url}",), ()).with_values({key: url})
    cfg, run = pin_weights(from_plain(Config, config.config), config)
    save_run(run)
    return str(attrgetter(key)(cfg)), run


@pytest.mark.parametrize("key", ["run.weights_from", "run.warm_start.path"])
def test_the_commit_of_the_first_start_is_that_of_all_starts(
    model: Model, server: HubServer, tmp_path: Path, key: str
) -> None:
    first = model.branches["main"][0]
    url, run = begin(tmp_path / "run", URL, key)
    assert url == f"{URL}@{first}"
    assert run.overrides == (f"{key}={URL}",)
    assert first in (tmp_path / "run" / "config.yaml").read_text()
    second = model.add_commit("main", {"model.safetensors": weights(5.0)}, "second")
    model.branches["next"] = [second]
    url, run = begin(tmp_path / "run", URL, key)
    assert url == f"{URL}@{first}"
    assert run.changes() == []
    assert (loaded(RunConfig(weights_from=url))[0].weight == 1).all()
    published = run.published()
    assert (published["run"]["weights_from"] or published["run"]["warm_start"]["path"]) == f"{URL}@{first}"
    server.api_requests.clear()
    begin(tmp_path / "run", URL, key)
    assert server.api_requests == []  # it needs no network any more
    assert begin(tmp_path / "other", URL, key)[0] == f"{URL}@{second}"
    assert begin(tmp_path / "run", f"{URL}@next", key)[0] == f"{URL}@{second}"


def test_a_commit_is_not_looked_up(server: HubServer, tmp_path: Path) -> None:
    assert begin(tmp_path, f"{URL}@{'a' * 40}")[0] == f"{URL}@{'a' * 40}"
    assert server.api_requests == []


@pytest.mark.parametrize("url", ["hf://name", "hf://org/none", f"{URL}@v9"])
def test_what_does_not_exist_is_refused_with_its_key_before_anything_is_written(
    model: Model, tmp_path: Path, url: str
) -> None:
    with refused(ConfigError, "run.weights_from", url):
        begin(tmp_path / "run", url)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_all_ranks_begin_with_the_same_weights_and_end_with_one_message(
    digits: Path, server: HubServer, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    short = (
        "train.max_steps=3",
        "schedule=constant",
        "optimizer.lr=1e-9",
        "train.eval_every=0",
        "checkpoint.best=null",
    )
    train_on(1, tmp_path / "first", *short[:1], *short[3:])
    trained = (tmp_path / "first" / "checkpoints" / "step-000000003" / "model.safetensors").read_bytes()
    model = server.add_model("org/name", {"model.safetensors": trained})
    train_on(2, tmp_path / "second", *short, f"run.weights_from={URL}")
    assert metrics(tmp_path / "second", "eval/loss") == pytest.approx(
        metrics(tmp_path / "first", "eval/loss"), rel=1e-4
    )
    assert model.branches["main"][0] in (tmp_path / "second" / "config.yaml").read_text()
    capfd.readouterr()
    with pytest.raises(RanksFailed):
        train_on(2, tmp_path / "third", *short, f"run.weights_from={URL}@v9")
    error = capfd.readouterr().err
    assert error.count("no such revision") == 1
    assert not (tmp_path / "third").exists()
