#!/bin/sh
# Installs or upgrades the agent as a systemd service, or takes it away. Run it again as often as you like.
#
#   install.sh [OPTIONS]                   from the archive that this file came in: no index, every file by its hash
#   install.sh [OPTIONS] WHEEL|CHECKOUT    with the libraries of this day from an index, by pip's own settings
#   install.sh --uninstall [--purge] [--root DIR]
#
#   --config FILE      use this configuration; it replaces the one that is there
#   --extras A,B       apprise, template, websocket; remembered at an upgrade, and `--extras none` forgets them
#   --no-start         start and restart nothing: the user, the configuration and the unit are there for your secrets
#   --wait SECONDS     how long it may take until /readyz says ready (180; the first poll alone may take 150)
#   --python PYTHON    where the service will find it: 3.10 or newer (the first that fits of python3, python3.13 ...)
#   --root DIR         put everything below DIR and start nothing: for building an image
#   --uninstall        take the program, the unit and the command away; the configuration and the state stay
#   --purge            with it: the configuration, the state (what was not delivered too), drop-ins and the user
#
# A VM is never left worse than before. The new version is tried as the service's user before anything is changed: every
# library is loaded, and the configuration is checked. If then the service does not start, or /readyz does not say ready
# in time, the version, unit and configuration of before are put back and started, and the exit code is 1.
#
# Secrets before the first start: --no-start, then the secrets (the group is there now), then systemctl start.
# A service that was disabled stays so, and is restarted only if it runs; a masked one is left alone.
#
# What it makes, all of it below DIR:
#   /opt/scheduled-events-bridge/venvs/TIME      the program; the one before is kept
#   /opt/scheduled-events-bridge/venv            a link to the one that counts, changed at once and last
#   /usr/local/bin/scheduled-events-bridge       a link to the command; its manual and completions in /usr/local/share
#   /etc/scheduled-events-bridge/config.toml     only if there is none, or with --config
#   /etc/sysusers.d, /etc/systemd/system         the user and the unit, from systemd 254 on with a drop-in,
#                                                10-restart-steps.conf; other drop-ins are left alone
#   /var/lib/scheduled-events-bridge             the state, made by the service
#
# Back to the version before, later:
#   cd /opt/scheduled-events-bridge && ln -sfn venvs/TIME venv && systemctl restart scheduled-events-bridge
#
# RHEL 8 and 9 have an older python3: dnf install python3.12. Nobody has tried it under SELinux; begin with restorecon
# -R /opt/scheduled-events-bridge, and restart.
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

# ---- what is asked for ----------------------------------------------------------------------------------------------

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
    --no-start) start=no ;;
    --uninstall) do=uninstall ;;
    --purge) purge=yes ;;
    -*) fail 2 "There is no option $1; there are --config, --extras, --no-start, --wait, --python, --root, --uninstall and --purge." ;;
    *) [ -z "$source" ] || fail 2 "One wheel or checkout, not also $1."; source=$1 ;;
  esac
  shift
done
case $wait in '' | *[!0-9]*) fail 2 "--wait needs whole seconds, not $wait." ;; esac
if [ "$do" = uninstall ]; then
  [ -z "$source$given" ] || fail 2 '--uninstall takes --purge and --root alone.'
else
  [ "$purge" = no ] || fail 2 '--purge goes with --uninstall.'
  case $source in
    '') [ -f "$here/built-for" ] || fail 2 'Name the wheel or the checkout to install: this is no unpacked archive.' ;;
    *.whl) [ -f "$source" ] || fail 2 "$source is no file." ;;
    *) [ -f "$source/pyproject.toml" ] || fail 2 "$source is neither a wheel nor a checkout." ;;
  esac
  [ -z "$source" ] || source=$(cd "$(dirname "$source")" && pwd)/$(basename "$source")
  [ -z "$given" ] || [ -f "$given" ] || fail 2 "$given is no file."
fi
if [ -n "$root" ]; then
  mkdir -p "$root"
  root=$(cd "$root" && pwd)
elif [ "$(id -u)" -ne 0 ]; then
  fail 1 'Only root can install the service; --root DIR needs no root.'
fi

