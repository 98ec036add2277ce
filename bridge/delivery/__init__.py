"""The engine that sends: one worker a sink, retries, batches, and what becomes of each record.

Public: `pool` (WorkerPool), `router` (Router), `sender` (Sender).
"""
