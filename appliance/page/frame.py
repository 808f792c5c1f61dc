"""The frame of our pages: one HTML file that needs nothing else, in light and dark. Pure.

Nothing is loaded from anywhere. A content security policy says the same to the browser: no source but the page's own
style, and no script but ours, named by its hash. So what a run wrote can not act even where it were not escaped.
"""

from __future__ import annotations

import base64
import hashlib
import html
from collections.abc import Iterable, Sequence

from appliance.page.script import SCRIPT

_STYLE = """
:root { color-scheme: light dark; --page: #f6f7f9; --card: #fff; --text: #1d2126; --soft: #5d6670; --line: #d9dde3;
  --fine: #0a7d4f; --warn: #9a6200; --bad: #c0271c; --open: #56606b; --shade: #eef1f4;
  --c0: #0072b2; --c1: #d55e00; --c2: #009e73; --c3: #b8578f; --c4: #c98500; --c5: #3d9bd6; --c6: #8c6d31; --c7: #666; }
@media (prefers-color-scheme: dark) { :root { --page: #101418; --card: #181d23; --text: #e4e8ec; --soft: #9aa5b1;
  --line: #313a44; --fine: #3ecf8e; --warn: #f0b429; --bad: #ff7366; --open: #9aa5b1; --shade: #222932;
  --c0: #4ba9ea; --c1: #ff8a4c; --c2: #2fcf9d; --c3: #e79cc8; --c4: #f3b83f;
  --c5: #8fd0f7; --c6: #c9a960; --c7: #aaa; } }
* { box-sizing: border-box; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1240px; margin: 0 auto; padding: 1.5rem 1.25rem 4rem;
  background: var(--page); color: var(--text); }
h1 { font-size: 1.6rem; line-height: 1.2; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 2.2rem 0 .7rem; } h3 { font-size: 1rem; margin: 1.2rem 0 .4rem; }
p { margin: .4rem 0; } .soft, .unit, .note { color: var(--soft); } .note { font-size: 13px; }
table { border-collapse: collapse; font-size: 13px; display: block; overflow-x: auto; }
th, td { padding: 4px 10px; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top; }
th { color: var(--soft); font-weight: 600; white-space: nowrap; } .number { text-align: right; white-space: nowrap; }
figure { margin: 0; background: var(--card); border: 1px solid var(--line); border-radius: 8px;
  padding: 10px 12px 4px; }
figure.empty p { color: var(--soft); font-size: 13px; } figcaption { min-height: 3em; line-height: 1.4; }
.legend { margin: 0; font-size: 12px; } .newest { float: right; }
.legend span { margin-right: 1rem; white-space: nowrap; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 360px), 1fr)); gap: 12px; }
.over-time figure { margin-bottom: 12px; } .over-time figcaption { min-height: 0; }
svg.chart { display: block; width: 100%; }
svg text { font: 11px system-ui, sans-serif; fill: var(--soft); } svg .grid { stroke: var(--line); }
svg .margin { fill: var(--shade); } svg .curve { fill: none; stroke-width: 1.8; stroke-linejoin: round; }
svg line.bound { stroke: var(--bad); stroke-dasharray: 5 4; } svg text.bound { fill: var(--bad); }
svg line.mark { stroke: var(--soft); stroke-dasharray: 3 3; } svg line.warn { stroke: var(--warn); }
svg .pointer { stroke: var(--soft); }
svg .part { opacity: .85; } svg .spot { fill: currentColor; stroke: var(--card); stroke-width: 1; }
.swatch { vertical-align: middle; } i.spot { display: inline-block; width: 10px; height: 10px; border-radius: 2px; }
code, pre { font: 13px/1.45 ui-monospace, monospace; background: var(--shade); border-radius: 4px; }
code { padding: 0 4px; overflow-wrap: anywhere; }
pre { padding: 10px 12px; margin: .4rem 0; white-space: pre-wrap; overflow-wrap: anywhere; }
details { margin: .5rem 0; } summary { cursor: pointer; }
.word { display: inline-block; min-width: 4.2em; padding: 0 8px; border-radius: 99px; font-weight: 600; font-size: 12px;
  text-align: center; border: 1px solid currentColor; }
.fine { color: var(--fine); } .warn { color: var(--warn); } .bad { color: var(--bad); } .open { color: var(--open); }
#tip { position: fixed; z-index: 9; pointer-events: none; padding: 5px 9px; border: 1px solid var(--line);
  font-size: 12px; border-radius: 6px; background: var(--card); box-shadow: 0 2px 8px #0003; white-space: nowrap; }
#tip i { display: inline-block; width: 8px; height: 8px; border-radius: 50%; margin-right: 5px; }
@media print { body { max-width: none; } figure { break-inside: avoid; } }
"""


def document(
    title: str, body: Iterable[str], *, style: str = "", reload_s: int = 0, written: float = 0.0, forsaken: str = ""
) -> str:
    """The whole page. title: plain text.  body: markup, in which what others wrote is escaped.

    style: CSS of this kind of page.  reload_s: the page loads itself again after so long, 0: never.
    written: unix s.  forsaken: plain text that such a page shows when nobody has written it for five minutes.
    """
    script_hash = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{script_hash}'; base-uri 'none'"
    again = f'<noscript><meta http-equiv="refresh" content="{reload_s}"></noscript>' if reload_s else ""
    return "\n".join(
        [
            "<!doctype html>",
            f'<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            f'<meta name="viewport" content="width=device-width">{again}<style>{_STYLE}{style}</style></head>',
            f'<body data-reload-s="{reload_s}" data-written="{written:.0f}">',
            *([f'<p id="forsaken" class="warn" hidden>{html.escape(forsaken)}</p>'] if reload_s else []),
            *body,
            f"<script>{SCRIPT}</script></body></html>",
            "",
        ]
    )


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: Sequence[int] = ()) -> str:
    """Plain texts, escaped here. numbers: columns that stand on the right."""
    names = "".join(f"<th{_side(place, numbers)}>{html.escape(name)}</th>" for place, name in enumerate(head))
    lines = "".join(
        f"<tr>{''.join(f'<td{_side(place, numbers)}>{html.escape(cell)}</td>' for place, cell in enumerate(row))}</tr>"
        for row in rows
    )
    return f"<table><thead><tr>{names}</tr></thead><tbody>{lines}</tbody></table>"


def _side(place: int, numbers: Sequence[int]) -> str:
    return ' class="number"' if place in numbers else ""


def code(text: str) -> str:
    return f"<code>{html.escape(text)}</code>"


def block(text: str) -> str:
    return f"<pre>{html.escape(text)}</pre>"


def fold(name: str, summary: str, body: str, *, is_open: bool = False) -> str:
    """A part that opens at a click. name: its id, of letters.  summary: plain text."""
    return f'<details id="{name}"{" open" if is_open else ""}><summary>{html.escape(summary)}</summary>{body}</details>'
