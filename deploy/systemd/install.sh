#!/bin/sh
# Install, upgrade, or remove the agent as a systemd service. You can run this script again at any time.
#
#   install.sh [OPTIONS]                   install from the unpacked archive, without a package index; checks hashes
#   install.sh [OPTIONS] WHEEL|CHECKOUT    install with the current libraries of a package index (pip's settings apply)
#   install.sh --uninstall [--purge] [--root DIR]
#
#   --config FILE      install this configuration, and replace an existing one
#   --extras A,B       the extras: apprise, template, websocket, or none. An upgrade without this option keeps them
#   --no-start         do not start or restart the service, for example to install secrets first
#   --wait SECONDS     the time until /readyz must report ready (180; the first poll alone may take 150)
#   --python PYTHON    the Python of the service, 3.10 or newer (default: the first match of python3, python3.14 ...)
#   --root DIR         install below DIR and start nothing, to build an image
#   --uninstall        remove the program, the unit, and the command; keep the configuration and the state
#   --purge            with --uninstall: also remove the configuration, the state (with undelivered records), drop-ins,
#                      and the user
#
# Before the script changes the service, the service's user loads every library of the new version and checks the
# configuration. If the service then does not start, or if /readyz does not report ready in time, the script restores the
# previous version, with the unit and config.toml from before this run. It then starts this version and exits with 1. The
# script ignores a problem that /readyz reported before the upgrade, such as a sink whose destination is down.
#
# To install secrets before the first start, use --no-start (this creates the group), install the secrets, and run
# systemctl start. A disabled service stays disabled, and the script restarts it only if it is running. The script does not
# change or start the unit of a masked service.
#
# Files, all below DIR:
#   /opt/scheduled-events-bridge/venvs/TIME      the program; the previous version is kept
#   /opt/scheduled-events-bridge/venv            a link to the current version, changed last
#   /usr/local/bin/scheduled-events-bridge       a link to the command; the manual page and the completions are in
#                                                /usr/local/share. A package installs them in /usr
#   /etc/scheduled-events-bridge/config.toml     written only if it does not exist, or with --config
#   /etc/sysusers.d, /etc/systemd/system         the user and the unit; from systemd 254 on also the drop-in
#                                                10-restart-steps.conf. Other drop-ins are not changed
#   /var/lib/scheduled-events-bridge             the state directory
#
# To return to the previous version later:
#   cd /opt/scheduled-events-bridge && ln -sfn venvs/TIME venv && systemctl restart scheduled-events-bridge
#
# RHEL 8 and 9 have an older python3: run dnf install python3.12. The script is not tested under SELinux. If SELinux
# denies access, run restorecon -R /opt/scheduled-events-bridge and restart.
set -eu
umask 022

name=scheduled-events-bridge
here=$(cd "$(dirname "$0")" && pwd)

say() { printf '%s\n' "$*"; }

fail() {
  printf 'install.sh: %s\n' "$2" >&2
  exit "$1"
}

has_systemd() { [ -z "$root" ] && [ -d /run/systemd/system ]; }

# ---- options --------------------------------------------------------------------------------------------------------

root='' python='' extras=remembered source='' given='' start=yes wait=180 do=install purge=no
while [ $# -gt 0 ]; do
  case $1 in
    --root | --python | --extras | --config | --wait)
      [ $# -gt 1 ] || fail 2 "$1 needs a value."
      case $1 in
        --root) root=${2%/} ;; --python) python=$2 ;; --extras) extras=$2 ;; --config) given=$2 ;; --wait) wait=$2 ;;
      esac
      shift
      ;;
    -h | --help)
      sed -n '2,/^set -eu/{/^#/s/^# \{0,1\}//p;}' "$0"
      exit
      ;;
    --no-start) start=no ;;
    --uninstall) do=uninstall ;;
    --purge) purge=yes ;;
    -*) fail 2 "Unknown option $1. See --help." ;;
    *) [ -z "$source" ] || fail 2 "Name only one wheel or checkout: $source or $1."; source=$1 ;;
  esac
  shift
done
case $wait in '' | *[!0-9]*) fail 2 "--wait needs whole seconds, not $wait." ;; esac
if [ "$do" = uninstall ]; then
  [ -z "$source$given" ] || fail 2 '--uninstall accepts only --purge and --root.'
