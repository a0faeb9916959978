# SPDX-License-Identifier: Apache-2.0
"""Every place of the host that is changed so that it runs without an accelerator.

None of them changes what a request gets: they lift refusals of the CPU, choose the
Triton path where the host would look for a compiled one, and stand in for stream
calls. Written for the pinned release; an anchor that is not found stops the import.
"""

from __future__ import annotations

import contextlib
from types import ModuleType, SimpleNamespace
from typing import Any

from sglang_exact.rehearsal import interpreter, row_ops, stubs
from sglang_exact.rehearsal.import_hook import Edit, Mend

_XPU = Edit("_is_xpu = is_xpu()", "_is_xpu = True")
_SCATTER_GUARD = "if not (dst.is_cuda or dst.is_xpu) or dst.device != src.device:"


def mend_torch(torch: ModuleType) -> None:
    """Stream calls of CPU tensors do nothing; device probes find a plain device."""
    record = torch.Tensor.record_stream

    def record_stream(self: Any, stream: Any) -> None:
        if self.device.type != "cpu":
            record(self, stream)

    torch.Tensor.record_stream = record_stream
    # Pinning is for copies to a device.
    torch.Tensor.pin_memory = lambda self, *args, **kwargs: self
    # A CPU build of torch raises where the answer is no.
    torch.cuda.is_current_stream_capturing = lambda: False
    # FLA enters `torch.<backend>.device(index)` around each of its launches.
    torch.cpu.device = lambda index=None: contextlib.nullcontext()
    torch.cuda.get_device_properties = lambda device=None: SimpleNamespace(
        multi_processor_count=132, name="cpu", total_memory=2**34, major=9, minor=0
    )


def mends() -> list[Mend]:
    """All mends, of the host and of the two packages under it."""
    return [*_library_mends(), *_argument_mends(), *_kernel_mends()]


def _library_mends() -> list[Mend]:
    return [
        Mend(
            "torch",
            "CPU tensors have no streams, and there is no device to ask",
            after=mend_torch,
            needs=("Tensor", "cpu", "cuda"),
        ),
        Mend(
            "triton",
            "the interpreter computes bfloat16 on bit patterns and has no driver",
            after=interpreter.mend,
            needs=("runtime", "language"),
        ),
        Mend(
            "transformers.utils.import_utils",
            "transformers must not use the stand-in for torchvision",
            after=stubs.hide_from_transformers,
            needs=("_is_package_available",),
        ),
        Mend(
            "sglang.srt.batch_invariant_ops.batch_invariant_ops",
            "deterministic mode registers its operators for CUDA only",
            after=row_ops.mend_batch_invariant,
            needs=("enable_batch_invariant_mode", "_batch_invariant_MODE"),
        ),
    ]


def _argument_mends() -> list[Mend]:
    return [
        Mend(
            "sglang.srt.arg_groups.speculative_hook",
            "DFLASH and DSpark refuse the CPU by name",
            edits=(
                Edit(
                    'cfg.device.startswith("cuda") or cfg.device == "npu" or '
                    'cfg.device == "xpu"',
                    'cfg.device.startswith(("cuda", "cpu", "npu", "xpu"))',
                ),
                Edit(
                    'cfg.device.startswith(("cuda", "npu", "xpu")):',
                    'cfg.device.startswith(("cuda", "npu", "xpu", "cpu")):',
                ),
            ),
        ),
    ]


def _kernel_mends() -> list[Mend]:
    return [
        Mend(
            "sglang.srt.arg_groups.mamba_hook",
            "states of cached prefixes are refused on a platform without Triton",
            edits=(Edit("        platform.is_cuda\n", "        True\n"),),
        ),
        Mend(
            "sglang.srt.distributed.parallel_state",
            "without the compiled CPU engine gloo's gather is left for a CUDA operator",
            edits=(Edit("_is_cpu = is_cpu()", "_is_cpu = True"),),
        ),
        Mend(
            "sglang.kernels.ops.mamba.mamba_state_scatter_triton",
            "two Triton launchers refuse tensors that are not on CUDA or XPU",
            edits=(Edit(_SCATTER_GUARD, "if dst.device != src.device:", count=2),),
        ),
        Mend(
            "sglang.kernels.ops.sampling.murmur_hash",
            "the seeded sampler's hash asks the compiled CPU kernels, not Triton",
            edits=(Edit('if device.type == "cpu":', "if False:"),),
        ),
        Mend(
            "sglang.kernels.ops.speculative.cache_locs",
            "without a known device no cache locations are returned at all",
            edits=(_XPU,),
        ),
        Mend(
            "sglang.kernels.ops.speculative.spec_tree",
            "draft trees and their greedy check have a Triton form, chosen on XPU",
            edits=(_XPU,),
        ),
        Mend(
            "sglang.kernels.ops.speculative.reconstruct_tree",
            "imports a compiled kernel where XPU would take the Triton one",
            edits=(_XPU,),
        ),
    ]
