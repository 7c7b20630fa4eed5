"""`linear` from end to end on small rows, and each family against the slow obvious way."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from sklearn.linear_model import LogisticRegression
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import budwood as bw
from budwood.config.linear import LinearConfig
from budwood.data.task import Row, Task
from budwood.data.words import NEWS, SENTIMENT, word_list
from budwood.errors import ConfigError, DataError, ModelError, StoreError
from budwood.linalg.vocabulary import Vocabulary, log_partition
from budwood.methods.linear import classify as classify_file
from budwood.methods.linear import families
from budwood.methods.linear import states as linear_states
from budwood.methods.linear.classify import Dense, Split, classify
from budwood.methods.linear.families import States, solver_of_p
from budwood.methods.linear.run import splits_of
from budwood.methods.linear.saving import size_of_p
from budwood.methods.linear.states import encoded, load_speaker, prompt_of, states
from budwood.models.reference import resolve

SMALL = {"limit": 120, "limit_eval": 60, "k_fold": 3, "costs": (0.01, 1.0), "threads": 1}


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Any:
    out = tmp_path_factory.mktemp("linear") / "run"
    names = ("f", "phi-p", "subset", "class", "posneg", "p", "p-projected")
    return bw.linear(
        "tiny-gpt", "tiny-sentiment", features=names, side_by_side=True, save_p=True, top_k=20, out=out, **SMALL
    )


def test_every_family_has_its_row(done: Any) -> None:
    rows = done.metrics["results"]
    assert [(r["features"], r["prompt"]) for r in rows[:7]][0] == ("f", False)
    assert len(rows) == 14 and all(0 <= r["test"] <= 1 and 0 <= r["train"] <= 1 for r in rows)
    dims = {r["features"]: r["dims"] for r in rows}
    lists = done.metrics["words"]  # a word list has one feature for every token that counts
    assert all(dims[n] == len(lists[n]) > 0 for n in ("subset", "class", "posneg")) and dims["class"] == 2
    assert all(r["unconverged"] == 0 for r in rows)
    assert dims["f"] == dims["phi-p"] == dims["p-projected"] == 128 and dims["p"] == 1924
    assert set(done.metrics["baselines"]) == {"majority", "bag_of_words"}
    assert (done.run / "figures" / "features.png").exists()


def test_saved_p_is_the_model_s(done: Any) -> None:
    from safetensors.torch import load_file

    found = load_file(done.run / "p" / "prompt.safetensors")
    assert found["ids"].shape == (180, 20)
    total = found["p"].float().sum(1) + found["rest"]
    assert float((total - 1).abs().max()) < 5e-3
    assert size_of_p(180, 1924, 20) == 180 * 124


def test_the_same_states_again_and_others_refused(done: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    again = bw.linear(
        "tiny-gpt", "tiny-sentiment", features=("f",), prompt=True, features_from=done.run, out=tmp_path / "a", **SMALL
    )
    first = next(r for r in done.metrics["results"] if r["features"] == "f" and r["prompt"])
    assert again.metrics["results"][0]["test"] == first["test"]
    with pytest.raises(StoreError, match="another model"):
        bw.linear(
            "tiny-bert",
            "tiny-sentiment",
            features=("f",),
            prompt=True,
            features_from=done.run,
            out=tmp_path / "b",
            **SMALL,
        )
    monkeypatch.setattr(linear_states, "tokenizer_rules_hash", lambda tokenizer: "other")
    with pytest.raises(StoreError, match="another tokenizer"):
        bw.linear(
            "tiny-gpt", "tiny-sentiment", features=("f",), prompt=True, features_from=done.run, out=tmp_path / "d",
            **SMALL,
        )  # fmt: skip
    monkeypatch.undo()
    with pytest.raises(StoreError, match="another prompt"):
        bw.linear(
            "tiny-gpt", "tiny-sentiment", features=("f",), prompt_text="All in all it was", features_from=done.run,
            out=tmp_path / "c", **SMALL,
        )  # fmt: skip


def test_bad_input_is_told(tmp_path: Path) -> None:
    ask = lambda task, model="tiny-gpt", **more: bw.linear(
        model, task, out=tmp_path / "x", overwrite=True, **{**SMALL, **more}
    )
    with pytest.raises(DataError, match="'wonderfully' of --subset-words is . tokens"):
        ask("tiny-sentiment", features=("subset",), subset_words=("great", "wonderfully"))
    with pytest.raises(DataError, match="training rows for 10 folds"):
        ask("tiny-sentiment", limit=8, k_fold=10)
    with pytest.raises(DataError, match="carry no class label"):
        ask("tiny-text")
    with pytest.raises(DataError, match="No list of words"):
        ask("tiny-topic", features=("subset",))
    with pytest.raises(ModelError, match="--untied"):
        ask("tiny-sentiment", untied=True)
    with pytest.raises(ConfigError, match="--tuned is scored on the test rows .* Give --pooled 0"):
        ask("tiny-sentiment", tuned="some-run", pooled=1)
    with pytest.raises(ConfigError, match="--read mask"):
        ask("tiny-sentiment", read="mask")


def test_states_do_not_depend_on_the_batch() -> None:
    for model, prompt, place in (
        ("tiny-gpt", "It was", "last"),
        ("tiny-bert", "It was", "mask"),
        ("tiny-bert", None, "cls"),
    ):
        speaker = load_speaker(resolve(model), "cpu")
        rows = bw.task("tiny-sentiment").rows("test")[:25]
        together = states(speaker, encoded(speaker, rows, prompt, place, None), place)  # type: ignore[arg-type]
        for i in range(25):
            alone = states(speaker, encoded(speaker, rows[i : i + 1], prompt, place, None), place)  # type: ignore[arg-type]
            assert float((together[i : i + 1] - alone).abs().max()) <= 1e-5


def test_a_long_text_keeps_its_prompt() -> None:
    speaker = load_speaker(resolve("tiny-gpt"), "cpu")
    tokenizer = speaker.loaded.tokenizer
    end = tokenizer(" It was", add_special_tokens=False)["input_ids"]
    features = encoded(speaker, [Row("a", "the film was good . " * 400), Row("b", "fine .")], "It was", "last", None)
    for n in range(2):
        assert features.piece("input_ids", n)[-len(end) :].tolist() == end
    assert features.lengths_N[0] == speaker.loaded.positions


def fake(rows: int, size: int, seed: int = 0) -> tuple[States, np.ndarray]:
    draw = torch.Generator().manual_seed(seed)
    words = Vocabulary(torch.randn(size, 12, generator=draw), torch.randn(size, generator=draw))
    state = torch.randn(rows, 12, generator=draw)
    label = (state @ torch.randn(12, generator=draw) + 0.5 * torch.randn(rows, generator=draw) > 0).long().numpy()
    return States(state, torch.arange(rows - 100), words, 0), label


@pytest.mark.parametrize(("rows", "size"), [(400, 6000), (900, 150)])
def test_short_forms_of_p_equal_the_primal(rows: int, size: int) -> None:
    held, label = fake(rows, size)
    own = solver_of_p(held, scaled=True, penalise_intercept=False)
    use = torch.zeros(1, rows, dtype=torch.bool)
    use[0, : rows - 100] = True
    logits = own(label, 2, use, (1.0,)).logits_SRNK[0, 0]
    p = held.words.prob(held.state_ND, log_partition(held.words, held.state_ND)).double().numpy()
    p *= (12 / p[: rows - 100].var(0).sum()) ** 0.5
    peer = LogisticRegression(C=1.0, max_iter=5000, tol=1e-9).fit(p[: rows - 100], label[: rows - 100])
    ours = (logits[:, 1] - logits[:, 0]).numpy()
    assert np.abs(ours - peer.decision_function(p)).max() < 1e-3
    right = lambda score: (score > 0) == label
    for part in (slice(0, rows - 100), slice(rows - 100, rows)):
        assert right(ours)[part].sum() == right(peer.decision_function(p))[part].sum()


def test_the_stream_agrees_with_the_short_form(monkeypatch: pytest.MonkeyPatch) -> None:
    held, label = fake(300, 800)
    split = [Split(np.arange(200), np.arange(200, 300))]
    ask = lambda: classify(solver_of_p(held, True, False), label, ("a", "b"), split, 3, (0.1, 10.0))
    short = ask()
    monkeypatch.setattr(families, "KERNEL_ROWS", 0)
    streamed = ask()
    assert isinstance(solver_of_p(held, True, False), families.Stream)
    assert streamed.cost == short.cost
    assert abs(streamed.test - short.test) <= 0.01 and abs(streamed.loss - short.loss) < 1e-3


def test_the_stream_knows_of_the_intercept_and_says_what_did_not_converge(monkeypatch: pytest.MonkeyPatch) -> None:
    held, label = fake(300, 800)
    label = np.where(np.arange(300) < 60, 0, 1) | label  # far from even, so that the intercept matters
    use = (torch.arange(300) < 200)[None]  # the rows that the short form may be made of
    short = solver_of_p(held, True, True)(label, 2, use, (0.01,))
    monkeypatch.setattr(families, "KERNEL_ROWS", 0)
    streamed, free = (solver_of_p(held, True, x)(label, 2, use, (0.01,)) for x in (True, False))
    assert float((streamed.logits_SRNK - short.logits_SRNK).abs().max()) < 2e-2
    assert float((streamed.logits_SRNK - free.logits_SRNK).abs().max()) > 0.2
    assert short.unconverged == streamed.unconverged == 0
    solve = classify_file.streamed.solve
    monkeypatch.setattr(classify_file.streamed, "solve", lambda *a, **k: solve(*a, **{**k, "passes": 3}))
    found = classify(
        solver_of_p(held, True, True), label, ("a", "b"), [Split(np.arange(200), np.arange(200, 300))], 3, (1.0,)
    )
    assert found.row()["unconverged"] == found.unconverged == 4


def test_words_count_in_every_form_of_one_token() -> None:
    tokenizer = load_speaker(resolve("tiny-gpt"), "cpu").loaded.tokenizer
    task = Task("t", "label", {"train": (Row("r"),)}, ("a", "b"))
    found = word_list("subset", task, ("great", "we"), tokenizer)
    tokens = tokenizer.convert_ids_to_tokens(list(found.ids))
    assert "Ġgreat" in tokens and {"Ġwe", "we"} <= set(tokens)
    shipped = word_list("class", bw.task("tiny-sentiment"), (), tokenizer)
    assert [t.strip("Ġ") for t in tokenizer.convert_ids_to_tokens(list(shipped.ids))] == ["great", "terrible"]


# Which forms of the published words are one token of GPT-2's vocabulary: behind a space all of them, bare some.
BARE = ":( great classic interesting happy strong positive negative world politics sports business science financial "
BARE += "market foreign technology international stock company tech scientific"


def gpt2_words() -> PreTrainedTokenizerFast:
    """A tokenizer that cuts text as GPT-2's does, with those words and numbers; all else is unknown to it."""
    shipped = {w for kinds in (SENTIMENT, NEWS) for words in kinds.values() for w in words.split()}
    names = [*sorted(f"Ġ{w}" for w in shipped), *BARE.split(), "ĠThis", "Ġmovie", "Ġsentiment", "ĠThe", "Ġarticle"]
    ids = {name: 1000 + i for i, name in enumerate(names)} | {"<unk>": 0, "Ġ": 220, "Ġis": 318, "Ġabout": 546}
    cut = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    cut.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return PreTrainedTokenizerFast(tokenizer_object=cut, unk_token="<unk>", eos_token="<unk>", pad_token="<unk>")


