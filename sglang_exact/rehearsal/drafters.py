# SPDX-License-Identifier: Apache-2.0
"""The drafters: how each is started, what its draft model looks like, its oracle.

One record a drafter. Models, servers, proofs and tests go over this table: a drafter
that stands here is served, proved and tested like the others.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

Config = dict[str, Any]

LOADED, OF_TARGET, NONE = "a draft of its own", "the target's shape", "no draft model"
"""What a drafter loads."""


def _same(config: Config, block_size: int) -> Config:
    return {"block_size": block_size}


def _dflash2(config: Config, block_size: int) -> Config:
    """Grouped convolution and selector; the block stands beside the other sizes."""
    layers, small = config["num_hidden_layers"], config["hidden_size"] < 1024
    return {
        "architectures": ["DFlash2DraftModel"],
        "is_causal": False,
        "layer_types": ["sliding_attention"] * layers,
        "sliding_window": 64 if small else 4096,
        "use_sliding_window": True,
        "max_window_layers": layers,
        "dflash_config": config["dflash_config"]
        | {
            "block_size": block_size,
            "conv_group_size": 16 if small else 128,
            "conv_kernel_size": 2 if small else 4,
            "final_logit_softcapping": 20.0,
            "output_multiplier": 0.2,
            "selector_rank": 8 if small else 64,
            "selector_top_k": 4,
        },
    }


def _dspark(config: Config, block_size: int) -> Config:
    return {
        "architectures": ["DSparkDraftModel"],
        # A DSpark block does not count the anchor token.
        "block_size": block_size - 1,
        "markov_rank": 8 if config["hidden_size"] < 1024 else 128,
        "markov_head_type": "vanilla",
        "enable_confidence_head": False,
        "sample_from_anchor": True,
    }


class Drafter(NamedTuple):
    """One drafter.

    Attributes:
        name: in arms, folders and options.
        title: for readers.
        algorithm: the host's --speculative-algorithm.
        oracle: hooks of the oracle that put its drafts there.
        model: LOADED, OF_TARGET or NONE.
        config: what its draft's config.json has over a DFLASH draft's, from that and
            the tokens per block.
        flags: further flags of the host, from the tokens per block.
        tokens: verified per block where nothing else is asked for.
        worker: its module of the host, if that can be imported without a driver.
    """

    name: str
    title: str
    algorithm: str
    oracle: tuple[str, ...]
    model: str = LOADED
    config: Callable[[Config, int], Config] = _same
    flags: Callable[[int], tuple[str, ...]] = lambda tokens: ()
    tokens: int = 8
    worker: str = ""


_WORKERS = "sglang.srt.speculative"
DRAFTERS = {
    drafter.name: drafter
    for drafter in (
        Drafter(
            "dflash",
            "DFLASH",
            "DFLASH",
            ("dflash",),
            worker=f"{_WORKERS}.dflash_worker_v2",
        ),
        Drafter(
            "dflash2", "DFlash2-shaped draft", "DFLASH", ("dflash",), config=_dflash2
        ),
        Drafter(
            "mtp",
            "MTP (EAGLE, topk 1)",
            "NEXTN",
            ("eagle",),
            OF_TARGET,
            flags=lambda tokens: (
                "--speculative-eagle-topk",
                "1",
                "--speculative-num-steps",
                str(tokens - 1),
            ),
            tokens=4,
        ),
        Drafter(
            "ngram",
            "NGRAM",
            "NGRAM",
            ("ngram",),
            NONE,
            flags=lambda tokens: ("--speculative-ngram-max-bfs-breadth", "1"),
        ),
        Drafter(
            "dspark",
            "DSpark",
            "DSPARK",
            ("dspark", "dflash"),
            config=_dspark,
            worker=f"{_WORKERS}.dspark_components.dspark_worker_v2",
        ),
    )
}
DRAFT_KINDS = tuple(name for name, one in DRAFTERS.items() if one.model != NONE)
"""Drafters with a draft model."""


def drafter(name: str) -> Drafter:
    """The drafter of a name.

    Raises:
        ValueError: there is none.
    """
    if name not in DRAFTERS:
        raise ValueError(
            f"found draft kind {name!r}, expected one of {', '.join(DRAFTERS)}"
        )
    return DRAFTERS[name]


def draft_flags(kind: str, draft: str | Path | None, tokens: int = 4) -> list[str]:
    """Flags for speculation with `tokens` verified tokens per block.

    Args:
        kind: name of a drafter.
        draft: folder of the draft model; None where it loads none.
        tokens: committed token and drafts.

    Raises:
        ValueError: unknown `kind`.
    """
    one = drafter(kind)
    flags = ["--speculative-algorithm", one.algorithm]
    if one.model != NONE:
        flags += [
            "--speculative-draft-model-path", str(draft),
            "--speculative-draft-load-format", "dummy",
            "--speculative-draft-attention-backend", "triton",
        ]  # fmt: skip
    flags += one.flags(tokens)
    return [*flags, "--speculative-num-draft-tokens", str(tokens)]
