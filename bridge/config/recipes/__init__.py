"""Configurations of one sink each, as `init` writes them and as the recipes of the documentation show them."""
