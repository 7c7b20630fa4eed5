"""`graft learn`: the few weights that carry a skill, cut out of a tuned model as a file, and what they are worth."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from budwood.config.graft import RULES, GraftLearnConfig, parse_size
from budwood.data.opened import Key
from budwood.data.task import Row
from budwood.errors import ConfigError
from budwood.figures.graft import layer_module_map, size_curve
from budwood.figures.save import drawing, save
from budwood.methods.card import command
from budwood.methods.graft import choice, measure
from budwood.methods.graft.measure import Side, agreement, summary
from budwood.methods.graft.pair import Pair
from budwood.methods.graft.parts import share_map
from budwood.methods.session import Session
from budwood.params import mask as masks
from budwood.params.graft import Graft
from budwood.params.mask import Mask
from budwood.store.files import canonical
from budwood.train.evaluate import Evaluation

SPARSE = 0.2  # a skill that needs more of the weights than this is not called sparse
ENOUGH = 0.95  # of the gain: the skill is there
CLOSE = 1.1  # bisection ends when the sizes are this near to one another


@dataclass
class Bench:
    """A pair with its rows scored: what every part of the verb works on."""

    session: Session
    pair: Pair
    test: Side
    selection: Side | None  # rows that may decide something; never the reported ones

    @property
    def cfg(self) -> GraftLearnConfig:
        """The verb's settings."""
        cfg: GraftLearnConfig = self.session.cfg
        return cfg

    @property
    def rule(self) -> str:
        """How the graft's weights are chosen."""
        return choice.PUBLISHED if self.cfg.parity else self.cfg.select

    def mask(self, rule: str, count: int) -> Mask:
        """Exactly `count` weights by a rule."""
        return choice.make(self.session, [(rule, count)])[0]

    def gained(self, mask: Mask, on: Side) -> float | None:
        """Share of the gain that a mask recovers on some rows."""
        return on.recovered(self.pair.graft(mask))

    def summary(self, of: Callable[[Side], Evaluation]) -> dict[str, Any]:
        """Score and calibration of one state of the model."""
        chosen = of(self.selection) if self.selection else None
        return summary(self.pair, of(self.test), chosen, self.selection.scores.rows if self.selection else ())


def learn(session: Session) -> dict[str, Any]:
    """NAME.graft, its map and, with --curve, size against recovery; returns scores of base, tuned and graft."""
    cfg, say = session.cfg, session.progress.say
    with session.progress.stage("load"):
        bench = _open(session)
    pair = bench.pair
    say(f"{len(pair.delta_P):,} graftable weights in {len(pair.shapes)} tensors, mode {pair.read.mode}")
    if pair.moved_outside:
        say(
            f"  {pair.moved_outside:,} weights outside them moved as well and stay behind: tune with --freeze "
            "embeddings,head, or add --embeddings or --head"
        )
    with session.progress.stage("baselines"):
        states = _states(bench)
        say(", ".join(f"{k.replace('_', ' ')} {v['score']:.4f}" for k, v in states.items()))
    with session.progress.stage("mask"):
        mask = _chosen(bench)
    with session.progress.stage("score"):
        draft = pair.graft(mask, dtype={"fp32": torch.float32, "fp16": torch.float16}[cfg.values])
        states["graft"] = bench.summary(lambda side: side.scores.of([draft]))
        facts = _facts(bench, draft, states)
    with session.progress.stage("curve"):
        facts |= _curve(bench, facts) if cfg.curve else {}
    with session.progress.stage("others"):
        facts |= _others(bench, draft)
    _keep(bench, draft, facts)
    choice.tidy(session)
    return facts


def _open(session: Session) -> Bench:
    pair = choice.open_shop(Key(canonical(choice.settings_of(session)), session.task)).pair
    rows: tuple[Row, ...] = ()
    if pair.task.reported == "test" and pair.task.splits.get("validation"):
        rows = pair.task.rows("validation")
    elif pair.task.splits.get("train"):
        rows = pair.task.rows("train")
    test, *chosen = measure.sides_of(pair, [pair.task.rows(pair.task.reported), *([rows] if rows else [])])
    return Bench(session, pair, test, chosen[0] if chosen else None)


