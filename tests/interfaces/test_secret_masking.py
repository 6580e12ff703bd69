from __future__ import annotations

import ast
import io
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from scaleflow.interfaces import secret_masking
from scaleflow.interfaces.events import ArtifactWritten, Note
from scaleflow.interfaces.secret_masking import (
    MASK,
    MaskedStream,
    find_environment_secrets,
    find_secrets,
    find_typed_secrets,
    is_secret_file,
    mask_code,
    mask_override,
    mask_secrets,
    remember_secrets,
)
from scaleflow.runs import EventReader, EventWriter


@pytest.mark.parametrize(
    "key",
    [
        "password",
        "passwd",
        "token",
        "tokens",
        "secret",
        "credentials",
        "api_key",
        "apikey",
        "API_KEY",
        "hf_token",
        "aws_secret_access_key",
        "private_key",
        "client_secret",
        "dbPassword",
        "authToken",
        "passphrase",
        "account_key",
        "connection_string",
        "secret_key",
        "db.password",
    ],
)
def test_a_value_is_masked_where_its_key_names_a_secret(key: str) -> None:
    assert mask_secrets({key: "sesame"}) == {key: MASK}


@pytest.mark.parametrize(
    "key",
    [
        *("tokenizer", "keyboard", "secretary", "passwords_seen", "monitor", "key", "units", "token_length", "key_dim"),
        *("oov_token", "mask_token", "special_tokens", "primary_key", "sort_key", "secrets_found"),
    ],
)
def test_a_value_is_kept_where_its_key_only_looks_like_one(key: str) -> None:
    assert mask_secrets({key: "value"}) == {key: "value"}


@pytest.mark.parametrize(
    ("uri", "shown"),
    [
        ("http://me:sesame@host:5000/x", f"http://{MASK}@host:5000/x"),
        ("https://sesame@host", f"https://{MASK}@host"),
        ("postgresql+psycopg2://me:sesame@host/db", f"postgresql+psycopg2://{MASK}@host/db"),
        ("HTTP://me:sesame@host", f"HTTP://{MASK}@host"),
        ("http://me:p@sesame@host", f"http://{MASK}@host"),
        ("http://host:5000/x", "http://host:5000/x"),
        ("s3://bucket/folder@v2", "s3://bucket/folder@v2"),
        ("sqlite:////home/me@work/mlflow.db", "sqlite:////home/me@work/mlflow.db"),
        ("me@example.org", "me@example.org"),
        ("from http://a:sesame@x to http://b:sesame@y", f"from http://{MASK}@x to http://{MASK}@y"),
    ],
)
def test_credentials_in_a_uri_are_masked_whatever_its_key(uri: str, shown: str) -> None:
    assert mask_secrets(uri) == shown
    assert mask_secrets({"note": uri}) == {"note": shown}


def test_secrets_are_masked_at_any_depth_and_the_rest_is_kept() -> None:
    config = {
        "tracking": {"uri": "http://me:sesame@h", "tags": {"token": "sesame", "team": "vision"}},
        "sources": [{"password": "sesame"}, "http://me:sesame@h"],
        "pair": ("a", 1),
        "epochs": 3,
        "limit": None,
    }
    assert mask_secrets(config) == {
        "tracking": {"uri": f"http://{MASK}@h", "tags": {"token": MASK, "team": "vision"}},
        "sources": [{"password": MASK}, f"http://{MASK}@h"],
        "pair": ["a", 1],
        "epochs": 3,
        "limit": None,
    }


def test_values_under_a_secret_key_are_masked_in_a_list_too() -> None:
    assert mask_secrets({"tokens": ["a", "b"]}) == {"tokens": [MASK, MASK]}


@pytest.mark.parametrize("nothing", [None, ""])
def test_a_secret_that_is_not_set_shows_as_not_set(nothing: object) -> None:
    assert mask_secrets({"password": nothing}) == {"password": nothing}


def test_the_config_itself_is_left_as_it_was() -> None:
    config = {"a": {"password": "sesame"}, "b": ["http://me:sesame@h"]}
    mask_secrets(config)
    assert config == {"a": {"password": "sesame"}, "b": ["http://me:sesame@h"]}


