#!/bin/bash
# Emulates the parts of a container engine that the tests need, with namespaces and overlays.
#
#   engine.sh probe DIR                 exit with 0 if this machine and user can run containers
#   engine.sh build LAYER BASE SCRIPT   run SCRIPT as root on this machine's files, with changes in LAYER
#   engine.sh run LAYER BASE SCRIPT     the same with a read-only root, the volume, a separate process namespace, and a
#                                       separate network: loopback with the address of the metadata service
#
# BASE, the prefix of a Python, is mounted at /usr/local, as in Docker's Python images. SCRIPT is read from /run/engine,
# which is also writable. $VOLUME is the volume of the image.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
what=$1 layer=$2 base=${3-} script=${4-}

if [[ ${5-} != --inside ]]; then
  spaces=(--mount)
  [[ $what != run ]] || spaces+=(--net --pid --fork --kill-child)
  exec unshare "${spaces[@]}" bash "$here/engine.sh" "$what" "$layer" "$base" "$script" --inside
fi

mount --make-rprivate /
root=$layer/mounted
mkdir -p "$root" "$layer/root" "$layer/local" "$layer/work-root" "$layer/work-local"
over() { # mount an overlay of $2 over $1 at $3, so that changes are written to $2
  mount -t overlay overlay -o "lowerdir=$1,upperdir=$2,workdir=$layer/work-${2##*/}" "$3"
}
over / "$layer/root" "$root"
[[ $what != probe ]] || exit 0
over "$base" "$layer/local" "$root/usr/local"
mount -t proc proc "$root/proc"
mount --rbind /dev "$root/dev"
mount -t tmpfs none "$root/run"
mkdir "$root/run/engine"
mount --bind "$(dirname "$script")" "$root/run/engine"
if [[ $what == run ]]; then
  ip link set lo up
  ip address add 169.254.169.254/32 dev lo
  mount -o remount,ro,bind "$root/usr/local"
  mount -o remount,ro,bind "$root"
  mount -t tmpfs -o mode=0700,uid=10001,gid=10001 none "$root$VOLUME"
fi
exec chroot "$root" /bin/sh "/run/engine/$(basename "$script")"
