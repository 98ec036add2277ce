"""Sends pending records to the sinks, with one worker for each sink."""
