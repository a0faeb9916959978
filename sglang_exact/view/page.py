# SPDX-License-Identifier: Apache-2.0
"""The pages: one file each, no script, nothing loaded from outside, all escaped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jinja2


def render(
    package: str, template: str, filters: dict[str, Callable[..., Any]], **values: Any
) -> str:
    """A template of `package`, which may build on those of this one.

    HTML is escaped, Markdown by its own filters.
    """
    folders = [jinja2.PackageLoader(name, "") for name in (package, __package__)]
    env = jinja2.Environment(
        loader=jinja2.ChoiceLoader(folders),
        autoescape=lambda name: ".html" in (name or ""),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    env.filters |= filters
    return env.get_template(template).render(**values)
