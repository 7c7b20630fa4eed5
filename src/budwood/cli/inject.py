"""`budwood inject`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from cyclopts import App, Parameter

from budwood.cli.show import grid, serve
from budwood.config.inject import InjectConfig

NAMES = {"none": "plain", "ewc": "EWC", "l2": "L2 to base", "recadam": "RecAdam", "replay": "replay", "base": "before"}


def register(app: App) -> None:
    """Add the verb."""

    @app.command
    def inject(model: str, *, settings: Annotated[InjectConfig, Parameter(name="*")]) -> int:
        """Teach a model a new skill while keeping others: every way of holding them, side by side.

        Parameters
        ----------
        model
            tiny-bert, tiny-gpt, a model directory, a hub name, or a run. Keeping text needs a language model.
        """
        return serve("inject", settings, [model], told)


def told(metrics: Mapping[str, Any], cost: Mapping[str, Any]) -> str:
    """A table of all ways (median over seeds, lowest to highest error beside it), then what it means in sentences."""
    main, new = metrics["main_kept"], metrics["task"]
    extra = [k for k in ("exact", "parse_rate") if k in metrics["groups"][0]["new"]]
    others = [n for n in metrics["groups"][0]["kept"] if n != main]
    rows = [_before(metrics, extra, others)]
    for g in metrics["groups"]:
        row: dict[str, Any] = {"way": NAMES[g["retain"]], "strength": g["strength"]}
        row |= {new: g["new"]["score"], f"{new} error": _range(g, "new_error")}
        row |= {k: g["new"].get(k) for k in extra}
        row |= {main: g["kept"][main]["score"], f"{main} error": _range(g, "kept_error")}
        row |= {n: g["kept"][n]["score"] for n in others} | {"front": "*" if g["front"] else ""}
        rows.append(row)
    ranges = [[f"{name} error"] if len(metrics["seeds"]) > 1 else [] for name in (new, main)]
    columns = ["way", "strength", new, *ranges[0], *extra, main, *ranges[1], *others, "front"]
    kept_metric = metrics["groups"][0]["kept"][main]["metric"]
    head = (
        f"inject {' '.join(metrics['models'])}: {new} ({metrics['metric']}, n = {metrics['n']:,}) while keeping "
        f"{', '.join([main, *others])} ({main}: {kept_metric}); seeds {', '.join(map(str, metrics['seeds']))}"
    )
    return "\n".join(
        [
            head,
            "",
            grid(rows, columns),
            "",
            *_sizes(metrics),
            *_sentences(metrics),
            f"seconds {cost.get('seconds', 0):,.1f}",
        ]
    )


def _sizes(metrics: Mapping[str, Any]) -> list[str]:
    """The share exactly right by the size of the answer, where the new skill's answers are numbers."""
    groups = [g for g in metrics["groups"] if g.get("by_size")]
    if not groups:
        return []
    rows = [{"way": NAMES[g["retain"]], "strength": g["strength"], **g["by_size"]} for g in groups]
    return [
        "Share exactly right by the size of the answer:",
        grid(rows, ["way", "strength", *groups[0]["by_size"]]),
        "",
    ]


def _before(metrics: Mapping[str, Any], extra: list[str], others: list[str]) -> dict[str, Any]:
    base, main = metrics["base"], metrics["main_kept"]
    scored = base["new"] or {}
    row: dict[str, Any] = {"way": "before", metrics["task"]: scored.get("score"), main: base["kept"][main]["score"]}
    return {**row, **{k: scored.get(k) for k in extra}, **{n: base["kept"][n]["score"] for n in others}}


def _range(group: Mapping[str, Any], key: str) -> str:
    """Lowest to highest error over seeds."""
    low, high = group[f"{key}_low"], group[f"{key}_high"]
    return f"{low:.3g} to {high:.3g}"


def _sentences(metrics: Mapping[str, Any]) -> list[str]:
    groups, base, ref = metrics["groups"], metrics["base"]["kept_error"], metrics["reference"]
    lines = []
    plain = next((g for g in groups if g["retain"] == "none"), None)
    if plain is not None:
        worse = plain["kept_error"] / max(base, 1e-12)
        lines.append(
            f"Plain training: error {plain['new_error']:.3f} ({plain['new_error'] / ref['new_error']:.2f} x that of "
            f"{ref['is']}, {ref['new_error']:.3f}); {metrics['main_kept']} error x{worse:.2f}."
        )
    lines.append(_safe(groups, metrics["main_kept"], base))
    area = {NAMES[w]: v for w, v in metrics["hypervolume"].items() if w != "none"}
    told_area = "; ".join(f"{w} {', '.join(f'{x:.3f}' for x in v.values())}" for w, v in area.items())
    lines += [f"Hypervolume by seed (larger is better): {told_area}."] if area else []
    knee = metrics["knee"]
    state = {True: "Knee (met)", False: "Knee (not met)", None: "No knee"}[knee["met"]]
    lines.append(f"{state}: {knee['reason']}.")
    if knee.get("better"):
        lines.append(
            "Does better: "
            + "; ".join(
                f"{_name(f)} (error x{f['times_plain']:.2f}, {f['avoided']:.0%} avoided)" for f in knee["better"]
            )
            + "."
        )
    lines += [f"Note, {note}: {text}." for note, text in metrics["warnings"].items()]
    return lines


def _safe(groups: Sequence[Mapping[str, Any]], main: str, base: float) -> str:
    """Which ways, plain training among them, raise the kept task's error by 5 % at most; else the one nearest to it."""
    safe = [_name(g) for g in groups if g["kept_error"] <= 1.05 * base]
    if safe:
        return f"{main} error at most 5 % above that before ({base:.3f}) with: {', '.join(safe)}."
    best = min(groups, key=lambda g: g["kept_error"])
    times = best["kept_error"] / max(base, 1e-12)
    return (
        f"{main} error is more than 5 % above that before ({base:.3f}) with every way; nearest: {_name(best)}, "
        f"x{times:.2f}."
    )


def _name(group: Mapping[str, Any]) -> str:
    return NAMES[group["retain"]] + (f" {group['strength']:g}" if group["strength"] is not None else "")
