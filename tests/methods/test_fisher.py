"""Fisher information against a loop over single examples, in float64, and what must not change it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import budwood as bw
from budwood.capture.accumulate import Sums
from budwood.capture.gradients import cover
from budwood.config.fisher import FisherConfig
from budwood.data.encoding import Encoding
from budwood.data.task import Row, Task
from budwood.errors import ConfigError, ModelError
from budwood.methods import fisher as method
from budwood.methods.fisher import KINDS, _Shop, kind_for
from budwood.models.load import Loaded
from budwood.models.reading import Reading
from budwood.params import tree
from tests.cases import case, write_model

FAMILIES = ("bert", "albert", "distilbert", "gpt2")


def shop(family: str, objective: str, kind: str, seed: int = 0) -> _Shop:
    """A toy model at work, in float64."""
    made = case(family, objective, rows=5)
    labels = ("a", "b", "c") if objective == "head" else ()
    task = Task("toy", "label" if labels else "text", {"train": (Row("r"),)}, labels)
    loaded = Loaded(made.model, None, None, 32, ())  # type: ignore[arg-type]

    class Toy(Reading):
        def feed(self, features: Any) -> Any:
            from budwood.models.reading import RowFeed
            from tests.cases import PAD

            return RowFeed(features, PAD)

    read = Toy(loaded, task, "head", made.objective, Encoding(), None, None)
    cfg = FisherConfig(task="toy", kind=kind, seed=seed, batch_rows=2)
    coverage = cover(made.model, made.objective, made.batch())
    return _Shop(read, made.features, coverage, kind, cfg)  # type: ignore[arg-type]


def loop(shop: _Shop, weight: Any) -> dict[str, torch.Tensor]:
    """sum over rows and outcomes of weight x squared gradient, one backward pass each."""
    model, objective = shop.read.loaded.model, shop.read.objective
    parameters = {n: p for n, p in tree.named(model).items() if n in shop.coverage.names}
    total = {n: torch.zeros_like(p) for n, p in parameters.items()}
    for n in range(len(shop.features)):
        batch = shop.read.feed(shop.features)(np.array([n]), 0)
        for share, value in weight(objective, model, batch):
            grads = torch.autograd.grad(value, list(parameters.values()), allow_unused=True)
            for name, grad in zip(parameters, grads):
                if grad is not None:
                    total[name] += share * grad.square()
    return total


def every_label(objective: Any, model: Any, batch: Any) -> Any:
    for k in range(3):
        logits = objective.logits(model, batch)
        yield float(logits.softmax(1)[0, k].detach()), logits.log_softmax(1)[0, k]


def truth(objective: Any, model: Any, batch: Any) -> Any:
    yield 1.0, objective.loss(objective.logits(model, batch), objective.targets(batch)).sum()


def computed(shop: _Shop, order: np.ndarray | None = None) -> dict[str, torch.Tensor]:
    sums = Sums()
    KINDS[shop.kind](shop, np.arange(len(shop.features)) if order is None else order, sums)
    return sums.total


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("kind", "oracle"), [("exact", every_label), ("empirical", truth)])
def test_equals_the_loop_over_single_examples(family: str, kind: str, oracle: Any) -> None:
    here = shop(family, "head", kind)
    wanted = loop(here, oracle)
    scale = max(float(v.abs().max()) for v in wanted.values())
    for name, value in computed(here).items():
        torch.testing.assert_close(
            value, wanted[name], rtol=1e-9, atol=1e-13 * scale, msg=lambda m, n=name: f"{n}: {m}"
        )
        assert float((value - wanted[name]).abs().max()) <= 1e-12 * scale, name


def test_sampled_converges_to_exact() -> None:
    exact = computed(shop("bert", "head", "exact"))
    name = "encoder.layer.2.output.dense.weight"
    draws = torch.stack([computed(shop("bert", "head", "sampled", seed))[name] for seed in range(60)])
    few, many = draws[:5].mean(0), draws.mean(0)
    error = lambda x: float((x - exact[name]).norm() / exact[name].norm())
    assert error(many) < error(few) and error(many) < 0.25


@pytest.mark.parametrize(
    ("family", "kind"),
    [("bert", "exact"), ("bert", "sampled"), ("bert", "empirical"), ("bert", "mas"), ("deberta-v2", "sampled")],
)
def test_order_and_batches_do_not_matter(family: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    here = shop(family, "head", kind)
    assert bool(here.coverage.looped) == (family == "deberta-v2")  # one example at a time: labels too
    whole = computed(here)
    monkeypatch.setattr(method, "TOKENS", 1)
    monkeypatch.setattr(method, "GRADIENTS", 1)
    turned = computed(here, np.arange(len(here.features))[::-1])
    for name, value in whole.items():
        torch.testing.assert_close(turned[name], value, rtol=1e-9, atol=1e-12)


def test_batched_is_the_square_of_means() -> None:
    here = shop("bert", "head", "batched")
    model, objective = here.read.loaded.model, here.read.objective
    batch = here.read.feed(here.features)(np.array([0, 1]), 0)
    loss = objective.loss(objective.logits(model, batch), objective.targets(batch)).mean()
    parameter = tree.named(model)["encoder.layer.0.output.dense.weight"]
    (grad,) = torch.autograd.grad(loss, [parameter])
    sums = Sums()
    KINDS["batched"](here, np.array([0, 1]), sums)
    assert sums.count == 1
    torch.testing.assert_close(sums.total["encoder.layer.0.output.dense.weight"], grad.square())


def test_kinds_are_chosen_and_refused() -> None:
    two = Task("t", "label", {}, ("a", "b"))
    many = Task("t", "label", {}, tuple(map(str, range(70))))
    text = Task("t", "text", {})
    assert kind_for(FisherConfig(task="t"), two) == "exact" and kind_for(FisherConfig(task="t"), many) == "sampled"
    assert kind_for(FisherConfig(task="t"), text) == "sampled"
    for task in (many, text):
        with pytest.raises(ConfigError, match="--kind exact goes through every label"):
            kind_for(FisherConfig(task="t", kind="exact"), task)


@pytest.fixture
def tuned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Task]:
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    rows = tuple(
        Row(f"r{i}", " ".join(f"w{j}" for j in rng.integers(5, 40, rng.integers(2, 9))), label=int(i % 2))
        for i in range(40)
    )
    task = Task("toy", "label", {"train": rows, "validation": rows[:8]}, ("no", "yes"))
    write_model(tmp_path / "m", "bert", "lm")
    return bw.finetune(str(tmp_path / "m"), task, max_steps=3, threads=1), task


def test_a_run_keeps_one_file_and_workers_do_not_change_it(tuned: Any, tmp_path: Path) -> None:
    model, task = tuned
    files = []
    for name, more in (("one", {}), ("shards", {"shard_rows": 7}), ("again", {"shard_rows": 7})):
        result = bw.fisher(model, task, out=tmp_path / name, threads=1, **more)
        files.append(tree.load(result.run / "fisher.safetensors"))
        assert result.metrics["kind"] == "exact" and result.metrics["n"] == 40
        assert not list((result.run / "shards").iterdir())
        assert result.metrics["total"] == pytest.approx(sum(result.metrics["by_layer"].values()), rel=1e-6)
    for name, value in files[0][0].items():
        torch.testing.assert_close(files[1][0][name], value, rtol=1e-5, atol=1e-9)
        assert torch.equal(files[1][0][name], files[2][0][name]) and bool((value >= 0).all())
    manifest = files[0][1]
    assert manifest["count"] == 40 and manifest["kind"] == "exact" and manifest["model_hash"]
    assert (tmp_path / "shards" / "fisher.safetensors").read_bytes() == (
        tmp_path / "again" / "fisher.safetensors"
    ).read_bytes()


def test_names_match_across_heads(tuned: Any, tmp_path: Path) -> None:
    """The Fisher of a classifier and of the masked LM below it speak of the same backbone."""
    model, task = tuned
    text = Task("plain", "text", {"train": task.splits["train"]}, metric="lm_loss")
    classifier = tree.load(bw.fisher(model, task, threads=1).run / "fisher.safetensors")[0]
    lm = tree.load(bw.fisher(str(tmp_path / "m"), text, threads=1).run / "fisher.safetensors")[0]
    shared = {n for n in classifier if not n.startswith("head.") and not n.startswith("pooler.")}
    assert shared == {n for n in lm if not n.startswith("head.")}


def test_a_model_without_a_head_is_refused(tuned: Any, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no trained head"):
        bw.fisher(str(tmp_path / "m"), tuned[1], threads=1)
    assert not list((tmp_path / "runs").glob("fisher-*"))


def test_a_number_between_two_words_is_a_choice_of_two() -> None:
    """Exact Fisher of a soft two-way answer equals the sum over both outcomes."""
    made = case("bert", "soft", rows=4)
    task = Task("toy", "regression", {"train": (Row("r"),)}, bounds=(0.0, 5.0))
    loaded = Loaded(made.model, None, None, 32, ())  # type: ignore[arg-type]
    base = shop("bert", "head", "exact")
    read = type(base.read)(loaded, task, "prompt", made.objective, Encoding(), None, None)
    here = _Shop(read, made.features, cover(made.model, made.objective, made.batch()), "exact", base.cfg)

    def outcomes(objective: Any, model: Any, batch: Any) -> Any:
        for k in range(2):
            logits = objective.logits(model, batch)
            yield float(logits.softmax(1)[0, k].detach()), logits.log_softmax(1)[0, k]

    wanted = loop(here, outcomes)
    for name, value in computed(here).items():
        torch.testing.assert_close(value, wanted[name], rtol=1e-9, atol=1e-14)


def test_batched_numbers_are_much_smaller() -> None:
    each, together = (shop("bert", "head", k) for k in ("empirical", "batched"))
    sums = {}
    for here in (each, together):
        found = Sums()
        KINDS[here.kind](here, np.arange(len(here.features)), found)
        sums[here.kind] = sum(float(v.sum()) for v in found.mean().values())
    assert sums["batched"] < sums["empirical"]


def test_the_same_name_with_other_rows_is_another_fisher(tuned: Any) -> None:
    model, task = tuned
    first = bw.fisher(model, task, threads=1)
    fewer = Task(task.name, "label", {**task.splits, "train": task.splits["train"][:9]}, task.labels)
    second = bw.fisher(model, fewer, threads=1)
    assert first.run != second.run and second.metrics["examples"] == 9
    assert first.metrics["total"] != second.metrics["total"]


def test_workers_find_the_rows_of_a_task_object(tuned: Any, tmp_path: Path) -> None:
    model, task = tuned
    files = [
        bw.fisher(model, task, out=tmp_path / f"w{n}", workers=n, shard_rows=20, threads=1).run / "fisher.safetensors"
        for n in (1, 2)
    ]
    one, two = (tree.load(f)[0] for f in files)
    assert all(torch.equal(one[n], two[n]) for n in one) and not list((tmp_path / "w2" / "shards").iterdir())


def test_second_moments_of_adam_become_a_fisher(tuned: Any, tmp_path: Path) -> None:
    _, task = tuned
    run = bw.finetune(str(tmp_path / "m"), task, max_steps=4, save_second_moments=True, threads=1, out=tmp_path / "a")
    found = bw.fisher(run, task, kind="adam", threads=1)
    values, manifest = tree.load(found.run / "fisher.safetensors")
    assert manifest["kind"] == "adam" and manifest["count"] == 4 and found.metrics["total"] > 0
    assert all(bool((v >= 0).all()) for v in values.values())
    plain = bw.finetune(str(tmp_path / "m"), task, max_steps=4, threads=1, out=tmp_path / "b")
    with pytest.raises(ModelError, match="--save-second-moments"):
        bw.fisher(plain, task, kind="adam", threads=1)


def test_a_penalty_leaves_nothing_in_the_checkpoint(tuned: Any, tmp_path: Path) -> None:
    model, task = tuned
    fisher = bw.fisher(model, task, threads=1).run
    size = lambda run: sum(p.stat().st_size for p in (run / "model").iterdir() if p.suffix == ".safetensors")
    same = {"max_steps": 2, "threads": 1}
    plain = bw.finetune(str(tmp_path / "m"), task, out=tmp_path / "p", **same)
    held = bw.finetune(str(tmp_path / "m"), task, out=tmp_path / "h", ewc=(fisher,), ewc_strength=3.0, **same)
    assert size(held.run) <= 1.05 * size(plain.run) and held.metrics["ewc_effective"] > 0
