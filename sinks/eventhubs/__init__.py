"""The sink `eventhubs`. The public modules are `sink` and `config`."""
