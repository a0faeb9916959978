# SPDX-License-Identifier: Apache-2.0
"""Times of the kernels alone, beside the host's."""
