#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# build_wheel.sh SOURCE WHEELS: build this package's wheel from a source tree.
#
# pip fetches setuptools for the build from the index of the build machine. A folder
# WHEELS that already holds a wheel of this package (a build without a network) is kept.
set -eu
source=$1
wheels=$2
mkdir -p "$wheels"
set -- "$wheels"/sglang_exact-*.whl
if [ -f "$1" ]; then
  echo "build_wheel: kept $1"
else
  python3 -m pip wheel --quiet --no-deps --no-cache-dir --wheel-dir "$wheels" "$source"
  set -- "$wheels"/sglang_exact-*.whl
fi
if [ "$#" -ne 1 ] || [ ! -f "$1" ]; then
  echo "build_wheel: found $*, expected one wheel of sglang_exact in $wheels" >&2
  exit 1
fi
echo "build_wheel: $1"
