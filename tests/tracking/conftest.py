import pytest


@pytest.fixture
def home(tmp_path, monkeypatch):
    """An empty home directory and an environment in which nobody has heard of wandb."""
    for name in (
        "WANDB_API_KEY",
        "WANDB_BASE_URL",
        "WANDB_CONFIG_DIR",
        "WANDB_IDENTITY_TOKEN_FILE",
        "WANDB_MODE",
        "WANDB_SWEEP_ID",
        "NETRC",
    ):
        monkeypatch.delenv(name, raising=False)
    directory = tmp_path / "home"
    directory.mkdir()
    monkeypatch.setenv("HOME", str(directory))
    return directory