def test_published_words_have_the_published_dimensions() -> None:
    tokenizer = gpt2_words()
    size = {}
    for name, lists in (("sst2", ("subset", "class", "posneg")), ("agnews", ("subset", "class"))):
        task = Task(name, "label", {"train": (Row("r"),)}, ("a", "b"))
        size[name] = [len(word_list(n, task, (), tokenizer).ids) for n in lists]
    assert size == {"sst2": [20, 3, 4], "agnews": [27, 8]}


def test_published_prompts_end_in_a_word_and_never_in_a_space() -> None:
    tokenizer = gpt2_words()
    speaker = SimpleNamespace(causal=True, loaded=SimpleNamespace(tokenizer=tokenizer, positions=12))
    rows = [Row("short", "great ."), Row("long", "great " * 600), Row("space", "great . ")]
    ends = {}
    for name in ("sst2", "sst5", "sst2-6920", "imdb", "mpqa", "cr", "agnews"):
        prompt = prompt_of(LinearConfig(task=name), Task(name, "label", {"train": (Row("r"),)}, ("a", "b")))
        made = encoded(speaker, rows, prompt, "last", None)  # type: ignore[arg-type]
        ends[name] = {int(made.piece("input_ids", n)[made.fixed["read_at"][n]]) for n in range(3)}
        assert all(220 not in made.piece("input_ids", n)[-3:] for n in range(3)) and made.lengths_N[1] == 12
        bare = tokenizer(f" {prompt}", add_special_tokens=False)["input_ids"]
        assert all(made.piece("input_ids", n)[-len(bare) :].tolist() == bare for n in range(3)) and 0 not in bare
    assert ends.pop("agnews") == {546} and set(map(tuple, ends.values())) == {(318,)}


