"""The `webhook` sink. The public modules are `sink` and `config`."""
