# SPDX-License-Identifier: Apache-2.0
"""Bundles for hosts without a network; see docs/offline.md."""
