# Tests a container of the image. engine.sh runs this script in the container as root. The agent and its health check
# run as the user of the image, without capabilities. $COMMAND and $HEALTH_COMMAND are from the image. Facts are written
# to /run/engine/facts.
. /run/engine/image.env
config=/run/engine/config.toml
export SCHEDULED_EVENTS_BRIDGE_CONFIG=$config
cd "$WORKDIR" || exit

fact() { printf '%s=%s\n' "$1" "$2" >>/run/engine/facts; }
as_user() { exec setpriv --reuid "${IMAGE_USER%:*}" --regid "${IMAGE_USER#*:}" --clear-groups --bounding-set=-all \
  --inh-caps=-all --no-new-privs -- "$@"; }
health() { (as_user $HEALTH_COMMAND) >>/run/engine/health 2>&1 && printf 0 || printf '%s' "$?"; }
start() { (as_user $COMMAND) >>/run/engine/out 2>>/run/engine/err & agent=$!; }
within() { # print yes as soon as the command after $1 succeeds, or no after $1 seconds
  tries=$(($1 * 2))
  shift
  while [ "$tries" -gt 0 ]; do
    if "$@" >/dev/null 2>&1; then printf yes; return; fi
    tries=$((tries - 1))
    sleep 0.5
  done
  printf no
}
is_healthy() { [ "$(health)" = 0 ]; }
stop() { kill -TERM "$agent"; wait "$agent"; }

printf '' >"$config"
scheduled-events-bridge simulate live-migration --listen 169.254.169.254:80 --allow-remote --speed 20 >/dev/null 2>&1 &
fact unhealthy_before_the_agent_runs "$(health)"
start
fact healthy "$(within 30 is_healthy)"
fact user "$(awk '/^Uid:/ { print $2 }' "/proc/$agent/status")"
fact capabilities "$(awk '/^CapEff:/ { print $2 }' "/proc/$agent/status")"
fact record_on_standard_output "$(within 30 grep -q '"transition":"scheduled"' /run/engine/out)"
fact root_is_read_only "$(touch /opt/x 2>/dev/null && printf no || printf yes)"
fact state "$(stat -c %u:%a "$STATE_DIRECTORY/outbox-1.db")"
kill -STOP "$agent"
fact unhealthy_while_it_hangs "$(health)"
kill -CONT "$agent"
fact healthy_again "$(within 20 is_healthy)"
stop
fact stop "$?"
fact unhealthy_once_it_is_gone "$(health)"

printf '[status]\nlisten = "0.0.0.0:9999"\n' >"$config"
start
fact healthy_where_the_configuration_says "$(within 30 is_healthy)"
printf 'this is no TOML' >"$config"
fact not_called_ill_for_a_broken_file "$(health)"
stop
printf '[status]\nlisten = ""\n' >"$config"
fact not_called_ill_without_a_listener "$(health)"
export SCHEDULED_EVENTS_BRIDGE_STATUS_LISTEN=127.0.0.1:9998
start
fact healthy_where_the_environment_says "$(within 30 is_healthy)"
stop