else
  [ "$purge" = no ] || fail 2 '--purge requires --uninstall.'
  case $source in
    '') [ -f "$here/built-for" ] || fail 2 'Name the wheel or checkout to install: this script is not in an unpacked archive.' ;;
    *.whl) [ -f "$source" ] || fail 2 "The file $source does not exist." ;;
    *) [ -f "$source/pyproject.toml" ] || fail 2 "$source is neither a wheel nor a checkout." ;;
  esac
  [ -z "$source" ] || source=$(cd "$(dirname "$source")" && pwd)/$(basename "$source")
  [ -z "$given" ] || [ -f "$given" ] || fail 2 "The file $given does not exist."
fi
if [ -n "$root" ]; then
  mkdir -p "$root"
  root=$(cd "$root" && pwd)
elif [ "$(id -u)" -ne 0 ]; then
  fail 1 'Only root can install the service. --root DIR works for every user.'
fi

opt=/opt/$name
etc=$root/etc/$name
config=$etc/config.toml
unit=$root/etc/systemd/system/$name.service
steps=$unit.d/10-restart-steps.conf
sysusers=$root/etc/sysusers.d/$name.conf
command=$root/usr/local/bin/$name
state=$root/var/lib/$name
# The manual page and the shell completions. A .deb or .rpm installs them and the command itself.
shared="man/man1/$name.1 bash-completion/completions/$name zsh/site-functions/_$name fish/vendor_completions.d/$name.fish"

# ---- uninstall ------------------------------------------------------------------------------------------------------

is_mask() { [ "$(readlink "$1" || true)" = /dev/null ]; } # a masked unit is a link to /dev/null