def test_a_classifier_of_word_logits_is_one_of_f_within_the_span_of_their_embeddings() -> None:
    """Weights w = phi_T^T v on f, with the ridge |v|^2 carried over to w: the same decisions."""
    held, label = fake(400, 500, seed=3)
    ids = [3, 17, 90, 200]
    found = held.words.logits(held.state_ND, torch.tensor(ids))
    use = (torch.arange(400) < 300)[None]
    ours = Dense(found, 4)(label, 2, use, (2.0,)).logits_SRNK[0, 0]
    state, weight = held.state_ND.double().numpy(), held.words.weight_VD[ids].double().numpy()
    basis_DT, map_TT = np.linalg.qr(weight.T)  # w = basis u, v = map^-1 u
    inside, back = state @ basis_DT, np.linalg.inv(map_TT)
    truth = label[:300]

    def objective(point: np.ndarray) -> tuple[float, np.ndarray]:
        own, free = point[:4], point[4]
        score = inside[:300] @ own + free
        miss = 1 / (1 + np.exp(-score)) - truth
        value = np.logaddexp(0, score).sum() - truth @ score + ((back @ own) ** 2).sum() / 2 / 2.0
        return float(value), np.append(inside[:300].T @ miss + back.T @ back @ own / 2.0, miss.sum())

    best = minimize(objective, np.zeros(5), jac=True, method="BFGS", options={"gtol": 1e-9}).x
    theirs = inside @ best[:4] + best[4]
    assert np.abs((ours[:, 1] - ours[:, 0]).numpy() - theirs).max() < 1e-3
    assert ((ours[:, 1] > ours[:, 0]).numpy() == (theirs > 0)).all() and 0.5 < ((theirs > 0) == label).mean() < 1


