"""The conformance kit for ops portals: plays the agent's side of PROTOCOL.md and says which sentence is not met.

`requirements` has the sentences, `request` makes the requests, `polls`, `decisions` and `records` try them, `report`
keeps what was found, and `check.check_portal` does all of it. It needs no portal of ours, and nothing on the VM.
"""
