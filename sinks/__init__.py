"""The sinks that are part of this project.

The agent loads these sinks by their entry points, in the same way as sinks of other projects. Each sink is a module or
a package of the same name. The package `http` contains the code that the HTTP sinks share. From the agent, a sink
imports only the module `bridge.sink`.
"""
