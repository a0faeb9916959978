# SPDX-License-Identifier: Apache-2.0
"""`bench memory`: where GPU memory goes."""
