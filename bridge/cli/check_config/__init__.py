"""`check-config`: the report of a configuration, the checks on this machine, and the checks of the destinations.

Public: `report`.
"""
