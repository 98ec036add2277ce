"""The pure core: a document, the changes between two documents, and the record of a change.

The modules read no clock, no file, and no socket, so a test can call every rule directly. Public: `event`
(ScheduledEvent, Document, VmIdentity), `record` (TransitionRecord, ids, JSON schema), `stream` (stream ids), `diff`
(Change, is_over), `tracker` (DocumentTracker, EventHistory, Update), and `environment` (environment_of).
"""
