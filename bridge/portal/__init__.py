"""The web portal where people approve or hold the events that agents report.

The portal is a separate server and requires the `portal` extra. The agent never imports this package.

Public modules: `command`, `settings`, `serve`, `users`, and `store`.
"""
