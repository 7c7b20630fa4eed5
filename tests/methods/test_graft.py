"""`graft`: rules against slow versions, exact sizes, files that work without the tuned model, bad input."""

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
from budwood.data.batch import seed_of
from budwood.data.task import Row
from budwood.errors import BudwoodError, ConfigError, ModelError, TreeError
from budwood.figures.graft import size_curve
from budwood.figures.save import drawing, save
from budwood.methods.graft import choice, compare, learned, rules
from budwood.methods.graft import learn as graft_learn
from budwood.methods.graft.compare import show
from budwood.methods.graft.measure import Scores, other_task, recovered, temperature_from
from budwood.methods.graft.merging import merged
from budwood.methods.graft.pair import Pair, open_pair
from budwood.methods.graft.parity import Published, published
from budwood.models.load import HeadSpec, load
from budwood.models.reference import resolve
from budwood.params import mask as masks
from budwood.params import tree
from budwood.params.graft import Graft
from budwood.params.tree import named, values
from budwood.studies.api import run
from budwood.train.evaluate import Evaluation
from tests.cases import write_model
from tests.methods.graft_for_tests import learn, toy_task


@pytest.fixture
def pair(place: Path) -> Pair:
    cfg = GraftLearnConfig(task="toy", data_seed=0, model_seed=0)
    return open_pair(cfg, resolve(str(place / "base")), resolve(str(place / "prompt")), toy_task())


def logits(model: str, mode: str = "prompt") -> torch.Tensor:
    loaded = load(resolve(model), mode, HeadSpec(labels=("no", "yes")) if mode == "head" else None)  # type: ignore[arg-type]
    with torch.no_grad():
        return loaded.model(input_ids=torch.arange(2, 26).view(2, 12)).logits  # type: ignore[no-any-return]


def test_rules_equal_the_slow_ones(pair: Pair) -> None:
    assert torch.equal(rules.movement(pair), pair.delta_P.abs())
    model, objective = pair.read.loaded.model, pair.read.objective
    features = pair.read.encode(pair.task.rows("train"))
    grad, square = torch.zeros(len(pair.delta_P)), torch.zeros(len(pair.delta_P))
    for n in range(len(features)):
        batch = pair.read.feed(features)(np.array([n]), 0)
        loss = objective.loss(objective.logits(model, batch), objective.targets(batch)).sum()
        own = torch.autograd.grad(loss, [named(model)[x] for x in pair.shapes], allow_unused=True)
        flat = torch.cat(
            [torch.zeros(s.numel()) if g is None else g.reshape(-1) for g, s in zip(own, pair.shapes.values())]
        )
        grad += flat / len(features)
        square += flat.square()
    torch.testing.assert_close(rules.first_order(pair), -grad * pair.delta_P, rtol=1e-3, atol=1e-8)
    wanted = square * pair.delta_P**2
    torch.testing.assert_close(rules.fisher(pair, None), wanted, rtol=1e-3, atol=1e-5 * float(wanted.max()))


def mean_loss(pair: Pair) -> float:
    model, objective = pair.read.loaded.model, pair.read.objective
    features = pair.read.encode(pair.task.rows("train"))
    batch = pair.read.feed(features)(np.arange(len(features)), 0)
    with torch.no_grad():
        return float(objective.loss(objective.logits(model, batch), objective.targets(batch)).mean())


def test_scores_along_the_way_sum_to_what_tuning_takes_off_the_loss(pair: Pair) -> None:
    """The gradient theorem, and one point by hand: -gradient at half the way x change."""
    base = mean_loss(pair)
    with pair.graft(masks.everything(pair.sizes)).apply(pair.read.loaded.model, force=True):
        tuned = mean_loss(pair)
    assert float(rules.first_order(pair, 12).double().sum()) == pytest.approx(base - tuned, rel=0.02)
    halfway = Graft.cut(masks.everything(pair.sizes), {n: v / 2 for n, v in pair.delta.items()})
    with halfway.apply(pair.read.loaded.model, force=True):
        wanted = -rules.gradient(pair) * pair.delta_P
    torch.testing.assert_close(rules.first_order(pair, 1), wanted, rtol=1e-3, atol=1e-6 * float(wanted.abs().max()))


