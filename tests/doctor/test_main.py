"""``dtrain.doctor``: its command line, output and exit code."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
from pathlib import Path

import pytest
import torch

from dtrain.console import Finding, as_text
from dtrain.distributed.world import World
from dtrain.doctor import __main__ as doctor_module
from dtrain.doctor.__main__ import main
from dtrain.errors import ConfigError
from dtrain.runs.recompose import recompose_if_run
from dtrain.runs.trust import mark_as_own
from tests.ranks import run_ranks
from tests.refusals import refused


def doctor(ranks: int) -> list[tuple[int, str]]:
    """Exit code and output of each rank, in forked processes."""

    def one(rank: int) -> tuple[int, str]:
        text = io.StringIO()
        with contextlib.redirect_stdout(text):
            return main([]), text.getvalue()

    return run_ranks(ranks, one, init=False)


def test_the_command_shows_this_machine() -> None:
    [(code, text)] = doctor(1)
    assert code == 0, text
    for part in (f"torch  .*{re.escape(torch.__version__)}", "wandb mode  *offline", "/dev/shm", "open files", "SLURM"):
        assert re.search(part, text), part
    for name in ("fp32", "tf32", "bf16", "fp16"):
        assert re.search(rf"^  (ok|warning|error) +precision={name}  +\S", text, re.MULTILINE)
    assert os.environ["DTRAIN_CACHE"] in text
    *_, of_all_reduce, of_a_run, last = text.splitlines()
    assert "dtrain doctor --nproc 2" in of_all_reduce
    assert "experiment=digits" in of_a_run
    assert last.startswith("fit")


@pytest.mark.slow
def test_ranks_measure_all_reduce_and_rank_0_prints() -> None:
    (code, text), (other_code, silence) = doctor(2)
    assert (code, other_code, silence) == (0, 0, "")
    assert "2 on 1 machine, gloo, equal versions" in text
    assert re.search(r"all-reduce latency +8 floats in [\d,]+ microseconds", text)
    assert re.search(r"all-reduce bandwidth +1 MiB in [\d.,]+ ms, [\d.]+ GB/s; 25 MiB in [\d.,]+ ms, [\d.]+ GB/s", text)


def test_an_unknown_subcommand_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["numeric"])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert "no subcommand 'numeric'" in error
    assert "numerics" in error


def test_an_error_is_in_the_last_line_and_in_the_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DTRAIN_CACHE", "/proc/dtrain")
    [(code, text)] = doctor(1)
    assert code == 1
    assert text.splitlines()[-1] == "not fit: cache. First: export DTRAIN_CACHE=FOLDER"


@pytest.mark.slow
def test_a_run_whose_packages_are_missing_is_not_measured(
    tmp_path: Path, digits: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dtrain.tracking import sinks

    monkeypatch.setattr(sinks, "find_spec", lambda name: None)
    file = tmp_path / "doctor.json"

    def rank(number: int) -> tuple[int, str]:
        text = io.StringIO()
        with contextlib.redirect_stdout(text):
            arguments = ["experiment=digits", "tracker.name=mlflow", f"run.dir={tmp_path / 'run'}", f"--json={file}"]
            return main(arguments), text.getvalue()

    (code, text), (other_code, silence) = run_ranks(2, rank, init=False)
    assert (code, other_code, silence) == (1, 1, "")
    assert text.splitlines()[-1] == "not fit: extra of tracker.name. First: pip install 'dtrain[mlflow]'"
    found = json.loads(file.read_text())
    assert "run" not in found
    assert found["findings"][-1]["level"] == "error"


def test_tasks_of_srun_are_ranks_without_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[World] = []
    monkeypatch.setattr(doctor_module, "check_machine", lambda options: seen.append(World.from_environment()))
    names = {"JOB_ID": "7", "STEP_ID": "0", "STEP_NUM_TASKS": "4", "PROCID": "2", "LOCALID": "0", "NODEID": "2"}
    for name, value in {**names, "STEP_TASKS_PER_NODE": "1(x4)", "STEP_NODELIST": "localhost"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NCCL_DEBUG"):
        monkeypatch.setenv(name, "")  # so that monkeypatch removes what main sets
        monkeypatch.delenv(name)
    main([])
    assert (seen[0].rank, seen[0].size, seen[0].launched) == (2, 4, True)


@pytest.mark.parametrize(
    ("typed", "composed"),
    [
        (["run.dir=RUN"], ["experiment=digits", "train.max_steps=7", "run.dir=RUN"]),
        (["run.dir=RUN", "train.max_steps=8"], ["experiment=digits", "run.dir=RUN", "train.max_steps=8"]),
        (["experiment=line", "run.dir=RUN"], ["experiment=line", "run.dir=RUN"]),
        (["data=digits", "model=mlp", "run.dir=NEW"], ["data=digits", "model=mlp", "run.dir=NEW"]),
    ],
)
def test_the_config_of_a_run_is_read_unless_another_is_given(
    tmp_path: Path, typed: list[str], composed: list[str]
) -> None:
    overrides = b"overrides: [experiment=digits, train.max_steps=7]\nconfig_dirs: []\n"
    (tmp_path / "overrides.yaml").write_bytes(overrides)
    mark_as_own(overrides, "started")
    given = [argument.replace("RUN", str(tmp_path)).replace("NEW", str(tmp_path / "new")) for argument in typed]
    want = [argument.replace("RUN", str(tmp_path)).replace("NEW", str(tmp_path / "new")) for argument in composed]
    assert recompose_if_run(given) == want


def test_a_directory_without_a_run_is_refused(tmp_path: Path) -> None:
    with refused(ConfigError, "run.dir: ", "", "overrides.yaml"):
        recompose_if_run([f"run.dir={tmp_path}"])


def test_each_remedy_is_printed_under_its_finding() -> None:
    lines = as_text([Finding("a", "fine"), Finding("long name", "bad", "warning", "do this\nor that")]).splitlines()
    assert lines == [
        "  ok       a          fine",
        "  warning  long name  bad",
        "                      -> do this",
        "                      -> or that",
    ]


def test_a_run_directory_that_cannot_be_written_is_an_error_before_measuring(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.touch()
    monkeypatch.setattr(doctor_module, "_environment", lambda world: pytest.fail("something was measured"))

    def rank(number: int) -> object:
        with pytest.raises(SystemExit) as ended:
            main(["experiment=digits", f"run.dir={in_the_way / 'run'}"])
        return ended.value.code

    assert run_ranks(1, rank, init=False) == [1]
    assert f"run.dir: {in_the_way / 'run'} cannot be written, choose a different one" in capfd.readouterr().err
