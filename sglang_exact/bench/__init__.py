# SPDX-License-Identifier: Apache-2.0
"""Speed, acceptance and exactness of running servers, side by side.

Talks HTTP only; imports neither torch nor sglang.

    run          the record of a measurement: one JSON file, saved as it grows
    provenance   what was measured with what: servers, client, GPU, command
    servers      the named servers of a run, opened and described
    drive        requests in flight, answers with token timestamps
    exactness    ids (and logprobs) equal to plain decoding, counted
    stats        medians, spread, acceptance length
"""
