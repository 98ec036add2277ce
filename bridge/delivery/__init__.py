"""The engine that delivers: one worker a sink, retries, batches, and what became of each record.

Public: `pool` (WorkerPool), `router` (Router), `sender` (Sender).
"""
