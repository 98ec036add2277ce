#!/bin/bash
# Runs operations and failures of the service in the systemd that boot.sh starts. Each fact becomes a line NAME=VALUE in
# /run/results/facts, and the test checks each fact. Every wait has a condition and a limit.
set -uo pipefail

readonly name=scheduled-events-bridge
readonly config=/etc/$name/config.toml drop_ins=/etc/systemd/system/$name.service.d

fact() { printf '%s=%s\n' "$1" "$2" >>/run/results/facts; }
property() { systemctl show "$name" -p "$1" --value; }
said() { journalctl -u "$name" -o cat --no-pager | grep -qE -- "$1"; }
namespace_of() { readlink "/proc/$1/ns/mnt"; }
as_the_agent() { STATE_DIRECTORY=/var/lib/$name runuser -u "$name" -- "$@"; }
is_active() { [[ $(systemctl is-active "$name") == active ]]; }
exited_with() { [[ $(property ExecMainStatus) == "$1" ]]; }
counts() { (($(property NRestarts) > $1)); }
restarted() { counts "$1" && is_active; }

within() { # print yes as soon as the command after $1 succeeds, or no after $1 seconds
  local until=$((SECONDS + $1))
  shift
  until "$@"; do
    ((SECONDS < until)) || { printf 'no\n'; return; }
    sleep 0.1
  done
  printf 'yes\n'
}

owed() { "$name" outbox list --sink "$1" --json | grep -qE -- "$2"; } # whether the sink $1 has a record that matches $2
status_of() { "$@" >&2; printf '%s\n' "$?"; }

apply() { systemctl daemon-reload && systemctl restart "$name"; }

set -x
fact enabled_unit_came_up_at_boot "$(within 20 is_active)"
systemctl stop "$name"

systemctl start imds
began=${EPOCHREALTIME/./}
fact start "$(status_of systemctl start "$name")"
fact start_seconds "$(((${EPOCHREALTIME/./} - began) / 1000000))"
fact first_poll_was_answered_before_ready "$(said '"transition":"scheduled"' && echo yes || echo no)"
fact user "$(ps -o user:40= -p "$(property MainPID)")"
fact record_in_the_journal "$(within 30 said '^\{"schema_version".*"transition":"scheduled"')"
fact state_mode "$(stat -c '%a %U' /var/lib/$name)"

fact check_as_the_user "$(status_of as_the_agent "$name" check-config)"
install -m 0600 /dev/null /etc/$name/only-for-root
printf '[[sinks]]\ntype = "webhook"\nurl = "http://127.0.0.1:9"\nbearer_token_file = "/etc/%s/only-for-root"\n' \
  "$name" >/run/secret.toml
fact check_as_the_user_of_what_only_root_reads \
  "$(status_of as_the_agent "$name" check-config --config /run/secret.toml)"

cp "$config" /run/good.toml
fact reload "$(status_of systemctl reload "$name")"
sed -i '1i pol_interval = 1' "$config"
fact reload_of_a_wrong_file "$(status_of systemctl reload "$name")"
fact wrong_file_is_named "$(within 5 said 'pol_interval')"
fact active_after_a_wrong_file "$(systemctl is-active "$name")"

mkdir -p "$drop_ins"
printf '[Service]\nRestartSec=100ms\nRestartSteps=0\nWatchdogSec=3\n' >"$drop_ins/quick.conf"
systemctl daemon-reload
systemctl restart "$name"
fact tries_again_with_a_wrong_file "$(within 20 counts 2)"
fact says_78_for_a_wrong_file "$(within 10 exited_with 78)"
cp /run/good.toml "$config"
fact active_once_the_file_is_mended "$(within 20 is_active)"

count=$(property NRestarts)
kill -KILL "$(property MainPID)"
fact restarted_after_a_kill "$(within 20 restarted "$count")"
count=$(property NRestarts)
sleep 4 # longer than WatchdogSec
fact watchdog_is_fed "$(restarted "$count" && echo no || echo yes)"
kill -STOP "$(property MainPID)"
fact restarted_by_the_watchdog "$(within 20 restarted "$count")"
fact hang_is_in_the_journal "$(within 5 said 'most recent call first')"

# The libraries of every sink in the sandbox, and a secret that only root can read.
install -d -m 0700 /etc/$name/private
printf 'a-secret-from-a-credential\n' >/etc/$name/private/webhook-secret
openssl genpkey -algorithm ed25519 2>/dev/null | openssl pkey -pubout >/etc/$name/ops.pub
cp /run/driver/credentials.conf "$drop_ins/"
cat >"$config" <<X
[[sinks]]
type = "stdout"
[[sinks]]
type = "webhook"
url = "http://127.0.0.1:9/hook"
bearer_token_file = "/run/credentials/$name.service/webhook-secret"
[[sinks]]
type = "eventhubs"
fully_qualified_namespace = "fleet.servicebus.windows.net"
eventhub = "scheduled-events"
timeout_seconds = 1
[[sinks]]
type = "otlp"
endpoint = "http://127.0.0.1:9"
[[sinks]]
type = "command"
command = ["/bin/sh", "-c", "touch /root/prepared"]
[approval.remote]
url = "https://127.0.0.1:9/api/v1"
token_file = "/run/credentials/$name.service/webhook-secret"
[[approval.remote.keys]]
kid = "ops-2026"
approver = "portal"
public_key_file = "/etc/$name/ops.pub"
X
systemctl stop "$name"
rm -rf /var/lib/$name/*
systemctl restart imds
fact start_with_credentials "$(status_of apply)"
fact command_is_kept_in_the_sandbox "$(within 40 owed command 'cannot touch')"
fact tried_webhook "$(within 20 owed webhook refused)"
fact tried_otlp "$(within 20 owed otlp refused)"
fact tried_eventhubs "$(within 20 owed eventhubs '"error": ?"')"
$name outbox list --json >&2
fact reload_with_credentials "$(status_of systemctl reload "$name")"
fact check_at_a_reload_reads_credentials "$(said 'Problem: ' && echo no || echo yes)"

cp /run/driver/command-sink.conf "$drop_ins/"
fact start_with_the_drop_in_for_commands "$(status_of apply)"
$name outbox retry --sink command >&2
fact command_works_with_its_drop_in "$(within 20 test -e /root/prepared)"
fact mounts_without_the_sandbox \
  "$([[ $(namespace_of "$(property MainPID)") == "$(namespace_of 1)" ]] && echo "those of the host" || echo "its own")"
rm "$drop_ins/command-sink.conf"
fact start_without_it_again "$(status_of apply)"
fact state_belongs_to_the_user_again "$(stat -c %U /var/lib/$name/outbox-1.db)"

fact stop "$(status_of systemctl stop "$name")"
fact stop_result "$(property Result) $(property ExecMainStatus)"
journalctl -u "$name" -o cat --no-pager | cut -c1-300 >/run/results/journal
fact finished yes
