"""The agent as a whole: start, reload, stop, and the control socket.

Public: `agent` (Agent), `control_socket` (ControlClient), `control_requests` (the functions that commands call).
"""
