"""``export.format=aotinductor``: what is refused before a compiler is called, or a device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch._inductor import config as inductor

from dtrain.config.errors import ConfigError
from dtrain.deployment.formats import FORMATS
from tests.deployment.described import described

CPU = torch.device("cpu")
AOTINDUCTOR = FORMATS["aotinductor"]


def test_compiling_without_a_compiler_is_refused_with_a_remedy() -> None:
    with (
        inductor.patch({"cpp.cxx": ("no-such-compiler",)}),
        pytest.raises(ConfigError, match=r"Install g\+\+.*CXX.*pt2"),
    ):
        AOTINDUCTOR.check("bf16")


def test_what_is_no_program_or_one_for_another_device_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.compiled.pt2"
    path.write_bytes(b"PK, or not")
    with pytest.raises(ConfigError, match="compiled for cuda, the device is cpu"):
        AOTINDUCTOR.read(path, described("aotinductor", device="cuda"), CPU)
    with pytest.raises(ConfigError, match=r"exported on cpu, cannot be read by torch .* for cpu"):
        AOTINDUCTOR.read(path, described("aotinductor"), CPU)
