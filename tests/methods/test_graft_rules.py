"""Rules that choose weights, against slow versions: scores, learned masks, the published step."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import budwood as bw
from budwood.config.graft import GraftLearnConfig
from budwood.data.batch import seed_of
from budwood.errors import ModelError, TreeError
from budwood.methods.graft import learned, rules
from budwood.methods.graft.pair import Pair, open_pair
from budwood.methods.graft.parity import Published, published
from budwood.models.reference import resolve
from budwood.params import mask as masks
from budwood.params import tree
from budwood.params.graft import Graft
from budwood.params.tree import named, values
from tests.methods.graft_for_tests import learn, toy_task


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
    """Two steps by hand: the first measures at the base, the second moves by rate x direction / length of the first."""
    count, steps = 200, learned.Steps(2, 60, 0.5, 0)
    score = rules.first_order(pair, steps.points)
    score /= score.std()
    model, objective = pair.read.loaded.model, pair.read.objective
    gains = []
    for step in range(2):
        graft = pair.graft(rules.mask_of(pair, score, count))
        with graft.apply(model, force=True) if step else nullcontext():
            batch = learned.batches(pair, steps)(step)
            loss = objective.loss(objective.logits(model, batch), objective.targets(batch)).mean()
            grads = torch.autograd.grad(loss, [named(model)[n] for n in pair.shapes])
        gains.append(torch.cat([g.reshape(-1) for g in grads]) * pair.delta_P)
    moved = score - 0.5 * 0.5 * len(score) ** 0.5 * gains[1] / gains[0].norm()
    wanted = rules.mask_of(pair, moved, count)
    assert loss_of(pair, wanted) < loss_of(pair, rules.mask_of(pair, score, count))  # else the start would come back
    found = learned.straight_through(pair, count, steps)
    assert masks.common(found, wanted) >= count - 1  # float sums in another order may swap the last one
    known = replace(steps, start=rules.first_order(pair, steps.points))
    again = learned.straight_through(pair, count, known)
    assert all(torch.equal(found[n], again[n]) for n in found)


@pytest.mark.parametrize("estimator", ["straight-through", "annealed"])
@pytest.mark.parametrize("count", [50, 2000])
def test_a_learned_mask_is_never_worse_than_what_it_began_with(pair: Pair, estimator: str, count: int) -> None:
    """At a rate that throws the scores about, too; loss over all training rows."""
    found = learned.ESTIMATORS[estimator](pair, count, learned.Steps(6, 16, 50.0, 0))
    cheap = [rules.mask_of(pair, x, count) for x in (rules.movement(pair), rules.first_order(pair, 4))]
    assert loss_of(pair, found) <= min(loss_of(pair, mask) for mask in cheap) * (1 + 1e-6)


def loss_of(pair: Pair, mask: masks.Mask) -> float:
    """Mean loss over all training rows with a mask's weights moved."""
    model, objective = pair.read.loaded.model, pair.read.objective
    with pair.graft(mask).apply(model, force=True), torch.no_grad():
        found = [objective.loss(objective.logits(model, b), objective.targets(b)) for b in rules.batches(pair)]
    return float(torch.cat(found).mean())


def test_learning_begins_with_the_rule_whose_mask_does_better(pair: Pair) -> None:
    count, steps = 2000, learned.Steps()
    useful, harmful = rules.first_order(pair, steps.points), -rules.first_order(pair, steps.points)
    loss = {
        name: learned._loss_of(pair, rules.places_of(pair, score, count))
        for name, score in {"useful": useful, "harmful": harmful, "moved": rules.movement(pair)}.items()
    }
    assert loss["useful"] < loss["moved"] < loss["harmful"]
    for start, wanted in ((useful, useful), (harmful, rules.movement(pair))):
        found, _ = learned._start(pair, replace(steps, start=start), count, False)
        torch.testing.assert_close(found, wanted / wanted.std())


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
