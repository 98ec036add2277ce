"""Approves events early, based on signed decisions and local rules.

Once an event is approved, Azure can start it before NotBefore, on every VM that the event names. If the agent has any
doubt, it therefore does not approve the event. It writes a record for each attempt.

A decision from the portal passes through these modules, which follow PROTOCOL.md:

1. `portal_poller` and `portal_client` receive the decision's token.
2. `inbox` and `decision_token` verify the token, and store the decision in the outbox. `refusal_reasons` lists the
   reasons for which a token is refused.
3. `approver` reads the outbox, and calls `evaluate` and `rules`. These modules follow `holds` and `two_person_rule`.
4. `submit` sends StartRequests to Azure, and `recorder` writes the outcome.

Other packages import these modules:

- The agent imports `service`.
- Commands import `digest`, `signing`, `files`, `portal_client`, and `credentials`.
- Portals import `decision_token` and `refusal_reasons`.
"""