opt=/opt/$name
etc=$root/etc/$name
config=$etc/config.toml
unit=$root/etc/systemd/system/$name.service
steps=$unit.d/10-restart-steps.conf
sysusers=$root/etc/sysusers.d/$name.conf
command=$root/usr/local/bin/$name
state=$root/var/lib/$name
# The manual and what completes the command in a shell. A package of the distribution has its own, and a command.
shared="man/man1/$name.1 bash-completion/completions/$name zsh/site-functions/_$name fish/vendor_completions.d/$name.fish"

# ---- take it away ---------------------------------------------------------------------------------------------------

is_mask() { [ "$(readlink "$1" || true)" = /dev/null ]; } # what systemctl mask puts in a unit's place

remove_shared() { # the command and what belongs to it in /usr/local
  rm -f "$command"
  for file in $shared; do
    rm -f "$root/usr/local/share/$file"
    case $file in
      man/*) ;; # the system's own directories
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
    # The state may be a disk of its own: that is emptied, and stays mounted.
    if [ -d "$state" ]; then
      find "$state" -mindepth 1 -delete
      rmdir "$state" 2>/dev/null || say "$state is empty, and stays: something is mounted there"
    fi
    if grep -qs "^$name:" "$root/etc/passwd"; then
      userdel ${root:+--prefix "$root"} "$name" 2>/dev/null || fail 1 "The user $name cannot be deleted: does a program still run as it?"
    fi
  fi
  if has_systemd; then
    systemctl daemon-reload
    systemctl reset-failed "$name.service" 2>/dev/null || true
  fi
  if [ "$purge" = yes ]; then
    say 'Removed, with its configuration, its state and its user'
  else
    say "Removed. ${etc#"$root"} and ${state#"$root"} are kept, and the user $name; --purge takes them too"
  fi
}

if [ "$do" = uninstall ]; then
  uninstall
  exit
fi

# ---- the interpreter ------------------------------------------------------------------------------------------------

package='' machine='' pythons='' # what the archive says of itself; a package is deb or rpm
if [ -z "$source" ]; then
  # shellcheck source=/dev/null # written by deploy/artifact/build.py
  . "$here/built-for"
fi

fits() { # whether $1 is a Python of 3.10 or newer that makes venvs
  "$1" -c 'import sys, venv; sys.exit(sys.version_info < (3, 10))' 2>/dev/null
}

has_libraries() { # whether the archive has them for the Python $1; an index has them for each
  [ -n "$source" ] || case " $pythons " in *" $(minor_of "$1") "*) ;; *) return 1 ;; esac
}

minor_of() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])'; }

if [ -z "$python" ]; then
  python=python3
  for candidate in python3 python3.13 python3.12 python3.11 python3.10; do
    if fits "$candidate" && has_libraries "$candidate"; then
      python=$candidate
      break
    fi
  done
fi
advice='Install one (Debian, Ubuntu: apt-get install python3; RHEL: dnf install python3.12), and name it if it is not
python3: --python.'
fits "$python" || fail 1 "$python is no Python of 3.10 or newer with venv. $advice"
[ -z "$source" ] || "$python" -c 'import ensurepip' 2>/dev/null ||
  fail 1 "$python has no pip to put into a venv (Debian, Ubuntu: apt-get install python3-venv). The archive needs none."
# The unit hides these places from the service, so a Python that lives there would start here and not there.
hidden=$("$python" -c '
import os, sys, sysconfig
for path in (getattr(sys, "_base_executable", sys.executable), sys.base_prefix, sysconfig.get_path("stdlib")):
    path = os.path.realpath(path)
    if path.startswith(("/root/", "/home/", "/run/user/", "/tmp/", "/var/tmp/")):
        print(path)
        break
')
[ -z "$hidden" ] || fail 1 "$python lies in $hidden, which the service cannot see: its sandbox hides /root, /home, /run/user
and /tmp. $advice"
if [ -z "$source" ]; then
  [ "$machine" = "$(uname -m)" ] || fail 1 "This archive is for $machine, and this machine is $(uname -m): take the other one."
  has_libraries "$python" ||
    fail 1 "$python is Python $(minor_of "$python"), and this archive has libraries for $pythons. $advice"
else
  "$python" -c 'import sys; sys.exit(sys.version_info >= (3, 14))' ||
    say 'The agent has not been tested on a Python beyond 3.13. It may well work.' >&2
fi

# ---- the new version, beside the one that runs ----------------------------------------------------------------------

# A venv knows its own path, so each version has a path of its own, and the one that runs keeps its files.
new=$opt/venvs/$(date -u +%Y%m%dT%H%M%SZ)-$$
before=$root$opt/before-$$ # what is put back when the new version does not work
in_place=no
mkdir -p "$root$opt/venvs"
old=$(readlink "$root$opt/venv" || true)

put_back() { # what was there before: version, configuration, unit
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

undo() { # whatever ended this early
  trap '' HUP INT TERM
  if [ "$in_place" = yes ]; then
    put_back
    ! has_systemd || systemctl daemon-reload
    if [ -z "$old" ]; then
      ! has_systemd || systemctl reset-failed "$name.service" 2>/dev/null || true
      say 'install.sh: There was no version before, and nothing of this one runs.' >&2
    elif ! has_systemd || [ "$start" = no ] || systemctl restart "$name.service"; then
      say "install.sh: The version before was put back, with its unit and its configuration: $old" >&2
    else
      say "install.sh: The version before was put back, and does not start either: $old" >&2
    fi
  fi
  rm -rf "$root$new" "$before" "$config.new"
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
    [ -f "$here/requirements-$extra.txt" ] || fail 1 "The extra $extra is not here. There are apprise, template and websocket;
apprise and websocket come in the archive $name-extras: unpack it over $here."
    set -- "$@" --requirement "$here/requirements-$extra.txt"
  done
  "$python" -m venv --without-pip "$root$new" || return 1
  # pip runs from its wheel and is never installed. No setting of this machine reaches it. With .pyc, which the service
  # could not write: without them it starts later and takes more memory.
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
  # What a run never needs.
  "$root$new/bin/python" -m pip --disable-pip-version-check uninstall --quiet --yes setuptools pip
}

if [ -z "$source" ]; then into_the_tree=from_the_archive; else into_the_tree=from_an_index; fi
( "$into_the_tree" ) || fail 1 'The new version cannot be installed. Nothing was changed.'
printf '%s\n' "$extras" >"$root$new/extras"
if [ -n "$root" ]; then # what was built below DIR runs without it
  grep -rlIF --exclude='*.py' "$root$new" "$root$new/bin" "$root$new/pyvenv.cfg" | while IFS= read -r file; do
    sed -i "s|$root$new|$new|g" "$file"
  done
fi

# ---- tried as the service's user, before anything is changed --------------------------------------------------------

mkdir -p "${sysusers%/*}" "${unit%/*}" "${command%/*}"
user=''
if [ "$(id -u)" -eq 0 ]; then # below a DIR of somebody else's, the image's own boot makes the user
  systemd-sysusers ${root:+"--root=$root"} - <"$here/$name.sysusers.conf"
  user=$name
fi
if has_systemd && [ -e "$unit" ]; then # a drop-in may have given it another user
  user=$(systemctl show --property User --value "$name.service" 2>/dev/null || true)
  user=${user:-$name}
fi

as_the_service() { # the new version's Python, with what the service has of its environment
  if [ -n "$user" ] && [ -z "$root" ]; then
    runuser -u "$user" -- env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin "STATE_DIRECTORY=$state" "$root$new/bin/python" -I "$@"
  else
    "$root$new/bin/python" -I "$@"
  fi
}

as_the_service - imports "$extras" <"$here/try_tree.py" >&2 ||
  fail 1 "The new version cannot be run${user:+ by the user $user}. Nothing was changed."

# 0755, as the unit's ConfigurationDirectory= has it; what is secret in there gets a mode of its own.
mkdir -p "$etc"
wanted=$config
if [ -n "$given" ] || [ ! -e "$config" ]; then
  install -m 0644 "${given:-$here/config.toml}" "$config.new"
  wanted=$config.new
fi
# 78 is what `run` would end with; it lives with 1, such as a secret that the image does not hold yet.
status=0
as_the_service "$root$new/bin/$name" check-config --config "$wanted" >&2 || status=$?
case $status in
  0 | 1) ;;
  *) fail 1 "This version refuses ${given:-$config}. Nothing was changed: mend the file and install again." ;;
esac

# ---- put into place -------------------------------------------------------------------------------------------------

keep() { # a copy of file $1, to put back
  is_mask "$1" || [ ! -e "$1" ] || cp -p "$1" "$before/${1##*/}"
}

