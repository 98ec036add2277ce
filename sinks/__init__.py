"""The project's own sinks, loaded by entry point like third-party sinks.

`stdout`, `file`, `eventlog`, `command`, and `apprise` are modules. `webhook`, `eventhubs`, and `otlp` are packages with
a module `sink`. The sinks share `http`, `blocking` (calls that may hang), `sentence`, and `cloudevent` (two forms of a
record). A sink imports only `bridge.sink` from the agent.
"""
