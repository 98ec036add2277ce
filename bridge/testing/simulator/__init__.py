"""Simulates the Azure Instance Metadata Service (IMDS) with events and faults.

The simulator does not use the agent's document parser. Otherwise, a bug in the parser could hide a bug in the
simulator. Import the public names from `bridge.testing`.
"""
