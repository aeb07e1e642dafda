"""Environment variables that hold secrets are told from those that do not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crow.domain.secret_values import TOKENS, holds_secret, secrets_in

SECRET = {
    "GITHUB_TOKEN": "x1",
    "GH_TOKEN": "x1",
    "AWS_SECRET_ACCESS_KEY": "abc/def+ghi",
    "AWS_ACCESS_KEY_ID": "id",
    "AWS_SESSION_TOKEN": "/begins/with/a/slash",
    "NPM_CONFIG__AUTH": "Zm9v",
    "npm_config_//registry.example/:_authToken": "x",
    "authToken": "x",
    "PGPASSWORD": "pw",
    "MYSQL_PWD": "hunter",
    "DB_PASS": "12",
    "SSHPASS": "a",
    "REDISCLI_AUTH": "a",
    "RESTIC_PASSWORD": "123456",
    "MY_APIKEY": "z",
    "GITHUB_PAT": "z",
    "GPG_PASSPHRASE": "z",
    "CI_JOB_JWT": "z",
    "SLACK_WEBHOOK_URL": "https://hooks.example/x",
    "SENTRY_DSN": "https://public@sentry.example/1",
    "GOOGLE_CREDENTIALS": '{"type": "service_account"}',
    "DATABASE_URL": "postgres://u:pw@h/db",
    "REDIS_URL": "redis://:pw@h",
    "HTTPS_PROXY": "http://u:p@proxy.example:3128",
    "MAVEN_OPTS": "-Xmx1g -Dpassword=hunter2",
    "CONNECTION": "Server=x;Password=abcd;",
    "SERVICE": "https://x.example/?a=1&api_key=abcdef",
    "AUTHORIZATION": "x",
    "HEADER": "Basic bmVzdDpuZXN0bmVzdA==",
    "NETRC": "machine h login u password hunter2",
    "AS_JSON": '{"user": "me", "access_token": "hunter2"}',
    "X_API_KEY_2": "x",
    "ACCESSKEYID": "x",
    "HEROKU_OAUTH": "x",
    "ANYTHING": "ghp_0123456789abcdef",
    "OTHER": "Bearer eyJhbGciOiJI.eyJzdWIiOiIx.abc",
    "DEPLOY": "-----BEGIN OPENSSH PRIVATE KEY-----\nabc\n-----END OPENSSH PRIVATE KEY-----",
}
HARMLESS = {
    "KEYBOARD": "us",
    "MONKEY": "x",
    "TURKEY": "x",
    "KEYMAP": "emacs",
    "TOKENIZERS_PARALLELISM": "false",
    "MAX_TOKENS": "4096",
    "KEYTIMEOUT": "1",
    "USE_AUTH": "true",
    "GIT_AUTHOR_NAME": "A",
    "PWD": "/work",
    "OLDPWD": "secret",
    "PATH": "/usr/bin:/bin",
    "COMPASS": "north",
    "HELP": "give your password twice: a token is optional",
    "BYPASS": "cache",
    "GOPATH": "/go",
    "LS_COLORS": "*.tar=01;31:*.key=00;32",
    "NEXT_PUBLIC_KEY": "abc",
    "STRIPE_PUBLISHABLE_KEY": "abc",
    "HTTP_PROXY": "http://proxy.example:3128",
    "DATABASE_URL": "sqlite:///x.db",
    "GITHUB_TOKEN": "",
    "SSH_AUTH_SOCK": "/exists/agent.1",
    "GOOGLE_APPLICATION_CREDENTIALS": "/exists/key.json",
    "KUBE_TOKEN_FILES": "/exists/a:/exists/b",
}


@pytest.mark.parametrize("name", SECRET)
def test_variables_with_secrets_are_recognised(name: str) -> None:
    assert holds_secret(name, SECRET[name], exists)


@pytest.mark.parametrize("name", HARMLESS)
def test_harmless_variables_are_left_alone(name: str) -> None:
    assert not holds_secret(name, HARMLESS[name], exists)


def exists(path: str) -> bool:
    return path.startswith("/exists/")


@pytest.mark.parametrize(
    ("value", "secrets"),
    [
        ("postgres", []),
        ("password", []),
        ("8080", []),
        ("of-another-0123", ["of-another-0123"]),
        ("postgres://u:S3cret-pw@h/db", ["postgres://u:S3cret-pw@h/db", "S3cret-pw"]),
        ("postgres://u:postgres@h/db", ["postgres://u:postgres@h/db"]),
        (
            "-----BEGIN PRIVATE KEY-----\nMIIabcdefghijklmnopqr\nxyz\n-----END PRIVATE KEY-----",
            ["MIIabcdefghijklmnopqr"],
        ),
        ("a token: ghp_0123456789abcdef", ["a token: ghp_0123456789abcdef", "ghp_0123456789abcdef"]),
    ],
)
def test_only_texts_that_occur_nowhere_by_chance_are_masked(value: str, secrets: list[str]) -> None:
    assert list(secrets_in(value)) == secrets


@given(st.text(max_size=300), st.text(max_size=300))
def test_any_variable_can_be_judged(name: str, value: str) -> None:
    assert holds_secret(name, value, exists) in (True, False)
    assert all(secret in value for secret in secrets_in(value))


@pytest.mark.parametrize("end", ["\n", "\r\n", "\\n", "\\r\\n"])
def test_a_private_key_is_found_with_any_line_ends_and_within_json(end: str) -> None:
    lines = ["MIIEvQIBADANBgkqhkiG9w0BAQEFAASCBKcwggSjAgEAAoIBAQC7VJTUt9Us8cKj"] * 6
    text = end.join(["-----BEGIN PRIVATE KEY-----", *lines, "-----END PRIVATE KEY-----", "after"])
    assert TOKENS.sub("", text) == f"-----BEGIN PRIVATE KEY-----{end}-----END PRIVATE KEY-----{end}after"


@pytest.mark.parametrize(
    "token", ["sk_live_0123456789ab", "rk_test_0123456789ab", "gsk_0123456789ab", "xai-0123456789ab"]
)
def test_keys_of_services_are_found_by_their_form(token: str) -> None:
    assert TOKENS.sub("", f"key {token}.") == "key ."
