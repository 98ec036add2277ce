#!/bin/bash
# Boots a second systemd from this machine's files, as PID 1 of new namespaces, and runs drive.sh as a service in it.
#
#   boot.sh probe DIR     exit with 0 if this machine and user can boot systemd
#   boot.sh TREE DIR      TREE: the result of `install.sh --root TREE`; DIR: for the results of drive.sh and the log
#   boot.sh none DIR      without an installation; DIR/goods is mounted at /run/goods, and DIR/goods/drive.sh runs
#
# $BASE: the root directory of the system to boot, such as one from debootstrap (default: this machine). The system runs
# on an overlay, so the files of the machine do not change. Its only network is loopback with the address of the
# metadata service.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
tree=$1 share=$2

overlay() { # mount the files of the machine in $root, with all changes in memory
  mount --make-rprivate /
  mount -t tmpfs none "$share/boot"
  mkdir "$share/boot/upper" "$share/boot/work" "$root"
  mount -t overlay overlay -o "lowerdir=${BASE:-/},upperdir=$share/boot/upper,workdir=$share/boot/work" "$root"
  mount -t proc proc "$root/proc"
  mount -t sysfs sysfs "$root/sys"
  mount -t cgroup2 none "$root/sys/fs/cgroup"
}

if [[ ${3-} != --inside ]]; then
  mkdir -p "$share/boot" "$share/results"
  hierarchy=$(awk '$3 == "cgroup2" { print $2; exit }' /proc/mounts)
  [[ -n $hierarchy ]] || { printf 'No cgroup2 file system is mounted\n' >&2; exit 1; }
  group=$hierarchy/bridge-test-$$ # the new systemd can create groups in this group
  mkdir "$group"
  status=0
  (
    printf '%s\n' "$BASHPID" >"$group/cgroup.procs"
    # When unshare exits, --kill-child also stops the new systemd.
    exec unshare --fork --kill-child --pid --mount --net --cgroup --uts --ipc \
      bash "$here/boot.sh" "$tree" "$share" --inside
  ) || status=$?
  find "$group" -depth -type d -exec rmdir {} +
  exit "$status"
fi

root=$share/boot/root
overlay
[[ $tree != probe ]] || exit 0
mount -t tmpfs none "$root/run"
mkdir "$root/run/results" "$root/run/driver"
mount --bind "$share/results" "$root/run/results"
cp "$here/drive.sh" "$here"/../../../deploy/systemd/*.conf "$root/run/driver/"
if [[ $tree == none ]]; then
  mkdir "$root/run/goods"
  mount --bind "$share/goods" "$root/run/goods"
  cp "$share/goods/drive.sh" "$root/run/driver/"
fi
mount -t tmpfs none "$root/tmp"
mount --rbind /dev "$root/dev"
ip link set lo up
ip address add 169.254.169.254/32 dev lo

# Copy only the units that systemd and its journal need.
rm -rf "$root"/etc/systemd/system "$root"/etc/fstab
mkdir -p "$root/etc/systemd/system"
for unit in systemd-udevd.service systemd-udevd-kernel.socket systemd-udevd-control.socket systemd-udev-trigger.service \
  systemd-modules-load.service systemd-sysctl.service systemd-remount-fs.service systemd-tmpfiles-setup.service \
  systemd-tmpfiles-setup-dev.service systemd-random-seed.service systemd-binfmt.service kmod-static-nodes.service \
  systemd-logind.service systemd-update-utmp-runlevel.service getty.target dev-hugepages.mount dev-mqueue.mount \
  sys-kernel-debug.mount sys-kernel-tracing.mount sys-fs-fuse-connections.mount proc-sys-fs-binfmt_misc.automount \
  apparmor.service keyboard-setup.service systemd-user-sessions.service; do
  ln -s /dev/null "$root/etc/systemd/system/$unit"
done
if [[ $tree != none ]]; then
  cp -a "$tree/opt" "$tree/usr" "$root/"
  cp -a "$tree"/etc/systemd "$tree"/etc/sysusers.d "$tree"/etc/scheduled-events-bridge "$root/etc/"
  chroot "$root" systemd-sysusers scheduled-events-bridge.conf
  cat >"$root/etc/systemd/system/imds.service" <<X
[Unit]
Description=A simulated metadata service whose first answer takes its time
[Service]
Type=exec
ExecStart=/usr/local/bin/scheduled-events-bridge simulate live-migration --listen 169.254.169.254:80 --allow-remote \
  --first-call 6 --speed 20
X
fi
cat >"$root/etc/systemd/system/driver.service" <<X
[Unit]
Description=Does what an operator does
[Service]
Type=exec
ExecStart=/bin/bash /run/driver/drive.sh
StandardOutput=append:/run/results/log
StandardError=append:/run/results/log
ExecStopPost=/bin/systemctl poweroff --force --force
X
mkdir -p "$root/etc/systemd/system/multi-user.target.wants"
ln -s ../driver.service "$root/etc/systemd/system/multi-user.target.wants/"

cd "$root"
mkdir -p old
pivot_root . old
umount -l /old
mount --make-rshared / # systemd needs this for credentials, but does not set it in a container
exec env -i container=lxc PATH=/usr/sbin:/usr/bin:/sbin:/bin \
  /lib/systemd/systemd --system --unit=multi-user.target --show-status=no
