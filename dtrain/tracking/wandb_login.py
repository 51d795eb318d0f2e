"""Whether wandb can go online from here, answered from the environment and the user's files: no import, no network."""

from __future__ import annotations

import configparser
import netrc
import os
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from dtrain.config.errors import ConfigError

MODES = ("online", "offline", "disabled")
#: What wandb itself accepts for the same in WANDB_MODE.
SYNONYMS = {"run": "online", "dryrun": "offline"}


def wandb_mode(configured: str | None, environ: Mapping[str, str] = os.environ) -> str:
    """How wandb shall run.

    1. ``configured`` (``tracker.mode``), 2. WANDB_MODE, 3. ``online`` where the user is logged in, 4. ``offline``.

    Args:
        configured: ``online``, ``offline``, ``disabled``, or None to let the environment decide.
        environ: The environment.

    Returns:
        ``online``, ``offline`` or ``disabled``.

    Raises:
        ConfigError: If the mode is none of these, or ``online`` was asked for and there is no key for the server: wandb
            would wait for one to be typed.
    """
    source, asked = ("tracker.mode", configured) if configured else ("WANDB_MODE", environ.get("WANDB_MODE"))
    login = logged_in(environ)
    if not asked:
        return "online" if login else "offline"
    mode = SYNONYMS.get(asked, asked)
    if mode not in MODES:
        raise ConfigError(f"{source}: got {asked!r}; known are {', '.join(MODES)}.")
    if mode == "online" and not login:
        raise ConfigError(
            f"{source}={asked}, but there is no key for {server(environ)}. Run `wandb login`, set WANDB_API_KEY, or "
            "use tracker.mode=offline and upload later with `wandb sync`."
        )
    return mode


def logged_in(environ: Mapping[str, str] = os.environ) -> bool:
    """True if the environment or the netrc file has a key for the server."""
    if environ.get("WANDB_API_KEY") or environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    files = [environ["NETRC"]] if environ.get("NETRC") else ["~/.netrc", "~/_netrc"]
    host = urlsplit(server(environ)).netloc
    for file in map(_expand, files):
        try:
            entry = netrc.netrc(str(file)).authenticators(host)
        except (OSError, netrc.NetrcParseError):  # a netrc that wandb could not read either
            continue
        if entry and entry[2]:
            return True
    return False


def server(environ: Mapping[str, str] = os.environ) -> str:
    """The server's URL: WANDB_BASE_URL, or what ``wandb login --host`` wrote, or wandb's own."""
    if url := environ.get("WANDB_BASE_URL"):
        return url.rstrip("/")
    settings = configparser.ConfigParser(interpolation=None)
    try:
        settings.read(_expand(environ.get("WANDB_CONFIG_DIR") or "~/.config/wandb") / "settings")
    except configparser.Error:
        return "https://api.wandb.ai"
    return settings.get("default", "base_url", fallback="https://api.wandb.ai").rstrip("/")


def _expand(path: str) -> Path:
    return Path(path).expanduser()
