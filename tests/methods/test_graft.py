"""`graft`: exact sizes, files that work without the tuned model, several of them, bad input."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import budwood as bw
from budwood.config.graft import GraftLearnConfig, GraftStitchConfig, parse_size
from budwood.data.task import Row
from budwood.errors import BudwoodError, ConfigError, ModelError, TreeError
from budwood.figures.graft import size_curve
from budwood.figures.save import drawing, save
from budwood.methods.graft import choice, compare
from budwood.methods.graft import learn as graft_learn
from budwood.methods.graft.compare import show
from budwood.methods.graft.measure import Scores, other_task, recovered, temperature_from
from budwood.methods.graft.merging import merged
from budwood.methods.graft.pair import Pair
from budwood.models.load import HeadSpec, load
from budwood.models.reference import resolve
from budwood.params import mask as masks
from budwood.params.graft import Graft
from budwood.params.tree import named, values
from budwood.studies.api import run
from budwood.train.evaluate import Evaluation
from tests.cases import write_model
from tests.methods.graft_for_tests import learn, toy_task


def logits(model: str, mode: str = "prompt") -> torch.Tensor:
    loaded = load(resolve(model), mode, HeadSpec(labels=("no", "yes")) if mode == "head" else None)  # type: ignore[arg-type]
    with torch.no_grad():
        return loaded.model(input_ids=torch.arange(2, 26).view(2, 12)).logits  # type: ignore[no-any-return]


def test_a_killed_run_makes_no_mask_twice(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    settings: dict[str, Any] = {"size": "50", "curve": True, "curve_sizes": (0.01, 0.1)}
    whole = learn(place, "prompt", **settings, out="whole")
    made: list[tuple[str, int]] = []
    real = choice._mask

    def counted(shop: choice.Shop, rule: str, count: int, state: Path) -> masks.Mask:
        if len(made) == 5:
            made.append(("killed", 0))
            raise KeyboardInterrupt
        made.append((rule, count))
        return real(shop, rule, count, state)

    monkeypatch.setattr(choice, "_mask", counted)
    with pytest.raises(KeyboardInterrupt):
        learn(place, "prompt", **settings, out="killed")
    killed = learn(place, "prompt", **settings, out="killed")
    assert len(made) == 12 and len(set(made)) == 12  # one and ten of the curve, each once
    assert Path(killed.metrics["file"]).read_bytes() == Path(whole.metrics["file"]).read_bytes()
    assert killed.metrics["curve"] == whole.metrics["curve"]
    assert not list((killed.run / "masks").glob("*"))


def test_workers_choose_the_same(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    settings: dict[str, Any] = {"size": "50", "select": "first-order"}
    alone, two = (learn(place, "prompt", **settings, workers=w, out=f"w{w}") for w in (1, 2))
    assert Path(alone.metrics["file"]).read_bytes() == Path(two.metrics["file"]).read_bytes()


def test_the_published_step_runs_as_a_verb(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    m = learn(place, "prompt", size="50", parity=True, parity_rate=1e-9).metrics
    told = Graft.load(m["file"]).manifest
    assert m["size"] == 50 and m["select"] == told["select"] == "published"
    assert told["command"].startswith("budwood graft learn ") and "--curve-sizes" not in told["command"]
    for words in ("--parity", "--parity-rate 1e-09", "--mask-steps 4", "--mask-batch-size 8", "--size 50"):
        assert words in told["command"]


@pytest.mark.parametrize("select", ["learned", "movement", "first-order", "fisher", "random"])
def test_a_run_gives_exactly_the_size_and_a_file_that_works_alone(
    place: Path, select: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = learn(place, "prompt", size="321", select=select)
    m = result.metrics
    assert m["size"] == 321 and m["fraction"] == pytest.approx(321 / m["graftable"]) and m["select"] == select
    assert {"score", "ece", "ece_scaled", "temperature"} <= set(m["graft"]) and m["bytes"] == Path(
        m["file"]
    ).stat().st_size
    scored = bw.evaluate(f"{place / 'base'}+{m['file']}", toy_task(), threads=1)
    assert scored.metrics["mode"] == "prompt" and scored.metrics["accuracy"] == m["graft"]["score"]
    assert scored.metrics["ece"] == m["graft"]["ece"]


def test_everything_is_the_tuned_model(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for tuned in ("prompt", "head"):
        result = learn(place, tuned, size="100%", select="movement")
        assert result.metrics["recovered"] == 1 and result.metrics["agreement"] == 1
        there, here = (logits(x, tuned) for x in (f"{place / 'base'}+{result.metrics['file']}", str(place / tuned)))
        torch.testing.assert_close(there, here, rtol=0, atol=1e-5)


def test_a_head_goes_along(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    m = learn(place, "head", size="2%", select="movement").metrics
    reference = f"{place / 'base'}+{m['file']}"
    assert bw.evaluate(reference, toy_task(), threads=1).metrics["accuracy"] == m["graft"]["score"]
    turned = replace(toy_task(), labels=("up", "down"))
    with pytest.raises(ModelError, match="no trained head"):
        bw.evaluate(reference, turned, threads=1)


@pytest.mark.parametrize("enough", [1, 137, 9_000, 10_000])
def test_the_share_of_the_gain_is_found_by_bisection(enough: int) -> None:
    """A world in which `enough` weights recover all of the gain and fewer recover half of it."""
    bench: Any = SimpleNamespace(
        cfg=GraftLearnConfig(task="toy", size="95%-of-gain"),
        pair=SimpleNamespace(delta_P=torch.zeros(10_000), sizes={}),
        selection=object(),
        session=SimpleNamespace(progress=SimpleNamespace(say=lambda text: None)),
        mask=lambda select, count: {"weights": count},
        gained=lambda mask, rows: 1.0 if mask.get("weights", 0) >= enough else 0.5,
    )
    found: Any = graft_learn._smallest(bench, 0.95).get("weights", 10_000)  # none: all of them
    assert enough <= found <= max(enough + 1, enough * graft_learn.CLOSE)


def test_a_share_of_the_gain_is_recovered_on_the_selection_rows(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    m = learn(place, "prompt", size="95%-of-gain", select="first-order").metrics
    assert 0 < m["size"] <= m["graftable"] and m["recovered"] >= 0.9


def test_curve_and_other_tasks(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = learn(place, "prompt", size="1%", select="movement", curve=True, curve_sizes=(0.01, 1.0))
    m = result.metrics
    assert len(m["curve"]) == 10 and all(r["recovered"] == 1 for r in m["curve"] if r["fraction"] == 1)
    assert "of the gain" in m["answer"] and (result.run / "figures" / "curve.png").exists()
    assert (result.run / "figures" / "map.csv").exists()


def test_the_same_command_does_nothing_and_the_file_repeats(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    first = learn(place, "prompt", size="50", select="first-order")
    assert not learn(place, "prompt", size="50", select="first-order").fresh
    second = learn(place, "prompt", size="50", select="first-order", out=tmp_path / "b")
    assert Path(first.metrics["file"]).read_bytes() == Path(second.metrics["file"]).read_bytes()


def grafts(place: Path, count: int = 60) -> list[str]:
    return [
        learn(place, "prompt", size=str(count), select=s, name=s, out=f"{s}-{count}").metrics["file"]
        for s in ("movement", "fisher", "random")
    ]


def test_overlap_stitch_subtract_and_show(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    files = grafts(place)
    found = run("graft overlap", files, "", {"threads": 1}).metrics
    sets = [{(n, int(i)) for n, index in Graft.load(f).index.items() for i in index} for f in files]
    for i, a in enumerate(sets):
        for j, b in enumerate(sets):
            assert found["overlap"][i][j] == pytest.approx(len(a & b) / len(b))
            assert found["jaccard"][i][j] == pytest.approx(len(a & b) / len(a | b))
            assert found["over_chance"][i][j] == pytest.approx(len(a & b) * found["graftable"] / len(a) / len(b))
    stitched = run("graft stitch", [str(place / "base"), *files], "", {"threads": 1, "out": "s1"})
    turned = run("graft stitch", [str(place / "base"), *files[::-1]], "", {"threads": 1, "out": "s2"})
    assert (stitched.model / "model.safetensors").read_bytes() == (turned.model / "model.safetensors").read_bytes()
    together = "+".join([str(place / "base"), *files])
    torch.testing.assert_close(logits(str(stitched.model)), logits(together), rtol=0, atol=0)
    less = run("graft subtract", [str(place / "base"), str(place / "prompt"), files[0]], toy_task(), {"threads": 1})
    tuned, base = (named(load(resolve(str(place / x)), "mlm").model) for x in ("prompt", "base"))
    rest = named(load(resolve(str(less.model)), "mlm").model)
    graft = Graft.load(files[0])
    for name, weight in rest.items():
        wanted = tuned[name].detach().clone()
        if name in graft.index:
            wanted.view(-1)[graft.index[name]] = base[name].detach().view(-1)[graft.index[name]]
        torch.testing.assert_close(weight, wanted, rtol=1e-6, atol=1e-7)
    table = show(files[0])
    assert sum(r["weights"] for r in table["map"]) == 60 and table["task"] == "toy"
    assert show(str(Path(files[0]).parent))["size"] == 60


def test_overlap_on_another_base_is_refused(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        made = learn(place, "prompt", size="20", select="random", seed=ord(name)).metrics["file"]
        graft = Graft.load(made)
        replace(graft, manifest={**graft.manifest, "task": "tiny-sentiment"}).save(f"{name}.graft")
    with pytest.raises(TreeError, match="--force"):
        run("graft overlap", ["a.graft", "b.graft"], "", {"threads": 1, "base": str(place / "prompt")})


def test_a_graft_opens_no_file_of_its_own_choice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.csv").write_text("text,label\n" + "".join(f"w{i},{i % 2}\n" for i in range(40)))
    cfg, graft = GraftStitchConfig(), Graft({}, {}, {}, {}, {"task": "rows.csv"})
    with pytest.raises(BudwoodError, match="neither shipped nor public"):
        compare._task_of(cfg, graft)
    given = cfg.model_copy(update={"task": "rows.csv"})
    name = other_task(given, "rows.csv").name
    assert compare._task_of(given, Graft({}, {}, {}, {}, {"task": name})).labels == ("0", "1")


def test_merging_baselines_on_a_case_by_hand() -> None:
    shape = {"w": (4,)}
    one = Graft({"w": torch.tensor([0, 1])}, {"w": torch.tensor([1.0, -4.0])}, shape)
    two = Graft({"w": torch.tensor([1, 3])}, {"w": torch.tensor([2.0, 6.0])}, shape)
    model = torch.nn.Linear(1, 1)

    def dense(**settings: Any) -> list[float]:
        found = merged([one, two], GraftStitchConfig(**settings), model)
        whole = torch.zeros(4)
        for name, index in found.index.items():
            whole[index] = found.delta[name]
            assert name == "w"
        return [round(float(x), 6) for x in whole]

    assert dense() == [1.0, -1.0, 0.0, 6.0]
    assert dense(method="arithmetic", weight=0.5) == [0.5, -1.0, 0.0, 3.0]
    assert dense(method="arithmetic") == [0.5, -1.0, 0.0, 3.0]
    assert dense(method="ties", keep=1.0) == [1.0, -4.0, 0.0, 6.0]
    assert dense(method="ties", weight=0.5, keep=0.5) == [0.0, -2.0, 0.0, 3.0]
    assert dense(method="dare", weight=1.0, keep=1.0) == [1.0, -2.0, 0.0, 6.0]
    with pytest.raises(ConfigError, match="one --fisher per graft"):
        dense(method="fisher")


def test_sizes_as_people_write_them() -> None:
    for text, told in (
        ("0", "size 0"),
        ("0%", "size 0"),
        ("101%", "at most 100%"),
        ("1.5", "at most 100%"),
        ("x", "write a count"),
        ("0.9-of-gain", "percentage"),
        ("120%-of-gain", "at most"),
    ):
        with pytest.raises(ValueError, match=told):
            parse_size(text)
    assert recovered(1.0, 0.5, 0.5) is None and recovered(0.4, 0.5, 0.3) is None  # a loss is no gain


def points(select: str, *shares: float | None, test: float = 0.97) -> list[dict[str, Any]]:
    """A curve at 1 %, 2 %, 5 % with these shares of the gain on the selection rows."""
    return [
        {"select": select, "fraction": f, "recovered": test, "recovered_selection": s}
        for f, s in zip((0.01, 0.02, 0.05), shares)
    ]


def test_the_answer_of_a_curve() -> None:
    """Rule and size by the selection rows, random never the rule, a dip after the first crossing no success."""
    rows = points("learned", 0.96, 0.5, 1.0) + points("movement", 0.1, 0.97, 0.99, test=0.91)
    rows += points("random", 0.0, 0.1, 0.96)

    def answer(rows: list[dict[str, Any]], gain: float | None = 1.0) -> str:
        needs = {r: graft_learn._needs([x for x in rows if x["select"] == r]) for r in {x["select"] for x in rows}}
        scores = {"base": {"score": 0.7225}, "tuned": {"score": 0.73}}
        return graft_learn._answer("toy", rows, needs, {"recovered": gain, "metric": "accuracy", "n": 1400, **scores})

    assert answer(rows).startswith("toy needs 2% of the weights (movement)") and "91%" in answer(rows)
    assert answer(rows).endswith(" (Tuning: accuracy 0.7225 to 0.7300 on 1,400 rows.)")
    assert "not localised: 2% of" in answer(rows[:6] + points("random", 0.0, 1.0, 1.0))
    assert "not sparse" in answer(points("learned", 0.1, 0.2, 0.3) + points("random", 1.0, 1.0, 1.0))
    assert "on the rows that choose" in answer(points("learned", None, None, None))
    assert "gained nothing, so" in answer(rows, None)


def test_a_curve_without_a_gain_is_drawn_empty(tmp_path: Path) -> None:
    rows = [{"select": "random", "fraction": f, "recovered": None} for f in (0.01, 0.1)]
    with drawing() as axes:
        save(axes.figure, tmp_path / "curve", size_curve(axes, rows, "nothing"))
    assert (tmp_path / "curve.png").exists()


def test_bad_input(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    task = toy_task()
    other = {
        "architectures": write_model(tmp_path / "wide", "bert", "lm", hidden_size=32),
        "is a distilbert": write_model(tmp_path / "distil", "distilbert", "lm"),
    }
    for told, model in other.items():
        with pytest.raises(ModelError, match=told):
            bw.graft(str(model), str(place / "prompt"), task, threads=1)
    words = write_model(tmp_path / "words", "bert", "lm")
    file = words / "tokenizer.json"
    file.write_text(file.read_text().replace('"w9"', '"ww"'))
    with pytest.raises(ModelError, match="different vocabularies"):
        bw.graft(str(words), str(place / "prompt"), task, threads=1)
    with pytest.raises(ModelError, match="no language-model head|no trained head"):
        bw.graft(str(place / "base"), str(place / "head"), task, mode="prompt", threads=1)
    with pytest.raises(ModelError, match="do not differ"):
        bw.graft(str(place / "base"), str(place / "base"), task, mode="prompt", threads=1)
    for size, told in (("0", "size 0"), ("101%", "at most 100%"), ("99999999", "graftable ones")):
        with pytest.raises(ConfigError, match=told):
            learn(place, "prompt", size=size)
    good = learn(place, "prompt", size="9", select="movement").metrics["file"]
    (tmp_path / "cut.graft").write_bytes(Path(good).read_bytes()[:-3])
    with pytest.raises(TreeError, match="damaged"):
        bw.evaluate(f"{place / 'base'}+cut.graft", task, threads=1)
    with pytest.raises(TreeError, match="--force"):
        bw.evaluate(f"{place / 'prompt'}+{good}", task, threads=1)
    assert bw.evaluate(f"{place / 'prompt'}+{good}", task, threads=1, force=True).metrics["n"] == 40
    with pytest.raises(BudwoodError, match="is a graft, not a model"):
        bw.evaluate(good, task, threads=1)
    with pytest.raises(ConfigError, match="2 or more grafts are needed"):
        run("graft overlap", [good], "", {"threads": 1})


def test_python_use(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = learn(place, "prompt", size="1%", select="movement").metrics["file"]
    from transformers import AutoModelForMaskedLM

    model = AutoModelForMaskedLM.from_pretrained(place / "base").eval()
    before = values(model)
    with bw.Graft.load(file).apply(model) as patched:
        inside = values(patched)
    assert all(torch.equal(v, before[n]) for n, v in values(model).items())
    bw.Graft.load(file).export(model, tmp_path / "hf")
    exported = values(AutoModelForMaskedLM.from_pretrained(tmp_path / "hf"))
    assert all(torch.equal(v, exported[n]) for n, v in inside.items())
    bw.Graft.load(file).merge_into(model)
    assert all(torch.equal(v, inside[n]) for n, v in values(model).items())
    assert (
        json.loads(
            (tmp_path / "runs")
            .joinpath(next(p.name for p in (tmp_path / "runs").iterdir()), "metrics.json")
            .read_text()
        )["verb"]
        == "graft learn"
    )


def test_scores_are_kept(pair: Pair) -> None:
    scores = Scores(pair.read, pair.cfg, pair.task.rows("test"))
    assert scores.of([]) is scores.of([])


def test_a_temperature_without_a_best_is_not_told() -> None:
    """Rows that are all answered right fit the better the colder, without end: the end of the search is no answer."""
    logits_NK = np.array([[2.0, 0.0], [0.0, 1.0], [0.5, 0.0]])
    rows = tuple(Row(id=str(i), text="a", label=label) for i, label in enumerate((0, 1, 0)))
    right, wrong = (Evaluation({}, {}, logits_NK=x) for x in (logits_NK, logits_NK[[0, 1, 1]]))
    heat, why = temperature_from(right, rows)
    assert heat is None and why.startswith("3 of the 3 rows it is fitted on are answered right")
    heat, why = temperature_from(wrong, rows)
    assert heat is not None and 0.05 < heat < 20 and not why
