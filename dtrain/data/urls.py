"""Shards that are named by URL, and how they are named to people.

A URL may carry a password or a signature. It is used as it was given, and shown, hashed or split without them.
"""

from __future__ import annotations

import os
import re

_url = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_LOCAL_URL = "file://"
_user = re.compile(r"^[^/@]*@")
_password = re.compile(r"^([^/@:]*):[^/@]*@")
_user_in_text = re.compile(r"(://)[^/\s'\"@]*@")
_query_in_text = re.compile(r"(://[^\s'\"?#]*)[?#][^\s'\")]*")


def is_url(path: str) -> bool:
    """True for ``s3://bucket/x.tar``; False for paths."""
    return _url.match(path) is not None


def scheme(url: str) -> str:
    """``s3`` of ``s3://bucket/x.tar``; empty for a path."""
    found = _url.match(url)
    return found.group(1).lower() if found else ""


def local_path(path: str) -> str:
    """The path that a ``file://`` URL stands for; anything else as it is."""
    return path[len(_LOCAL_URL) :] if path.startswith(_LOCAL_URL) else path


def absolute(path: str) -> str:
    """What tells a shard from all others: its absolute path, or its URL as it was given."""
    return path if is_url(path) else os.path.abspath(path)


def shown(path: str) -> str:
    """A path or URL without user, password and signature, for messages, names and logs."""
    if not is_url(path):
        return path
    start, _, rest = path.partition("://")
    if scheme(path) in ("http", "https"):
        rest = _user.sub("", re.split(r"[?#]", rest, maxsplit=1)[0])
    hidden = _password.sub(r"\1@", rest) if "@" in rest else rest
    return f"{start}://{hidden}"


def components(path: str) -> list[str]:
    """A path or URL in its folders and its name, from the root or host on."""
    return shown(path).partition("://")[2].split("/") if is_url(path) else os.path.abspath(path).split(os.sep)


def without_secrets(text: str) -> str:
    """A message of another library, in which URLs may stand."""
    return _query_in_text.sub(r"\1", _user_in_text.sub(r"\1", text))
