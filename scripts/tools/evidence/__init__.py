# SPDX-License-Identifier: Apache-2.0
"""README's table, docs/evidence.md and the pictures, from results/."""