# What somebody switched off stays off, as after an upgrade of any package.
enable=yes
if is_mask "$unit"; then
  enable=no start=no
elif has_systemd && [ -n "$old" ] && [ -e "$unit" ] && ! systemctl --quiet is-enabled "$name.service" 2>/dev/null; then
  enable=no
  systemctl --quiet is-active "$name.service" || start=no
fi

mkdir -p "$before"
for file in "$config" "$unit" "$steps" "$sysusers"; do keep "$file"; done
in_place=yes
[ "$wanted" = "$config" ] || cmp -s "$wanted" "$config" || install -m 0644 "$wanted" "$config"
install -m 0644 "$here/$name.sysusers.conf" "$sysusers"
is_mask "$unit" || install -m 0644 "$here/$name.service" "$unit"
systemd=$(systemctl --version 2>/dev/null | sed -n '1s/^systemd \([0-9]*\).*/\1/p')
if [ "${systemd:-0}" -ge 254 ]; then # an older one complains at each reload that it does not know these keys
  mkdir -p "$unit.d"
  cat >"$steps" <<X
# install.sh writes this anew; a drop-in whose name comes later counts more. An agent that ends again and again, as with a
# wrong configuration, is started after 5 s, then later and later, up to 15 s: an eviction is announced 30 s before.
[Service]
RestartSteps=5
RestartMaxDelaySec=15
X
fi
ln -sfn "venvs/${new##*/}" "$root$opt/venv.new"
mv -fT "$root$opt/venv.new" "$root$opt/venv"
[ -n "$package" ] || ln -sfn "$opt/venv/bin/$name" "$command"

