# SPDX-License-Identifier: Apache-2.0
"""Asking a server over HTTP: requests, answers, facts, and servers of our own.

Imports neither torch nor sglang, nor anything that serves.
"""
