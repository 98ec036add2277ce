"""The project's own sinks: a module or a package each, reached by entry point like those of anybody else.

`stdout`, `command` and `apprise` are one module; `webhook`, `eventhubs` and `otlp` are packages with a module `sink`.
`http` is what the sinks over HTTP share; `sentence` and `cloudevent` are forms of a record that several sinks send.
Nothing here imports more of the agent than `bridge.sink`.
"""
