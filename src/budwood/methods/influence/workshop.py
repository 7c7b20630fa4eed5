"""A model at work on the training rows of a task: what every pass of influence needs, opened once per process."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from budwood.capture.coverage import cover, take
from budwood.capture.gradients import Question
from budwood.capture.questions import Labels, labels_for
from budwood.capture.spare import read_first, reads_more, spared
from budwood.capture.stream import Map, Sides, maps_of, stream
from budwood.capture.uses import layout_of, linear_io
from budwood.config.influence import STRATEGIES, FitConfig
from budwood.config.run import bytes_of
from budwood.data.batch import Batch, Features, budget_batches
from budwood.data.opened import Key
from budwood.data.source import load_task
from budwood.data.task import Task, as_json, from_json
from budwood.errors import ConfigError, ModelError
from budwood.models.identity import model_hash
from budwood.models.load import load
from budwood.models.mode import in_mode
from budwood.models.reading import Reading, as_tuned, head_spec, mode_for, reading, tuned_with
from budwood.models.reference import ModelRef, resolve, stamp
from budwood.params.select import matching
from budwood.store.files import canonical, read_json, write_json
from budwood.store.memory import available_bytes, keep_freed
from budwood.train.plan import device_for

KEPT = 1 << 30  # bytes of freed memory that batches take again, at most
TOKENS = 1024  # padded tokens per batch: what they take on their way through a layer stays in cache
ROWS = 256  # most rows per batch
RUNS = Path("runs")
Ask = Callable[[Batch], Sequence[Question]]


@dataclass(frozen=True)
class Shop:
    """A model, the encoded training rows, and the maps whose gradients count."""

    read: Reading
    train: Features
    maps: tuple[Map, ...]
    left: dict[str, str]
    labels: Labels
    cfg: FitConfig
    skipped: set[str] = field(default_factory=set)  # rows left out because their loss is not finite
    first: tuple[str, ...] = ()  # weights whose layers are read at the first position alone

    @cached_property
    def by_weight(self) -> dict[str, Map]:
        """Maps by the canonical name of their weight."""
        return {m.weight: m for m in self.maps}

    @cached_property
    def parameters(self) -> tuple[str, ...]:
        """Names of all weights and biases that count."""
        return tuple(n for m in self.maps for n in (m.weight, m.bias) if n)

    @cached_property
    def hash(self) -> str:
        """The model's hash."""
        return model_hash(self.read.loaded.model)

    @property
    def model(self) -> torch.nn.Module:
        """The model."""
        return self.read.loaded.model

    @property
    def like(self) -> Tensor:
        """An empty tensor of the model's type and place."""
        return next(self.model.parameters()).new_empty(0)

    def batches(
        self, features: Features, order: np.ndarray, most: int = ROWS, tokens: int = TOKENS
    ) -> list[np.ndarray]:
        """`order` cut into batches of rows of like length."""
        return [order[i] for i in budget_batches(features.lengths_N[order], tokens, most)]


def settings_for(cfg: Any, model: str) -> dict[str, Any]:
    """What opens a shop, as plain values: the settings that factors depend on, and the model's name."""
    own = {k: v for k, v in cfg.model_dump(mode="json").items() if k in FitConfig.model_fields}
    own["strategy"] = [s for s in cfg.strategy if s in STRATEGIES] or ["identity"]
    return {"model": model, "cfg": own}


def rows_for(cfg: Any, task: Task, place: Path) -> dict[str, str]:
    """Where other processes find the rows of a task that may be in memory alone; nothing where there are none."""
    if cfg.workers == 1 and cfg.engine == "local":
        return {}
    file = place / "parts" / "rows.json"
    write_json(file, as_json(task))
    return {"rows": str(file)}


def open_shop(settings: dict[str, Any], task: Task | None = None) -> Shop:
    """The shop of these settings; the same process opens it once, and again when the model's files or rows changed."""
    now = stamp(_ref(settings))
    key = Key(canonical({"stamp": now, **{k: settings[k] for k in ("model", "cfg", "rows") if k in settings}}), task)
    shop = _open(key)
    if task is not None and shop.read.task.digest != task.digest:
        _open.cache_clear()
        shop = _open(key)
    return shop


