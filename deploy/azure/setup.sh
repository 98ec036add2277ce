#!/bin/sh
# Mounts the disk for the state, and installs the agent. cloud-init runs this script on the first boot of a VM, and
# after the OS disk is replaced.
#
#   setup.sh URL SHA256 STATE_DISK      URL: of the archive of a release (.tar.gz), or of a wheel
#
# An archive needs no package index. With a wheel, the script installs the libraries from a package index, and needs the
# package python3-venv. You can run the script again. If the first boot fails, see README.md.
set -eu

url=$1 sha256=$2 disk=$3
here=$(cd "$(dirname "$0")" && pwd)
state=/var/lib/scheduled-events-bridge
label=bridge-state

fail() {
  printf 'setup.sh: %s\n' "$1" >&2
  exit 1
}

# blkid returns the same status for a missing disk and for an empty disk, and udev can add the disk after the boot.
left=60
until [ -e "$disk" ]; do
  [ "$left" -gt 0 ] || fail "The disk $disk does not exist after a minute. Check stateDisk, which depends on the size of the VM."
  left=$((left - 1))
  udevadm settle --timeout=1 2>/dev/null || true
  sleep 1
done

# After a reimage, the disk contains undelivered records. Format the disk only if it is empty (2).
found=0
blkid -p "$disk" >/dev/null || found=$?
case $found in
  0) ;;
  2) mkfs.ext4 -q -L "$label" "$disk" ;;
  *) fail "The content of $disk is unknown: blkid exited with $found." ;;
esac
mkdir -p "$state"
# With nofail, a VM without the disk still boots. The service waits for the mount, because the disk contains its state.
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
    cp "$here/config.toml" "$here/archive/config.toml" # the installer copies this file to a new VM
    "$here/archive/install.sh"
    ;;
  *) "$here/install.sh" "$file" ;;
esac
