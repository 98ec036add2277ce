"""The sink `webhook`. The public modules are `sink` and `config`."""
