# SPDX-License-Identifier: Apache-2.0
"""`bench leaderboard`: speed against draft length, for every drafter."""
