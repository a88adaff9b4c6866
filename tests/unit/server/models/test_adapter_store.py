"""The list of a model's adapters, which processes share, and the copies of their files."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from quadriga.errors import ConfigError, InvalidRequest
from quadriga.server.config.engine_args import ModelArgs
from quadriga.server.models.adapters.content import adapter_id
from quadriga.server.models.adapters.store import AdapterEntry, AdapterStore
from quadriga.wire.adapter import AdapterRef

PLACE = "base_model.model.model.layers.0.self_attn.q_proj"


def write_adapter(path: Path, seed: int = 0, rank: int = 2) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(seed)
    tensors = {
        f"{PLACE}.lora_A.weight": generator.standard_normal((rank, 8), np.float32),
        f"{PLACE}.lora_B.weight": generator.standard_normal((8, rank), np.float32),
    }
    save_file(tensors, path / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": 4, "target_modules": ["q_proj"]}
    (path / "adapter_config.json").write_text(json.dumps(settings))
    return path


def store_of(tmp_path: Path, max_loras: int = 3, run: str = "run", **flags: Any) -> AdapterStore:
    args = ModelArgs(**{"enable_lora": True, **flags})
    return AdapterStore(tmp_path / run, tmp_path / "copies", args, max_loras)


def copies(tmp_path: Path) -> set[str]:
    return {path.name for path in (tmp_path / "copies").iterdir()}


def make_old(tmp_path: Path) -> None:
    for name in copies(tmp_path):
        os.utime(tmp_path / "copies" / name, (1.0, 1.0))


def test_what_one_process_loads_another_one_finds(tmp_path: Path) -> None:
    first, second = store_of(tmp_path), store_of(tmp_path)
    assert second.find("a") is None
    entry = first.load("a", str(write_adapter(tmp_path / "a")))
    assert second.find("a") == second.require("a") == entry
    assert entry.rank == 2
    second.unload("a")
    with pytest.raises(InvalidRequest, match="there is no adapter 'a'"):
        first.require("a")


def test_the_copy_stays_as_it_was_where_the_files_change(tmp_path: Path) -> None:
    store, source = store_of(tmp_path), write_adapter(tmp_path / "a")
    before = store.load("a", str(source))
    kept = (store.files(before.ref) / "adapter_model.safetensors").read_bytes()
    write_adapter(source, seed=1)
    with pytest.raises(InvalidRequest, match="load_inplace"):
        store.load("a", str(source))
    after = store.load("a", str(source), replace=True)
    assert after.id != before.id
    assert (store.files(before.ref) / "adapter_model.safetensors").read_bytes() == kept
    assert store.load("a", str(source)) == after  # the same content again
    store.put_back("a", before)
    assert store.require("a") == before


def test_an_adapter_without_a_copy_is_read_where_it_came_from(tmp_path: Path) -> None:
    source = write_adapter(tmp_path / "a")
    assert store_of(tmp_path).files(AdapterRef("unknown", "a", str(source))) == source


def test_copies_that_neither_a_name_nor_a_request_needs_are_removed(tmp_path: Path) -> None:
    store = store_of(tmp_path)
    named, used, free = (
        store.load(name, str(write_adapter(tmp_path / name, seed)))
        for seed, name in enumerate(("named", "used", "free"))
    )
    store.unload("used")
    store.unload("free")
    assert store.sweep({used.id}, 0) == []  # they are too young
    make_old(tmp_path)
    assert store.sweep({used.id}, 0) == [free.id]
    assert copies(tmp_path) == {named.id, used.id}


def test_adapters_of_the_directory_are_loaded_by_name_and_bounded_in_number(tmp_path: Path) -> None:
    for seed in range(4):
        write_adapter(tmp_path / "all" / f"a{seed}", seed)
    store = store_of(tmp_path, enable_lora=False, lora_dir=str(tmp_path / "all"))
    assert store.find("a1") == AdapterEntry(
        name="a1", path=str(tmp_path / "all" / "a1"), is_found=True
    )
    assert [entry.name for entry in store.all()] == ["a0", "a1", "a2", "a3"] and not store.entries
    entries = [store.load_found(f"a{seed}") for seed in range(4)]
    assert [store.load_found(f"a{seed}") for seed in range(4)] == entries
    make_old(tmp_path)
    removed = store.sweep({entries[0].id}, 1)
    assert set(removed) == {entries[1].id, entries[2].id}
    assert set(store.entries) == {"a0", "a3"}
    for name in ("../a0", "/a0", ".", "", "x" * 300):
        assert store.find(name) is None


def test_the_adapters_of_a_flag_are_loaded_once_a_run(tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "a")
    store = store_of(tmp_path, enable_lora=False, lora_modules=f"a={path},b={path}")
    store.load_modules()
    assert set(store.entries) == {"a", "b"} and len(copies(tmp_path)) == 1
    store.unload("b")
    store.load_modules()  # of a frontend that takes the place of another one
    assert set(store.entries) == {"a"}


def test_a_flag_that_names_no_adapter_is_refused(tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "none", ignore_errors=True)
    store = store_of(tmp_path, lora_modules=f"a={tmp_path / 'none'}")
    with pytest.raises(ConfigError, match="lora-modules a="):
        store.load_modules()
    for value in ("a", "=x", "a=", f"a={tmp_path},a={tmp_path}", '{"name": "a"}', "[1", "[1]"):
        with pytest.raises(ConfigError, match=r"lora_modules (has|is)"):
            ModelArgs(lora_modules=value).validate()


def test_a_rank_above_the_flag_is_refused(tmp_path: Path) -> None:
    store = store_of(tmp_path, max_lora_rank=4)
    with pytest.raises(InvalidRequest, match="rank 8"):
        store.load("a", str(write_adapter(tmp_path / "a", rank=8)))
    assert not store.entries


def test_a_full_disk_is_an_error_that_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shutil, "copyfile", fail)
    store = store_of(tmp_path)
    with pytest.raises(InvalidRequest, match="No space left on device"):
        store.load("a", str(write_adapter(tmp_path / "a")))
    assert not copies(tmp_path)


def test_adapters_of_a_flag_in_json_may_be_pinned(tmp_path: Path) -> None:
    path = str(write_adapter(tmp_path / "a"))
    items = [
        json.dumps({"name": "a", "path": path, "pinned": True}),
        json.dumps({"name": "b", "path": path, "base_model_name": "m"}),
    ]
    mixed = f"{items[0]}, b={path}"
    for number, value in enumerate((",".join(items), f"[{', '.join(items)}]", mixed)):
        store = store_of(tmp_path, run=f"run-{number}", enable_lora=False, lora_modules=value)
        store.load_modules()
        assert [(e.name, e.pinned) for e in store.all()] == [("a", True), ("b", False)]
    with pytest.raises(ConfigError, match="unknown field `pin`"):
        _ = ModelArgs(lora_modules='{"name": "a", "path": "/a", "pin": true}').adapter_modules


def test_one_place_stays_for_adapters_that_are_not_pinned(tmp_path: Path) -> None:
    first, second = store_of(tmp_path), store_of(tmp_path)
    paths = {name: str(write_adapter(tmp_path / name, n)) for n, name in enumerate("abc")}
    assert first.load("a", paths["a"], pinned=True).pinned
    assert not second.load("b", paths["b"]).pinned
    assert second.load("b", paths["b"], pinned=True).pinned  # it is loaded already
    with pytest.raises(InvalidRequest) as refused:
        first.load("c", paths["c"], pinned=True)
    assert str(refused.value) == (
        "adapter 'c' cannot be pinned, as 2 are and at most 2 can be: --max-loras is 3, and one"
        " place is for those that are not; unload or unpin one of ['a', 'b'], or start with a"
        " larger --max-loras"
    )
    assert refused.value.field == "pinned" and set(first.entries) == {"a", "b"}
    assert second.load("b", paths["b"]).pinned  # nothing was said of that
    assert not second.load("b", paths["b"], pinned=False).pinned
    assert first.load("c", paths["c"], pinned=True).pinned
    assert first.load("a", paths["b"], replace=True).pinned
    first.unload("a")
    assert not first.load("a", paths["a"]).pinned


def test_a_pinned_adapter_of_the_directory_stays_loaded(tmp_path: Path) -> None:
    for seed, name in enumerate("abc"):
        write_adapter(tmp_path / "all" / name, seed)
    store = store_of(tmp_path, lora_dir=str(tmp_path / "all"))
    loaded = [store.load_found(name) for name in "abc"]
    assert store.load("a", loaded[0].path, pinned=True).is_found
    make_old(tmp_path)
    store.sweep(set(), 1)
    assert set(store.entries) == {"a", "c"}


def test_copies_outlive_a_run_and_its_list_does_not(tmp_path: Path) -> None:
    source = write_adapter(tmp_path / "a")
    earlier, later = store_of(tmp_path, run="earlier"), store_of(tmp_path, run="later")
    entry = earlier.load("a", str(source))
    write_adapter(source, seed=1)
    assert later.find("a") is None
    kept = later.files(entry.ref)
    assert kept.parent == tmp_path / "copies" and adapter_id(kept) == entry.id
    assert later.load("a", str(source)).id != entry.id
