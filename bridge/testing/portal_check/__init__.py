"""The conformance kit, which tests whether an ops portal follows PROTOCOL.md.

The kit sends the same requests as an agent and reports violations. `check.check_portal` runs all checks, `requirements`
lists the requirements, and `report` collects the results. The kit does not change anything on the VM.
"""
