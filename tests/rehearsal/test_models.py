# SPDX-License-Identifier: Apache-2.0
"""Model folders: the same bytes twice, other bytes for another seed, full widths."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from sglang_exact.hooks.testing import dummy_weights
from sglang_exact.rehearsal import models

torch = pytest.importorskip("torch")


def _weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def _config(folder: Path) -> dict[str, object]:
    config: dict[str, object] = json.loads((folder / "config.json").read_text())
    return config


def test_same_arguments_same_bytes(tmp_path: Path) -> None:
    first = models.make_target(tmp_path / "a")
    again = models.make_target(tmp_path / "b")
    other = models.make_target(tmp_path / "c", seed=1)
    assert _weights(first) == _weights(again)
    assert (first / "config.json").read_bytes() == (again / "config.json").read_bytes()
    assert _weights(first) != _weights(other)


def test_target_is_hybrid_bfloat16_and_finite(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    folder = models.make_target(tmp_path / "a")
    kinds = _config(folder)["layer_types"]
    assert kinds == ["linear_attention"] * 3 + ["full_attention"]
    tensors = load_file(folder / "model.safetensors")
    assert {t.dtype for t in tensors.values()} == {torch.bfloat16}
    assert all(bool(torch.isfinite(t).all()) for t in tensors.values())
    assert tensors["lm_head.weight"].shape == (512, 64)


@pytest.mark.parametrize("kind", models.DRAFT_KINDS)
def test_drafts_fit_the_target(tmp_path: Path, kind: str) -> None:
    config = _config(models.make_draft(tmp_path / kind, kind))
    assert config["hidden_size"] == 64
    assert config["vocab_size"] == 512


def test_unknown_draft_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="found draft kind 'medusa'"):
        models.make_draft(tmp_path / "x", "medusa")


@pytest.mark.parametrize("layers", [4, 64])
def test_full_width(tmp_path: Path, layers: int) -> None:
    target = _config(models.make_27b_target(tmp_path / "t", layers))
    assert target["hidden_size"] == 5120
    assert target["num_hidden_layers"] == layers
    for kind in ("dflash", "dflash2"):
        draft = _config(models.make_27b_draft(tmp_path / kind, kind, layers))
        assert draft["num_target_layers"] == layers
        dflash = draft["dflash_config"]
        assert isinstance(dflash, dict)
        ids = dflash["target_layer_ids"]
        assert ids == sorted(set(ids))
        assert 0 <= ids[0] <= ids[-1] < layers


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_full_width_of_a_family(tmp_path: Path, family: str) -> None:
    target = _config(models.make_wide_target(tmp_path / "t", 4, family=family))
    draft = _config(models.make_wide_draft(tmp_path / "d", "dflash", 4, family=family))
    assert target["model_type"] == family
    for name in ("hidden_size", "vocab_size", "head_dim", "rope_theta"):
        assert draft[name] == target[name]
    with pytest.raises(ValueError, match="found family 'qwen3_5'"):
        models.make_wide_target(tmp_path / "x", 4, family="qwen3_5")


def test_a_tiny_model_has_the_tensors_of_its_family(tmp_path: Path) -> None:
    """Head, biases and norms as its configuration says."""
    names = {}
    for family, target in models.TARGETS.items():
        made = models.make_target(tmp_path / family, 1, family=family)
        names[family] = {name for name, _ in target.shapes(_config(made))}
    attention = "model.layers.0.self_attn"
    assert "lm_head.weight" not in names["qwen3"]
    assert f"{attention}.q_norm.weight" in names["qwen3"]
    assert f"{attention}.o_proj.bias" in names["llama"]
    assert f"{attention}.k_proj.bias" in names["qwen2"]
    assert f"{attention}.o_proj.bias" not in names["qwen2"]
    assert not [name for name in names["mistral"] if name.endswith("bias")]


class Scaled(torch.nn.Module):
    """One norm of each kind; the host's are told by their names."""

    def __init__(self) -> None:
        super().__init__()
        self.q_norm = type("RMSNorm", (torch.nn.LayerNorm,), {})(16)
        self.k_norm = type("GemmaRMSNorm", (torch.nn.LayerNorm,), {})(16)


def test_dummy_norms_lie_around_what_leaves_a_row_as_it_is() -> None:
    model = Scaled()
    dummy_weights.initialize_dummy_weights(model)
    assert (model.q_norm.weight - 1.0).abs().max() <= 0.2
    assert model.k_norm.weight.abs().max() <= 0.2


