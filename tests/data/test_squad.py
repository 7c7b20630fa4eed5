"""SQuAD scores against published figures, thresholds and decoders against brute force."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from budwood.data.batch import Features
from budwood.data.encode import Encoding, encode_span
from budwood.data.span_decode import NO_SPAN, SpanRule, decode_hf, decode_original, fill
from budwood.data.squad import best_threshold, normalise, squad_scores, token_f1
from budwood.data.task import Row
from budwood.errors import DataError
from tests.data.tokenizers_for_tests import make

FIELDS = [
    *("exact", "f1", "total", "HasAns_exact", "HasAns_f1", "HasAns_total", "NoAns_exact", "NoAns_f1", "NoAns_total"),
    *("best_exact", "best_exact_thresh", "best_f1", "best_f1_thresh"),
]


def dev_rows(shared: Path) -> list[Row]:
    articles = json.loads((shared / "data" / "squad2-minggg" / "dev-v2.0.json").read_text(encoding="utf-8"))["data"]
    return [
        Row(q["id"], q["question"], p["context"], answers=tuple((a["text"], a["answer_start"]) for a in q["answers"]))
        for a in articles
        for p in a["paragraphs"]
        for q in p["qas"]
    ]


def test_published_figures(shared: Path) -> None:
    rows = dev_rows(shared)
    none = squad_scores(rows, {r.id: "" for r in rows})
    gold = squad_scores(rows, {r.id: r.answers[0][0] if r.answers else "" for r in rows})
    first = squad_scores(rows, {r.id: (r.pair or "").split()[0] for r in rows})
    assert list(none) == FIELDS
    assert (none["total"], none["HasAns_total"], none["NoAns_total"]) == (6078, 2910, 3168)
    near = lambda *values: pytest.approx(values, abs=1e-9)
    names = ("exact", "f1", "NoAns_exact", "HasAns_exact", "HasAns_f1")
    pick = lambda scores: tuple(scores[n] for n in names)
    assert pick(none) == near(52.122408687068116, 52.122408687068116, 100, 0, 0)
    assert pick(gold) == near(100, 100, 100, 100, 100)
    assert pick(first) == near(
        15.02138861467588, 15.911506759483046, 27.998737373737374, 0.8934707903780069, 2.7526247711814733
    )


def test_words_are_compared_as_bags() -> None:
    assert normalise("An  Apple, a day!") == "apple day"
    assert token_f1(["the", "cat", "cat"], ["cat", "cat", "dog"]) == pytest.approx(2 / 3)
    assert token_f1([], []) == 1 and token_f1(["x"], []) == 0


def test_a_lone_article_is_no_answer() -> None:
    assert squad_scores([Row("q", "?", "c", answers=())], {"q": "The"})["exact"] == 100
    both = Row("q", "?", "the duke", answers=(("the", 0), ("duke", 4)))  # a gold answer of an article alone is none
    assert squad_scores([both], {"q": ""})["exact"] == 0 and squad_scores([both], {"q": "duke"})["exact"] == 100


def test_missing_predictions_odds_or_answers_are_refused() -> None:
    row = Row("q", "?", "c", answers=())
    with pytest.raises(DataError, match="'q'"):
        squad_scores([row], {})
    with pytest.raises(DataError, match="null odds"):
        squad_scores([row], {"q": ""}, {"p": 0.0})
    with pytest.raises(DataError, match="without answers"):
        squad_scores([Row("q", "?", "c")], {"q": ""})


def test_the_best_threshold_is_the_best_of_all_thresholds() -> None:
    rng = np.random.default_rng(0)
    for _ in range(500):
        n = int(rng.integers(1, 12))
        score_N = rng.choice([0.0, 0.3, 1.0], size=n)
        none_N = rng.choice([0.0, 1.0], size=n)
        odds_N = rng.choice([-2.0, -1.0, 0.0, 0.5, 3.0], size=n)
        at = lambda t: float(np.where(odds_N <= t, score_N, none_N).mean())  # noqa: B023
        best, threshold = best_threshold(score_N, none_N, odds_N)
        assert best == pytest.approx(max(at(t) for t in (-9.0, *odds_N)), abs=1e-12)
        assert at(threshold) == pytest.approx(best, abs=1e-12)


def random_answers(rng: np.random.Generator) -> tuple[list[Row], dict[str, str], dict[str, float]]:
    """Questions with or without an answer, best answers to them, and null odds with ties."""
    golds = ((), (("duke", 0),), (("the duke of paris", 0), ("paris", 9)))
    given = ["the", "duke", "paris", "duke paris", ""]
    size = int(rng.integers(1, 12))
    rows = [Row(f"q{i}", "?", "duke paris", answers=golds[int(rng.integers(0, 3))]) for i in range(size)]
    odds = {r.id: float(rng.choice([-2.0, -1.0, 0.0, 0.5, 3.0])) for r in rows}
    return rows, {r.id: str(rng.choice(given)) for r in rows}, odds


def test_best_scores_of_answers_are_those_of_trying_every_threshold() -> None:
    rng = np.random.default_rng(2)
    for _ in range(500):
        rows, best, odds = random_answers(rng)
        cut = lambda t: {i: "" if odds[i] > t else best[i] for i in best}  # noqa: B023
        tried = [squad_scores(rows, cut(t)) for t in (-9.0, *odds.values())]  # noqa: B023
        found, none = squad_scores(rows, cut(0.0), odds, best), squad_scores(rows, dict.fromkeys(best, ""))
        ways = (found, squad_scores(rows, best, odds), squad_scores(rows, best))
        share = 100 * sum(not r.answers for r in rows) / len(rows)
        for name in ("exact", "f1"):
            assert found[f"best_{name}"] == pytest.approx(max(s[name] for s in tried), abs=1e-9)
            assert squad_scores(rows, cut(found[f"best_{name}_thresh"]))[name] == pytest.approx(
                found[f"best_{name}"], abs=1e-9
            )
            assert all(asked[f"best_{name}"] >= asked[name] - 1e-9 for asked in ways)
            assert none[name] == pytest.approx(share, abs=1e-9) and none[f"best_{name}"] >= share - 1e-9


def test_best_is_never_below_what_was_given() -> None:
    rng = np.random.default_rng(1)
    words = ["the", "duke", "paris", ""]
    for _ in range(200):
        rows = [Row(f"q{i}", "?", "duke paris", answers=(("duke", 0),) if rng.random() < 0.5 else ()) for i in range(8)]
        best = {r.id: str(rng.choice(words)) for r in rows}
        odds = {r.id: round(float(rng.normal()), 1) for r in rows}
        given = {i: "" if odds[i] > 0 else best[i] for i in best}
        scores = squad_scores(rows, given, odds, candidates=best)
        assert scores["best_exact"] >= scores["exact"] - 1e-9 and scores["best_f1"] >= scores["f1"] - 1e-9


# --- decoders ---------------------------------------------------------------------------------------------------------


def random_case(rng: np.random.Generator) -> tuple[Features, list[Row], np.ndarray, np.ndarray]:
    """Windows over contexts of one-letter tokens; scores on a coarse grid, so that ties abound."""
    step, room = int(rng.integers(1, 4)), int(rng.integers(3, 7))
    rows, ids, windows = [], [], []
    for n in range(int(rng.integers(1, 4))):
        size = int(rng.choice([0, 1, 4, 9]))
        rows.append(Row(f"q{n}", "?", " ".join(rng.choice(list("abcxyz"), size=size)), answers=()))
        first = 0
        while True:
            taken = min(room, size - first)
            windows.append((n, first, taken))
            ids.append(f"q{n}")
            if first + room >= size:
                break
            first += min(step, room)
    shuffled = [windows[i] for i in rng.permutation(len(windows))]
    columns: dict[str, list[list[int]]] = {"input_ids": [], "allowed": [], "char_start": [], "char_end": []}
    for _, first, taken in shuffled:
        question = int(rng.integers(0, 3))
        lead = 1 + question
        columns["input_ids"].append([7] * (lead + taken + 1))
        columns["allowed"].append([1] + [0] * question + [1] * taken + [0])
        columns["char_start"].append([0] * lead + [2 * (first + t) for t in range(taken)] + [0])
        columns["char_end"].append([0] * lead + [2 * (first + t) + 1 for t in range(taken)] + [0])
    fixed = {"row": [w[0] for w in shuffled], "first": [w[1] for w in shuffled]}
    features = Features.from_lists([f"q{w[0]}" for w in shuffled], columns, fixed)
    total = int(features.offsets_N1[-1])
    grid = lambda: rng.integers(-3, 4, size=total).astype(np.float64) if rng.random() < 0.7 else rng.normal(size=total)
    return features, rows, grid(), grid()


def windows_of(features: Features, n: int) -> list[int]:
    mine = [w for w in range(len(features)) if features.fixed["row"][w] == n]
    return sorted(mine, key=lambda w: features.fixed["first"][w])


def cut(features: Features, flat: np.ndarray, w: int) -> np.ndarray:
    return flat[features.offsets_N1[w] : features.offsets_N1[w + 1]]


def context_places(features: Features, w: int) -> list[int]:
    return [p for p, ok in enumerate(features.piece("allowed", w)) if ok and p > 0]


def slow_hf(
    features: Features, rows: list[Row], start: np.ndarray, end: np.ndarray, rule: SpanRule
) -> dict[str, tuple[str, str, float, list[tuple[str, float]], tuple[int, int] | None]]:
    out = {}
    for n, row in enumerate(rows):
        mine = windows_of(features, n)
        widest: dict[int, tuple[float, int]] = {}
        for w in mine:
            places = context_places(features, w)
            for i, p in enumerate(places):
                char = int(features.piece("char_start", w)[p])
                view = min(i, len(places) - 1 - i) + 0.01 * len(places)
                if char not in widest or view > widest[char][0]:
                    widest[char] = (view, w)
        found = []
        for w in mine:
            S, E, places = cut(features, start, w), cut(features, end, w), context_places(features, w)
            firsts = sorted(places, key=lambda p: (-S[p], p))[: rule.n_best]
            lasts = sorted(places, key=lambda p: (-E[p], p))[: rule.n_best]
            for i in firsts:
                a = int(features.piece("char_start", w)[i])
                if widest[a][1] != w:
                    continue
                for j in lasts:
                    if i <= j < i + rule.max_answer:
                        found.append((-(S[i] + E[j]), a, int(features.piece("char_end", w)[j])))
        found.sort()
        texts: dict[str, float] = {}
        chars = found[0][1:] if found else None
        for score, a, b in found:
            if len(texts) < rule.n_best:
                texts.setdefault((row.pair or "")[a:b], -score)
        null = min(cut(features, start, w)[0] + cut(features, end, w)[0] for w in mine)
        best = next(iter(texts), "")
        odds = null - texts[best] if best else NO_SPAN
        listed = sorted([*texts.items(), ("", null)], key=lambda x: -x[1])
        out[row.id] = ("" if odds > rule.threshold else best, best, odds, listed, chars)
    return out


def slow_original(
    features: Features, rows: list[Row], start: np.ndarray, end: np.ndarray, rule: SpanRule
) -> dict[str, tuple[str, float, tuple[int, int] | None]]:
    out = {}
    for n, row in enumerate(rows):
        kept: tuple[float, str, float, tuple[int, int] | None] | None = None
        for w in windows_of(features, n):
            S, E, places = cut(features, start, w), cut(features, end, w), context_places(features, w)
            null = S[0] + E[0]
            best, span = -np.inf, (0, 0)
            for j in places:
                reach = [k for k in places if j <= k < j + rule.max_answer]
                k = max(reach, key=lambda k: (E[k], -k))  # noqa: B023
                if S[j] + E[k] >= best:
                    best, span = S[j] + E[k], (j, k)
            answered = bool(places) and best >= null + rule.threshold
            chars = None
            if places:
                chars = int(features.piece("char_start", w)[span[0]]), int(features.piece("char_end", w)[span[1]])
            text = (row.pair or "")[slice(*chars)] if answered and chars else ""
            score = best if answered else null
            if kept is None or score > kept[0]:
                kept = (score, text, null - best if places else NO_SPAN, chars)
        assert kept is not None
        out[row.id] = kept[1:]
    return out


@pytest.mark.parametrize("seed", range(10))
def test_both_decoders_agree_with_brute_force(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(100):
        features, rows, start, end = random_case(rng)
        rule = SpanRule(
            int(rng.choice([1, 2, 5, 30])), int(rng.choice([1, 2, 3, 20])), float(rng.choice([-1.0, 0.0, 1.0]))
        )
        fast, slow = decode_hf(features, rows, start, end, rule), slow_hf(features, rows, start, end, rule)
        for i, (answer, best, odds, listed, chars) in slow.items():
            assert (fast.answers[i], fast.best[i], fast.spans[i]) == (answer, best, chars)
            assert fast.null_odds[i] == pytest.approx(odds, abs=1e-12)
            assert [x["text"] for x in fast.nbest[i]] == [t for t, _ in listed]
            assert [x["score"] for x in fast.nbest[i]] == pytest.approx([s for _, s in listed])
            assert sum(float(x["probability"]) for x in fast.nbest[i]) == pytest.approx(1)
        plain, oracle = (
            decode_original(features, rows, start, end, rule),
            slow_original(features, rows, start, end, rule),
        )
        for i, (answer, odds, chars) in oracle.items():
            assert (plain.answers[i], plain.spans[i]) == (answer, chars)
            assert plain.null_odds[i] == pytest.approx(odds, abs=1e-12)


def test_window_order_and_constant_shifts_change_nothing() -> None:
    rng = np.random.default_rng(77)
    for _ in range(30):
        features, rows, start, end = random_case(rng)
        order = rng.permutation(len(features))
        moved = features.take(order)
        flat = np.concatenate([np.arange(features.offsets_N1[w], features.offsets_N1[w + 1]) for w in order])
        for decode in (decode_hf, decode_original):
            a = decode(features, rows, start, end)
            assert decode(moved, rows, start[flat], end[flat]) == a  # odds, spans and lists as well
            for far in (decode(features, rows, start + 5, end - 3), decode(features, rows, start + 64, end + 64)):
                assert (far.answers, far.best, far.spans) == (a.answers, a.best, a.spans)
                assert far.null_odds == pytest.approx(a.null_odds, abs=1e-9)


@pytest.mark.parametrize("name", ["bert", "roberta", "gpt2", "albert", "llama"])
def test_a_planted_span_comes_back_with_its_characters(name: str) -> None:
    context = "The duke of Normandy reads 345 books in Paris, while a man eats bread. " * 5
    rows = [
        Row("q0", "who reads ?", context, answers=(("duke of Normandy", 4),)),
        Row("q1", "who eats ?", context, answers=(("a man", context.index("a man", 200)),)),
        Row("q2", "what ?", context, answers=()),
    ]
    features = encode_span(rows, make(name), Encoding(positions=60, doc_stride=9))
    start, end = np.zeros(len(features.ragged["input_ids"])), np.zeros(len(features.ragged["input_ids"]))
    at_W, has_W = features.offsets_N1[:-1], features.fixed["start"] > 0
    start[(at_W + features.fixed["start"])[has_W]] = 10
    end[(at_W + features.fixed["end"])[has_W]] = 10
    start[at_W[features.fixed["row"] == 2]] = 5
    for decode in (decode_hf, decode_original):
        rule = SpanRule(max_answer=40)
        out = decode(features, rows, start, end, rule)
        assert out.answers == {"q0": "duke of Normandy", "q1": "a man", "q2": ""}
        for r in rows[:2]:
            text, first = (r.answers or ())[0]
            assert out.spans[r.id] == (first, first + len(text))
        assert squad_scores(rows, out.answers, out.null_odds, out.best)["exact"] == 100


def test_detokenised_text_and_files() -> None:
    tokenizer = make("bert")
    row = Row("q", "who ?", "the duke, of Normandy", answers=(("duke, of", 4),))
    features = encode_span([row], tokenizer, Encoding(positions=64))
    start, end = np.zeros(len(features.ragged["input_ids"])), np.zeros(len(features.ragged["input_ids"]))
    start[features.fixed["start"][0]] = end[features.fixed["end"][0]] = 9
    rebuilt = decode_original(
        features, [row], start, end, detokenise=lambda ids: " ".join(tokenizer.convert_ids_to_tokens(ids))
    )
    assert rebuilt.answers["q"] == "duke , of"
    out = decode_hf(features, [row], start, end)
    files = {name: json.loads(text) for name, text in out.files().items()}
    assert files["predictions.json"] == {"q": "duke, of"}
    assert files["nbest_predictions.json"]["q"][0]["text"] == "duke, of" and files["null_odds.json"]["q"] == -18


def test_scores_of_batches_find_their_places() -> None:
    features = Features.from_lists(["a", "b", "c"], {"input_ids": [[1, 2], [3], [4, 5, 6]]})
    flat = np.zeros(6)
    fill(flat, features, np.array([2, 0]), np.array([[4.0, 5, 6], [1, 2, 99]]))
    fill(flat, features, np.array([1]), np.array([[3.0]]))
    assert flat.tolist() == [1, 2, 3, 4, 5, 6]


def test_scores_that_do_not_fit_are_refused() -> None:
    features, rows, start, end = random_case(np.random.default_rng(5))
    with pytest.raises(DataError, match="tokens of windows"):
        decode_hf(features, rows, start[:-1], end)
    with pytest.raises(DataError, match="same rows"):
        decode_hf(features, [*rows, Row("more", "?", "c")], start, end)


def test_real_windows(shared: Path) -> None:
    from transformers import AutoTokenizer

    rows = dev_rows(shared)
    tokenizer = AutoTokenizer.from_pretrained(shared / "models" / "minilm-l6-mlm")
    features = encode_span(rows, tokenizer, Encoding(positions=512, max_length=384))
    assert len(features) == 6372  # 1,593 batches of four, as the published study counted
    assert features.info["answers_lost"] == 0
    start = np.zeros(len(features.ragged["input_ids"]), dtype=np.float32)
    end = start.copy()
    at_W, has_W = features.offsets_N1[:-1], features.fixed["start"] > 0
    start[(at_W + features.fixed["start"])[has_W]] = end[(at_W + features.fixed["end"])[has_W]] = 10
    out = decode_hf(features, rows, start, end, SpanRule(max_answer=400))
    assert list(out.answers) == [r.id for r in rows] and len(set(out.answers)) == 6078
    order = np.random.default_rng(0).permutation(len(features))
    flat = np.concatenate([np.arange(*features.offsets_N1[w : w + 2]) for w in order])
    start += np.random.default_rng(1).normal(size=len(start)).astype(np.float32)  # so that windows disagree
    for decode in (decode_hf, decode_original):
        told = decode(features, rows, start, end)
        assert list(told.answers) == [r.id for r in rows]
        assert decode(features.take(order), rows, start[flat], end[flat]) == told
    wrong = [r for r in rows if r.answers and out.answers[r.id] != r.answers[0][0]]
    for r in wrong:  # only answers that begin or end inside a token cannot come back
        assert (r.answers or ())[0][0] in out.answers[r.id]
    assert len(wrong) <= 5
