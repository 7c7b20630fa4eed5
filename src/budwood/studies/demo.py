"""The demo: the shipped recipe `demo`, told as a story with its numbers and pictures."""

from __future__ import annotations

import html
from pathlib import Path
from typing import Any

from budwood.store.files import write_text
from budwood.studies.recipe import Wishes, read_recipe, run_recipe

STYLE = """
body{font:16px/1.55 system-ui,sans-serif;max-width:46rem;margin:3rem auto;padding:0 1rem;color:#1f2430;background:#fff}
h1{font-size:1.7rem;margin-bottom:.2rem}h2{font-size:1.15rem;margin-top:2.4rem}
table{border-collapse:collapse;width:100%}td,th{padding:.25rem .6rem;text-align:left;border-bottom:1px solid #e6e8ec}
td.n{text-align:right;font-variant-numeric:tabular-nums}svg{max-width:100%;height:auto}
code{background:#f3f4f6;padding:.1rem .3rem;border-radius:.2rem;overflow-wrap:anywhere}
@media(prefers-color-scheme:dark){body{background:#14161a;color:#e6e8ec}td,th{border-color:#33373f}
code{background:#23262c}svg{background:#fff;border-radius:4px}}"""


def run_demo(out: Path) -> str:
    """Run the demo's steps that are not done yet; returns a table and the path of the report."""
    script = read_recipe("demo", Wishes(out=out))
    rows = run_recipe(script)
    report = out / "report.html"
    write_text(report, page(script.about, rows))
    width = max(len(r["step"]) for r in rows)
    lines = [
        f"{r['step']:<{width}}  {r['metric']} {r['score']:.3f}  ({r['seconds']:5.1f} s)  {r['says']}" for r in rows
    ]
    figure = next(p for p in sorted((out / "full" / "figures").glob("loss.png")))
    return "\n".join([script.about, "", *lines, "", f"figure  {figure}", f"report  {report.resolve()}"])


def page(about: str, rows: list[dict[str, Any]]) -> str:
    """One self-contained HTML file: the scores, then a chapter per step with its loss curve."""
    cells = "".join(_line(r) for r in rows)
    chapters = "".join(_chapter(r) for r in rows)
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>"
        f"<title>budwood demo</title><style>{STYLE}</style><h1>Where does a skill live?</h1><p>{html.escape(about)}</p>"
        "<table><thead><tr><th>step<th>model<th>task<th>metric<th>score<th>majority</tr></thead>"
        f"<tbody>{cells}</tbody></table>"
        f"{chapters}</html>"
    )


def _line(row: dict[str, Any]) -> str:
    words = "".join(f"<td>{html.escape(str(row[k]))}</td>" for k in ("model", "task", "metric"))
    numbers = "".join(f"<td class=n>{x:.3f}</td>" for x in (row["score"], row["metrics"].get("majority", 0.0)))
    return f"<tr><th scope=row>{html.escape(row['step'])}</th>{words}{numbers}</tr>"


def _chapter(row: dict[str, Any]) -> str:
    pictures = "".join(_picture(p) for p in sorted((Path(row["run"]) / "figures").glob("*.svg")))
    m = row["metrics"]
    if row["verb"] == "linear":
        return _features_chapter(row, pictures)
    if row["verb"] == "inject":
        kept = m["base"]["kept"][m["main_kept"]]
        table = "".join(
            f"<tr><td>{g['retain']} {'' if g['strength'] is None else format(g['strength'], 'g')}</td>"
            f"<td class=n>{g['new']['score']:.3f}</td><td class=n>{g['kept'][m['main_kept']]['score']:.3f}</td></tr>"
            for g in m["groups"]
        )
        scored = f"Before, the loss on {m['main_kept']} was {kept['score']:.3f}."
        pictures = (
            f"<table><thead><tr><th>way<th>{html.escape(m['metric'])}<th>{html.escape(kept['metric'])}</tr></thead>"
            f"<tbody>{table}</tbody></table><p>{html.escape(m['knee']['reason'])}.</p>{pictures}"
        )
        says = f"{html.escape(row['says'])} {html.escape(scored)}"
        return (
            f"<h2>{html.escape(row['step'])}</h2><p>{says}</p>{pictures}<p><code>{html.escape(row['run'])}</code></p>"
        )
    zero = f" Without training it scored {m['zero_shot']:.3f}." if m.get("zero_shot") is not None else ""
    if m.get("recovered") is not None:
        zero = f" The {m['size']:,} weights ({m['bytes']:,} bytes) recover {m['recovered']:.0%} of what tuning gained."
    scored = f"It scores {row['score']:.3f} ({row['metric']}) on {m['n']:,} rows of {m['split']}."
    return (
        f"<h2>{html.escape(row['step'])}</h2><p>{html.escape(row['says'])} {html.escape(scored)}{zero}</p>"
        f"{pictures}<p><code>{html.escape(row['run'])}</code></p>"
    )


def _features_chapter(row: dict[str, Any], pictures: str) -> str:
    """The table of feature families in words."""
    m = row["metrics"]
    parts = ", ".join(f"{r['features']} {r['test']:.3f}" for r in m["results"])
    told = f"Test accuracy: {parts}; word counts {m['baselines']['bag_of_words']:.3f}, majority {m['majority']:.3f}."
    return (
        f"<h2>{html.escape(row['step'])}</h2><p>{html.escape(row['says'])} {html.escape(told)}</p>"
        f"{pictures}<p><code>{html.escape(row['run'])}</code></p>"
    )


def _picture(path: Path) -> str:
    """An SVG without its prologue; ids get the file's name, since several pictures share one page."""
    import re

    text = path.read_text(encoding="utf-8")
    text = text[text.index("<svg") :]
    tag = f"{path.parents[1].name}-{path.stem}-"
    text = re.sub(r'\bid="', f'id="{tag}', text)
    text = re.sub(r"url\(#", f"url(#{tag}", text)
    return re.sub(r'(xlink:href|href)="#', rf'\1="#{tag}', text)
