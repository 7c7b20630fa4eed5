"""`influence fit`: factors of a model's curvature on a task.

Rows go in shards, each a job that writes one file of sums; sums are added in the order of the shards, so workers, kills
and resumes leave the same bytes.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import save_file

from budwood.capture.stream import Map
from budwood.config.influence import FitConfig
from budwood.data.batch import seed_of
from budwood.engine.jobs import Job
from budwood.engine.run import Wish, run_all
from budwood.methods.influence import evidence as seen
from budwood.methods.influence import factors as made
from budwood.methods.influence.factors import Factors
from budwood.methods.influence.memory import of_fit, tokens_within
from budwood.methods.influence.moments import Basis, covariances, second_moments
from budwood.methods.influence.profile import profiled
from budwood.methods.influence.queries import say_skipped, warn_other_rows
from budwood.methods.influence.workshop import Shop, open_shop, rows_for, settings_for
from budwood.methods.session import Session
from budwood.models.reading import Reading
from budwood.params import tree
from budwood.store.files import write_text, writing
from budwood.store.progress import Progress

HERE = "budwood.methods.influence.fit"
EIGEN_PARTS = 4  # files of eigenbases: what is lost when a run is killed among them


def fit(session: Session) -> dict[str, Any]:
    """Factors under RUN/factors; returns strategies, rows and what was covered."""
    cfg: FitConfig = session.cfg
    warn_other_rows(session)
    settings = settings_for(cfg, session.models[0].text) | rows_for(cfg, session.task, session.run.path)
    with session.progress.stage("load"):
        shop = open_shop(settings, session.task)
    factors = fitted(Bench(shop, settings, session.run.path / "factors", cfg, session.progress))
    shutil.rmtree(session.run.file("parts"), ignore_errors=True)
    said = say_damping(session.progress, factors, cfg.strategy, ("auto",))
    found = told(factors, shop)
    say_skipped(session, found["skipped"], found["train"])
    session.progress.say(f"Score with these factors: budwood influence score ... --factors {session.run.path}")
    return profiled(session, {**found, **said})


def say_damping(
    progress: Progress, factors: Factors, strategies: Sequence[str], dampings: Sequence[str]
) -> dict[str, Any]:
    """Say on the screen, where `auto` is among the dampings, what it comes to; the same for the metrics."""
    curved = [s for s in strategies if s in ("ekfac", "kfac", "diagonal")]
    if "auto" not in dampings or not curved:
        return {}
    for strategy, text in seen.told(factors, curved).items():
        progress.say(f"--damping auto, {strategy}: {text}.")
    return {
        "damping_auto": ", ".join(f"{s} {factors.share(s)[0]:g} x mean" for s in curved),
        "damping_why": seen.told(factors, curved),
    }


def told(factors: Factors, shop: Shop) -> dict[str, Any]:
    """What a fit has to say."""
    rows, pieces = len(set(shop.train.ids)), len(shop.train)
    return {
        "strategies": list(factors.facts["strategies"]),
        "fisher": shop.labels,
        "mode": shop.read.mode,
        "n": rows,
        "train": rows,
        **({"pieces": pieces} if pieces != rows else {}),  # long texts are cut, and every piece is a row of a fit
        "fit_rows": factors.facts["fit_rows"],
        "growth": factors.facts.get("growth"),
        "modules": len(factors.maps),
        "parameters": sum(m.out * m.columns for m in factors.maps),
        "not_covered": dict(shop.left),
        "skipped": sorted(factors.facts["skipped"]),
        "damping": factors.facts["evidence"],
    }


@dataclass(frozen=True)
class Bench:
    """Where factors are made: the shop, what opens it elsewhere, the directory they go to, and the dampings that they
    are wanted for.
    """

    shop: Shop
    settings: dict[str, Any]
    path: Path
    wish: Wish
    progress: Progress
    dampings: tuple[str, ...] = ("auto",)


def fitted(bench: Bench) -> Factors:
    """The factors of a bench, made where they are missing; `--fit-rows auto` grows the sample until ranks settle."""
    if (bench.path / "factors.json").exists():
        return Factors.open(bench.path)
    tokens_within(bench.shop, of_fit(bench.shop))  # too little memory is said before anything is done
    rows = len(bench.shop.train)
    wish = bench.shop.cfg.fit_rows
    if wish == "auto":
        from budwood.methods.influence.growth import grown

        factors = grown(bench)
    else:
        factors = fitted_on(bench, rows if wish == "all" else min(rows, int(wish)))
    for made_on_the_way in ("parts", "growth"):  # only now are they worth nothing
        shutil.rmtree(bench.path / made_on_the_way, ignore_errors=True)
    return factors


def fitted_on(
    bench: Bench, count: int, growth: Sequence[int] = (), place: Path | None = None, settled: int | None = None
) -> Factors:
    """Factors from the first `count` rows of the seeded order, written to `place` (default: the bench's).

    `growth`: smaller samples that were fitted before, beside `place`: their sums are added to. From `settled` rows on
    the eigenbases are those of that sample, so that second moments are sums that grow as covariances do. Evidence for
    damping is that of a fit of the first rows by themselves, in their own eigenbases, so that it is the same however
    many more are fitted; where no damping is to be chosen that pass is saved, and there is no evidence.
    """
    place = place or bench.path
    if (place / "factors.json").exists():
        return Factors.open(place)
    shop, strategies = bench.shop, set(bench.shop.cfg.strategy)
    by_itself = count > seen.ROWS and bool(strategies - {"identity"})
    first = seen.ROWS if by_itself and "auto" in bench.dampings else 0
    known: Mapping[str, Any] | None = {} if by_itself else None
    if first:
        known = fitted_on(bench, first, (), bench.path / "growth" / str(first)).facts["evidence"]
    turned = min(count, settled or count)
    home = place if turned == count else place.parent / str(turned)  # of the eigenbases
    evidence: dict[str, Any] = {}
    if strategies & {"kfac", "ekfac"}:
        by_half = _covariance(bench, home, _ranges(turned, [*growth, first]))
        _eigen(bench, home)
        if home != place:
            _copied(home, place, ("covariance", "eigen"))
        if "kfac" in strategies and known is None:
            halves = (made.merged(tree.load(j.output)[0] for j in mine) for mine in by_half)
            evidence |= seen.of_covariances(halves, Factors(place, shop.maps, {}).bases, shop.maps)
    if strategies & {"ekfac", "diagonal"} or ("kfac" in strategies and any(m.diagonal for m in shop.maps)):
        ends = [n for n in growth if turned <= n]
        evidence |= _moments(bench, place, home, _ranges(count, ends))
    facts = {
        "rows": len(shop.train),
        "fit_rows": count,
        "strategies": sorted(strategies),
        "evidence": evidence if known is None else known,
        "growth": [],
        "skipped": sorted(shop.skipped),
        **identity(shop),
    }
    write_text(place / "factors.json", made.facts_json(shop.maps, facts))
    return Factors.open(place)


def identity(shop: Shop) -> dict[str, Any]:
    """What factors belong to: model, rows and how they are read, labels, maps."""
    return {
        "model_hash": shop.hash,
        "task": shop.read.task.name,
        "train_rows": shop.read.task.digest,
        "train_split": shop.cfg.train_split,
        "fisher": shop.labels,
        **_wording(shop.read, shop.cfg),
        "reduce": getattr(shop.read.objective, "reduce", "mean"),
        "seed": shop.cfg.seed if shop.labels == "sampled" or shop.read.masking else 0,
        "modules": [m.name for m in shop.maps],
    }


def _wording(read: Reading, cfg: FitConfig) -> dict[str, Any]:
    """The settings that decide how a row becomes tokens and a loss, in this mode and of this kind of task."""
    encoding, causal = read.encoding, read.mode == "causal"
    found: dict[str, Any] = {"mode": read.mode, "max_length": encoding.limit, "truncate": encoding.truncate}
    if read.mode == "head":
        found["pool"] = getattr(read.loaded.model, "pool", "auto")
    if read.template is not None:
        found["template"] = read.template.causal if causal else read.template.masked
        found["label_words"] = list(read.template.causal_words if causal else read.template.words)
    if read.mode == "span":
        found |= {"doc_stride": encoding.doc_stride, "max_query_length": encoding.max_query_length}
    if read.mode in ("mlm", "clm"):
        found["chunk"] = encoding.chunk
    if read.masking is not None:
        found["mlm_probability"] = read.masking.rate
    if read.task.kind == "number":
        found |= {"masks": encoding.masks, "parity": cfg.parity, "number_loss": cfg.number_loss}
    return found


def _copied(source: Path, place: Path, names: Sequence[str]) -> None:
    for file in (f"{n}.safetensors" for n in names):
        if not (place / file).exists():
            with writing(place / file) as part:
                shutil.copyfile(source / file, part)


def _ranges(count: int, growth: Sequence[int]) -> list[tuple[int, int]]:
    """The sample as pieces of the seeded order: those that smaller samples already summed, and the rest.

    >>> _ranges(8, [2, 4, 8])
    [(0, 2), (2, 4), (4, 8)]
    """
    ends = [*sorted({n for n in growth if 0 < n < count}), count]
    return list(zip([0, *ends[:-1]], ends))


def shards(shop: Shop, first: int, last: int) -> list[tuple[int, np.ndarray]]:
    """(half, rows) of the rows first..last of the seeded order: two random halves, each sorted by length and cut."""
    rng = np.random.default_rng(seed_of(shop.cfg.seed, "fit rows"))
    chosen = rng.permutation(len(shop.train))[first:last]
    size = shop.cfg.shard_rows
    found = []
    for half in (0, 1):
        mine = np.sort(chosen[half::2])
        mine = mine[np.argsort(-shop.train.lengths_N[mine], kind="stable")]
        found += [(half, mine[i : i + size]) for i in range(0, len(mine), size)]
    return found


def _covariance(bench: Bench, place: Path, ranges: Sequence[tuple[int, int]]) -> list[list[Job]]:
    """The covariances at `place`; returns the jobs of either half of the rows."""
    target = place / "covariance.safetensors"
    weighed = "by-gradient" if bench.shop.labels == "exact" else "by-position"
    halves = [
        (
            half,
            Job(
                f"{HERE}:covariance_shard",
                {**bench.settings, "first": a, "last": b, "shard": i},
                bench.path / "parts" / f"covariance-{weighed}-{a}-{b}-{i:05d}.safetensors",
            ),
        )
        for a, b in ranges
        for i, (half, _) in enumerate(shards(bench.shop, a, b))
    ]
    jobs = [job for _, job in halves]
    with bench.progress.stage("covariance", len(jobs), sum(j.done for j in jobs)) as bar:
        run_all(jobs, bench.wish, lambda job: bar.advance(1))
        _noted(jobs, bench.shop)
        total = None if target.exists() else made.merged(tree.load(j.output)[0] for j in jobs)
    if total is not None:
        with bench.progress.stage("save"):
            tree.save(target, made.means(total, bench.shop.like.dtype), {"artefact": "influence covariance"})
    return [[job for h, job in halves if h == half] for half in (0, 1)]


def covariance_shard(arguments: dict[str, Any], part: Path) -> None:
    """Job: covariance sums of one shard of rows."""
    shop = open_shop(arguments)
    _, order = shards(shop, arguments["first"], arguments["last"])[arguments["shard"]]
    _save(part, covariances(shop, order), shop, order)


def _eigen(bench: Bench, place: Path) -> None:
    target = place / "eigen.safetensors"
    if target.exists():
        return
    source = place / "covariance.safetensors"
    jobs = [
        Job(f"{HERE}:eigen_part", {"source": str(source), "part": i}, place / "parts" / f"eigen-{i}.safetensors")
        for i in range(EIGEN_PARTS)
    ]
    with bench.progress.stage("eigen", len(jobs), sum(j.done for j in jobs)) as bar:
        run_all(jobs, bench.wish, lambda job: bar.advance(1))
        found = {k: v for j in jobs for k, v in tree.load(j.output)[0].items()}
    with bench.progress.stage("save"):
        tree.save(target, found, {"artefact": "influence eigenbases"})


def eigen_part(arguments: dict[str, Any], part: Path) -> None:
    """Job: eigenbases of every fourth covariance."""
    covariance, _ = tree.load(Path(arguments["source"]))
    mine = sorted(covariance)[arguments["part"] :: EIGEN_PARTS]
    save_file(made.decompose({k: covariance[k] for k in mine}), part)


def _moments(bench: Bench, place: Path, home: Path, ranges: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """The second moments at `place`, in the eigenbases at `home`, where their sums are kept; returns the evidence."""
    halves: tuple[list[Job], list[Job]] = ([], [])
    for a, b in ranges:
        for i, (half, _) in enumerate(shards(bench.shop, a, b)):
            asked = {**bench.settings, "factors": str(home), "first": a, "last": b, "shard": i}
            part = home / "parts" / f"moments-{a}-{b}-{i:05d}.safetensors"
            halves[half].append(Job(f"{HERE}:moment_shard", asked, part))
    jobs = [job for mine in halves for job in mine]
    with bench.progress.stage("moments", len(jobs), sum(j.done for j in jobs)) as bar:
        run_all(jobs, bench.wish, lambda job: bar.advance(1))
        _bases.cache_clear()
        rows = [_noted(mine, bench.shop) for mine in halves]
        one, other = (made.merged(tree.load(j.output)[0] for j in mine) for mine in halves)
        evidence = seen.of_moments([one, other], [max(1, n) for n in rows], bench.shop.cfg.strategy)
        for key in list(other):
            one[key].add_(other.pop(key))
        mean = {k: (v / max(1, sum(rows))).to(bench.shop.like.dtype) for k, v in one.items()}
    with bench.progress.stage("save"):
        tree.save(place / "moments.safetensors", mean, {"artefact": "influence second moments"})
    return evidence


def _noted(jobs: Sequence[Job], shop: Shop) -> int:
    """How many rows are in the files of jobs; those that were left out are noted in the shop."""
    found = [tree.manifest(j.output) for j in jobs]
    shop.skipped.update(i for facts in found for i in facts["skipped"])
    return sum(facts["rows"] for facts in found)


def moment_shard(arguments: dict[str, Any], part: Path) -> None:
    """Job: second-moment sums of one shard of rows."""
    shop = open_shop(arguments)
    _, order = shards(shop, arguments["first"], arguments["last"])[arguments["shard"]]
    strategies = set(shop.cfg.strategy)
    place = Path(arguments["factors"])
    bases = _bases(place, shop.maps, Factors(place, shop.maps, {}).stamp) if "ekfac" in strategies else None
    _save(part, second_moments(shop, order, bases, "diagonal" in strategies), shop, order)


@lru_cache(maxsize=1)  # one shard after another needs the same; the stamp says whether it is
def _bases(place: Path, maps: tuple[Map, ...], stamp: str) -> Mapping[str, Basis]:
    return Factors(place, maps, {}).bases


def _save(part: Path, tensors: dict[str, Any], shop: Shop, order: np.ndarray) -> None:
    """Sums of a shard, with the rows that were left out of them."""
    ids = [shop.train.ids[i] for i in order]
    skipped = [i for i in ids if i in shop.skipped]
    manifest = {"rows": len(ids) - len(skipped), "skipped": skipped}
    tree.save(part, tensors, manifest)