remove_shared() { # the command, its manual page, and completions
  rm -f "$command"
  for file in $shared; do
    rm -f "$root/usr/local/share/$file"
    case $file in
      man/*) ;; # directories of the system
      *) (cd "$root/usr/local/share" && rmdir -p --ignore-fail-on-non-empty "${file%/*}") 2>/dev/null || true ;;
    esac
  done
}

uninstall() {
  if has_systemd; then
    systemctl --quiet disable --now "$name.service" 2>/dev/null || systemctl stop "$name.service" 2>/dev/null || true
  fi
  remove_shared
  is_mask "$unit" || rm -f "$unit"
  rm -rf "$root$opt" "$sysusers" "$steps" "$root/etc/systemd/system/multi-user.target.wants/$name.service"
  rmdir "$unit.d" 2>/dev/null || true
  rmdir "${sysusers%/*}" 2>/dev/null || true # not every system has it
  if [ "$purge" = yes ]; then
    rm -rf "$etc" "$unit" "$unit.d" "$root/run/$name"
    # The directory may be a mount point. It is emptied and stays mounted.
    if [ -d "$state" ]; then
      find "$state" -mindepth 1 -delete
      rmdir "$state" 2>/dev/null || say "$state is empty and was kept, because a disk is mounted there"
    fi
    if grep -qs "^$name:" "$root/etc/passwd"; then
      userdel ${root:+--prefix "$root"} "$name" 2>/dev/null || fail 1 "The user $name cannot be deleted. Stop its programs and try again."
    fi
  fi
  if has_systemd; then
    systemctl daemon-reload
    systemctl reset-failed "$name.service" 2>/dev/null || true
  fi
  if [ "$purge" = yes ]; then
    say "Removed with ${etc#"$root"}, ${state#"$root"}, and the user $name. A state.directory elsewhere was kept."
  else
    say "Removed. ${etc#"$root"}, ${state#"$root"}, and the user $name were kept. --purge removes them."
  fi
}

if [ "$do" = uninstall ]; then
  uninstall
  exit
fi

# ---- the interpreter ------------------------------------------------------------------------------------------------

package='' machine='' pythons='' # set by built-for; package is deb or rpm
if [ -z "$source" ]; then
  # shellcheck source=/dev/null # written by deploy/artifact/build.py
  . "$here/built-for"
fi

fits() { # whether $1 is Python 3.10 or newer and has venv
  "$1" -c 'import sys, venv; sys.exit(sys.version_info < (3, 10))' 2>/dev/null
}

has_libraries() { # whether the archive has libraries for the Python $1
  [ -n "$source" ] || case " $pythons " in *" $(minor_of "$1") "*) ;; *) return 1 ;; esac
}

minor_of() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])'; }

if [ -z "$python" ]; then
  python=python3
  for candidate in python3 python3.14 python3.13 python3.12 python3.11 python3.10; do
    if fits "$candidate" && has_libraries "$candidate"; then
      python=$candidate
      break
    fi
  done
fi
advice='Install one (Debian, Ubuntu: apt-get install python3; RHEL: dnf install python3.12). If it is not python3, name it
with --python.'
fits "$python" || fail 1 "$python is not Python 3.10 or newer with venv. $advice"
[ -z "$source" ] || "$python" -c 'import ensurepip' 2>/dev/null ||
  fail 1 "$python cannot create a venv with pip (Debian, Ubuntu: apt-get install python3-venv)."
# The sandbox of the unit hides these directories, so a Python in one of them works here but not in the service.
hidden=$("$python" -c '
import os, sys, sysconfig
for path in (getattr(sys, "_base_executable", sys.executable), sys.base_prefix, sysconfig.get_path("stdlib")):
    path = os.path.realpath(path)
    if path.startswith(("/root/", "/home/", "/run/user/", "/tmp/", "/var/tmp/")):
        print(path)
        break
')
[ -z "$hidden" ] || fail 1 "$python is in $hidden, which the service cannot read: its sandbox hides /root, /home,
/run/user, and /tmp. $advice"
if [ -z "$source" ]; then
  [ "$machine" = "$(uname -m)" ] || fail 1 "This archive is for $machine, but this machine is $(uname -m)."
  has_libraries "$python" ||
    fail 1 "$python is Python $(minor_of "$python"), but this archive has libraries for $pythons. $advice"
else
  "$python" -c 'import sys; sys.exit(sys.version_info >= (3, 15))' ||
    say 'The agent is tested with Python 3.10 to 3.14 only.' >&2
fi

# ---- the new version, next to the running one -----------------------------------------------------------------------

# A venv contains its own path. Each version therefore has a separate path, and the running version keeps its files.
new=$opt/venvs/$(date -u +%Y%m%dT%H%M%SZ)-$$
before=$root$opt/before-$$ # the backup that put_back restores
in_place=no
made_state=no
made_config=no
mkdir -p "$root$opt/venvs"
old=$(readlink "$root$opt/venv" || true)

put_back() { # restore the previous version, configuration, and unit
  for file in "$config" "$unit" "$steps" "$sysusers"; do
    if is_mask "$file"; then
      continue
    elif [ -e "$before/${file##*/}" ]; then
      cp -p "$before/${file##*/}" "$file"
    else
      rm -f "$file"
    fi
  done
  rmdir "$unit.d" 2>/dev/null || true
  if [ -n "$old" ]; then
    ln -sfn "$old" "$root$opt/venv.new"
    mv -fT "$root$opt/venv.new" "$root$opt/venv"
  else
    ! has_systemd || systemctl --quiet disable --now "$name.service" 2>/dev/null || true
    rm -f "$root$opt/venv" "$command"
  fi
}

undo() { # runs if the script ends early
  trap '' HUP INT TERM
  if [ "$in_place" = yes ]; then
    put_back
    ! has_systemd || systemctl daemon-reload
    if [ -z "$old" ]; then
      ! has_systemd || systemctl reset-failed "$name.service" 2>/dev/null || true
      say 'install.sh: The installation failed. Nothing of this version is running.' >&2
    elif ! has_systemd || [ "$start" = no ] || systemctl restart "$name.service"; then
      say "install.sh: The previous version was restored, with the unit and config.toml from before this run: $old. Run $name status" >&2
    else
      say "install.sh: The previous version was restored, but it does not start either: $old" >&2
    fi
  fi
  rm -rf "$root$new" "$before" "$config.new"
  [ "$made_config" = no ] || rm -f "$config"
  [ "$made_state" = no ] || rmdir "$state" 2>/dev/null || true
}
trap undo EXIT
trap 'exit 1' HUP INT TERM

if [ "$extras" = remembered ]; then
  extras=$(cat "$root$opt/venv/extras" 2>/dev/null || true)
elif [ "$extras" = none ]; then
  extras=''
fi

