#!/bin/sh
# Writes the lock: each library of the agent and of its extras, in one version, with the hashes of its files for every
# Python and machine. Needs uv (pip install uv). Versions that are locked already stay unless they no longer fit.
#
#   lock.sh              after a change of the dependencies in pyproject.toml
#   lock.sh --upgrade    to the newest versions that fit
#   lock.sh --check      change nothing, and fail when the lock is not what pyproject.toml asks for
set -eu

here=$(cd "$(dirname "$0")" && pwd)
out=$here/requirements.txt
more=''
case ${1-} in
  --check)
    out=$(mktemp)
    trap 'rm -f "$out"' EXIT
    cp "$here/requirements.txt" "$out"
    ;;
  --upgrade) more=--upgrade ;;
  '') ;;
  *) printf 'lock.sh: there is no option %s\n' "$1" >&2; exit 2 ;;
esac

# --no-config and --no-emit-index-url: the lock says nothing of the machine that wrote it.
cd "$here/../.."
uv --no-config pip compile --quiet --universal --python-version 3.10 --generate-hashes --no-emit-index-url \
  --custom-compile-command deploy/artifact/lock.sh \
  --extra apprise --extra template --extra websocket ${more:+"$more"} --output-file "$out" \
  pyproject.toml deploy/windows/requirements.in
if [ "${1-}" = --check ]; then
  cmp "$out" "$here/requirements.txt"
else
  for tools in deploy/artifact/tools .ci/release-tools; do
    [ -f "$tools.in" ] || continue # an unpacked sdist makes no releases
    uv --no-config pip compile --quiet --universal --python-version 3.10 --generate-hashes --no-emit-index-url \
      --custom-compile-command deploy/artifact/lock.sh ${more:+"$more"} --output-file "$tools.txt" "$tools.in"
  done
fi