@pytest.mark.parametrize("size", [1e-4, 1.0, 1e4])
def test_the_way_back_from_between_is_exact(pair: Pair, size: float) -> None:
    model, before = pair.read.loaded.model, values(pair.read.loaded.model)
    change = torch.randn(len(pair.delta_P), generator=torch.Generator().manual_seed(0)) * size
    moved = replace(pair, delta_P=change)
    with pytest.raises(KeyError), rules.between(moved, 0.3):
        for name, part in moved.delta.items():
            torch.testing.assert_close(named(model)[name].detach(), before[name] + 0.3 * part)
        raise KeyError
    assert all(torch.equal(v, before[n]) for n, v in values(model).items())


def test_the_fisher_of_adam_costs_nothing(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    common: dict[str, Any] = {"threads": 1, "max_steps": 8, "lr": 3e-3, "freeze": "embeddings,head", "mode": "prompt"}
    bw.finetune(str(place / "base"), toy_task(), out="tuned", save_second_moments=True, **common)
    cfg = GraftLearnConfig(task="toy", data_seed=0, model_seed=0)
    pair = open_pair(cfg, resolve(str(place / "base")), resolve("tuned"), toy_task())
    moments = masks.flat({n: tree.load(Path("tuned/adam.safetensors"))[0][n] for n in pair.shapes})
    assert float(moments.max()) > 0
    for given in ("adam", "tuned", "tuned/adam.safetensors"):
        assert torch.equal(rules.fisher(pair, Path(given)), moments * pair.delta_P * pair.delta_P)
    found = learn(place, "prompt", size="40", select="fisher", fisher=(Path("tuned"),)).metrics
    assert found["size"] == 40
    with pytest.raises(ModelError, match="keeps no second moments"):
        learn(place, "prompt", size="40", select="fisher", fisher=(Path("adam"),))
    other = open_pair(cfg, resolve(str(place / "base")), resolve(str(place / "prompt")), toy_task())
    tree.save(tmp_path / "adam.safetensors", {"x": torch.ones(1)}, {"artefact": "second moments"})
    with pytest.raises(TreeError, match="nothing that fits"):
        rules.fisher(other, tmp_path / "adam.safetensors")


def test_a_killed_learning_goes_on_where_it_stopped(pair: Pair, tmp_path: Path) -> None:
    plain = learned.straight_through(pair, 300, learned.Steps(6, 16, 0.5, 0))
    done: list[str] = []

    def advance(n: int, note: str) -> None:
        done.append(note)
        if len(done) == 4:
            raise KeyboardInterrupt

    steps = learned.Steps(6, 16, 0.5, 0, advance=advance, state=tmp_path / "state", every=0.0)
    with pytest.raises(KeyboardInterrupt):
        learned.straight_through(pair, 300, steps)
    again = learned.straight_through(pair, 300, steps)
    assert len(done) == 6 and all(torch.equal(again[n], plain[n]) for n in plain)


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


@pytest.mark.parametrize("estimator", ["straight-through", "annealed"])
@pytest.mark.parametrize("count", [1, 333])
def test_a_learned_mask_has_its_size_and_leaves_the_base_alone(pair: Pair, estimator: str, count: int) -> None:
    before = values(pair.read.loaded.model)
    mask = learned.ESTIMATORS[estimator](pair, count, learned.Steps(5, 16, 0.5, 0))
    again = learned.ESTIMATORS[estimator](pair, count, learned.Steps(5, 16, 0.5, 0))
    assert masks.count(mask) == count and all(torch.equal(mask[n], again[n]) for n in mask)
    assert all(torch.equal(v, before[n]) for n, v in values(pair.read.loaded.model).items())
    assert all(p.grad is None for p in pair.read.loaded.model.parameters())


def test_learning_moves_scores_along_the_true_gradient(pair: Pair) -> None:
    """Two steps by hand: the first only measures, the second moves by rate x direction / length of the first."""
    count, steps = 200, learned.Steps(2, 60, 0.5, 0)
    score = rules.first_order(pair, steps.points)
    score /= score.std()
    model, objective = pair.read.loaded.model, pair.read.objective
    gains = []
    for step in range(2):
        with pair.graft(rules.mask_of(pair, score, count)).apply(model, force=True):
            batch = learned.batches(pair, steps)(step)
            loss = objective.loss(objective.logits(model, batch), objective.targets(batch)).mean()
            grads = torch.autograd.grad(loss, [named(model)[n] for n in pair.shapes])
        gains.append(torch.cat([g.reshape(-1) for g in grads]) * pair.delta_P)
    moved = score - 0.5 * 0.5 * len(score) ** 0.5 * gains[1] / gains[0].norm()
    wanted = rules.mask_of(pair, moved, count)
    found = learned.straight_through(pair, count, steps)
    assert masks.common(found, wanted) >= count - 1  # float sums in another order may swap the last one
    known = replace(steps, start=rules.first_order(pair, steps.points))
    again = learned.straight_through(pair, count, known)
    assert all(torch.equal(found[n], again[n]) for n in found)


def test_soft_switches_sum_to_the_budget() -> None:
    score = torch.randn(5000)
    for count in (3, 400):
        for heat in (0.5, 0.02):
            at = learned.level(score, count, heat)
            assert float(torch.sigmoid((score - at) / heat).sum()) == pytest.approx(count, rel=1e-3)


def test_soft_switches_of_every_tensor_sum_to_its_share(pair: Pair) -> None:
    score = torch.randn(len(pair.delta_P), generator=torch.Generator().manual_seed(0))
    gate = learned.switches(pair, score, 400, 0.1, per_tensor=True)
    found = [float(part.sum()) for part in gate.split(list(pair.sizes.values()))]
    assert found == pytest.approx(list(masks.apportion(pair.sizes, 400).values()), abs=1e-2)


def test_the_published_step(pair: Pair) -> None:
    """One step of S by hand; then the extremes: a rate of next to nothing leaves the mask, a large one grows it."""
    plan, model, objective = Published(1, 1e3, 1.0, 0), pair.read.loaded.model, pair.read.objective
    start = rules.mask_of(pair, rules.movement(pair), 50)
    on = torch.zeros(len(pair.delta_P))
    on[masks.join(start, pair.sizes)] = 1.0
    free = torch.rand(len(on), generator=torch.Generator().manual_seed(seed_of(0, "published mask")))
    gate = lambda: torch.where(on == 1, 1 - torch.sigmoid(free - 1.0), torch.sigmoid(free - 1.0))
    soft = {n: v * g.view_as(v) for (n, v), g in zip(pair.delta.items(), gate().split(list(pair.sizes.values())))}
    features = pair.read.encode(pair.task.rows("train"))
    with Graft.cut(masks.everything(pair.sizes), soft).apply(model, force=True):
        batch = pair.read.feed(features)(np.arange(len(features)), 0)
        loss = objective.loss(objective.logits(model, batch), objective.targets(batch)).mean()
        grads = torch.autograd.grad(loss, [named(model)[n] for n in pair.shapes])
    slope = torch.sigmoid(free - 1.0) * (1 - torch.sigmoid(free - 1.0))
    free = free - 1e3 * torch.cat([g.reshape(-1) for g in grads]) * pair.delta_P * slope * torch.where(on == 1, -1, 1)
    wanted = masks.split((gate() > 0.5).nonzero()[:, 0], pair.sizes)
    found = published(pair, 50, plan, lambda mask: 1.0)
    assert 60 < masks.count(wanted) < len(on) - 60
    apart = masks.count(found) + masks.count(wanted) - 2 * masks.common(found, wanted)
    assert apart <= len(on) // 1000  # float sums in another order may turn a switch that stands on the edge
    score = lambda mask: float(masks.count(mask))
    still = published(pair, 50, Published(2, 1e-9, 10.0, 0), score)
    assert all(torch.equal(still[n], start[n]) for n in start) and masks.count(still) == 50
    assert masks.count(published(pair, 50, Published(2, 1e12, 10.0, 0), score)) > 50


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
        return graft_learn._answer("toy", rows, needs, {"recovered": gain})

    assert answer(rows).startswith("toy needs 0.02 of the weights (2.000%, movement)") and "91%" in answer(rows)
    assert "not localised: 2.000%" in answer(rows[:6] + points("random", 0.0, 1.0, 1.0))
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
