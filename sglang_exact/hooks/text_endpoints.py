# SPDX-License-Identifier: Apache-2.0
"""A server without a tokenizer says so, instead of failing on what is not there.

Why: under --skip-tokenizer-init the endpoints that read or write text look for a
    tokenizer, or for the text of an answer, and end in a 500 that names neither
    (serving_chat.py:799, serving_completions.py:575, serving_tokenize.py:59).
What: they answer with status 400, the reason and what to ask instead.
Scope: chat, Anthropic messages and responses, completions, tokenize and detokenize,
    rerank. /generate, /v1/score and /v1/embeddings take ids and name what they need.
Retire when: the host refuses these requests itself.
"""

from __future__ import annotations

from typing import Any

from sglang_exact.hooks.base import MAIN, hook
from sglang_exact.reasons import Reason

_OPENAI = "sglang.srt.entrypoints.openai"

NO_TOKENIZER = Reason(
    "a server without a tokenizer",
    "one, for an endpoint of text",
    "send input_ids to /generate, or start the server without --skip-tokenizer-init",
)

TARGETS = {
    "chat": "serving_chat.OpenAIServingChat._process_messages",
    "completions": (
        "serving_completions.OpenAIServingCompletion._convert_to_internal_request"
    ),
    "tokenize": "serving_tokenize.OpenAIServingTokenize._handle_non_streaming_request",
    "detokenize": (
        "serving_tokenize.OpenAIServingDetokenize._handle_non_streaming_request"
    ),
    "rerank": "serving_rerank.OpenAIServingRerank._convert_to_internal_request",
}
"""Where each endpoint begins to need text, inside what turns ValueError into a 400."""


def need_a_tokenizer(self: Any, *given: Any, **named: Any) -> None:
    """Before each of TARGETS; raises ValueError with the reason."""
    if self.tokenizer_manager.tokenizer is None:
        raise ValueError(str(NO_TOKENIZER))


for _name, _target in TARGETS.items():
    hook(
        f"{_OPENAI}.{_target}",
        "BEFORE",
        name=f"text_{_name}",
        roles=(MAIN,),
        relies_on=(f"{_OPENAI}.serving_base.OpenAIServingBase.handle_request",),
    )(need_a_tokenizer)
