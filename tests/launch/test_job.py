from __future__ import annotations

from pathlib import Path

import pytest

from dtrain.errors import ConfigError
from dtrain.launch.job import (
    FAILED,
    FINISHED,
    STOPPED,
    JobResult,
    StatusJudge,
    StopRequest,
    exit_code,
    print_results,
    with_unique_dirs,
)
from dtrain.runs.recompose import recompose_if_run
from dtrain.runs.run_dir import write_status
from dtrain.runs.run_spec import RunSpec
from tests.launch.compose import compose, single, sweep
from tests.refusals import refused


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def started(*arguments: str) -> RunSpec:
    """The run that ``dtrain.train`` composes."""
    return single(*arguments).spec


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("run.dir=relative/place",),
        ("run.dir='it\\'s a place'",),
        ("run.name=mine", "launch.processes_per_node=4", "launch.dry_run=true", "train.max_steps=7"),
        ('data.train="a/{0..3}.tar"', "+data.fields.json={name: x, role: feature}", "run.seed=3"),
    ],
)
def test_the_arguments_of_a_job_compose_the_same_run(arguments: tuple[str, ...]) -> None:
    job = single("experiment=digits", *arguments)
    again = started(*job.arguments)
    assert (again.name, again.dir) == (job.spec.name, job.spec.dir)
    ours, theirs = ({key: value for key, value in run.config.items() if key != "run"} for run in (job.spec, again))
    ours["launch"]["dry_run"] = False
    assert ours == theirs


def test_the_users_presets_are_found_from_any_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine" / "experiment").mkdir(parents=True)
    (tmp_path / "mine" / "experiment" / "e.yaml").write_text(
        "# @package _global_\ndefaults:\n  - digits\nrun: {seed: 7}\n"
    )
    job = single("--config-dir", "mine", "experiment=e")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert started(*job.arguments).config["run"]["seed"] == 7


def test_jobs_of_a_sweep_have_unique_directories() -> None:
    jobs = sweep("experiment=digits", "optimizer.lr=1e-3,3e-3", "precision=fp32,bf16")
    assert len({job.spec.dir for job in jobs}) == 4
    assert jobs[1].varied == ("optimizer.lr=0.001", "precision=bf16")
    assert jobs[1].spec.dir == single("experiment=digits", "optimizer.lr=1e-3", "precision=bf16").spec.dir


@pytest.mark.slow
def test_jobs_with_the_same_name_get_the_varied_overrides_appended(tmp_path: Path) -> None:
    seeds = sweep("experiment=digits", "run.seed=1,2")
    assert [job.spec.name for job in seeds] == [single("experiment=digits", f"run.seed={n}").spec.name for n in (1, 2)]
    workers = sweep("experiment=digits", "data.num_workers=1,2")  # which has no effect on the result
    name = single("experiment=digits").spec.name
    assert [job.spec.dir for job in workers] == [tmp_path / "runs" / f"{name}-data.num_workers={n}" for n in (1, 2)]
    assert [started(*job.arguments).dir for job in workers] == [job.spec.dir for job in workers]
    assert [started(*job.arguments).name for job in workers] == [f"{name}-data.num_workers={n}" for n in (1, 2)]
    placed = sweep("experiment=digits", "run.dir=here", "data.train=/a/b,/a/c")
    assert [job.spec.dir.name for job in placed] == ["here-data.train=_a_b", "here-data.train=_a_c"]


@pytest.mark.slow
def test_jobs_with_the_same_overrides_are_refused() -> None:
    with refused(ConfigError, "--multirun", "the same directory", "Remove repeated values") as error:
        with_unique_dirs(compose("--multirun", "experiment=digits", "optimizer.lr=0.02,2e-2,0.1", "run.seed=1,2"))
    lines = str(error.value).splitlines()
    assert [line.strip() for line in lines if line.startswith("    ")] == ["optimizer.lr=0.02 run.seed=1"] * 2
    assert "No run of the sweep was started" in lines[-1]


def test_a_stop_request_is_written_once_for_each_process_that_trains_the_run(tmp_path: Path) -> None:
    run_dir, stop_file = tmp_path / "r", tmp_path / "r" / "STOP"
    request = StopRequest(run_dir)
    request.write()  # the run has no directory yet
    run_dir.mkdir()
    request.withdraw()
    for pid in (1, 2):
        (run_dir / ".lock").write_text(f'{{"pid": {pid}}}')
        request.write()
        assert stop_file.read_bytes() == b""
        stop_file.unlink()  # this process has read it
        request.write()
        (run_dir / ".lock").write_text("")  # the next one is writing it
        request.write()
        assert not stop_file.exists()
    stop_file.touch()
    request.withdraw()
    assert not stop_file.exists()


