#!/bin/sh
# Puts the state on its disk and installs the agent; run by cloud-init on a VM's first boot and on every new OS disk.
#
#   setup.sh URL SHA256 STATE_DISK      URL: of the archive of a release (.tar.gz), or of a wheel
#
# The archive needs no package index. For a wheel the libraries come from one, and python3-venv from the distribution.
# It may run again. cloud-init runs it once for each OS disk: README.md, "When the first boot fails".
set -eu

url=$1 sha256=$2 disk=$3
here=$(cd "$(dirname "$0")" && pwd)
state=/var/lib/scheduled-events-bridge
label=bridge-state

fail() {
  printf 'setup.sh: %s\n' "$1" >&2
  exit 1
}

# blkid says the same of a disk that is not there as of an empty one, and udev may name it a moment after the boot.
left=60
until [ -e "$disk" ]; do
  [ "$left" -gt 0 ] || fail "there is no disk $disk after a minute. Is it what this size calls LUN 0? See stateDisk."
  left=$((left - 1))
  udevadm settle --timeout=1 2>/dev/null || true
  sleep 1
done

# After a reimage the disk contains undelivered records, so it is formatted only if it is empty (2).
found=0
blkid -p "$disk" >/dev/null || found=$?
case $found in
  0) ;;
  2) mkfs.ext4 -q -L "$label" "$disk" ;;
  *) fail "what is on $disk cannot be told: blkid says $found" ;;
esac
mkdir -p "$state"
# nofail: a VM without the disk still boots. The service waits for the mount, because the disk contains its state.
grep -q "^LABEL=$label " /etc/fstab ||
  printf 'LABEL=%s %s ext4 defaults,noatime,nofail 0 2\n' "$label" "$state" >>/etc/fstab
systemctl daemon-reload
mountpoint -q "$state" || mount "$state"

file=$here/$(basename "${url%%\?*}")
curl --fail --silent --show-error --location --retry 10 --retry-connrefused --output "$file" "$url"
printf '%s  %s\n' "$sha256" "$file" | sha256sum --check --quiet -
case $file in
  *.tar.gz)
    rm -rf "$here/archive"
    mkdir "$here/archive"
    tar -xzf "$file" --no-same-owner --strip-components=1 -C "$here/archive"
    cp "$here/config.toml" "$here/archive/config.toml" # what its installer takes where there is none yet
    "$here/archive/install.sh"
    ;;
  *) "$here/install.sh" "$file" ;;
esac
