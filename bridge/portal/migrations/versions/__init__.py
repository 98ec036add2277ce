"""The migration steps. Never change a released step."""
