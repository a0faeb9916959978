#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# check.sh BASE_PY BASE_JSON: last step, run as the account that serves.
#
# Nothing of the base was replaced, and doctor finds nothing to mend (a build has no GPU:
# the GPU is looked at when the server starts).
set -eu
python3 "$1" compare "$2"
if ! sglang-exact doctor --no-gpu; then
  echo "check: doctor fails as uid $(id -u). If the base keeps its files from other" \
    "accounts (Permission denied above), build with --build-arg USER_ID=0" >&2
  exit 1
fi