def _states(bench: Bench) -> dict[str, Any]:
    """Base and tuned model; where more moved than a graft can carry, also the base with all that it can."""
    states = {"base": bench.summary(lambda side: side.scores.of([])), "tuned": bench.summary(lambda side: side.tuned)}
    if bench.pair.moved_outside:
        states["all_graftable"] = bench.summary(lambda side: side.ceiling)
    return states


def _chosen(bench: Bench) -> Mask:
    """The mask asked for."""
    cfg, size, total = bench.cfg, parse_size(bench.cfg.size), len(bench.pair.delta_P)
    if size.gain is not None:
        return _smallest(bench, size.gain)
    count = size.count if size.count is not None else round((size.fraction or 0) * total)
    if not 0 < count <= total:
        raise ConfigError(
            f"--size {cfg.size} is {count:,} weights, and this model has {total:,} graftable ones. Ask for 1 to "
            f"{total:,}, or take in more with --embeddings and --head."
        )
    return bench.mask(bench.rule, count)


def _smallest(bench: Bench, wanted: float) -> Mask:
    """The fewest weights that recover this share of the gain on the selection rows, by bisection on a log scale."""
    if bench.selection is None or bench.gained({}, bench.selection) is None:
        raise ConfigError(
            f"--size {bench.cfg.size}: tuning gained nothing on the selection rows, so there is no gain to recover. "
            "Give a count or a percentage."
        )
    low, high = 1.0, float(len(bench.pair.delta_P))
    best = measure.whole(bench.pair)
    while high / low > CLOSE:
        middle = (low * high) ** 0.5
        mask = bench.mask(bench.cfg.select, max(1, round(middle)))
        share = bench.gained(mask, bench.selection)
        bench.session.progress.say(f"  {round(middle):,} weights: {share or 0:.0%} of the gain on selection rows")
        if share is not None and share >= wanted:
            high, best = middle, mask
        else:
            low = middle
    return best


def _facts(bench: Bench, graft: Graft, states: dict[str, Any]) -> dict[str, Any]:
    total, test = len(bench.pair.delta_P), bench.test
    return {
        "split": bench.pair.task.reported,
        "mode": bench.pair.read.mode,
        "metric": test.tuned.metrics["metric"],
        "score": states["graft"]["score"],
        "n": len(test.scores.rows),
        "select": bench.rule,
        "size": graft.size,
        "fraction": graft.size / total,
        "graftable": total,
        "moved_outside": bench.pair.moved_outside,
        "recovered": test.recovered(graft),
        "agreement": agreement(test.scores.of([graft]), test.tuned),
        **states,
    }


def _curve(bench: Bench, facts: dict[str, Any]) -> dict[str, Any]:
    """Score and recovery at every size for every rule, and what it says in one line."""
    rows, total = [], len(bench.pair.delta_P)
    sizes = sorted({max(1, round(f * total)) for f in bench.cfg.curve_sizes})
    points = [(rule, count) for rule in RULES for count in sizes]
    for (rule, count), mask in zip(points, choice.make(bench.session, points)):
        found = bench.test.scores.of([bench.pair.graft(mask)])
        rows.append(
            {
                "select": rule,
                "fraction": count / total,
                "size": count,
                "score": found.metrics["score"],
                "recovered": bench.gained(mask, bench.test),
                "recovered_selection": bench.gained(mask, bench.selection) if bench.selection else None,
                "ece": found.metrics.get("ece"),
            }
        )
    needs = {r: _needs([x for x in rows if x["select"] == r]) for r in RULES}
    title = f"{bench.pair.task.name}: share of the gain recovered"
    with drawing() as axes:
        save(axes.figure, bench.session.run.file("figures", "curve"), size_curve(axes, rows, title))
    return {"curve": rows, "needs": needs, "answer": _answer(bench.pair.task.name, rows, needs, facts)}


def _needs(rows: list[dict[str, Any]]) -> float | None:
    """The smallest measured share of the weights that recovers 95 % of the gain, as do all larger ones.

    Told by the selection rows, so that the reported ones have no part in the choice.
    """
    found = None
    for row in sorted(rows, key=lambda r: -r["fraction"]):
        if row["recovered_selection"] is None or row["recovered_selection"] < ENOUGH:
            break
        found = float(row["fraction"])
    return found


