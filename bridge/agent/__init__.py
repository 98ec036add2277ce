"""Starts, reloads, and stops the agent, adds its heartbeats, and opens its control socket.

Other packages import `Agent` from `agent`, `ControlClient` from `control_socket`, and the request functions from
`control_requests`.
"""
