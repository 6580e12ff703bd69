"""Secrets in code and in files of settings are masked, and the rest stays as it is."""

from __future__ import annotations

import ast

import pytest

from scaleflow.interfaces.code_masking import is_secret_file, mask_code

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
