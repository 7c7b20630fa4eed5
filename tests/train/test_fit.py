"""The loop: the gradient it follows, exact resume, accumulation, weights, selection."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from budwood.data.batch import Features
from budwood.errors import ModelError
from budwood.models.objective import Head
from budwood.models.reading import RowFeed
from budwood.train.fit import Keeping, Plan, Replay, Terms, fit, trainable
from budwood.train.step import Rule
from tests.cases import PAD, VOCABULARY, build


def feed(rows: int = 40, seed: int = 0) -> RowFeed:
    rng = np.random.default_rng(seed)
    ids = [rng.integers(4, VOCABULARY, rng.integers(3, 12)).tolist() for _ in range(rows)]
    labels = [int(sum(x) % 3) for x in ids]
    return RowFeed(Features.from_lists([f"r{i}" for i in range(rows)], {"input_ids": ids}, {"label": labels}), PAD)


def plan(**changes: object) -> Plan:
    given = {
        "rule": Rule(weight_decay=0.01),
        "learning_rate": 1e-3,
        "steps": 12,
        "batch_size": 8,
        "logging_steps": 3,
        "seed": 5,
    }
    return Plan(**{**given, **changes})  # type: ignore[arg-type]


def model(dropout: float = 0.1) -> torch.nn.Module:
    made = build("bert", "head", seed=0)
    for module in made.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = dropout
    return made.float()


def weights(m: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in m.named_parameters()}


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(a[n], b[n]) for n in a)


def test_same_seed_same_bits_other_seed_other_bits() -> None:
    results = []
    for seed in (5, 5, 6):
        m = model()
        fit(m, Head(), feed(), plan(seed=seed))
        results.append(weights(m))
    assert equal(results[0], results[1]) and not equal(results[0], results[2])


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("stop", [1, 5, 11])
def test_resume_is_bit_exact(tmp_path: Path, optimizer: str, stop: int) -> None:
    wanted = plan(rule=Rule(optimizer, momentum=0.9))
    whole = model()
    history = fit(whole, Head(), feed(), wanted)

    class Killed(Exception):
        pass

    taken = 0

    def die(n: int, note: str) -> None:
        nonlocal taken
        taken += n
        if taken > stop:
            raise Killed

    state = tmp_path / "state.safetensors"
    with pytest.raises(Killed):
        fit(model(), Head(), feed(), wanted, Keeping(state=state, every=-1, advance=die))
    resumed = model()
    again = fit(resumed, Head(), feed(), wanted, Keeping(state=state, every=-1))
    assert equal(weights(whole), weights(resumed))
    assert again.points == history.points and again.rates == history.rates


def test_a_state_of_another_plan_is_not_used(tmp_path: Path) -> None:
    state = tmp_path / "s.safetensors"
    fit(model(), Head(), feed(), plan(steps=6), Keeping(state=state, every=-1))
    fresh, other = model(), model()
    fit(fresh, Head(), feed(), plan(steps=4))
    fit(other, Head(), feed(), plan(steps=4), Keeping(state=state, every=-1))
    assert equal(weights(fresh), weights(other))


def test_accumulation_follows_the_same_gradient() -> None:
    one, four = model(dropout=0), model(dropout=0)
    fit(one, Head(), feed(), plan(batch_size=16, accumulation=1, rule=Rule("sgd")))
    fit(four, Head(), feed(), plan(batch_size=4, accumulation=4, rule=Rule("sgd")))
    for name, value in weights(one).items():
        torch.testing.assert_close(weights(four)[name], value, rtol=1e-4, atol=1e-6)


def test_weight_zero_leaves_a_row_out() -> None:
    rows = feed(20)
    kept = np.arange(20) < 12
    weighted, subset = model(dropout=0), model(dropout=0)
    once = plan(steps=1, batch_size=20, rule=Rule("sgd"), warmup=0.0, max_grad_norm=0.0)
    fit(weighted, Head(), rows, once, terms=Terms(weights_N=kept.astype(np.float32) * 20 / 12))
    fit(subset, Head(), RowFeed(rows.features.take(np.flatnonzero(kept)), PAD), once)
    for name, value in weights(subset).items():
        torch.testing.assert_close(weights(weighted)[name], value, rtol=1e-4, atol=1e-6)


def test_penalty_enters_loss_and_gradient() -> None:
    class Pull:
        def __call__(self, params, grads):  # type: ignore[no-untyped-def]
            for name, grad in grads.items():
                grad.zero_().add_(params[name])
            return 100.0

    m = model(dropout=0)
    before = weights(m)
    history = fit(
        m,
        Head(),
        feed(),
        plan(steps=1, rule=Rule("sgd"), learning_rate=0.5, max_grad_norm=0.0),
        terms=Terms(penalty=Pull()),
    )
    assert history.points[0]["loss"] > 100
    touched = [n for n, p in m.named_parameters() if not torch.equal(p, before[n])]
    assert touched
    for name in touched:
        torch.testing.assert_close(dict(m.named_parameters())[name].detach(), before[name] * 0.5)


def test_best_weights_are_kept() -> None:
    m = model()
    scores = iter([1.0, 3.0, 2.0])
    seen = []

    def select() -> float:
        seen.append(weights(m))
        return next(scores)

    history = fit(m, Head(), feed(), plan(eval_steps=4), Keeping(select=select))
    assert history.best_step == 8 and equal(weights(m), seen[1])


def test_mode_and_random_state_come_back() -> None:
    m = model()
    torch.manual_seed(3)
    before = torch.get_rng_state()
    fit(m, Head(), feed(), plan(steps=2))
    assert not m.training and torch.equal(torch.get_rng_state(), before)
    assert all(p.grad is None for p in m.parameters())


def test_nothing_to_train_and_divergence_are_told() -> None:
    frozen = model()
    frozen.requires_grad_(False)
    with pytest.raises(ModelError, match="Nothing is left to train"):
        fit(frozen, Head(), feed(), plan())
    with pytest.raises(ModelError, match="became nan at update"):
        fit(model(), Head(), feed(), plan(learning_rate=1e30, max_grad_norm=0.0, rule=Rule("sgd")))
    assert trainable(model())


def test_replayed_rows_add_their_mean_gradient() -> None:
    """One update on a rows with b replayed = one update on both with weights that make the two means."""
    rows, other = feed(8), feed(6, seed=9)
    once = plan(steps=1, batch_size=8, rule=Rule("sgd"), warmup=0.0, max_grad_norm=0.0)
    replayed, joined = model(dropout=0), model(dropout=0)
    history = fit(replayed, Head(), rows, once, terms=Terms(replay=Replay(Head(), other, rows=6, weight=0.5)))
    parts = [rows.features, other.features]
    ids = [f.piece("input_ids", n).tolist() for f in parts for n in range(len(f))]
    labels = [int(f.fixed["label"][n]) for f in parts for n in range(len(f))]
    both = RowFeed(Features.from_lists([str(i) for i in range(14)], {"input_ids": ids}, {"label": labels}), PAD)
    weights_N = np.array([14 / 8] * 8 + [0.5 * 14 / 6] * 6, dtype=np.float32)
    together = fit(
        joined,
        Head(),
        both,
        plan(steps=1, batch_size=14, rule=Rule("sgd"), warmup=0.0, max_grad_norm=0.0),
        terms=Terms(weights_N=weights_N),
    )
    assert history.points[0]["loss"] == pytest.approx(together.points[0]["loss"], rel=1e-5)
    for name, value in weights(joined).items():
        torch.testing.assert_close(weights(replayed)[name], value, rtol=1e-4, atol=1e-6)
