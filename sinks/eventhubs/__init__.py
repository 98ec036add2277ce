"""The `eventhubs` sink. The public modules are `sink` and `config`."""
