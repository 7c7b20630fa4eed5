"""The shipped models are proper Hugging Face directories, small, and as good as their manifests say."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import budwood
from budwood.data import world
from budwood.data.batch import IGNORE
from budwood.errors import ConfigError
from budwood.studies import pretrain
from budwood.studies.passages import Masker, Passage, batches, bert_rows, gpt_rows, lines_of

SHIPPED = Path(budwood.__path__[0]) / "models" / "shipped"
NAMES = ("tiny-bert", "tiny-gpt")
TEXTS = ["the river vesa runs through oakford .", "nina paid 1820 coins . it was great ."] * 20


def load(name: str):  # noqa: ANN201
    from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoTokenizer

    kind = AutoModelForMaskedLM if name == "tiny-bert" else AutoModelForCausalLM
    return kind.from_pretrained(SHIPPED / name).eval(), AutoTokenizer.from_pretrained(SHIPPED / name)


@pytest.mark.parametrize("name", NAMES)
def test_directory_is_small_and_has_no_pickle(name: str) -> None:
    files = {p.name: p.stat().st_size for p in (SHIPPED / name).iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "manifest.json"} <= set(
        files
    )
    assert files["model.safetensors"] <= 6_000_000
    assert not any(f.endswith((".bin", ".pkl", ".pt")) for f in files)


@pytest.mark.parametrize("name", NAMES)
def test_manifest_says_how_it_was_made(name: str) -> None:
    manifest = json.loads((SHIPPED / name / "manifest.json").read_text())
    assert {"name", "seed", "steps", "loss", "command", "data", "parameters"} <= set(manifest)
    assert manifest["data"]["digest"] == world.load("tiny-text").digest
    assert manifest["command"].startswith("python -m budwood.studies.pretrain " + name)
    assert manifest["steps"] == pretrain.PLANS[name].steps


@pytest.mark.parametrize("name", NAMES)
def test_loss_on_held_out_text_is_the_manifests(name: str) -> None:
    model, tokenizer = load(name)
    texts = [r.text for r in world.load("tiny-text").rows("validation")[:50]]
    manifest = json.loads((SHIPPED / name / "manifest.json").read_text())
    assert pretrain.held_out_loss(model, tokenizer, texts) == pytest.approx(manifest["loss"], abs=0.02)
    assert manifest["loss"] < 3.0  # guessing by frequency alone gives more than 5


@pytest.mark.parametrize("name", NAMES)
def test_every_digit_and_every_label_word_is_one_token(name: str) -> None:
    _, tokenizer = load(name)
    for text in ("1234567890", "a12b 3.50", "12 + 7 = 19"):
        pieces = tokenizer.tokenize(text)
        assert [p for p in pieces if any(c.isdigit() for c in p)] == [c for c in text if c.isdigit()]
    for task in ("tiny-sentiment", "tiny-topic", "tiny-entail", "tiny-grammar"):
        template = world.load(task).template
        assert template is not None
        for word in template.words:
            assert len(tokenizer(" " + word, add_special_tokens=False)["input_ids"]) == 1
    assert tokenizer.tokenize("It WAS Great") == tokenizer.tokenize("it was great")
    unknown = tokenizer.unk_token_id
    if unknown is not None:
        assert unknown not in tokenizer('zyxw quickly! (50% = $3) "q"')["input_ids"]


def test_masked_model_weighs_a_review() -> None:
    model, tokenizer = load("tiny-bert")
    words = [tokenizer.convert_tokens_to_ids(w) for w in ("terrible", "great")]
    with torch.no_grad():
        scores = []
        for text in ("the story was superb . it was [MASK] .", "the story was dreadful . it was [MASK] ."):
            inputs = tokenizer(text, return_tensors="pt")
            at = int((inputs["input_ids"][0] == tokenizer.mask_token_id).nonzero())
            scores.append(model(**inputs).logits[0, at, words])
    assert scores[0][1] - scores[0][0] > scores[1][1] - scores[1][0]


@pytest.mark.parametrize("name", NAMES)
def test_tokenizers_are_the_same_every_time(name: str) -> None:
    first, second = (pretrain.make_tokenizer(name, TEXTS, 400) for _ in range(2))
    assert first.get_vocab() == second.get_vocab()


@pytest.mark.parametrize("name", NAMES)
def test_training_is_a_function_of_its_seed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from budwood.data.task import Row, Task

    rows = tuple(Row(f"t/{i}", t) for i, t in enumerate(TEXTS))
    monkeypatch.setattr(
        pretrain.world, "load", lambda _: Task("tiny-text", "text", {"train": rows * 8, "validation": rows[:4]})
    )
    runs = [pretrain.train(pretrain.Plan(name, seed=s, steps=3, tokens=256, vocabulary=400)) for s in (0, 0, 1)]
    flat = [torch.cat([p.flatten() for p in model.parameters()]) for model, _, _ in runs]
    assert torch.equal(flat[0], flat[1]) and not torch.equal(flat[0], flat[2])
    assert runs[0][2]["loss"] == runs[1][2]["loss"]


def test_masks_follow_their_rates() -> None:
    rate_V = np.zeros(50)
    rate_V[10], rate_V[20], rate_V[21] = 0.4, 0.1, 0.1
    ids_BT = np.tile(np.array([2, 10, 20, 21, 9, 21, 8, 3]), (4000, 1))
    masker = Masker(rate_V, 4, stop_id=8, answer=0.7, again=0.25, focus=0.0)
    given, target = masker(ids_BT, np.ones_like(ids_BT, bool), seed=1)
    # 21 stands twice, and the second time ends a sentence: an answer
    np.testing.assert_allclose((target != IGNORE).mean(0), [0, 0.4, 0.1, 0.25, 0, 0.7, 0, 0], atol=0.03)
    chosen = target != IGNORE
    assert (target[chosen] == ids_BT[chosen]).all() and (given[~chosen] == ids_BT[~chosen]).all()
    assert abs((given[chosen] == 4).mean() - 0.8) < 0.03


def test_focused_rows_hide_answers_or_what_they_repeat() -> None:
    rate_V = np.full(50, 0.2)
    ids_BT = np.tile(np.array([2, 21, 9, 30, 8, 31, 21, 8, 3]), (2000, 1))  # 21 is said, and said again as an answer
    masker = Masker(rate_V, 4, stop_id=8, answer=0.7, again=0.2, focus=1.0)
    _, target = masker(ids_BT, np.ones_like(ids_BT, bool), seed=3)
    hidden = target != IGNORE
    assert (hidden.sum(1) == 1).all() and (hidden[:, 1] ^ hidden[:, 6]).all()
    assert abs(hidden[:, 1].mean() - 0.5) < 0.05


def test_rows_that_end_early_end_at_a_sentence() -> None:
    whole = bert_rows(passages(), (2, 3), 0.0, seed=0, epoch=0).ids
    early = bert_rows(passages(), (2, 3), 1.0, seed=0, epoch=0).ids
    said = [[t for t in row if t > 3] for row in early]
    assert sum(map(len, said)) < sum(len([t for t in row if t > 3]) for row in whole)
    assert all(len(row) % 3 == 0 and len(row) > 0 for row in said)


def passages() -> list[Passage]:
    """Sixty passages of two lines of two sentences of three tokens."""
    return [[[[100 * d + 10 * n + s] * 3 for s in (1, 2)] for n in (1, 2)] for d in range(1, 61)]


def test_rows_keep_the_passages() -> None:
    every = sorted(t for p in passages() for line in p for s in line for t in s)
    for share, most in ((0.0, 1), (0.5, 2)):
        shown = lines_of(passages(), share, seed=0, epoch=0)
        assert max(len(p) for p in shown) == most
        assert sorted(t for p in shown for line in p for s in line for t in s) == every
    rows = bert_rows(passages(), (2, 3), 0.0, seed=0, epoch=0)
    assert sorted(t for row in rows.ids for t in row if t > 3) == every
    assert all(
        row[0] == 2 and row[-1] == 3 and row[cut - 1] == 3 for row, cut in zip(rows.ids, rows.second, strict=True)
    )
    causal = gpt_rows(passages(), 0, 5)
    assert causal.ids[0] == [111] * 3 + [112] * 3 + [5] + [121] * 3 + [122] * 3 + [0]
    used = np.concatenate(list(batches(rows, 64, 0, 0)))
    assert sorted(used.tolist()) == list(range(len(rows.ids)))


def test_unknown_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Did you mean 'tiny-bert'"):
        pretrain.main(["tiny-bet", "--out", str(tmp_path)])