def _ref(settings: dict[str, Any]) -> ModelRef:
    return resolve(settings["model"], runs_dir=RUNS, revision=settings["cfg"].get("revision"), offline=True)


@lru_cache(maxsize=1)
def _open(key: Key) -> Shop:
    settings = json.loads(key.settings)
    ref = _ref(settings)
    plain = FitConfig(**settings["cfg"])
    task = key.task or (from_json(read_json(Path(settings["rows"]))) if "rows" in settings else load_task(plain))
    cfg: FitConfig = as_tuned(plain, ref, task.kind)
    mode = mode_for(cfg, task, ref)
    _refuse_quad(ref, task, mode)
    _refuse_whole(ref, cfg)
    head, merge = head_spec(task, cfg), cfg.adapter == "merged"
    loaded = load(ref, mode, head, seed=cfg.model_seed or 0, device=device_for(cfg.device), merge=merge)
    if any(name.startswith("head.") for name in loaded.fresh):
        raise ModelError(
            f"'{ref.text}' has no trained head for task '{task.name}', so its influence would be that of random "
            "weights. Fine-tune it first, or use --mode prompt or mlm."
        )
    reduce = cfg.reduce or tuned_with(ref, cfg.task).get("reduce") or "mean"
    read = reading(loaded, task, cfg, mode, cfg.seed, reduce).settled
    return shop_of(read, read.encode(task.rows(cfg.train_split)), cfg)


def _refuse_whole(ref: ModelRef, cfg: FitConfig) -> None:
    """Refuse to look for an adapter's own matrices where there is no adapter, or none that stays apart."""
    if cfg.adapter == "own" and (ref.base is None or ref.grafts):
        why = "takes grafts, which are of a whole model" if ref.base else "is a whole model, not a PEFT adapter"
        raise ConfigError(f"--adapter own was given, but '{ref.text}' {why}. Leave --adapter away.")


def _refuse_quad(ref: ModelRef, task: Task, mode: str) -> None:
    """Refuse a model that was tuned with another loss than the one that would be explained."""
    if mode == "clm" and tuned_with(ref, task.name).get("objective") == "quad":
        raise ModelError(
            f"'{ref.text}' was tuned with --objective quad, and influence traces cross-entropy: scores would explain a "
            "loss that its training never lowered, by the curvature of that loss. Tune a model with --objective kl to "
            "ask which rows made its predictions."
        )


