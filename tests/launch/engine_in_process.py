# SPDX-License-Identifier: Apache-2.0
"""`sglang.Engine` in a program of its own: answers and attestation as one JSON line.

One argument: JSON with `arguments` (of ServerArgs), `prompts` and `max_new_tokens`.
"""

from __future__ import annotations

import json
import sys
from typing import Any


def main() -> None:
    """Generate greedily for every prompt, one after the other."""
    from sglang import Engine

    asked: dict[str, Any] = json.loads(sys.argv[1])
    engine = Engine(**asked["arguments"])
    sampling = {"temperature": 0, "max_new_tokens": asked["max_new_tokens"]}
    answers = [
        engine.generate(
            input_ids=ids,
            sampling_params={**sampling, "ignore_eos": True},
            return_logprob=True,
        )
        for ids in asked["prompts"]
    ]
    try:
        engine.generate(
            input_ids=[5], sampling_params=sampling, return_hidden_states=True
        )
        refused = ""
    except ValueError as error:
        refused = str(error)
    found = engine.get_server_info().get("sglang_exact")
    shown = {"answers": answers, "attestation": found, "refused": refused}
    print(json.dumps(shown))  # noqa: T201
    engine.shutdown()


if __name__ == "__main__":
    main()
