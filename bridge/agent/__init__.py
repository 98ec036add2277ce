"""Runs the agent process: startup, reload, shutdown, heartbeats, and the control socket.

Other packages import `Agent` from `agent`, `ControlClient` from `control_socket`, and the request functions from
`control_requests`.
"""
