import pytest

from dtrain.config.errors import ConfigError
from dtrain.tracking.wandb_login import logged_in, server, wandb_mode

KEY = {"WANDB_API_KEY": "0" * 40}


def test_the_config_wins_over_the_environment_and_the_environment_over_the_login(home):
    assert wandb_mode("offline", KEY | {"WANDB_MODE": "online"}) == "offline"
    assert wandb_mode(None, KEY | {"WANDB_MODE": "disabled"}) == "disabled"
    assert wandb_mode(None, KEY) == "online"
    assert wandb_mode(None, {}) == "offline"


def test_wandbs_own_words_for_the_modes_are_understood(home):
    assert wandb_mode(None, {"WANDB_MODE": "dryrun"}) == "offline"
    assert wandb_mode(None, KEY | {"WANDB_MODE": "run"}) == "online"


@pytest.mark.parametrize(("configured", "environ"), [("on", {}), (None, {"WANDB_MODE": "on"})])
def test_an_unknown_mode_is_refused_with_the_known_ones(home, configured, environ):
    with pytest.raises(ConfigError, match=r"(tracker\.mode|WANDB_MODE): got 'on'; known are online, offline, disabled"):
        wandb_mode(configured, environ)


def test_online_without_a_key_is_refused_instead_of_waiting_for_one_to_be_typed(home):
    with pytest.raises(ConfigError, match=r"tracker\.mode=online.*no key for https://api\.wandb\.ai.*wandb login"):
        wandb_mode("online", {})


@pytest.mark.parametrize("file", [".netrc", "_netrc", "elsewhere"])
def test_a_netrc_entry_for_the_server_is_a_login(home, file):
    environ = {"NETRC": str(home / file)} if file == "elsewhere" else {}
    (home / file).write_text("machine api.wandb.ai\n  login user\n  password 0123\n")
    assert logged_in(environ)
    assert not logged_in(environ | {"WANDB_BASE_URL": "https://wandb.example.org"})


@pytest.mark.parametrize(
    "text", ["", "machine github.com login me password x\n", "machine api.wandb.ai login user\n", "mach"]
)
def test_a_netrc_without_a_key_for_the_server_is_none(home, text):
    (home / ".netrc").write_text(text)
    assert not logged_in({})


def test_the_server_is_the_one_that_wandb_login_wrote_down(home):
    assert server({}) == "https://api.wandb.ai"
    settings = home / ".config" / "wandb" / "settings"
    settings.parent.mkdir(parents=True)
    settings.write_text("[default]\nbase_url = https://wandb.example.org/\n")
    (home / ".netrc").write_text("machine wandb.example.org login user password 0123\n")
    assert server({}) == "https://wandb.example.org"
    assert logged_in({})
    assert server({"WANDB_BASE_URL": "https://other.example.org"}) == "https://other.example.org"


def test_a_settings_file_that_is_no_settings_file_does_not_matter(home):
    settings = home / ".config" / "wandb" / "settings"
    settings.parent.mkdir(parents=True)
    settings.write_text("base_url\n")
    assert server({}) == "https://api.wandb.ai"