def test_word_logits_are_a_projection_of_f() -> None:
    held, label = fake(300, 500)
    cfg = LinearConfig(task="t", features=("subset",))
    from budwood.data.words import WordList

    ids = (3, 17, 90)
    found = families.dense_features("subset", held, {"subset": WordList(("x",) * 3, ids)}, cfg)
    wanted = held.state_ND @ held.words.weight_VD[list(ids)].T + held.words.bias_V[list(ids)]
    torch.testing.assert_close(found, wanted)
    log = families.dense_features(
        "subset", held, {"subset": WordList(("x",) * 3, ids)}, cfg.model_copy(update={"word_kind": "logprob"})
    )
    prob = families.dense_features(
        "subset", held, {"subset": WordList(("x",) * 3, ids)}, cfg.model_copy(update={"word_kind": "prob"})
    )
    torch.testing.assert_close(log.exp(), prob)


def test_pooled_cuts_are_seeded_and_disjoint() -> None:
    task = Task(
        "cr",
        "label",
        {"train": tuple(Row(str(i), "x", label=i % 2) for i in range(40)), "test": (Row("t", "x", label=0),)},
    )
    label = np.arange(41) % 2
    cuts = splits_of(LinearConfig(task="cr"), task, label)
    assert len(cuts) == 10 and all(not set(c.train) & set(c.test) and len(c.test) == 4 for c in cuts)
    again = splits_of(LinearConfig(task="cr"), task, label)
    assert all((a.test == b.test).all() for a, b in zip(cuts, again))
    assert len(splits_of(LinearConfig(task="cr", pooled=0), task, label)) == 1


