"""Simulates the Azure Instance Metadata Service (IMDS) with events, HTTP responses, scenarios, and faults.

The simulator does not use the agent's document parser, because an error in the parser could hide an error in the
simulator. Import the public names from `bridge.testing`.
"""