@pytest.mark.parametrize(
    ("override", "shown"),
    [
        ("model.units=64", "model.units=64"),
        ("tracking.uri=http://me:sesame@h/?a=b", f"tracking.uri=http://{MASK}@h/?a=b"),
        ("+dataset.password=sesame", f"+dataset.password={MASK}"),
        ("++token=sesame", f"++token={MASK}"),
        ("+dataset={password: sesame, n: 1}", f"+dataset={{password: {MASK}, n: 1}}"),
        ("~model.units", "~model.units"),
    ],
)
def test_an_override_is_masked_as_the_config_would_be(override: str, shown: str) -> None:
    assert mask_override(override) == shown


@pytest.mark.parametrize(("key", "value"), [("max_tokens", 512), ("tokens", 20000), ("num_tokens", "512")])
def test_a_number_of_tokens_is_none(key: str, value: object) -> None:
    assert mask_secrets({key: value}) == {key: value}
    assert mask_override(f"model.{key}={value}") == f"model.{key}={value}"


def test_a_number_is_a_secret_under_a_key_that_holds_nothing_else() -> None:
    assert mask_secrets({"password": 1234, "api_key": 99, "key": "a1b2c3d4e5f6g7h8i9j0k"}) == dict.fromkeys(
        ("password", "api_key", "key"), MASK
    )


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("hf_abcdefghijklmnopqrstuvwx", MASK),
        ("token ghp_0123456789abcdefghij0123456789abcdef here", f"token {MASK} here"),
        ("a\n-----BEGIN RSA PRIVATE KEY-----\nMII\nx\n-----END RSA PRIVATE KEY-----\nb", f"a\n{MASK}\nb"),
        ("Authorization: Bearer abcdefgh12345", f"Authorization: Bearer {MASK}"),
        ("https://h/x?a=1&sig=abc%2F&token=def#c", f"https://h/x?a=1&sig={MASK}&token={MASK}"),
        ("host=h password=sesame dbname=d", f"host=h password={MASK} dbname=d"),
        ("db.password=sesame: there is no such key", f"db.password={MASK}: there is no such key"),
        ("{'password': 'a, b', \"token\": \"x\", 'n': 1}", f"{{'password': {MASK}, \"token\": {MASK}, 'n': 1}}"),
        ("[{token: x}]", f"[{{token: {MASK}}}]"),
        ("tracking.tags.token=5: expected text", "tracking.tags.token=5: expected text"),
        ("key=value", "key=value"),
        ("password", "password"),
    ],
)
def test_a_secret_in_a_text_is_masked_by_its_looks_or_its_place(text: str, shown: str) -> None:
    assert mask_secrets(text) == shown


def test_where_in_the_environment_a_secret_is_is_kept_and_its_default_is_not() -> None:
    config = {"a": "${oc.env:HF_TOKEN}", "password": "${secret:DSN}", "b": "${oc.env:HF_TOKEN,sesame}"}
    assert mask_secrets(config) == {**config, "b": "${oc.env:HF_TOKEN,****}"}
    assert mask_secrets({"password": "${oc.env:X,sesame}"}) == {"password": MASK}
    assert mask_secrets("${oc.env:HOME,/root}") == "${oc.env:HOME,/root}"


