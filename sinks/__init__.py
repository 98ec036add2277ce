"""The sinks that are part of this project.

The built-in sinks are loaded through entry points, like third-party sinks. Each sink is a module or package of the same
name, and the `http` package contains code that HTTP sinks share. The only module of the agent that sinks import is
`bridge.sink`.
"""
