#!/bin/sh
# Puts the state on its disk and installs the agent; run by cloud-init on a VM's first boot and on every new OS disk.
#
#   setup.sh WHEEL_URL WHEEL_SHA256 STATE_DISK
set -eu

url=$1 sha256=$2 disk=$3
here=$(cd "$(dirname "$0")" && pwd)
state=/var/lib/scheduled-events-bridge
label=bridge-state

# After a reimage the disk holds what is still owed, so it is formatted only when it is known to hold nothing (2).
found=0
blkid -p "$disk" >/dev/null || found=$?
case $found in
  0) ;;
  2) mkfs.ext4 -q -L "$label" "$disk" ;;
  *) printf 'setup.sh: what is on %s cannot be told: blkid says %s\n' "$disk" "$found" >&2; exit "$found" ;;
esac
mkdir -p "$state"
# nofail: a VM whose disk is missing boots all the same. The service waits for the mount, because its state is there.
grep -q "^LABEL=$label " /etc/fstab ||
  printf 'LABEL=%s %s ext4 defaults,noatime,nofail 0 2\n' "$label" "$state" >>/etc/fstab
systemctl daemon-reload
mountpoint -q "$state" || mount "$state"

wheel=$here/$(basename "${url%%\?*}")
curl --fail --silent --show-error --location --retry 10 --retry-connrefused --output "$wheel" "$url"
printf '%s  %s\n' "$sha256" "$wheel" | sha256sum --check --quiet -
"$here/install.sh" "$wheel"