# ---- started, and believed only when it says that it is ready -------------------------------------------------------

go_back() { # because $1; undo does it
  journalctl --unit "$name.service" --lines 5 --no-pager --output cat >&2 2>/dev/null || true
  fail 1 "$1"
}

status=0 reasons=''
if [ -n "$root" ]; then
  systemctl --root="$root" --quiet enable "$name.service"
elif [ ! -d /run/systemd/system ]; then
  if [ "$enable" = yes ] && systemctl --root=/ --quiet enable "$name.service" 2>/dev/null; then
    say 'systemd does not run here: the agent starts when this system boots'
  else
    say "systemd does not run here: enable and start $name.service yourself"
  fi
else
  systemctl daemon-reload
  [ "$enable" = no ] || systemctl --quiet enable "$name.service"
  if is_mask "$unit"; then
    say "It is masked, and not started. After systemctl unmask $name install it again"
  elif [ "$start" = no ]; then
    say "It is not started: systemctl restart $name"
  else
    systemctl restart "$name.service" || go_back 'The new version does not start.'
    reasons=$("$root$new/bin/python" -I - ready "$wait" <"$here/try_tree.py" 2>&1) || status=$?
    if [ "$status" -ne 0 ] && [ -n "$old" ]; then
      go_back "The new version is not ready after $wait s: $reasons"
    elif [ "$status" -ne 0 ]; then
      systemctl is-active --quiet "$name.service" || go_back "The new version does not go on running: $reasons"
    fi
  fi
fi
in_place=no
trap - EXIT
rm -rf "$before" "$config.new"
if [ -n "$package" ]; then
  remove_shared # of an archive that was installed before
elif [ -z "$source" ]; then
  for file in $shared; do
    install -D -m 0644 "$here/share/$file" "$root/usr/local/share/$file" || true # the agent does without
  done
fi
for venv in "$root$opt"/venvs/*; do
  case venvs/${venv##*/} in "$old" | "venvs/${new##*/}") ;; *) rm -rf "$venv" ;; esac
done

say "Installed $("$root$new/bin/python" -I "$root$new/bin/$name" --version)"
if [ -n "$old" ] && [ "$old" != "venvs/${new##*/}" ]; then
  say "Back to the one before: ln -sfn $old $opt/venv && systemctl restart $name"
fi
[ "$status" -eq 0 ] || [ -z "$package" ] || say "It runs, and is not ready after $wait s: $reasons"
[ "$status" -eq 0 ] || [ -n "$package" ] || fail 1 "It runs, and is not ready after $wait s: $reasons"
