#!/bin/sh
# Writes the locks: each library of the agent and of its extras, and each of the portal, in one version, with the hashes
# of its files for every Python and machine. Needs uv (pip install uv). Versions that are locked already stay unless they
# no longer fit.
#
#   lock.sh              after a change of the dependencies in pyproject.toml
#   lock.sh --upgrade    to the newest versions that fit
#   lock.sh --check      change nothing, and fail when a lock is not what pyproject.toml asks for
set -eu

here=$(cd "$(dirname "$0")" && pwd)
more=''
case ${1-} in
  --check | '') ;;
  --upgrade) more=--upgrade ;;
  *) printf 'lock.sh: there is no option %s\n' "$1" >&2; exit 2 ;;
esac

# --no-config and --no-emit-index-url: a lock says nothing of the machine that wrote it.
lock() { # for Python $1 and newer, into the file $2, what the rest says
  python=$1 out=$2
  shift 2
  uv --no-config pip compile --quiet --universal --python-version "$python" --generate-hashes --no-emit-index-url \
    --custom-compile-command deploy/artifact/lock.sh ${more:+"$more"} --output-file "$out" "$@"
}

cd "$here/../.."
agent=deploy/artifact/requirements.txt portal=deploy/portal/requirements.txt
if [ "${1-}" = --check ]; then
  scratch=$(mktemp -d)
  trap 'rm -rf "$scratch"' EXIT
  cp "$agent" "$scratch/agent.txt"
  cp "$portal" "$scratch/portal.txt"
  agent=$scratch/agent.txt portal=$scratch/portal.txt
fi
lock 3.10 "$agent" --extra apprise --extra template --extra websocket pyproject.toml deploy/windows/requirements.in
# What both need is in both in the same version.
lock 3.11 "$portal" --no-annotate --constraint deploy/artifact/requirements.txt --extra portal --extra portal-postgresql pyproject.toml
if [ "${1-}" = --check ]; then
  cmp "$agent" deploy/artifact/requirements.txt
  cmp "$portal" deploy/portal/requirements.txt
else
  for tools in deploy/artifact/tools .ci/release-tools; do
    [ -f "$tools.in" ] || continue # an unpacked sdist makes no releases
    lock 3.10 "$tools.txt" "$tools.in"
  done
fi
