#!/bin/bash
# Runs a rollout and typical failures on a VM with only systemd and python3, without a package index. boot.sh runs this
# script in the VM, and the test checks each fact.
set -uo pipefail

# shellcheck source-path=SCRIPTDIR source=common.sh
. /run/goods/common.sh

broken() { # copy the archive to $1, so that the test can damage the copy
  rm -rf /run/driver/broken
  cp -a "$1" /run/driver/broken
}

set -x
start_imds
hidden_python
note_every_path
mkdir /run/driver/archive
archive=(/run/goods/"$name"-[0-9]*-linux-*.tar.gz)
tar -C /run/driver/archive -xzf "${archive[0]}"
tree=$(echo /run/driver/archive/*)
fact python_has_no_pip "$(python3 -c 'import ensurepip' 2>/dev/null || python3 -c 'import pip' 2>/dev/null && echo no || echo yes)"

# A first installation, with a secret that exists before the first start.
cat >/run/first.toml <<X
[[sinks]]
type = "stdout"
[[sinks]]
type = "webhook"
url = "http://127.0.0.1:9/hook"
bearer_token_file = "/etc/$name/token"
transitions = ["canceled"]
X
began=$EPOCHSECONDS
fact prepared_exit "$(status_of "$tree/install.sh" --config /run/first.toml --extras template --no-start 2>/run/driver/said)"
fact prepared_problems "$(state_problems)"
fact not_started_yet "$(systemctl is-active "$name")"
printf 'a-secret\n' >/run/token
install -m 0640 -g "$name" /run/token "/etc/$name/token"
fact start_exit "$(status_of systemctl start "$name")"
wait_until_ready
fact ready "$(runs)"
fact seconds_to_ready "$((EPOCHSECONDS - began))"
fact distributions "$(distributions | tr '\n' ' ')"
fact installed_megabytes "$(du -sm --apparent-size "$link/" | cut -f 1)"
fact manual "$(find /usr/local/share/man -name "$name.1")"

# Upgrades under load lose no records.
start_load
old=$(version)
fact upgrade_exit "$(status_of "$tree/install.sh")"
fact upgrade_switched "$([[ $(version) != "$old" ]] && echo yes || echo no)"
fact upgrade_remembers_extras "$(cat $link/extras)"
end_load load_went_on
fact upgrade_lost "$(lost)"

# Upgrades that are rejected before any change.
refused hidden_interpreter "$tree/install.sh" --python /root/python/bin/python3
broken "$tree"
python3 /run/goods/ask.py --without-library requests /run/driver/broken/requirements.txt
refused missing_library /run/driver/broken/install.sh
broken "$tree"
printf 'x' | tee -a /run/driver/broken/wheels/idna-*.whl >&2
refused other_bytes /run/driver/broken/install.sh
printf 'no_such_key = 1\n' >/run/wrong.toml
refused wrong_configuration "$tree/install.sh" --config /run/wrong.toml
cp "$config" /run/right.toml
cp /run/wrong.toml "$config"
refused refused_configuration "$tree/install.sh"
cp /run/right.toml "$config"

# Upgrades that fail only after the start.
broken "$tree"
sed -i 's|^ExecStart=.*|ExecStart=/bin/false|' /run/driver/broken/$name.service
refused does_not_start /run/driver/broken/install.sh --config /run/first.toml
cmp "$tree/$name.service" /etc/systemd/system/$name.service && fact unit_was_put_back yes
broken "$tree"
printf '[[sinks]]\ntype = "stdout"\n[imds]\nendpoint = "http://127.0.0.1:1"\n' >/run/deaf.toml
refused not_ready "$tree/install.sh" --config /run/deaf.toml --wait 4
wait_until_ready
fact ready_again_after_not_ready "$(runs)"
cmp /run/right.toml "$config" && fact configuration_was_put_back yes
fact trees "$(find /opt/$name/venvs -mindepth 1 -maxdepth 1 | wc -l)"

fact uninstall_exit "$(status_of "$tree/install.sh" --uninstall)"
fact uninstall_left "$(left | tr '\n' ' ')"
fact uninstall_is_active "$(systemctl is-active "$name")"
fact again_exit "$(status_of "$tree/install.sh")"
fact again_runs "$(runs)"
fact purge_exit "$(status_of "$tree/install.sh" --uninstall --purge)"
fact purge_left "$(left | tr '\n' ' ')"
fact purge_more_than_before "$(more_than_noted)"

# A first installation that does not start leaves nothing running.
broken "$tree"
sed -i 's|^ExecStart=.*|ExecStart=/bin/false|' /run/driver/broken/$name.service
fact first_fails_exit "$(status_of /run/driver/broken/install.sh)"
fact first_fails_is_active "$(systemctl is-active "$name")"
fact first_fails_is_enabled "$(systemctl is-enabled "$name" 2>/dev/null)"
"$tree/install.sh" --uninstall --purge >&2
fact finished yes
