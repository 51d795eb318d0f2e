from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

# Read at collection, because a fixture removes every SLURM_ variable from the environment.
_SETTINGS = {name: value for name, value in os.environ.items() if name.startswith("SLURM_BED_")}


@pytest.fixture
def bed(slurm: Path) -> Path:
    """The folder of the scripts that start the cluster and crash its nodes."""
    return slurm


@pytest.fixture(scope="session")
def slurm(_own_environment: None) -> Iterator[Path]:
    """Starts a SLURM with three nodes on this machine and sets its environment; the folder of its scripts."""
    place = os.environ.get("DTRAIN_TEST_SLURM_BED")
    if not place:
        pytest.skip("no cluster: set DTRAIN_TEST_SLURM_BED to a folder with a start.sh that starts one")
    if shutil.which("slurmctld", path=f"{os.environ['PATH']}:/usr/sbin:/sbin") is None:
        pytest.skip("SLURM is not installed: apt-get install slurmctld slurmd slurm-client munge")
    scripts = Path(place).resolve()
    with tempfile.TemporaryDirectory(prefix="slurm-") as state:
        # Ports by process id, below the ephemeral range, so that several clusters can run on this machine.
        own = {"SLURM_BED_DIR": state, "SLURM_BED_PORT": str(17000 + os.getpid() % 150 * 100)}
        environment = os.environ | own | _SETTINGS
        subprocess.run(["bash", str(scripts / "start.sh")], env=environment, check=True, timeout=120)
        try:
            shown = subprocess.run(
                ["bash", "-c", '. "$SLURM_BED_DIR/env.sh" && env -0'], env=environment, check=True, capture_output=True
            )
            for line in shown.stdout.decode().split("\0"):
                name, _, value = line.partition("=")
                if name.startswith("SLURM_"):
                    os.environ[name] = value
            os.environ["SLURM_BED_DIR"] = state
            yield scripts
        finally:
            subprocess.run(["bash", str(scripts / "stop.sh")], env=environment, check=True, timeout=120)
            for name in [name for name in os.environ if name.startswith("SLURM_")]:
                del os.environ[name]
