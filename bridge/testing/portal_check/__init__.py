"""Tests whether an ops portal follows PROTOCOL.md. These modules are called the conformance kit.

The kit sends the same requests as an agent and reports violations. `check.check_portal` runs all checks, `requirements`
lists the requirements, and `report` collects the results. The kit changes nothing on the VM.
"""
