import io
import json

import pytest
from PIL import Image

from dtrain.config.schema import TrackerConfig
from dtrain.tracking import build_sinks
from tests.tracking.pictures import png

pytest.importorskip("tensorboard", reason="TensorBoard is an extra: pip install 'dtrain[tensorboard]'")
TRACKER = TrackerConfig(name="tensorboard")


def shown(run_dir):
    """What TensorBoard shows of a run, read by its own reader."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    everything = dict.fromkeys(("scalars", "images", "tensors"), 0)  # 0: all of them
    return EventAccumulator(str(run_dir / "tensorboard"), size_guidance=everything).Reload()


def start(run_dir, steps, resumed):
    sinks = build_sinks(TRACKER, run_dir, "digits-12", {"optimizer": {"lr": 0.1}}, resumed)
    for step in steps:
        sinks.log({"step": step, "time": 1000.0 + step, "train/loss": 1 / (step + resumed + 1), "epoch": 0.5})
        if step % 2 == 0:
            sinks.media(step, "confusion", png(4, 3, value=step))
            sinks.media(step, "sample", f"# step {step}")
    sinks.finish("stopped")


def test_two_starts_are_one_curve_with_each_step_once_and_the_names_of_the_metrics_file(tmp_path):
    start(tmp_path, (1, 2, 3, 4), 0)
    start(tmp_path, (3, 4, 5), 2)
    seen = shown(tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(event.step, event.wall_time) for event in seen.Scalars("train/loss")] == [
        (line["step"], line["time"]) for line in lines
    ]
    assert [event.value for event in seen.Scalars("train/loss")] == pytest.approx(
        [line["train/loss"] for line in lines]
    )
    assert set(seen.Tags()["scalars"]) == {"train/loss", "epoch"}


def test_pictures_texts_and_the_config_are_shown(tmp_path):
    start(tmp_path, (1, 2, 3, 4), 0)
    start(tmp_path, (3, 4, 5), 2)
    seen = shown(tmp_path)
    pictures = seen.Images("media/confusion")
    assert [event.step for event in pictures] == [2, 4]
    picture = Image.open(io.BytesIO(pictures[1].encoded_image_string))
    assert (picture.size, picture.getpixel((0, 0))) == ((4, 3), (4, 4, 4))
    texts = seen.Tensors("media/sample/text_summary")
    # Of texts TensorBoard keeps those of a step that was trained again, too.
    assert {event.step: event.tensor_proto.string_val[0].decode() for event in texts} == {
        2: "    # step 2\n",
        4: "    # step 4\n",
    }
    assert b"lr: 0.1" in seen.Tensors("config/text_summary")[-1].tensor_proto.string_val[0]


def test_a_start_from_nothing_hides_an_earlier_one(tmp_path):
    start(tmp_path, (0, 1, 2), 0)
    start(tmp_path, (0, 1), 0)
    assert [event.step for event in shown(tmp_path).Scalars("epoch")] == [0, 1]


def test_an_evaluation_that_comes_in_a_later_start_than_its_step_is_there_beside_it(tmp_path):
    start(tmp_path, (1, 2), 0)
    sinks = build_sinks(TRACKER, tmp_path, "digits-12", {}, 2, evaluation_due=True)
    sinks.log({"step": 2, "time": 1002.5, "eval/loss": 0.5})
    sinks.log({"step": 3, "time": 1003.0, "train/loss": 0.25})
    sinks.finish("finished")
    seen = shown(tmp_path)
    assert [event.step for event in seen.Scalars("train/loss")] == [1, 2, 3]
    assert [event.step for event in seen.Scalars("eval/loss")] == [2]


def test_a_folder_that_cannot_be_written_is_reported_once_and_ends_no_run(tmp_path, capsys):
    (tmp_path / "tensorboard").touch()
    start(tmp_path, range(1, 5), 0)
    assert capsys.readouterr().out.count("tensorboard: ") == 1
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 4


def test_wandb_and_tensorboard_can_be_had_both(tmp_path):
    sinks = build_sinks(TrackerConfig(name="both", mode="offline"), tmp_path, "digits-12", {}, 0)
    sinks.log({"step": 1, "time": 1.0, "train/loss": 0.5})
    sinks.finish("finished")
    assert shown(tmp_path).Scalars("train/loss")[0].value == 0.5
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))
