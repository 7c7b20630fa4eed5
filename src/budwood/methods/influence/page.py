"""What `influence show` found, as blocks of text for a terminal and as one HTML file."""

from __future__ import annotations

import html
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

WIDTH = 96
STYLE = """
:root{color-scheme:light dark}body{font:16px/1.55 system-ui,sans-serif;max-width:52rem;margin:2.5rem auto;
padding:0 1rem;color:#1f2430;background:#fff}h1{font-size:1.4rem}h2{font-size:1.1rem;margin-top:2rem}
article{border-left:4px solid #a8530a;padding:.2rem 0 .2rem .9rem;margin:1rem 0}article.hurts{border-color:#1b5e96}
article.query{border-color:#4a5568}p{margin:.3rem 0}.meta{font-size:.85rem;color:#5b6472}
.meta{font-variant-numeric:tabular-nums}.tokens span{border-radius:3px;padding:0 1px}
.bars{display:grid;grid-template-columns:5rem 1fr 5rem;gap:.1rem .6rem;
font-size:.8rem;font-variant-numeric:tabular-nums;max-width:28rem}.bars i{display:block;height:.7rem;margin-top:.35rem}
.bars b{font-weight:400;text-align:right}
@media(prefers-color-scheme:dark){body{background:#14161a;color:#e6e8ec}.meta{color:#a2a9b4}}"""


def blocks(found: Mapping[str, Any]) -> str:
    """The query and the rows as blocks for a terminal."""
    query = found["query"]
    lines = [_headline(found), "", f"query {query['number']}  ({query['id']})", *_text(query), ""]
    for end, rows in (("top", found["top"]), ("bottom", found["bottom"])):
        for rank, row in enumerate(rows, 1):
            lines += [
                f"{_effect(end, row['score'])} {rank}  {row['score']:+.3g}  ({row['id']})",
                *_text(row),
                *_shares(row),
                "",
            ]
    if found["note"]:
        lines.append(found["note"])
    return "\n".join(lines).rstrip()


def _effect(end: str, score: float) -> str:
    """What a row at one end of the list does: the last of many that help does no harm.

    >>> _effect("top", 2.0), _effect("bottom", -1.0), _effect("bottom", 0.1)
    ('helps most', 'hurts most', 'helps least')
    """
    does = "helps" if score >= 0 else "hurts"
    return f"{does} {'most' if (end == 'top') == (score >= 0) else 'least'}"


def _headline(found: Mapping[str, Any]) -> str:
    damping = f" (damping {found['damping']})" if found["damping"] else ""
    within = f", counting only {found['within']}" if found["within"] else ""
    scale = f"; {found['scale']}" if found["scale"] else ""
    return f"{found['strategy']}{damping} over {found['train']:,} training rows{within}. {found['sign']}{scale}."


def _text(row: Mapping[str, Any]) -> list[str]:
    lines: list[str] = []
    for key in ("text", "pair"):
        if row.get(key):
            lines += textwrap.wrap(str(row[key]), WIDTH, initial_indent="    ", subsequent_indent="    ")
    if "label" in row:
        lines.append(f"    -> {row['label']}")
    return lines


def _shares(row: Mapping[str, Any]) -> list[str]:
    """Layers and the strongest tokens in one line each."""
    lines = []
    if row.get("layers"):
        lines.append("    layers  " + "  ".join(f"{k} {v:+.2g}" for k, v in row["layers"].items()))
    if row.get("tokens"):
        strong = sorted(row["tokens"], key=lambda t: -abs(t[1]))[:6]
        lines.append("    tokens  " + "  ".join(f"{_word(w) or '(whole row)'} {v:+.2g}" for w, v in strong))
    return lines


def _word(token: str) -> str:
    """A token without the mark of a space before it."""
    return token.replace("\u0120", "").replace("\u2581", "")


