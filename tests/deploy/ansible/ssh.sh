#!/bin/bash
# What Ansible takes for ssh: runs the command, which is the last word, in the machine that the word before it names.
# $MACHINES: the directory of the machines; MACHINES/NAME/pid is the process 1 of one, as this machine counts.
set -eu
command=${*: -1}
host=${*: -2:1}
{ pid=$(cat "$MACHINES/$host/pid") && kill -0 "$pid"; } || exit 255 # as ssh says that it cannot reach one
exec nsenter --target "$pid" --mount --uts --ipc --net --pid --root --wd \
  env -i HOME=/root LANG=C.UTF-8 PATH=/usr/sbin:/usr/bin:/sbin:/bin /bin/sh -c "$command"
