"""The reference ops portal: it shows the fleet's maintenance, takes decisions, and hands them to the agents.

It is a server of its own, with libraries of its own (the extra `portal`, Python 3.11 or newer). No file of the agent
imports it. It takes records and answers long polls as `bridge/approval/PROTOCOL.md` says, so it is one portal of many.

Public: `command`, what `scheduled-events-bridge portal` does. `fleet` is pure; only `store` knows SQL.
"""
