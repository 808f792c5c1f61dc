"""The one place that prints: data on stdout, everything else on stderr."""

from __future__ import annotations

import functools
import io
import os
import sys

from rich.console import Console, RenderableType


@functools.cache
def err_console() -> Console:
    """The console for people, on stderr. NO_COLOR is honoured by rich."""
    return Console(stderr=True, highlight=False)


def is_live(console: Console) -> bool:
    """Whether a display that redraws itself makes sense: a real terminal that can move its cursor."""
    return console.file.isatty() and os.environ.get("TERM", "") not in ("", "dumb", "unknown")


def say(text: str, *, style: str = "") -> None:
    """Text for people on stderr, as it is: no markup, and no line breaks of ours."""
    err_console().print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def plain_text(renderable: RenderableType, *, columns: int) -> str:
    """What rich draws, as text of so many columns without colours, for a file or for stdout."""
    text = io.StringIO()
    Console(file=text, width=columns, no_color=True, highlight=False).print(renderable)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


def out(text: str) -> None:
    """One piece of data on stdout, written at once. Raises BrokenPipeError when nobody reads any more."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
