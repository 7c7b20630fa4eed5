"""Loading and saving: heads from a seed, heads kept, modes that do not fit, weights that are missing."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path

import pytest
import torch

from budwood.errors import ModelError
from budwood.models.identity import model_hash
from budwood.models.load import HeadSpec, load, random_weights, save
from budwood.models.pooled import Pooled
from budwood.models.reference import resolve
from budwood.params.tree import named, values
from tests.cases import CLASSES, build, case, write_model

LABELS = ("bad", "fair", "good")
SPEC = HeadSpec("label", LABELS)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    write_model(root / "bert")
    write_model(root / "plain", form="backbone")
    write_model(root / "gpt2", "gpt2")
    write_model(root / "roberta", "roberta")
    write_model(root / "llama", "llama", tie_word_embeddings=True)
    return root


def loaded(models, name, mode, head=None, seed=0):
    return load(resolve(str(models / name)), mode, head, seed=seed)


@pytest.mark.parametrize("name", ["bert", "gpt2", "roberta", "llama"])
def test_language_models_load_whole_and_tied(models, name):
    got = loaded(models, name, "clm" if name in ("gpt2", "llama") else "mlm")
    assert got.fresh == () and not got.model.training
    assert all(p.dtype == torch.float32 for p in got.model.parameters())
    out, into = got.model.get_output_embeddings().weight, got.model.get_input_embeddings().weight
    assert out is into
    want = build(name, dtype=torch.float32, **({"tie_word_embeddings": True} if name == "llama" else {}))
    torch.testing.assert_close(values(got.model), values(want), rtol=0, atol=0)


def test_half_precision_checkpoints_load_as_float32(tmp_path):
    build("bert").half().save_pretrained(tmp_path)
    write_model(tmp_path / "other")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tmp_path / "other" / name, tmp_path / name)
    model = load(resolve(str(tmp_path)), "mlm").model
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_fresh_heads_come_from_the_seed_alone(models):
    torch.manual_seed(1)
    first = loaded(models, "bert", "head", SPEC, seed=5)
    state = torch.random.get_rng_state()
    torch.manual_seed(2)
    second = loaded(models, "bert", "head", SPEC, seed=5)
    other = loaded(models, "bert", "head", SPEC, seed=6)
    torch.manual_seed(1)
    assert torch.equal(state, torch.random.get_rng_state())  # loading left the global generator alone
    assert model_hash(first.model) == model_hash(second.model) != model_hash(other.model)
    assert first.fresh == ("head.classifier.bias", "head.classifier.weight", "pooler.dense.bias", "pooler.dense.weight")
    assert first.model.config.id2label == dict(enumerate(LABELS))
    a, b = values(first.model), values(other.model)
    assert {n for n in a if not torch.equal(a[n], b[n])} == {"head.classifier.weight", "pooler.dense.weight"}


@pytest.mark.parametrize("name", ["bert", "gpt2", "roberta"])
@pytest.mark.parametrize("kind", ["label", "regression", "tokens"])
def test_heads_are_kept_when_loaded_again(models, tmp_path, name, kind):
    spec = HeadSpec(kind, () if kind == "regression" else LABELS)
    first = loaded(models, name, "head", spec, seed=3)
    save(first, tmp_path / "m")
    again = load(resolve(str(tmp_path / "m")), "head", spec, seed=4)
    assert again.fresh == () and model_hash(again.model) == model_hash(first.model)


def test_heads_for_other_labels_are_made_afresh_and_reordered_for_the_same(models, tmp_path):
    first = loaded(models, "roberta", "head", SPEC, seed=3)
    save(first, tmp_path / "m")
    ref = resolve(str(tmp_path / "m"))
    turned = load(ref, "head", HeadSpec("label", ("Good", "bad", "fair")))
    assert turned.fresh == ()
    batch = case("roberta", "head", dtype=torch.float32).batch()
    with torch.no_grad():
        a, b = first.model(**batch.inputs).logits, turned.model(**batch.inputs).logits
    torch.testing.assert_close(b, a[:, [2, 0, 1]])
    other = load(ref, "head", HeadSpec("label", ("x", "y", "z")), seed=1)
    heads = {n for n in named(other.model) if n.startswith("head.")}
    assert set(other.fresh) == heads and len(heads) == 4
    assert model_hash(other.model) == model_hash(load(ref, "head", HeadSpec("label", ("x", "y", "z")), seed=1).model)
    fewer = load(ref, "head", HeadSpec("label", ("x", "y")))
    assert "head.classifier.out_proj.weight" in fewer.fresh and fewer.model.config.num_labels == 2


@pytest.mark.parametrize("pool", ["cls", "mask", "last", "mean"])
def test_pooled_heads(models, tmp_path, pool):
    spec = HeadSpec("label", LABELS, pool)
    first = loaded(models, "bert", "head", spec, seed=3)
    assert isinstance(first.model, Pooled) and first.fresh == ("head.bias", "head.weight")
    batch = case("bert", "head", dtype=torch.float32).batch()
    mask_id = first.tokenizer.mask_token_id
    ids = batch.inputs["input_ids"]
    ids[ids == mask_id] = 7
    ids[:, 2] = mask_id
    lengths = batch.inputs["attention_mask"].sum(1)
    with torch.no_grad():
        got = first.model(**batch.inputs).logits
        hidden = first.model.backbone(**batch.inputs)[0]
        rows = {
            "cls": hidden[:, 0],
            "mask": hidden[:, 2],
            "last": torch.stack([hidden[b, n - 1] for b, n in enumerate(lengths)]),
            "mean": torch.stack([hidden[b, :n].mean(0) for b, n in enumerate(lengths)]),
        }
        torch.testing.assert_close(got, first.model.head(rows[pool]))
    save(first, tmp_path / "m")
    again = load(
        resolve(str(tmp_path / "m")), "head", HeadSpec("label", LABELS)
    )  # the saved pooling is found by itself
    assert again.fresh == () and again.model.pool == pool and model_hash(again.model) == model_hash(first.model)
    other = load(resolve(str(tmp_path / "m")), "head", HeadSpec("label", ("a", "b"), pool))
    assert other.fresh == ("head.bias", "head.weight")


def test_pool_mask_needs_a_mask(models):
    model = loaded(models, "bert", "head", HeadSpec("label", LABELS, "mask")).model
    with pytest.raises(ModelError, match="a row has none"):
        model(input_ids=torch.tensor([[7, 8]]))
    with pytest.raises(ModelError, match="--pool mean has no effect"):
        loaded(models, "bert", "mlm", HeadSpec("label", LABELS, "mean"))


def test_modes_that_do_not_fit(models):
    with pytest.raises(ModelError, match=r"\(gpt2\) reads text from left to right.*Use --mode causal"):
        loaded(models, "gpt2", "prompt")
    with pytest.raises(ModelError, match=r"\(bert\) reads text in both directions.*Use --mode mlm"):
        loaded(models, "bert", "clm")
    with pytest.raises(ModelError, match="no language-model head .*head.cls.predictions.bias"):
        loaded(models, "plain", "mlm")
    with pytest.raises(ModelError, match="needs the labels"):
        loaded(models, "bert", "head", HeadSpec("label"))
    with pytest.raises(ModelError, match="does not fit a task of kind 'text'"):
        loaded(models, "bert", "head", HeadSpec("text"))


def test_missing_and_damaged_parts_are_told(models, tmp_path):
    from safetensors.torch import load_file, save_file

    shutil.copytree(models / "bert", tmp_path / "cut")
    weights = load_file(tmp_path / "cut" / "model.safetensors")
    del weights["bert.encoder.layer.1.output.dense.weight"]
    save_file(weights, tmp_path / "cut" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match="lacks 1 of its 58 weights, such as 'encoder.layer.1.output.dense.weight'"):
        load(resolve(str(tmp_path / "cut")), "mlm")
    (tmp_path / "cut" / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match="has no tokenizer"):
        load(resolve(str(tmp_path / "cut")), "mlm")
    shutil.copytree(models / "bert", tmp_path / "torn")
    (tmp_path / "torn" / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(ModelError, match="cannot be loaded as AutoModelForMaskedLM"):
        load(resolve(str(tmp_path / "torn")), "mlm")


class Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


def test_older_pickled_weights_load_as_tensors_or_not_at_all(models, tmp_path):
    shutil.copytree(models / "bert", tmp_path / "old")
    (tmp_path / "old" / "model.safetensors").unlink()
    model = build("bert", dtype=torch.float32)
    torch.save(model.state_dict(), tmp_path / "old" / "pytorch_model.bin")
    assert model_hash(load(resolve(str(tmp_path / "old")), "mlm").model) == model_hash(model)
    torch.save({"weight": Evil(tmp_path / "ran")}, tmp_path / "old" / "pytorch_model.bin")
    with pytest.raises(ModelError, match="a pickle that holds more than tensors, and are refused"):
        load(resolve(str(tmp_path / "old")), "mlm")
    assert not (tmp_path / "ran").exists()


def test_padding_and_positions(models):
    from transformers import PreTrainedTokenizerFast

    assert loaded(models, "bert", "mlm").positions == 32
    assert loaded(models, "roberta", "mlm").positions == 30  # two are behind the padding index
    tokenizer: PreTrainedTokenizerFast = loaded(models, "gpt2", "clm").tokenizer
    assert tokenizer.pad_token_id == 1


def test_a_tokenizer_without_padding_gets_the_end_token(models, tmp_path):
    shutil.copytree(models / "gpt2", tmp_path / "g")
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "g")
    tokenizer.pad_token = None
    tokenizer.eos_token = "[SEP]"
    tokenizer.save_pretrained(tmp_path / "g")
    config = (tmp_path / "g" / "config.json").read_text().replace('"pad_token_id": 1', '"pad_token_id": null')
    (tmp_path / "g" / "config.json").write_text(config)
    got = load(resolve(str(tmp_path / "g")), "head", SPEC)
    assert got.tokenizer.pad_token == "[SEP]" and got.model.config.pad_token_id == got.tokenizer.pad_token_id == 3
    got.model(input_ids=torch.tensor([[5, 6, 7], [5, 6, 3]]), attention_mask=torch.tensor([[1, 1, 1], [1, 1, 0]]))


@pytest.mark.parametrize("mode", ["head", "mlm"])
def test_adapters_are_merged(models, tmp_path, mode):
    from peft import LoraConfig, get_peft_model

    base = loaded(models, "bert", mode, SPEC, seed=1)
    torch.manual_seed(0)
    config = LoraConfig(r=2, target_modules=["query"], modules_to_save=["classifier"] if mode == "head" else None)
    adapted = get_peft_model(copy.deepcopy(base.model), config)
    with torch.no_grad():
        for p in adapted.parameters():
            if p.requires_grad:
                p.normal_()
    adapted.eval().save_pretrained(tmp_path / "lora")
    text = (tmp_path / "lora" / "adapter_config.json").read_text()
    (tmp_path / "lora" / "adapter_config.json").write_text(
        text.replace(
            '"base_model_name_or_path": ' + text.split('"base_model_name_or_path": ')[1].split(",")[0],
            f'"base_model_name_or_path": "{models / "bert"}"',
        )
    )
    got = load(resolve(str(tmp_path / "lora")), mode, SPEC, seed=1)
    batch = case("bert", "head", dtype=torch.float32).batch()
    with torch.no_grad():
        torch.testing.assert_close(got.model(**batch.inputs).logits, adapted(**batch.inputs).logits)
    assert set(named(got.model)) == set(named(base.model))
    assert got.fresh == (("pooler.dense.bias", "pooler.dense.weight") if mode == "head" else ())
    assert all(p.requires_grad for p in got.model.parameters())  # a model like any other
    apart = load(resolve(str(tmp_path / "lora")), mode, SPEC, seed=1, merge=False)
    with torch.no_grad():
        torch.testing.assert_close(apart.model(**batch.inputs).logits, adapted(**batch.inputs).logits)
    trained = {n for n, p in named(apart.model).items() if p.requires_grad}
    assert trained and all("lora_" in n or "modules_to_save" in n for n in trained)


def test_hash_sees_names_shapes_and_values():
    model = build("bert", dtype=torch.float32)
    before = model_hash(model)
    assert before == model_hash(copy.deepcopy(model)) == model_hash(build("bert", dtype=torch.float32))
    with torch.no_grad():
        model.bert.embeddings.LayerNorm.bias[3] += 1e-6
    assert model_hash(model) != before


@pytest.mark.parametrize("family", ["bert", "albert", "gpt2", "llama"])
def test_random_weights_have_the_same_architecture(family):
    model = build(family, "head", dtype=torch.float32)
    before = model_hash(model)
    state = torch.random.get_rng_state()
    fresh = random_weights(model, 1)
    assert torch.equal(state, torch.random.get_rng_state()) and model_hash(model) == before
    assert {n: p.shape for n, p in named(fresh).items()} == {n: p.shape for n, p in named(model).items()}
    assert model_hash(fresh) == model_hash(random_weights(model, 1)) != model_hash(random_weights(model, 2))
    assert fresh.config.num_labels == CLASSES and not fresh.training


def test_random_weights_of_a_pooled_model(models):
    model = loaded(models, "bert", "head", HeadSpec("label", LABELS, "mean")).model
    fresh = random_weights(model, 1)
    assert {n: p.shape for n, p in named(fresh).items()} == {n: p.shape for n, p in named(model).items()}


def test_real_models(shared):
    encoder = load(resolve(str(shared / "models" / "all-MiniLM-L6-v2")), "head", HeadSpec("label", ("no", "yes")))
    assert encoder.fresh == ("head.classifier.bias", "head.classifier.weight") and encoder.positions == 512
    with pytest.raises(ModelError, match="has no language-model head"):
        load(resolve(str(shared / "models" / "all-MiniLM-L6-v2")), "prompt")
    story = load(resolve(str(shared / "models" / "stories260K")), "clm")
    text = story.tokenizer("Once upon a time there was a", return_tensors="pt")
    with torch.no_grad():
        word = int(story.model(input_ids=text["input_ids"]).logits[0, -1].argmax())
    assert story.tokenizer.decode([word]).strip()
    half = load(resolve(str(shared / "models" / "minilm-l6-mlm")), "prompt")
    assert half.fresh == () and {p.dtype for p in half.model.parameters()} == {torch.float32}