def shop_of(read: Reading, train: Features, cfg: FitConfig) -> Shop:
    """A shop around a loaded model; the maps that count are found by a pass of a few rows."""
    keep_freed(KEPT if cfg.max_memory is None else min(KEPT, memory_budget(cfg.max_memory) // 8))
    few = read.feed(train)(np.arange(min(3, len(train))), 0)
    coverage = cover(read.loaded.model, read.objective, few)
    maps, left = maps_of(read.loaded.model, read.objective, take(few, [0] * 2), coverage, also=cfg.diagonal_for)
    if maps and cfg.modules:
        kept = set(matching([m.name for m in maps], cfg.modules))
        left |= {m.weight: "not asked for" for m in maps if m.name not in kept}
        maps = _regrouped([m for m in maps if m.name in kept])
    if not maps:
        why = "; ".join(f"{n}: {w}" for n, w in list(left.items())[:3])
        raise ModelError(
            f"No module of this {type(read.loaded.model).__name__} can be scored ({why or 'it has no parameters'}). "
            "Influence needs at least one linear layer, Conv1D or Conv2d that is called as a module."
        )
    labels = labels_for(cfg.fisher, read.task, "--fisher")
    shop = Shop(read, train, maps, left, labels, cfg, first=_read_first(read, train, maps))
    if cfg.skip_nan:
        shop.skipped.update(_broken_texts(shop))
    return shop


def _read_first(read: Reading, train: Features, maps: Sequence[Map]) -> tuple[str, ...]:
    """Weights whose layers are read at the first position alone, as seen on rows from the shortest to the longest, one
    by one.
    """
    by_length, feed = np.argsort(train.lengths_N, kind="stable"), read.feed(train)
    few = dict.fromkeys(by_length[np.linspace(0, len(train) - 1, 4).astype(int)].tolist())
    batches = (feed(np.array([n]), 0) for n in few)
    return read_first(read.loaded.model, read.objective, batches, [m.weight for m in maps])


def _broken_texts(shop: Shop) -> Iterator[str]:
    """Rows of several pieces of which one has no finite loss: whoever meets a sound piece must know that it is out.

    Rows of one piece are found as they are met; here one forward pass over all others is what leaving out costs.
    """
    count = Counter(shop.train.ids)
    cut = np.array([n for n, i in enumerate(shop.train.ids) if count[i] > 1], dtype=np.int64)
    feed, objective = shop.read.feed(shop.train), shop.read.objective
    with torch.no_grad(), in_mode(shop.model, training=False):
        for index in shop.batches(shop.train, cut):
            batch = feed(index, 0)
            loss_B = objective.loss(objective.logits(shop.model, batch), objective.targets(batch))
            yield from (batch.ids[b] for b in (~torch.isfinite(loss_B)).nonzero()[:, 0].tolist())


def _regrouped(maps: Sequence[Map]) -> tuple[Map, ...]:
    """Maps with the first of each group among them as its source."""
    from dataclasses import replace

    first: dict[str, str] = {}
    return tuple(replace(m, source=first.setdefault(m.source, m.name)) for m in maps)


def sweep(
    shop: Shop,
    features: Features,
    index: np.ndarray,
    ask: Ask,
    use: Callable[[int, Map, Sides], None],
    whole: bool = False,
) -> np.ndarray:
    """One forward pass and one backward pass per question over a batch; `use(question, map, sides)` for every map.

    Positions that no loss reads are not worked out, and inputs there are not what they would be, unless `whole`.
    A batch that reads them after all is passed through once more, whole.

    Returns which of `index` took part: rows whose loss is not finite stop the run by name, or are left out on demand,
    with all pieces that a long text was cut into.
    """
    feed = shop.read.feed(features)
    if features is shop.train and shop.skipped:
        index = index[[features.ids[i] not in shop.skipped for i in index]]
        if not len(index):
            return index
    batch = feed(index, 0)
    model, objective = shop.model, shop.read.objective
    first = () if whole else shop.first
    with in_mode(model, training=False):
        while True:
            targets = objective.targets(batch)
            with spared(model, first), linear_io(model, shop.parameters, layout_of(batch, targets)) as io:
                logits_MC = objective.logits(model, batch)
                fine_B = torch.isfinite(objective.loss(logits_MC.detach(), targets)).cpu().numpy()
                if first and (not fine_B.all() or reads_more(io, first, logits_MC)):
                    first, logits_MC = (), None
                    continue
                if fine_B.all():
                    asked = ask(batch)
                    for i, question in enumerate(asked):
                        value_B = (question.value or objective.loss)(logits_MC, question.about(logits_MC, targets))
                        keep = i + 1 < len(asked)
                        stream(io, value_B.sum(), lambda w, s, i=i: use(i, shop.by_weight[w], s), keep)  # type: ignore[misc]
                    return index
            leave_out(shop, list(dict.fromkeys(batch.ids[b] for b in np.flatnonzero(~fine_B))))
            index = index[fine_B]
            if not len(index):
                return index
            batch = feed(index, 0)
            first = () if whole else shop.first  # the rest goes through as it would had they been known before


def leave_out(shop: Shop, ids: list[str]) -> None:
    """Leave rows without a finite loss out, or stop at them where that was not asked for."""
    if not shop.cfg.skip_nan:
        shown = ", ".join(f"'{i}'" for i in ids[:5])
        raise ModelError(
            f"The loss of at least {len(ids)} row{'s' if len(ids) > 1 else ''} is not finite: {shown}"
            f"{' ...' if len(ids) > 5 else ''}. Look at them and at the model (`budwood doctor`), or leave them out "
            "with --skip-nan."
        )
    shop.skipped.update(ids)


def memory_budget(wish: str | None) -> int:
    """Bytes that may be used: what was given ("2GB"), else half of what can be had now.

    >>> memory_budget("1.5GB")
    1500000000
    """
    if wish is None:
        return available_bytes() // 2
    value = bytes_of(wish)
    if value is None:
        raise ConfigError(f"--max-memory was given '{wish}'. Give a size such as 800MB or 2GB.")
    return value
