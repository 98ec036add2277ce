#!/bin/bash
# Replaces ssh for Ansible: runs the last argument as a command in the machine that the previous argument names.
# $MACHINES is the directory of the machines. MACHINES/NAME/pid contains the PID of its process 1 on this machine.
set -eu
command=${*: -1}
host=${*: -2:1}
{ pid=$(cat "$MACHINES/$host/pid") && kill -0 "$pid"; } || exit 255 # like ssh if it cannot connect
exec nsenter --target "$pid" --mount --uts --ipc --net --pid --root --wd \
  env -i HOME=/root LANG=C.UTF-8 PATH=/usr/sbin:/usr/bin:/sbin:/bin /bin/sh -c "$command"
