"""The sink `webhook`: records by HTTP POST, as CloudEvents, alerts or any JSON."""
