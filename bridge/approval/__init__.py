"""Approvals: what may tell Azure to start an event early, and everything that must hold before the agent does.

An approval is consent for every VM that the event names, and a missing one only means that Azure waits until
NotBefore. So whatever is doubtful is not approved, and every attempt leaves a record. PROTOCOL.md, beside this file,
is the other side's half of the contract.
"""
