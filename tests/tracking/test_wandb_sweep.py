"""docs/sweeps.md shows a sweep of wandb: the command that its agent would run is accepted. The agent itself needs a server."""

import re
from pathlib import Path

import yaml

from dtrain.__main__ import main
from dtrain.config.schema import TrackerConfig
from dtrain.tracking import tracker_mode
from tests.whole_runs import ROOT

DOCUMENT = Path(ROOT, "docs", "sweeps.md").read_text(encoding="utf-8")


def agent_command(sweep, values):
    """The words that `wandb agent` runs for these values, by wandb's own code."""
    from wandb.sdk.launch.sweeps.utils import create_sweep_command, create_sweep_command_args

    words = create_sweep_command(list(sweep["command"]))
    expanded = create_sweep_command_args({"args": {name: {"value": value} for name, value in values.items()}})
    command = []
    for word in words:
        macro = re.fullmatch(r"\$\{(\w+)\}", word)
        command += expanded[macro[1]] if macro else [word]
    return command


def test_the_command_of_the_documented_sweep_is_accepted_with_its_values(capsys):
    (block,) = [block for block in re.findall(r"```yaml\n(.*?)```", DOCUMENT, re.DOTALL) if "args_no_hyphens" in block]
    sweep = yaml.safe_load(block)
    values = {}
    for name, parameter in sweep["parameters"].items():
        values[name] = parameter["values"][0] if "values" in parameter else (parameter["min"] + parameter["max"]) / 2
    command = agent_command(sweep, values)
    program, *words = command
    assert program == "dtrain"
    assert main([*words, "--cfg", "job"]) == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    for name, value in values.items():
        found = shown
        for key in name.split("."):
            found = found[key]
        if isinstance(found, dict):  # a preset
            found = found["name"]
        assert found == value, name
    assert sweep["metric"]["name"] in ("eval/accuracy", "eval/loss")


def test_a_run_of_the_documented_sweeps_agent_is_online_without_a_key(home, monkeypatch, tmp_path):
    assert "tracker.mode" not in DOCUMENT.partition("program: dtrain")[2].partition("```")[0]
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    assert tracker_mode(TrackerConfig(name="wandb"), tmp_path) == "offline"
    monkeypatch.setenv("WANDB_SWEEP_ID", "abcdefgh")
    assert tracker_mode(TrackerConfig(name="wandb"), tmp_path) == "online"
