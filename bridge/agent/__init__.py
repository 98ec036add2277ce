"""The complete agent: its start, reload, and stop, its heartbeats, and the control socket.

The public modules are `agent` (Agent), `control_socket` (ControlClient), and `control_requests` (the functions that
commands call).
"""
