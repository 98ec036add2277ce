"""The settings of a systemd unit file, as they stand."""


def settings_of(unit):
    """Return each key of a unit with the list of its values, whatever its section."""
    found = {}
    for line in unit.read_text().splitlines():
        key, equals, value = line.partition("=")
        if equals and not line.startswith("#"):
            found.setdefault(key, []).append(value)
    return found
