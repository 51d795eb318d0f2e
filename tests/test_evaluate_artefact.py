"""``dtrain.evaluate artefact=...``: an artefact of a folder or of the hub, on data that the user names."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from unittest import mock

import pytest
import yaml

from dtrain.errors import ConfigError
from dtrain.evaluate import recompose_artefact
from dtrain.export import __main__ as export
from tests.hub_server import point_at, serving_hub
from tests.refusals import assert_refused, refused
from tests.test_evaluate import by_hand, ending, evaluated, numbers

pytest.importorskip("huggingface_hub", reason="hf needs huggingface_hub: pip install 'dtrain[hf]'")
QUICK = "data.num_workers=0"


@pytest.fixture(scope="module")
def artefact(finished_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An fp32 artefact."""
    out = tmp_path_factory.mktemp("export") / "artefact"
    options = ("checkpoint=latest", "samples=0", "export.measure=false", "export.dtype=fp32")
    with mock.patch.object(sys, "argv", ["export", f"run.dir={finished_run}", *options, f"export.out={out}"]):
        export.main()
    return out


def copied(artefact: Path, out: Path, **changes: object) -> Path:
    """A copy with other values in its config; None removes the file."""
    out.mkdir()
    for path in artefact.iterdir():
        (out / path.name).write_bytes(path.read_bytes())
    config = yaml.safe_load((out / "config.yaml").read_text()) | changes
    (out / "config.yaml").write_text(yaml.safe_dump(config))
    return out


@pytest.mark.slow
def test_an_artefact_of_the_hub_is_evaluated_on_all_samples(
    artefact: Path, finished_run: Path, digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {path.name: path.read_bytes() for path in artefact.iterdir()}
    with serving_hub(tmp_path) as server:
        point_at(server, tmp_path / "home", monkeypatch)
        commit = server.add_model("org/name", files).branches["main"][0]
        # As somebody else, without the folders of the training.
        monkeypatch.setenv("DTRAIN_CACHE", str(tmp_path / "cache"))
        model, data = f"artefact=hf://org/name@{commit}", f"data.eval={digits}/test-*.tar"
        code, text = ending(model, data, QUICK, f"out={tmp_path / 'out'}")
        assert code != 0
        assert_refused(text, "tests.toys.NormNet", "--trust")
        code, text = ending(model, data, QUICK, f"out={tmp_path / 'out'}", "--trust")
    assert code == 0, text
    weights = finished_run / "checkpoints" / "step-000000015" / "ema.safetensors"
    expected, _ = by_hand(weights, digits)
    assert numbers(text) == pytest.approx(expected, rel=1e-4)
    (file,) = (tmp_path / "out").glob("*.json")
    assert file.name.startswith(f"org--name-{commit[:8]}-exported-fp32-")
    assert json.loads(file.read_text())["metrics"]["eval/accuracy"] == pytest.approx(expected["accuracy"])


@pytest.mark.slow
def test_a_field_may_have_several_extensions_as_in_packed_photographs(
    artefact: Path, finished_run: Path, digits: Path, tmp_path: Path
) -> None:
    config = yaml.safe_load((artefact / "config.yaml").read_text())
    fields = {"jpg;jpeg;png": config["data"]["fields"]["png"], "cls": config["data"]["fields"]["cls"]}
    changed = copied(artefact, tmp_path / "photos", data=config["data"] | {"fields": fields})
    expected = ending(f"artefact={artefact}", f"data.eval={digits}/test-*.tar", QUICK, f"out={tmp_path / 'out'}")
    code, text = ending(
        f"artefact={changed}", f"data.eval={digits}/test-*.tar", QUICK, f"out={tmp_path / 'out'}", "--trust"
    )
    assert (code, expected[0]) == (0, 0), text
    assert numbers(text) == numbers(expected[1])


@pytest.mark.slow
def test_two_ranks_evaluate_an_artefact_as_one_does(artefact: Path, digits: Path) -> None:
    arguments = (f"artefact={artefact}", f"data.eval={digits}/test-*.tar", QUICK)
    results = [evaluated(ranks, *arguments) for ranks in (1, 2)]
    assert [code for code, _ in results] == [0, 0]
    one, two = (numbers(text) for _, text in results)
    assert two == pytest.approx(one, rel=1e-5)


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["precision=bf16"], ["precision", "an artefact has its own"]),
        (["checkpoint=best"], ["checkpoint", "one set of weights"]),
        ([], ["data.eval", "Set data.eval=..."]),
    ],
    ids=str,
)
def test_options_that_an_artefact_does_not_have_are_refused(
    artefact: Path, arguments: list[str], names: list[str]
) -> None:
    code, text = ending(f"artefact={artefact}", *arguments)
    assert code != 0
    assert_refused(text, *names)
    assert "Traceback" not in text


def test_the_config_of_somebody_else_never_reads_the_environment(
    artefact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PASSPHRASE", "of the user")
    changed = copied(artefact, tmp_path / "changed", data={"eval": "hf://datasets/evil/${oc.env:PASSPHRASE}/x.tar"})
    with refused(ConfigError, "data.eval", "${oc.env:PASSPHRASE}", "--trust"):
        recompose_artefact(changed, [], tmp_path)


@pytest.mark.parametrize("content", [b"a: [", b"- 1", b"", b"\xff", b"data: !!python/name:os.system"])
def test_a_config_that_is_damaged_is_one_message(artefact: Path, tmp_path: Path, content: bytes) -> None:
    changed = copied(artefact, tmp_path / "changed")
    (changed / "config.yaml").write_bytes(content)
    with refused(ConfigError, "artefact", changed / "config.yaml", "Export the run again"):
        recompose_artefact(changed, [], tmp_path)


def test_the_config_of_somebody_else_may_only_name_known_code(
    artefact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = "data.eval=x.tar"
    changed = copied(artefact, tmp_path / "changed", task={"_target_": "os.system", "command": "false"})
    code, text = ending(f"artefact={changed}", data)
    assert code != 0
    assert_refused(text, "task._target_", "os.system", "--trust")
    (changed / "config.yaml").unlink()
    code, text = ending(f"artefact={changed}", data)
    assert code != 0
    assert_refused(text, str(changed), "config.yaml", "Export the run again")