def test_the_whole_of_p_on_disk(tmp_path: Path) -> None:
    held, _ = fake(300, 500)
    from budwood.methods.linear.saving import _whole

    _whole(tmp_path / "p.part", held)
    found = np.load(tmp_path / "p.part", mmap_mode="r")
    assert found.shape == (300, 500) and found.dtype == np.float16
    wanted = held.words.prob(held.state_ND, held.logz_N).numpy()
    assert np.abs(found - wanted).max() < 1e-3 and wanted.shape[0] * wanted.shape[1] * 2 == size_of_p(300, 500, 0)


def test_the_recipe_is_complete_in_both_sizes() -> None:
    from budwood.studies.recipe import Wishes, commands, read_recipe

    small = read_recipe("frozen-features", Wishes(small=True))
    assert {m for s in small.steps for m in s.models} <= {"tiny-gpt", "tiny-bert", "{quad}"}
    assert any("--tuned runs/recipe-frozen-features-small/tuned" in line for line in commands(small))
    assert len(read_recipe("frozen-features").steps) == len(small.steps)


def test_analysis_and_checkpoints(tmp_path: Path) -> None:
    import shutil

    from budwood.methods.linear.analyse import power

    source = resolve("tiny-gpt").path
    assert source is not None
    for step in (1, 2, 3):
        shutil.copytree(source, tmp_path / "lm" / "checkpoints" / f"checkpoint-{step}")
    done = bw.linear(
        "tiny-gpt", "tiny-sentiment", features=("f",), prompt=True, analyse=True, checkpoints=tmp_path / "lm",
        out=tmp_path / "a", **SMALL,
    )  # fmt: skip
    found = done.metrics["analysis"]
    assert -1 < found["log_z_quadratic_r2"] <= 1 and -1 < found["phi_p_linear_r2"] <= 1
    points = found["checkpoints"]["points"]
    assert [p["checkpoint"] for p in points] == ["checkpoint-1", "checkpoint-2", "checkpoint-3"]
    assert len({p["lm_loss"] for p in points}) == 1
    assert points[0]["f"] == pytest.approx(done.metrics["results"][0]["loss"], rel=1e-3)
    lm = np.array([1.0, 1.1, 1.4, 2.0, 3.0])
    fitted = power(lm, 0.2 + 0.5 * (lm - 1.0) ** 0.5)
    assert fitted is not None and abs(fitted["b"] - 0.5) < 1e-6
    with pytest.raises(ConfigError, match="at least 3"):
        bw.linear("tiny-gpt", "tiny-sentiment", analyse=True, checkpoints=tmp_path, out=tmp_path / "b", **SMALL)