def test_the_secrets_of_a_config_are_those_of_its_keys_its_environment_and_its_uris(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_TOKEN", "from-a-token")
    monkeypatch.setenv("DSN", "marked-so")
    raw = {
        "a": "${oc.env:HF_TOKEN}",
        "b": "x/${secret:DSN}/y",
        "c": {"password": "by-its-key", "tokens": ["one-of-two", 7]},
        "d": "http://me:in-a-uri@h",
        "e": ["${oc.env:HOME}", "plain"],
    }
    plain = {**raw, "a": "from-a-token", "b": "x/marked-so/y", "e": ["/root", "plain"]}
    assert sorted(find_secrets(raw, plain)) == ["by-its-key", "from-a-token", "in-a-uri", "marked-so", "one-of-two"]
    typed = ["a.password='x, y'", "+b={token: in-braces, n: 1}", "c=http://u:typed-in-a-uri@h", "m.max_tokens=5"]
    assert {"'x, y'", "in-braces", "typed-in-a-uri"} <= set(find_typed_secrets(typed))
    assert "from-a-token" in find_environment_secrets()


@pytest.fixture
def forgetting(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(secret_masking, "_known", set())
    secret_masking._compile_known.cache_clear()
    yield
    secret_masking._compile_known.cache_clear()


def test_a_known_secret_is_masked_wherever_and_however_it_turns_up(forgetting: None, tmp_path: Path) -> None:
    remember_secrets(['se"same', "first line of it\nsecond line of it", "a b/c", "512", "abc"])
    texts = ['<se"same>', json.dumps('se"same'), repr("first line of it\nsecond line of it"), "a%20b%2Fc", "a%20b/c"]
    assert [mask_secrets(text) for text in texts] == [f"<{MASK}>", f'"{MASK}"', f"'{MASK}'", MASK, MASK]
    assert mask_secrets("  second line of it") == f"  {MASK}"
    assert mask_secrets("512 abc") == "512 abc"  # too short, or a number: masked by their keys alone
    stream = io.StringIO()
    print("it is", "a b/c", file=MaskedStream(stream))  # type: ignore[call-overload]
    assert stream.getvalue() == f"it is {MASK}\n"
    write = EventWriter(tmp_path / "events.jsonl")
    note, artifact = Note("with a b/c"), ArtifactWritten("/x/a b/c")
    write(note)
    write(artifact)
    assert list(EventReader(tmp_path / "events.jsonl").read()) == [replace(note, text=f"with {MASK}"), artifact]


PYTHON = '''
API_KEY = "planted-1"
password: str = 'planted-2'
options = {
    "password": "planted-3",
    'db_password': 'planted-4',
}
os.environ["HF_TOKEN"] = "planted-5"
os.environ.setdefault("HF_TOKEN", "planted-6")
connect(password="planted-7", user="bob")
secret = """planted-8
of two lines planted-9"""
PRIVATE = """-----BEGIN RSA PRIVATE KEY-----
planted-10
-----END RSA PRIVATE KEY-----"""
uri = "http://me:planted-11@host/x"
headers = {"Authorization": "Bearer planted-12-abcdef"}
PASSWORD = f"planted-13{x}"
if password == "planted-14":
    pass
passphrase = "it\\'s planted-15"
'''

NO_SECRETS = """
token = "the quick fox"
max_tokens = 5
columns = ["token", "label"]
password = read_password()
pad_token = "[PAD]"
if token == "<unk>": pass
api_key = ""
key = "column"
def build(inputs, outputs, token_dim: int = 4): ...
"""


def test_code_keeps_its_lines_and_can_be_parsed() -> None:
    masked = mask_code(PYTHON, "nets.py")
    assert "planted" not in masked
    assert masked.count("****") >= 14
    assert masked.count("\n") == PYTHON.count("\n")
    assert 'user="bob"' in masked
    ast.parse(masked)
    assert mask_code(NO_SECRETS, "nets.py") == NO_SECRETS


def test_a_notebook_s_and_a_setting_s_secrets_are_masked() -> None:
    assert mask_code('"source": ["api_key = \\"planted-1\\"\\n"]', "a.ipynb") == (
        '"source": ["api_key = \\"****\\"\\n"]'
    )
    settings = "db:\n  password: planted-1\n  token: ${oc.env:TOKEN}\n- api_key: planted-2   # why\nunits: 5\n"
    assert mask_code(settings, "conf/a.yaml") == (
        "db:\n  password: ****\n  token: ${oc.env:TOKEN}\n- api_key: ****   # why\nunits: 5\n"
    )
    assert mask_code("password: planted\n", "nets.py") == "password: planted\n", "no string of Python's"
    assert mask_code("password = planted-1\ntoken=planted-2\n", "a.ini") == "password = ****\ntoken=****\n"


@pytest.mark.parametrize("path", [".env", "a/prod.env", ".env.local", "keys/id_rsa", "x.PEM", "secrets.yaml"])
def test_a_file_of_secrets_is_known_by_its_name(path: str) -> None:
    assert is_secret_file(path)


@pytest.mark.parametrize("path", ["nets.py", "secrets.py", "environment.yaml", "monkey.png", "keys/readme.md"])
def test_other_files_are_kept(path: str) -> None:
    assert not is_secret_file(path)
