#!/bin/sh
# Writes the lock files of the agent with its extras, of the portal, and of the build tools. A lock file pins the version
# of each library, and the hashes of its files for all Python versions and architectures. The script needs uv (pip install
# uv). It changes a locked version only if the version is no longer compatible.
#
#   lock.sh              after a change of the dependencies in pyproject.toml
#   lock.sh --upgrade    upgrade to the newest compatible versions
#   lock.sh --check      change nothing, and fail if a lock file does not match pyproject.toml
set -eu

here=$(cd "$(dirname "$0")" && pwd)
more=''
case ${1-} in
  --check | '') ;;
  --upgrade) more=--upgrade ;;
  *) printf 'lock.sh: Unknown option %s\n' "$1" >&2; exit 2 ;;
esac

# With --no-config and --no-emit-index-url, a lock file does not depend on the settings of this machine.
lock() { # lock the requirements in the other arguments for Python $1 and newer, and write the file $2
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
# Libraries that both files contain have the same version in both.
lock 3.11 "$portal" --no-annotate --constraint deploy/artifact/requirements.txt --extra portal --extra portal-postgresql pyproject.toml
if [ "${1-}" = --check ]; then
  cmp "$agent" deploy/artifact/requirements.txt
  cmp "$portal" deploy/portal/requirements.txt
else
  for tools in deploy/artifact/tools .ci/release-tools; do
    [ -f "$tools.in" ] || continue # an sdist does not contain all of these files
    lock 3.10 "$tools.txt" "$tools.in"
  done
fi
