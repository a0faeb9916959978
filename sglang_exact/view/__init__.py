# SPDX-License-Identifier: Apache-2.0
"""What the asking side shows: tables, progress, pages, plots."""
