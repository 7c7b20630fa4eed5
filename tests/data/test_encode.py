"""Encoders against the tokenizer's own calls, and masking against its definition."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from budwood.data.batch import IGNORE
from budwood.data.encode import (
    Encoding,
    encode_clm_text,
    encode_head,
    encode_mlm_text,
    encode_number,
    encode_span,
    encode_tokens,
    encode_words,
    masks_needed,
)
from budwood.data.encoding import frame_of
from budwood.data.mask import Masking, mask_tokens
from budwood.data.prompt import render
from budwood.data.task import Row, Template
from budwood.errors import DataError
from tests.data.tokenizers_for_tests import NAMES, make

MASKED = [n for n in NAMES if make(n).mask_token is not None]
SENTENCE = "the film was great and the acting was terrible but it was a great story "
TEMPLATE = Template(masked="{text} It was {mask} .", causal="{text} This is {mask}")
PAIRS = Template(masked="{text|chop} ? {mask} , {pair|lower}", causal="{text}\n question : {pair} yes or no ?")


def texts(count: int = 40) -> list[tuple[str, str]]:
    rng = np.random.default_rng(3)
    words = (SENTENCE * 3 + "Paris, 1 2 3 Normandy's é duke ?").split()
    pick = lambda: " ".join(rng.choice(words, size=rng.integers(0, 20)))
    return [(pick(), pick()) for _ in range(count)]


def rows(pair: bool) -> list[Row]:
    return [Row(f"r{i}", a, b if pair else None, i % 2) for i, (a, b) in enumerate(texts())]


@pytest.mark.parametrize("side", ["tail", "head"])
@pytest.mark.parametrize("pair", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_head_features_are_what_the_tokenizer_makes(name: str, pair: bool, side: str) -> None:
    tokenizer = make(name)
    many = [r for r in rows(pair) if r.text]
    features = encode_head(many, tokenizer, Encoding(positions=64, max_length=13, truncate=side))  # type: ignore[arg-type]
    cut = 0
    tokenizer.truncation_side = "left" if side == "head" else "right"
    try:
        for n, r in enumerate(many):
            given = ([r.text],) if r.pair is None else ([r.text], [r.pair])
            want = tokenizer(*given, truncation=True, max_length=13)
            assert features.piece("input_ids", n).tolist() == want["input_ids"][0]
            assert ("token_type_ids" in features.ragged) == ("token_type_ids" in want)
            if "token_type_ids" in want:
                assert features.piece("token_type_ids", n).tolist() == want["token_type_ids"][0]
            cut += len(tokenizer(*given)["input_ids"][0]) > 13
    finally:
        tokenizer.truncation_side = "right"
    assert features.info["truncated"] == cut > 0
    assert features.fixed["label"].dtype == np.int64
    assert features.ids == tuple(r.id for r in many)


def test_numbers_stay_numbers_and_missing_labels_are_counted() -> None:
    many = [Row("a", "x", label=2.5), Row("b", "y", label=None)]
    features = encode_head(many, make("bert"), Encoding())
    assert features.fixed["label"].dtype == np.float32
    assert features.fixed["label"][0] == 2.5 and np.isnan(features.fixed["label"][1])
    assert features.info["unlabelled"] == 1


def test_an_empty_text_without_special_tokens_still_has_a_token() -> None:
    tokenizer = make("gpt2")
    features = encode_head([Row("a", "", label=0), Row("b", "the film", label=1)], tokenizer, Encoding())
    assert features.piece("input_ids", 0).tolist() == [tokenizer.bos_token_id]
    assert features.piece("input_ids", 1).tolist() == tokenizer("the film")["input_ids"]
    assert features.info["empty"] == 1


def test_rows_with_and_without_a_pair_do_not_mix() -> None:
    with pytest.raises(DataError, match="Row 'b'"):
        encode_head([Row("a", "x", "y", 0), Row("b", "x", label=0)], make("bert"), Encoding())
    with pytest.raises(DataError, match="no row"):
        encode_head([], make("bert"), Encoding())


@pytest.mark.parametrize("template", [TEMPLATE, PAIRS])
@pytest.mark.parametrize("name", MASKED)
def test_an_untruncated_prompt_is_the_rendered_text(name: str, template: Template) -> None:
    tokenizer = make(name)
    many = rows(pair=True)
    features = encode_words(many, tokenizer, Encoding(positions=200), template, causal=False)
    assert features.info["truncated"] == 0
    for n, r in enumerate(many):
        shown = render(template, r, tokenizer.mask_token, causal=False)
        want = tokenizer(shown)["input_ids"]
        if name == "deberta":  # this mask leaves the space before it as a token of its own, which is dropped
            want = tokenizer(shown.replace(" [MASK]", "[MASK]"))["input_ids"]
        assert features.piece("input_ids", n).tolist() == want
        assert want[features.fixed["read_at"][n]] == tokenizer.mask_token_id
        before = tokenizer.decode([want[features.fixed["read_at"][n] - 1]])
        assert before.strip(" ▁") or features.fixed["read_at"][n] == 1 or not r.text


@pytest.mark.parametrize("name", NAMES)
def test_a_causal_prompt_is_read_at_its_last_token(name: str) -> None:
    tokenizer = make(name)
    features = encode_words(rows(pair=True), tokenizer, Encoding(positions=200), TEMPLATE, causal=True)
    for n, r in enumerate(rows(pair=True)):
        ids = features.piece("input_ids", n).tolist()
        body = tokenizer(render(TEMPLATE, r, "", causal=True), add_special_tokens=False)["input_ids"]
        assert ids == [*frame_of(tokenizer, pair=False).before, *body]
        assert features.fixed["read_at"][n] == len(ids) - 1
        assert tokenizer.decode(ids[-1:]).strip(" ▁").endswith("s")  # "is", never a lone space


@pytest.mark.parametrize("side", ["tail", "head"])
@pytest.mark.parametrize(("name", "causal"), [*((n, False) for n in MASKED), *((n, True) for n in NAMES)])
def test_only_documents_are_ever_truncated(name: str, side: str, causal: bool) -> None:
    tokenizer = make(name)
    long = [Row(f"r{k}", "the" + " great" * 8 * k + ".", "a" + " story" * 8 * (9 - k), 0) for k in range(1, 9)]
    whole = encode_words(long, tokenizer, Encoding(positions=9999), PAIRS, causal)
    limit = 40
    features = encode_words(long, tokenizer, Encoding(positions=limit, truncate=side), PAIRS, causal)  # type: ignore[arg-type]
    assert features.info["truncated"] == len(long)
    body = lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]
    document = {*body("the great great."), *body("x a story")} - {*body("x")}
    for n in range(len(long)):
        kept, full = features.piece("input_ids", n).tolist(), whole.piece("input_ids", n).tolist()
        assert len(kept) == limit < len(full)
        assert [t for t in kept if t not in document] == [t for t in full if t not in document]
        opens = kept[len(frame_of(tokenizer, pair=False).before)] == body("the great")[0]
        if n == 0 or n >= 4:  # the first row's short text stays whole: the longer gives way first
            assert opens == (side == "tail" or n == 0)
        at = features.fixed["read_at"][n]
        assert at == limit - 1 if causal else kept[at] == tokenizer.mask_token_id


def test_sentence_limits_hold_for_each_text() -> None:
    tokenizer = make("bert")
    limited = Template(masked="{text} ? {mask} , {pair}", limits=(5, 2))
    features = encode_words([Row("r", SENTENCE, SENTENCE, 0)], tokenizer, Encoding(), limited, causal=False)
    words = SENTENCE.split()
    want = tokenizer(f"{' '.join(words[:5])} ? [MASK] , {' '.join(words[:2])}")["input_ids"]
    assert features.piece("input_ids", 0).tolist() == want
    assert features.info["truncated"] == 1


def test_a_mask_token_inside_a_document_is_not_the_answer() -> None:
    tokenizer = make("bert")
    features = encode_words([Row("r", "the [MASK] film", label=0)], tokenizer, Encoding(), TEMPLATE, causal=False)
    assert features.fixed["read_at"].tolist() == [6]


def test_prompts_that_cannot_be_asked_are_refused() -> None:
    with pytest.raises(DataError, match="wording of the template alone is 4"):
        encode_words([Row("r", "a", label=0)], make("bert"), Encoding(positions=5), TEMPLATE, causal=False)
    with pytest.raises(DataError, match="no mask token"):
        encode_words([Row("r", "a", label=0)], make("gpt2"), Encoding(), TEMPLATE, causal=False)


@pytest.mark.parametrize("name", NAMES)
def test_a_word_class_sits_on_its_first_piece(name: str) -> None:
    tokenizer = make(name)
    words = ("the", "acting's", "1234", "Normandy", "é", "film", ".")
    many = [Row("a", words=words, label=tuple(range(7))), Row("b", words=("yes", ",", "no"), label=(3, 4, 5))]
    features = encode_tokens(many, tokenizer, Encoding(positions=64))
    lead = len(frame_of(tokenizer, pair=False).before)
    for n, r in enumerate(many):
        text, at = " ".join(r.words or ()), 0
        spans = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
        want = [IGNORE] * len(spans)
        for word, label in zip(r.words or (), r.label, strict=True):  # type: ignore[arg-type]
            want[next(i for i, (_, e) in enumerate(spans) if e > at)] = label
            at += len(word) + 1
        target = features.piece("target", n).tolist()
        assert target[lead : lead + len(want)] == want
        assert target[:lead] == [IGNORE] * lead and len(target) == len(tokenizer(text)["input_ids"])
    assert features.info["words"] == 10 and features.info["words_lost"] == 0


def test_pre_split_words_agree_with_the_tokenizer_and_lost_words_are_counted() -> None:
    tokenizer = make("bert")
    r = Row("a", words=tuple(SENTENCE.split()), label=tuple(range(15)))
    features = encode_tokens([r], tokenizer, Encoding(positions=10))
    want = tokenizer(list(r.words or ()), is_split_into_words=True, truncation=True, max_length=10)
    assert features.piece("input_ids", 0).tolist() == want["input_ids"]
    assert features.info["truncated"] == 1
    assert features.info["words_lost"] == 15 - len({w for w in want.word_ids() if w is not None})
    with pytest.raises(DataError, match="one label per word"):
        encode_tokens([Row("a", words=("x", "y"), label=(1,))], tokenizer, Encoding())


CONTEXT = "The duke of Normandy reads 345 books in Paris, while a man eats bread. " * 4


def question(i: str, answer: str | None, context: str = CONTEXT, start: int = 0) -> Row:
    found = () if answer is None else ((answer, context.index(answer, start)),)
    return Row(i, "what country is the duke in ?", context, answers=found)


@pytest.mark.parametrize("name", NAMES)
def test_windows_are_what_the_tokenizer_overflows(name: str) -> None:
    tokenizer = make(name)
    many = [question("q0", "Paris"), question("q1", None), question("q2", "a man eats", start=200)]
    enc = Encoding(positions=64, max_length=60, doc_stride=7)
    features = encode_span(many, tokenizer, enc)
    asked = len(tokenizer(many[0].text, add_special_tokens=False)["input_ids"])
    room = 60 - asked - frame_of(tokenizer, pair=True).size
    want = tokenizer(
        [r.text for r in many],
        [r.pair or "" for r in many],
        truncation="only_second",
        max_length=60,
        stride=room - 7,
        return_overflowing_tokens=True,
        return_offsets_mapping=True,
    )
    assert features.fixed["row"].tolist() == want["overflow_to_sample_mapping"]
    assert len(features) > 6
    for w in range(len(features)):
        assert features.piece("input_ids", w).tolist() == want["input_ids"][w]
        context = [0 if s != 1 else 1 for s in want.sequence_ids(w)]
        context[0] = 1
        assert features.piece("allowed", w).tolist() == context
        _check_answer(features, w, many[features.fixed["row"][w]])


def _check_answer(features: Any, w: int, row: Row) -> None:
    start, end = features.fixed["start"][w], features.fixed["end"][w]
    chars = features.piece("char_start", w), features.piece("char_end", w)
    if start == 0:
        assert end == 0
        if row.answers:  # then it is not whole in the window
            text, first = row.answers[0]
            inside = features.piece("allowed", w).astype(bool)
            inside[0] = False
            assert chars[0][inside].min() > first or chars[1][inside].max() < first + len(text)
        return
    text, first = (row.answers or ())[0]
    assert (chars[0][start], chars[1][end]) == (first, first + len(text))


def test_every_answer_has_a_window_and_long_questions_are_cut() -> None:
    many = [question("q0", "Paris"), Row("q1", SENTENCE * 3, CONTEXT, answers=(("bread", 64),))]
    features = encode_span(many, make("bert"), Encoding(positions=64, max_query_length=20))
    assert features.info["questions_cut"] == 1 and features.info["answers_lost"] == 0
    first = features.piece("input_ids", int(np.flatnonzero(features.fixed["row"] == 1)[0]))
    assert first.tolist()[21] == make("bert").sep_token_id
    with pytest.raises(DataError, match="not found at character 3"):
        encode_span([Row("q", "x", CONTEXT, answers=(("bread", 3),))], make("bert"), Encoding())
    with pytest.raises(DataError, match="no room"):
        encode_span(many, make("bert"), Encoding(positions=23))


@pytest.mark.parametrize("name", MASKED)
def test_masked_numbers(name: str) -> None:
    tokenizer = make(name)
    many = [Row("a", "12 + 7 =", label=19), Row("b", "6789 - 345 =", label=6444), Row("c", "1 - 1 =", label=0)]
    count = masks_needed(many, tokenizer)
    features = encode_number(many, tokenizer, Encoding(masks=count), causal=False)
    assert features.info["answers_too_long"] == 0
    for n, r in enumerate(many):
        ids, target = features.piece("input_ids", n), features.piece("target", n)
        at = int(features.fixed["read_at"][n])
        assert (ids[at : at + count] == tokenizer.mask_token_id).all()
        assert (ids == tokenizer.mask_token_id).sum() == count
        answer = target[target != IGNORE]
        assert np.flatnonzero(target != IGNORE).tolist() == list(range(at, at + len(answer)))
        assert answer[-1] == tokenizer.sep_token_id and len(answer) <= count
        spelled = "".join(tokenizer.convert_ids_to_tokens(answer[:-1].tolist()))
        assert spelled.replace("##", "").lstrip("Ġ▁") == str(r.label)
    asked = encode_number([Row("u", "12 + 7 =")], tokenizer, Encoding(), causal=False)
    assert asked.info["unlabelled"] == 1 and (asked.ragged["target"] == IGNORE).all()
    short = encode_number(many, tokenizer, Encoding(masks=1), causal=False)
    assert short.info["answers_too_long"] >= 1
    assert ((short.ragged["target"] != IGNORE).sum()) == 3


@pytest.mark.parametrize("name", NAMES)
def test_causal_numbers_predict_the_answer_then_the_end(name: str) -> None:
    tokenizer = make(name)
    many = [Row("a", "12 + 7 =", label=19), Row("b", "6789 - 345 =", label=6444)]
    features = encode_number(many, tokenizer, Encoding(), causal=True)
    for n, r in enumerate(many):
        ids, target = features.piece("input_ids", n).tolist(), features.piece("target", n).tolist()
        at, prompt = int(features.fixed["read_at"][n]), int(features.fixed["prompt"][n])
        assert prompt == at + 1
        assert target[:at] == [IGNORE] * at
        assert target[at:-1] == ids[at + 1 :]
        assert target[-1] in (tokenizer.eos_token_id, tokenizer.sep_token_id)
        plain = tokenizer(f"{r.text} {r.label}", add_special_tokens=False)["input_ids"]
        assert ids == [*frame_of(tokenizer, pair=False).before, *plain]
        assert tokenizer.decode(ids[:prompt], skip_special_tokens=True).replace(" ", "").endswith("=")


@pytest.mark.parametrize("name", NAMES)
def test_running_text_is_cut_without_loss(name: str) -> None:
    tokenizer = make(name)
    many = [Row("a", SENTENCE * 2), Row("b", ""), Row("c", "the film was great")]
    features = encode_mlm_text(many, tokenizer, Encoding(positions=64, chunk=11))
    assert features.info["empty"] == 1 and features.lengths_N.max() <= 11
    for n in (0, 2):
        mine = [w for w in range(len(features)) if features.fixed["row"][w] == n]
        plain = [features.piece("input_ids", w)[features.piece("special", w) == 0] for w in mine]
        assert np.concatenate(plain).tolist() == tokenizer(many[n].text, add_special_tokens=False)["input_ids"]
        sizes = [len(p) for p in plain]
        assert max(sizes) - min(sizes) <= 1  # no scrap at the end of a long text
        for w in mine:
            assert features.piece("special", w).sum() == tokenizer.num_special_tokens_to_add(pair=False)
    causal = encode_clm_text(many, tokenizer, Encoding(positions=64, chunk=11))
    for w in range(len(causal)):
        ids, target = causal.piece("input_ids", w).tolist(), causal.piece("target", w).tolist()
        assert target == [*ids[1:], IGNORE] and len(ids) >= 2


def test_a_lone_token_is_dropped_and_counted() -> None:
    tokenizer = make("gpt2")
    features = encode_clm_text([Row("a", "the film was"), Row("b", "the")], tokenizer, Encoding(chunk=2))
    assert features.info["dropped"] == 2 and features.ids == ("a",)
    with pytest.raises(DataError, match="nothing to predict"):
        encode_clm_text([Row("b", "the")], tokenizer, Encoding())


def batch(count: int = 400, width: int = 60) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    special = np.zeros((count, width), dtype=np.int64)
    special[:, [0, -1]] = 1
    return rng.integers(5, 1000, size=(count, width)), special


def test_masking_follows_80_10_10() -> None:
    ids_BT, special_BT = batch()
    corrupted_BT, target_BT = mask_tokens(ids_BT, special_BT, np.arange(400), 0, Masking(4, 1000, seed=1))
    chosen_BT = target_BT != IGNORE
    assert not (chosen_BT & (special_BT == 1)).any()
    assert (target_BT[chosen_BT] == ids_BT[chosen_BT]).all()
    assert (corrupted_BT[~chosen_BT] == ids_BT[~chosen_BT]).all()
    share = chosen_BT.sum() / (special_BT == 0).sum()
    assert abs(share - 0.15) < 0.008
    masked = (corrupted_BT[chosen_BT] == 4).mean()
    same = (corrupted_BT[chosen_BT] == ids_BT[chosen_BT]).mean()
    assert abs(masked - 0.8) < 0.025 and abs(same - 0.1) < 0.02
    drawn = corrupted_BT[chosen_BT & (corrupted_BT != 4) & (corrupted_BT != ids_BT)]
    assert drawn.min() < 100 and drawn.max() > 900 and len(np.unique(drawn)) > 0.75 * len(drawn)


def test_masking_ignores_batch_order_padding_and_size() -> None:
    ids_BT, special_BT = batch()
    masking, index_B = Masking(4, 1000, seed=1), np.arange(400)
    whole = mask_tokens(ids_BT, special_BT, index_B, 2, masking)
    order = np.random.default_rng(1).permutation(400)
    shuffled = mask_tokens(ids_BT[order], special_BT[order], index_B[order], 2, masking)
    for a, b in zip(whole, shuffled, strict=True):
        assert np.array_equal(a[order], b)
    padded, real = np.pad(ids_BT, ((0, 0), (0, 9))), np.pad(np.ones_like(ids_BT), ((0, 0), (0, 9)))
    wide = mask_tokens(padded, np.pad(special_BT, ((0, 0), (0, 9))), index_B, 2, masking, attention_BT=real)
    assert np.array_equal(wide[0][:, :60], whole[0]) and (wide[1][:, 60:] == IGNORE).all()
    for index, epoch in ((index_B, 3), (index_B + 1, 2)):
        other = mask_tokens(ids_BT, special_BT, index, epoch, masking)
        assert 0.6 < ((other[1] == IGNORE) == (whole[1] == IGNORE)).mean() < 0.8


def test_masks_by_text_follow_the_text_and_the_seed_alone() -> None:
    ids_BT, special_BT = batch(50)
    masking = Masking(4, 1000, seed=1, by_text=True)
    whole = mask_tokens(ids_BT, special_BT, np.arange(50), 0, masking)
    padded, real = np.pad(ids_BT[7:9], ((0, 0), (0, 9))), np.pad(np.ones_like(ids_BT[7:9]), ((0, 0), (0, 9)))
    alone = mask_tokens(padded, np.pad(special_BT[7:9], ((0, 0), (0, 9))), np.array([0, 40]), 0, masking, real)
    for a, b in zip(whole, alone, strict=True):
        assert np.array_equal(a[7:9], b[:, :60])
    places = [np.flatnonzero(t != IGNORE).tolist() for t in whole[1]]
    assert len({tuple(p) for p in places}) > 45
    other = mask_tokens(ids_BT, special_BT, np.arange(50), 0, Masking(4, 1000, seed=2, by_text=True))
    assert 0.6 < ((other[1] == IGNORE) == (whole[1] == IGNORE)).mean() < 0.8


def test_every_row_gets_a_target_if_it_can() -> None:
    ids_BT = np.arange(10, 310).reshape(100, 3)
    special_BT = np.zeros_like(ids_BT)
    special_BT[:, 0] = 1
    special_BT[7] = 1
    _, target_BT = mask_tokens(ids_BT, special_BT, np.arange(100), 0, Masking(4, 1000, seed=1))
    count_B = (target_BT != IGNORE).sum(axis=1)
    assert count_B[7] == 0 and (np.delete(count_B, 7) >= 1).all()
    assert 20 < (target_BT[:, 1] != IGNORE).sum() < 80  # not always the same place


def test_real_tokenizers(shared: Path) -> None:
    from transformers import AutoTokenizer

    for name in ("all-MiniLM-L6-v2", "stories260K", "rxnmapper-albert-smiles-mlm"):
        tokenizer = AutoTokenizer.from_pretrained(shared / "models" / name)
        many = [Row("a", "Once upon a time", "CCO>>CC=O", 0), Row("b", "it was " * 300, "c1ccccc1", 1)]
        features = encode_head(many, tokenizer, Encoding(positions=512))
        for n, r in enumerate(many):
            want = tokenizer(r.text, r.pair, truncation=True, max_length=512)["input_ids"]
            assert features.piece("input_ids", n).tolist() == want
