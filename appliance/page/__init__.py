"""Our pages: one HTML file that needs nothing else, in light and dark, from a template of `templates/`.

Nothing is loaded from anywhere. A content security policy says the same to the browser: no source but the page's own
style, and no script but ours, named by its hash. So what a run wrote can not act even where it were not escaped.
"""

from __future__ import annotations

import base64
import functools
import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jinja2 import Environment

_TEMPLATES = Path(__file__).with_name("templates")


def render(template: str, **values: object) -> str:
    """Render the page of a template. Every value is escaped, except figures, which themselves escape what others
    wrote."""
    return _environment().get_template(template).render(values)


@functools.cache
def _environment() -> Environment:
    """Make an environment that renders nothing where a value is missing or a name misspelt."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # not at the launcher's start

    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    script = (_TEMPLATES / "page.js").read_text()
    environment.globals.update(
        style=(_TEMPLATES / "page.css").read_text(),
        script=script,
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )
    return environment
