# Tests a container of the portal's image. engine.sh runs this script in the container as root. The portal, its health
# check, and its other commands run as the user of the image, without capabilities. $COMMAND and $HEALTH_COMMAND are
# from the image, and the configuration is from the Kubernetes manifests. Facts are written to /run/engine/facts.
. /run/engine/image.env
config=/run/engine/portal.toml secrets=/run/secrets/scheduled-events-portal
export SCHEDULED_EVENTS_PORTAL_CONFIG=$config
cd "$WORKDIR" || exit

fact() { printf '%s=%s\n' "$1" "$2" >>/run/engine/facts; }
as_user() { exec setpriv --reuid "${IMAGE_USER%:*}" --regid "${IMAGE_USER#*:}" --clear-groups --bounding-set=-all \
  --inh-caps=-all --no-new-privs -- "$@"; }
health() { (as_user $HEALTH_COMMAND) >>/run/engine/health 2>&1 && printf 0 || printf '%s' "$?"; }
start() { (as_user $COMMAND) >>/run/engine/out 2>>/run/engine/err & portal=$!; }
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
answer() { # print the status of a request
  python3 -c 'import http.client as h, sys
c = h.HTTPConnection(sys.argv[2], timeout=10); c.request(sys.argv[1], sys.argv[3]); print(c.getresponse().status)' "$@"
}

# As in a mounted Secret, root owns the files, and the group of the pod can read them.
mkdir -p "$secrets"
(
  cd "$secrets" || exit
  head -c 32 /dev/urandom | base64 >agents.secret
  head -c 32 /dev/urandom | base64 >readers.token
  scheduled-events-bridge keygen portal.key --approver portal --kid portal-2026 >/dev/null
  chgrp "${IMAGE_USER#*:}" ./*
  chmod 0440 ./*
)

fact unhealthy_before_the_portal_runs "$(health)"
start
fact healthy "$(within 60 is_healthy)"
fact ready "$(answer GET 127.0.0.1:9465 /readyz)"
fact challenge "$(answer POST 127.0.0.1:8443 /api/v1/agents/challenge)"
fact door "$(answer GET 127.0.0.1:8443 /login)"
fact user "$(awk '/^Uid:/ { print $2 }' "/proc/$portal/status")"
fact capabilities "$(awk '/^CapEff:/ { print $2 }' "/proc/$portal/status")"
fact root_is_read_only "$(touch /opt/x 2>/dev/null && printf no || printf yes)"
fact database "$(stat -c %u:%a "$STATE_DIRECTORY/portal.db")"
fact person "$(echo 'correct horse battery' | (as_user scheduled-events-bridge portal users add ann --role approver))"
fact backup "$( (as_user scheduled-events-bridge portal backup "$STATE_DIRECTORY/backup.db") >/dev/null && printf made)"
kill -STOP "$portal"
fact unhealthy_while_it_hangs "$(health)"
kill -CONT "$portal"
fact healthy_again "$(within 20 is_healthy)"
began=$(date +%s)
kill -TERM "$portal"
wait "$portal"
fact stop "$?"
fact stop_seconds "$(($(date +%s) - began))"
fact unhealthy_once_it_is_gone "$(health)"
printf 'this is no TOML' >"$config"
fact not_called_ill_for_a_broken_file "$(health)"
