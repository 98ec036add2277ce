"""The project's own sinks: a module or a package each, loaded by entry point like third-party sinks.

`stdout`, `command` and `apprise` are one module; `webhook`, `eventhubs` and `otlp` are packages with a module `sink`.
`http` is what the sinks over HTTP share; `sentence` and `cloudevent` are forms of a record that several sinks send.
Nothing here imports more of the agent than `bridge.sink`.
"""
