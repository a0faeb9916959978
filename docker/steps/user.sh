#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# user.sh UID CACHE [PASSWD]: an account for the server, and the folders it writes to.
#
# A uid that exists is used as it is (0 keeps root). torch asks for the account's name,
# so the uid needs a line in the password file. Volumes mounted over CACHE/... take the
# owner of these folders when they are first made.
set -eu
uid=$1
cache=$2
passwd=${3:-/etc/passwd}
case $uid in
  '' | *[!0-9]*)
    echo "user: found uid '$uid'; expected a number; fix: --build-arg USER_ID=1000" >&2
    exit 1
    ;;
esac
if ! cut -d: -f3 "$passwd" | grep -qx "$uid"; then
  echo "sglang-exact:x:$uid:$uid::$cache/home:/bin/sh" >>"$passwd"
fi
for name in home huggingface sglang results; do
  mkdir -p "$cache/$name"
  chown "$uid:$uid" "$cache/$name"
done