from_the_archive() {
  set -- --requirement "$here/requirements.txt"
  for extra in $(printf '%s' "$extras" | tr , ' '); do
    [ -f "$here/requirements-$extra.txt" ] || fail 1 "The extra $extra is not in $here. The extras are apprise, template, and
websocket. For apprise and websocket, unpack the archive $name-extras over $here."
    set -- "$@" --requirement "$here/requirements-$extra.txt"
  done
  "$python" -m venv --without-pip "$root$new" || return 1
  # pip runs from its wheel, is not installed, and ignores the settings of this machine. The service cannot write .pyc
  # files, and without them it starts later and uses more memory.
  for pip in "$here"/pip/pip-*.whl; do :; done
  PIP_CONFIG_FILE=/dev/null "$root$new/bin/python" -I "$pip/pip" --isolated install --quiet --no-input \
    --no-cache-dir --disable-pip-version-check --compile --no-deps --no-index --find-links "$here/wheels" \
    --only-binary :all: --require-hashes "$@"
}

from_an_index() {
  "$python" -m venv "$root$new" || return 1
  export PIP_NO_CACHE_DIR="${PIP_NO_CACHE_DIR:-1}"
  "$root$new/bin/python" -m pip install --quiet --no-input --disable-pip-version-check --compile \
    "$source${extras:+[$extras]}" || return 1
  # The service does not need these packages.
  "$root$new/bin/python" -m pip --disable-pip-version-check uninstall --quiet --yes setuptools pip
}

if [ -z "$source" ]; then into_the_tree=from_the_archive; else into_the_tree=from_an_index; fi
( "$into_the_tree" ) || fail 1 'The new version cannot be installed. The service was not changed.'
printf '%s\n' "$extras" >"$root$new/extras"
if [ -n "$root" ]; then # remove DIR from the paths in the scripts
  grep -rlIF --exclude='*.py' "$root$new" "$root$new/bin" "$root$new/pyvenv.cfg" | while IFS= read -r file; do
    sed -i "s|$root$new|$new|g" "$file"
  done
fi

# ---- a test as the service's user, before anything is changed -------------------------------------------------------

mkdir -p "${sysusers%/*}" "${unit%/*}" "${command%/*}"
user=''
if [ "$(id -u)" -eq 0 ]; then # without root, the first boot of the image creates the user
  systemd-sysusers ${root:+"--root=$root"} - <"$here/$name.sysusers.conf"
  user=$name
fi
if has_systemd && [ -e "$unit" ]; then # a drop-in may set another user
  user=$(systemctl show --property User --value "$name.service" 2>/dev/null || true)
  user=${user:-$name}
fi

as_the_service() { # run the new version's Python with the environment of the service
  if [ -n "$user" ] && [ -z "$root" ]; then
    runuser -u "$user" -- env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin "STATE_DIRECTORY=$state" \
      ${NO_COLOR:+"NO_COLOR=$NO_COLOR"} "$root$new/bin/python" -I "$@"
  else
    "$root$new/bin/python" -I "$@"
  fi
}

as_the_service - imports "$extras" <"$here/try_tree.py" >&2 ||
  fail 1 "The new version cannot be run${user:+ by the user $user}. The service was not changed."

# 0755, as in the unit's ConfigurationDirectory=. Secrets in the directory have their own modes.
mkdir -p "$etc"
# The unit's StateDirectory= creates it at the start, which is too late for check-config.
if [ -z "$root" ] && [ ! -e "$state" ]; then
  install -d -m 0700 -o "$user" -g "$(id -gn "$user")" "$state"
  made_state=yes
fi
wanted=$config
if [ ! -e "$config" ]; then
  made_config=yes
  install -m 0644 "${given:-$here/config.toml}" "$config"
elif [ -n "$given" ]; then
  wanted=$config.new
  install -m 0644 "$given" "$wanted"
fi
# `run` would exit with 78. It works despite 1, for example if a secret is not installed yet.
status=0
as_the_service "$root$new/bin/$name" check-config --config "$wanted" >&2 || status=$?
case $status in
  0 | 1) ;;
  *) fail 1 "This version refuses ${given:-$config}. The service was not changed. Fix the file, and install again (a .deb: dpkg --configure -a)." ;;
esac

# ---- installation ---------------------------------------------------------------------------------------------------

keep() { # back up the file $1
  is_mask "$1" || [ ! -e "$1" ] || cp -p "$1" "$before/${1##*/}"
}

# A disabled service stays disabled, as with any package.
enable=yes
if is_mask "$unit"; then
  enable=no start=no
elif has_systemd && [ -n "$old" ] && [ -e "$unit" ] && ! systemctl --quiet is-enabled "$name.service" 2>/dev/null; then
  enable=no
  systemctl --quiet is-active "$name.service" || start=no
