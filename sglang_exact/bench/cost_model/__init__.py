# SPDX-License-Identifier: Apache-2.0
"""`bench cost-model`: predictions from measured steps."""
