"""Events, the transitions between two documents, and the record of a transition. All functions are pure.

The modules read no clock, no file, and no socket, so tests can call each rule directly. The public modules are `event`
(ScheduledEvent, Document, VmIdentity), `record` (TransitionRecord, the IDs, and the JSON schema), `stream` (stream
IDs), `transitions` (Change, is_over), `tracker` (DocumentTracker, EventHistory, Update), and `environment`
(environment_of).
"""