@pytest.mark.parametrize(
    ("overrides", "names"),
    [
        *(
            ((f"launch.{key}=0",), (f"launch.{key}", "got 0", "at least 1"))
            for key in ("nodes", "min_nodes", "processes_per_node", "cpus_per_process", "stop_seconds", "max_running")
        ),
        (("launch.gpus_per_node=-1",), ("launch.gpus_per_node", "got -1", "at least 0")),
        (("launch.nodes=2", "launch.min_nodes=3"), ("launch.min_nodes", "got 3", "at most launch.nodes=2")),
    ],
)
def test_impossible_numbers_are_refused(
    overrides: tuple[str, ...], names: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        single("experiment=digits", *overrides)
    error = capsys.readouterr().err
    assert [name for name in names if name not in error] == []


# -- results


@pytest.mark.parametrize(
    ("state", "code"), [("finished", FINISHED), ("stopped", STOPPED), ("failed", FAILED), ("running", FAILED)]
)
def test_the_result_is_read_from_the_status(tmp_path: Path, state: str, code: int) -> None:
    judge = StatusJudge(tmp_path)
    write_status(tmp_path, state, 7, "because\nof this")
    result = judge()
    assert result.code == code
    assert result.reason == ("step 7: because" if code == FAILED else None)


@pytest.mark.parametrize("state", ["finished", "stopped"])
def test_a_status_of_an_earlier_start_is_ignored(tmp_path: Path, state: str) -> None:
    write_status(tmp_path, state, 7)
    assert StatusJudge(tmp_path)().code == FAILED


def test_the_same_status_written_again_counts(tmp_path: Path) -> None:
    write_status(tmp_path, "finished", 7)
    judge = StatusJudge(tmp_path)
    write_status(tmp_path, "finished", 7)
    assert judge().code == FINISHED


def test_a_run_that_wrote_nothing_has_failed(tmp_path: Path) -> None:
    assert StatusJudge(tmp_path / "not there")().code == FAILED


def test_a_file_that_is_not_a_status_is_no_result(tmp_path: Path) -> None:
    (tmp_path / "status.json").write_text("hello")
    judge = StatusJudge(tmp_path)
    assert judge().state == "failed"
    write_status(tmp_path, "finished", 7)
    assert judge().state == "finished"


@pytest.mark.parametrize(
    ("codes", "code"), [([0, 0], 0), ([0, 75], 75), ([75, 1, 0], 1), ([1], 1)], ids=["all", "stopped", "failed", "one"]
)
def test_the_exit_code_of_a_sweep_is_that_of_its_worst_job(codes: list[int], code: int) -> None:
    assert exit_code([JobResult("", c) for c in codes]) == code


def test_a_sweep_ends_with_a_line_for_each_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "40")
    jobs = sweep("experiment=digits", "run.seed=1,22", "run.dir=s")
    print_results(jobs, [JobResult("finished", 0), JobResult("job 12", 0)])
    assert [line.split(maxsplit=2) for line in capsys.readouterr().out.splitlines()] == [
        ["run", "result", "directory"],
        ["run.seed=1", "finished", f"{tmp_path}/s-run.seed=1"],
        ["run.seed=22", "job", f"12    {tmp_path}/s-run.seed=22"],
    ]


@pytest.mark.slow
@pytest.mark.parametrize("place", ["run.name=x", "run.dir=runs/x", "run={dir: runs/x}", "run.dir='runs/${run.seed}'"])
def test_a_job_never_trusts_a_run_of_somebody_else(tmp_path: Path, place: str) -> None:
    # Neither an experiment nor data and model: dtrain.train would compose the saved command line.
    fields = "data.fields={png: {name: image, role: image, size: 8}, cls: {name: label, role: label}}"
    overrides = ["model=small_cnn", "model.classes=10", "data.train=a.tar", fields, "train.max_steps=1", "run.seed=7"]
    for directory in (tmp_path / "runs" / "x", tmp_path / "runs" / "7"):
        directory.mkdir(parents=True)
        (directory / "overrides.yaml").write_text("overrides: [task._target_=os.system]\nconfig_dirs: []\n")
    job = single(*overrides, place)
    assert job.arguments[-1] == "--as-typed"
    # A rank composes what this process has composed, and nothing of the directory.
    assert recompose_if_run(job.arguments) == job.arguments[:-1]
    assert "os.system" not in " ".join(job.arguments)
    assert "--as-typed" not in single("experiment=digits", "run.dir=runs/z").arguments
