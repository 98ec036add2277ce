"""The engine that delivers records: one worker for each sink, with batches, retries, and results.

Public: `pool` (WorkerPool), `router` (Router), `sender` (Sender).
"""
