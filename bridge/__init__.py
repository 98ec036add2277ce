"""The Scheduled Events Bridge forwards Azure scheduled events as durable transition records."""
