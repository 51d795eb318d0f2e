"""What a tracker records besides the config, so that a run can be reproduced: versions, the device, the git commit."""

from __future__ import annotations

import platform
from pathlib import Path

import torch

from dtrain import __version__
from dtrain.runs.run_dir import git_output


def provenance(folder: Path) -> dict[str, str | bool]:
    """Versions of dtrain, torch and Python, the device, and the git commit of the user's code, for reproducing the run.

    Args:
        folder: The user's project, such as the working directory.

    Returns:
        ``commit`` and ``dirty`` (tracked files differ from it) of ``folder``; ``dtrain_commit`` and ``dtrain_dirty`` of
        a checkout of dtrain; left out without git or without a repository.
    """
    found: dict[str, str | bool] = {
        "dtrain": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine(),
    }
    found |= git_state(folder)
    package = Path(__file__).resolve().parents[2]
    if (package / ".git").exists():  # else it is installed, perhaps inside another repository
        found |= {f"dtrain_{name}": value for name, value in git_state(package).items()}
    return found


def git_state(folder: Path) -> dict[str, str | bool]:
    """``commit`` and ``dirty`` of the repository that contains ``folder``; empty without a repository or git."""
    shown = git_output(folder, "status", "--porcelain=v2", "--branch", "--untracked-files=no") or ""
    lines = shown.splitlines()
    commits = [line.split()[-1] for line in lines if line.startswith("# branch.oid ")]
    if not commits or commits[0] == "(initial)":
        return {}
    return {"commit": commits[0], "dirty": any(not line.startswith("#") for line in lines)}
