"""Approvals: decisions and rules that allow Azure to start an event early, and the checks before each request.

An approval is consent for every VM that the event names. Without an approval, Azure waits until NotBefore. The agent
therefore approves nothing that is in doubt, and each attempt leaves a record. PROTOCOL.md in this directory describes
the requests of an ops portal.

Public: `service.ApprovalService` for the agent; `digest.digest`, `signing.sign_decision`, `signing.generate_key`, and
`files.unsafe_files` for commands; `portal_client.PortalClient` and `credentials.SecretCredential` for `check-config`;
`decision_token.verify` for a portal. The path of a decision is `portal_poller` -> `inbox` -> `decision_token` ->
outbox. `approver` reads the outbox, calls `evaluate` and `rules`, writes the outbox, and posts with `submit`.
"""
