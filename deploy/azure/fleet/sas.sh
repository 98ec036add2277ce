#!/bin/sh
# Prints the URL of a blob with a shared access signature (SAS). The Compute Gallery uses this URL to copy the package.
# For instructions, see docs/operate/fleet.md
set -eu

usage() {
  cat <<'END'
Usage: sas.sh [--hours HOURS] [--dry-run] ACCOUNT CONTAINER BLOB

Print the URL of a blob with a SAS that only allows reading this blob over HTTPS.

The SAS is a user delegation SAS: Azure signs it with the login of the Azure CLI, so no account key is used. The login
needs the role "Storage Blob Data Contributor" on the storage account. The URL is a secret until the SAS expires.

  --hours HOURS   the SAS expires after this time, 1 to 168 hours [24]
  --dry-run       print the command, and do not run it
  --help          print this help
END
}

fail() {
  printf 'sas.sh: %s Run sas.sh --help.\n' "$1" >&2
  exit 2
}

hours=24 dry_run=
while [ $# -gt 0 ]; do
  case $1 in
    --hours)
      [ $# -ge 2 ] || fail '--hours needs a value.'
      hours=$2
      shift
      ;;
    --dry-run) dry_run=1 ;;
    --help)
      usage
      exit
      ;;
    -*) fail "Unknown option $1." ;;
    *) break ;;
  esac
  shift
done
[ $# -eq 3 ] || fail 'Enter ACCOUNT, CONTAINER, and BLOB.'
case $hours in
  '' | *[!0-9]* | ????*) fail "--hours must be a number from 1 to 168, not $hours." ;;
esac
# Azure limits a user delegation SAS to seven days.
{ [ "$hours" -ge 1 ] && [ "$hours" -le 168 ]; } || fail "--hours must be a number from 1 to 168, not $hours."

seconds=$(($(date +%s) + hours * 3600))
# GNU and BusyBox support -d, and macOS supports -r.
expiry=$(date -u -d "@$seconds" +%Y-%m-%dT%H:%MZ 2>/dev/null || date -u -r "$seconds" +%Y-%m-%dT%H:%MZ)

set -- az storage blob generate-sas --auth-mode login --as-user --account-name "$1" --container-name "$2" --name "$3" \
  --permissions r --https-only --expiry "$expiry" --full-uri --output tsv
if [ -n "$dry_run" ]; then
  printf '%s\n' "$*"
else
  exec "$@"
fi
