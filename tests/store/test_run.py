"""Run directories: whole files, refusal of other settings, locks, the index."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import IO

import pytest

from budwood.errors import StoreError
from budwood.store.files import cache_dir, disk_error, write_json, writing, writing_directory
from budwood.store.index import find_run, list_runs, read_listed
from budwood.store.run import locked, open_run, run_name, status_of


def finished(path: Path, **settings: object) -> Path:
    with locked(path):
        run = open_run(path, "finetune", settings, {"models": ["m"], "task": "t"})
        run.finish({"verb": "finetune", "score": 0.5, "seed": 0}, {"seconds": 1.0})
    return path


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "a.json"
    write_json(target, {"x": 1})
    with pytest.raises(RuntimeError), writing(target) as part:
        part.write_text("half")
        raise RuntimeError
    assert json.loads(target.read_text()) == {"x": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_a_directory_replaces_the_old_one_only_when_complete(tmp_path: Path) -> None:
    target = tmp_path / "model"
    for content in ("one", "two"):
        with writing_directory(target) as part:
            (part / "w").write_text(content)
    with pytest.raises(RuntimeError), writing_directory(target) as part:
        (part / "w").write_text("three")
        raise RuntimeError
    assert (target / "w").read_text() == "two" and [p.name for p in tmp_path.iterdir()] == ["model"]


def test_full_disk_and_forbidden_places_are_told(tmp_path: Path) -> None:
    full = disk_error(OSError(errno.ENOSPC, "No space left on device"), tmp_path / "x")
    assert isinstance(full, StoreError) and "No space left" in str(full) and "--out" in str(full)
    assert "may write" in str(disk_error(OSError(errno.EACCES, "denied"), tmp_path / "x"))
    other = OSError(errno.EIO, "odd")
    assert disk_error(other, tmp_path) is other


def test_same_settings_carry_on_other_settings_are_refused_with_the_keys(tmp_path: Path) -> None:
    path = finished(tmp_path / "r", lr=1, k=2)
    assert status_of(path) == "done"
    with locked(path):
        assert open_run(path, "finetune", {"lr": 1, "k": 2}, {}).id == "r"
        with pytest.raises(StoreError, match="lr: 1 there, 3 now") as told:
            open_run(path, "finetune", {"lr": 3, "k": 2}, {})
        assert "k:" not in str(told.value)
        open_run(path, "finetune", {"lr": 3, "k": 2}, {}, overwrite=True)
    assert status_of(path) == "running" and not (path / "metrics.json").exists()


def test_a_run_is_replaced_only_by_one_that_is_done(tmp_path: Path) -> None:
    path = finished(tmp_path / "r", lr=1)
    (path / "figures").mkdir()
    (path / "figures" / "a.png").write_bytes(b"old")
    before = {p.relative_to(path): p.read_bytes() for p in path.rglob("*") if p.is_file() and p.name != ".lock"}
    with locked(path):
        refused = open_run(path, "finetune", {"lr": 3}, {}, overwrite=True)
        assert not (path / "metrics.json").exists() and refused.withdraw()
        assert {
            p.relative_to(path): p.read_bytes() for p in path.rglob("*") if p.is_file() and p.name != ".lock"
        } == before
        begun = open_run(path, "finetune", {"lr": 4}, {}, overwrite=True)
        begun.file("half").write_text("")
        assert not begun.withdraw()
        again = open_run(path, "finetune", {"lr": 5}, {}, overwrite=True)
        assert not (path / "half").exists() and again.withdraw() and (path / "figures" / "a.png").exists()
        open_run(path, "finetune", {"lr": 6}, {}, overwrite=True).finish({"score": 2}, {})
    assert sorted(p.name for p in path.iterdir()) == [".lock", "cost.json", "metrics.json", "run.json"]


def test_a_foreign_directory_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    with locked(tmp_path), pytest.raises(StoreError, match="thesis.tex"):
        open_run(tmp_path, "finetune", {}, {}, overwrite=True)


def test_what_is_refused_before_it_is_a_run_leaves_no_trace(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.tex").write_text("x")
    with pytest.raises(StoreError), locked(mine):
        open_run(mine, "finetune", {}, {})
    with pytest.raises(RuntimeError), locked(tmp_path / "new" / "deep"):
        raise RuntimeError
    assert [p.name for p in tmp_path.rglob("*")] == ["mine", "thesis.tex"]


def test_a_run_is_withdrawn_only_if_it_made_nothing(tmp_path: Path) -> None:
    path = tmp_path / "r"
    with pytest.raises(RuntimeError), locked(path):
        run = open_run(path, "finetune", {"lr": 1}, {})
        run.file("progress.jsonl").write_text("{}\n")
        run.file("seeds", "0").mkdir(parents=True)
        assert run.withdraw()
        raise RuntimeError
    assert not path.exists()
    with locked(path):
        run = open_run(path, "finetune", {"lr": 2}, {})
        run.file("state.safetensors").write_bytes(b"x")
        assert not run.withdraw() and status_of(path) == "running"
    with pytest.raises(RuntimeError), locked(path):
        raise RuntimeError
    assert {p.name for p in path.iterdir()} == {"run.json", ".lock", "state.safetensors"}


def test_a_lock_that_was_removed_under_the_hand_is_taken_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = fcntl.flock, []

    def late(handle: IO[str], how: int) -> None:
        real(handle, how)
        if not calls:  # its last holder was refused in this moment
            (tmp_path / ".lock").unlink()
        calls.append(1)

    monkeypatch.setattr(fcntl, "flock", late)
    with locked(tmp_path):
        assert len(calls) == 2 and f"process {os.getpid()}" in (tmp_path / ".lock").read_text()


def test_out_that_is_a_file_is_told(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("x")
    with pytest.raises(StoreError, match="is a file"), locked(tmp_path / "f"):
        pass


def test_a_second_process_is_told_who_holds_the_run(tmp_path: Path) -> None:
    code = f"from budwood.store.run import locked\nfrom pathlib import Path\nwith locked(Path({str(tmp_path)!r})): pass"
    with locked(tmp_path):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert f"held by process {os.getpid()} on" in done.stderr
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


def test_index_follows_the_directories(tmp_path: Path) -> None:
    finished(tmp_path / "a-1", lr=1)
    finished(tmp_path / "a-2", lr=2)
    assert [r.path.name for r in list_runs(tmp_path)] == ["a-1", "a-2"]
    write_json(tmp_path / "a-1" / "metrics.json", {"score": 0.75})
    assert list_runs(tmp_path)[0].metrics["score"] == 0.75  # the cache is never believed over the files
    (tmp_path / "a-2" / "run.json").write_text("{")
    by_name = {r.path.name: r.status for r in list_runs(tmp_path)}
    assert by_name == {"a-1": "done", "a-2": "broken"}
    (tmp_path / ".index.sqlite").write_bytes(b"garbage" * 100)
    assert len(list_runs(tmp_path)) == 2


def test_runs_are_found_by_prefix(tmp_path: Path) -> None:
    for name in ("finetune-a-11", "finetune-b-22"):
        finished(tmp_path / name)
    assert find_run("run:finetune-a", tmp_path).name == "finetune-a-11"
    with pytest.raises(StoreError, match="fits 2 runs"):
        find_run("finetune", tmp_path)
    with pytest.raises(StoreError, match="Did you mean 'finetune-b-22'"):
        find_run("finetune-b-23", tmp_path)
    assert read_listed(tmp_path / "finetune-a-11").status == "done"


def test_names_and_cache() -> None:
    assert run_name("finetune", "org/model", "data/my set.csv", {"a": 1}).startswith("finetune-model-my-set-")
    assert run_name("x", "m", "t", {"a": 1}) != run_name("x", "m", "t", {"a": 2})
    assert cache_dir().is_absolute()
