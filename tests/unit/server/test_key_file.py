"""The file of --keys: what it may hold, how it is edited, and when it is read again."""

import os
import time
from pathlib import Path

import pytest

from quadriga import disk
from quadriga.errors import ConfigError
from quadriga.server import tenants
from quadriga.server.cli.main import main
from quadriga.server.tenants import (
    TenantFile,
    TenantIndex,
    check_key_file,
    hash_of_key,
    parse_tenants,
    read_tenants,
)

KEY = hash_of_key(b"secret")
FULL = f"""
- name: alice            # a comment
  key: {KEY}
  weight: 2.5
  priority: [-10, 10]
  max_open_requests: 4
  requests_per_minute: 60
  tokens_per_minute: 10000
  models: [tiny]
  sub_tenants: true
  cache: own
- name: bob
  curve: bob
"""
PATH = Path("keys.yaml")


def test_every_field_is_read_and_a_key_is_found_by_its_hash() -> None:
    alice, bob = parse_tenants(FULL, PATH)
    assert (alice.weight, alice.priority, alice.max_open_requests) == (2.5, (-10, 10), 4)
    assert (alice.requests_per_minute, alice.tokens_per_minute) == (60, 10000)
    assert (alice.models, alice.sub_tenants, alice.cache) == (("tiny",), True, "own")
    index = TenantIndex([alice, bob])
    assert index.with_key(b"secret") is alice
    assert index.with_key(b"Secret") is index.with_key(b"") is None
    assert index.named("alice/carol") is alice
    assert index.named("al") is None
    assert index.by_curve["bob"] is bob


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: b", "keys.yaml must be a list of tenants"),
        ("- alice", "keys.yaml: entry 1 is 'alice': it must be a map"),
        ("- {name: [}", "keys.yaml is no YAML"),
        (f"- {{name: a b, key: '{KEY}'}}", "entry 1 ('a b'): name is 'a b': it must be 1 to 64"),
        (f"- {{name: 7, key: '{KEY}'}}", "entry 1: name is 7: it must be 1 to 64"),
        (f"- {{key: '{KEY}'}}", "entry 1 has no name: add `name: NAME`"),
        ("- {name: a}", "entry 1 ('a') has neither key nor curve"),
        ("- {name: a, key: secret}", "entry 1 ('a'): key is not a hash: it must be sha256: and"),
        ("- {name: a, curve: a, weight: 0}", "weight is 0: it must be a number from"),
        ("- {name: a, curve: a, weight: .nan}", "weight is nan: it must be a number from"),
        ("- {name: a, curve: a, weight: true}", "weight is True: it must be a number from"),
        ("- {name: a, curve: a, priority: [5, 1]}", "priority is [5, 1]: it must be [smallest"),
        ("- {name: a, curve: a, priority: 5}", "priority is 5: it must be [smallest"),
        ("- {name: a, curve: a, max_open_requests: 0}", "max_open_requests is 0: it must be"),
        ("- {name: a, curve: a, requests_per_minute: 1.5}", "is 1.5: it must be a number from 1"),
        ("- {name: a, curve: a, models: tiny}", "models is 'tiny': it must be a list of names"),
        ("- {name: a, curve: a, sub_tenants: 1}", "sub_tenants is 1: it must be true or false"),
        ("- {name: a, curve: a, cache: none}", "cache is 'none': it must be shared or own"),
        ("- {name: a, curve: a, wieght: 1}", "there is no field 'wieght': the fields are name"),
        ("- {name: a, curve: a}\n- {name: a, curve: b}", "entries 1 and 2 have the same name 'a'"),
        (
            f"- {{name: a, key: '{KEY}'}}\n- {{name: b, key: '{KEY}'}}",
            "entries 1 and 2 have the same key of 'b'",
        ),
        ("- &a [*a]", "keys.yaml"),
        ("[" * 5000, "keys.yaml is no YAML"),
    ],
)
def test_an_error_names_file_entry_field_value_and_remedy(text: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_tenants(text, PATH)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_changed_file_is_read_again_and_an_error_keeps_the_old_tenants(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, now = tmp_path / "keys.yaml", 0.0
    path.write_text(FULL)
    file = TenantFile(path, lambda: now)
    path.write_text(FULL.replace("2.5", "3.25"))
    assert not file.has_changed()  # it looks at times only
    now = 1.0
    assert file.has_changed()
    file.reload()
    assert file.index.by_name["alice"].weight == 3.25
    for broken in ("- {name: 1}", None):
        path.unlink() if broken is None else path.write_text(broken)
        for _ in range(3):
            now += 1.0
            if file.has_changed():
                file.reload()
        assert file.index.by_name["alice"].weight == 3.25
    assert [r.message for r in caplog.records] == [
        "the tenants stay as they were: " + text
        for text in (
            f"{path}: entry 1: name is 1: it must be 1 to 64 letters, digits and ._:@-, in quotes"
            " if YAML reads it as a number",
            f"--keys {path} cannot be read: No such file or directory",
        )
    ]


def test_a_file_of_another_user_is_refused_with_the_way_to_write_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(_: Path) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(disk, "read_text", denied)
    with pytest.raises(ConfigError, match=r"cannot be read by this process's user.*runuser -u"):
        read_tenants(tmp_path / "keys.yaml")


@pytest.mark.parametrize("text", ["", "\n", FULL[:60], FULL[:-6], "\x00"])
def test_a_file_that_a_write_has_cut_locks_no_tenant_out(tmp_path: Path, text: str) -> None:
    path, now = tmp_path / "keys.yaml", 0.0
    path.write_text(FULL)
    file = TenantFile(path, lambda: now)
    path.write_text(text)
    for whole in (False, True):
        now += 1.0
        if whole:
            path.write_text(FULL)
        if file.has_changed():
            file.reload()
        assert file.has_failed is not whole
        assert file.index.with_key(b"secret") is not None
        assert file.index.by_name["alice"].weight == 2.5


def test_a_file_that_is_being_written_is_read_when_it_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, now = tmp_path / "keys.yaml", 0.0
    path.write_text(FULL)
    file = TenantFile(path, lambda: now)
    entries = FULL.split("- name: bob")
    path.write_text(entries[0])  # a good file, without bob
    monkeypatch.setattr(time, "sleep", lambda _: path.write_text(FULL + "\n"))
    now = 1.0
    assert file.has_changed()
    file.reload()
    assert set(file.index.by_name) == {"alice", "bob"}


def test_an_entry_that_is_gone_for_good_is_refused_within_a_second(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(FULL)
    file = TenantFile(path)
    path.write_text("- name: bob\n  curve: bob\n")
    assert tenants.CHECK_INTERVAL_S + tenants.MAX_SETTLE_S < 1.0
    while file.index.with_key(b"secret") is not None:
        if file.has_changed():
            file.reload()
    path.write_text("[]\n")
    while file.index.by_name:
        if file.has_changed():
            file.reload()


def test_a_process_that_starts_beside_a_broken_file_has_the_last_good_tenants(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, directory = tmp_path / "keys.yaml", tmp_path / "run"
    directory.mkdir()
    path.write_text(FULL)
    TenantFile(path, directory=directory)
    path.write_text("- name: ali")
    with pytest.raises(ConfigError):
        TenantFile(path)
    file = TenantFile(path, directory=directory)
    assert file.has_failed and set(file.index.by_name) == {"alice", "bob"}
    assert "the tenants stay as they were" in caplog.text
    assert {child.stat().st_mode & 0o77 for child in directory.iterdir()} == {0}


def test_the_command_adds_lists_and_removes_keys(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "keys.yaml"
    keys = ["--keys", str(path)]
    assert main(["keys", "add", "alice", *keys, "--weight", "2", "--priority", "-5", "5"]) == 0
    key = capsys.readouterr().out.split()[-1]
    path.write_text("# ours\n" + path.read_text() + "\n# the next one\n")
    assert main(["keys", "add", "bob", *keys, "--requests-per-minute", "9", "--cache", "own"]) == 0
    index = TenantIndex(read_tenants(path))
    alice = index.with_key(key.encode())
    assert alice is not None and (alice.name, alice.weight, alice.priority) == ("alice", 2, (-5, 5))
    assert key not in path.read_text()
    assert check_key_file(path) == ""
    path.chmod(0o644)
    assert f"chmod 600 {path}" in check_key_file(path)
    capsys.readouterr()
    assert main(["keys", "list", *keys]) == 0
    assert capsys.readouterr().out == (
        "alice · weight 2.0 · priority -5 5\nbob · requests_per_minute 9 · cache own\n"
    )
    assert main(["keys", "add", "bob", *keys]) == 1
    assert main(["keys", "remove", "alice", *keys]) == 0
    assert [tenant.name for tenant in read_tenants(path)] == ["bob"]
    assert path.read_text().startswith("# ours\n")
    assert main(["keys", "remove", "bob", *keys]) == 0
    assert read_tenants(path) == []
    assert main(["keys", "add", "carol", *keys]) == 0
    assert main(["keys", "remove", "dora", *keys]) == 1
    assert os.listdir(tmp_path) == ["keys.yaml"]


def test_a_wrong_value_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(FULL)
    assert main(["keys", "add", "eve", "--keys", str(path), "--weight", "-1"]) == 1
    assert main(["keys", "add", "a b", "--keys", str(path)]) == 1
    assert path.read_text() == FULL
