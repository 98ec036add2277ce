"""A simulated Instance Metadata Service: its world of events, its answers over HTTP, its scenarios and its faults.

It is the other side of the wire and shares no parser of documents with the agent, so that neither hides the other's
mistakes. What a test needs of it, `bridge.testing` names.
"""
