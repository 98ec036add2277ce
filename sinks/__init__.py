"""Contains the built-in sinks.

The agent loads the built-in sinks through entry points, like third-party sinks. Each sink is a module or package named
after its sink type, and the `http` package contains code that HTTP sinks share. Sinks import only one module of the
agent, `bridge.sink`.
"""
