import inspect
import json
import os
import subprocess
import sys
import threading
from contextlib import suppress

import numpy as np
import pytest

from dtrain.config.schema import TrackerConfig
from dtrain.errors import ConfigError
from dtrain.runs.records import JsonlSink
from dtrain.tracking import NullSinks, Sinks, build_sinks, sinks, tracker_mode
from dtrain.tracking.console_sink import PlainLines
from dtrain.tracking.sinks import (
    BackgroundSink,
    cut_media_after,
    describe_trackers,
    tracker_names,
    wandb_logged_in,
    wandb_mode,
    wandb_server,
    write_media,
)
from tests.refusals import refused
from tests.tracking.pictures import png


def record(step):
    return {"step": step, "time": 1000.0 + step, "train/loss": 0.5}


def test_records_reach_the_file_and_the_console(tmp_path, capsys):
    sinks = build_sinks(TrackerConfig(), tmp_path, "digits-12", {}, 0, total_steps=20)
    sinks.log(record(10))
    sinks.note("a note")
    sinks.finish("finished")
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == record(10)
    assert capsys.readouterr().out == "step 10/20  loss 0.5\na note\n"


def test_a_resumed_run_writes_each_step_once(tmp_path, capsys):
    for first, last, resumed in ((0, 5, 0), (3, 8, 2)):
        sinks = build_sinks(TrackerConfig(), tmp_path, "digits-12", {}, resumed)
        for step in range(first, last):
            sinks.log(record(step))
        sinks.finish("stopped")
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(8))
    assert "2 lines after step 2 moved to cut-metrics.jsonl" in capsys.readouterr().out


def test_a_new_start_keeps_no_record_of_an_earlier_one(tmp_path):
    for _ in range(2):
        sinks = build_sinks(TrackerConfig(), tmp_path, "digits-12", {}, 0)
        sinks.log({"step": 0, "time": 1.0, "eval/loss": 2.3})
        sinks.finish("failed")
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 1


@pytest.mark.parametrize(
    ("tracker", "environ", "key", "got", "remedy"),
    [
        ({"name": "comet"}, {}, "tracker.name", "'comet'", "wandb, tensorboard, mlflow, trackio, none, both"),
        ({"name": ["wandb", "comet"]}, {}, "tracker.name", "['wandb', 'comet']", "[wandb,mlflow]"),
        ({"name": []}, {}, "tracker.name", "[]", "none"),
        ({"name": 3}, {}, "tracker.name", "3", "none"),
        ({"name": "wandb", "mode": "on"}, {}, "tracker.mode", "'on'", "online, offline, disabled"),
        ({"name": "wandb"}, {"WANDB_MODE": "on"}, "WANDB_MODE", "'on'", "online, offline, disabled"),
        ({"name": "wandb", "mode": "online"}, {}, "tracker.mode", "https://api.wandb.ai", "wandb login"),
        ({"name": "both"}, {"WANDB_MODE": "online"}, "WANDB_MODE", "online", "tracker.mode=offline"),
    ],
)
def test_a_tracker_that_cannot_work_is_refused_before_anything_is_written(
    tmp_path, home, monkeypatch, tracker, environ, key, got, remedy
):
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    with pytest.raises(ConfigError) as raised:
        build_sinks(TrackerConfig(**tracker), run_dir, "digits-12", {}, 0)
    assert str(raised.value).startswith(key)
    assert got in str(raised.value)
    assert remedy in str(raised.value)
    assert not list(run_dir.iterdir())


def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setattr("dtrain.tracking.sinks.find_spec", lambda _: None)
    assert tracker_mode(TrackerConfig(name="none")) == "disabled"
    with refused(ConfigError, "wandb", remedy="pip install wandb"):
        tracker_mode(TrackerConfig(name="wandb"))
    for name in ("tensorboard", "mlflow", "trackio"):
        with refused(ConfigError, "tracker.name", got=name, remedy=f"pip install 'dtrain[{name}]'"):
            tracker_mode(TrackerConfig(name=["none", name]))


