#!/bin/bash
# Runs the blocks of the operator page of the portal in the systemd that boot.sh starts. The blocks are in
# /run/goods/blocks/NAME, and the checkout in /run/goods/checkout. Each fact becomes a line NAME=VALUE in
# /run/results/facts, and the test checks each fact.
set -uo pipefail

readonly name=scheduled-events-portal blocks=/run/goods/blocks
export PIP_NO_INDEX=1 PIP_FIND_LINKS=/run/goods/wheels PIP_DISABLE_PIP_VERSION_CHECK=1 HOME=/root

fact() { printf '%s=%s\n' "$1" "$2" >>/run/results/facts; }
property() { systemctl show "$name" -p "$1" --value; }
# Runs the block $1 with the standard input, and reports its exit code.
run() { (cd /run/goods/checkout && bash -eo pipefail "$blocks/$1") >"/run/results/$1" 2>&1 && printf 0 || printf '%s' "$?"; }
within() { # print yes as soon as the command after $1 succeeds, or no after $1 seconds
  local until=$((SECONDS + $1))
  shift
  until "$@"; do
    ((SECONDS < until)) || { printf 'no\n'; return; }
    sleep 0.2
  done
  printf 'yes\n'
}
is_ready() { curl -fsS http://127.0.0.1:9465/readyz >/dev/null 2>&1; }

set -x
fact install "$(run install)"
fact set_up "$(run set-up)"
fact secrets "$(run secrets)"
fact start "$(run start)"
pid=$(property MainPID)
fact active "$(systemctl is-active "$name")"
fact status "$(property StatusText)"
fact user "$(ps -o user:40= -p "$pid")"
fact capabilities "$(awk '/^CapEff:/ { print $2 }' "/proc/$pid/status")"
fact seccomp "$(awk '/^Seccomp:/ { print $2 }' "/proc/$pid/status")"
fact descriptors "$(awk '/^Max open files/ { print $4 }' "/proc/$pid/limits")"
fact database "$(stat -c '%U %a' "/var/lib/$name/portal.db")"
fact people "$(printf 'correct horse battery\n' | run people)"
fact backup "$(run backup)"
fact try_the_backup "$(run try-the-backup)"
fact audit "$(run audit)"
fact rotate "$(run rotate)"
fact restore "$(run restore)"
cp -a "/opt/$name/venvs/0.1.0" "/opt/$name/venvs/0.2.0"
fact upgrade "$(run upgrade)"
fact back "$(run back)"
(
  cd /run/goods/checkout || exit
  openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=DNS:localhost \
    -keyout tls.key -out tls.crt
)
fact TLS "$(run TLS)"
fact door "$(curl -sS -o /dev/null -w '%{http_code}' --cacert /run/goods/checkout/tls.crt https://localhost:8443/login)"
fact ready_again "$(within 20 is_ready)"

sed -i 's/^\[people\]/[peple]/' "/etc/$name/portal.toml"
systemctl restart "$name"
fact restart_with_a_wrong_file "$?"
fact mistake_in_the_journal "$(journalctl -u "$name" -o cat --no-pager | grep -c 'Unknown key .peple.')"
fact exit_status "$(property ExecMainStatus)"
sed -i 's/^\[peple\]/[people]/' "/etc/$name/portal.toml"
fact ready_once_it_is_mended "$(within 30 is_ready)"

began=${EPOCHREALTIME/./}
systemctl stop "$name"
fact stop_seconds "$(((${EPOCHREALTIME/./} - began) / 1000000))"
fact stopped_with "$(property ExecMainStatus)"
journalctl -u "$name" -o cat --no-pager >/run/results/journal
