"""The Scheduled Events Bridge: Azure's maintenance notices as durable transition records."""