def test_several_trackers_are_a_list_with_each_once():
    assert tracker_names(TrackerConfig(name="none")) == ()
    assert tracker_names(TrackerConfig(name="both")) == ("wandb", "tensorboard")
    assert tracker_names(TrackerConfig(name=["mlflow", "both", "wandb"])) == ("mlflow", "wandb", "tensorboard")


def test_disabled_wandb_writes_nothing_of_its_own(tmp_path):
    build_sinks(TrackerConfig(name="wandb", mode="disabled"), tmp_path, "digits-12", {}, 0).finish("finished")
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_the_other_ranks_sinks_can_be_called_like_rank_0s(tmp_path):
    def methods(cls):
        return {name: inspect.signature(member) for name, member in vars(cls).items() if name[0] != "_"}

    assert methods(NullSinks) == methods(Sinks)
    null = NullSinks()
    null.log(record(1))
    null.note("a note")
    null.alert("a warning")
    null.media(1, "picture", b"")
    null.finish("finished")


def test_a_run_without_trackers_imports_none(tmp_path):
    script = (
        "import sys; from pathlib import Path; from dtrain.tracking import build_sinks; "
        "from dtrain.config.schema import TrackerConfig; "
        f"build_sinks(TrackerConfig(), Path({str(tmp_path)!r}), 'r', {{}}, 0).finish('finished'); "
        "sys.exit(not {'wandb', 'tensorboard', 'mlflow', 'trackio'}.isdisjoint(sys.modules))"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


def test_a_note_shows_no_secret(tmp_path, capsys):
    sinks = build_sinks(TrackerConfig(), tmp_path, "digits-12", {}, 0)
    sinks.note("see https://user:hunter2@host/path")
    sinks.finish("finished")
    assert "hunter2" not in capsys.readouterr().out


def test_an_alert_and_the_reason_of_an_end_have_no_secret(tmp_path):
    sink = Remembers()
    sinks = Sinks(tmp_path / "media", PlainLines(sys.stdout, None), sink)
    sinks.alert("https://user:hunter2@host")
    sinks.finish("failed", "https://user:hunter2@host")
    assert sink.got == ["https://<hidden>@host", ("failed", "https://<hidden>@host")]


class Refusing:
    """A sink on a full disk."""

    def log(self, record):
        raise OSError(28, "No space left on device")

    def media(self, step, name, path):
        raise OSError(28, "No space left on device")

    def alert(self, text):
        raise OSError(28, "No space left on device")

    def finish(self, state, reason=None):
        raise OSError(28, "No space left on device")


def test_a_sink_that_fails_is_reported_once_and_keeps_nothing_from_the_others(tmp_path, capsys):
    sinks = Sinks(tmp_path / "media", PlainLines(sys.stdout, None), Refusing())
    for step in range(3):
        sinks.log(record(step))
    sinks.media(2, "text", "a text")
    sinks.alert("a warning")
    sinks.finish("finished")
    message = capsys.readouterr().out
    assert message.count("WARNING: a record could not be written to Refusing ([Errno 28] No space left") == 1
    assert message.count("loss 0.5") == 3
    assert (tmp_path / "media" / "text" / "step-000000002.txt").read_text() == "a text"


def test_a_closed_output_does_not_end_the_run(tmp_path):
    read, write = os.pipe()
    os.close(read)
    with suppress(BrokenPipeError), open(write, "w") as broken:
        sinks = Sinks(tmp_path / "media", PlainLines(broken, None), JsonlSink(tmp_path / "metrics.jsonl"))
        sinks.note("a note")
        sinks.log(record(1))
        sinks.finish("finished")
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == record(1)


def test_sinks_are_finished_once(tmp_path):
    finished = []

    class Listening(Refusing):
        def finish(self, state, reason=None):
            finished.append((state, reason))

    sinks = Sinks(tmp_path / "media", PlainLines(sys.stdout, None), Listening())
    sinks.finish("failed", "the run hangs")
    sinks.finish("failed", "rank 0 failed")
    assert finished == [("failed", "the run hangs")]


# -- slow sinks


def test_several_slow_sinks_end_at_the_same_time(tmp_path):
    meeting, notes = threading.Barrier(2), []

    class Waits(Remembers):
        def finish(self, state, reason=None):
            meeting.wait(timeout=60)

    ends = [of(Waits(), notes) for _ in range(2)]
    Sinks(tmp_path / "media", PlainLines(sys.stdout, None), *ends).finish("finished")
    assert not notes


class Remembers:
    """A sink that keeps what it gets, once it is let go."""

    def __init__(self, go=None):
        self.got = []
        self._go = go

    def log(self, record):
        if self._go is not None:
            self._go.wait()
        self.got.append(record["step"])

    def media(self, step, name, path):
        self.got.append((step, name))

    def alert(self, text):
        self.got.append(text)

    def finish(self, state, reason=None):
        self.got.append((state, reason))


def of(sink, notes):
    return BackgroundSink("sink", lambda: sink, note=notes.append, if_unfinished="Look there.")


def test_everything_arrives_in_its_order_and_the_end_is_last(tmp_path):
    sink, notes = Remembers(), []
    served = of(sink, notes)
    for step in range(100):
        served.log({"step": step})
    served.media(100, "picture", tmp_path)
    served.finish("stopped", "SIGTERM")
    assert sink.got == [*range(100), (100, "picture"), ("stopped", "SIGTERM")]
    assert not notes


def test_a_slow_sink_is_finished_even_if_its_queue_was_full(monkeypatch):
    monkeypatch.setattr(sinks, "QUEUE_SIZE", 3)
    go, notes = threading.Event(), []
    sink = Remembers(go)
    served = of(sink, notes)
    for step in range(10):
        served.log({"step": step})
    ending = threading.Thread(target=served.finish, args=("finished",))
    ending.start()
    go.set()
    ending.join()
    assert sink.got[-1] == ("finished", None)
    assert sink.got[0] == 0
    assert notes == ["sink: 3 records are waiting; further ones are dropped. metrics.jsonl has all."]


def test_the_wait_for_a_blocked_sink_is_shorter_after_a_failure(monkeypatch):
    monkeypatch.setattr(sinks, "FINISH_TIMEOUT_AFTER_FAILURE", 0.01)
    go, notes = threading.Event(), []
    served = of(Remembers(go), notes)
    served.log({"step": 1})
    served.finish("failed", "why")
    assert notes == ["sink: did not end in time. Look there."]
    go.set()


@pytest.mark.parametrize("when", ["open", "log", "finish"])
def test_an_error_is_one_line_and_later_records_are_dropped(when, monkeypatch):
    def refuse(*_, **__):
        raise OSError("the server\nsaid no")

    sink, notes = Remembers(), []
    if when != "open":
        monkeypatch.setattr(sink, when, refuse)
    opened = refuse if when == "open" else lambda: sink
    served = BackgroundSink("sink", opened, note=notes.append)
    for step in range(5):
        served.log({"step": step})
    served.finish("finished")
    served.log({"step": 6})
    assert notes == ["sink: the server said no. The run continues without it; metrics.jsonl has everything."]


@pytest.mark.parametrize("error", [KeyError("a fault of the tracker"), SystemExit("a fault of the tracker")])
def test_any_error_of_a_tracker_is_one_line_with_the_traceback_in_the_log(error, tmp_path, capfd, caplog):
    def refuse():
        raise error

    notes, ends = [], []
    served = BackgroundSink("sink", refuse, note=notes.append, on_error=lambda: ends.append("torn down"))
    served.log({"step": 1})
    served.finish("finished")
    (note,) = notes
    assert "a fault of the tracker" in note
    assert "The run continues without it" in note
    assert capfd.readouterr().err == ""
    assert "Traceback" in caplog.text
    assert ends == ["torn down"]


def test_a_long_error_shows_no_half_of_a_secret():
    def refuse():
        raise OSError("x" * (sinks._LONGEST_REASON - 24) + " https://user:hunter2@host.example.org")

    notes = []
    BackgroundSink("sink", refuse, note=notes.append).finish("finished")
    assert "hunt" not in notes[0]


# -- media


def test_media_are_written_under_their_name_and_step(tmp_path):
    picture = png(3, 2)
    assert write_media(tmp_path, 50, "confusion", picture) == tmp_path / "confusion" / "step-000000050.png"
    write_media(tmp_path, 7, "sample", "def é():\n")
    assert (tmp_path / "confusion" / "step-000000050.png").read_bytes() == picture
    assert (tmp_path / "sample" / "step-000000007.txt").read_text(encoding="utf-8") == "def é():\n"
    assert len(list(tmp_path.rglob("*"))) == 4


@pytest.mark.parametrize(
    ("name", "content", "got", "remedy"),
    [
        *(
            (name, "text", repr(name), "letters, digits")
            for name in ("", ".", "..", "../out", "a/b", "a b", ".hidden", "/root", "a\\b")
        ),
        ("plot", b"GIF89a", "b'GIF89a", "PNG file"),
        ("plot", np.zeros((2, 2), np.uint8), "ndarray", "bytes of a PNG file or a text"),
        ("plot", bytearray(png(3, 2)), "bytearray", "bytes of a PNG file or a text"),
        ("plot", None, "NoneType", "bytes of a PNG file or a text"),
    ],
)
def test_wrong_media_are_refused_and_not_written(tmp_path, name, content, got, remedy):
    with pytest.raises(ValueError, match="media") as raised:
        write_media(tmp_path, 1, name, content)
    assert got in str(raised.value)
    assert remedy in str(raised.value)
    assert not list(tmp_path.iterdir())


def test_a_resumed_run_drops_the_media_that_it_makes_again_and_nothing_else(tmp_path):
    for step in (0, 10, 20, 30):
        write_media(tmp_path / "media", step, "sample", str(step))
    (tmp_path / "media" / "sample" / "notes.txt").touch()
    build_run_sinks(tmp_path, 20).finish("finished")
    assert names(tmp_path) == ["notes.txt", "step-000000000.txt", "step-000000010.txt", "step-000000020.txt"]
    build_run_sinks(tmp_path, 0).finish("finished")
    assert names(tmp_path) == ["notes.txt"]
    cut_media_after(tmp_path / "nothing", 3)


def build_run_sinks(run_dir, resumed):
    return build_sinks(TrackerConfig(), run_dir, "digits-12", {}, resumed)


def names(run_dir):
    return sorted(path.name for path in (run_dir / "media" / "sample").iterdir())


# -- mode of wandb


KEY = {"WANDB_API_KEY": "0" * 40}


SWEEP = {"WANDB_SWEEP_ID": "abcdefgh"}


def test_the_config_wins_over_the_environment_the_environment_over_a_sweep_and_a_sweep_over_the_last_start(home):
    assert wandb_mode("offline", KEY | SWEEP | {"WANDB_MODE": "online"}, was_online=True) == "offline"
    assert wandb_mode("online", KEY | {"WANDB_MODE": "offline"}) == "online"
    assert wandb_mode(None, KEY | SWEEP | {"WANDB_MODE": "disabled"}, was_online=True) == "disabled"
    assert wandb_mode(None, KEY | SWEEP) == "online"
    assert wandb_mode(None, KEY, was_online=True) == "online"


def test_a_login_alone_sends_nothing(home):
    assert wandb_mode(None, KEY) == wandb_mode(None, {}) == "offline"


def test_a_sweeps_agent_without_a_login_is_refused(home):
    with refused(ConfigError, "WANDB_SWEEP_ID", "wandb login"):
        wandb_mode(None, SWEEP)


@pytest.mark.parametrize(
    ("starts", "expected"),
    [
        ((), "offline"),
        (("offline-run-20261101_090000-ab",), "offline"),
        (("run-20261101_090000-ab",), "online"),
        (("offline-run-20261101_090000-ab", "run-20261102_090000-ab"), "online"),
        (("run-20261101_090000-ab", "offline-run-20261102_090000-ab"), "offline"),
    ],
)
def test_a_resumed_run_is_online_if_its_last_start_was(tmp_path, home, monkeypatch, starts, expected):
    monkeypatch.setenv("WANDB_API_KEY", KEY["WANDB_API_KEY"])
    (tmp_path / "wandb").mkdir()
    (tmp_path / "wandb" / "run-id").write_text("ab\n")
    for name in starts:
        (tmp_path / "wandb" / name).mkdir()
    assert tracker_mode(TrackerConfig(name="wandb"), tmp_path) == expected
    monkeypatch.delenv("WANDB_API_KEY")  # logged out: the run continues
    assert tracker_mode(TrackerConfig(name="wandb"), tmp_path) == "offline"
    assert tracker_mode(TrackerConfig(name="none"), tmp_path) == "disabled"


def test_one_line_says_where_records_go_and_what_artifacts_and_alerts_need(tmp_path, home, monkeypatch):
    monkeypatch.setattr("dtrain.tracking.sinks.find_spec", lambda _: True)
    assert describe_trackers(TrackerConfig(name="none"), tmp_path) == "metrics.jsonl"
    assert (
        describe_trackers(TrackerConfig(name=["wandb", "mlflow"], mode="disabled"), tmp_path) == "metrics.jsonl, mlflow"
    )
    offline = describe_trackers(TrackerConfig(name="wandb"), tmp_path)
    for part in ("metrics.jsonl", "wandb offline", "artifacts and alerts", "tracker.mode=online", "wandb sync"):
        assert part in offline
    monkeypatch.setenv("WANDB_API_KEY", KEY["WANDB_API_KEY"])
    online = describe_trackers(TrackerConfig(name="wandb", mode="online"), tmp_path)
    assert online == "metrics.jsonl, wandb online, https://api.wandb.ai"
    assert "\n" not in offline


def test_wandbs_synonyms_of_the_modes_are_accepted(home):
    assert wandb_mode(None, {"WANDB_MODE": "dryrun"}) == "offline"
    assert wandb_mode(None, KEY | {"WANDB_MODE": "run"}) == "online"


@pytest.mark.parametrize("file", [".netrc", "_netrc", "elsewhere"])
def test_a_netrc_entry_for_the_server_is_a_login(home, file):
    environ = {"NETRC": str(home / file)} if file == "elsewhere" else {}
    (home / file).write_text("machine api.wandb.ai\n  login user\n  password 0123\n")
    assert wandb_logged_in(environ)
    assert not wandb_logged_in(environ | {"WANDB_BASE_URL": "https://wandb.example.org"})


@pytest.mark.parametrize(
    "text", ["", "machine github.com login me password x\n", "machine api.wandb.ai login user\n", "mach"]
)
def test_a_netrc_without_a_key_for_the_server_is_none(home, text):
    (home / ".netrc").write_text(text)
    assert not wandb_logged_in({})


def test_the_server_is_the_one_that_wandb_login_wrote_down(home):
    assert wandb_server({}) == "https://api.wandb.ai"
    settings = home / ".config" / "wandb" / "settings"
    settings.parent.mkdir(parents=True)
    settings.write_text("[default]\nbase_url = https://wandb.example.org/\n")
    (home / ".netrc").write_text("machine wandb.example.org login user password 0123\n")
    assert wandb_server({}) == "https://wandb.example.org"
    assert wandb_logged_in({})
    assert wandb_server({"WANDB_BASE_URL": "https://other.example.org"}) == "https://other.example.org"


def test_a_settings_file_that_is_no_settings_file_does_not_matter(home):
    settings = home / ".config" / "wandb" / "settings"
    settings.parent.mkdir(parents=True)
    settings.write_text("base_url\n")
    assert wandb_server({}) == "https://api.wandb.ai"
