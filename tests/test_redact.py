"""What must never reach the disk does not: secrets by name and shape, and what `redact=` names."""

import pytest
from journals import begin, reader, rows

import spool
from spool.redact import MASK, is_secret_name, mask_text, mask_tree

SECRETS = [
    "hf_token",
    "hf_token_2",
    "HF_TOKEN (2)",
    "api_key",
    "apiKey",
    "AWS_SECRET_ACCESS_KEY",
    "password",
    "db.password",
    "auth-token",
    "Authorization",
    "WANDB_API_KEY",
]
HARMLESS = [
    "max_tokens",
    "tokenizer",
    "token",
    "n_tokens",
    "key",
    "keys",
    "monkey",
    "pass_rate",
    "author",
    "data.train_files",
]


@pytest.mark.parametrize("name", SECRETS)
def test_a_secret_name_is_known(name):
    assert is_secret_name(name)


@pytest.mark.parametrize("name", HARMLESS)
def test_a_harmless_name_is_left_alone(name):
    assert not is_secret_name(name)


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("hf_" + "a" * 24, MASK),
        ("use sk-" + "b" * 32 + " here", f"use {MASK} here"),
        ("postgresql://me:hunter2@db:5432/x", f"postgresql://me:{MASK}@db:5432/x"),
        ("--api-key=abcdef", f"--api-key={MASK}"),
        ("password: 'hunter22'", f"password: '{MASK}'"),
        ("lr=0.001 max_tokens=512", "lr=0.001 max_tokens=512"),
        ("ghp_" + "C" * 36, MASK),
        ("-----BEGIN RSA PRIVATE KEY-----\nabc", MASK),
    ],
)
def test_what_looks_like_a_secret_is_masked_in_free_text(text, masked):
    assert mask_text(text) == masked


def test_a_tree_is_masked_by_name_and_by_shape():
    tree = {"trainer": {"hf_token": "abc", "lr": 0.1, "urls": ["http://u:p@h/"]}, "password": "", "max_tokens": 5}
    assert mask_tree(tree) == {
        "trainer": {"hf_token": MASK, "lr": 0.1, "urls": [f"http://u:{MASK}@h/"]},
        "password": "",
        "max_tokens": 5,
    }


def bytes_on_disk(run):
    return b"".join(path.read_bytes() for path in run.path.rglob("*") if path.is_file())


def log_everything(run, secret):
    run.log({"note": f"a {secret} b", "decoy": 1.5, "object": [secret]}, step=1)
    run.log_generations(step=1, rows=[{"input": secret, "output": [secret], "extra": {"k": secret}, "label": secret}])
    with run.span(f"name {secret}", inputs={"q": secret}, attributes={"k": secret}) as span:
        span.outputs = secret
        span.message = secret
    with pytest.raises(ValueError, match=secret), run.span("fails"):
        raise ValueError(secret)
    run.tag(who=secret)


@pytest.mark.parametrize(
    "redact",
    [["4111-[0-9-]+"], "4111-[0-9-]+", lambda text: text.replace("4111-1111", MASK)],
    ids=["patterns", "pattern", "function"],
)
def test_what_redact_names_never_reaches_the_disk(tmp_path, redact):
    run = begin(tmp_path, redact=redact, config={"card": "4111-1111"})
    log_everything(run, "4111-1111")
    run.finish()
    content = bytes_on_disk(run)
    assert b"4111-1111" not in content
    assert rows(run)[-1]["exact"] == f"a {MASK} b" or MASK in str(rows(run))


def test_redact_comes_from_the_environment_too(tmp_path, monkeypatch):
    monkeypatch.setenv("SPOOL_REDACT", "a+b\n1[38][0-9]{9}")
    run = begin(tmp_path)
    run.log({"note": "aab 13912345678 ok"})
    assert [row["exact"] for row in rows(run)] == [f"{MASK} {MASK} ok"]


def test_a_pattern_never_hits_our_own_ids_and_hashes(tmp_path):
    (tmp_path / "file.txt").write_text("x")
    run = begin(tmp_path, redact=["[0-9a-f]+", "finished"])
    with run.span("a"), run.span("b"):
        pass
    run.save(tmp_path / "file.txt")
    run.log_input(tmp_path / "file.txt")
    run.finish()
    spans = rows(run, "spans")
    assert [len(row["span_id"]) for row in spans] == [16, 16]
    assert spans[1]["parent_id"] == spans[0]["span_id"]
    bodies = [row["body"] for row in rows(run, "events") if row["kind"] in ("file", "input")]
    assert all("2d711642b726b04401627ca9fbac32f5c8530fb1903cc4db02258717921a4881" in body for body in bodies)
    assert reader(run).status().state == "finished"


@pytest.mark.parametrize("redact", [lambda _text: 1 / 0, lambda _text: None], ids=["raises", "no text"])
def test_a_failing_redact_masks_the_whole_text_and_raises_nothing(tmp_path, redact):
    run = begin(tmp_path, redact=redact)
    log_everything(run, "hunter2")
    run.finish()
    assert b"hunter2" not in bytes_on_disk(run)


def test_what_was_masked_is_counted(tmp_path):
    run = begin(tmp_path, redact=["x"])
    run.log({"note": "axbx"})
    run.finish()
    finish = rows(run, "events")[-1]["body"]
    assert '"masked":' in finish


def test_a_pattern_that_is_none_is_refused_in_one_sentence(tmp_path):
    with pytest.raises(spool.SpoolError, match=r"redact pattern '\(' is not a regular expression"):
        begin(tmp_path, redact=["("])
    assert not (tmp_path / "spool").exists()


def test_secrets_in_config_and_command_line_never_reach_the_disk(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["train.py", "--api-key", "abcdef123", "hf_token=xyzxyz"])
    run = begin(tmp_path, config={"env": {"WANDB_API_KEY": "0123456789abcdef"}, "lr": 0.1})
    content = bytes_on_disk(run)
    for secret in (b"abcdef123", b"xyzxyz", b"0123456789abcdef"):
        assert secret not in content
    assert reader(run).config == {"env": {"WANDB_API_KEY": MASK}, "lr": 0.1}
