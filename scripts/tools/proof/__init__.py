# SPDX-License-Identifier: Apache-2.0
"""Proofs on a GPU: servers, what each is asked, what came of it."""
