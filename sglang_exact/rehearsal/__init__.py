# SPDX-License-Identifier: Apache-2.0
"""The host without a GPU: real engine, interpreted kernels, tiny models.

A rehearsal runs the installed SGLang unchanged in its scheduling, its speculative
workers and its Triton kernels; the kernels run in Triton's interpreter and a few
places that insist on an accelerator are mended while they are imported. It proves
indexing, state commits, wiring and request logic. It says nothing about the rounding
of a GPU.

Modules:
    environment     variables for a process that shall run the host on the CPU
    bootstrap       what `site/sitecustomize.py` calls in each of those processes
    stubs           stand-ins for packages the host imports and does not use here
    import_hook     edits and callbacks while host modules load
    interpreter     Triton's interpreter with bfloat16 that rounds as hardware does
    executor        the interpreter's grid loop without its per-launch overhead
    host_mends      every place of the host that is changed, and why
    row_ops         matrix products whose rows do not depend on the number of rows
    drafters        one record a drafter: flags, draft config, oracle
    models          tiny and full-width model folders
    deep_gemm_default   DeepGEMM without its deterministic algorithms: a control
    dummy_weights   realistic random weights, seeded by parameter name
    oracle          drafts from a known continuation with a chosen error rate
    server          start a server, send token ids, read exact log-probabilities
"""
