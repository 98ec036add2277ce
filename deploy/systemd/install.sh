#!/bin/sh
# Installs or upgrades the agent as a systemd service, from a wheel or a checkout. Run it again as often as you like.
#
#   install.sh [--config FILE] [--no-start] [--root DIR] [--python PYTHON] [--extras apprise,template,websocket] \
#     WHEEL|CHECKOUT
#
# It enables and starts the agent, or restarts it, with the configuration that is there: put yours there before, or name
# it with --config, which replaces the one that is there. With --no-start what runs goes on as it is until you say
# `systemctl restart`. --root DIR puts everything below DIR and starts nothing: for building an image.
# --python must be where the service will find it (3.10 or newer, with venv). A pip of your own setting (PIP_INDEX_URL,
# PIP_CONSTRAINT, PIP_CONFIG_FILE) is used.
#
# RHEL and its like have an older python3: dnf install python3.12, then --python /usr/bin/python3.12. Nobody has tried
# it under SELinux; begin with restorecon -R /opt/scheduled-events-bridge, and restart.
#
# What it makes, all of it below DIR:
#   /opt/scheduled-events-bridge/venvs/TIME      the program; the one before is kept
#   /opt/scheduled-events-bridge/venv            a link to the one that counts, changed at once and last
#   /usr/local/bin/scheduled-events-bridge       a link to the command
#   /etc/scheduled-events-bridge/config.toml     only if there is none, or with --config
#   /etc/sysusers.d, /etc/systemd/system         the user and the unit; drop-ins are left alone
# A version that refuses the configuration that is there is not installed: the old one goes on.
#
# Back to the one before:
#   cd /opt/scheduled-events-bridge && ln -sfn venvs/TIME venv && systemctl restart scheduled-events-bridge
# Uninstall (the last two lines take the configuration and what was not delivered yet):
#   systemctl disable --now scheduled-events-bridge
#   rm -r /opt/scheduled-events-bridge /usr/local/bin/scheduled-events-bridge \
#     /etc/systemd/system/scheduled-events-bridge.service /etc/sysusers.d/scheduled-events-bridge.conf
#   systemctl daemon-reload && userdel scheduled-events-bridge
#   rm -r /etc/scheduled-events-bridge /etc/systemd/system/scheduled-events-bridge.service.d
#   rm -r /var/lib/scheduled-events-bridge
set -eu
umask 022

name=scheduled-events-bridge
here=$(cd "$(dirname "$0")" && pwd)

fail() {
  printf 'install.sh: %s\n' "$2" >&2
  exit "$1"
}

root='' python=python3 extras='' source='' given='' start=yes
while [ $# -gt 0 ]; do
  case $1 in
    --root | --python | --extras | --config)
      [ $# -gt 1 ] || fail 2 "$1 needs a value."
      case $1 in --root) root=${2%/} ;; --python) python=$2 ;; --extras) extras=$2 ;; --config) given=$2 ;; esac
      shift
      ;;
    --no-start) start=no ;;
    -*) fail 2 "There is no option $1; there are --config, --no-start, --root, --python and --extras." ;;
    *) [ -z "$source" ] || fail 2 "One wheel or checkout, not also $1."; source=$1 ;;
  esac
  shift
done
[ -n "$source" ] || fail 2 'Name the wheel or the checkout to install.'
case $source in
  *.whl) [ -f "$source" ] || fail 2 "$source is no file." ;;
  *) [ -f "$source/pyproject.toml" ] || fail 2 "$source is neither a wheel nor a checkout." ;;
esac
source=$(cd "$(dirname "$source")" && pwd)/$(basename "$source")
[ -z "$given" ] || [ -f "$given" ] || fail 2 "$given is no file."
if [ -n "$root" ]; then
  mkdir -p "$root"
  root=$(cd "$root" && pwd)
elif [ "$(id -u)" -ne 0 ]; then
  fail 1 'Only root can install the service; --root DIR needs no root.'
