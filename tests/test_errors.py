"""Secrets in texts: logs, messages, banners."""

from __future__ import annotations

import time

import pytest

from dtrain.errors import HIDDEN, as_config_error, names_secret, without_secrets_in
from dtrain.errors import ConfigError as Wrong


@pytest.mark.parametrize(
    "key",
    [
        *("auth", "Authorization", "proxy-authorization", "http_auth", "api_key", "apikey", "x-api-key", "password"),
        *("passwd", "passphrase", "client_secret", "credentials", "token", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY"),
        *("HF_TOKEN", "cookie", "private_key", "account_key", "AWS_SESSION_TOKEN"),
    ],
)
def test_names_of_secrets(key: str) -> None:
    assert names_secret(key)


@pytest.mark.parametrize(
    "key", ["tokens", "tokens_per_batch", "author", "key", "keys", "record_keys", "auth_url", "SSH_AUTH_SOCK"]
)
def test_names_of_other_things(key: str) -> None:
    assert not names_secret(key)


@pytest.mark.parametrize(
    ("text", "hidden"),
    [
        ("https://me:hunter2@host/a.tar?sig=hunter3&x=1", f"https://{HIDDEN}@host/a.tar?sig={HIDDEN}&x=1"),
        ("+data.storage.token=hunter2 x=1", f"+data.storage.token={HIDDEN} x=1"),
        ("connect(password='hunter2', port=5)", f"connect(password='{HIDDEN}', port=5)"),
        ("{'Authorization': 'Bearer hunter2hunter2', 'a': 1}", f"{{'Authorization': 'Bearer {HIDDEN}', 'a': 1}}"),
        ('{"api_key": "hunter2", "b": 1}', f'{{"api_key": "{HIDDEN}", "b": 1}}'),
        ("Authorization: Basic aHVudGVyMg==\nnext", f"Authorization: Basic {HIDDEN}\nnext"),
        ("the header was Bearer hunter2hunter2.", f"the header was Bearer {HIDDEN}"),
    ],
)
def test_a_secret_in_a_text_is_hidden_by_the_name_before_it(text: str, hidden: str) -> None:
    assert without_secrets_in(text) == hidden


@pytest.mark.parametrize(
    "text",
    [
        "model.class_token=true task.pad_token=-1 x.token=null",
        "set '+data.storage.token=${oc.env:NAME}'",
        f"token={HIDDEN}",
        "the token: 'abc' is unknown",
        "token 17 of 20; tokens=rows; the author=me",
        "Basic training is over",
    ],
)
def test_other_texts_stay_as_they_are(text: str) -> None:
    assert without_secrets_in(text) == text


def test_a_long_word_takes_no_longer_than_other_text() -> None:
    word = "key_" * 100_000  # as base64 in a message: minutes, if the time grew with the square
    started = time.process_time()
    assert without_secrets_in(f"{word}token=hunter2") == f"{word}token={HIDDEN}"
    assert time.process_time() - started < 5


def test_a_secret_of_the_environment_is_hidden_wherever_it_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_STORAGE_TOKEN", "hunter2-hunter2")
    monkeypatch.setenv("MY_SHORT_TOKEN", "rows")  # a word of other texts
    monkeypatch.setenv("MY_NAME", "somebody")
    assert (
        without_secrets_in("no answer for hunter2-hunter2, rows, somebody") == f"no answer for {HIDDEN}, rows, somebody"
    )


def test_an_error_names_its_key_once() -> None:
    with pytest.raises(Wrong, match=r"^data: wrong$"), as_config_error("data"):
        raise ValueError("wrong")
    with pytest.raises(Wrong, match=r"^data.x: wrong$"), as_config_error("data"):
        raise ValueError("data.x: wrong")
