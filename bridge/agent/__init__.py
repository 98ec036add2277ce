"""The agent as a whole: started, reloaded and stopped in an order that has reasons.

Public: `agent` (Agent).
"""