def _answer(task: str, rows: list[dict[str, Any]], needs: dict[str, float | None], facts: dict[str, Any]) -> str:
    """One line a person can quote: rule and size by the selection rows, what they recover by the reported ones."""
    scores = " to ".join(f"{facts[k]['score']:.4f}" for k in ("base", "tuned"))
    return f"{_claim(task, rows, needs, facts)} (Tuning: {facts['metric']} {scores} on {facts['n']:,} rows.)"


def _percent(share: float) -> str:
    """A share as one would say it.

    >>> _percent(0.05), _percent(0.0001)
    ('5%', '0.01%')
    """
    return f"{100 * share:.3g}%"


def _claim(task: str, rows: list[dict[str, Any]], needs: dict[str, float | None], facts: dict[str, Any]) -> str:
    if facts["recovered"] is None:
        return f"{task}: tuning gained nothing, so there is nothing to recover."
    if all(r["recovered_selection"] is None for r in rows):
        return f"{task}: tuning gained nothing on the rows that choose rule and size, so no size can be told."
    sizes = {r: n for r, n in needs.items() if n is not None and r != "random"}
    if not sizes:
        largest = max(r["fraction"] for r in rows)
        return (
            f"{task} is not sparse: no rule recovers 95% of the gain with {_percent(largest)} of the weights or less."
        )
    best = min(sizes, key=lambda r: sizes[r])
    share, chance = sizes[best], needs.get("random")
    if chance is not None and chance <= share:
        drawn = f"{_percent(chance)} of the weights, drawn at random,"
        return f"{task} is not localised: {drawn} bring 95% of the gain as well."
    there = next(r["recovered"] for r in rows if r["select"] == best and r["fraction"] == share)
    told = f"for 95% of the gain on the rows that chose them, and {there:.0%} on the reported rows."
    if share > SPARSE:
        return f"{task} is not sparse: it needs {_percent(share)} of the weights ({best}) {told}"
    return f"{task} needs {_percent(share)} of the weights ({best}) {told}"


def _others(bench: Bench, graft: Graft) -> dict[str, Any]:
    """Other sets with the same labels, and tasks that should not be harmed."""
    cfg = bench.cfg
    ood = {}
    for name in cfg.ood:
        scores, tuned = measure.shifted(bench.pair, name)
        found = {"base": scores.of([]).metrics, "tuned": tuned.metrics, "graft": scores.of([graft]).metrics}
        ood[name] = {k: {"score": m["score"], "ece": m.get("ece")} for k, m in found.items()} | {
            "n": len(scores.rows),
            "metric": found["base"]["metric"],
        }
    pair = bench.pair
    harm = measure.damage(pair.cfg, pair.read.loaded.ref, cfg.off_task, {"graft": graft}, pair)
    return {**({"ood": ood} if ood else {}), **({"off_task": harm} if harm else {})}


def _keep(bench: Bench, draft: Graft, facts: dict[str, Any]) -> None:
    """Write NAME.graft and its map; the file's own facts join the metrics."""
    session, cfg = bench.session, bench.cfg
    name = cfg.name or "".join(c if c.isalnum() or c in "._-" else "-" for c in bench.pair.task.name)
    manifest = {
        **draft.manifest,
        "select": bench.rule,
        "size": draft.size,
        "seed": cfg.seed,
        "rows": bench.pair.task.digest,
        "tuned": session.models[1].text,
        "metrics": {k: facts[k] for k in ("metric", "recovered", "n")}
        | {k: facts[k]["score"] for k in ("base", "tuned", "graft")},
        "command": command(session),
    }
    graft = Graft(draft.index, draft.delta, draft.shape, draft.head, manifest)
    path = session.run.file(f"{name}.graft")
    facts["bytes"] = graft.save(path)
    facts["file"] = str(path.resolve())
    table = share_map({n: len(i) for n, i in graft.index.items()}, bench.pair.sizes)
    with drawing() as axes:
        title = f"{name}: share of the graft's {masks.count(graft.index):,} weights"
        save(axes.figure, session.run.file("figures", "map"), layer_module_map(axes, table, title))
