"""Features of words against a loop over tokens, and what they can and cannot find."""

from __future__ import annotations

import numpy as np

from budwood.data.batch import Features
from budwood.methods.probe import words
from budwood.methods.probe.words import PIECES, REACH, Words, features


def windows(rows=30, seed=0):
    """[1 question 2 context 2] with pieces 10 .. 39."""
    rng = np.random.default_rng(seed)
    ids, allowed, starts = [], [], []
    for _ in range(rows):
        question, context = rng.integers(10, 40, rng.integers(2, 5)), rng.integers(10, 40, rng.integers(3, 25))
        ids.append([1, *question, 2, *context, 2])
        allowed.append([1, *[0] * (len(question) + 1), *[1] * len(context), 0])
        starts.append(len(question) + 2 + int(rng.integers(len(context))))
    names = [str(i) for i in range(rows)]
    fixed = {"start": starts, "end": starts, "row": list(range(rows)), "first": [0] * rows}
    return Features.from_lists(names, {"input_ids": ids, "allowed": allowed}, fixed)


def slowly(learned: Words, encoded: Features) -> np.ndarray:
    out = []
    for n in range(len(encoded)):
        ids, allowed = (encoded.piece(name, n).tolist() for name in ("input_ids", "allowed"))
        question = {i for i, a in zip(ids, allowed) if not a}
        kept = [i for i, a in zip(ids, allowed) if a]
        shared = [i in question and t > 0 for t, i in enumerate(kept)]
        for t, i in enumerate(kept):
            row = []
            for other in (t, t - 1, t + 1):
                hot = [0.0] * len(learned.pieces_P)
                if t > 0 and 0 < other < len(kept) and kept[other] in learned.pieces_P.tolist():
                    hot[learned.pieces_P.tolist().index(kept[other])] = 1.0
                row += hot
            near = [sum(shared[max(0, t - r) : t + r + 1]) - shared[t] for r in REACH]
            rare = learned.rarity_V[min(i, len(learned.rarity_V) - 1)]
            plain = [float(shared[t]), *((0.0,) * 3 if t == 0 else (rare, *(c / r for c, r in zip(near, REACH))))]
            row += plain
            for piece in learned.openings_Q:
                row += [v * (ids[1] == piece) for v in (*plain, float(t == 0))]
            out.append([*row, float(t == 0), (t == 0) * sum(shared) / len(kept)])
    return np.array(out)


def test_features_are_those_of_a_loop():
    train, other = windows(), windows(7, 1)
    learned = Words.of(train)
    assert len(learned.pieces_P) <= PIECES and 1 not in learned.pieces_P[: len(set(range(10, 40)))]
    for encoded in (train, other):
        found = features(learned, encoded)
        assert found.shape[1] == learned.width
        np.testing.assert_allclose(found, slowly(learned, encoded), atol=1e-5)


def test_the_word_after_a_shared_one_is_found(monkeypatch):
    """An answer that follows a word of the question can be told from words; a random place cannot."""
    encoded = windows(400)
    learned = Words.of(encoded)
    x_MD = features(learned, encoded)
    size_W = words.kept_counts(encoded, "allowed")
    begin_W = np.cumsum(size_W) - size_W
    random = words.spans.gold(encoded)
    near = x_MD[:, 3 * len(learned.pieces_P) + 2]
    planted_W = np.array([b + 1 + near[b + 1 : b + s].argmax() for b, s in zip(begin_W, size_W)])
    place = np.flatnonzero(encoded.ragged["allowed"]) - np.repeat(encoded.offsets_N1[:-1], size_W)
    fixed = {**encoded.fixed, "start": place[planted_W], "end": place[planted_W]}
    planted = Features(encoded.ids, encoded.offsets_N1, encoded.ragged, fixed)
    share = {}
    for name, what in (("planted", planted), ("random", encoded)):
        best = words._scores(learned, what, words._solved(learned, what)[-1])[0]
        gold_W = words.spans.gold(what)[0]
        share[name] = np.mean([best[g] >= best[b : b + s].max() for g, b, s in zip(gold_W, begin_W, size_W)])
    assert share["planted"] > 0.5 > share["random"] + 0.1 and random.shape == (2, 400)
    whole = words._scores(learned, planted, np.ones((2, learned.width), np.float32))
    monkeypatch.setattr(words, "BLOCK", 7)
    blocks = words._scores(learned, planted, np.ones((2, learned.width), np.float32))
    np.testing.assert_allclose(blocks, whole, rtol=1e-6)  # a product of other shape may add up in another order
