"""Every form of reference, and what is said about the ones that lead nowhere."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time

import pytest

from budwood.errors import ModelError
from budwood.models import reference
from budwood.models.reference import resolve, split_grafts
from tests.cases import write_model


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("models") / "small-bert")


def make_run(runs, name, model=None):
    (runs / name).mkdir(parents=True)
    (runs / name / "run.json").write_text(json.dumps({"verb": "finetune"}))
    if model is not None:
        (runs / name / "model").symlink_to(model)
    return runs / name


def test_a_directory_and_a_checkpoint(tiny, tmp_path):
    ref = resolve(str(tiny))
    assert (ref.kind, ref.path, ref.model_type, ref.name) == ("directory", tiny, "bert", "small-bert")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "checkpoint-20").symlink_to(tiny)
    assert resolve(str(tmp_path / "out" / "checkpoint-20")).name == "checkpoint-20"
    with pytest.raises(ModelError, match=r"config.json is missing. It holds checkpoint-20: give one of these"):
        resolve(str(tmp_path / "out"))


def test_runs_by_directory_id_and_prefix(tiny, tmp_path):
    run = make_run(tmp_path / "runs", "finetune-bert-a1", tiny)
    make_run(tmp_path / "runs", "finetune-bert-b2", tiny)
    for text in (str(run), "run:finetune-bert-a1", "run:finetune-bert-a", "finetune-bert-a1"):
        ref = resolve(text, runs_dir=tmp_path / "runs")
        assert (ref.kind, ref.run, ref.path) == ("run", run, run / "model")
    with pytest.raises(ModelError, match="fits 2 runs"):
        resolve("run:finetune", runs_dir=tmp_path / "runs")
    with pytest.raises(ModelError, match="No run 'run:finetune-bert-a3'.*Did you mean 'finetune-bert-a1'"):
        resolve("run:finetune-bert-a3", runs_dir=tmp_path / "runs")
    make_run(tmp_path / "runs", "probe-x")
    with pytest.raises(ModelError, match="holds no model/ directory"):
        resolve("run:probe-x", runs_dir=tmp_path / "runs")


def test_an_adapter_names_its_base(tiny, tmp_path):
    adapter = tmp_path / "lora"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(tiny)}))
    with pytest.raises(ModelError, match="adapter_model.safetensors is missing"):
        resolve(str(adapter))
    (adapter / "adapter_model.safetensors").write_bytes(b"")
    ref = resolve(str(adapter))
    assert ref.kind == "adapter" and ref.base is not None and ref.base.path == tiny and ref.model_type == "bert"
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "./gone"}))
    with pytest.raises(ModelError, match="The base of adapter .* cannot be used. There is no directory './gone'"):
        resolve(str(adapter))


def test_grafts(tiny, tmp_path):
    assert split_grafts("a+b/c+x.graft") == ("a+b/c", ("x.graft",))
    assert split_grafts("a+x.graft+b") == ("a+x.graft+b", ())
    for name in ("x.graft", "y.graft"):
        (tmp_path / name).write_bytes(b"")
    ref = resolve(f"{tiny}+{tmp_path / 'x.graft'}+{tmp_path / 'y.graft'}")
    assert ref.grafts == (tmp_path / "x.graft", tmp_path / "y.graft") and ref.path == tiny
    assert ref.name == "small-bert+x+y"
    with pytest.raises(ModelError, match="no graft .*Did you mean 'x.graft'"):
        resolve(f"{tiny}+{tmp_path / 'xx.graft'}")


def test_a_directory_that_is_no_model_says_what_is_missing(tmp_path):
    with pytest.raises(ModelError, match="config.json is missing"):
        resolve(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="not readable JSON"):
        resolve(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match='names no "model_type"'):
        resolve(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(ModelError, match="no weights"):
        resolve(str(tmp_path))
    (tmp_path / "weights.pt").write_bytes(b"")
    with pytest.raises(ModelError, match="only as weights.pt.*save_pretrained"):
        resolve(str(tmp_path))
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "one", "b": "two"}}')
    (tmp_path / "one").write_bytes(b"")
    with pytest.raises(ModelError, match=r"two is missing \(1 of 2 shards\)"):
        resolve(str(tmp_path))
    with pytest.raises(ModelError, match="is a file"):
        resolve(str(tmp_path / "one"))


def test_misspelled_directories(tiny):
    with pytest.raises(ModelError, match="no directory .*Did you mean 'small-bert'"):
        resolve(str(tiny.parent / "smal-bert"))


def test_hub_names_offline_and_unreachable(monkeypatch, tmp_path):
    monkeypatch.setattr(reference, "_cached", lambda name, revision: None)
    with pytest.raises(ModelError, match="work is offline.*hf download org/name"):
        resolve("org/name", offline=True)
    with pytest.raises(ModelError, match="Did you mean 'tiny-bert'"):
        resolve("tiny-brt", offline=True)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)

    def silent(address, timeout):
        time.sleep(timeout + 1)
        raise TimeoutError

    monkeypatch.setattr(socket, "create_connection", silent)
    start = time.monotonic()
    with pytest.raises(ModelError, match="does not answer within 1.5 s"):
        resolve("bert-base-uncased", runs_dir=tmp_path)
    assert time.monotonic() - start < 2


def test_a_hub_model_is_fetched_whole_before_it_is_named(monkeypatch, tiny):
    """The content names a run, so the first run must see the same files as the second."""
    import huggingface_hub

    monkeypatch.setattr(reference, "_cached", lambda name, revision: None)
    monkeypatch.setattr(reference, "offline_mode", lambda offline: False)
    monkeypatch.setattr(reference, "reachable", lambda: True)
    asked = []
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda name, **k: asked.append((name, k["revision"])) or str(tiny)
    )
    ref = resolve("org/name", revision="v1")
    assert (ref.kind, ref.path, asked) == ("hub", tiny, [("org/name", "v1")])

    def refuses(name, **settings):
        raise OSError("404 no such repository\nmore")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuses)
    with pytest.raises(ModelError, match="The hub does not give 'org/name' \\(404 no such repository\\)"):
        resolve("org/name")


def test_hub_names_in_the_cache(monkeypatch, tiny):
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *a, **k: str(tiny / "config.json"))
    ref = resolve("org/name", revision="main")
    assert (ref.kind, ref.path, ref.hub_name, ref.model_type) == ("hub", tiny, "org/name", "bert")
    assert ref.name == "org--name"


def test_shipped_names(monkeypatch, tiny):
    monkeypatch.setattr(reference, "SHIPPED", tiny.parent)
    (tiny.parent / "tiny-bert").symlink_to(tiny)
    assert resolve("tiny-bert").kind == "shipped"
    with pytest.raises(ModelError, match="'tiny-gpt' is missing from this installation"):
        resolve("tiny-gpt")


def test_resolving_imports_neither_torch_nor_transformers():
    code = """
import sys
from budwood.errors import ModelError
from budwood.models.reference import resolve
try:
    resolve("no-such/model")
except ModelError:
    print({"torch", "transformers"} & set(sys.modules))
"""
    env = {"PYTHONPATH": ":".join(sys.path), "HF_HUB_OFFLINE": "1"}
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
    assert out.stdout.strip() == "set()"
