"""A sink in a thread of its own. What waits here waits for an event, never for the clock."""

import threading

import pytest

from dtrain.tracking import background
from dtrain.tracking.background import BackgroundSink


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

    def finish(self, state, reason=None):
        self.got.append((state, reason))


def of(sink, notes):
    return BackgroundSink("sink", lambda: sink, errors=(OSError,), note=notes.append, if_unfinished="Look there.")


def test_everything_arrives_in_its_order_and_the_end_is_last(tmp_path):
    sink, notes = Remembers(), []
    served = of(sink, notes)
    for step in range(100):
        served.log({"step": step})
    served.media(100, "picture", tmp_path)
    served.finish("stopped", "SIGTERM")
    assert sink.got == [*range(100), (100, "picture"), ("stopped", "SIGTERM")]
    assert not notes


def test_a_sink_that_was_slow_still_hears_of_the_end_though_its_queue_was_full(monkeypatch):
    monkeypatch.setattr(background, "WAITING", 3)
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
    assert notes == ["sink: 3 records wait; the next are left out. metrics.jsonl has all."]


def test_a_sink_that_hangs_is_left_behind_sooner_if_the_run_failed(monkeypatch):
    monkeypatch.setattr(background, "PATIENCE_AFTER_FAILURE", 0.01)
    go, notes = threading.Event(), []
    served = of(Remembers(go), notes)
    served.log({"step": 1})
    served.finish("failed", "why")
    assert notes == ["sink: not done in time. Look there."]
    go.set()


@pytest.mark.parametrize("when", ["open", "log", "finish"])
def test_an_error_is_said_in_one_line_and_later_records_are_let_go(when, monkeypatch):
    def refuse(*_, **__):
        raise OSError("the server\nsaid no")

    sink, notes = Remembers(), []
    if when != "open":
        monkeypatch.setattr(sink, when, refuse)
    opened = refuse if when == "open" else lambda: sink
    served = BackgroundSink("sink", opened, errors=(OSError,), note=notes.append)
    for step in range(5):
        served.log({"step": step})
    served.finish("finished")
    served.log({"step": 6})
    assert notes == ["sink: the server said no. The run goes on without it; metrics.jsonl has everything."]
