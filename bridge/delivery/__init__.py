"""The delivery engine: one worker for each sink sends the pending records of this sink."""
