# SPDX-License-Identifier: Apache-2.0
"""Options that several commands share, said once: the fields of a dataclass."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any


def with_options(
    run: Callable[..., None],
    *groups: type,
    own: Callable[..., Any] | None = None,
    after: str = "",
    without: Sequence[str] = (),
    **defaults: Any,
) -> Callable[..., None]:
    """`run` as a command: called with one of each of `groups`, and options of its own.

    Those are the parameters of `own` (default: `run`) behind as many as there are
    groups, and stand after the field `after`. `without` names fields that the command
    does not have, `defaults` replace those of fields.
    """
    own = own or run
    fields = {
        group: [
            p.replace(default=defaults.get(p.name, p.default))
            for p in inspect.signature(group, eval_str=True).parameters.values()
            if p.name not in without
        ]
        for group in groups
    }
    shared = [p for found in fields.values() for p in found]
    place = 1 + next((i for i, p in enumerate(shared) if p.name == after), -1)
    mine = list(inspect.signature(own, eval_str=True).parameters.values())
    order = [*shared[:place], *mine[len(groups) :], *shared[place:]]

    def called(**values: Any) -> None:
        made = [
            group(**{p.name: values.pop(p.name) for p in found})
            for group, found in fields.items()
        ]
        run(*made, **values)

    options = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in order]
    called.__doc__, called.__name__ = own.__doc__, own.__name__
    called.__annotations__ = {p.name: p.annotation for p in options}
    vars(called)["__signature__"] = inspect.Signature(options)
    return called
