"""Simulates the Azure Instance Metadata Service (IMDS) with events and faults.

Import the public names from `bridge.testing`. The simulator does not use the agent's document parser, because a bug in
that parser could then hide a bug in the simulator.
"""
