"""Contains the built-in sinks.

Like third-party sinks, the built-in sinks are loaded through entry points. Each sink is a module or package with the
name of its sink type. The package `http` contains code that several sinks share. Sinks import only one module of the
agent, `bridge.sink`.
"""
