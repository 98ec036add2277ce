"""Lets signed decisions and local rules approve an event, so that Azure can start the event early.

An approval is consent for every VM that the event names. Without an approval, Azure waits until NotBefore. The agent
therefore approves nothing that is in doubt, and each attempt leaves a record. PROTOCOL.md in this directory describes
the requests of an ops portal.

A decision of the portal passes through these modules:

1. `portal_poller` and `portal_client` receive the token of the decision.
2. `inbox` and `decision_token` verify the token, and store the decision in the outbox. `refusal_reasons` lists the
   reasons for which a token is refused.
3. `approver` reads the outbox, and calls `evaluate` and `rules`. These modules follow `holds` and `two_person_rule`.
4. `submit` sends StartRequests to Azure, and `recorder` writes the outcome.

Other packages use these modules: `service` (the agent), `digest`, `signing`, `files`, `portal_client`, and
`credentials` (the commands), and `decision_token` and `refusal_reasons` (portals).
"""
