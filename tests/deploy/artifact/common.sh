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
left() { # what still has the name of the agent, but for what this test put there and the kernel's files
  find / \( -path /dev -o -path /proc -o -path /sys -o -path /run/goods -o -path /run/driver -o -path /run/results \) -prune -o \
    -name "*$name*" -print
  grep -hE "^$name:" /etc/passwd /etc/group /etc/shadow /etc/gshadow
}

every_path() { # but for what Debian's own programs write, and the directory of manuals, which many share
  find / -xdev \( -path /run -o -path /var/log -o -path /var/cache -o -path /var/lib/dpkg -o -path /root/.rpmdb -o \
    -path /var/lib/systemd -o -path /usr/local/share/man/man1 -o -name __pycache__ -o -path '/etc/*-' -o \
    -path /etc/.pwd.lock \) -prune -o -print | sort
}
note_every_path() { every_path >/run/driver/paths; }
more_than_noted() { every_path | comm -13 /run/driver/paths - | tr '\n' ' '; }

hidden_python() { # one where the service cannot see it
  mkdir -p /root/python/bin
  cp "$(readlink -f /usr/bin/python3)" /root/python/bin/python3
}

distributions() { find "$link/" -name '*.dist-info' -printf '%f\n' | sed 's/-[0-9].*//' | sort; }

refused() { # fact $1: the rest must end with 1 and leave the version that runs alone
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

state_problems() { # what the installer said of the state directory, which the unit makes at the start
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

start_load() { # ten events a second, their ids to /run/results/announced
  load_began=$EPOCHSECONDS
  rm -f /run/driver/enough
  python3 /run/goods/ask.py --announce /run/driver/enough "http://$imds/control/events" >/run/results/announced &
  load=$!
  sleep 2
}

end_load() { # fact $1: whether it went on until now
  fact "$1" "$(kill -0 "$load" 2>/dev/null && echo yes || echo no)"
  sleep 2
  touch /run/driver/enough
  wait "$load"
  sleep 3
}

lost() { # what the journal has of them
  journalctl -u "$name" --since "@$load_began" -o cat --no-pager | grep '^{"schema_version"' >/run/results/records
  python3 /run/goods/ask.py --lost /run/results/announced /run/results/records
}
