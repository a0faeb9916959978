# SPDX-License-Identifier: Apache-2.0
"""Compare a serving SGLang with a plain reference, bit for bit, over HTTP.

Data flows one way: plan -> runner -> record -> compare -> report. Nothing here
imports torch or sglang, so the verifier runs on any machine that reaches the server.
"""
