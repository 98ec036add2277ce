#!/bin/bash
# A VM that Ansible manages, with a metadata service. boot.sh runs this script in the VM. If
# /run/results/with-version-before exists, the VM has the previous version. The file /run/results/down stops the VM.
set -euxo pipefail

readonly name=scheduled-events-bridge
cat >/etc/systemd/system/imds.service <<U
[Service]
Type=exec
ExecStart=/run/goods/before/opt/$name/venv/bin/python -m bridge simulate quiet --listen 169.254.169.254:80 --allow-remote
U
if [[ -e /run/results/with-version-before ]]; then
  # Do not copy /etc/passwd, which contains only the user of the agent.
  cp -a /run/goods/before/opt /run/goods/before/usr /
  cp -a /run/goods/before/etc/{systemd,sysusers.d,$name} /etc/
  systemd-sysusers "$name.conf"
fi
systemctl daemon-reload
systemctl start imds
[[ ! -e /run/results/with-version-before ]] || systemctl start "$name"
touch /run/results/up
until [[ -e /run/results/down ]]; do sleep 0.2; done
