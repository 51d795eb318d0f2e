from __future__ import annotations

import pytest
import torch

from dtrain.training.sync_guard import host_syncs_announced


def test_the_mode_is_on_inside_and_as_it_was_afterwards_also_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[object] = [0]
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: modes[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    with host_syncs_announced(torch.device("cuda", 0)):
        assert modes == [0, "warn"]
    with pytest.raises(ZeroDivisionError), host_syncs_announced(torch.device("cuda", 0)):
        raise ZeroDivisionError
    assert modes == [0, "warn", 0, "warn", 0]


def test_a_cpu_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: pytest.fail("touched CUDA"))
    with host_syncs_announced(torch.device("cpu")):
        pass
