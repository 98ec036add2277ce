#!/bin/bash
# Installs the unpacked archive $2 below the directory $3 with the Python of the system $1, without changes to $1.
set -euo pipefail
if [[ ${4-} != --inside ]]; then
  exec unshare --mount --pid --fork --kill-child bash "$0" "$@" --inside
fi
mount --make-rprivate /
mkdir -p "$3"
mount -t tmpfs none /mnt
mkdir /mnt/{upper,work,root}
mount -t overlay overlay -o "lowerdir=$1,upperdir=/mnt/upper,workdir=/mnt/work" /mnt/root
mkdir /mnt/root/{archive,tree}
mount --bind "$2" /mnt/root/archive
mount --bind "$3" /mnt/root/tree
mount --bind /dev /mnt/root/dev
chroot /mnt/root /archive/install.sh --root /tree
