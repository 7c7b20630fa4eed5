"""The verb from end to end on few rows, its pieces against slow versions, and bad input."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import budwood as bw
from budwood.capture.features import Ask, bytes_of, config_of, open_reading
from budwood.config.probe import ProbeConfig
from budwood.data.source import load_task
from budwood.data.span_decode import SpanPredictions
from budwood.data.task import Row
from budwood.errors import BudwoodError, ConfigError, DataError, ModelError, StoreError
from budwood.linalg.choice import Choices, log_chances, solve_choices
from budwood.linalg.folds import cross_validate, stratified_folds
from budwood.linalg.leace import eraser
from budwood.linalg.newton import minimise
from budwood.methods.probe import head, labels, spans, verb
from budwood.methods.probe.code import folds_by_document, online_codes, portions, resamples
from budwood.methods.probe.labels import code_length
from budwood.methods.probe.saved import evaluate, predict
from budwood.models.reference import resolve
from budwood.studies.recipe import read_recipe
from budwood.studies.verbs import run_verb


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.setenv("BUDWOOD_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def go(place, task, **more):
    given = {"task": task, "limit": 60, "limit_eval": 40, "threads": 1}
    solved = {} if "solver" in more else {"costs": (0.01, 0.1), "repeats": 2}
    folds = {} if "solver" in more or task == "tiny-qa" else {"folds": 2}
    cfg = ProbeConfig(**{**given, **solved, **folds, "progress": "none", "out": place / f"run-{task}", **more})
    return run_verb("probe", cfg, ["tiny-bert"])


@pytest.mark.parametrize(("task", "more"), [("tiny-tags", {"erase": True, "pvi": True}), ("tiny-qa", {})])
def test_a_run_and_what_can_be_done_with_it_later(place, task, more):
    result = go(place, task, layers=(0, 3), **more)
    (found,) = result.metrics["results"]
    assert [x["layer"] for x in found["layers"]] == [0, 3]
    assert {"score", "low", "high", "selectivity", "compression"} <= set(found["layers"][0])
    assert [x["unconverged"] for x in found["layers"]] == [0, 0]
    assert all(x["low"] <= x["score"] <= x["high"] for x in found["layers"])
    trivial = "never_answering" if task == "tiny-qa" else "majority"
    assert len(result.metrics["baselines"]["random_encoder"]) == 2 and result.metrics["baselines"][trivial] > 0
    assert result.metrics["baselines"]["bag_of_words"] > 0
    assert (result.run / "figures" / "map.png").exists() and (result.run / "figures" / "layers.svg").exists()
    first = json.loads((result.run / "predictions" / "0-tiny-bert" / "layer_03.json").read_text())
    again = predict(result.run)
    assert json.loads((again / "0-tiny-bert" / "layer_03.json").read_text()) == first
    rows = evaluate([place])
    assert {r["layer"] for r in rows} == {0, 3} and len(rows) == 4
    index = result.run / "probes" / "index.json"
    index.write_text(index.read_text().replace('"model_hash": "', '"model_hash": "x'))
    with pytest.raises(ModelError, match="is not the model these probes were trained on"):
        predict(result.run)


@pytest.mark.parametrize(
    ("task", "more", "kind", "words"),
    [
        ("tiny-topic", {"layers": (9,)}, ConfigError, "layer 9, and this model has layers 0 .embeddings. to 4"),
        ("tiny-text", {}, ConfigError, "has no labels for a probe"),
        ("tiny-topic", {"limit": 3, "folds": 5}, DataError, "cannot make 5 folds"),
        (
            "tiny-qa",
            {"erase": True},
            ConfigError,
            "--erase takes labels out of states; task 'tiny-qa' .kind 'span'. has",
        ),
        ("tiny-qa", {"pvi": True, "solver": "adamw"}, ConfigError, "--pvi is about labels"),
        ("tiny-qa", {"folds": 3}, ConfigError, "--folds leaves labels out to choose C"),
        ("tiny-qa", {"states": "mean"}, ConfigError, "--states mean is about the one state of a row"),
        ("tiny-tags", {"states": "cls"}, ConfigError, "--states cls is about the one state of a row"),
        ("tiny-topic", {"decode": "original"}, ConfigError, "--decode original is about answers"),
        ("tiny-topic", {"bidaf": 1}, ConfigError, "--bidaf reads answers"),
        ("tiny-topic", {"compare": True}, ConfigError, "difference of two models; 1 were given"),
    ],
)
def test_bad_input_is_told(place, task, more, kind, words):
    with pytest.raises(kind, match=words):
        go(place, task, **more)


def test_the_random_encoder_alone_can_be_left_away(place):
    found = go(place, "tiny-topic", layers=(0,), no_random_encoder=True).metrics
    assert "random_encoder" not in found["baselines"] and "selectivity" in found["results"][0]["layers"][0]


@pytest.mark.parametrize("task", ["tiny-topic", "tiny-qa"])
def test_fits_that_have_not_converged_are_counted_and_told(place, monkeypatch, capsys, task):
    monkeypatch.setattr("budwood.linalg.softmax.minimise", partial(minimise, steps=1))
    monkeypatch.setattr("budwood.linalg.choice.minimise", partial(minimise, steps=1))
    (found,) = go(place, task, layers=(3,), no_controls=True, progress="plain").metrics["results"]
    (layer,) = found["layers"]
    assert layer["unconverged"] > 0
    assert f"layer 3: {layer['unconverged']} fits have not converged" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("task", "more", "by"),
    [("tiny-topic", {}, "cv"), ("tiny-topic", {"solver": "adamw"}, "train_loss"), ("tiny-qa", {}, "tune_f1")],
)
def test_the_layer_is_not_chosen_on_the_reported_rows(place, monkeypatch, task, more, by):
    """With reported scores turned upside down the same layer is chosen."""
    places, found = verb._places, []
    for sign in (1, -1):

        def turned(*given, sign=sign):
            out = places(*given)
            return out | {"layers": [x | {"score": sign * x["score"]} for x in out["layers"]]}

        monkeypatch.setattr(verb, "_places", turned)
        found.append(go(place, task, no_controls=True, out=place / f"run{sign}", **more).metrics)
    one, other = (m["results"][0] for m in found)
    assert one["best_layer"] == other["best_layer"] and one["chosen_by"] == by
    scores = {x["layer"]: x["score"] for x in one["layers"]}
    assert found[0]["score"] == one["score"] == scores[one["best_layer"]]
    best = (min if by == "train_loss" else max)(x[by] for x in one["layers"])
    assert next(x[by] for x in one["layers"] if x["layer"] == one["best_layer"]) == best


def test_the_head_is_decoded_and_tuned_like_the_probes(place, monkeypatch):
    """A shift of all null scores spoils the raw score of a head; the tuned one does not see it, like a probe's."""
    scored, loaded, decode = head.evaluate, head.load, head.spans.decode_original
    found, asked = {}, []

    def planted(read, rows, cfg, shift):
        """Scores of a head that finds most answers, all nulls moved by `shift`."""
        encoded, out = read.encode(rows), scored(read, rows, cfg)
        first_W = encoded.offsets_N1[:-1]
        ends_2M = np.random.default_rng(0).normal(size=out.ends_2M.shape)
        for k, name in enumerate(("start", "end")):
            ends_2M[k, first_W + encoded.fixed[name]] += 4
        ends_2M[:, first_W] += shift
        return replace(out, ends_2M=ends_2M.astype(np.float32))

    monkeypatch.setattr(head, "load", lambda *a, **k: replace(loaded(*a, **k), fresh=()))
    monkeypatch.setattr(head.spans, "decode_original", lambda *a: (asked.append(len(a[1])), decode(*a))[1])
    quiet = SimpleNamespace(stage=lambda name: nullcontext())
    for rule, shift in (("hf", 0.0), ("hf", 50.0), ("original", 0.0)):
        monkeypatch.setattr(head, "evaluate", lambda *a, shift=shift: planted(*a, shift))
        cfg = ProbeConfig(task="tiny-qa", limit=60, limit_eval=40, decode=rule)
        task = load_task(cfg)
        session = SimpleNamespace(cfg=cfg, task=task, progress=quiet)
        tune = SimpleNamespace(rows=task.rows("validation"))
        found[rule, shift] = head.head_scores(session, resolve("tiny-bert"), tune)
    plain, moved, original = found.values()
    assert plain["head_score"] > 70 and moved["head_score"] == pytest.approx(plain["head_score"], abs=1e-9)
    assert moved["head_threshold"] == pytest.approx(plain["head_threshold"] + 100, abs=1e-3)
    assert moved["head_raw_f1"] == plain["head_raw_f1"] == original["head_raw_f1"]
    assert asked == [40, 40]  # the reported and the tuning rows


