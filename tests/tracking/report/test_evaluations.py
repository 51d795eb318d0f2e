"""Results of ``dtrain.evaluate`` are shown, those of other versions too."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from dtrain.tracking.evaluated import Evaluated
from dtrain.tracking.evaluation_files import write
from dtrain.tracking.report.evaluations import evaluations


def test_a_result_is_read_as_evaluate_writes_it(tmp_path: Path) -> None:
    confusion = torch.tensor([[8, 2, 0], [0, 9, 1], [5, 0, 5]])
    one = Evaluated(
        checkpoint=tmp_path / "checkpoints" / "step-000000276",
        weights="ema",
        precision="bf16",
        data={"eval": "val-*.tar", "fingerprint": "1c4f09abcdef"},
        config={"model": {"width": 8}},
        ranks=2,
        metrics={"loss": 0.25, "accuracy": 22 / 30, "samples": 30},
        tables={"confusion": confusion},
        seconds=1.5,
        memory={"memory/max_resident_gib": 0.5},
    )
    write(tmp_path / "evaluations", one, ["ant", "bee", "cat"])
    gaps: list[str] = []
    (found,) = evaluations(tmp_path, gaps)
    assert gaps == []
    assert found.name.startswith("step-000000276-ema-bf16")
    assert found.facts["metrics.eval/accuracy"] == "0.7333"
    assert found.facts["precision"] == "bf16"
    assert "model.width" not in " ".join(found.facts)
    names = found.heading.index("name"), found.heading.index("recall")
    assert [tuple(row[i] for i in names) for row in found.classes] == [("cat", "0.5"), ("ant", "0.8"), ("bee", "0.9")]
    assert [picture.refused for picture in found.pictures] == [""]


def test_what_is_damaged_is_a_gap_and_what_is_new_is_shown(tmp_path: Path) -> None:
    folder = tmp_path / "evaluations"
    folder.mkdir()
    (folder / "torn.json").write_text('{"loss": 0.')
    (folder / "deep.json").write_text("[" * 100_000)
    (folder / "list.json").write_text("[1]")
    (folder / "new.json").write_text(
        json.dumps({"metrics": {"loss": float("nan"), "f1": 10**400}, "a": [1], "b": None})
    )
    gaps: list[str] = []
    (found,) = evaluations(tmp_path, gaps)
    assert found.facts == {"metrics.loss": "not finite", "metrics.f1": "not finite", "b": "\N{EN DASH}"}
    assert len(gaps) == 3