class Tiny(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.A_log = torch.nn.Parameter(torch.zeros(8))
        self.lm_head = torch.nn.Linear(64, 32, bias=True)
        self.norm = torch.nn.LayerNorm(16)


def _filled(seed: int = 1234) -> dict[str, np.ndarray]:
    model = Tiny().bfloat16()
    dummy_weights.initialize_dummy_weights(model, seed=seed)
    return {
        k: v.view(torch.int16).numpy().copy() for k, v in model.state_dict().items()
    }


def test_dummy_weights_repeat_by_name_and_seed() -> None:
    first, again, other = _filled(), _filled(), _filled(seed=1)
    assert all(np.array_equal(first[k], again[k]) for k in first)
    assert all(not np.array_equal(first[k], other[k]) for k in first)


def test_dummy_weights_have_a_models_spread() -> None:
    model = Tiny()
    dummy_weights.initialize_dummy_weights(model)
    assert 0.0 <= model.A_log.min() <= model.A_log.max() <= np.log(16.0)
    assert 0.15 < model.lm_head.weight.std() < 0.35
    assert model.norm.weight.abs().max() <= 0.2


class Quantized(torch.nn.Module):
    """One FP8 weight [200, 300], with or without a scale for each 128 x 128."""

    def __init__(self, scales: bool) -> None:
        super().__init__()
        self.held = {"proj.weight": torch.zeros(200, 300).to(torch.float8_e4m3fn)}
        if scales:
            self.held["proj.weight_scale_inv"] = torch.zeros(2, 3)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return self.held


def test_dummy_weights_are_quantised_by_blocks() -> None:
    """As near to the seeded bfloat16 weight as three bits of mantissa are."""
    model = Quantized(scales=True)
    dummy_weights.initialize_dummy_weights(model)
    weight, scales = model.held.values()
    wide = torch.empty(200, 300, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(
        dummy_weights.seed_of("proj.weight", 1234)
    )
    dummy_weights._fill("proj.weight", wide, generator, False)
    assert scales[1, 2] == wide[128:, 256:].float().abs().max() / 448
    full = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[:200, :300]
    off = (weight.float() * full - wide.float()).abs()
    assert (off <= wide.float().abs() / 16 + full / 512).all()
    assert weight.float().abs().max() == 448
    other = Quantized(scales=True)
    dummy_weights.initialize_dummy_weights(other, seed=1)
    assert not torch.equal(other.held["proj.weight_scale_inv"], scales)


def test_dummy_weights_are_quantised_by_rows() -> None:
    """Half a step of a row's scale from the seeded bfloat16 weight, at most."""
    model = Quantized(scales=False)
    model.held = {
        "proj.weight": torch.zeros(40, 96, dtype=torch.int8),
        "proj.weight_scale": torch.zeros(40, 1),
    }
    dummy_weights.initialize_dummy_weights(model)
    weight, scales = model.held.values()
    wide = torch.empty(40, 96, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(
        dummy_weights.seed_of("proj.weight", 1234)
    )
    dummy_weights._fill("proj.weight", wide, generator, False)
    assert (weight.abs().amax(1) == 127).all()
    assert torch.equal(scales, wide.float().abs().amax(1, keepdim=True) / 127)
    off = (weight.float() * scales - wide.float()).abs()
    assert (off <= scales * 0.501).all()


def test_dummy_weights_leave_what_no_checkpoint_says_of_a_cache() -> None:
    """The host takes a scale below zero for none; a random one would be used."""
    model = Quantized(scales=True)
    held = {f"attn.{name}_scale": torch.tensor(-1.0) for name in "kv"}
    # Words of a format without scales of its own: as the host left them.
    held["proj.qweight"] = torch.zeros(4, dtype=torch.int8)
    model.held |= held
    dummy_weights.initialize_dummy_weights(model)
    assert [float(held[f"attn.{name}_scale"]) for name in "kv"] == [-1.0, -1.0]
    assert not held["proj.qweight"].any()


def test_dummy_weights_need_scales_of_quantised_weights() -> None:
    with pytest.raises(ValueError, match="found torch.float8_e4m3fn"):
        dummy_weights.initialize_dummy_weights(Quantized(scales=False))


class RowParallelLinear(torch.nn.Linear):
    """Stands in for the host's class of that name, which is told by its name."""

    def __init__(self, rank: int, ranks: int) -> None:
        super().__init__(64, 64)
        self.tp_group = SimpleNamespace(rank_in_group=rank, world_size=ranks)


class TwoRanks(torch.nn.Module):
    """One rank's part of a model: a shard, its replicated bias and a norm."""

    def __init__(self, rank: int, ranks: int = 2) -> None:
        super().__init__()
        self.o_proj = RowParallelLinear(rank, ranks)
        self.norm = torch.nn.LayerNorm(64)
        self.fc = torch.nn.Linear(64, 64)
        self.A_log = torch.nn.Parameter(torch.zeros(4))


def test_dummy_weights_differ_between_ranks_only_where_they_are_sharded() -> None:
    """A replicated tensor that differed would let the ranks drift apart."""
    parts = [TwoRanks(0), TwoRanks(1)]
    for model in parts:
        dummy_weights.initialize_dummy_weights(model)
    first, second = (model.state_dict() for model in parts)
    differing = {k for k in first if not torch.equal(first[k], second[k])}
    assert differing == {"o_proj.weight", "A_log"}
    alone = TwoRanks(0, ranks=1)
    dummy_weights.initialize_dummy_weights(alone)
    # Half the fan-in on each rank: the sum over both keeps its spread.
    want = alone.o_proj.weight / 2**0.5
    assert torch.equal(first["o_proj.weight"], want)
    assert torch.equal(first["A_log"], alone.A_log)
