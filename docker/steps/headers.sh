#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# headers.sh APPLY_PATCHES: make DeepGEMM's sm120 headers safe, and check that they are.
#
# In an image the header is edited in place: nothing else uses this site-packages, and
# the layer says what was done. A version or a file that the manifest does not know ends
# the build.
set -eu
python3 "$1" --in-place
python3 "$1" --check
