# SPDX-License-Identifier: Apache-2.0
"""The endpoints of text on a server without a tokenizer."""

from __future__ import annotations

import asyncio
import inspect
from types import SimpleNamespace
from typing import Any

from sglang_exact.hooks import base, in_force, text_endpoints
from sglang_exact.hooks.text_endpoints import NO_TOKENIZER


def _error(function: Any, tokenizer: Any = None) -> BaseException | None:
    """What the host's method raises when it is called for this server."""
    names = list(inspect.signature(function).parameters)[1:]
    server = SimpleNamespace(
        tokenizer_manager=SimpleNamespace(tokenizer=tokenizer),
        create_error_response=lambda message, **status: message,
    )
    try:
        found = function(server, **dict.fromkeys(names))
        if inspect.isawaitable(found):
            asyncio.run(_answer(found))
    except Exception as error:  # noqa: BLE001
        return error
    return None


async def _answer(found: Any) -> Any:
    return await found


def _targets() -> list[Any]:
    return [in_force.resolve(hook.target) for hook in base.of(text_endpoints)]


def test_endpoints_of_text_name_a_missing_tokenizer() -> None:
    for function in _targets():
        error = _error(function)
        assert type(error) is ValueError, (function, error)
        assert str(error) == str(NO_TOKENIZER)
        assert str(_error(function, tokenizer=object())) != str(NO_TOKENIZER)


def test_control_host_looks_for_a_tokenizer_that_is_not_there() -> None:
    for function in _targets():
        assert type(_error(function.__wrapped__)) is not ValueError, function