fi
"$python" -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 10))' ||
  fail 1 "$python is no Python of 3.10 or newer with venv. Install one (Debian, Ubuntu: apt-get install python3-venv;
RHEL: dnf install python3.12), and name it if it is not python3: --python."
"$python" -c 'import sys; sys.exit(sys.version_info >= (3, 14))' ||
  printf 'The agent has not been tested on a Python beyond 3.13. It may well work.\n' >&2

# A venv knows its own path, so each version has a path of its own, and the one that runs keeps its files.
opt=/opt/$name
new=$opt/venvs/$(date -u +%Y%m%dT%H%M%SZ)-$$
trap 'rm -rf "$root$new"' EXIT
mkdir -p "$root$opt/venvs"
"$python" -m venv "$root$new"
# With .pyc, which the service could not write: without them it starts later and takes more memory.
export PIP_NO_CACHE_DIR="${PIP_NO_CACHE_DIR:-1}"
"$root$new/bin/python" -m pip install --quiet --no-input --disable-pip-version-check --compile \
  "$source${extras:+[$extras]}"
if [ -n "$root" ]; then # what was built below DIR runs without it
  grep -rlIF --exclude='*.py' "$root$new" "$root$new/bin" "$root$new/pyvenv.cfg" | while IFS= read -r file; do
    sed -i "s|$root$new|$new|g" "$file"
  done
fi

# 0755, as the unit's ConfigurationDirectory= has it; what is secret in there gets a mode of its own.
config=$root/etc/$name/config.toml
mkdir -p "${config%/*}"
wanted=$config
[ -e "$config" ] || wanted="$here/config.toml"
wanted=${given:-$wanted}
# 78 is what `run` would end with; it lives with anything less, such as a secret that the image does not hold yet.
status=0
"$root$new/bin/python" -I "$root$new/bin/$name" check-config --config "$wanted" >&2 || status=$?
[ "$status" -ne 78 ] || fail 1 "This version refuses $wanted. Nothing was changed: mend the file and install again."
cmp -s "$wanted" "$config" || install -m 0644 "$wanted" "$config"

mkdir -p "$root/etc/sysusers.d" "$root/etc/systemd/system" "$root/usr/local/bin"
install -m 0644 "$here/$name.sysusers.conf" "$root/etc/sysusers.d/$name.conf"
install -m 0644 "$here/$name.service" "$root/etc/systemd/system/$name.service"
if [ "$(id -u)" -eq 0 ]; then # below a DIR of somebody else's, the image's own boot makes the user
  systemd-sysusers ${root:+"--root=$root"} "$name.conf"
fi

old=$(readlink "$root$opt/venv" || true)
ln -sfn "venvs/${new##*/}" "$root$opt/venv.new"
mv -fT "$root$opt/venv.new" "$root$opt/venv"
trap - EXIT
ln -sfn "$opt/venv/bin/$name" "$root/usr/local/bin/$name"
for venv in "$root$opt"/venvs/*; do
  case venvs/${venv##*/} in "$old" | "venvs/${new##*/}") ;; *) rm -rf "$venv" ;; esac
done

if [ -n "$root" ]; then
  systemctl --root="$root" --quiet enable "$name.service"
elif [ -d /run/systemd/system ]; then
  systemctl daemon-reload
  systemctl --quiet enable "$name.service"
  if [ "$start" = yes ]; then
    systemctl restart "$name.service"
  else
    printf 'It is not started: systemctl restart %s\n' "$name"
  fi
else
  printf 'systemd does not run here: enable and start %s.service yourself\n' "$name"
fi
printf 'Installed %s\n' "$("$root$new/bin/python" -I "$root$new/bin/$name" --version)"
if [ -n "$old" ] && [ "$old" != "venvs/${new##*/}" ]; then
  printf 'Back to the one before: ln -sfn %s %s/venv && systemctl restart %s\n' "$old" "$opt" "$name"
fi
