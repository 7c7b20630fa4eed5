"""Scores of other tools: every form they come in, and what cannot be used."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from budwood.capture.stream import Map
from budwood.errors import StoreError
from budwood.methods.influence.factors import Factors
from budwood.methods.influence.foreign import module_names, read_scores, write_kronfluence
from budwood.methods.influence.scores import Scores
from budwood.studies.recipe import Wishes, commands, read_recipe, run_recipe
from tests.cli.conftest import budwood  # noqa: F401

VALUES = np.random.default_rng(0).normal(size=(3, 10)).astype(np.float32)


def bergson(path: Path, tokens: np.ndarray | None = None) -> Path:
    """A directory as bergson writes it: a record per training row (or token), a score and a flag per query."""
    path.mkdir()
    values = VALUES.T if tokens is None else np.repeat(VALUES.T / tokens[:, None], tokens, axis=0)
    names = [f"{kind}_{i}" for i in range(3) for kind in ("score", "written")]
    layout = {
        "names": names,
        "formats": ["float32", "bool"] * 3,
        "offsets": [8 * (i // 2) + 4 * (i % 2) for i in range(6)],
        "itemsize": 24,
    }
    records = np.zeros(len(values), np.dtype(layout))  # type: ignore[call-overload]
    for i in range(3):
        records[f"score_{i}"], records[f"written_{i}"] = values[:, i], True
    records.tofile(path / "scores.bin")
    info = {"num_items": 10, "num_scores": 3, "dtype": layout, "attribute_tokens": tokens is not None}
    (path / "info.json").write_text(json.dumps(info))
    if tokens is not None:
        np.save(path / "offsets.npy", np.concatenate([[0], np.cumsum(tokens)]))
    return path


def forms(path: Path) -> dict[str, Path]:
    np.save(path / "plain.npy", VALUES)
    save_file({"all_modules": torch.from_numpy(VALUES)}, path / "plain.safetensors")
    (path / "scores_ekfac").mkdir()
    save_file({"all_modules": torch.from_numpy(VALUES)}, path / "scores_ekfac" / "pairwise_scores.safetensors")
    (path / "by_module").mkdir()
    by_module = {"a": torch.from_numpy(VALUES * 0.25), "b": torch.from_numpy(VALUES * 0.75)}
    save_file(by_module, path / "by_module" / "pairwise_scores.safetensors")
    tokens = np.arange(1, 11)
    return {
        "npy": path / "plain.npy",
        "safetensors": path / "plain.safetensors",
        "kronfluence": path / "scores_ekfac",
        "modules": path / "by_module",
        "bergson": bergson(path / "bergson"),
        "bergson tokens": bergson(path / "tokens", tokens),
    }


def test_every_form_gives_the_same_scores(tmp_path: Path) -> None:
    for name, path in forms(tmp_path).items():
        found = read_scores(path)
        np.testing.assert_allclose(sum(found.values()), VALUES, rtol=1e-5, atol=1e-6, err_msg=name)


def test_import_names_rows_by_the_task(budwood: Callable[..., Any], tmp_path: Path) -> None:  # noqa: F811
    import budwood as bw

    source = forms(tmp_path)["modules"]
    words = ["influence", "import", source, "--task", "tiny-topic", "--limit", 10, "--threads", 1, "--progress", "none"]
    code, out, err = budwood(*words, "--name", "theirs", "--negate", "--out", tmp_path / "run", "--json")
    assert code == 0, err
    assert json.loads(out)["queries"] == 3
    scores = Scores.open(tmp_path / "run")
    task = bw.task("tiny-topic", limit=10)
    assert scores.train_ids == tuple(r.id for r in task.rows("train"))
    assert scores.query_ids == tuple(r.id for r in task.rows(task.reported)[:3])
    np.testing.assert_allclose(scores.row(1), -VALUES[1], rtol=1e-5, atol=1e-6)
    code, out, _ = budwood("influence", "show", tmp_path / "run", "--query", 1, "--modules", "a")
    assert code == 0 and "counting only modules a" in out and task.rows("train")[int(VALUES[1].argmin())].id in out
    code, _, err = budwood(*words[:-4], "--limit", 9, "--out", tmp_path / "other", "--threads", 1)
    assert code == 2 and "3 queries x 10 training rows" in err


@pytest.mark.parametrize("file", ["scores.bin", "info.json", "offsets.npy"])
def test_a_folder_that_changed_is_imported_again(file: str, budwood: Callable[..., Any], tmp_path: Path) -> None:  # noqa: F811
    source = bergson(tmp_path / "theirs", np.arange(1, 11))
    words = ["influence", "import", source, "--task", "tiny-topic", "--limit", 10, "--progress", "none", "--json"]
    first = json.loads(budwood(*words)[1])["run"]
    again = budwood(*words)
    assert json.loads(again[1])["run"] == first and "Nothing to do" in again[2]
    before = Scores.open(Path(first)).whole()
    if file == "scores.bin":  # the first query's score of the first row's only token
        raw = np.fromfile(source / file, np.uint8)
        raw[:4] = np.array([9], np.float32).view(np.uint8)
        raw.tofile(source / file)
    elif file == "info.json":
        (source / file).write_text(json.dumps(json.loads((source / file).read_text()) | {"num_scores": 2}))
    else:  # the second row's first token is now the first row's second
        np.save(source / file, np.load(source / file) + (np.arange(11) == 1))
    code, out, err = budwood(*words)
    assert code == 0 and "Nothing to do" not in err and json.loads(out)["run"] != first
    after = Scores.open(Path(json.loads(out)["run"])).whole()
    assert not np.array_equal(after, before)
    np.testing.assert_array_equal(after, read_scores(source)["all_modules"])
    code, _, err = budwood(*words, "--out", first)
    assert code == 2 and "source" in err  # other scores are not put where these are without being asked


def test_a_recipe_imports_scores_without_a_model(tmp_path: Path) -> None:
    np.save(tmp_path / "plain.npy", VALUES)
    step = f"{{id: theirs, verb: influence import, source: [{tmp_path}/plain.npy], task: tiny-topic, limit: 10}}"
    for defaults in ("", "defaults: {model: tiny-bert}\n"):  # a model that other steps have is none of its own
        tuned = "  - {id: tuned, verb: finetune, task: tiny-topic}\n" if defaults else ""
        (tmp_path / "r.yaml").write_text(f"{defaults}steps:\n  - {step}\n{tuned}")
        script = read_recipe(str(tmp_path / "r.yaml"), Wishes(out=tmp_path / "out"))
        assert script.steps[0].models == ()
        assert commands(script)[0].startswith(f"budwood influence import {tmp_path}/plain.npy --task tiny-topic")
    (row,) = run_recipe(replace(script, steps=script.steps[:1]))
    assert row["model"] == "" and row["metrics"]["queries"] == 3
    np.testing.assert_array_equal(Scores.open(tmp_path / "out" / "theirs").whole(), VALUES)


def test_what_cannot_be_read_is_told(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="There is no file"):
        read_scores(tmp_path / "none.npy")
    with pytest.raises(StoreError, match="neither pairwise_scores"):
        read_scores(tmp_path)
    np.save(tmp_path / "objects.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(StoreError, match="without running code"):
        read_scores(tmp_path / "objects.npy")
    np.save(tmp_path / "nan.npy", np.full((2, 2), np.nan))
    with pytest.raises(StoreError, match="4 scores that are not finite"):
        read_scores(tmp_path / "nan.npy")
    np.save(tmp_path / "flat.npy", np.zeros(3))
    with pytest.raises(StoreError, match="not queries x training rows"):
        read_scores(tmp_path / "flat.npy")
    (tmp_path / "x.pt").write_bytes(b"")
    with pytest.raises(StoreError, match="Convert it"):
        read_scores(tmp_path / "x.pt")
    part = bergson(tmp_path / "unfinished")
    raw = bytearray((part / "scores.bin").read_bytes())
    raw[4] = 0
    (part / "scores.bin").write_bytes(bytes(raw))
    with pytest.raises(StoreError, match="1 scores were never written"):
        read_scores(part)


def test_a_matrix_that_is_no_module_is_named(tmp_path: Path) -> None:
    model = torch.nn.ModuleDict({"attend": torch.nn.MultiheadAttention(4, 2), "head": torch.nn.Linear(4, 2)})
    inside = Map("attend.in_proj_weight", "attend.in_proj_weight", None, 12, 4, "attend.in_proj_weight")
    plain = Map("head", "head.weight", "head.bias", 2, 4, "head")
    assert module_names(model, [plain]) == {"head": "head"}
    with pytest.raises(StoreError, match="'attend.in_proj_weight' is a matrix that its module applies itself"):
        write_kronfluence(Factors(tmp_path, (inside, plain), {}), model, tmp_path / "out")
    assert not (tmp_path / "out").exists()
