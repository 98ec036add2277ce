# Common functions of the drive scripts: facts, requests, and a metadata service. Each fact becomes a line NAME=VALUE in
# /run/results/facts.
# shellcheck shell=bash disable=SC2034

readonly name=scheduled-events-bridge
readonly config=/etc/$name/config.toml link=/opt/$name/venv imds=169.254.169.254

fact() { printf '%s=%s\n' "$1" "$2" >>/run/results/facts; }
status_of() { "$@" >&2; printf '%s\n' "$?"; }
version() { readlink "$link"; }
page() { python3 /run/goods/ask.py "$@"; }
is_ready() { [[ $(page http://127.0.0.1:9464/readyz) == 200 ]]; }
runs() { is_ready && systemctl is-active --quiet "$name" && printf 'yes\n' || printf 'no\n'; }
wait_until_ready() { for _ in {1..100}; do is_ready && break; sleep 0.2; done; }
left() { # print the files and users with the name of the agent, except for the files of this test and of the kernel
  find / \( -path /dev -o -path /proc -o -path /sys -o -path /run/goods -o -path /run/driver -o -path /run/results \) -prune -o \
    -name "*$name*" -print
  grep -hE "^$name:" /etc/passwd /etc/group /etc/shadow /etc/gshadow
}

every_path() { # print every path, except for files that Debian's programs write and the shared directory of manuals
  find / -xdev \( -path /run -o -path /var/log -o -path /var/cache -o -path /var/lib/dpkg -o -path /root/.rpmdb -o \
    -path /var/lib/systemd -o -path /usr/local/share/man/man1 -o -name __pycache__ -o -path '/etc/*-' -o \
    -path /etc/.pwd.lock \) -prune -o -print | sort
}
note_every_path() { every_path >/run/driver/paths; }
more_than_noted() { every_path | comm -13 /run/driver/paths - | tr '\n' ' '; }

hidden_python() { # install a Python interpreter that the service cannot see
  mkdir -p /root/python/bin
  cp "$(readlink -f /usr/bin/python3)" /root/python/bin/python3
}

distributions() { find "$link/" -name '*.dist-info' -printf '%f\n' | sed 's/-[0-9].*//' | sort; }

refused() { # run the command after $1, which must exit with 1 and not change the running version; record the facts $1_*
  local fact=$1 before pid after
  shift
  before=$(version) pid=$(systemctl show "$name" -p MainPID --value)
  fact "${fact}_exit" "$(status_of "$@" 2>/run/driver/said)"
  cat /run/driver/said >&2
  after=$([[ $(version) == "$before" ]] && echo same || echo other)
  fact "${fact}_version" "$after"
  fact "${fact}_runs" "$(runs)"
  fact "${fact}_not_restarted" "$([[ $(systemctl show "$name" -p MainPID --value) == "$pid" ]] && echo yes || echo no)"
  fact "${fact}_said" "$(tr '\n' ' ' </run/driver/said)"
}

state_problems() { # print the problems of the state directory that the installer reported
  cat /run/driver/said >&2
  grep '^Problem: State' /run/driver/said
}

start_imds() {
cat >/etc/systemd/system/imds.service <<X
[Service]
Type=exec
ExecStart=/run/goods/simulator/bin/python -m bridge simulate quiet --listen $imds:80 --allow-remote --no-rate-limit
X
systemctl daemon-reload
systemctl start imds
}

start_load() { # announce ten events per second, and write their IDs to /run/results/announced
  load_began=$EPOCHSECONDS
  rm -f /run/driver/enough
  python3 /run/goods/ask.py --announce /run/driver/enough "http://$imds/control/events" >/run/results/announced &
  load=$!
  sleep 2
}

end_load() { # record as the fact $1 whether the load was still running, and stop it
  fact "$1" "$(kill -0 "$load" 2>/dev/null && echo yes || echo no)"
  sleep 2
  touch /run/driver/enough
  wait "$load"
  sleep 3
}

lost() { # print the announced events that have no record in the journal
  journalctl -u "$name" --since "@$load_began" -o cat --no-pager | grep '^{"schema_version"' >/run/results/records
  python3 /run/goods/ask.py --lost /run/results/announced /run/results/records
}