def own_task(place, kind):
    """Rows of the shipped world under another metric: MCC of labels, F1 of whole entities (names, one tag in two)."""
    home = place / kind
    home.mkdir()
    for split in ("train", "test"):
        rows = []
        for i, r in enumerate(bw.task("tiny-entail" if kind == "label" else "tiny-tags").rows(split)[:80]):
            if kind == "label":
                rows.append({"id": f"{split}{i}", "premise": r.text, "hypothesis": r.pair, "label": "ny"[r.label]})
            else:
                tags = ["B-X" if t % 3 == 0 else "I-X" if t % 3 == 1 else "O" for t in r.label]
                rows.append({"id": f"{split}{i}", "words": list(r.words), "tags": tags})
        (home / f"{split}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    metric = "mcc" if kind == "label" else "f1"
    files = "{train: train.jsonl, test: test.jsonl}"
    (home / "task.yaml").write_text(f"name: own\nkind: {kind}\nfiles: {files}\nmetric: {metric}\n")
    return home / "task.yaml"


@pytest.mark.parametrize("kind", ["label", "tokens"])
def test_saved_predictions_are_scored_as_the_run_scored_them(place, kind):
    result = go(place, str(own_task(place, kind)), layers=(0, 3), no_controls=True, out=place / "run")
    wanted = {x["layer"]: x["score"] for x in result.metrics["results"][0]["layers"]}
    rows = evaluate([place])
    assert {r["layer"]: r["score"] for r in rows} == pytest.approx(wanted, abs=1e-12)
    assert {r["metric"] for r in rows} == {result.metrics["metric"]} == {"mcc" if kind == "label" else "f1"}
    assert any(abs(r["score"] - r["accuracy"]) > 1e-3 for r in rows)


def test_label_probes_predict_rows_without_labels(place):
    sheet = own_task(place, "label")
    result = go(place, str(sheet), layers=(0, 3), no_controls=True, out=place / "run")
    first = json.loads((result.run / "predictions" / "0-tiny-bert" / "layer_03.json").read_text())
    lines = [json.loads(x) for x in (place / "label" / "test.jsonl").read_text().splitlines()]
    (place / "bare.jsonl").write_text("".join(json.dumps({**x, "label": None}) + "\n" for x in lines))
    other = place / "bare.yaml"
    other.write_text("name: bare\nkind: text\nfiles: {test: bare.jsonl}\n")
    again = predict(result.run, str(other)) / "0-tiny-bert" / "layer_03.json"
    given = {i.replace("bare/", "own/"): x for i, x in json.loads(again.read_text()).items()}
    assert given.keys() == first.keys() and len(given) == 40
    assert sum(given[i] != first[i] for i in given) <= 1  # the run's states have 16 bits
    assert again.with_suffix(".csv").read_text().splitlines()[1].split(",")[1] == ""
    said = []
    assert {r["set"] for r in evaluate([place], said.append)} == {"predictions"} and "no labels" in said[0]


def test_predict_keeps_to_what_the_run_was_told_of_features(place):
    online = go(place, "tiny-topic", solver="adamw", online=True, layers=(0, 3), no_controls=True)
    first = json.loads((online.run / "predictions" / "0-tiny-bert" / "layer_03.json").read_text())
    again = predict(online.run)
    assert not (place / "cache" / "features").exists()
    assert json.loads((again / "0-tiny-bert" / "epoch_3" / "layer_03.json").read_text()) == first
    kept = go(place, "tiny-topic", layers=(0,), no_controls=True, feature_budget=1e-3, out=place / "kept")
    index = kept.run / "probes" / "index.json"
    index.write_text(index.read_text().replace('"feature_budget": 0.001', '"feature_budget": 1e-06'))
    with pytest.raises(DataError, match="more than the 1e-06 GB allowed"):
        predict(kept.run, split="validation")
    assert predict(kept.run, split="validation", online=True).exists()


def test_an_unfinished_run_is_named_and_left_out(place):
    go(place, "tiny-topic", layers=(0,), no_controls=True)
    half = place / "half" / "predictions" / "0-tiny-bert"
    half.mkdir(parents=True)
    (half / "layer_00.json").write_text("{}")
    said = []
    assert len(evaluate([place], said.append)) == 1
    assert len(said) == 1 and "half (0-tiny-bert)" in said[0]
    with pytest.raises(StoreError, match="Unfinished and left out"):
        evaluate([place / "half"])


def test_the_recipe_keeps_within_its_feature_budget(shared):
    """In full size, by the bytes that real questions take; 130,319 and 11,873 are all of them."""
    model = shared / "models" / "all-MiniLM-L6-v2"  # it has the word pieces of bert-base-uncased
    more = {"data_dir": [str(shared / "data")], "limit": 100, "limit_eval": 10, "offline": True}
    steps = [s for s in read_recipe("layer-probes").steps if s.verb == "probe"]
    assert len(steps) == 3
    for step in steps:
        asked = ProbeConfig(**step.settings)
        kind = "token" if asked.parity else "allowed"
        read = open_reading(Ask(str(model), {**config_of(asked), **more}, "train", kind))
        rows = read.task.rows("train")
        each = bytes_of(read, read.encode(rows), kind) / len(rows) * (13 * 768) / (7 * 384)
        assert 130_319 * each > 3e11  # why there are limits
        most = max(asked.limit or 130_319, asked.limit_eval or 11_873)
        assert asked.online or most * each <= 0.5e9 * asked.feature_budget, step.id


def test_states_of_another_prompt_or_tokenizer_are_refused_by_name(place):
    words = {"states": "mask", "mode": "prompt", "layers": (0, 3), "no_controls": True}
    result = go(place, "tiny-topic", **words)
    index = result.run / "probes" / "index.json"
    kept = json.loads(index.read_text())
    (facts,) = kept.values()
    assert "{mask}" in facts["prompt"] and predict(result.run).exists()
    facts["settings"]["template"] = "{text} about {mask} ."
    index.write_text(json.dumps(kept))
    with pytest.raises(DataError, match="features of another prompt: .* there, '{text} about {mask} .' here"):
        predict(result.run)
    facts["settings"]["template"] = None
    facts["tokenizer"] = "x"
    index.write_text(json.dumps(kept))
    with pytest.raises(DataError, match="features of another tokenizer: 'x' there"):
        predict(result.run)
    with pytest.raises(DataError, match="'unfathomable' is 12 tokens"):
        go(place, "tiny-sentiment", **{**words, "label_words": ("great", "unfathomable")})


def test_no_probes_no_predictions(place):
    with pytest.raises(StoreError, match="holds no saved probes"):
        predict(place)
    with pytest.raises(BudwoodError, match="No predictions of finished probes"):
        evaluate([place])


def windows(seed=0, count=60, width=5):
    rng = np.random.default_rng(seed)
    size_W = rng.integers(2, 9, count)
    starts_W = np.cumsum(size_W) - size_W
    x_MD = torch.from_numpy(rng.normal(size=(int(size_W.sum()), width))).float()
    return x_MD, starts_W, starts_W + rng.integers(0, size_W)


def test_choices_reach_the_optimum_that_autograd_finds():
    x_MD, starts_W, gold_W = windows()
    one = np.ones((1, len(starts_W)))
    problem = Choices(starts_W, gold_W[None], one, np.array([0]), np.array([0]), np.array([[0.05], [0.5]]))
    found = solve_choices(x_MD, problem)
    weight = found.weight_SPD[-1, 0].clone().requires_grad_()
    score_M = x_MD.double() @ weight
    parts = score_M.tensor_split(torch.from_numpy(starts_W[1:]))
    loss = sum(p.logsumexp(0) for p in parts) - score_M[torch.from_numpy(gold_W)].sum()
    value = loss / len(starts_W) + weight.square().sum() / (2 * 0.5 * len(starts_W))
    (slope,) = torch.autograd.grad(value, weight)
    assert value.item() == pytest.approx(float(found.objective_SP[-1, 0]), rel=1e-9)
    assert float(slope.abs().max()) < 1e-4


def test_shifting_all_scores_of_a_window_changes_nothing():
    score = np.random.default_rng(0).normal(size=(2, 7))
    starts = np.array([0, 3])
    moved = score + np.repeat([[5.0, -3.0]], 2, 0)[:, [0, 0, 0, 1, 1, 1, 1]]
    np.testing.assert_allclose(log_chances(moved, starts), log_chances(score, starts), atol=1e-12)


def test_description_length_does_not_see_empty_features():
    """With more features than rows the fits are made in the span of the rows: the same code, to rounding."""
    draw = torch.Generator().manual_seed(2)
    x_ND = torch.randn(300, 5, generator=draw)
    y_N = (x_ND[:, 0] + 0.5 * torch.randn(300, generator=draw) > 0).long().numpy()
    turn_DD = torch.linalg.qr(torch.randn(120, 120, generator=draw))[0]
    wide_ND = torch.nn.functional.pad(x_ND, (0, 115)) @ turn_DD
    cfg = ProbeConfig(task="tiny-topic")
    few, many = (code_length(x, y_N, np.arange(300), cfg, 2) for x in (x_ND, wide_ND))
    assert 100 < few < 300 and many == pytest.approx(few, rel=1e-5)


@pytest.mark.parametrize("classes", [2, 4])
def test_description_length_tells_random_labels_from_easy_ones(classes):
    rng = np.random.default_rng(0)
    x_ND = torch.from_numpy(rng.normal(size=(1200, 8))).float()
    cfg = ProbeConfig(task="tiny-topic", costs=(1e-4, 1e-2, 1.0, 100.0))
    label_N = x_ND[:, :classes].argmax(1).numpy()
    x_ND[np.arange(1200), label_N] += 0.5  # separable, and so by a margin
    easy = code_length(x_ND, label_N, np.arange(1200), cfg, classes)
    random = code_length(x_ND, rng.integers(0, classes, 1200), np.arange(1200), cfg, classes)
    uniform = 1200 * np.log2(classes)
    assert easy <= 0.2 * uniform and random >= 0.98 * uniform


def test_the_control_of_labels_has_its_own_cost():
    rng = np.random.default_rng(1)
    x_ND = torch.from_numpy(rng.normal(size=(400, 30))).float()
    word_N = rng.integers(0, 40, 400)  # words tell the control class, through other features than the label
    x_ND[:, 20:] += 0.4 * torch.from_numpy(rng.normal(size=(40, 10))).float()[word_N]
    control_N = rng.integers(0, 2, 40)[word_N]
    label_N = (x_ND[:, 0] > 0).long().numpy()
    side = SimpleNamespace(label_M=label_N, control_M=control_N, document_M=np.arange(400))
    cfg = ProbeConfig(task="tiny-topic", costs=(1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0), folds=4)
    found = labels.fit(x_ND, side, x_ND, cfg, 2, True)
    folds = folds_by_document(label_N, side.document_M, 4)
    scaled_ND = labels.Scale.of(x_ND)(x_ND)
    alone = cross_validate(scaled_ND, control_N, 2, cfg.costs, folds)
    assert found.control_cost == alone.cost != found.cost
    assert (found.control_N == alone.predict(scaled_ND)).mean() > 0.99


def test_the_control_of_spans_has_its_own_cost(place, monkeypatch):
    fit, seen = spans.fit, []
    monkeypatch.setattr(spans, "fit", lambda *given: seen.append((given, fit(*given))) or seen[-1][1])
    costs = (1e-4, 1e-2, 1.0, 100.0)
    run = go(place, "tiny-qa", layers=(3,), costs=costs, repeats=1)
    (x_MD, train, tune, tune_MD, cfg, _), found = seen[0]
    assert run.metrics["results"][0]["layers"][0]["control_C"] == found.control_cost
    scale = labels.Scale.of(x_MD)
    starts_W, golds = train.stored.offsets_N1[:-1], spans.control_gold(train, cfg.seed)
    asked, edges = spans.control_gold(tune, cfg.seed), tune.stored.offsets_N1
    loss = []
    for cost in costs:
        one = np.full((1, 2), cost)
        many = Choices(starts_W, golds, np.ones((1, len(starts_W))), np.array([0, 1]), np.zeros(2, int), one)
        score_2M = solve_choices(scale(x_MD), many).weight_SPD[0] @ scale(tune_MD).double().T
        terms = [
            score_2M[k, edges[w] : edges[w + 1]].log_softmax(0)[asked[k, w] - edges[w]]
            for k in (0, 1)
            for w in range(len(edges) - 1)
        ]
        loss.append(-float(torch.stack(terms).mean()))
    assert found.control_cost == costs[int(np.argmin(loss))]


def test_online_code_of_a_uniform_coder_is_the_uniform_code():
    assert portions(1000)[0] == 8 and portions(5) == [5]
    assert online_codes(np.full(100, 2.0), lambda n, m, s: np.full((s, 1, m - n), 2.0), 1) == pytest.approx(200)
    few = online_codes(np.full(12, 2.0), lambda n, m, s: pytest.fail("too few rows to learn from"), 1, 2)
    assert few.tolist() == [24.0, 24.0]  # of both codes


@pytest.mark.parametrize("late", [1.0, 40.0])
def test_codes_left_away_change_no_length(late):
    """The small cost is the best until, with `late`, it fails at the last portion; then the large one counts again."""
    rate_SC = np.array([[1.0, 3.0], [2.0, 2.0], [9.0, 2.5]])
    asked = []

    def learn(known, following, count):
        asked.append(count)
        rate = rate_SC * ([[late], [1.0], [1.0]] if following == 1000 else 1.0)
        return np.tile(rate[:count, :, None], (1, 1, following - known))

    def whole(rate):
        return 8 * 3.0 + rate + np.log2(3)

    found = online_codes(np.full(1000, 3.0), learn, 3)
    ends = np.array([[492 + 500 * late, 992 * 3.0], [992 * 2.0, 992 * 2.0], [992 * 9.0, 992 * 2.5]])
    np.testing.assert_allclose(found, whole(ends.min(0)))
    alone = []
    online_codes(np.full(1000, 3.0), lambda *n: alone.append(n[2]) or learn(*n)[:, :1], 3)
    assert min(alone) < 3 and min(asked[: len(portions(1000)) - 1]) == 3  # the other code may yet want the large cost


def test_the_cost_of_a_search_is_that_of_exact_fits():
    rng = np.random.default_rng(3)
    signs = 0.5 * rng.normal(size=(2, 12))
    sides = []
    for count in (30, 60):
        size_W = rng.integers(70, 120, count)
        starts_W = np.cumsum(size_W) - size_W
        x_MD = rng.normal(size=(int(size_W.sum()), 12))
        noisy_2M = signs @ x_MD.T + rng.gumbel(size=(2, len(x_MD)))
        gold_2W = np.stack([starts_W + [p.argmax() for p in np.split(n, starts_W[1:])] for n in noisy_2M])
        sides.append((torch.from_numpy(x_MD).float(), starts_W, gold_2W))
    (x_MD, starts_W, gold_2W), (tuned_MD, tune_W, asked_2W) = sides
    costs = np.logspace(-5, 2, 8)
    found = spans.search(spans.Seen(x_MD, starts_W, tuned_MD, tune_W), gold_2W, asked_2W, costs)
    cost_SP = costs[:, None].repeat(2, 1)
    every = Choices(starts_W, gold_2W, np.ones((1, 30)), np.arange(2), np.zeros(2, int), cost_SP)
    exact = solve_choices(x_MD, every, 1e-11).weight_SPD
    loss = []
    for weight_2D in exact:
        log_2M = log_chances((weight_2D @ tuned_MD.double().T).numpy(), tune_W)
        loss.append(-np.take_along_axis(log_2M, asked_2W, 1).mean())
    assert 0 < found.number == int(np.argmin(loss)) < 7 and found.unconverged == 0
    torch.testing.assert_close(found.weight_2D, exact[found.number], rtol=0.02, atol=1e-3)


def test_folds_and_resamples_keep_documents_whole():
    document_N = np.repeat(np.arange(10), 3)
    fold_N = folds_by_document(np.zeros(30, int), document_N, 4)
    assert all(len(set(fold_N[document_N == d])) == 1 for d in range(10)) and set(fold_N) == {0, 1, 2, 3}
    weight_RN = resamples(document_N, 5, 0)
    assert weight_RN.shape == (5, 30) and (weight_RN[:, 0::3] == weight_RN[:, 1::3]).all()
    assert (weight_RN.sum(1) == 30).all()


@pytest.mark.parametrize("stretch", [1.0, 3000.0, 1e8])
def test_nothing_linear_is_left_after_leace(stretch):
    rng = np.random.default_rng(0)
    y_N = rng.integers(0, 3, 300)
    x_ND = rng.normal(size=(300, 6)) + 2 * np.eye(3, 6)[:, [3, 0, 1, 2, 4, 5]][y_N]
    x_ND[:, 0] *= stretch  # labels lie in columns 1 to 3, which must not pass for rounding beside it
    mean_D, map_DD = eraser(x_ND, y_N, 3)
    spread_D = x_ND.std(0)
    assert np.linalg.matrix_rank(map_DD * spread_D[:, None] / spread_D, 1e-6) == 2
    clean = torch.from_numpy((x_ND - (x_ND - mean_D) @ map_DD) / spread_D)
    gap = clean[y_N == 1].mean(0) - clean[y_N == 0].mean(0)
    assert float(gap.abs().max()) < 1e-6
    fit = cross_validate(clean, y_N, 3, (1.0,), stratified_folds(y_N, 2))
    assert float(fit.weight_KD.abs().max()) < 1e-4


@pytest.mark.parametrize("right,answers", [(1, False), (3, False), (6, True)])
def test_a_few_lucky_answers_set_no_threshold(right: int, answers: bool) -> None:
    """One right answer is one standard error above none, whatever the number of rows; more than four are two."""
    rows = tuple(Row(str(i), "who ?", "ada .", answers=(("ada", 0),) if i % 3 else ()) for i in range(300))
    lucky = [r.id for r in rows if r.answers][:right]
    found = SpanPredictions(
        best={r.id: "ada" if r.id in lucky else "wrong" for r in rows},
        null_odds={r.id: -1.0 if r.id in lucky else 1.0 for r in rows},
    )
    assert (spans.tuned_threshold(found, rows) != spans.NEVER) == answers
