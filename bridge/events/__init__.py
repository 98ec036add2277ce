"""The pure core: a document, what changed between two documents, and the record of a change.

Nothing here reads a clock, a file or a socket: values go in and values come out, so every rule of the transition table
can be tested by a call. Public: `event` (ScheduledEvent, Document, VmIdentity), `record` (TransitionRecord, ids, JSON
schema), `stream` (stream ids), `diff` (Change, is_over), `tracker` (DocumentTracker, EventHistory, Update), and
`environment` (environment_of).
"""
