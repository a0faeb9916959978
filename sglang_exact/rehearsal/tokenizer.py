# SPDX-License-Identifier: Apache-2.0
"""A tokenizer for the tiny target: every id is a piece of two letters.

Text is the concatenation of the pieces, so a stop string can end inside a piece,
cross two of them, or be one, and any ids can be written as text and read back.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

SPECIAL = ("<mask>", "<bos>", "<eos>")
"""Pieces of ids 0, 1 and 2, as in `models.make_target`."""

_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def piece(token: int) -> str:
    """The text of one id, which must be below 679."""
    if token < len(SPECIAL):
        return SPECIAL[token]
    first, second = divmod(token - len(SPECIAL), len(_LETTERS))
    return _LETTERS[first] + _LETTERS[second]


def text(tokens: Sequence[int]) -> str:
    """The text of generated ids; special ones have none."""
    return "".join(piece(token) for token in tokens if token >= len(SPECIAL))


def make_tokenizer(folder: str | Path, vocab_size: int = 512) -> Path:
    """Write tokenizer.json and tokenizer_config.json into a model folder.

    Raises:
        ValueError: more ids than two letters can name.
    """
    from tokenizers import (
        AddedToken,
        Regex,
        Tokenizer,
        decoders,
        models,
        pre_tokenizers,
    )

    most = len(SPECIAL) + len(_LETTERS) ** 2
    if vocab_size > most:
        raise ValueError(f"found vocab_size {vocab_size}, expected at most {most}")
    vocab = {piece(token): token for token in range(vocab_size)}
    made = Tokenizer(models.WordLevel(vocab, unk_token=SPECIAL[0]))
    made.pre_tokenizer = pre_tokenizers.Split(Regex(".{1,2}"), "isolated")
    made.decoder = decoders.Fuse()
    made.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    folder = Path(folder)
    made.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL[1],
        "eos_token": SPECIAL[2],
        "clean_up_tokenization_spaces": False,
        "model_max_length": 4096,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    return folder