fi

mkdir -p "$before"
[ "$made_config" = yes ] || keep "$config"
for file in "$unit" "$steps" "$sysusers"; do keep "$file"; done
in_place=yes
[ "$wanted" = "$config" ] || cmp -s "$wanted" "$config" || install -m 0644 "$wanted" "$config"
install -m 0644 "$here/$name.sysusers.conf" "$sysusers"
is_mask "$unit" || install -m 0644 "$here/$name.service" "$unit"
systemd=$(systemctl --version 2>/dev/null | sed -n '1s/^systemd \([0-9]*\).*/\1/p')
if [ "${systemd:-0}" -ge 254 ]; then # older versions log a warning about these keys at each reload
  mkdir -p "$unit.d"
  cat >"$steps" <<X
# install.sh overwrites this file. To change it, add a drop-in with a later name. An agent that exits repeatedly, for
# example because of a wrong configuration, starts after 5 s, and later after up to 15 s. An eviction has 30 s notice.
[Service]
RestartSteps=5
RestartMaxDelaySec=15
X
fi
ln -sfn "venvs/${new##*/}" "$root$opt/venv.new"
mv -fT "$root$opt/venv.new" "$root$opt/venv"
[ -n "$package" ] || ln -sfn "$opt/venv/bin/$name" "$command"

# ---- start and readiness --------------------------------------------------------------------------------------------

go_back() { # fail because of $1, so that undo restores the previous version
  journalctl --unit "$name.service" --lines 5 --no-pager --output cat >&2 2>/dev/null || true
  fail 1 "$1"
}

status=0 reasons=''
if [ -n "$root" ]; then
  systemctl --root="$root" --quiet enable "$name.service"
elif [ ! -d /run/systemd/system ]; then
  if [ "$enable" = yes ] && systemctl --root=/ --quiet enable "$name.service" 2>/dev/null; then
    say 'systemd is not running. The agent starts when this system boots.'
  else
    say "systemd is not running. Enable and start $name.service yourself."
  fi
else
  systemctl daemon-reload
  [ "$enable" = no ] || systemctl --quiet enable "$name.service"
  if is_mask "$unit"; then
    say "The service is masked and was not started. Run systemctl unmask $name, and install again (apt-get install --reinstall for a package)."
  elif [ "$start" = no ]; then
    say "The service was not started. To start it, run systemctl restart $name"
  else
    say "Waiting up to $wait s until the service is ready."
    # A destination that is down before the upgrade is still down after it. Only new problems count.
    "$root$new/bin/python" -I - reasons <"$here/try_tree.py" >"$before/reasons" 2>/dev/null || true
    systemctl restart "$name.service" || go_back 'The new version does not start.'
    reasons=$("$root$new/bin/python" -I - ready "$wait" "$before/reasons" <"$here/try_tree.py" 2>&1) || status=$?
    if [ "$status" -ne 0 ] && [ -n "$old" ]; then
      go_back "The new version did not become ready: $reasons"
    elif [ "$status" -ne 0 ]; then
      systemctl is-active --quiet "$name.service" || go_back "The new version does not keep running: $reasons"
    elif [ -n "$old" ] && [ -s "$before/reasons" ]; then
      say "The service was not ready before the upgrade. To see whether it is ready now, run $name status"
    fi
  fi
fi
in_place=no
trap - EXIT
rm -rf "$before" "$config.new"
if [ -n "$package" ]; then
  remove_shared # files of an earlier installation from an archive
elif [ -z "$source" ]; then
  for file in $shared; do
    install -D -m 0644 "$here/share/$file" "$root/usr/local/share/$file" || true # the agent works without these files
  done
fi
for venv in "$root$opt"/venvs/*; do
  case venvs/${venv##*/} in "$old" | "venvs/${new##*/}") ;; *) rm -rf "$venv" ;; esac
done

say "Installed $("$root$new/bin/python" -I "$root$new/bin/$name" --version)"
if [ -n "$old" ] && [ "$old" != "venvs/${new##*/}" ]; then
  say "To return to the previous version: ln -sfn $old $opt/venv && systemctl restart $name"
fi
[ "$status" -eq 0 ] || [ -z "$package" ] || say "The service runs but is not ready after $wait s: $reasons"
[ "$status" -eq 0 ] || [ -n "$package" ] || fail 1 "The service runs but is not ready after $wait s: $reasons"