def table(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One line per row: rank (negative for harmful rows), score, id, label and the beginning of the text.

    Runs with scores by layer or token also have the layer and the token with the largest part in the score.
    """
    lines = []
    for sign, rows in ((1, found["top"]), (-1, found["bottom"])):
        for rank, row in enumerate(rows, 1):
            text = " | ".join(str(row[k]) for k in ("text", "pair") if row.get(k))
            line = {"rank": sign * rank, "score": row["score"], "id": row["id"], "label": str(row.get("label", ""))}
            for key, parts in (("layer", row.get("layers", {}).items()), ("token", row.get("tokens", ())[1:])):
                if parts:
                    line[key] = _largest(parts)
            lines.append({**line, "text": textwrap.shorten(text, 72, placeholder=" …")})
    return lines


def _largest(parts: Iterable[tuple[str, float]]) -> str:
    """The part that weighs most, of either sign.

    >>> _largest([("layer.0", 0.1), ("layer.1", -0.25)])
    'layer.1 -0.25'
    """
    name, value = max(parts, key=lambda p: abs(p[1]))
    return f"{name} {value:+.2g}"


def page(found: Mapping[str, Any]) -> str:
    """One self-contained HTML file; tokens are tinted by their share, layers drawn as bars."""
    query = found["query"]
    rows = "".join(_section(effect, listed) for effect, listed in _by_effect(found).items())
    note = f"<p class=meta>{html.escape(found['note'])}</p>" if found["note"] else ""
    return (
        "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>"
        f"<title>Influence on {html.escape(str(query['id']))}</title><style>{STYLE}</style>"
        f"<h1>Which training rows made this prediction?</h1><p class=meta>{html.escape(_headline(found))}</p>"
        f"{_article({**query}, 'query')}{rows}{note}</html>"
    )


def _by_effect(found: Mapping[str, Any]) -> dict[str, list[Mapping[str, Any]]]:
    """Rows of both lists by what they do, in the words of the terminal and in their order."""
    parts: dict[str, list[Mapping[str, Any]]] = {}
    for end in ("top", "bottom"):
        for row in found[end]:
            parts.setdefault(_effect(end, row["score"]), []).append(row)
    return parts


def _section(effect: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows of one effect under a heading that says it.

    >>> _section("helps least", [])
    '<h2>Training rows that help least</h2>'
    """
    kind, much = effect.split()
    articles = "".join(_article(r, kind) for r in rows)
    return f"<h2>Training rows that {kind.removesuffix('s')} {much}</h2>{articles}"


def _article(row: Mapping[str, Any], kind: str) -> str:
    score = f"{row['score']:+.3g} · " if "score" in row else f"query {row['number']} · "
    label = f"<p><strong>{html.escape(str(row['label']))}</strong></p>" if "label" in row else ""
    words = "".join(f"<p>{html.escape(str(row[k]))}</p>" for k in ("text", "pair") if row.get(k))
    heat = _heat(row["tokens"]) if row.get("tokens") else ""
    bars = _bars(row["layers"]) if row.get("layers") else ""
    head = f"<p class=meta>{score}{html.escape(str(row['id']))}</p>"
    return f"<article class={kind}>{head}{heat or words}{label}{bars}</article>"


def _heat(tokens: Sequence[tuple[str, float]]) -> str:
    most = max((abs(v) for _, v in tokens[1:]), default=0.0) or 1.0
    spans = []
    for word, value in tokens[1:]:
        joined = word.startswith("##")
        colour = "168,83,10" if value > 0 else "27,94,150"
        style = f"background:rgba({colour},{abs(value) / most * 0.7:.2f})"
        text = html.escape(_word(word).removeprefix("##"))
        spans.append(f"{'' if joined else ' '}<span style='{style}' title='{value:+.3g}'>{text}</span>")
    whole = f"<p class=meta>not at one token: {tokens[0][1]:+.3g}</p>"
    return f"<p class=tokens>{''.join(spans)}</p>{whole}"


def _bars(layers: Mapping[str, float]) -> str:
    most = max(map(abs, layers.values())) or 1.0
    cells = "".join(
        f"<span>{html.escape(name)}</span><i style='width:{abs(v) / most * 100:.0f}%;background:"
        f"{'#a8530a' if v > 0 else '#1b5e96'}'></i><b>{v:+.2g}</b>"
        for name, v in layers.items()
    )
    return f"<div class=bars>{cells}</div>"
