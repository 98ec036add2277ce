"""The agent as a whole: start, reload, stop, and the control socket.

Public: `agent` (Agent), `control` (ControlClient), `requests`, `handlers` (requests without an agent).
"""
