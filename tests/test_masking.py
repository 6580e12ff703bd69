import pytest

from scaleflow.masking import MASK, masked, masked_override


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
        "secret_key",
        "db.password",
    ],
)
def test_a_value_is_masked_where_its_key_names_a_secret(key: str) -> None:
    assert masked({key: "sesame"}) == {key: MASK}


@pytest.mark.parametrize("key", ["tokenizer", "keyboard", "secretary", "passwords_seen", "monitor", "key", "units"])
def test_a_value_is_kept_where_its_key_only_looks_like_one(key: str) -> None:
    assert masked({key: "value"}) == {key: "value"}


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
    assert masked(uri) == shown
    assert masked({"note": uri}) == {"note": shown}


def test_secrets_are_masked_at_any_depth_and_the_rest_is_kept() -> None:
    config = {
        "tracking": {"uri": "http://me:sesame@h", "tags": {"token": "sesame", "team": "vision"}},
        "sources": [{"password": "sesame"}, "http://me:sesame@h"],
        "pair": ("a", 1),
        "epochs": 3,
        "limit": None,
    }
    assert masked(config) == {
        "tracking": {"uri": f"http://{MASK}@h", "tags": {"token": MASK, "team": "vision"}},
        "sources": [{"password": MASK}, f"http://{MASK}@h"],
        "pair": ["a", 1],
        "epochs": 3,
        "limit": None,
    }


def test_what_is_under_a_secret_key_is_masked_in_a_list_too() -> None:
    assert masked({"tokens": ["a", "b"]}) == {"tokens": [MASK, MASK]}


@pytest.mark.parametrize("nothing", [None, ""])
def test_a_secret_that_is_not_set_shows_as_not_set(nothing: object) -> None:
    assert masked({"password": nothing}) == {"password": nothing}


def test_the_config_itself_is_left_as_it_was() -> None:
    config = {"a": {"password": "sesame"}, "b": ["http://me:sesame@h"]}
    masked(config)
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
    assert masked_override(override) == shown
