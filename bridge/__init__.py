"""Forwards Azure scheduled events as durable transition records."""
