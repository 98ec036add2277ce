#!/bin/bash
# Installs and upgrades a .deb and an .rpm on a VM with only systemd and python3, without a package index. boot.sh runs
# this script in the VM, and the test checks each fact.
set -uo pipefail

# shellcheck source-path=SCRIPTDIR/../artifact source=common.sh
. /run/goods/common.sh

edited() { # unpack the .deb to /run/driver/edited with the version $1, so that the test can damage it
  rm -rf /run/driver/edited
  dpkg-deb -R "$deb" /run/driver/edited
  sed -i "s/^Version: .*/Version: $1/" /run/driver/edited/DEBIAN/control
}
upgrade() { # install the package from /run/driver/edited
  dpkg-deb --root-owner-group -Znone -b /run/driver/edited /run/driver/edited.deb >&2
  dpkg -i /run/driver/edited.deb
}
state_of() { dpkg-query -W -f '${db:Status-Status}' "$name"; }
is_there() { [[ -e $1 ]] && printf 'yes\n' || printf 'no\n'; }
in_usr_local() { find /usr/local -name "*$name*" | tr "\n" " "; }
has_switched() { [[ $(version) != "$1" ]] && printf 'yes\n' || printf 'no\n'; } # whether the version is no longer $1

not_ready() { page --reasons http://127.0.0.1:9464/readyz; }
wait_until_not_ready() { # wait until the agent is not ready because of the sink $1
  for _ in {1..150}; do [[ $(not_ready) == *"Sink $1 "* ]] && break; sleep 0.2; done
}
send_to() { # configure the sink $1 with the URL $2, and announce an event
  printf '[[sinks]]\ntype = "stdout"\n[[sinks]]\ntype = "webhook"\nname = "%s"\nurl = "%s"\n' "$1" "$2" >"$config"
  systemctl restart "$name"
  page --announce / "http://$imds/control/events" >&2
}
upgrade_while_failing() { # run upgrade while the sink $2 fails, and record the facts $1_*
  local before
  wait_until_not_ready "$2"
  before=$(version)
  fact "$1_before" "$(not_ready)"
  fact "$1_exit" "$(status_of upgrade 2>/run/driver/said)"
  cat /run/driver/said >&2
  fact "$1_said" "$(tr '\n' ' ' </run/driver/said)"
  fact "$1_switched" "$(has_switched "$before")"
  wait_until_not_ready "$2"
  fact "$1_after" "$(not_ready)"
}
edited_unit() { # like edited, with the line $2 in the unit and an installer that waits for 4 s
  edited "$1"
  sed -i "/^User=/i $2" "/run/driver/edited/usr/lib/$name/$name.service"
  sed -i 's/ wait=180 / wait=4 /' "/run/driver/edited/usr/lib/$name/install.sh"
}

set -x
start_imds
deb=$(echo /run/goods/*.deb) rpm=$(echo /run/goods/"$name"-*.rpm)
# A Python of the administrator is first on PATH, hidden from the service.
hidden_python
ln -s /root/python/bin/python3 /usr/local/bin/python3
PATH=/usr/local/bin:$PATH
note_every_path

# A first installation with an existing user, secret, and configuration.
printf 'u %s - "Scheduled Events Bridge"\n' "$name" | systemd-sysusers -
install -d "/etc/$name"
printf 'a-secret\n' >/run/token
install -m 0640 -g "$name" /run/token "/etc/$name/token"
cat >"$config" <<X
[[sinks]]
type = "stdout"
[[sinks]]
type = "webhook"
url = "http://127.0.0.1:9/hook"
bearer_token_file = "/etc/$name/token"
transitions = ["canceled"]
X
cp "$config" /run/right.toml
began=$EPOCHSECONDS
fact install_exit "$(status_of dpkg -i "$deb" 2>/run/driver/said)"
fact install_problems "$(state_problems)"
wait_until_ready
fact seconds_to_ready "$((EPOCHSECONDS - began))"
fact ready "$(runs)"
fact command_says "$(/usr/bin/"$name" --version)"
fact nothing_in_usr_local "$(in_usr_local)"
fact configuration_was_left "$(cmp "$config" /run/right.toml && echo yes)"
fact changed_files "$(dpkg --verify "$name" 2>&1 | tr "\n" " ")"
# shellcheck source=/dev/null # the bash completion of the package calls the command
fact completes "$(bash -c '. "$1"; COMP_WORDS=("$2" st) COMP_CWORD=1; _scheduled_events_bridge_completion "$2"; echo "${COMPREPLY[*]}"' \
  - "/usr/share/bash-completion/completions/$name" "$name")"

# Upgrades under load lose no records, including upgrades that are rolled back.
start_load
old=$(version)
edited 9.1
fact upgrade_exit "$(status_of upgrade)"
fact upgrade_switched "$(has_switched "$old")"
edited 9.2
sed -i 's|^ExecStart=.*|ExecStart=/bin/false|' "/run/driver/edited/usr/lib/$name/$name.service"
refused does_not_start upgrade
edited 9.3
python3 /run/goods/ask.py --without-library requests "/run/driver/edited/usr/lib/$name/requirements.txt"
refused missing_library upgrade
fact missing_library_state "$(state_of)"
end_load load_went_on
fact upgrade_lost "$(lost)"

# The service cannot see Debian's Python, and the new version rejects the configuration until it is fixed.
edited 9.4
debian_python=$(readlink /usr/bin/python3)
ln -sfn /root/python/bin/python3 /usr/bin/python3
refused hidden_interpreter upgrade
ln -sfn "$debian_python" /usr/bin/python3
printf 'no_such_key = 1\n' >"$config"
refused refused_configuration upgrade
cp /run/right.toml "$config"
old=$(version)
fact mended_exit "$(status_of dpkg --configure --pending)"
fact mended_switched "$(has_switched "$old")"
fact mended_state "$(state_of)"
fact mended_runs "$(runs)"

# A destination that already fails does not prevent an upgrade, but a new problem does.
systemd-run --quiet --unit refusing python3 /run/goods/ask.py --refuse 8401
send_to refusing http://127.0.0.1:8401/hook
edited 9.4.1
upgrade_while_failing refusing refusing
send_to dead http://127.0.0.1:9/hook
for _ in {1..100}; do [[ -n $("$name" outbox list --sink dead --json) ]] && break; sleep 0.2; done
systemctl stop "$name"
page --make-older 1200 /var/lib/"$name"/outbox-*.db
systemctl start "$name"
edited 9.4.2
upgrade_while_failing dead dead
edited_unit 9.4.3 'ExecStartPre=/bin/false'
upgrade_while_failing cannot_start dead
printf '[imds]\nendpoint = "http://127.0.0.1:1"\n' | cat "$config" - >/run/deaf.toml
edited_unit 9.4.4 'Environment=SCHEDULED_EVENTS_BRIDGE_CONFIG=/run/deaf.toml'
upgrade_while_failing cannot_poll dead
edited_unit 9.4.5 "InaccessiblePaths=/var/lib/$name"
upgrade_while_failing cannot_read dead
cp /run/right.toml "$config"
systemctl restart "$name"

# A disabled service stays disabled.
systemctl --quiet disable --now "$name"
edited 9.5
fact disabled_exit "$(status_of upgrade)"
fact disabled_is_active "$(systemctl is-active "$name")"
fact disabled_is_enabled "$(systemctl is-enabled "$name")"
systemctl --quiet enable --now "$name"

# If Debian installs another python3 version, the package reinstalls its libraries.
mv "$link"/lib/python3.* "$link/lib/python3.0"
dpkg-trigger --by-package=python3 /usr/bin/python3
fact trigger_exit "$(status_of dpkg --configure --pending)"
wait_until_ready
fact trigger_runs "$(runs)"
fact trigger_command_says "$("$name" --version)"

fact remove_exit "$(status_of dpkg -r "$name")"
fact remove_is_active "$(systemctl is-active "$name")"
fact remove_left "$(left | grep -v /var/lib/dpkg | tr '\n' ' ')"

# An archive installation with a masked service, a package over it that must not start the service, and a purge.
mkdir /run/driver/archive
tar -C /run/driver/archive -xzf /run/goods/"$name"-[0-9]*-linux-*.tar.gz
systemctl mask "$name" >&2
fact archive_exit "$(status_of /run/driver/archive/*/install.sh --python /usr/bin/python3)"
fact mask_was_left "$(readlink "/etc/systemd/system/$name.service")"
fact masked_is_active "$(systemctl is-active "$name")"
systemctl unmask "$name" >&2
fact archive_manual "$(is_there "/usr/local/share/man/man1/$name.1")"
printf '#!/bin/sh\nexit 101\n' >/usr/sbin/policy-rc.d
chmod +x /usr/sbin/policy-rc.d
rm -r "/var/lib/$name"
fact over_archive_exit "$(status_of dpkg -i "$deb" 2>/run/driver/said)"
fact over_archive_problems "$(state_problems)"
fact over_archive_in_usr_local "$(in_usr_local)"
fact over_archive_is_active "$(systemctl is-active "$name")"
rm /usr/sbin/policy-rc.d
fact purge_exit "$(status_of dpkg -P "$name")"
fact purge_left "$(left | tr '\n' ' ')"
fact purge_more_than_before "$(more_than_noted)"

# The .rpm. Debian's rpm needs options to install it, because dpkg provides the dependencies.
rpm() { command rpm --force-debian --nodeps "$@"; }
systemctl restart imds
began=$EPOCHSECONDS
fact rpm_install_exit "$(status_of rpm -i "$rpm")"
wait_until_ready
fact rpm_seconds_to_ready "$((EPOCHSECONDS - began))"
fact rpm_ready "$(runs)"
fact rpm_changed_files "$(rpm --verify "$name" | tr "\n" " ")"
start_load
old=$(version)
fact rpm_upgrade_exit "$(status_of rpm -U /run/goods/upgrade.rpm)"
fact rpm_upgrade_switched "$(has_switched "$old")"
refused rpm_missing_library rpm -U /run/goods/missing-library.rpm
end_load rpm_load_went_on
fact rpm_upgrade_lost "$(lost)"
cp "$config" /run/right.toml
printf 'no_such_key = 1\n' >"$config"
refused rpm_refused_configuration rpm -U /run/goods/mended.rpm
cp /run/right.toml "$config"
old=$(version)
fact rpm_mended_exit "$(status_of rpm --reinstall /run/goods/mended.rpm)"
fact rpm_mended_switched "$(has_switched "$old")"
fact rpm_mended_runs "$(runs)"
fact rpm_erase_exit "$(status_of rpm -e "$name")"
fact rpm_erase_is_active "$(systemctl is-active "$name")"
fact rpm_erase_left "$(left | tr '\n' ' ')"
fact rpm_again_exit "$(status_of rpm -i "$rpm")"
fact rpm_again_runs "$(runs)"
fact rpm_purge_exit "$(status_of "/usr/lib/$name/install.sh" --uninstall --purge)"
fact rpm_erase_after_purge_exit "$(status_of rpm -e "$name")"
fact rpm_purge_left "$(left | tr '\n' ' ')"
fact rpm_purge_more_than_before "$(more_than_noted)"
fact finished yes
