"""URLs are used as they are given, and shown without what opens them."""

from __future__ import annotations

import pytest

from dtrain.data.urls import absolute, components, is_url, local_path, scheme, shown, without_secrets


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("/data/x.tar", "/data/x.tar"),
        ("a?b@c.tar", "a?b@c.tar"),
        ("https://me:secret@host/a/x.tar?X-Amz-Signature=secret#secret", "https://host/a/x.tar"),
        ("https://secret@host/x.tar", "https://host/x.tar"),
        ("s3://bucket/what?.tar", "s3://bucket/what?.tar"),
        ("s3://key:secret@bucket/x.tar", "s3://key@bucket/x.tar"),
        ("abfs://container@account/x.tar", "abfs://container@account/x.tar"),
        ("https://host/mail@x.tar", "https://host/mail@x.tar"),
    ],
)
def test_what_is_shown_has_no_secret(path: str, told: str) -> None:
    assert shown(path) == told


def test_paths_and_urls_are_told_apart() -> None:
    assert [is_url(name) for name in ("s3://b/x", "HTTP://h/x", "/a/x", "a:b/x", "C:/x", "//h/x")] == [True] * 2 + [
        False
    ] * 4
    assert [scheme(name) for name in ("S3://b/x", "/a/x")] == ["s3", ""]
    assert local_path("file:///a/x.tar") == "/a/x.tar"
    assert absolute("https://h/a/../x.tar") == "https://h/a/../x.tar"


def test_a_url_has_components_as_a_path_does() -> None:
    assert components("https://me:secret@host/a/x.tar?token=1") == ["host", "a", "x.tar"]
    assert components("/a/../b/x.tar") == ["", "b", "x.tar"]


def test_messages_of_others_lose_their_secrets() -> None:
    text = "503, message='no', url='https://me:secret@host/x.tar?token=secret' (https://secret@h/y)"
    assert without_secrets(text) == "503, message='no', url='https://host/x.tar' (https://h/y)"
