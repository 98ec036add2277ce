"""The pure core: a document, what changed between two documents, and the record of a change.

Nothing here reads a clock, a file or a socket: values go in and values come out, so every rule of the transition table
can be tested by a call. Public: `event` (ScheduledEvent, Document, VmIdentity), `record` (TransitionRecord, ids, JSON
schema), `diff` (diff, DiffContext, Change), `tracker` (DocumentTracker, Update), `environment` (environment_of).
"""
