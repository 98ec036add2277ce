"""The sinks that are part of this project.

The agent loads the built-in sinks through entry points, like sinks from other projects. Each sink is a module or
package with the name of the sink, and the package `http` contains code that HTTP sinks share. From the agent, sinks
import only the module `bridge.sink`.
"""
