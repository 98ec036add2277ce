"""The conformance kit for ops portals. It sends the requests of an agent and reports violations of PROTOCOL.md.

`check.check_portal` runs all checks. `requirements` lists the requirements, and `report` collects the results. The kit
works with every portal that follows PROTOCOL.md, and it changes nothing on the VM.
"""
