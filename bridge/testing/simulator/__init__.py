"""A simulated Azure Instance Metadata Service (IMDS): events, HTTP responses, scenarios, and faults.

The simulator does not use the agent's document parser. Otherwise, a mistake in the parser could hide a mistake in the
simulator. Tests import the public names from `bridge.testing`.
"""
